"""Twenty of twenty trainers get in at the control port whatever strangers do to it: real TCP, the real server."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flowcheck.control.protocol import Link, RecordsError, Wanted, greet
from flowcheck.control.tls import Secure, client_context, server_context
from flowcheck.node.doors import gate

from ..certificates import issue
from ..hand_node import LONGEST, until
from .crowd import HELLO, SIZE, crowd
from .test_control_server import TOKEN, Port

TRAINERS = 20
ASK = struct.pack(">4sIQ", b"FCR1", 4000, 0)  # a frame's head, and nothing behind it
BAD = struct.pack(">4sIQ", b"FCR1", 2, 0) + b"{}"
KINDS = {
    "silent": ("silent", b""), "of many addresses": ("many", b""), "half a head": ("talking", ASK[:5]),
    "half a hello": ("talking", ASK + b'{"type":'), "a byte a second": ("slow", ASK), "another protocol":
    ("talking", b"GET / HTTP/1.1\r\n\r\n"), "no hello": ("talking", BAD), "come and go": ("loop", b""),
    "a flood": ("flood", b""), "a flood of many addresses": ("flood of many", b""), "many at once": ("pipelined", BAD),
}
TLS = {"silent": ("silent", b""), "half a handshake": ("talking", HELLO), "a byte a second": ("slow", HELLO),
       "a flood": ("flood", b""), "no TLS": ("talking", ASK)}


class Tls:
    def __init__(self, folder: Path) -> None:
        issued = issue(folder)
        self.server, self.client = server_context(issued.cert, issued.key), client_context(str(issued.ca))


class Door(Port):
    """trainer(): one that connects, is known and has its first message. tls: of both sides."""

    def __init__(self, tls: Tls | None = None, connections: int = 64, **given: Any) -> None:
        super().__init__(connections, tls=(lambda: tls.server) if tls is not None else lambda: None, **given)
        self._tls = tls
        host, _, port = self.server.address.rpartition(":")
        self.to = host, int(port)
        self.server.start()

    def trainer(self, rank: int) -> float:
        """How long it took: who is sent away before it was heard dials again, as trainers do."""
        began = time.monotonic()
        while True:
            try:
                self._dial(rank)
                return time.monotonic() - began
            except (RecordsError, OSError):
                if time.monotonic() - began > gate.OPENING_SECONDS:
                    raise

    def _dial(self, rank: int) -> None:
        sock = socket.create_connection(self.to, timeout=LONGEST)
        link = Link(sock, Secure(sock, self._tls.client, "127.0.0.1") if self._tls is not None else None)
        self.links.append(link)
        greet(link, TOKEN, run_id="run", epoch=3, rank=rank, ranks=64, group="", instance="first")
        assert link.receive(wait=LONGEST) == (Wanted(["user", "userhead", "notice"], ""), 0)


@pytest.fixture
def door() -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def start(*given: Any, **more: Any) -> Door:
        made.append(Door(*given, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


def all_come(one: Door) -> None:
    with ThreadPoolExecutor(4) as pool:
        took = list(pool.map(one.trainer, range(2, 2 + TRAINERS)))
    assert len(took) == TRAINERS and max(took) < gate.OPENING_SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_gets_in_beside(door: Callable[..., Door], kind: str) -> None:
    one, (what, said) = door(), KINDS[kind]
    with crowd(what, one.to, said) as others:
        until(lambda: others.rounds > 20 or len(others.sockets) >= SIZE or what == "slow")
        all_come(one)
        assert sum(thread.name.startswith("flowcheck 127") for thread in threading.enumerate()) == TRAINERS


@pytest.mark.parametrize("kind", TLS)
def test_every_trainer_gets_in_over_tls_beside(door: Callable[..., Door], tmp_path: Path, kind: str) -> None:
    one, (what, said) = door(Tls(tmp_path)), TLS[kind]
    with crowd(what, one.to, said) as others:
        until(lambda: len(others.sockets) >= SIZE)
        all_come(one)


def test_nodes_that_are_known_and_say_nothing_leave_room_for_trainers(door: Callable[..., Door]) -> None:
    one = door(connections=8)
    for _ in range(6):
        one.attach(role="peer")
    with pytest.raises(RecordsError, match="6 nodes are connected"):
        one.attach(role="peer")
    for rank in (2, 3):
        one.trainer(rank)
    one.sent_away()


def test_who_does_not_come_to_an_end_has_five_seconds(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "OPENING_SECONDS", 0.3)
    one = door()
    with contextlib.closing(one.connect()) as link:
        link._socket.sendall(ASK[:3])
        until(lambda: one.server.connected["strangers"] == 1)
        while link._socket.recv(4096):
            pass
    assert one.events.get(timeout=60)[1]["why"] == "too slow: 13 bytes of a message still missing"
    assert one.server.connected == {"known": 0, "strangers": 0, "ended": 1}


class Few(socket.socket):
    """A listener of a process with few descriptors. most(): is there none left?"""

    none_left: Callable[[], bool] = staticmethod(lambda: False)
    asked: list[float] = []  # replaced by each test

    def accept(self) -> Any:
        self.asked.append(time.monotonic())
        if self.none_left():
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> type[Few]:
    create = socket.create_server
    monkeypatch.setattr(Few, "asked", [])
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: Few(fileno=create(*a, **k).detach()))
    return Few


def test_where_descriptors_run_out_strangers_go(
    door: Callable[..., Door], few: type[Few], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = door()
    monkeypatch.setattr(few, "none_left", staticmethod(lambda: one.server.connected["strangers"] >= 40))
    with crowd("silent", one.to) as others:
        all_come(one)
        assert one.server.connected["ended"] > 0 and len(others.sockets) == SIZE


def test_without_strangers_a_full_process_waits(
    door: Callable[..., Door], few: type[Few], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor, and nobody who could give one up: looked at again a moment later, and not at once."""
    monkeypatch.setattr(few, "none_left", staticmethod(lambda: len(few.asked) < 5))
    one = door()
    one.attach(rank=2)
    gaps = [after - before for before, after in zip(few.asked, few.asked[1:4], strict=False)]
    assert len(gaps) == 3 and min(gaps) > gate.AGAIN_SECONDS / 2
    assert one.events.get(timeout=60)[1]["why"] == "the control port takes nobody: Too many open files"


def test_one_that_sends_what_nobody_thought_of_is_alone_with_that(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised, memory that runs out too: the port goes on."""
    one = door()
    for error in (MemoryError(), ZeroDivisionError("x")):
        one.now += 3600
        with monkeypatch.context() as patch:
            def fails(*_: Any, error: Exception = error) -> Any:
                raise error

            patch.setattr(gate._Stranger, "take", fails)
            with pytest.raises(RecordsError):
                one.attach(rank=3)
        assert type(error).__name__ in one.events.get(timeout=60)[1]["why"]
        one.attach(rank=2).close()
    assert one.events.empty()
