"""Asking peers: each of them is a thread that a test makes, behind a real port. What they refuse, and how they lie."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowcheck.control.protocol import (
    RANGES_TEXT,
    Bytes,
    Flows,
    Hello,
    Holes,
    Limits,
    Link,
    RecordsError,
    Refused,
    accept,
)
from flowcheck.control.tls import Secure, client_context, server_context
from flowcheck.node.peers import client as module
from flowcheck.node.peers.client import DISTRUST, PAUSE, Peers, Who, checked, dial
from flowcheck.rebuild.iteration.given import Answer

from ..certificates import issue

TOKEN = b"a token that only tests have"
WHO = Who("run", 3, "dp0", "c" * 64)
SPANS = [(0, 16), (80, 4)]
DATA = bytes(range(20))

Talk = Callable[[Link, Holes], None]


def right(link: Link, question: Holes) -> None:
    link.send(Bytes(question.request, question.iteration, list(question.ranges), hashlib.sha256(DATA).hexdigest()),
              [DATA], len(DATA))


class FakePeer:
    """talk: what it does with a question. heard: hellos and questions, in order. tls: of connections from here on."""

    def __init__(self, talk: Talk = right, token: bytes = TOKEN) -> None:
        self.talk, self.token = talk, token
        self.tls: ssl.SSLContext | None = None
        self.heard: list[Hello | Holes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self.name = f"127.0.0.1:{self.address[1]}"
        self._links: list[Link] = []
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._links.append(Link(sock, Secure(sock, self.tls) if self.tls is not None else None))
            self._threads.append(threading.Thread(target=self._serve, args=(self._links[-1],)))
            self._threads[-1].start()

    def _serve(self, link: Link) -> None:
        try:
            self.heard.append(accept(link, self.token))
            link.limits = lambda: Limits(RANGES_TEXT)
            while True:
                question, _ = link.receive(wait=60)
                self.heard.append(question)
                self.talk(link, question)
        except RecordsError:
            pass
        finally:
            link.close()

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join(10)


class Scene:
    """now: the asking node's clock, which a test moves: nothing here waits for a time to pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.made: list[FakePeer] = []
        self.peers: Peers | None = None

    def peer(self, talk: Talk = right, token: bytes = TOKEN) -> FakePeer:
        self.made.append(FakePeer(talk, token))
        return self.made[-1]

    def open(
        self, *addresses: tuple[str, int], seconds: float = 10.0, clock: Callable[[], float] | None = None
    ) -> Peers:
        self.peers = Peers(addresses or [one.address for one in self.made], TOKEN, WHO, seconds,
                           clock or (lambda: self.now))
        return self.peers

    def ask(self, iteration: int = 7) -> tuple[list[Answer], dict[str, str]]:
        assert self.peers is not None
        self.peers.ask(iteration, SPANS)
        return self.wait()

    def wait(self) -> tuple[list[Answer], dict[str, str]]:
        assert self.peers is not None
        while (found := self.peers.answers()) is None:
            time.sleep(0.001)
        return found, dict(self.peers.failed)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    if made.peers is not None:
        made.peers.close()
    for one in made.made:
        one.close()


def plain(answer: Answer) -> list[tuple[int, bytes]]:
    return [(at, bytes(data)) for at, data in answer.pieces]


def test_an_answer_comes_as_pieces_of_the_region(scene: Scene) -> None:
    peer = scene.peer()
    peers = scene.open()
    assert peers.answers() == [], "nothing was asked"
    [answer], failed = scene.ask()
    assert answer.peer == peer.name and plain(answer) == [(0, DATA[:16]), (80, DATA[16:])] and failed == {}
    hello, question = peer.heard
    assert isinstance(hello, Hello) and isinstance(question, Holes)
    assert (hello.role, hello.run_id, hello.epoch, hello.group) == ("peer", "run", 3, "dp0")
    assert (hello.rank, hello.ranks) == (0, 1)
    assert (question.iteration, question.plan, question.ranges) == (7, WHO.plan, SPANS) and question.seconds == 10.0
    assert peers.answers() == [], "it was said"


def test_the_connection_is_kept_and_each_question_has_its_number(scene: Scene) -> None:
    peer = scene.peer()
    scene.open()
    for iteration in (7, 8, 9):
        assert len(scene.ask(iteration)[0]) == 1
    hello, *questions = peer.heard
    assert isinstance(hello, Hello) and [one.request for one in questions] == [1, 2, 3]  # type: ignore[union-attr]
    assert [one.iteration for one in questions] == [7, 8, 9]  # type: ignore[union-attr]


def test_all_are_asked_at_once_and_each_is_heard(scene: Scene) -> None:
    meet = threading.Barrier(3, timeout=10)  # none answers before all were asked

    def together(link: Link, question: Holes) -> None:
        meet.wait()
        right(link, question)

    def nothing(link: Link, question: Holes) -> None:
        meet.wait()
        link.send(Bytes(question.request, question.iteration, why="nothing of it is here either"))

    names = [scene.peer(talk).name for talk in (together, nothing, together)]
    scene.open()
    found, failed = scene.ask()
    assert {one.peer for one in found} == {names[0], names[2]}
    assert failed == {names[1]: "nothing of it is here either"}


def stalled(link: Link, question: Holes) -> None:
    link.receive(wait=60)  # until the asker lets go


def killed_within(link: Link, question: Holes) -> None:
    link.send(Bytes(question.request, question.iteration, list(question.ranges), "0" * 64), [DATA[:7]], 20)


def dies(link: Link, question: Holes) -> None:
    """In the middle of the payload."""
    try:
        killed_within(link, question)
    except RecordsError:
        link.close()  # what was announced never comes


def gone(link: Link, question: Holes) -> None:
    link.close()


def lies(**fields: Any) -> Talk:
    def talk(link: Link, question: Holes) -> None:
        data = fields.get("data", DATA)
        said = {"request": question.request, "iteration": question.iteration, "ranges": list(question.ranges),
                "digest": hashlib.sha256(data).hexdigest()}
        said |= {key: value for key, value in fields.items() if key != "data"}
        link.send(Bytes(**said), [data], len(data))

    return talk


def says(message: Any) -> Talk:
    def talk(link: Link, question: Holes) -> None:
        link.send(message)

    return talk


@pytest.mark.parametrize(("talk", "why"), [
    (gone, "connection "),
    (dies, "connection closed within a message, 13 bytes before its end"),
    (lies(request=99), "an answer to question 99, iteration 7, not to 1, 7"),
    (lies(iteration=8), "an answer to question 1, iteration 8, not to 1, 7"),
    (lies(digest="0" * 64), "its bytes do not have the sum that it says"),
    (lies(data=DATA[:19]), "19 bytes, and its ranges have another sum"),
    (lies(ranges=[(0, 20)]), "20 bytes from 0 on were not asked for"),
    (lies(ranges=[(16, 20)]), "20 bytes from 16 on were not asked for"),
    (lies(ranges=[(80, 20)]), "20 bytes from 80 on were not asked for"),
    (lies(ranges=[(800, 20)]), "20 bytes from 800 on were not asked for"),
    (lies(ranges=[(0, 9)], data=DATA[:9]), "9 bytes from 0 on end within a cell"),
    (lies(data=DATA * 2), "a payload of 40 bytes, at most 20 are read here"),
    (says(Flows([])), "a Flows where bytes were due"), (says(Refused("it is busy")), "refused: it is busy"),
])
def test_a_peer_that_breaks_off_or_lies_is_let_go(scene: Scene, talk: Talk, why: str) -> None:
    """Each refusal and lie once; the other peer's answer stands."""
    bad, good = scene.peer(talk), scene.peer()
    scene.open()
    [answer], failed = scene.ask()
    assert answer.peer == good.name and failed.keys() == {bad.name}
    assert failed[bad.name].startswith(why), failed
    asked = len(bad.heard)
    again = scene.ask(8)[1]
    assert again == {bad.name: f"not asked: {failed[bad.name]}"} and len(bad.heard) == asked
    bad.talk = right
    scene.now += PAUSE - 0.25
    assert scene.ask(8)[1] == again
    scene.now += 0.25
    assert len(scene.ask(9)[0]) == 2


def test_a_peer_that_stalls_costs_its_time_and_no_more(scene: Scene) -> None:
    slow, good = scene.peer(stalled), scene.peer()
    peers = scene.open(seconds=1.0, clock=time.monotonic)
    begin = time.monotonic()
    [answer], failed = scene.ask()
    assert answer.peer == good.name and 1.0 <= time.monotonic() - begin < 60
    assert failed == {slow.name: "no answer in time"}
    peers.close()
    assert not any(one._thread is not None and one._thread.is_alive() for one in peers._peers)


def test_a_late_answer_is_of_no_question(scene: Scene) -> None:
    """It was given up, and another iteration is asked for."""
    hold = threading.Event()

    def late(link: Link, question: Holes) -> None:
        assert hold.wait(10)
        right(link, question)

    peer = scene.peer(late)
    peers = scene.open()
    peers.ask(7, SPANS)
    while len(peer.heard) < 2:
        time.sleep(0.001)
    assert peers.answers() is None
    scene.now += 10
    assert peers.answers() == [] and dict(peers.failed) == {peer.name: "no answer in time"}
    hold.set()
    found, _ = scene.ask(8)
    assert all(plain(one) and one.peer == peer.name for one in found)
    assert peers.answers() == []


def test_nobody_who_lacks_the_token_is_believed(scene: Scene) -> None:
    peer = scene.peer(token=b"another token, of somebody else")
    scene.open()
    found, failed = scene.ask()
    assert found == [] and failed.keys() == {peer.name} and peer.heard == []


def test_nobody_is_there(scene: Scene) -> None:
    peer = scene.peer()
    peer.close()
    scene.open(peer.address)
    assert scene.ask() == ([], {peer.name: "Connection refused"})


def test_who_was_found_wrong_is_not_asked_for_a_while(scene: Scene) -> None:
    one, other = scene.peer(), scene.peer()
    peers = scene.open()
    assert len(scene.ask()[0]) == 2
    peers.distrust({one.name: "3 cells differ"})
    [answer], failed = scene.ask(8)
    assert answer.peer == other.name and failed == {one.name: "not asked: 3 cells differ"}
    scene.now += DISTRUST - 0.25
    assert scene.ask(8)[1] == failed
    scene.now += 0.25
    assert len(scene.ask(9)[0]) == 2


def test_closing_ends_a_question_that_is_under_way(scene: Scene) -> None:
    peer = scene.peer(stalled)
    peers = scene.open(seconds=10)
    peers.ask(7, SPANS)
    while len(peer.heard) < 2:
        time.sleep(0.001)
    peers.close()
    assert not any(one._thread is not None and one._thread.is_alive() for one in peers._peers)
    peers.close()


def test_nothing_is_begun_before_the_first_question(scene: Scene) -> None:
    peer = scene.peer()
    peers = scene.open()
    assert all(one._thread is None for one in peers._peers) and peer.heard == []


def test_a_question_without_time_is_not_even_asked(scene: Scene) -> None:
    peer = scene.peer()
    peers = scene.open(seconds=0.0)
    peers.ask(7, SPANS)
    assert peers.answers() == [] and dict(peers.failed) == {peer.name: "no answer in time"}
    peers.close()
    assert peer.heard == []


def test_a_token_is_asked_for_with_each_connection(scene: Scene) -> None:
    """It may have been replaced meanwhile."""
    peer, given = scene.peer(), list[bytes]()

    def token() -> bytes:
        given.append(peer.token)
        return peer.token

    scene.peers = Peers([peer.address], token, WHO, 10.0, lambda: scene.now)
    assert len(scene.ask()[0]) == len(scene.ask(8)[0]) == len(given) == 1
    peer.talk = gone
    assert scene.ask(9)[0] == []
    peer.talk, peer.token = right, b"another token, that replaced it"
    scene.now += PAUSE
    assert len(scene.ask(10)[0]) == 1 and given == [TOKEN, peer.token]


def test_who_is_closed_while_it_connects_says_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = scene.peer()
    peers = scene.open()
    real = module.dial

    def dial(*given: Any) -> Link:
        peers._peers[0].end()
        return real(*given)

    monkeypatch.setattr(module, "dial", dial)
    assert scene.ask() == ([], {peer.name: "not needed any more"}) and peer.heard == []


def test_a_thread_of_a_peer_has_its_name_and_keeps_no_process(scene: Scene) -> None:
    peer = scene.peer()
    peers = scene.open()
    assert len(scene.ask()[0]) == 1
    thread = peers._peers[0]._thread
    assert thread is not None and thread.name == f"flowcheck peer {peer.name}" and thread.daemon
    assert len(scene.ask(8)[0]) == 1 and peers._peers[0]._thread is thread


def test_a_connection_sends_at_once(scene: Scene) -> None:
    peer = scene.peer()
    link = dial(peer.address, None, 10.0)
    assert link._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) and link._socket.gettimeout() == 10.0
    link.close()


def test_peers_are_asked_over_tls_and_have_to_be_who_they_are(scene: Scene, tmp_path: Path) -> None:
    own, other = issue(tmp_path, "own"), issue(tmp_path, "other")
    peer = scene.peer()
    peer.tls = server_context(own.cert, own.key)
    for ca, good in ((own.ca, True), (other.ca, False)):
        peers = Peers([peer.address], TOKEN, WHO, 10.0, lambda: scene.now, client_context(str(ca)))
        scene.peers = peers
        found, failed = scene.ask()
        peers.close()
        assert len(found) == good
        assert good or failed[peer.name].startswith("no TLS: the node's certificate is not trusted"), failed


def test_an_address_of_ipv6_is_named_in_brackets() -> None:
    peers = Peers([("::1", 7070)], TOKEN, WHO, 1.0)
    assert [one.name for one in peers._peers] == ["[::1]:7070"]


def answer_of(*ranges: tuple[int, int], data: bytes) -> Bytes:
    return Bytes(1, 7, list(ranges), hashlib.sha256(data).hexdigest())


def test_parts_of_what_was_asked_for_are_an_answer() -> None:
    spans = [(0, 32), (64, 20), (160, 8)]
    ranges = [(0, 8), (16, 8), (64, 20), (160, 8)]
    data = bytearray(range(44))
    found = checked(1, 7, spans, answer_of(*ranges, data=data), data)
    assert [(at, bytes(part)) for at, part in found] == [
        (0, bytes(data[:8])), (16, bytes(data[8:16])), (64, bytes(data[16:36])), (160, bytes(data[36:]))]
    assert checked(1, 7, spans, Bytes(1, 7, why="gone"), bytearray()) == ()


@pytest.mark.parametrize("ranges", [
    [(24, 16)], [(32, 8)], [(56, 8)], [(56, 16)], [(80, 12)], [(168, 8)], [(0, 12)], [(64, 12)],
])
def test_what_was_not_asked_for_is_no_answer(ranges: list[tuple[int, int]]) -> None:
    data = bytearray(sum(length for _, length in ranges))
    with pytest.raises(RecordsError):
        checked(1, 7, [(0, 32), (64, 20), (160, 8)], answer_of(*ranges, data=data), data)
