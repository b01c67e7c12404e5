"""The node's HTTP API: what it holds, as manifests and as safetensors files in ranges. Who does not show a key gets
nothing but /healthz, and with one what its role may have (guard.py).

    GET /healthz                                   200: this process answers
    GET /openapi.json                              this, described
    GET /v1/status                                 newest version of each run, shard and tier; also of those that are
                                                   not offered yet, and why (versions/shadow.py)
    GET /v1/versions                               every version that can be had at this moment, and those others; with
                                                   `?step=S` also of that step, if it can be made of a journal
    GET /v1/rewind                                 which steps journals have or can make
    GET /v1/versions/{id}/manifest.json            its manifest; a version in memory is pinned from here on, but with
                                                   `?release`, where nobody reads it besides; 503 with how far it
                                                   is: its hashes are not there yet, or the step itself is being
                                                   made, and whoever wants it asks again
    GET /v1/versions/{id}/model.safetensors        one loadable file each, whole or `Range: bytes=...`
    GET /v1/versions/{id}/optimizer.safetensors
    GET /v1/versions/{id}/user/{rank}              what that rank gave of itself; a safetensors file, whole; of a log
                                                   with `?step=`
    GET /v1/versions/{id}/log.bin                  of a log: base and entries (flowcheck/ask/logs.py)
    GET /v1/pieces                                 for other members of a group with parity: what this node has itself,
    GET /v1/pieces/{id}/stream.bin                 versions in memory, copies, on disk; streams of parity
    GET /, /metrics, /v1/node                      how the node itself is: node_routes.py

An ASGI application (Starlette); supervisor.py runs it. Files are read on one thread for each tier, so a disk that hangs
holds up the disk's versions alone, and nothing is read faster than it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from flowcheck import __version__
from flowcheck.ask.logs import FILE as LOG_FILE
from flowcheck.ask.offer import COPY, DISK, JOURNAL, LATER, LOG, MEMORY, PARITY, STORE, Offer
from flowcheck.ask.offer import OWN as OF_ITS_OWN
from flowcheck.checkpoint.coding.rebuilding import PIECES, STREAM
from flowcheck.control.messages import MOST_RANKS
from flowcheck.control.proof import voucher
from flowcheck.control.start import ranks
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import FlowcheckError, said_of
from flowcheck.node.allocator import give_back
from flowcheck.node.api.description import describe
from flowcheck.node.api.guard import OPEN, REWIND, VERSIONS, Guard, Keys, current
from flowcheck.node.api.node_routes import NodeRoutes
from flowcheck.node.api.sending import FromMemory
from flowcheck.node.protect.parity_shelf import ROW, StreamShelf
from flowcheck.node.status.board import Glance
from flowcheck.node.tokens import peers_of
from flowcheck.node.versions.divergences import Notices
from flowcheck.node.versions.held import Gone, Held, Holding
from flowcheck.node.versions.holdings import Pressed, Shelf, Withheld
from flowcheck.node.versions.journal.log_shelf import LogHeld

__all__ = ["make_app"]

PIECE = 4 << 20  # bytes, between two looks whether the version is still held; copied for that, but from memory
LOOK_SECONDS = 5.0  # that a tier may take to list what it has
LATE_SECONDS = 1.0  # the same for one that has had that time already: others do not wait for a disk that hangs
EXPIRE_SECONDS = 1.0
TIDY_SECONDS = 60.0
HASH_SECONDS = 0.5  # that a question waits for hashes: less than anybody waits for a byte
MAKING = (JOURNAL, STORE)  # tiers that make steps again
OWN = (MEMORY, COPY, DISK)  # tiers for which nobody else is asked
Said = dict[str, Any]  # of a version: the fields of ask.offer.Offer


def make_app(
    shelves: Mapping[str, Shelf], keys: str | Callable[[], Keys], glance: Glance | None = None,
    streams: StreamShelf | None = None, notices: Notices | None = None, names: Collection[str] = (),
) -> ASGIApp:
    """shelves: by tier. keys: those that are accepted now, each with the roles that show it, or PEER alone: those are
    proven; one text is of all. glance: at what the node tells of itself. streams: of parity, if it keeps any.
    notices: of what has diverged. names: what other nodes may call this one besides its addresses."""
    now = current(keys)
    return Guard(_Api(shelves, glance, streams, notices, lambda: peers_of(now())).app, now, names)


class _Api:
    def __init__(
        self, shelves: Mapping[str, Shelf], glance: Glance | None = None, streams: StreamShelf | None = None,
        notices: Notices | None = None,
        peers: Callable[[], Sequence[bytes]] = list,
    ) -> None:
        self._tiers, self._streams, self._notices, self._peers = tuple(shelves), streams, notices, peers
        self._shelves = {**shelves, **({ROW: streams} if streams is not None else {})}
        self._threads = {tier: ThreadPoolExecutor(1, f"flowcheck {tier}") for tier in self._shelves}
        self._looks: dict[str, tuple[float, object, asyncio.Future[Any]]] = {}  # by tier: since when, and for what
        versions = f"{VERSIONS}/{{id}}"
        self.app = Starlette(
            routes=[
                Route(OPEN, self._health),
                Route("/openapi.json", self._described),
                Route("/v1/status", self._status),
                Route(VERSIONS, self._versions),
                Route(REWIND, self._rewind),
                Route(f"{versions}/manifest.json", self._manifest),
                Route(f"{versions}/{MODEL}", self._file),
                Route(f"{versions}/{OPTIMIZER}", self._file),
                Route(f"{versions}/{LOG_FILE}", self._file),
                Route(f"{versions}/user/{{rank}}", self._user),
                Route(PIECES, self._pieces),
                Route(f"{PIECES}/{{id}}/{STREAM}", self._file),
                *NodeRoutes(glance).routes,
            ],
            exception_handlers={
                HTTPException: _no_route,
                Gone: _said(404), Withheld: _said(403), Pressed: _said(503, {"Retry-After": "5"}),
                FlowcheckError: _said(500), MemoryError: _no_memory,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        expiring = asyncio.create_task(self._expire())
        try:
            yield
        finally:
            expiring.cancel()
            self.close()

    def close(self) -> None:
        """Let everything go, on the threads that have it. May be called twice."""
        while self._threads:
            tier, thread = self._threads.popitem()
            thread.submit(self._shelves[tier].close)
            thread.shutdown(wait=False)

    async def _expire(self) -> None:
        under_way: dict[str, Future[None]] = {}
        now = asyncio.get_running_loop().time
        tidied = now()
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            if now() - tidied >= TIDY_SECONDS:
                give_back()
                tidied = now()
            for tier, shelf in self._shelves.items():
                if tier not in under_way or under_way[tier].done():  # else its files hang
                    under_way[tier] = self._threads[tier].submit(shelf.expire)

    async def _on(self, tier: str, call: Callable[..., Any], *given: Any) -> Any:
        """On the thread that the tier's files belong to."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[tier], call, *given)

    # -- routes --

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"ok": True, "version": __version__})

    async def _described(self, request: Request) -> Response:
        return JSONResponse(describe(OPEN))

    async def _status(self, request: Request) -> Response:
        offers, withheld, absent = await self._look()
        journals, _ = await self._journals([tier for tier in MAKING if tier not in absent])
        return JSONResponse({"newest": _newest(offers), "withheld": _newest(withheld), "absent": absent,
                             "journals": journals})

    async def _rewind(self, request: Request) -> Response:
        journals, absent = await self._journals()
        if absent:
            raise Pressed(f"the {' and the '.join(absent)} did not answer", where=f"within {LOOK_SECONDS:g} s")
        return JSONResponse({"journals": journals})

    async def _journals(self, tiers: Collection[str] = MAKING) -> tuple[list[Said], list[str]]:
        """What can be made of journals, and of gradients in a store; tiers that did not say so in time."""
        asked = {tier: self._looked(tier, self._shelves[tier].ranges, "ranges") for tier in MAKING
                 if tier in tiers and tier in self._shelves}
        there = await self._answers(asked)
        return [one for task in there.values() for one in task.result()], [one for one in asked if one not in there]

    async def _versions(self, request: Request) -> Response:
        step = request.query_params.get("step", "")
        offers, withheld, absent = await self._look(step=int(step) if re.fullmatch("[0-9]{1,15}", step) else None)
        diverged = [asdict(one) for one in self._notices.all] if self._notices is not None else []
        return JSONResponse({
            "versions": [one for one in offers if one["tier"] not in LATER], "withheld": withheld, "absent": absent,
            "statuses": OF_ITS_OWN, "diverged": diverged, "later": [one for one in offers if one["tier"] in LATER],
        })

    async def _pieces(self, request: Request) -> Response:
        offers, _, absent = await self._look([tier for tier in self._tiers if tier in OWN])
        streams = await self._on(ROW, self._streams.streams) if self._streams is not None else []
        return JSONResponse({"versions": offers, "streams": streams, "absent": absent})

    async def _look(
        self, tiers: Sequence[str] | None = None, step: int | None = None
    ) -> tuple[list[Said], list[Said], list[str]]:
        """What can be had, the run and line that live first, of them the newest; what is there and is not offered;
        tiers that did not say so in time. step: also what can be made of this one."""
        shelves = {tier: self._shelves[tier] for tier in (self._tiers if tiers is None else tiers)}
        asked = {tier: self._looked(tier, partial(shelf.having, step), step) if tier in MAKING
                 else self._looked(tier, shelf.look) for tier, shelf in shelves.items()}
        there = await self._answers(asked)
        absent = [tier for tier in asked if tier not in there]
        peers = self._peers()
        offers = [replace(self._shelves[tier].judged(one.offer), attached=_attached(one, peers))
                  for tier, task in there.items() for one in task.result()]
        order, rank = list(asked), ranks((offer.run_id, offer.key) for offer in offers)
        offers.sort(key=lambda offer: order.index(offer.tier))
        offers.sort(key=lambda offer: rank(offer.run_id, offer.key), reverse=True)
        whys = [(offer, self._shelves[offer.tier].withheld(offer) or (_unvouched(offer) if peers else ""))
                for offer in offers]
        return ([asdict(offer) for offer, why in whys if not why],
                [asdict(offer) | {"why": why} for offer, why in whys if why], absent)

    def _looked(self, tier: str, look: Callable[[], Any], what: object = None) -> asyncio.Future[Any] | None:
        """What it says now. One that does not answer is asked no more until it has: questions would pile up. None: it
        still has to answer another one. what: tells them apart."""
        now = asyncio.get_running_loop().time()
        began, asked, oldest = self._looks.get(tier, (now, None, None))
        if oldest is not None and not oldest.done() and now - began >= LOOK_SECONDS:
            return oldest if asked == what else None
        task: asyncio.Future[Any] = asyncio.ensure_future(self._on(tier, look))
        if oldest is None or oldest.done():
            self._looks[tier] = now, what, task
        return task

    async def _answers(self, asked: dict[str, asyncio.Future[Any] | None]) -> dict[str, asyncio.Future[Any]]:
        """What says so in time, by tier."""
        now = asyncio.get_running_loop().time()
        late = {task for began, _, task in self._looks.values() if now - began >= LOOK_SECONDS}
        waited = {task for task in asked.values() if task is not None}
        for tasks, seconds in ((waited - late, LOOK_SECONDS), (waited & late, LATE_SECONDS)):
            if tasks:
                await asyncio.wait(tasks, timeout=seconds)
        return {tier: task for tier, task in asked.items() if task is not None and task.done() and not _refused(task)}

    async def _manifest(self, request: Request) -> Response:
        tier, held = await self._held(request)
        coming = await self._on(tier, held.begin)
        there = await _within(coming, HASH_SECONDS)
        if there and tier == MEMORY:
            coming.result()
            await self._on(tier, held.check)  # hashing takes long
        hashed, total = held.progress
        if "release" in request.query_params:
            await self._on(tier, self._shelves[tier].release, held)
        if there:
            return Response(coming.result(), media_type="application/json")
        return JSONResponse({"why": held.under_way, "hashed": hashed, "of": total, "making": held.making}, 503,
                            {"Retry-After": "1"})

    async def _file(self, request: Request) -> Response:
        tier, held = await self._held(request)
        file = request.scope["path"].rpartition("/")[2]
        if file == LOG_FILE and held.offer.tier != LOG:
            raise Gone("is no log", where=held.offer.id)
        size = await self._on(tier, held.size, file)
        span = span_of(request.headers.get("range"), size)
        if span is None:
            return JSONResponse({"why": f"the file has {size} bytes"}, 416, {"Content-Range": f"bytes */{size}"})
        first, after = span
        headers = {"Accept-Ranges": "bytes", "Content-Length": str(after - first), "ETag": f'"{held.offer.id}"'}
        whole = "range" not in request.headers
        if not whole:
            headers["Content-Range"] = f"bytes {first}-{after - 1}/{size}"
        return FromMemory(
            lambda: self._read(tier, held.offer.id, file, first, after), 200 if whole else 206, headers,
            "application/octet-stream",
        )

    async def _user(self, request: Request) -> Response:
        tier, held = await self._held(request)
        named = request.path_params["rank"]
        if not re.fullmatch("[0-9]{1,9}", named):
            raise Gone("is no rank", where=named[:64])
        rank = min(int(named), MOST_RANKS)
        if isinstance(held, LogHeld):
            step = request.query_params.get("step", "")
            if not re.fullmatch("[0-9]{1,18}", step):
                raise Gone("is no step of this log", where=step[:64])
            data = await self._on(tier, held.user_of, int(step), rank)
        else:
            data = await self._on(tier, held.user, rank)
        return Response(data, media_type="application/octet-stream")

    async def _read(self, tier: str, id: str, file: str, first: int, after: int) -> AsyncIterator[list[memoryview]]:
        """Whatever goes wrong here ends the connection before its length is reached, which the reader notices."""
        while first < after:
            most = self._shelves[tier].piece or PIECE
            piece = await self._on(tier, self._piece, tier, id, file, first, min(most, after - first))
            yield piece
            first += sum(map(len, piece))

    def _piece(self, tier: str, id: str, file: str, first: int, count: int) -> list[memoryview]:
        piece = self._shelves[tier].hold(id).views(file, first, count)
        if not any(map(len, piece)):
            raise Gone(f"ends at byte {first}", where=file)
        return piece

    async def _held(self, request: Request) -> tuple[str, Held]:
        id = request.path_params["id"]
        tier = next((tier for tier in self._shelves if id.startswith(tier[0])), "")
        if not tier or (tier == ROW) != request.scope["path"].startswith(PIECES):
            raise Gone("there is no such version", where=id[:64])
        return tier, await self._on(tier, self._shelves[tier].hold, id)


def _attached(one: Holding, peers: Sequence[bytes]) -> bool:
    """Does a node that knows the nodes' token vouch for its run and epoch? What is in memory here has come here."""
    return one.offer.tier in (MEMORY, LOG) or any(hmac.compare_digest(
        one.attached.encode(), voucher(key, one.offer.run_id, one.offer.epoch).encode()) for key in peers)


def _unvouched(offer: Offer) -> str:
    """Why what was made of another node's version is not offered, "": it is."""
    if offer.attached or offer.tier not in (COPY, PARITY):
        return ""
    return (f"no node of these vouches that trainers have attached with epoch {offer.epoch} of it: it is of an earlier"
            " release, of a token that was replaced, or of nobody here")


def _newest(said: Iterable[Said]) -> list[Said]:
    """The first of each run, shard and tier."""
    newest: dict[tuple[str, str, str], Said] = {}
    for one in said:
        newest.setdefault((one["run_id"], one["shard"], one["tier"]), one)
    return list(newest.values())


async def _within(coming: Future[bytes], seconds: float) -> bool:
    """Is it there by then? It goes on if not."""
    if not coming.done():
        waited = asyncio.wrap_future(coming)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask again
        await asyncio.wait([waited], timeout=seconds)
    return coming.done()


def _refused(task: asyncio.Future[Any]) -> bool:
    """A tier that could not say what it has: a store that refuses, or does not answer; a disk that is gone."""
    return isinstance(task.exception(), FlowcheckError | OSError)


def span_of(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last that a `Range` asks for; None: no such part is there. One range alone."""
    if header is None:
        return 0, size
    named = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header.strip())
    if named is None or not (named[1] or named[2]):
        return None
    if not named[1]:  # the last so many
        first, after = max(0, size - int(named[2])), size
    else:
        first, after = int(named[1]), min(size, int(named[2]) + 1) if named[2] else size
    return (first, after) if first < after else None


def _no_route(request: Request, error: Exception) -> Response:
    """No such path, or none with this method: said as everything else is."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"why": error.detail}, error.status_code, error.headers)


def _no_memory(request: Request, error: Exception) -> Response:
    """The machine's, and it may pass."""
    return JSONResponse({"why": said_of(error)}, 503, {"Retry-After": "5"})


def _said(status: int, headers: Mapping[str, str] | None = None) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, FlowcheckError)
        where = f"{error.where}: " if error.where else ""
        return JSONResponse({"why": f"{where}{error.what}"}, status, headers)

    return answer
