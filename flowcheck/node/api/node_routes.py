"""Routes of the HTTP API about the node itself, answered from what it has put on its board (status/board_writer.py).

    GET /metrics        Prometheus' form, or OpenMetrics for who asks for it (status/metrics.py)
    GET /v1/node        the document; to `Accept: text/event-stream` again and again, as server-sent events
    GET /               a page for people: operate/status.html, which draws what /v1/node says

The node is asked for nothing: the board is memory that both processes have.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flowcheck.node.status.board import Glance
from flowcheck.node.status.metrics import exposition

__all__ = ["PAGE", "PATHS", "NodeRoutes"]

PAGE = "/"
PATHS = (PAGE, "/metrics", "/v1/node")
STREAM = "text/event-stream"
VIEWERS = 16  # streams at once
EVERY_SECONDS = 1.0  # between two events of a stream
SEND_SECONDS = 10.0  # that a viewer may take for one of them
_UNSAID = {"why": "the node has said nothing so far"}


class NodeRoutes:
    """glance: at the node's board; None: it has none."""

    def __init__(self, glance: Glance | None) -> None:
        self._glance = glance
        self._viewers = 0
        text = files("flowcheck.node").joinpath("operate/status.html").read_text(encoding="utf-8")
        self._page = Response(text, media_type="text/html", headers={
            "Content-Security-Policy": _policy(text), "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
        })
        handlers = self._show, self._metrics, self._node
        self.routes = [Route(path, handler) for path, handler in zip(PATHS, handlers, strict=True)]

    def _read(self) -> bytes:
        return self._glance.read() if self._glance is not None else b""

    async def _show(self, request: Request) -> Response:
        return self._page

    async def _metrics(self, request: Request) -> Response:
        text = self._read()
        if not text:
            return JSONResponse(_UNSAID, 503, {"Retry-After": "1"})
        told, kind = await asyncio.to_thread(lambda: exposition(json.loads(text), request.headers.get("accept", "")))
        return Response(told, headers={"Content-Type": kind})

    async def _node(self, request: Request) -> Response:
        if request.method == "GET" and STREAM in request.headers.get("accept", ""):
            if self._viewers >= VIEWERS:
                why = f"{VIEWERS} viewers are watching, and no more may"
                return JSONResponse({"why": why}, 503, {"Retry-After": "5"})
            return _Stream(self._events)
        text = self._read()
        if not text:
            return JSONResponse(_UNSAID, 503, {"Retry-After": "1"})
        return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _events(self, send: Callable[[bytes], Awaitable[None]], gone: asyncio.Future[None]) -> None:
        """What is new, until the viewer goes or is too slow."""
        self._viewers += 1
        count = -1
        try:
            while not gone.done():
                newest = self._glance.count if self._glance is not None else 0
                text = self._read() if newest != count else b""
                await asyncio.wait_for(send(b"data: %s\n\n" % text if text else b":\n\n"), SEND_SECONDS)
                count = newest
                await asyncio.wait([gone], timeout=EVERY_SECONDS)
        except TimeoutError:
            pass  # it does not read: the connection ends
        finally:
            self._viewers -= 1


class _Stream(Response):
    """Server-sent events. events(send, gone): sends until `gone` is done."""

    def __init__(self, events: Callable[[Callable[[bytes], Awaitable[None]], asyncio.Future[None]], Awaitable[None]],
                 ) -> None:
        super().__init__(media_type=STREAM, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone: asyncio.Future[None] = asyncio.ensure_future(_gone(receive))

        async def more(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._events(more, gone)
        finally:
            gone.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _policy(page: str) -> str:
    """Nothing but this page's own style and script runs or is fetched, and nobody may frame it."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self';"
            " base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
