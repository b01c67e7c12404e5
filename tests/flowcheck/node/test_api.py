"""The HTTP API as an ASGI application: who may ask, what each route says, ranges, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck import __version__
from flowcheck.ask.offer import Offer
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.api import routes as api
from flowcheck.node.api.description import _MORE, describe
from flowcheck.node.api.guard import OPEN, Guard, key_in, may
from flowcheck.node.api.routes import make_app, span_of
from flowcheck.node.versions.held import Gone, Held, Holding
from flowcheck.node.versions.holdings import Pressed, Shelf, Withheld
from flowcheck.node.versions.journal import shelf as shelf_of_journals
from flowcheck.node.versions.journal.folders import folder_of
from flowcheck.node.versions.journal.shelf import JournalShelf

KEY = "k" * 64
SHOWN = [(b"authorization", f"Bearer {KEY}".encode())]
DATA = bytes(range(256)) * (3 << 14)  # three pieces


def offer(tier: str, step: int, **fields: Any) -> Offer:
    given = {"id": f"{tier[0]}{step:031x}", "tier": tier, "run_id": "run", "epoch": 0, "step": step, "shard": "",
             "status": "verified", "nbytes": 5} | fields
    return Offer(**given, user=((0, 1), (3, 3)))


class FakeHeld:
    def __init__(self, shelf: FakeShelf, one: Offer) -> None:
        self.shelf, self.offer, self.progress = shelf, one, (3, 5)
        self.coming: Future[bytes] | None = None

    making = Held.making
    under_way = Held.under_way

    def check(self) -> None:
        if self.shelf.gone:
            raise Gone("removed", where="x")

    def begin(self) -> Future[bytes]:
        """In the background for memory, once for all who ask."""
        if self.offer.tier != "memory":
            return Held.begin(self)  # type: ignore[arg-type]
        self.coming = self.coming or self.shelf.background.submit(self.manifest)
        return self.coming

    def manifest(self) -> bytes:
        self.shelf.hashing.append(self.offer.step)
        if self.shelf.waits is not None:
            self.shelf.waits.wait(60)
        if self.shelf.fails is not None:
            raise self.shelf.fails
        return b'{"step": %d}' % self.offer.step

    def size(self, file: str) -> int:
        return len(DATA) if file == MODEL else 0

    def user(self, rank: int) -> bytes:
        if rank != 3:
            raise Gone("has no such state of a rank", where="x")
        return b"of rank 3"

    def views(self, file: str, first: int, count: int) -> list[memoryview]:
        self.shelf.reads.append((first, count))
        if len(self.shelf.reads) == self.shelf.ends:
            raise Gone("let go", where="x")
        return [memoryview(DATA)[first : first + count]]


class FakeShelf(Shelf):
    """Notes what is done, and on which threads. gone, fails, ends: what is to go wrong."""

    def __init__(self, *offers: Offer) -> None:
        super().__init__()
        self.offers = list(offers)
        self.hashing: list[int] = []
        self.reads: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self.gone, self.ends = False, 0
        self.fails: Exception | None = None
        self.broken: Exception | None = None
        self.looks = 0
        self.waits: threading.Event | None = None
        self.expired, self.closed = threading.Event(), threading.Event()
        self.last: FakeHeld | None = None
        self.background = ThreadPoolExecutor(1)
        self.released: list[int] = []
        self.rows: list[dict[str, Any]] = []

    def streams(self) -> list[dict[str, Any]]:
        return self.rows

    def look(self) -> list[Holding]:
        self.threads.add(threading.current_thread().name)
        self.looks += 1
        if self.broken is not None:
            raise self.broken
        if self.waits is not None:
            self.waits.wait(60)
        return [Holding(one, None, 1) for one in self.offers]  # type: ignore[arg-type]

    def hold(self, id: str) -> Held:
        self.threads.add(threading.current_thread().name)
        for one in self.offers:
            if one.id == id:
                self.last = self.last or FakeHeld(self, one)
                return self.last  # type: ignore[return-value]
        raise Gone("there is no such version, or no longer", where=id)

    def release(self, held: Held) -> None:
        self.released.append(held.offer.step)

    def expire(self) -> None:
        self.expired.set()

    def close(self) -> None:
        self.background.shutdown(wait=False)
        self.closed.set()


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def _get(app: Any, path: str, headers: list[tuple[bytes, bytes]], method: str) -> Answer:
    path, _, query = path.partition("?")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0 if not sent else 3600)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
             "raw_path": path.encode(), "query_string": query.encode(), "headers": headers, "scheme": "http",
             "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    whole = True
    try:
        await app(scope, receive, send)
    except Exception:
        whole = False
    body = b"".join(message.get("body", b"") for message in sent[1:])
    said = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], said, body, whole)


def get(
    app: Any, path: str, shown: list[tuple[bytes, bytes]] = SHOWN, method: str = "GET", **headers: str
) -> Answer:
    more = [(name.encode(), value.encode()) for name, value in headers.items()]
    return asyncio.run(_get(app, path, [*shown, *more], method))


@pytest.fixture
def memory() -> FakeShelf:
    return FakeShelf(offer("memory", 7), offer("memory", 6))


@pytest.fixture
def disk() -> FakeShelf:
    return FakeShelf(offer("disk", 7), offer("disk", 3, epoch=1))


@pytest.fixture
def app(memory: FakeShelf, disk: FakeShelf) -> Iterator[Any]:
    made = api._Api({"memory": memory, "disk": disk})
    yield Guard(made.app, KEY)
    made.close()


def test_an_application_is_guarded() -> None:
    made = make_app({}, KEY)
    assert get(made, "/v1/versions", []).status == 401 and get(made, "/openapi.json").status == 200


def test_an_application_is_made_of_all_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_Api", lambda *given: SimpleNamespace(app=given))
    made: Any = make_app("shelves", KEY, "glance", "streams", "notices")  # type: ignore[arg-type]
    assert made._app[:4] == ("shelves", "glance", "streams", "notices") and made._app[4]() == []


ID = offer("memory", 7).id
PATHS = [path.replace("{id}", ID).replace("{rank}", "3") for path in describe(OPEN)["paths"]]


# -- who may ask -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [*PATHS, "/", "/v1", "/healthz/", "/nowhere", "//healthz", "/v1/../healthz", "/metrics/"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_without_the_key_nothing_but_healthz(app: Any, memory: FakeShelf, path: str, method: str) -> None:
    for shown in ([], [(b"authorization", b"Bearer x")], [(b"authorization", KEY.encode())],
                  [(b"authorization", f"bearer {KEY}".encode())], [*SHOWN, *SHOWN],
                  [(b"authorization", f"Bearer {KEY} ".encode())], [(b"x-authorization", SHOWN[0][1])]):
        answer = get(app, path, shown, method)
        if path == "/healthz":
            assert answer.status == (200 if method in ("GET", "HEAD") else 405)
        else:
            how = "Basic" if path == "/" else "Bearer"  # a page is for a browser, which asks for a password
            assert answer.status == 401 and answer.headers["www-authenticate"].split()[0] == how
    assert memory.threads == set() and memory.reads == []


def test_nothing_is_written_over_http(app: Any) -> None:
    for path in PATHS:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert get(app, path, method=method).status == 405
    assert (nowhere := get(app, "/nowhere")).status == 404 and nowhere.json == {"why": "Not Found"}


def test_health_says_nothing_of_what_there_is(app: Any) -> None:
    assert get(app, "/healthz", []).json == {"ok": True, "version": __version__}


def test_who_has_no_key_is_told_so(app: Any) -> None:
    answer = get(app, "/v1/versions", [])
    assert answer.json == {"why": "the key is missing or wrong"}
    assert answer.headers["content-type"] == "application/json"


def test_who_has_the_key_of_another_role_is_told_which_it_takes(memory: FakeShelf) -> None:
    made = api._Api({"memory": memory})
    try:
        answer = get(Guard(made.app, lambda: {KEY: ("operator", "peer")}), "/v1/versions")
    finally:
        made.close()
    assert answer.status == 403 and memory.threads == set()
    assert answer.json == {"why": "this is for trainer or reader, the key is of operator"}


# -- what there is -----------------------------------------------------------------------------------------


def test_versions_newest_first(app: Any) -> None:
    said = get(app, "/v1/versions").json
    assert [(one["epoch"], one["step"], one["tier"]) for one in said["versions"]] == [
        (1, 3, "disk"), (0, 7, "memory"), (0, 7, "disk"), (0, 6, "memory"),
    ]
    assert said["versions"][1] == vars(offer("memory", 7)) | {
        "user": [[0, 1], [3, 3]], "users": [], "attached": True}
    assert said["absent"] == []


def test_the_run_that_lives_is_listed_first(app: Any, memory: FakeShelf) -> None:
    """Whatever epochs and steps another run has reached, or a line of its own that was left."""
    left, lives, other = (f"{began:016x}-{7:016x}-0000 {'f' * 64}" for began in (5, 6, 1))
    memory.offers[:] = [
        offer("memory", 9, start=left), offer("memory", 4, start=lives),
        offer("memory", 70, run_id="x", epoch=8, start=other),
    ]
    said = get(app, "/v1/versions").json["versions"]
    assert [(one["run_id"], one["step"]) for one in said if one["start"]] == [("run", 4), ("run", 9), ("x", 70)]
    newest = [(one["run_id"], one["step"]) for one in get(app, "/v1/status").json["newest"] if one["start"]]
    assert newest == [("run", 4), ("x", 70)]


def test_status_has_the_newest_of_each(app: Any, memory: FakeShelf) -> None:
    memory.offers += [offer("memory", 5, shard="b"), offer("memory", 4, run_id="x"), offer("memory", 2, shard="b")]
    said = get(app, "/v1/status").json
    assert [(one["run_id"], one["shard"], one["tier"], one["step"]) for one in said["newest"]] == [
        ("run", "", "disk", 3), ("run", "", "memory", 7), ("run", "b", "memory", 5), ("x", "", "memory", 4),
    ]


def test_what_is_withheld_is_seen_and_not_offered() -> None:
    """With the reason, wherever versions are listed; the rest is as if it were not there."""
    memory = FakeShelf(offer("memory", 9, matches=1), offer("memory", 8, matches=0), offer("memory", 7, matches=3))
    memory._needs = 3
    made = api._Api({"memory": memory, "disk": FakeShelf(offer("disk", 8, matches=0))})
    guarded = Guard(made.app, KEY)
    try:
        said = get(guarded, "/v1/versions").json
        assert [(one["tier"], one["step"], one["matches"]) for one in said["versions"]] == [
            ("disk", 8, 0), ("memory", 7, 3)]  # the other shelf needs none
        assert [(one["step"], one["why"]) for one in said["withheld"]] == [
            (step, f"step {step} is not offered for recovery: {n} of 3 checksums of the trainer had matched when it was"
                   " published (api.shadow)") for step, n in ((9, 1), (8, 0))]
        status = get(guarded, "/v1/status").json
        assert [one["step"] for one in status["newest"]] == [8, 7]
        assert [one["step"] for one in status["withheld"]] == [9]
    finally:
        made.close()


def test_a_tier_that_hangs_holds_up_no_other(
    app: Any, disk: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LOOK_SECONDS", 0.05)
    disk.waits = threading.Event()

    async def both() -> tuple[Answer, Answer, Answer]:
        try:
            return (await _get(app, "/v1/versions", SHOWN, "GET"), await _get(app, "/v1/status", SHOWN, "GET"),
                    await _get(app, f"/v1/versions/{ID}/{MODEL}", SHOWN, "GET"))
        finally:
            assert disk.waits is not None
            disk.waits.set()

    versions, status, file = asyncio.run(both())
    for said in (versions.json, status.json):
        assert said["absent"] == ["disk"]
    assert [one["step"] for one in versions.json["versions"]] == [7, 6] and file.body == DATA


def test_a_journal_that_hangs_is_named_whatever_is_asked_of_it(
    memory: FakeShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(shelf_of_journals, "FRESH_SECONDS", 0.0)
    folder = folder_of(tmp_path, "", "run", 0)
    folder.path.mkdir(parents=True)
    os.mkfifo(folder.job)  # whoever opens it waits for a writer
    made = api._Api({"memory": memory, "journal": JournalShelf(tmp_path, ())})
    app = Guard(made.app, KEY)

    async def asked(*paths: str) -> list[Answer]:
        try:
            return [await asyncio.wait_for(_get(app, path, SHOWN, "GET"), 60) for path in paths]
        finally:
            with contextlib.suppress(OSError):  # nobody waits
                os.close(os.open(folder.job, os.O_WRONLY | os.O_NONBLOCK))

    try:
        first, other, status, rewind = asyncio.run(asked(
            "/v1/versions?step=5", "/v1/versions?step=6", "/v1/status", "/v1/rewind"))
        for answer in (first, other, status):
            assert answer.status == 200 and answer.json["absent"] == ["journal"]
        assert [one["step"] for one in first.json["versions"]] == [7, 6] and rewind.status == 503
    finally:
        made.close()


@pytest.mark.parametrize("error", [
    OSError(errno.ENOTCONN, "dead"), OSError(errno.EIO, "dead"), EnvironmentProblem("dead"),
])
def test_a_tier_that_fails_hides_no_other(app: Any, disk: FakeShelf, error: Exception) -> None:
    """As a dead network file system does, or a disk that is gone."""
    disk.broken = error
    said = get(app, "/v1/versions").json
    assert said["absent"] == ["disk"] and [one["step"] for one in said["versions"]] == [7, 6]
    disk.broken = None
    assert get(app, "/v1/versions").json["absent"] == []


def test_a_tier_that_hangs_is_asked_no_more_until_it_answers(
    app: Any, disk: FakeShelf, memory: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LOOK_SECONDS", 0.05)
    disk.waits = threading.Event()

    async def many() -> tuple[list[Any], Any]:
        try:
            hung = [(await _get(app, "/v1/versions", SHOWN, "GET")).json["absent"] for _ in range(8)]
        finally:
            disk.waits.set()  # type: ignore[union-attr]
        monkeypatch.setattr(api, "LOOK_SECONDS", 60.0)
        return hung, (await _get(app, "/v1/versions", SHOWN, "GET")).json["absent"]

    hung, then = asyncio.run(many())
    assert hung == [["disk"]] * 8 and then == []
    assert memory.looks == 9 and disk.looks <= 3, "not once for each question"


def test_a_question_during_a_look_has_a_look_of_its_own(
    app: Any, disk: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came to be since the first one began is to be seen."""
    monkeypatch.setattr(api, "LOOK_SECONDS", 60.0)
    disk.waits = threading.Event()

    async def both() -> list[Answer]:
        first = asyncio.ensure_future(_get(app, "/v1/versions", SHOWN, "GET"))
        while not disk.looks:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(_get(app, "/v1/versions", SHOWN, "GET"))
        while len(asyncio.all_tasks()) < 5:  # this one, both questions, and the look of each
            await asyncio.sleep(0.001)
        disk.waits.set()  # type: ignore[union-attr]
        return [await first, await second]

    assert [one.json["absent"] for one in asyncio.run(both())] == [[], []] and disk.looks == 2


def test_a_tier_that_hangs_holds_up_no_end(app: Any, disk: FakeShelf) -> None:
    disk.waits = threading.Event()
    made = api._Api({"disk": disk})
    made._threads["disk"].submit(disk.look)
    ending = threading.Thread(target=made.close)
    ending.start()
    ending.join(30)
    held_up = ending.is_alive()
    disk.waits.set()
    ending.join()
    assert not held_up


def test_pieces_are_what_this_node_has_itself(memory: FakeShelf) -> None:
    """Not what it could make, nor what lies in a store that all can read."""
    rows = FakeShelf(offer("row", 4))
    rows.rows = [{"id": rows.offers[0].id, "number": 2}]
    others = {tier: FakeShelf(offer(tier, 9)) for tier in ("copy", "disk", "parity", "store")}
    made = api._Api({"memory": memory, **others}, streams=rows)  # type: ignore[arg-type]
    guarded = Guard(made.app, KEY)
    try:
        said = get(guarded, "/v1/pieces").json
        assert [one["tier"] for one in said["versions"]] == ["copy", "disk", "memory", "memory"]
        assert said["streams"] == rows.rows and said["absent"] == [] and set(said) == {"versions", "streams", "absent"}
        listed = get(guarded, "/v1/versions").json["versions"]
        assert [one["tier"] for one in listed] == ["copy", "disk", "parity", "store", "memory", "memory"]
        row, version = rows.offers[0].id, ID
        assert get(guarded, f"/v1/pieces/{row}/stream.bin").status == 200
        assert get(guarded, f"/v1/pieces/{version}/stream.bin").status == 404
        assert get(guarded, f"/v1/versions/{row}/{MODEL}").status == 404
    finally:
        made.close()


def test_a_node_without_parity_has_no_streams(app: Any) -> None:
    assert get(app, "/v1/pieces").json["streams"] == []


def test_a_version_is_let_go_by_who_says_so(app: Any, memory: FakeShelf, disk: FakeShelf) -> None:
    assert get(app, f"/v1/versions/{ID}/manifest.json").status == 200 and memory.released == []
    assert get(app, f"/v1/versions/{ID}/manifest.json?release=1").status == 200
    assert (memory.released, disk.released) == ([7], [])


def test_a_manifest_that_comes_in_time_is_waited_for(
    app: Any, memory: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "HASH_SECONDS", 60.0)
    memory.waits = threading.Event()

    async def asked() -> Answer:
        asking = asyncio.ensure_future(_get(app, f"/v1/versions/{ID}/manifest.json", SHOWN, "GET"))
        while not memory.hashing:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        memory.waits.set()  # type: ignore[union-attr]
        return await asking

    answer = asyncio.run(asked())
    assert answer.status == 200 and answer.json == {"step": 7}


def test_a_disk_that_hangs_holds_up_no_manifest_of_memory(app: Any, disk: FakeShelf) -> None:
    disk.waits = threading.Event()

    async def both() -> tuple[Answer, bool]:
        assert disk.waits is not None
        slow = asyncio.ensure_future(_get(app, f"/v1/versions/{offer('disk', 7).id}/manifest.json", SHOWN, "GET"))
        try:
            while not disk.hashing:
                await asyncio.sleep(0.001)
            return await _get(app, f"/v1/versions/{ID}/manifest.json", SHOWN, "GET"), slow.done()
        finally:
            disk.waits.set()
            await slow

    quick, slow_too = asyncio.run(both())
    assert (quick.status, quick.json) == (200, {"step": 7}) and not slow_too


def test_each_tier_has_one_thread(app: Any, memory: FakeShelf, disk: FakeShelf) -> None:
    for path in ("/v1/versions", f"/v1/versions/{ID}/{MODEL}", f"/v1/versions/{offer('disk', 7).id}/{MODEL}"):
        get(app, path)
    assert memory.threads == {"flowcheck memory_0"} and disk.threads == {"flowcheck disk_0"}


# -- a version ---------------------------------------------------------------------------------------------


def test_a_manifest(app: Any, memory: FakeShelf) -> None:
    answer = get(app, f"/v1/versions/{ID}/manifest.json")
    assert (answer.status, answer.json) == (200, {"step": 7})
    assert answer.headers["content-type"] == "application/json"
    assert memory.hashing == [7] and memory.released == []


def test_a_manifest_that_takes_long_says_how_far_it_is(
    app: Any, memory: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each who asks, and all of them wait for the same hashes; nothing else waits."""
    monkeypatch.setattr(api, "HASH_SECONDS", 0.05)
    path = f"/v1/versions/{ID}/manifest.json"

    async def asked() -> tuple[list[Answer], Answer, Answer]:
        memory.waits = held_back = threading.Event()
        try:
            early = list(await asyncio.gather(*(_get(app, path, SHOWN, "GET") for _ in range(3))))
            file = await _get(app, f"/v1/versions/{ID}/{MODEL}", SHOWN, "GET")
        finally:
            held_back.set()
        while (late := await _get(app, path, SHOWN, "GET")).status == 503:
            pass
        return early, file, late

    early, file, late = asyncio.run(asked())
    for answer in early:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json == {"why": "its tensors are being hashed: 3 of 5 bytes so far", "hashed": 3, "of": 5,
                               "making": False}
    assert file.body == DATA and (late.status, late.json) == (200, {"step": 7}) and memory.hashing == [7]


def test_a_manifest_that_nobody_asks_for_again_may_fail(
    app: Any, memory: FakeShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "HASH_SECONDS", 0.05)
    memory.waits, memory.fails = threading.Event(), Gone("let go")

    async def asked() -> Answer:
        answer = await _get(app, f"/v1/versions/{ID}/manifest.json", SHOWN, "GET")
        assert memory.waits is not None and memory.last is not None
        memory.waits.set()
        while memory.last.coming is None or not memory.last.coming.done():
            await asyncio.sleep(0.001)
        return answer

    assert asyncio.run(asked()).status == 503
    gc.collect()
    assert caplog.text == "", "asyncio knows that somebody took the error"
    assert get(app, f"/v1/versions/{ID}/manifest.json").status == 404


def test_a_manifest_that_was_removed_while_it_was_hashed(app: Any, memory: FakeShelf) -> None:
    memory.gone = True
    answer = get(app, f"/v1/versions/{ID}/manifest.json")
    assert (answer.status, answer.json) == (404, {"why": "x: removed"})


@pytest.mark.parametrize(("error", "status"), [
    (Gone("a"), 404), (Pressed("a", where="w"), 503), (EnvironmentProblem("a"), 500), (Withheld("a"), 403),
])
def test_what_goes_wrong_is_said(app: Any, memory: FakeShelf, error: Any, status: int) -> None:
    memory.fails = error
    answer = get(app, f"/v1/versions/{ID}/manifest.json")
    assert (answer.status, answer.json) == (status, {"why": "w: a" if status == 503 else "a"})
    assert answer.headers.get("retry-after") == ("5" if status == 503 else None)


def test_a_version_that_is_no_log_has_none(app: Any) -> None:
    answer = get(app, f"/v1/versions/{ID}/log.bin")
    assert (answer.status, answer.json) == (404, {"why": f"{ID}: is no log"})


@pytest.mark.parametrize("id", ["m" + "0" * 31, "d" + "0" * 31, "x", "0" * 32, "..", "%2e%2e"])
@pytest.mark.parametrize("file", ["manifest.json", MODEL, OPTIMIZER])
def test_a_version_that_is_not_there(app: Any, id: str, file: str) -> None:
    assert get(app, f"/v1/versions/{id}/{file}").status == 404


def test_a_whole_file(app: Any, memory: FakeShelf) -> None:
    answer = get(app, f"/v1/versions/{ID}/{MODEL}")
    assert answer.status == 200 and answer.body == DATA and answer.whole
    assert answer.headers["content-length"] == str(len(DATA)) and answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["etag"] == f'"{ID}"' and "content-range" not in answer.headers
    assert answer.headers["content-type"] == "application/octet-stream"
    assert memory.reads == [(0, api.PIECE), (api.PIECE, api.PIECE), (2 * api.PIECE, api.PIECE)]


def test_what_a_rank_gave_of_itself(app: Any, memory: FakeShelf) -> None:
    answer = get(app, f"/v1/versions/{ID}/user/3")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"of rank 3", "9")
    assert answer.headers["content-type"] == "application/octet-stream"
    for path in (f"{ID}/user/4", f"{ID}/user/{'9' * 30}", f"{ID}/user/x", f"{ID}/user/-3", f"{'m' + '0' * 31}/user/3"):
        assert get(app, f"/v1/versions/{path}").status == 404
    assert memory.threads == {"flowcheck memory_0"}


def test_an_empty_file(app: Any) -> None:
    answer = get(app, f"/v1/versions/{ID}/{OPTIMIZER}")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "0")


def test_a_range(app: Any, memory: FakeShelf) -> None:
    first = api.PIECE - 2
    answer = get(app, f"/v1/versions/{ID}/{MODEL}", range=f"bytes={first}-{first + 4}")
    assert answer.status == 206 and answer.body == DATA[first : first + 5] and answer.headers["content-length"] == "5"
    assert answer.headers["content-range"] == f"bytes {first}-{first + 4}/{len(DATA)}"
    answer = get(app, f"/v1/versions/{ID}/{MODEL}", range=f"bytes={len(DATA)}-")
    assert answer.status == 416 and answer.headers["content-range"] == f"bytes */{len(DATA)}"
    assert answer.json == {"why": f"the file has {len(DATA)} bytes"}


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        (None, (0, 10)), ("bytes=0-", (0, 10)), ("bytes=3-", (3, 10)), ("bytes=3-3", (3, 4)), ("bytes=3-99", (3, 10)),
        ("bytes=-3", (7, 10)), ("bytes=-99", (0, 10)), (" bytes=9- ", (9, 10)), ("bytes=10-", None), ("bytes=-0", None),
        ("bytes=5-4", None), ("bytes=-", None), ("bytes=0-1,3-4", None), ("bytes=x-", None), ("chunks=0-", None),
        ("bytes=" + "9" * 19 + "-", None), ("", None),
    ],
)
def test_ranges(asked: str | None, span: tuple[int, int] | None) -> None:
    assert span_of(asked, 10) == span


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_a_version_that_goes_while_it_is_sent_ends_the_connection(app: Any, memory: FakeShelf, ends: int) -> None:
    memory.ends = ends
    answer = get(app, f"/v1/versions/{ID}/{MODEL}")
    assert not answer.whole and answer.body == DATA[: (ends - 1) * api.PIECE]


def test_a_file_that_became_shorter_ends_the_connection(
    app: Any, memory: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHeld, "size", lambda self, file: len(DATA) + 1)
    answer = get(app, f"/v1/versions/{ID}/{MODEL}")
    assert not answer.whole and answer.body == DATA


# -- its life ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    """What a server tells it of its own start and end."""
    told: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, told.get, said.put))
    await told.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    yield
    await told.put({"type": "lifespan.shutdown"})
    assert (await said.get())["type"] == "lifespan.shutdown.complete"
    await running


def test_it_lets_go_of_versions_by_and_by(
    app: Any, memory: FakeShelf, disk: FakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "EXPIRE_SECONDS", 0.01)

    async def live() -> None:
        async with lifespan(app):
            for shelf in (memory, disk):
                assert await asyncio.to_thread(shelf.expired.wait, 60) and not shelf.closed.is_set()

    asyncio.run(live())
    assert memory.closed.wait(60) and disk.closed.wait(60)


def test_it_gives_garbage_back_now_and_then(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has outlived Python's own looks: a node's process has so much that another look at all is far."""
    monkeypatch.setattr(api, "EXPIRE_SECONDS", 0.01)
    monkeypatch.setattr(api, "TIDY_SECONDS", 0.05)
    collected = threading.Event()

    class Circle:
        def __init__(self) -> None:
            self.own = self

    async def live() -> None:
        async with lifespan(app):
            weakref.finalize(Circle(), collected.set)
            assert await asyncio.to_thread(collected.wait, 60)

    gc.disable()  # it comes by nothing else
    try:
        asyncio.run(live())
    finally:
        gc.enable()


# -- who may what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "roles"), [
    ("/v1/versions", {"trainer", "reader", "peer"}), ("/v1/versions/m1-2/manifest", {"trainer", "reader", "peer"}),
    ("/v1/versions/", {"trainer", "reader", "peer"}), ("/v1/pieces", {"reader", "peer"}),
    ("/v1/pieces/r1/data", {"reader", "peer"}),
    ("/", {"reader", "operator"}), ("/metrics", {"reader", "operator"}), ("/v1/node", {"reader", "operator"}),
    ("/v1/status", {"trainer", "reader", "operator"}), ("/openapi.json", {"trainer", "reader", "operator"}),
    ("/v1/versionsx", {"operator"}), ("/v1/piecesx", {"operator"}), ("/v1/nodes", {"operator"}), ("//", {"operator"}),
    ("/v1/VERSIONS", {"operator"}), ("", {"operator"}), ("/docs", {"operator"}), ("/v1/status/", {"operator"}),
])
def test_who_may_ask_for_what(path: str, roles: set[str]) -> None:
    assert set(may(path)) == roles


@pytest.mark.parametrize(("shown", "key"), [
    (b"Bearer a:b", b"a:b"), (b"Basic YW55OmE6Yg==", b"a:b"), (b"Basic OmE=", b"a"), (b"Basic YQ==", b""),
    (b"Basic YW55OmE6Yg", b""), (b"Basic YW5\x005OmE6Yg==", b""), (b"Basic YW55 OmE6Yg==", b""), (b"Basic", b""),
    (b"basic YW55OmE6Yg==", b""), (b"Digest YW55OmE6Yg==", b""), (b"a:b", b""), (b"", b""), (b"Bearer", b""),
    (b"Bearer  a", b" a"),
])
def test_which_key_is_shown(shown: bytes, key: bytes) -> None:
    """A browser shows it as a password, whatever the name."""
    assert key_in(shown) == key


# -- the description ---------------------------------------------------------------------------------------


def test_the_description_has_every_route_and_no_other(app: Any) -> None:
    routes = {route.path for route in api._Api({}).app.routes}  # type: ignore[attr-defined]
    described = get(app, "/openapi.json").json
    assert described == json.loads(json.dumps(describe(OPEN)))
    assert set(described["paths"]) == {route.replace(":int", "") for route in routes}
    open_ = [path for path, item in described["paths"].items() if not item["get"]["security"]]
    assert open_ == ["/healthz"]
    for path, item in described["paths"].items():
        assert ("401" in item["get"]["responses"]) == (path not in open_)
        in_path = [one["name"] for one in item["get"]["parameters"] if one["in"] == "path"]
        assert in_path == re.findall(r"{(\w+)}", path)


def test_what_a_route_says_is_described_in_full() -> None:
    """One of each kind, spelled out."""
    why = {"application/json": {"schema": {
        "type": "object", "required": ["why"], "properties": {"why": {"type": "string"}},
    }}}
    refused = {"$ref": "#/components/responses/Refused"}
    described = describe("/open")
    assert (described["openapi"], described["info"]) == ("3.1.0", {"title": "FlowCheck node", "version": __version__})
    assert described["paths"]["/open"]["get"] == {
        "summary": "Does this process answer?", "parameters": [], "security": [],
        "responses": {
            "200": {"description": "It does.", "content": {"application/json": {"schema": {"type": "object"}}}},
        },
    }
    listed = described["paths"]["/v1/versions"]["get"]
    assert listed["security"] == [{"reader": []}]
    assert listed["parameters"] == [{
        "name": "step", "in": "query", "schema": {"type": "integer", "minimum": 0},
        "description": "Also what can be made of this step: it is made when its manifest is asked for.",
    }]
    assert listed["responses"]["401"] == refused and listed["summary"].startswith("Every version that can be had")
    assert listed["responses"]["200"]["content"] == {"application/json": {"schema": {
        "type": "object", "required": ["versions", "withheld", "absent", "statuses", "diverged", "later"],
        "properties": {
            "versions": {"type": "array", "items": {"$ref": "#/components/schemas/Offer"}},
            "withheld": {
                "type": "array",
                "items": {"allOf": [{"$ref": "#/components/schemas/Offer"}, why["application/json"]["schema"]]},
                "description": "Versions that are there and are not offered: not enough checksums of the trainer have"
                               " matched, or they have diverged.",
            },
            "absent": {"type": "array", "items": {"type": "string"},
                       "description": "Tiers that did not answer in time."},
            **_MORE,
        },
    }}}
    newest = described["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert newest["required"] == ["newest", "withheld", "absent", "journals"] == list(newest["properties"])
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    for file in (MODEL, OPTIMIZER):
        answers = described["paths"][f"/v1/versions/{{id}}/{file}"]["get"]["responses"]
        assert set(answers) == {"200", "206", "416", "401", "403", "404", "503"} and answers["401"] == refused
        assert answers["200"]["content"] == answers["206"]["content"] == binary
        assert all(answers[status]["content"] == why for status in ("404", "416", "503"))
    assert described["components"]["responses"]["Refused"] == {
        "description": "The key is missing or wrong.", "content": why,
    }
    assert described["components"]["securitySchemes"] == {"reader": {"type": "http", "scheme": "bearer"}}


def test_an_offer_is_described(app: Any) -> None:
    described = describe(OPEN)["components"]["schemas"]["Offer"]
    kinds = {"string": str, "integer": int, "boolean": bool}
    for one in get(app, "/v1/versions").json["versions"]:
        assert set(one) == set(described["properties"]) == set(described["required"])
        assert one.pop("user") == [[0, 1], [3, 3]] and one.pop("users") == []
        for unsaid in ("age_steps", "age_seconds", "oldest"):
            assert "null" in described["properties"][unsaid]["type"] and one.pop(unsaid) is None
        assert all(type(one[name]) is kinds[described["properties"][name]["type"]] for name in one)
