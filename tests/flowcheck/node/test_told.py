"""The routes about the node itself: what they say, in which form, to whom; viewers that stay, are slow, or too many."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flowcheck.node.api import node_routes as told
from flowcheck.node.api.routes import make_app
from flowcheck.node.status.board import Board, Glance

from .test_api import KEY, SHOWN, Answer, get
from .told_scene import attached, document, iteration

ROUTES = ("/", "/metrics", "/v1/node")


@pytest.fixture
def board() -> Iterator[Board]:
    with contextlib.closing(Board()) as made:
        yield made


@pytest.fixture
def app(board: Board) -> Iterator[Any]:
    with contextlib.closing(Glance(board.fd)) as glance:
        yield make_app({}, KEY, glance)


def put(board: Board, *events: Any) -> Any:
    told_now = document(attached(), *events)
    assert board.write(json.dumps(told_now).encode())
    return told_now


# -- what they say ---------------------------------------------------------------------------------------------


def test_metrics(app: Any, board: Board) -> None:
    put(board, iteration(6))
    answer = get(app, "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'flowcheck_last_complete_step{group="dp0"} 7.0' in answer.body
    put(board, iteration(7))
    assert b'flowcheck_last_complete_step{group="dp0"} 8.0' in get(app, "/metrics").body


def test_metrics_as_they_are_asked_for(app: Any, board: Board) -> None:
    put(board)
    answer = get(app, "/metrics", accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")


def test_the_document(app: Any, board: Board) -> None:
    said = put(board, iteration(6))
    answer = get(app, "/v1/node")
    assert (answer.status, answer.json) == (200, said) and answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/metrics", "/v1/node"])
def test_before_the_node_has_said_anything(app: Any, path: str) -> None:
    for one in (app, make_app({}, KEY)):
        answer = get(one, path)
        assert answer.status == 503 and answer.json == {"why": "the node has said nothing so far"}
        assert answer.headers["retry-after"] == "1"


def test_the_page_needs_nothing_from_elsewhere(app: Any) -> None:
    answer = get(app, "/")
    text = answer.body.decode()
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", text)
    elsewhere = set(re.findall(r"\w+://[^\s\"'<]+", text))
    assert elsewhere == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text


def test_a_browser_runs_nothing_but_the_page_itself(app: Any) -> None:
    headers = get(app, "/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


# -- to whom ---------------------------------------------------------------------------------------------------


def basic(text: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Basic " + base64.b64encode(text.encode()))]


@pytest.mark.parametrize("path", ROUTES)
def test_nobody_without_the_key(app: Any, board: Board, path: str) -> None:
    put(board)
    for shown in ([], basic("reader:x"), basic(KEY), basic(f"{KEY}:"), basic(f"a:{KEY}x"), basic(f":{KEY[:-1]}"),
                  [(b"authorization", b"Basic " + KEY.encode())], [(b"authorization", b"Basic \xff\xff")],
                  [(b"authorization", b"Basic")], [(b"authorization", b"BASIC " + basic(f":{KEY}")[0][1][6:])],
                  [*basic(f"a:{KEY}"), *basic(f"a:{KEY}")]):
        assert get(app, path, shown).status == 401


@pytest.mark.parametrize("path", ROUTES)
def test_a_browser_shows_the_key_as_a_password(app: Any, board: Board, path: str) -> None:
    put(board)
    for shown in (SHOWN, basic(f"anybody:{KEY}"), basic(f":{KEY}")):
        assert get(app, path, shown).status == 200


def test_only_the_page_asks_for_a_password(app: Any) -> None:
    assert get(app, "/", []).headers["www-authenticate"].startswith('Basic realm="FlowCheck')
    for path in ("/metrics", "/v1/node", "/v1/versions", "/nowhere"):
        assert get(app, path, []).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ROUTES)
def test_they_are_only_read(app: Any, board: Board, path: str) -> None:
    put(board)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert get(app, path, method=method).status == 405


# -- viewers ---------------------------------------------------------------------------------------------------


class Viewer:
    """One stream: what has come, and a way to hang up. slow: takes nothing."""

    def __init__(self, app: Any, *, slow: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.came, self.hung_up, self.slow, self.asked = asyncio.Event(), asyncio.Event(), slow, False
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/v1/node",
                 "raw_path": b"/v1/node", "query_string": b"", "scheme": "http", "root_path": "",
                 "headers": [*SHOWN, (b"accept", b"text/event-stream")], "client": ("127.0.0.1", 1),
                 "server": ("127.0.0.1", 2)}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        """Its request has no body, as the server says first."""
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.came.set()
        if self.slow and message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    async def parts(self, least: int) -> list[str]:
        while len(self.sent) < least + 1:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), 60)
        return [message["body"].decode() for message in self.sent[1:]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "EVERY_SECONDS", 0.01)


def documents(parts: list[str]) -> list[Any]:
    return [json.loads(part.removeprefix("data: ")) for part in parts if part.startswith("data: ")]


def test_a_viewer_gets_each_new_document(app: Any, board: Board) -> None:
    first = put(board, iteration(6))

    async def watch() -> None:
        viewer = Viewer(app)
        parts = await viewer.parts(3)
        assert documents(parts) == [first] and set(parts[1:]) == {":\n\n"}  # nothing is new
        second = put(board, iteration(7))
        while len(found := documents(await viewer.parts(len(viewer.sent)))) < 2:
            pass
        assert found == [first, second]
        head = dict(viewer.sent[0]["headers"])
        assert viewer.sent[0]["status"] == 200 and head[b"content-type"].startswith(b"text/event-stream")
        assert b"content-length" not in head and head[b"cache-control"] == b"no-store"
        assert all(message["more_body"] for message in viewer.sent[1:])
        viewer.hung_up.set()
        await asyncio.wait_for(viewer.task, 60)

    asyncio.run(watch())


def test_a_viewer_may_come_before_the_node_has_said_anything(app: Any, board: Board) -> None:
    async def watch() -> None:
        viewer = Viewer(app)
        assert documents(await viewer.parts(2)) == []
        said = put(board)
        while not (found := documents(await viewer.parts(len(viewer.sent)))):
            pass
        assert found == [said]
        viewer.hung_up.set()
        await asyncio.wait_for(viewer.task, 60)

    asyncio.run(watch())


def test_viewers_are_bounded_and_who_goes_makes_room(
    app: Any, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "VIEWERS", 2)
    put(board)

    async def watch() -> None:
        viewers = [Viewer(app) for _ in range(2)]
        for one in viewers:
            await one.parts(1)
        third = Viewer(app)
        await asyncio.wait_for(third.task, 60)
        assert third.sent[0]["status"] == 503 and (b"retry-after", b"5") in third.sent[0]["headers"]
        assert json.loads(third.sent[1]["body"]) == {"why": "2 viewers are watching, and no more may"}
        viewers[0].hung_up.set()
        await asyncio.wait_for(viewers[0].task, 60)
        fourth = Viewer(app)
        await fourth.parts(1)
        assert fourth.sent[0]["status"] == 200
        for one in (viewers[1], fourth):
            one.hung_up.set()
            await asyncio.wait_for(one.task, 60)

    asyncio.run(watch())


def test_a_viewer_that_does_not_read_is_let_go(app: Any, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(told, "VIEWERS", 1)
    put(board)

    async def watch() -> None:
        slow = Viewer(app, slow=True)
        await asyncio.wait_for(slow.task, 60)
        quick = Viewer(app)
        await quick.parts(1)
        assert quick.sent[0]["status"] == 200  # its place is free again
        quick.hung_up.set()
        await asyncio.wait_for(quick.task, 60)

    asyncio.run(watch())


def test_a_question_about_the_head_alone_is_no_viewer(app: Any, board: Board) -> None:
    said = put(board)
    answer: Answer = get(app, "/v1/node", method="HEAD", accept="text/event-stream")
    assert answer.status == 200 and answer.headers["content-length"] == str(len(json.dumps(said)))
