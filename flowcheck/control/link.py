"""Frames between trainers, nodes and peers, with their limits and deadlines: what they may hold says messages.py.

    frame      magic 4 | JSON bytes 4 | payload bytes 8 | JSON object with "type" | payload (raw safetensors)

A Link is used by one reader and one writer thread at most; any thread may close it. Standard library.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from flowcheck.control.messages import MESSAGES, Refused
from flowcheck.control.tls import Secure
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.form import Place, build, parse

__all__ = ["HEAD_BYTES", "MAGIC", "Limits", "Link", "MisfitError", "RecordsError", "dumps", "frame", "lengths",
           "message_of", "tls_reason"]

MAGIC = b"FCR1"
_HEAD = struct.Struct(">4sIQ")
HEAD_BYTES = _HEAD.size
_STEP = 8 << 20  # of a payload taken at once
_TOGETHER = 64 << 10  # bytes of a frame that goes out in one piece
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON can write half of a character, which nothing can encode
dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_LONG = 1e6  # seconds; a socket without a timeout would be one for its writer too


class RecordsError(FlowcheckError):
    """The other side is gone, slow, not who it should be, or does not speak this protocol."""

    exit_code = 3


class MisfitError(RecordsError):
    """It knows the token, and says of itself what cannot be."""


@dataclass(frozen=True)
class Limits:
    """Largest frame that is read. text: bytes of JSON; payload: by message type, others carry none.
    seconds: for a whole frame once its first byte is here; rate: bytes per second that a payload must have."""

    text: int = 4096
    payload: dict[str, int] = field(default_factory=dict)
    seconds: float = 5.0
    rate: float = 1e6


def frame(message: Any, size: int = 0) -> bytes:
    """What goes out for a message, but for its payload of so many bytes. message: bytes where it is JSON already."""
    text = message
    if not isinstance(message, bytes):
        said = vars(message)
        if isinstance(message, Refused) and not message.final:
            said = {"why": message.why}  # what is new only where it is needed: earlier releases take no other field
        text = dumps({"type": type(message).__name__.lower(), **said}).encode()
    return _HEAD.pack(MAGIC, len(text), size) + text


class Link:
    """One connection: whole messages in and out, each within a deadline. secure: of the same socket, for TLS."""

    def __init__(self, sock: socket.socket, secure: Secure | None = None) -> None:
        self._secure, self._raw = secure, sock
        self._socket = secure or sock
        self._out = self._socket.dup()  # timeouts belong to the object, and the reader's is not the writer's
        self._quick: socket.socket | None = None  # the same once more, of one who does not wait
        self.ahead = 0  # bytes of what follows a message that may be read with it
        self._kept = bytearray()  # read so
        self.peer = _peer(sock)
        self.limits: Callable[[], Limits] = Limits  # asked anew for each message
        self.room: Callable[[int, int], None] = self.no_bound  # before a frame of so much text and payload is read
        self._lock = threading.Lock()
        self._users, self._over = 0, False  # threads within a call; closed

    @staticmethod
    def no_bound(length: int, size: int) -> None:
        """There is room for any message."""

    @property
    def secure(self) -> bool:
        return self._secure is not None

    @property
    def over(self) -> bool:
        """It was closed here."""
        return self._over

    def set_option(self, level: int, option: int, value: int) -> None:
        """Of the socket. Raises OSError."""
        self._raw.setsockopt(level, option, value)

    def begin(self) -> None:
        """TLS's handshake, where there is TLS: before anything else, and once. Raises RecordsError."""
        if self._secure is None:
            return
        try:
            with self._use():
                self._secure.handshake(self.limits().seconds)
        except TimeoutError:
            raise RecordsError("no TLS came: does the other side speak it?", where=self.peer) from None
        except OSError as error:
            raise RecordsError(f"no TLS: {tls_reason(error)}", where=self.peer) from None

    def send(self, message: Any, payload: Iterable[bytes | memoryview] = (), size: int = 0, *,
             seconds: float = 10.0) -> None:
        """size: of the payload. seconds: for all of it, and as long again per 10 MB."""
        deadline = time.monotonic() + seconds * (1 + size / 1e7)
        begin, sent = frame(message, size), 0
        with self._use():
            if size <= _TOGETHER:
                held = b"".join(payload)
                payload, sent = (), len(held)
                self._write(begin + held, deadline)
            else:
                self._write(begin, deadline)
            for piece in payload:
                sent += len(piece)
                self._write(piece, deadline)
        if sent != size:
            raise RecordsError(f"a payload of {sent} bytes was announced as {size}", where=self.peer)

    def send_now(self, pieces: Sequence[bytes]) -> int:
        """How many bytes of these went out, without waiting for anybody: the caller sends the rest, before anything
        else. With TLS none do. Raises RecordsError."""
        if self._secure is not None:
            return 0
        try:
            with self._use():
                if self._quick is None:
                    self._quick = self._raw.dup()
                    self._quick.settimeout(0)
                return self._quick.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RecordsError(f"connection lost: {error.strerror or error}", where=self.peer) from None

    def send_rest(self, data: bytes, *, seconds: float = 10.0) -> None:
        """What `send_now` has left."""
        with self._use():
            self._write(data, time.monotonic() + seconds)

    def receive(self, *, wait: float | None = None) -> tuple[Any, int]:
        """(message, bytes of the payload that follows: take them with `payload`).

        wait: seconds until the first byte, None for ever. Raises RecordsError; TimeoutError if nothing came in time.
        """
        with self._use():
            first = self._first(_LONG if wait is None else wait)
            limits = self.limits()
            deadline = time.monotonic() + limits.seconds
            length, size = lengths(first + self._read(HEAD_BYTES - 1, deadline), limits, self.peer)
            waits = time.monotonic()
            self.room(length, size)
            text = bytes(self._read(length, deadline + (time.monotonic() - waits)))
        message = message_of(text, self.peer)
        most = limits.payload.get(type(message).__name__.lower(), 0)
        if size > most:
            raise RecordsError(f"a payload of {size} bytes, at most {most} are read here", where=self.peer)
        return message, size

    def payload(self, size: int) -> bytearray:
        limits = self.limits()
        with self._use():
            return self._read(size, time.monotonic() + limits.seconds + size / limits.rate)

    def finish(self) -> None:
        """Nothing more is sent: the other side reads what was, and then the end. What it sends is read as before."""
        with self._lock:
            if not self._over:
                with suppress(OSError):  # it is gone
                    self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Idempotent, any thread; one that waits in a call gets RecordsError. The descriptors stay until it is out of
        it: it may be about to wait on that number, and the next connection may have got it by then. It would wait, and
        read, on somebody else's."""
        with self._lock:
            if self._over:
                return
            self._over = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._release()

    def no_more(self) -> None:
        """What has come by now can still be read; after that it is as if the other side had closed. Any thread."""
        with self._lock:
            if not self._over:
                with suppress(OSError):  # it is gone
                    self._raw.shutdown(socket.SHUT_RD)

    @contextmanager
    def _use(self) -> Iterator[None]:
        with self._lock:
            if self._over:
                raise RecordsError("connection closed", where=self.peer)
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._over and not self._users:
                self._release()

    def _release(self) -> None:
        self._socket.close()
        self._out.close()
        if self._quick is not None:
            self._quick.close()

    def _first(self, wait: float) -> bytes:
        if self._kept:
            return bytes(self._take(1))
        try:
            self._socket.settimeout(wait)
            first = self._socket.recv(max(self.ahead, 1))
        except TimeoutError:
            raise
        except OSError as error:
            raise RecordsError(f"connection lost: {error.strerror or error}", where=self.peer) from None
        if not first:
            raise RecordsError("connection closed", where=self.peer)
        self._kept += first
        return bytes(self._take(1))

    def _take(self, size: int) -> bytearray:
        """Of what was read before, at most so many bytes."""
        taken = self._kept[:size]
        del self._kept[:size]
        return taken

    def _read(self, size: int, deadline: float) -> bytearray:
        data = self._take(size)
        try:
            while len(data) < size:
                self._socket.settimeout(_left(deadline))
                piece = self._socket.recv(max(min(size - len(data), _STEP), self.ahead))
                if not piece:
                    raise RecordsError(f"connection closed within a message, {size - len(data)} bytes before its end",
                                       where=self.peer)
                more = size - len(data)
                if len(piece) > more:
                    self._kept += piece[more:]
                    piece = piece[:more]
                data += piece
        except TimeoutError:
            raise RecordsError(f"too slow: {size - len(data)} bytes of a message still missing", where=self.peer
                               ) from None
        except OSError as error:
            raise RecordsError(f"connection lost: {error.strerror or error}", where=self.peer) from None
        return data

    def _write(self, data: bytes | memoryview, deadline: float) -> None:
        view = memoryview(data)
        try:
            while view:
                self._out.settimeout(_left(deadline))
                view = view[self._out.send(view[:_STEP]) :]
        except TimeoutError:
            raise RecordsError("too slow: it does not take what is sent", where=self.peer) from None
        except OSError as error:
            raise RecordsError(f"connection lost: {error.strerror or error}", where=self.peer) from None


def lengths(head: bytes, limits: Limits, where: str) -> tuple[int, int]:
    """Bytes of text and of payload that a frame's first HEAD_BYTES announce. Raises RecordsError."""
    magic, length, size = _HEAD.unpack(head)
    if magic != MAGIC:
        raise RecordsError("does not speak this protocol", where=where)
    if length > limits.text:
        raise RecordsError(f"a message of {length} bytes, at most {limits.text} are read", where=where)
    return length, size


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def tls_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the node's certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        if error.reason == "WRONG_VERSION_NUMBER":
            return "the other side speaks without"
        return (error.reason or "closed").replace("_", " ").lower()
    return error.strerror or str(error)


def _peer(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return "somebody"
    return f"{host}:{port}"


def message_of(text: bytes, where: str) -> Any:
    """Raises RecordsError."""
    try:
        body = parse(text.decode(), where)
        if _HALF.search(text):
            json.dumps(body, ensure_ascii=False).encode()
        kind = MESSAGES.get(body.pop("type", None)) if isinstance(body, dict) else None
        if kind is None:
            raise RecordsError("not one of the messages of this protocol", where=where)
        return build(kind, body, Place(where))
    except (UnicodeError, RecursionError, TypeError, UserError) as error:
        raise RecordsError(f"not a message: {getattr(error, 'what', 'no UTF-8')}", where=where) from None
