"""Memory straight into a connection, over real sockets and the server that nodes have."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.server import ServerState

from flowcheck.control.tls import client_context, server_context
from flowcheck.node.api import sending
from flowcheck.node.api.sending import NAME, FromMemory, Offering
from flowcheck.node.api.worker import serve, server_of
from flowcheck.node.doors.http_door import Limits

from ..certificates import issue

DATA = os.urandom(9 << 20)  # more than a socket takes at once
PIECE = 2 << 20
SECONDS = 60.0


class Scene:
    """A server. straight: its connections offered the extension. stops_at: bytes after which the application fails."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.straight: list[bool] = []
        self.stops_at = len(DATA)
        self.asked: list[int] = []  # bytes before each piece
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        self.server = server_of(Starlette(routes=[
            Route("/data", self._data), Route("/text", lambda request: PlainTextResponse("text")),
        ]), None if tls is None else lambda *_: tls)
        self._thread = threading.Thread(target=serve, args=(self.server, listening, Limits()))
        self._thread.start()

    async def _data(self, request: Request) -> Response:
        self.straight.append(NAME in request.scope.get("extensions", {}))
        return FromMemory(self._pieces, 200, {"Content-Length": str(len(DATA))}, "application/octet-stream")

    async def _pieces(self) -> AsyncIterator[list[memoryview]]:
        view = memoryview(DATA)
        for first in range(0, self.stops_at, PIECE):
            self.asked.append(first)
            piece = view[first : first + PIECE]
            yield [piece[:7], piece[7:7], piece[7:]]
        if self.stops_at < len(DATA):
            raise RuntimeError("the version is gone")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=SECONDS)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with contextlib.closing(Scene()) as made:
        yield made


def take(connection: http.client.HTTPConnection, path: str = "/data", method: str = "GET") -> tuple[int, bytes, Any]:
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_one_connection_is_asked_again_and_again(scene: Scene) -> None:
    """What goes past h11 and the transport is counted by both: the next answer begins where this one ends."""
    with contextlib.closing(scene.connect()) as connection:
        for path, data in (("/data", DATA), ("/text", b"text"), ("/data", DATA), ("/data", DATA), ("/text", b"text")):
            status, body, headers = take(connection, path)
            assert (status, body) == (200, data) and headers["Content-Length"] == str(len(data))
    assert scene.straight == [True] * 3


def test_a_head_has_no_body(scene: Scene) -> None:
    with contextlib.closing(scene.connect()) as connection:
        status, body, headers = take(connection, method="HEAD")
        assert (status, body) == (200, b"") and headers["Content-Length"] == str(len(DATA))
        assert take(connection)[1] == DATA
    assert scene.asked == list(range(0, len(DATA), PIECE))


def test_several_take_at_once(scene: Scene) -> None:
    found: list[bytes] = []

    def one() -> None:
        with contextlib.closing(scene.connect()) as connection:
            found.extend(take(connection)[1] for _ in range(3))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 12


def test_an_answer_that_stops_ends_its_connection_and_no_other(scene: Scene) -> None:
    with contextlib.closing(scene.connect()) as whole:
        scene.stops_at = 3 * PIECE
        with contextlib.closing(scene.connect()) as connection, pytest.raises(http.client.IncompleteRead) as broken:
            take(connection)
        assert broken.value.partial == DATA[: 3 * PIECE]
        scene.stops_at = len(DATA)
        assert take(whole)[1] == DATA


@pytest.mark.parametrize("how", ["closes", "resets", "takes nothing"])
def test_nothing_is_read_for_a_client_that_is_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    if how == "takes nothing":
        monkeypatch.setattr(sending, "PIECE_SECONDS", 0.3)
    with contextlib.closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(scene.address)
        connection.sendall(b"GET /data HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(5) == b"HTTP/"
        if how == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "takes nothing":
            until(lambda: not scene.server.server_state.connections)
            monkeypatch.undo()  # the next one may be slow
        else:
            connection.close()
            until(lambda: not scene.server.server_state.connections and not scene.server.server_state.tasks)
    assert len(scene.asked) < len(DATA) // PIECE, "the rest was not asked for"
    with contextlib.closing(scene.connect()) as other:
        assert take(other)[1] == DATA
    assert "Traceback" not in capfd.readouterr().err


def test_bytes_that_must_be_encrypted_are_not_sent_as_they_lie(tmp_path: Path) -> None:
    own = issue(tmp_path)
    with contextlib.closing(Scene(server_context(own.cert, own.key))) as scene:
        connection = http.client.HTTPSConnection(*scene.address, timeout=SECONDS, context=client_context(str(own.ca)))
        with contextlib.closing(connection):
            assert take(connection)[:2] == (200, DATA) and take(connection, "/text")[1] == b"text"
    assert scene.straight == [False]


def test_the_extension_is_one_among_others() -> None:
    """What the server has offered by then is offered still."""
    asked: list[dict[str, Any]] = []

    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return {"socket": near, "peername": ("h", 1), "sockname": ("h", 2)}.get(name)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope)

    async def offer() -> None:
        config = uvicorn.Config(app, ws="none")
        config.load()
        one = Offering(config=config, server_state=ServerState(), app_state={})
        one.connection_made(Transport())
        given: Any = None
        for scope in ({"type": "http"}, {"type": "http", "extensions": {"other": {}}}):
            await one.app(scope, given, given)
        assert [list(scope["extensions"]) for scope in asked] == [[NAME], ["other", NAME]]
        assert all(scope["extensions"][NAME] == one._direct for scope in asked)

    near, far = socket.socketpair()
    with near, far:
        asyncio.run(offer())


class Small:
    """A connection that holds little. taken: what its other side has read."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.near.setblocking(False)
        self.far.settimeout(SECONDS)
        self.taken = bytearray()

    def read(self, size: int) -> None:
        while len(self.taken) < size:
            self.taken += self.far.recv(1 << 16)

    def __enter__(self) -> Small:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self.far.close()


def test_what_a_connection_does_not_take_at_once_is_sent_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than so much in one call, and others are served between two of them."""
    monkeypatch.setattr(sending, "AT_ONCE", 1000)
    sizes, real, turns = list[int](), os.write, [0]

    def write(file: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(file, data)

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def send() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(others())
        await sending._write(loop, small.near.fileno(), memoryview(DATA[:300_500]))
        task.cancel()
        with pytest.raises(KeyError):
            loop._selector.get_key(small.near.fileno())  # type: ignore[attr-defined]  # nobody waits for it any more

    with Small() as small:
        reading = threading.Thread(target=small.read, args=(300_500,))
        reading.start()
        monkeypatch.setattr(os, "write", write)
        asyncio.run(send())
        monkeypatch.undo()
        reading.join()
        assert small.taken == DATA[:300_500] and max(sizes) == 1000 and min(sizes) < 1000 and turns[0] >= 300


def test_nothing_is_written_of_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: int, data: memoryview) -> int:
        raise AssertionError("there is nothing")

    monkeypatch.setattr(os, "write", write)

    async def send() -> None:
        await sending._write(asyncio.get_running_loop(), -1, memoryview(b""))

    asyncio.run(send())


class Watched:
    """The loop that runs, and of which descriptors it was asked to say that they are writable."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.asked: list[int] = []
        self.create_future, self.remove_writer = self._loop.create_future, self._loop.remove_writer

    def add_writer(self, file: int, *call: Any) -> None:
        self.asked.append(file)
        self._loop.add_writer(file, *call)


def test_only_what_takes_less_than_it_was_given_is_waited_for() -> None:
    async def write(taken: bytes, room: int) -> list[int]:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try:
            os.write(writing, b"." * (65536 - room))  # what a pipe holds
            watched = Watched()
            sent = asyncio.create_task(sending._write(watched, writing, memoryview(taken)))  # type: ignore[arg-type]
            while not sent.done() and not watched.asked:
                await asyncio.sleep(0)
            os.read(reading, 1 << 20)
            await sent
            return watched.asked
        finally:
            os.close(reading)
            os.close(writing)

    assert asyncio.run(write(bytes(5000), 65536)) == []
    assert len(asyncio.run(write(bytes(5000), 0))) == 1


def test_headers_go_before_it_and_a_connection_that_fails_is_over() -> None:
    left, over = [7, 7, 0], []

    class Transport:
        def get_write_buffer_size(self) -> int:
            return left.pop(0)

        def is_closing(self) -> bool:
            return True

        def abort(self) -> None:
            over.append("aborted")

    class Made(Offering):
        def __init__(self) -> None:
            self.transport = Transport()  # type: ignore[assignment]
            self.cycle = type("Cycle", (), {"disconnected": False})()

    made = Made()
    with pytest.raises(ConnectionResetError, match="the connection was closed"):
        asyncio.run(made._direct([memoryview(b"x")]))
    assert left == [] and over == ["aborted"] and made.cycle.disconnected, "nothing more is said to it"


def test_a_connection_that_is_writable_twice_is_ready_once() -> None:
    async def ready() -> bool:
        future = asyncio.get_running_loop().create_future()
        sending._ready(future)
        sending._ready(future)
        return future.done() and future.result() is None

    assert asyncio.run(ready())


def test_descriptors_are_given_back(scene: Scene) -> None:
    with contextlib.closing(scene.connect()) as connection:
        def ask() -> None:
            take(connection)
            take(connection, "/text")  # which is answered when all of that is over

        ask()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            ask()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_that_goes_while_it_is_sent_to_ends_the_answer() -> None:
    """And nothing is said after that: not even that the answer is over."""
    sent: list[dict[str, Any]] = []

    async def pieces() -> AsyncIterator[list[memoryview]]:
        yield [memoryview(b"ab")]
        raise AssertionError("nobody takes it")

    async def send(message: Any) -> None:
        sent.append(message)

    async def direct(views: Any) -> None:
        raise TimeoutError

    answer = FromMemory(pieces, 200, {"Content-Length": "3"}, "text/plain")
    nobody: Any = None
    asyncio.run(answer({"type": "http", "method": "GET", "extensions": {NAME: direct}}, nobody, send))
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert answer.background is None and answer.media_type == "text/plain"
    assert (b"content-length", b"3") in sent[0]["headers"] and sent[0]["status"] == 200


def test_without_the_extension_it_goes_as_anything_does() -> None:
    """As over TLS, where bytes must be encrypted on their way."""
    sent: list[dict[str, Any]] = []

    async def pieces() -> AsyncIterator[list[memoryview]]:
        yield [memoryview(b"ab"), memoryview(b"")]
        yield [memoryview(b"c")]

    async def send(message: Any) -> None:
        sent.append(message)

    answer = FromMemory(pieces, 206, {"Content-Length": "3"}, "text/plain")
    with contextlib.suppress(StopIteration):
        answer({"type": "http", "method": "GET"}, None, send).send(None)  # type: ignore[arg-type]
    assert [m.get("body") for m in sent] == [None, b"abc"[:2], b"c", b""] and sent[0]["status"] == 206
    assert [m.get("more_body") for m in sent[1:]] == [True, True, False]


def until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.01)
