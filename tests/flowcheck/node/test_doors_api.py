"""Who shows a key is served by the HTTP API whatever strangers do to it: real sockets at the process that answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.node.api.supervisor import Serving
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.status.board import Board
from flowcheck.node.status.heartbeat import SILENT_SECONDS

from ..certificates import Issued, issue
from ..hand_api import KEY, TOKEN
from ..hand_node import LONGEST, until
from .crowd import HALF, HELLO, SIZE, crowd
from .told_scene import document

SECONDS = 2.0
ASKED = f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
STRANGE = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000
LINES = STRANGE[:-2] + b"a:b\r\n" * 5000 + b"\r\n"
KINDS = {
    "silent": ("silent", b""), "of many addresses": ("many", b""), "half a line": ("talking", HALF[:9]),
    "half a request": ("talking", HALF), "a byte a second": ("slow", HALF), "no key": ("talking", STRANGE),
    "a key, and silent then": ("talking", ASKED), "come and go": ("loop", b""), "a flood": ("flood", b""),
    "a flood of many addresses": ("flood of many", b""), "pipelined": ("pipelined", STRANGE),
    "tiny chunks": ("talking", CHUNKS), "tiny headers": ("talking", LINES),
    "no request at all": ("talking", b"\x00\xff\r\n\r\n"),
}
TLS = {"silent": ("silent", b""), "half a handshake": ("talking", HELLO), "a byte a second": ("slow", HELLO),
       "a flood": ("flood", b"")}


class Scene:
    """A node's API. tls: what it shows, if anything."""

    def __init__(self, folder: Path, api: dict[str, Any], tls: Issued | None = None) -> None:
        tables = {"tls": {"cert": str(tls.cert), "key": str(tls.key)}} if tls is not None else {}
        config = NodeConfig.model_validate({
            "name": "n", "control": {"listen": "127.0.0.1:0", "token_file": "t"}, "capture": {"device": "x"},
            "api": {"listen": "127.0.0.1:0"} | api, "replica": {"directory": str(folder)},
            "output": {"directory": str(folder)}, **tables,
        })
        self.tls, self.said = tls, list[dict[str, Any]]()
        self.board = Board()
        self.board.write(json.dumps(document()).encode())
        self.node = Serving(config, TOKEN.encode(), lambda event, **fields: self.said.append(fields), self.board.fd)
        host, _, port = self.node.address.rpartition(":")
        self.address = host, int(port)
        assert self.ask("/healthz", None)[0] == 200

    def ask(self, path: str, key: str | None = KEY) -> tuple[int, float]:
        """Status, and seconds from before the connection to the end of the answer."""
        began = time.monotonic()
        if self.tls is not None:
            context = ssl.create_default_context(cafile=str(self.tls.ca))
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                *self.address, timeout=LONGEST, context=context)
        else:
            connection = http.client.HTTPConnection(*self.address, timeout=LONGEST)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            with contextlib.closing(connection.getresponse()) as answer:
                answer.read()
                return answer.status, time.monotonic() - began

    def serves(self) -> None:
        for path, key in (("/v1/status", KEY), ("/healthz", None), ("/v1/node", KEY), ("/v1/versions", KEY)) * 3:
            status, seconds = self.ask(path, key)
            assert (status, seconds < SECONDS) == (200, True), (path, status, seconds)

    def close(self) -> None:
        self.node.close()
        self.board.close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """api(tls=None, connections=...) -> a node's API."""
    made: list[Scene] = []

    def start(tls: Issued | None = None, **keys: Any) -> Scene:
        made.append(Scene(tmp_path, keys, tls))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_with_a_key_is_served_beside(api: Callable[..., Scene], kind: str) -> None:
    one, (what, said) = api(), KINDS[kind]
    with crowd(what, one.address, said) as others:
        until(lambda: others.rounds > 20 or len(others.sockets) >= SIZE or what == "slow")
        until(lambda: said != ASKED or others.answered())  # then they are silent
        one.serves()


@pytest.mark.parametrize("kind", TLS)
def test_a_reader_over_tls_is_served_beside(api: Callable[..., Scene], tmp_path: Path, kind: str) -> None:
    one, (what, said) = api(issue(tmp_path)), TLS[kind]
    with crowd(what, one.address, said) as others:
        until(lambda: len(others.sockets) >= SIZE)
        one.serves()


@pytest.mark.parametrize("asked", [HEALTH, HEALTH.replace(b"GET", b"POST"), HEALTH.replace(b"GET", b"HEAD"), STRANGE])
def test_who_has_shown_nothing_gets_one_answer(api: Callable[..., Scene], asked: bytes) -> None:
    """For one connection: he would be the newest again and again, and readers would be sent away for him."""
    with contextlib.closing(socket.create_connection(api().address, timeout=LONGEST)) as sock:
        sock.sendall(asked * 3)
        said = b""
        while piece := sock.recv(65536):
            said += piece
    assert said.count(b"HTTP/1.1 ") == 1 and b"connection: close" in said.lower()


@pytest.mark.parametrize("asked", [
    CHUNKS, LINES, STRANGE.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"),
    ASKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"), ASKED[:-2] + b"X: " + b"x" * 9000 + b"\r\n\r\n",
], ids=["chunks", "lines", "a body", "a body, with a key", "a long line"])
def test_a_request_that_is_larger_than_any_is_not_looked_through(api: Callable[..., Scene], asked: bytes) -> None:
    with contextlib.closing(socket.create_connection(api().address, timeout=LONGEST)) as sock:
        said = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(asked)
            while piece := sock.recv(65536):
                said += piece
    assert said.partition(b"\r\n")[0] in (b"", b"HTTP/1.1 400 Bad Request")


def reader(one: Scene, path: str = "/v1/status") -> socket.socket:
    """One that has a place, and keeps it as long as it is let."""
    sock = socket.create_connection(one.address, timeout=LONGEST)
    sock.sendall(ASKED.replace(b"/v1/status", path.encode()))
    assert sock.recv(64).startswith(b"HTTP/1.1 200")
    return sock


def watch(one: Scene) -> socket.socket:
    """One that is being answered for as long as it likes."""
    sock = socket.create_connection(one.address, timeout=LONGEST)
    sock.sendall(ASKED.replace(b"/v1/status", b"/v1/node").replace(b"Host", b"Accept: text/event-stream\r\nHost"))
    assert sock.recv(64).startswith(b"HTTP/1.1 200")
    return sock


def test_where_all_places_are_taken_one_that_asks_nothing_goes(api: Callable[..., Scene]) -> None:
    one = api(connections=2)
    with contextlib.closing(watch(one)) as busy, contextlib.closing(reader(one)) as idle:
        with contextlib.closing(reader(one)):
            while idle.recv(4096):
                pass  # to its end: it was ended for the newcomer
            assert busy.recv(64)


def test_where_all_are_being_answered_one_is_asked_to_come_again_and_health_is_told(api: Callable[..., Scene]) -> None:
    one = api(connections=2)
    with contextlib.closing(watch(one)), contextlib.closing(watch(one)):
        assert one.ask("/v1/status")[0] == 503
        assert one.ask("/healthz", None)[0] == 200 and one.ask("/metrics")[0] == 200
        assert one.ask("/metrics", None)[0] == 401  # it needs its key all the same
        until(lambda: (one.node.look(), one.node.connected.get("turned_away"))[1] == 1)
    until(lambda: one.ask("/v1/status")[0] == 200)


def test_one_descriptor_more_than_there_is_ends_a_stranger_and_burns_nothing(api: Callable[..., Scene]) -> None:
    one = api(strangers=65536, strangers_per_address=65536)
    process = one.node.child.process
    assert process is not None
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))  # under way: its settings were made for more
    with crowd("silent", one.address):
        one.serves()
        before = _ticks(process.pid)
        time.sleep(1.0)
        assert _ticks(process.pid) - before < 50  # hundredths of a second
        one.serves()


def _ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_one_that_hangs_is_replaced_within_seconds(api: Callable[..., Scene]) -> None:
    one = api()
    until(lambda: (one.node.look(), one.node.connected)[1])
    process = one.node.child.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: (one.node.look(), one.said)[1])
    assert SILENT_SECONDS - 1 < time.monotonic() - began < 4 * SILENT_SECONDS
    assert one.said[0]["process"] == "api" and one.said[0]["cause"] == "hung" and "stopped" in one.said[0]["why"]
    assert one.ask("/v1/status")[0] == 200
    until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL and len(one.said) == 1
