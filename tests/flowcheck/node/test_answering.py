"""The process that answers the API, without a process: which clients it lets go and when, what it offers by its
settings, and what it is told. Clocks, connections and a loop by hand."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from flowcheck.errors import UserError
from flowcheck.node.api import worker as answering
from flowcheck.node.api.border import ApiSettings, OtherKeys
from flowcheck.node.api.sending import Offering
from flowcheck.node.api.worker import ASK_SECONDS, LOOK_SECONDS, TAKE_SECONDS, _Client, _Loop, _Settings
from flowcheck.node.doors.http_door import Limits
from flowcheck.node.protect.parity_shelf import OTHERS_SECONDS
from flowcheck.node.store.made import StoredSteps

from ..certificates import issue

# -- clients -------------------------------------------------------------------------------------------------------


class Scene:
    """A connection, and a loop whose clock a test has."""

    def __init__(self, app: Any = None) -> None:
        self.now, self.aborted, self.cancelled, self.closed = 1000.0, 0, 0, 0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        config = uvicorn.Config(app or self._app, http=_Client, ws="none", lifespan="off", log_config=None)
        self.client = _Client(config, ServerState(), {}, self)  # type: ignore[arg-type]
        self.client.visitor = SimpleNamespace(  # type: ignore[assignment]
            offer=lambda scope: None, answered=lambda: None, gone=lambda: None)
        transport = SimpleNamespace(
            get_extra_info=lambda name, default=None: default, abort=self.abort, close=self.close,
            pause_reading=lambda: None, resume_reading=lambda: None, is_closing=lambda: False, write=lambda data: None)
        self.client.connection_made(transport)  # type: ignore[arg-type]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        pass

    def abort(self) -> None:
        self.aborted += 1

    def close(self) -> None:
        self.closed += 1

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append((self.now + seconds, call))
        return SimpleNamespace(cancel=self._cancel)

    def _cancel(self) -> None:
        self.cancelled += 1

    def until(self, seconds: float) -> None:
        """It is so late after the beginning; what was due until then was done."""
        while self.timers and self.timers[0][0] <= 1000.0 + seconds:
            due, call = self.timers.pop(0)
            self.now = due
            call()
            assert len(self.timers) <= 1
        self.now = 1000.0 + seconds

    def answer(self, complete: bool) -> Any:
        """A request is answered, or has been."""
        self.client.cycle = SimpleNamespace(response_complete=complete, disconnected=False)  # type: ignore[assignment]
        return self.client.cycle


def test_who_asks_nothing_is_let_go_in_time() -> None:
    at = Scene()
    assert [due for due, _ in at.timers] == [1000.0 + LOOK_SECONDS]
    at.until(ASK_SECONDS)
    assert not at.aborted and len(at.timers) == 1
    at.until(ASK_SECONDS + LOOK_SECONDS)
    assert at.aborted == 1 and at.timers == [], "and looked at no more"


def test_an_answer_may_take_its_time() -> None:
    at = Scene()
    at.until(5.0)
    cycle = at.answer(False)
    at.until(500.0)
    assert not at.aborted and len(at.timers) == 1
    cycle.response_complete = True
    at.until(501.0 + ASK_SECONDS)
    assert not at.aborted
    at.until(501.0 + ASK_SECONDS + LOOK_SECONDS)
    assert at.aborted == 1, "from the answer on"


def test_an_answer_between_two_looks_is_one() -> None:
    at = Scene()
    for number in range(1, 6):
        at.until(9.0 * number)
        at.answer(True)
    at.until(46.0 + ASK_SECONDS)
    assert not at.aborted
    at.until(47.0 + ASK_SECONDS)
    assert at.aborted == 1


def test_who_takes_nothing_is_let_go() -> None:
    at = Scene()
    at.answer(False)
    at.until(3.0)
    at.client.pause_writing()
    at.until(3.0 + TAKE_SECONDS)
    at.client.resume_writing()
    at.until(100.0)
    assert not at.aborted
    at.client.pause_writing()
    at.until(100.0 + TAKE_SECONDS)
    assert not at.aborted
    at.until(101.0 + TAKE_SECONDS)
    assert at.aborted == 1 and at.timers == []


def test_writing_waits_for_who_takes_nothing() -> None:
    at = Scene()
    at.client.pause_writing()
    assert at.client.flow.write_paused
    at.client.resume_writing()
    assert not at.client.flow.write_paused


def test_a_connection_that_is_gone_is_not_looked_at() -> None:
    at = Scene()
    at.client.connection_lost(ConnectionResetError())
    assert (at.cancelled, at.closed) == (1, 0) and at.client not in at.client.connections


@pytest.mark.parametrize("asked", [False, True])
def test_bytes_that_are_no_request_end_the_connection(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    def refuse(client: Offering, data: bytes) -> None:
        assert data == b"xyz"
        raise h11.LocalProtocolError("bytes behind a request")

    monkeypatch.setattr(Offering, "data_received", refuse)
    at = Scene()
    cycle = at.answer(False) if asked else None
    at.client.data_received(b"xyz")
    assert at.aborted == 1 and (cycle is None or cycle.disconnected is True)


@pytest.mark.parametrize("error", [h11.LocalProtocolError("x"), RuntimeError("x"), None])
def test_an_application_whose_answer_is_not_due_any_more(error: Exception | None) -> None:
    called: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append((scope, receive, send))
        if error is not None:
            raise error

    at = Scene(app)
    cycle = at.answer(False)
    running = at.client.app({"type": "http"}, "receive", "send")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else StopIteration):
        running.__await__().send(None)  # type: ignore[attr-defined]
    [(scope, receive, send)] = called
    assert scope["type"] == "http" and (receive, send) == ("receive", "send")
    ended = isinstance(error, h11.LocalProtocolError)
    assert (at.aborted, cycle.disconnected) == (int(ended), ended)


# -- the server ----------------------------------------------------------------------------------------------------


def test_how_many_may_come_and_what_is_said_of_the_server() -> None:
    def tls() -> None:
        pass

    config = answering.server_of(Scene()._app, tls).config  # type: ignore[arg-type]
    assert (config.limit_concurrency, config.http, config.ws, config.lifespan) == (None, _Client, "none", "on")
    assert (config.timeout_keep_alive, config.timeout_graceful_shutdown) == (5, 1)
    assert (config.server_header, config.date_header, config.access_log, config.log_level) == (False, False, False,
                                                                                              "error")
    assert config.ssl_context_factory is tls and answering.server_of(Scene()._app).config.ssl_context_factory is None


def test_it_serves_one_socket_on_a_loop_of_its_own() -> None:
    found: list[Any] = []

    async def served(sockets: Any) -> None:
        found.append((sockets, type(asyncio.get_running_loop())))

    answering.serve(SimpleNamespace(serve=served), "socket", Limits())  # type: ignore[arg-type]
    assert found == [(["socket"], _Loop)]


# -- what it is told -----------------------------------------------------------------------------------------------


def test_without_certificates_nothing_is_encrypted() -> None:
    settings = _Settings(given(keys={"a": ["reader"]}, shown="b"))
    assert settings.listening() is None and (settings.keys, settings.shown) == ({"a": ("reader",)}, "b")
    settings.take(OtherKeys(keys={"c": ("operator",)}, shown="d"))
    assert (settings.keys, settings.shown) == ({"c": ("operator",)}, "d")


def test_each_connection_has_the_newest_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, good = list[Any](), True

    def context(*files: Path) -> Any:
        if not good:
            raise UserError("no pair")
        made.append(SimpleNamespace(files=files, sni_callback=None))
        return made[-1]

    monkeypatch.setattr(answering, "server_context", context)
    settings = _Settings(given(tls=["good.pem", "key.pem"]))
    assert made[0].files == (Path("good.pem"), Path("key.pem"))
    listening = settings.listening()
    assert listening is not None and listening("config", "default") is made[1]

    def newest() -> Any:
        connection = SimpleNamespace(context=made[1])
        assert made[1].sni_callback(connection, "name", made[1]) is None
        return connection.context

    assert newest() is made[0]
    settings.take(OtherKeys(keys={}, shown=""))
    assert newest() is made[2]
    good = False
    settings.take(OtherKeys(keys={"new": ("reader",)}, shown="x"))
    assert newest() is made[2] and settings.keys == {"new": ("reader",)} and settings.shown == "x"


def test_a_pair_that_is_none_is_an_error_at_the_beginning(tmp_path: Path) -> None:
    issued = issue(tmp_path)
    _Settings(given(tls=[str(issued.cert), str(issued.key)]))
    with pytest.raises(UserError):
        _Settings(given(tls=[str(issued.key), str(issued.cert)]))


def test_it_is_told_line_by_line_and_ends_with_its_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    server, took = SimpleNamespace(should_exit=False), list[Any]()
    lines = b"".join(json.dumps({"keys": {}, "shown": text}).encode() + b"\n" for text in "abc")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(lines)))

    def take(said: Any) -> None:
        assert server.should_exit is False
        took.append(said.shown)

    answering._follow(server, SimpleNamespace(take=take))  # type: ignore[arg-type]
    assert took == ["a", "b", "c"] and server.should_exit is True


# -- what it offers ------------------------------------------------------------------------------------------------


def given(**said: Any) -> ApiSettings:
    """What the process is given, as it comes over its stdin."""
    return ApiSettings.model_validate_json(json.dumps({
        "keys": {"k": ["reader"]}, "shown": "s", "tls": None, "node": "n", "replicas": "/r", "checkpoints": "/c",
        "cores": [], "reserved": 1, "follows": True, "shadow": 3, "copies": None, "store": None, "parity": None,
        "journals": None, "made": "/m", "socket": 11, "board": -1, "names": [],
        "limits": {"connections": 5, "strangers": 6, "per_address": 7},
    } | said))


class Exit(BaseException):
    pass


class Made(tuple[Any, ...]):
    """What was made, by its name and with what; a shelf is given its notices later."""

    notices: Any = None


class Process:
    """main(), of which every part is noted. said: settings."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.did: list[Any] = []
        self.made: dict[str, Any] = {}
        self.said: ApiSettings | None = given()
        patch.setattr(answering, "begun", lambda model: self.said)
        patch.setattr(answering, "silent_output", lambda: 12)
        for name in ("MemoryShelf", "DiskShelf", "ParityShelf", "StoreShelf", "StreamShelf", "LogShelf", "JournalShelf",
                     "Placed", "Glance", "NodeClient", "open_store", "client_context"):
            patch.setattr(answering, name, self._maker(name))
        patch.setattr(answering, "make_app", self._app)
        patch.setattr(answering, "server_of", lambda app, tls: ("server", app, tls))
        patch.setattr(answering, "serve", lambda *given: self.did.append(given))
        patch.setattr(answering, "socket", SimpleNamespace(socket=lambda fileno: ("socket", fileno)))
        patch.setattr(answering, "gc", SimpleNamespace(collect=lambda: self.did.append("collect"),
                                                       freeze=lambda: self.did.append("freeze")))
        patch.setattr(answering.threading, "Thread", self._thread)
        patch.setattr(answering.os, "_exit", self._exit)

    @staticmethod
    def _maker(name: str) -> Callable[..., Any]:
        return lambda *given, **more: Made((name, given, more))

    def _app(self, shelves: Any, keys: Any, glance: Any, streams: Any, notices: Any, names: Any) -> str:
        self.made = {"shelves": shelves, "keys": keys, "glance": glance, "streams": streams}
        assert all(shelf.notices is notices for shelf in shelves.values()) and names == ()
        return "app"

    def _thread(self, target: Any, args: Any, daemon: bool) -> Any:
        assert target is answering._follow and daemon is True
        self.settings = args[1]
        return SimpleNamespace(start=lambda: self.did.append(("follows", args[0])))

    @staticmethod
    def _exit(status: int) -> None:
        raise Exit(status)

    def shelves(self, **said: Any) -> dict[str, Any]:
        self.said = given(**said)
        with pytest.raises(Exit) as ended:
            answering.main()
        assert ended.value.args == (0,)
        server = ("server", "app", None)
        assert self.did == [("follows", server), "collect", "freeze", (server, ("socket", 11), Limits(5, 6, 7), 12)]
        found: dict[str, Any] = self.made["shelves"]
        return found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_a_node_that_ended_at_once_needs_nothing(process: Process) -> None:
    process.said = None
    assert answering.main() == 0 and process.did == []


def test_a_node_that_follows_jobs(process: Process) -> None:
    found = process.shelves()
    assert found["memory"][2].pop("vouch")("run", 0) == ""
    assert found == {
        "memory": ("MemoryShelf", (Path("/r"), "n"), {"reserved": 1, "needs": 3}),
        "disk": ("DiskShelf", (Path("/c"),), {"needs": 3}),
    }
    assert process.made["keys"]() == {"k": ("reader",)}
    process.settings.take(OtherKeys(keys={"other": ("reader",)}, shown=""))
    assert process.made["keys"]() == {"other": ("reader",)}
    assert process.made["glance"] is None and process.made["streams"] is None


def test_the_nearest_comes_first(process: Process) -> None:
    found = process.shelves(copies="/k", store={"url": "s3://x", "every": 1, "options": {"a": "b"}}, board=0)
    assert list(found) == ["memory", "copy", "disk", "store"] and process.made["glance"] == ("Glance", (0,), {})
    assert found["copy"] == ("DiskShelf", (Path("/k"),), {"tier": "copy", "needs": 3})
    name, (url, opens), more = found["store"]
    assert isinstance(more.pop("steps"), StoredSteps)
    assert (name, url, more, opens()) == ("StoreShelf", "s3://x", {"needs": 3}, ("open_store", ("s3://x", {"a": "b"}),
                                                                                  {}))


def test_a_node_with_journals(process: Process) -> None:
    """A log is nearer than what is made of others, a journal is farther, and the store is last."""
    found = process.shelves(journals="/j", cores=[4, 5], copies="/k", store={"url": "s3://x", "every": 1})
    assert list(found) == ["memory", "copy", "disk", "log", "journal", "store"]
    assert found["log"] == ("LogShelf", (Path("/j"),), {"needs": 3})
    name, (directory, cores), more = found["journal"]
    assert (name, directory, list(cores), more) == ("JournalShelf", Path("/j"), [4, 5], {"needs": 3})


def test_a_holder_follows_nothing(process: Process) -> None:
    assert list(process.shelves(follows=False, copies="/k")) == ["copy"]


@pytest.mark.parametrize(("others", "ca"), [([["h", 1], ["::1", 2]], ""), ([["h", 1]], "our.pem")])
def test_a_holder_of_parity(process: Process, others: Any, ca: str) -> None:
    found = process.shelves(follows=False, copies="/k", parity={
        "directory": "/p", "others": others, "most": 7, "ca": ca, "placement": "/k/placement.json"})
    assert list(found) == ["copy", "parity"] and process.made["streams"] == ("StreamShelf", (Path("/p"),), {})
    name, (directory, nodes, most), more = found["parity"]
    assert (name, directory, most, more) == ("ParityShelf", Path("/p"), 7, {"needs": 3})
    tls = ("client_context", ("our.pem",), {}) if ca else None
    process.settings.take(OtherKeys(keys={}, shown="newer"))
    assert nodes() == [("NodeClient", ((host, port), "newer", OTHERS_SECONDS, tls), {}) for host, port in others]


def test_whom_a_placement_says_is_asked(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    monkeypatch.setattr(answering, "Placed", lambda *some: placed.append(some) or (lambda: [("h", 9)]))
    found = process.shelves(parity={"directory": "/p", "others": None, "most": 7, "ca": "", "placement": "/k/x.json"})
    assert placed == [(Path("/k/x.json"), "n")]
    assert found["parity"][1][1]() == [("NodeClient", (("h", 9), "s", OTHERS_SECONDS, None), {})]
