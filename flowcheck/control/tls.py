"""TLS below the records protocol and the HTTP API: contexts of both sides, and a connection as a Link uses it.

    context = client_context("/etc/flowcheck/ca.pem")     or "system": the authorities that this machine trusts
    link = Link(sock, Secure(sock, context, "10.0.0.2"))  greet and accept shake hands before the opening

Python lets one thread read an SSLSocket while another writes only by luck: both would be in one OpenSSL object. So a
Secure keeps OpenSSL away from the socket: bytes go through memory under a lock, and nobody holds it while he waits for
the network. The reader's timeout is not the writer's, as with plain sockets. Standard library.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
import threading
import time
from pathlib import Path

from flowcheck.errors import UserError

__all__ = ["SYSTEM", "Secure", "client_context", "server_context"]

SYSTEM = "system"
_STEP = 256 << 10  # of a payload encrypted at once
_RAW = 64 << 10


def client_context(ca: str) -> ssl.SSLContext:
    """Of one that asks a node. ca: a file of certificates that are trusted, or "system". Raises UserError."""
    try:
        if ca != SYSTEM:
            _not_a_pipe(ca)
        return ssl.create_default_context(cafile=None if ca == SYSTEM else ca)
    except OSError as error:  # SSLError is one
        raise UserError(f"no certificates can be read there: {_reason(error)}", where=f"ca {ca}",
                        remedy='a PEM file of the authority that signed the nodes, or "system"') from None


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Of a node: TLS 1.3, nobody needs a certificate to come in. Raises UserError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes, and none has to be sent
    try:
        _not_a_pipe(cert, key)
        context.load_cert_chain(cert, key, password="")  # an empty one: OpenSSL would ask at the terminal
    except OSError as error:
        raise UserError(f"cannot be used: {_reason(error)}", where=f"tls.cert {cert}, tls.key {key}",
                        remedy="readable PEM files: a certificate with its chain, and its key without a password"
                        ) from None
    return context


def _not_a_pipe(*paths: str | Path) -> None:
    """Raises OSError: OpenSSL would wait for somebody who writes."""
    for path in paths:
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe, and no file")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").replace("_", " ").lower()
    return error.strerror or str(error)


class Secure:
    """name: the host that the certificate must be for; None: this is the node's side. Made before the handshake, so
    that whoever closes the socket ends that, too. One thread reads, and one writes with what `dup` gives."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str | None = None) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._lock = threading.Lock()  # of the three that OpenSSL has
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=name is None, server_hostname=name)
        self._timeout = 0.0

    def handshake(self, seconds: float) -> None:
        """Raises OSError: TimeoutError and ssl.SSLError among them."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError:
                self._flush(deadline)  # what it has against the other side
                raise
            self._flush(deadline)
            if done:
                return
            self._feed(deadline)

    # -- without the socket: for who must not wait --

    def take(self, data: bytes) -> None:
        """What has come; b"": the end."""
        with self._lock:
            self._incoming.write(data) if data else self._incoming.write_eof()

    def given(self) -> bytes:
        """What is to be sent by now."""
        with self._lock:
            return self._outgoing.read()

    def shake(self) -> bool:
        """As far as it goes: is the handshake over? Raises ssl.SSLError."""
        with self._lock:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
        return True

    def read(self, size: int) -> bytes | None:
        """None: nothing more is here. Raises ssl.SSLError."""
        with self._lock:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                return None
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    # -- with it --

    def settimeout(self, seconds: float) -> None:
        """Of a whole `recv`, however many packets it takes."""
        self._timeout = seconds

    def recv(self, size: int) -> bytes:
        """b"" at the end, also at one that was not announced: messages say how long they are."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                with self._lock:
                    return self._tls.read(size)
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            self._feed(deadline)

    def dup(self) -> _Writer:
        return _Writer(self, self._socket.dup())

    def encrypted(self, view: memoryview) -> tuple[int, bytes]:
        """How much of it was taken, and what is to be sent for that."""
        with self._lock:
            return self._tls.write(view[:_STEP]), self._outgoing.read()

    def _feed(self, deadline: float) -> None:
        self._socket.settimeout(_left(deadline))
        data = self._socket.recv(_RAW)
        with self._lock:
            self._incoming.write(data) if data else self._incoming.write_eof()

    def _flush(self, deadline: float) -> None:
        if data := self._outgoing.read():
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(data)

    def getpeername(self) -> tuple[str, int]:
        host, port = self._socket.getpeername()[:2]
        return host, port

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


class _Writer:
    def __init__(self, secure: Secure, sock: socket.socket) -> None:
        self._secure, self._socket = secure, sock

    def settimeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def send(self, view: memoryview) -> int:
        """All of what it says is on its way; an error leaves a connection that is of no use."""
        count, data = self._secure.encrypted(view)
        self._socket.sendall(data)  # within the timeout as a whole
        return count

    def close(self) -> None:
        self._socket.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
