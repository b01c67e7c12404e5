"""Nodes that tell each other what they have, over real connections: those that agree, and those that are gone, slow,
strange, or lie. Nobody here waits for anybody: what is asked of a group's thread returns at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowcheck.control.protocol import Bytes, Flows, Limits, Link, RecordsError, Refused, Steps, accept
from flowcheck.node.groups.control import ControlServer
from flowcheck.node.peers.common_step import Common
from flowcheck.node.peers.step_gossip import TEXT, Neighbours

TOKEN = b"a token that only tests have"
RUN = ("run", 0)
LONGEST = 60.0


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + LONGEST
    while not true():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.002)


class Node:
    """A node's control port, its part in the common step, and whom it tells."""

    def __init__(self, name: str, token: bytes = TOKEN, port: int = 0) -> None:
        self.name, self.token = name, token
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.common = Common(name, 60.0, 3, self.say)
        self.server = ControlServer(
            ("127.0.0.1", port), token, 16, lambda group: "no group", self.say, hear=self.common.hear)
        self.server.start()
        self.neighbours: Neighbours | None = None

    def say(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for what, fields in list(self.said) if what == event]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    def tell(self, *addresses: tuple[str, int], seconds: float = LONGEST, pause: float = 0.01) -> None:
        self.neighbours = Neighbours(addresses, lambda: self.token, self.common, self.say, None, seconds, pause)
        self.neighbours.start()

    def has(self, group: str, *steps: int) -> None:
        self.kept = self.common.order(group, RUN, steps)

    def knows(self, group: str, *steps: int) -> bool:
        return any(node.have.get((RUN, group)) == set(steps) for node in list(self.common._nodes.values()))

    def close(self) -> None:
        if self.neighbours is not None:
            self.neighbours.close()
        self.server.close()


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str, token: bytes = TOKEN, port: int = 0) -> Node:
        made.append(Node(name, token, port))
        return made[-1]

    yield make
    for one in made:
        one.close()


Talk = Callable[[Link], None]


class Fake:
    """Something at a port that is asked as a node is. talk: what it does with each message after the opening."""

    def __init__(self, talk: Talk, opens: bool = True) -> None:
        self._talk, self._opens = talk, opens
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self.came = 0
        self._links: list[Link] = []
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.came += 1
            self._links.append(Link(sock))
            self._threads.append(threading.Thread(target=self._serve, args=(self._links[-1],)))
            self._threads[-1].start()

    def _serve(self, link: Link) -> None:
        try:
            if self._opens:
                accept(link, TOKEN)
            link.limits = lambda: Limits(1 << 20)
            while self._opens:
                assert isinstance(link.receive(wait=LONGEST)[0], Steps)
                self._talk(link)
            self._talk(link)
        except (RecordsError, TimeoutError):
            pass
        finally:
            link.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join(LONGEST)


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def make(talk: Talk, opens: bool = True) -> Fake:
        made.append(Fake(talk, opens))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_two_nodes_know_what_each_other_has(node: Callable[..., Node]) -> None:
    one, other = node("one"), node("other")
    one.has("s0", 5, 6)
    other.has("s1", 4, 5)
    one.tell(other.address)
    other.tell(one.address)
    until(lambda: one.knows("s1", 4, 5) and other.knows("s0", 5, 6))
    one.has("s0", 6, 7)
    until(lambda: other.knows("s0", 6, 7))
    other.has("s1", 5, 6)
    until(lambda: one.knows("s1", 5, 6))
    assert one.common.order("s0", RUN, (5, 6, 7)) == (6, 7)
    assert not one.events("absent") and not other.events("absent")


def test_one_that_is_told_hears_the_answer_to_it(node: Callable[..., Node]) -> None:
    """Only one of the two names the other."""
    one, other = node("one"), node("other")
    other.has("s1", 4, 5)
    one.has("s0", 5, 6)
    one.tell(other.address)
    until(lambda: one.knows("s1", 4, 5) and other.knows("s0", 5, 6))
    other.has("s1", 5, 6)  # heard with the next beat
    until(lambda: one.knows("s1", 5, 6))


def test_a_node_that_ends_is_named_once_and_again_when_it_is_back(node: Callable[..., Node]) -> None:
    one, other = node("one"), node("other")
    other.has("s1", 4, 5)
    one.has("s0", 5, 6)
    one.tell(other.address)
    until(lambda: one.knows("s1", 4, 5))
    host, port = other.address
    other.close()
    until(lambda: one.events("absent"))
    assert one.knows("s1", 4, 5), "what it had it may still have"
    for newest in range(7, 20):
        one.has("s0", newest - 1, newest)
    node("back", port=port).has("s1", 5)
    until(lambda: one.events("present"))
    until(lambda: one.knows("s1", 5))
    (absent,), (present,) = one.events("absent"), one.events("present")
    assert absent["node"] == present["node"] == f"{host}:{port}" and absent["why"]


def silent(link: Link) -> None:
    link.receive(wait=LONGEST)


def closes(link: Link) -> None:
    link.close()


def says(message: Any, payload: bytes = b"") -> Talk:
    return lambda link: link.send(message, [payload] if payload else [], len(payload))


def raw(data: bytes) -> Talk:
    return lambda link: link._write(data, time.monotonic() + LONGEST)


STEPS = Steps("c" * 32, "c", [["run", 0, "s1", [6]]])


@pytest.mark.parametrize(("talk", "why"), [
    (closes, "connection "),
    (silent, "no answer"),
    (says(Flows([])), "a Flows where steps were due"),
    (says(Bytes(1, 1, why="no")), "a Bytes where steps were due"),
    (says(Refused("no room")), "refused: no room"),
    (says(STEPS, b"more"), "a payload of 4 bytes, at most 0 are read here"),
    (raw(b"GET / HTTP/1.1\r\n\r\n"), "does not speak this protocol"),
    (raw(b"FCR1" + (TEXT + 1).to_bytes(4, "big") + bytes(8)), f"a message of {TEXT + 1} bytes, at most {TEXT}"),
    (raw(b"FCR1" + (9).to_bytes(4, "big") + bytes(8) + b"[" * 9), "not a message"),
], ids=["closes", "silent", "flows", "bytes", "refused", "payload", "http", "long", "no json"])
def test_one_that_is_no_node_is_named_and_costs_nothing(
    node: Callable[..., Node], fake: Callable[..., Fake], talk: Talk, why: str,
) -> None:
    bad = fake(talk)
    one, other = node("one"), node("other")
    other.has("s1", 6, 7)
    one.has("s0", 6, 7)
    one.tell(bad.address, other.address, seconds=0.3 if talk is silent else LONGEST)
    until(lambda: one.events("absent") and one.knows("s1", 6, 7))
    (absent,) = one.events("absent")
    assert absent["node"] == "{}:{}".format(*bad.address) and absent["why"].startswith(why)
    until(lambda: bad.came > 2)  # it is tried again, and nothing more is said
    assert len(one.events("absent")) == 1
    one.has("s0", 7, 8)
    until(lambda: other.knows("s0", 7, 8))
    assert one.common.order("s0", RUN, (6, 7, 8)) == (7, 8)


@pytest.mark.parametrize("opens", [True, False])
def test_one_that_stalls_holds_up_neither_a_group_nor_the_end(
    node: Callable[..., Node], fake: Callable[..., Fake], opens: bool,
) -> None:
    """Nor does one that accepts and never says a word."""
    bad, one = fake(silent, opens), node("one")
    one.tell(bad.address)
    until(lambda: bad.came)
    began = time.monotonic()
    for newest in range(200):
        one.has("s0", newest, newest + 1)
        one.common.look()
    assert one.neighbours is not None
    one.neighbours.close()
    assert time.monotonic() - began < LONGEST / 2, "a time that is far below what it would wait"
    assert not any(thread.name.startswith("flowcheck to node") for thread in threading.enumerate())


def test_nobody_who_lacks_the_token_is_told_or_heard(node: Callable[..., Node]) -> None:
    one, other = node("one"), node("other", b"another token, of somebody else")
    one.has("s0", 5, 6)
    other.has("s1", 5, 6)
    one.tell(other.address)
    other.tell(one.address)
    until(lambda: one.events("absent") and other.events("absent"))
    assert not one.common._nodes and not other.common._nodes


def test_a_node_that_is_told_its_own_address_has_nothing_of_it(node: Callable[..., Node]) -> None:
    one = node("one")
    one.has("s0", 5, 6)
    one.tell(one.address)
    seen = one.common._told
    one.has("s0", 6, 7)
    until(lambda: one.common._told > seen)
    assert not one.common._nodes and not one.events("absent")
