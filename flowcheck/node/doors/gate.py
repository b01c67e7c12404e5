"""The control port until somebody has proved the token: one thread for all who have not.

    gate = Gate(listener, office, WaitingRoom(1024, 256))
    gate.run()          the port's thread; until `office.closed()`, which is asked when the listener is shut down

A stranger has a descriptor and some kilobytes here, and no thread: what he sends, in whatever pieces, is taken without
waiting for more, TLS's handshake too. He has OPENING_SECONDS for all of it. What has come is read before anybody new is
let in, so who answers at once is in before others can have taken his place. Who has proved the token goes to `office`
with his connection, and the gate has nothing more to do with it.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from typing import Protocol

from flowcheck.control.protocol import Hello, Link, MisfitError, Opening, RecordsError, Refused, frame, tls_reason
from flowcheck.control.tls import Secure
from flowcheck.node.doors.waiting_room import WaitingRoom

__all__ = ["AGAIN_SECONDS", "OPENING_SECONDS", "Gate", "Office"]

OPENING_SECONDS = 5.0
LOOK_SECONDS = 0.25  # between two looks for who is late
AGAIN_SECONDS = 0.1  # after nobody could be taken
AT_ONCE = 16  # new connections between two looks at those that are here: few, or they would push one out unheard
MOST_TLS = 64 << 10  # bytes of a handshake and of the opening inside
PIECE = 16 << 10
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Office(Protocol):
    """What the gate asks of the control port. The gate's thread."""

    def closed(self) -> bool: ...

    def tls(self) -> ssl.SSLContext | None:
        """For a connection that comes now."""

    def opening(self, peer: str) -> Opening: ...

    def full(self, hello: Hello, peer: str) -> str:
        """Why one more that is known cannot be served; "": it can."""

    def serve(self, link: Link, hello: Hello) -> None:
        """From now on it is served. Raises OSError, RuntimeError, MemoryError: it cannot be."""

    def stranger(self, peer: str, why: str) -> None:
        """Somebody who has proved nothing has ended, or was ended."""

    def misfit(self, peer: str, why: str) -> None:
        """Somebody who has proved the token, and cannot be served."""

    def trouble(self, why: str) -> None: ...


class _Stranger:
    """A connection, and how far its opening is. Raises RecordsError, which ends it."""

    def __init__(self, sock: socket.socket, address: tuple[str, int], office: Office) -> None:
        self.socket, self.host = sock, address[0]
        self.peer = f"{address[0]}:{address[1]}"
        context = office.tls()
        self.secure = Secure(sock, context) if context is not None else None
        self.opening = office.opening(self.peer)
        self._shaken, self._taken = self.secure is None, 0
        if self._shaken:
            self.send(self.opening.challenge)

    def send(self, data: bytes) -> None:
        """All of it at once: whoever takes nothing has a window of some kilobytes anyway."""
        if self.secure is not None and self._shaken:
            data = self.secure.encrypted(memoryview(data))[1]
        try:
            if data and self.socket.send(data) != len(data):
                raise RecordsError("too slow: it does not take what is sent", where=self.peer)
        except OSError as error:
            raise RecordsError(f"connection lost: {error.strerror or error}", where=self.peer) from None

    def take(self) -> Hello | None:
        """What has come, and no more."""
        while True:
            data = self._read()
            if data is None:
                return None
            if not data:
                raise RecordsError("connection closed", where=self.peer)
            if (hello := self.opening.take(data)) is not None:
                return hello

    def _read(self) -> bytes | None:
        if self.secure is None:
            return self._receive(self.opening.wants)
        while True:
            if self._shaken:
                try:
                    if (data := self.secure.read(self.opening.wants)) is not None:
                        return data
                except ssl.SSLError as error:
                    raise RecordsError(f"connection lost: {tls_reason(error)}", where=self.peer) from None
            raw = self._receive(PIECE)
            if raw is None:
                return None
            self._taken += len(raw)
            if self._taken > MOST_TLS:
                raise RecordsError("a handshake without an end", where=self.peer)
            self.secure.take(raw)
            if not self._shaken:
                self._shake(self.secure)

    def _shake(self, secure: Secure) -> None:
        try:
            done = secure.shake()
        except ssl.SSLError as error:
            with contextlib.suppress(RecordsError):
                self.send(secure.given())  # what TLS has against the other side
            raise RecordsError(f"no TLS: {tls_reason(error)}", where=self.peer) from None
        self.send(secure.given())
        if done:
            self._shaken = True
            self.send(self.opening.challenge)

    def _receive(self, size: int) -> bytes | None:
        try:
            return self.socket.recv(size)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise RecordsError(f"connection lost: {error.strerror or error}", where=self.peer) from None

    @property
    def lacks(self) -> str:
        """Why it is ended when its time is over."""
        if not self._shaken:
            return "no TLS came: does the other side speak it?"
        return self.opening.lacks

    def part(self, why: str) -> None:
        if self._shaken:
            with contextlib.suppress(RecordsError):
                self.send(frame(Refused(why)))


class Gate:
    """listener: takes no connection but here. room: for strangers."""

    def __init__(
        self, listener: socket.socket, office: Office, room: WaitingRoom[_Stranger],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._office, self._room, self._now = listener, office, room, now
        self._looks = selectors.DefaultSelector()
        self._asleep = 0.0  # until then nobody new is taken

    @property
    def strangers(self) -> int:
        return len(self._room)

    def run(self) -> None:
        self._listener.setblocking(False)
        self._looks.register(self._listener, selectors.EVENT_READ)
        swept = self._now()
        try:
            while not self._office.closed():
                for key, _ in self._looks.select(LOOK_SECONDS):
                    if key.data is not None and key.data in self._room:
                        self._hear(key.data)
                self._take_in()
                if self._now() - swept >= LOOK_SECONDS:
                    swept = self._now()
                    for one in self._room.late(OPENING_SECONDS):
                        self._refuse(one, one.lacks)
        finally:
            for one in self._room.late(-1.0):
                self._drop(one)
            self._looks.close()

    # -- those that are here --

    def _hear(self, one: _Stranger) -> None:
        try:
            hello = one.take()
        except MisfitError as error:
            self._drop(one, error.what)
            self._office.misfit(one.peer, error.what)
        except RecordsError as error:
            self._refuse(one, error.what, error.remedy)
        except Exception as error:  # whatever one has sent: the others go on, and new ones come in
            self._drop(one)
            self._unserved(error)
        else:
            if hello is not None:
                self._admit(one, hello)

    def _refuse(self, one: _Stranger, why: str, remedy: str = "") -> None:
        """remedy: for who has come, and not for who reads the node's events."""
        self._drop(one, f"{why}; remedy: {remedy}" if remedy else why)
        self._office.stranger(one.peer, why)

    def _drop(self, one: _Stranger, why: str = "") -> None:
        """why: sent to it, if it can take a word just now."""
        if self._leave(one):
            if why:
                one.part(why)
            one.socket.close()

    def _leave(self, one: _Stranger) -> bool:
        if not self._room.leave(one):
            return False
        self._looks.unregister(one.socket)
        return True

    def _admit(self, one: _Stranger, hello: Hello) -> None:
        if why := self._office.full(hello, one.peer):
            self._drop(one, why)
            return
        try:
            one.send(one.opening.welcome)
        except RecordsError as error:
            self._refuse(one, error.what)
            return
        self._leave(one)
        try:
            one.socket.setblocking(True)
            link = self._link(one)
        except (OSError, RuntimeError, MemoryError) as error:
            one.socket.close()
            self._unserved(error)
            return
        try:
            self._office.serve(link, hello)
        except (OSError, RuntimeError, MemoryError) as error:
            link.close()
            self._unserved(error)

    def _unserved(self, error: Exception) -> None:
        why = str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__} {error}"
        self._office.trouble(f"a connection to the control port cannot be served: {why}")

    def _link(self, one: _Stranger) -> Link:
        """It takes a descriptor more, which a stranger gives up if none is left."""
        try:
            return Link(one.socket, one.secure)
        except OSError as error:
            if error.errno not in NO_ROOM or not self._make_room():
                raise
        return Link(one.socket, one.secure)

    # -- those that come --

    def _make_room(self) -> bool:
        """The oldest strangers go. False: there are none."""
        gone = self._room.shrink()
        for one in gone:
            self._push_out(one, "it had said nothing, and its descriptor was needed")
        return bool(gone)

    def _push_out(self, one: _Stranger, why: str) -> None:
        """It has lost its place."""
        self._looks.unregister(one.socket)
        one.socket.close()
        self._office.stranger(one.peer, why)

    def _take_in(self) -> None:
        if self._asleep:
            if self._now() < self._asleep:
                return
            self._asleep = 0.0
            self._looks.register(self._listener, selectors.EVENT_READ)
        for _ in range(AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._office.closed():
                    return
                self._office.trouble(f"the control port takes nobody: {error.strerror or error}")
                if error.errno in NO_ROOM and self._make_room():
                    return
                self._sleep()
                return
            self._enter(sock, address)

    def _sleep(self) -> None:
        """Not a look at the listener for a moment: it would be there at once, and again."""
        self._looks.unregister(self._listener)
        self._asleep = self._now() + AGAIN_SECONDS

    def _enter(self, sock: socket.socket, address: tuple[str, int]) -> None:
        try:
            sock.setblocking(False)
            one = _Stranger(sock, address, self._office)
        except RecordsError as error:
            sock.close()
            self._office.stranger(f"{address[0]}:{address[1]}", error.what)
            return
        except Exception as error:  # the machine's, or a certificate that was replaced by none
            sock.close()
            self._unserved(error)
            return
        gone = self._room.enter(one, one.host)
        if gone is not None:
            self._push_out(gone, "it had said nothing, and others came")
        self._looks.register(sock, selectors.EVENT_READ, one)
