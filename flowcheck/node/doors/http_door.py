"""The HTTP API until somebody has shown a key, and after that: what lies between its listening socket and uvicorn.

    door = Door(loop, factory, listener, context, Limits(connections=256, strangers=1024, per_address=256))
    door.close();  await door.wait_closed()         as of asyncio's servers
    visitor = Visitor.of(scope)                     of a request: the connection that it came over

uvicorn counts whoever is connected, and turns away everybody when there are too many. Here a connection is a stranger
until it has shown a key (`known`), also while it shakes hands, and strangers take no place of those that have. Those
have `connections` places: where all are taken, the one that has waited longest without a request goes, and if all of
them are being answered the newcomer is asked to come again. /healthz and /metrics are answered all the same.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from flowcheck.node.doors.files import raise_limit, strangers_within
from flowcheck.node.doors.waiting_room import WaitingRoom

__all__ = ["AGAIN_SECONDS", "HANDSHAKE_SECONDS", "Door", "Limits", "Visitor"]

NAME = "flowcheck.visitor"  # of the extension in the scope
HANDSHAKE_SECONDS = 10.0
AGAIN_SECONDS = 0.1  # after nobody could be taken
AT_ONCE = 16  # new connections before those that are here are looked at: few, or they would push one out unheard
PASSING = (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED)


@dataclass(frozen=True)
class Limits:
    """connections: that have shown a key. strangers: that have not; per_address: of those."""

    connections: int = 256
    strangers: int = 1024
    per_address: int = 256


class Visitor:
    """One connection. busy(): is it being answered? abort: end it; None as long as it shakes hands."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self._door, self._socket = door, sock
        self.task: asyncio.Task[None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        self.abort: Callable[[], None] | None = None

    def offer(self, scope: MutableMapping[str, Any]) -> None:
        """Let who answers a request find it."""
        scope.setdefault("extensions", {})[NAME] = self

    @staticmethod
    def of(scope: MutableMapping[str, Any]) -> Visitor | None:
        found = scope.get("extensions", {}).get(NAME)
        return found if isinstance(found, Visitor) else None

    def known(self, always: bool) -> bool:
        """It has shown a key. False: no place is left for it, unless it is served `always`."""
        return self._door.known(self, always)

    def gone(self) -> None:
        self._door.gone(self)

    def end(self) -> None:
        if self.abort is not None:
            self.abort()
        elif self.task is not None:
            self.task.cancel()


class Door:
    """factory: of protocols with a `visitor`. context: None without TLS."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, factory: Callable[[], Any], listener: socket.socket,
        context: ssl.SSLContext | None, limits: Limits,
    ) -> None:
        self._loop, self._factory, self._listener, self._context = loop, factory, listener, context
        self._most = limits.connections
        strangers = strangers_within(raise_limit(), limits.strangers, limits.connections)
        self._strangers: WaitingRoom[Visitor] = WaitingRoom(strangers, limits.per_address, loop.time)
        self._known: dict[Visitor, None] = {}  # the one whose last request is the oldest comes first
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self.ended = 0  # strangers that had to go
        self.turned_away = 0  # with a key
        listener.setblocking(False)
        loop.add_reader(listener, self._take_in)

    def counts(self) -> dict[str, int]:
        return {"known": len(self._known), "strangers": len(self._strangers), "ended": self.ended,
                "turned_away": self.turned_away}

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- those that are here --

    def known(self, visitor: Visitor, always: bool) -> bool:
        if visitor not in self._known and len(self._known) >= self._most:
            idle = next((one for one in self._known if not one.busy()), None)
            if idle is not None:
                self._known.pop(idle)
                idle.end()
            elif not always:
                self.turned_away += 1
                return False
        self._strangers.leave(visitor)
        self._known.pop(visitor, None)
        self._known[visitor] = None
        return True

    def gone(self, visitor: Visitor) -> None:
        self._strangers.leave(visitor)
        self._known.pop(visitor, None)

    # -- those that come --

    def _take_in(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno not in PASSING:  # out of descriptors, or of memory
                    self._rest()
                return
            sock.setblocking(False)
            visitor = Visitor(self, sock)
            gone = self._strangers.enter(visitor, address[0])
            if gone is not None:
                self.ended += 1
                gone.end()
            visitor.task = self._loop.create_task(self._begin(visitor, sock))
            self._tasks.add(visitor.task)
            visitor.task.add_done_callback(self._tasks.discard)

    async def _begin(self, visitor: Visitor, sock: socket.socket) -> None:
        """Up to the end of the handshake; from then on the protocol has it."""
        def made() -> Any:
            protocol = self._factory()
            protocol.visitor = visitor
            return protocol

        seconds = HANDSHAKE_SECONDS if self._context is not None else None
        try:
            await self._loop.connect_accepted_socket(made, sock, ssl=self._context, ssl_handshake_timeout=seconds)
        except (Exception, asyncio.CancelledError):  # whatever one stranger does is his own matter
            self.gone(visitor)
            sock.close()

    def _rest(self) -> None:
        """Strangers go, the one that has been silent for longest first. Without any nobody comes for a moment: the
        listener would be there at once, and again."""
        gone = self._strangers.shrink()
        self.ended += len(gone)
        for one in gone:
            one.end()
        if not gone:
            self._loop.remove_reader(self._listener)
            self._again = self._loop.call_later(AGAIN_SECONDS, self._loop.add_reader, self._listener, self._take_in)
