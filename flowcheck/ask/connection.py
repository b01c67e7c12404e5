"""One connection to a node's API: requests that prove who asks, answers that have deadlines and bounds.

A connection that breaks is made again by the next request. Torch is not needed; the standard library (http.client).
"""

from __future__ import annotations

import hmac
import http.client
import io
import json
import socket
import ssl
import time
from typing import Any

from flowcheck.ask.pace import Pace
from flowcheck.ask.receiving import RATE, AskError
from flowcheck.ask.refusals import refusal
from flowcheck.control.link import MAGIC
from flowcheck.control.proof import PROOF, Proven, answered, authorization, nonce_in, place_of
from flowcheck.control.tensors import CHUNK

__all__ = ["Connection"]

MOST_TEXT = 256 << 20  # a manifest has some 150 bytes per tensor
MOST_HEAD = 1 << 20  # bytes of an answer until its body
ADDRESS = "HOST:PORT of a node's api.listen"


class Connection:
    """address: host and port of a node's API. key: of `reader_key`, or one that is proven (proof.py). seconds: that
    it may be silent. tls: None: not encrypted. pace: at which files are read; None: as they come.

    name: the node's, for errors. answered: it has ever answered, whatever it said. received: bytes of tensors. plain:
    the socket that the open answer comes over; None: encrypted.
    """

    def __init__(
        self, address: tuple[str, int], key: str, seconds: float, tls: ssl.SSLContext | None, pace: Pace | None,
    ) -> None:
        self.address, self.key, self.tls = address, key, tls
        self.seconds, self.pace, self._timeout = seconds, pace, seconds
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._paced: _Paced | None = None  # what that is read from
        self._mac = ""  # of the question that was asked last
        host, port = address
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.plain: socket.socket | None = None
        self.answered = False
        self.received = 0

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        """Let it go; may be called twice."""
        if self._response is not None:
            self._response.close()  # it may have the connection's socket for its own
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = self.plain = None

    def json(self, path: str) -> Any:
        """A whole answer. Raises AskError."""
        try:
            return json.loads(self.read(path, MOST_TEXT))
        except (ValueError, RecursionError):
            raise AskError("an answer that is not JSON", where=self.name) from None

    def read(self, path: str, most: int) -> bytearray:
        """A whole answer, of at most so many bytes."""
        try:
            response = self.open(path, most=most)
            text = bytearray()
            while piece := response.read(CHUNK):
                text += piece
                if len(text) > most:
                    raise AskError("an answer that is too long", where=self.name)
            if response.length:  # http.client says nothing of it where a part at a time is read
                raise ConnectionResetError("closed before its end")
            self._check(response, text)
            return text
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(error) from None
        finally:
            self.close()

    def open(self, path: str, first: int = 0, most: int = 0) -> http.client.HTTPResponse:
        """The answer to a request, from byte `first` on. most: bytes that it may have. Raises AskError for another
        status than is due; OSError and HTTPException."""
        self.close()
        connection = self._connection = self._connect()
        span = f"bytes={first}-" if first else ""
        headers = {"Accept-Encoding": "identity"} | ({"Range": span} if span else {})
        headers["Authorization"] = (self._prove(connection, path, span) if isinstance(self.key, Proven) else
                                    f"Bearer {self.key}")
        connection.request("GET", path, headers=headers)
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.plain = connection.sock if self.tls is None else None
        response = self._response = connection.getresponse()
        self.answered = True
        if response.status != (206 if first else 200):
            raise refusal(response, self.name, isinstance(self.key, Proven))
        assert self._paced is not None
        self._paced.room += 2 * most  # chunks have heads, too
        return response

    def _prove(self, connection: http.client.HTTPConnection, path: str, span: str) -> str:
        """What to say instead of a key, once the node has asked for it (proof.py). Raises as `open`."""
        key = self.key
        assert isinstance(key, Proven)
        connection.request("GET", path, headers={"Accept-Encoding": "identity"} | ({"Range": span} if span else {}))
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the next request follows at once
        response = connection.getresponse()
        self.answered = True
        if response.status != 401:
            if response.status == 200:
                raise AskError("gives what it has to everybody: no node of this release does", where=self.name)
            raise refusal(response, self.name)
        nonce = nonce_in(", ".join(response.headers.get_all("WWW-Authenticate") or ()))
        response.read(MOST_HEAD)
        if not nonce:
            raise AskError("asks for a key, and for no proof: it is of an earlier release", where=self.name)
        if connection.sock is None:  # it has ended the connection
            connection.connect()
        assert connection.sock is not None
        shown, self._mac = authorization(key.secret, "GET", path, span, nonce,
                                         place_of(connection.sock.getpeername()), self.name)
        return shown

    def _check(self, response: http.client.HTTPResponse, body: bytearray) -> None:
        """Is it the answer of somebody who knows the nodes' token? Raises AskError."""
        if not isinstance(self.key, Proven):
            return
        wanted = answered(self.key.secret, self._mac, response.status, body)
        if not hmac.compare_digest(wanted.encode(), (response.headers.get(PROOF) or "").encode()):
            raise AskError("does not prove that it knows the nodes' token (tokens.peer): it is not one of these nodes",
                           where=self.name)

    def _connect(self) -> http.client.HTTPConnection:
        connection: Any = (
            http.client.HTTPConnection(*self.address, timeout=self._timeout) if self.tls is None else
            http.client.HTTPSConnection(*self.address, timeout=self._timeout, context=self.tls))
        connection.response_class = self._answered
        taken: http.client.HTTPConnection = connection
        return taken

    def _answered(self, sock: socket.socket, **more: Any) -> http.client.HTTPResponse:
        self._paced = _Paced(sock, self._timeout)
        response: Any = http.client.HTTPResponse
        made: http.client.HTTPResponse = response(self._paced, **more)
        return made

    def lost(self, error: Exception) -> AskError:
        if isinstance(error, _TooLong):
            return AskError("an answer that is too long", where=self.name)
        if isinstance(error, _TooSlow):
            return AskError("an answer that is too slow", where=self.name)
        if isinstance(error, TimeoutError):
            return AskError(f"no answer within {self._timeout:g} s", where=self.name)
        if isinstance(error, ssl.SSLCertVerificationError):
            return AskError(f"the node's certificate is not trusted: {error.verify_message}", where=self.name,
                            remedy="ca=, --ca of a command: the authority that signed it")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
            control = str(error).startswith(MAGIC.decode())
            return AskError("this is a node's control port, for trainers: give the address of its api.listen"
                            if control else "what answers there speaks no HTTP", where=self.name, remedy=ADDRESS)
        return AskError(f"connection lost: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}",
                        where=self.name)


class _TooSlow(TimeoutError):
    pass


class _TooLong(OSError):
    pass


class _Paced(io.RawIOBase):
    """An answer as http.client reads it, head and body: who waits for it longer than twice `seconds`, and RATE for what
    has come, gets _TooSlow. Else one byte now and then would keep him for ever. And so would interim answers, chunks
    and trailers without end, which http.client reads as fast as they come: more than `room` is _TooLong."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock, self._seconds = sock, seconds
        self._raw = sock.makefile("rb", buffering=0)
        self._left = 2 * seconds
        self._begins = b""  # the answer
        self.room = MOST_HEAD  # bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks a socket for."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._left <= 0:
            raise _TooSlow
        if self.room <= 0:
            raise _TooLong
        self._sock.settimeout(min(self._seconds, self._left))
        began = time.monotonic()
        try:
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            if self._left < self._seconds:
                raise _TooSlow from None
            raise
        except ConnectionResetError:  # a control port has said who it is, and lets go of whoever speaks HTTP
            if self._begins != MAGIC:
                raise
            return 0
        if not self._begins:
            self._begins = bytes(buffer[:min(count or 0, len(MAGIC))])
        self._left += (count or 0) / RATE - (time.monotonic() - began)
        self.room -= count or 0
        return count

    def close(self) -> None:
        super().close()
        self._raw.close()
