"""Bytes of tensors from memory into a connection, without a copy on the way: an ASGI extension, and a response for it.

    class Client(Offering, H11Protocol): ...       the server's side: connections that are not encrypted offer it
    return FromMemory(views, ...)                  the application's: views() yields memory, a piece at a time

asyncio's transport keeps what the socket does not take at once in a buffer of its own, h11 joins what it frames, and
both copy: with the thread that reads ahead, three copies of what goes from memory to memory. Here a piece is written as
it lies, and the next is asked for when the kernel has taken all of it. The event loop's thread does it, so a piece must
be in memory. Of a connection that the transport has closed, this holds a descriptor of its own: its number cannot be
another connection's by then.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["NAME", "FromMemory", "Offering"]

NAME = "flowcheck.send"  # the extension
PIECE_SECONDS = 10.0  # that a client may take for a piece: a version is held longer than that without being read
AT_ONCE = 1 << 20  # bytes in one call, for which other connections wait
FLUSH_SECONDS = 0.001
Direct = Callable[[Sequence[memoryview]], Awaitable[None]]


class Offering(H11Protocol):
    """Adds the extension to the scope of each request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")  # asyncio sets it only on sockets that say which protocol they are of
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are two writes
        if transport.get_extra_info("sslcontext") is None:
            app = self.app

            async def offered(scope: Scope, receive: Receive, send: Send) -> None:
                scope.setdefault("extensions", {})[NAME] = self._direct
                await app(scope, receive, send)

            self.app = offered

    async def _direct(self, views: Sequence[memoryview]) -> None:
        """Raises OSError, also TimeoutError, where the client is gone or too slow. Its connection has ended then."""
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                await self._write_all(views)
        except OSError:
            self.cycle.disconnected = True  # nothing more is said to it
            self.transport.abort()
            raise

    async def _write_all(self, views: Sequence[memoryview]) -> None:
        while self.transport.get_write_buffer_size():  # headers, and what may be left of an answer before
            await asyncio.sleep(FLUSH_SECONDS)
        if self.transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        for view in views:
            self.conn.send_with_data_passthrough(h11.Data(data=view))  # type: ignore[arg-type]  # it counts them
        file = os.dup(self.transport.get_extra_info("socket").fileno())
        try:
            for view in views:
                await _write(self.loop, file, view)
        finally:
            os.close(file)


async def _write(loop: asyncio.AbstractEventLoop, file: int, view: memoryview) -> None:
    while view:
        asked = min(len(view), AT_ONCE)
        try:
            taken = os.write(file, view[:asked])
        except BlockingIOError:
            taken = 0
        view = view[taken:]
        if taken == asked:
            await asyncio.sleep(0)  # others want to be served, too
            continue
        writable = loop.create_future()
        loop.add_writer(file, _ready, writable)
        try:
            await writable
        finally:
            loop.remove_writer(file)


def _ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FromMemory(Response):
    """pieces(): memory, in order; together as much as the Content-Length of `headers` says."""

    def __init__(
        self, pieces: Callable[[], AsyncIterator[Sequence[memoryview]]], status_code: int, headers: Mapping[str, str],
        media_type: str,
    ) -> None:
        self._pieces = pieces
        self.status_code, self.media_type, self.background = status_code, media_type, None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        direct: Direct | None = scope.get("extensions", {}).get(NAME)
        if scope["method"] != "HEAD":
            try:
                async for views in self._pieces():
                    if direct is not None:
                        await direct(views)
                    else:
                        await send({"type": "http.response.body", "body": b"".join(views), "more_body": True})
            except OSError:
                return  # the client is gone, or takes nothing
        await send({"type": "http.response.body", "body": b"", "more_body": False})
