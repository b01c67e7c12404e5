"""The process that answers a node's HTTP API: python -P -m flowcheck.node.api.worker, started by supervisor.py.

stdin: one line of JSON, its settings; then a line each time keys or certificate have changed; it ends when stdin does.
No DPDK, nothing of the capture: files, and what the node puts on its board.

A client has so long to ask, to take what it asked for, and to shake hands; the node's other readers get its place. Who
is let in at all, and who makes room for others: doors/http_door.py. stdout: signs of life, with how many are connected.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import COPY, DISK, JOURNAL, LOG, MEMORY, PARITY, STORE
from flowcheck.checkpoint.objects import open_store
from flowcheck.control.proof import Proven
from flowcheck.control.tls import client_context, server_context
from flowcheck.errors import FlowcheckError
from flowcheck.node.api.border import ApiSettings, OtherKeys
from flowcheck.node.api.routes import make_app
from flowcheck.node.api.sending import Offering
from flowcheck.node.doors.http_door import Door, Limits, Visitor
from flowcheck.node.process.child import begun, guarded, orders
from flowcheck.node.protect.parity_shelf import OTHERS_SECONDS, ParityShelf, Placed, StreamShelf
from flowcheck.node.status.board import Glance
from flowcheck.node.status.heartbeat import BEAT_SECONDS, beat, silent_output
from flowcheck.node.store.made import StoredSteps
from flowcheck.node.store.shelf import StoreShelf
from flowcheck.node.tokens import vouched
from flowcheck.node.versions.divergences import Notices
from flowcheck.node.versions.holdings import DiskShelf, MemoryShelf, Shelf
from flowcheck.node.versions.journal.log_shelf import LogShelf
from flowcheck.node.versions.journal.shelf import JournalShelf

__all__ = ["main", "serve", "server_of"]

ASK_SECONDS = 10.0  # for a whole request, from the connection or from the answer before it on
TAKE_SECONDS = 20.0  # for what the sender buffers, a megabyte or so
LOOK_SECONDS = 1.0
MOST_ASKED, MOST_LINES = 8 << 10, 128  # bytes and lines of a request: of a thousand, each line costs milliseconds


class _Requests(h11.Connection):
    """Nothing here is asked with a body. One is refused with its head: of tiny chunks it would be looked through for
    seconds, in which nobody else is heard."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and any(
                name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
                for name, value in event.headers):
            raise h11.RemoteProtocolError("a request with a body")
        return event


class _Client(Offering):
    """A connection that is cut when it asks, or takes what it asked for, too slowly: uvicorn itself waits for ever.
    visitor: what it is to the door that it came through."""

    visitor: Visitor

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Requests(h11.SERVER, MOST_ASKED)
        self._counted, self._came, self._lines = self.cycle, 0, 0
        visitor = self.visitor
        visitor.abort, visitor.busy = transport.abort, self._busy
        self._asking: float | None = self.loop.time()
        self._answered: object = None
        self._stuck: float | None = None
        self._timer = self.loop.call_later(LOOK_SECONDS, self._look)
        app = self.app

        async def refused(scope: Scope, receive: Receive, send: Send) -> None:
            visitor.offer(scope)
            try:
                await app(scope, receive, send)
            except h11.LocalProtocolError:  # bytes behind this request were none: that was answered meanwhile
                self._end()

        self.app = refused

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.cycle is not self._counted:
            self._counted, self._came, self._lines = self.cycle, 0, 0
        self._came += len(data)
        self._lines += data.count(b"\n")
        if self._came > MOST_ASKED or self._lines > MOST_LINES:
            self._end()
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # they are no request, and an answer to the one before is under way
            self._end()

    def _end(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # nothing more is said to it
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.visitor.gone()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stuck = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    def _look(self) -> None:
        now = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._asking = None
        elif self._asking is None or self.cycle is not self._answered:
            self._asking, self._answered = now, self.cycle
        late = self._asking is not None and now - self._asking > ASK_SECONDS
        if late or (self._stuck is not None and now - self._stuck > TAKE_SECONDS):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(LOOK_SECONDS, self._look)


class _Loop(asyncio.SelectorEventLoop):
    """What uvicorn listens with is a door."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self.door: Door | None = None

    async def create_server(  # type: ignore[override]
        self, factory: Any, *_: Any, sock: Any = None, ssl: Any = None, **__: Any
    ) -> Any:
        self.door = Door(self, factory, sock, ssl, self._limits)
        return self.door


class _Settings:
    """What may change: keys, and the certificate."""

    def __init__(self, said: ApiSettings) -> None:
        self.keys = said.keys
        self.shown = said.shown  # to other nodes
        self._files = said.tls
        self._context: ssl.SSLContext | None = None
        self._renew()

    def take(self, said: OtherKeys) -> None:
        self.keys, self.shown = said.keys, said.shown
        try:
            self._renew()
        except FlowcheckError:
            pass  # between two files of a pair: the node has read them, says what is wrong with them, and tells again

    def _renew(self) -> None:
        if self._files is not None:
            self._context = server_context(*self._files)

    def listening(self) -> Callable[..., ssl.SSLContext] | None:
        """What uvicorn calls once. Each connection then takes the newest context, in its handshake."""
        if self._files is None:
            return None
        context = server_context(*self._files)

        def newest(connection: Any, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._context

        context.sni_callback = newest
        return lambda *_: context


def main() -> int:
    """The process itself."""
    said = begun(ApiSettings)
    if said is None:
        return 0
    signs, settings = silent_output(), _Settings(said)
    shelves, streams = _shelves(said, settings)
    notices = Notices(said.replicas, said.node)
    for shelf in shelves.values():
        shelf.notices = notices
    glance = Glance(said.board) if said.board >= 0 else None
    server = server_of(make_app(shelves, lambda: settings.keys, glance, streams, notices, said.names),
                       settings.listening())
    threading.Thread(target=_follow, args=(server, settings), daemon=True).start()
    gc.collect()
    gc.freeze()  # what stays: it is not looked through each time
    serve(server, socket.socket(fileno=said.socket), said.limits, signs)
    os._exit(0)  # calls to a store that hang are not waited for


def _shelves(said: ApiSettings, settings: _Settings) -> tuple[dict[str, Shelf], StreamShelf | None]:
    """By tier, nearest first; and streams of parity, if it keeps any."""
    shelves: dict[str, Shelf] = {}
    needs, streams = said.shadow, None
    if said.follows:
        shelves[MEMORY] = MemoryShelf(said.replicas, said.node, reserved=said.reserved, needs=needs,
                                      vouch=lambda run_id, epoch: vouched(settings.keys, run_id, epoch))
    if said.copies is not None:
        shelves[COPY] = DiskShelf(said.copies, tier=COPY, needs=needs)
    if said.follows:
        shelves[DISK] = DiskShelf(said.checkpoints, needs=needs)
    if said.journals is not None:
        shelves[LOG] = LogShelf(said.journals, needs=needs)
    if (parity := said.parity) is not None:
        tls, others = client_context(parity.ca) if parity.ca else None, parity.others
        placed = Placed(parity.placement, said.node) if others is None else lambda: others
        shelves[PARITY] = ParityShelf(parity.directory, lambda: [
            NodeClient(address, Proven(settings.shown), OTHERS_SECONDS, tls) for address in placed()
        ], parity.most, needs=needs)
        streams = StreamShelf(parity.directory)
    if said.journals is not None:
        shelves[JOURNAL] = JournalShelf(said.journals, said.cores, needs=needs)
    if (store := said.store) is not None:
        shelves[STORE] = StoreShelf(store.url, lambda: open_store(store.url, store.options), needs=needs,
                                    steps=StoredSteps(store, said.made, said.cores))
    return shelves, streams


def server_of(app: ASGIApp, tls: Callable[..., ssl.SSLContext] | None = None) -> uvicorn.Server:
    """tls: called once, for the context."""
    return uvicorn.Server(uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="on", http=_Client,
        ws="none", timeout_keep_alive=5, timeout_graceful_shutdown=1, server_header=False, date_header=False,
        ssl_context_factory=tls,
    ))


def serve(server: uvicorn.Server, sock: socket.socket, limits: Limits, signs: int = -1) -> None:
    """Until `server.should_exit`. signs: a descriptor for signs of life, which come from the loop that answers."""
    with asyncio.Runner(loop_factory=partial(_Loop, limits)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, _Loop)
        if signs >= 0:
            loop.call_soon(_live, loop, signs)
        runner.run(server.serve(sockets=[sock]))


def _live(loop: _Loop, signs: int) -> None:
    beat(loop.door.counts() if loop.door is not None else {}, signs)
    loop.call_later(BEAT_SECONDS, _live, loop, signs)


def _follow(server: uvicorn.Server, settings: _Settings) -> None:
    for order in orders(OtherKeys):
        settings.take(order)
    server.should_exit = True


if __name__ == "__main__":
    sys.exit(guarded(main))
