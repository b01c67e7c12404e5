"""A neighbour's thread, turn by turn: what it says of one that fails and when it tries again. Its connection and what
the nodes have are made by hand; the test is the thread."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.control.protocol import Limits, RecordsError, Steps
from flowcheck.node.peers import step_gossip as module
from flowcheck.node.peers.step_gossip import BEAT_SECONDS, TEXT, Neighbours, _Neighbour

MINE, ITS = Steps("a" * 32, "mine", []), Steps("b" * 32, "its", [])


class Hand:
    """A link: what comes over it, an exception where it breaks."""

    peer = "somebody"

    def __init__(self, *comes: Any) -> None:
        self.comes, self.sent, self.waits, self.closed = list(comes), list[Any](), list[float](), 0
        self.limits: Callable[[], Limits] = Limits

    def send(self, message: Any, *, seconds: float) -> None:
        self.sent.append((message, seconds))

    def receive(self, *, wait: float) -> tuple[Any, int]:
        self.waits.append(wait)
        one = self.comes.pop(0)
        if isinstance(one, Exception):
            raise one
        return one if isinstance(one, tuple) else (one, 0)

    def close(self) -> None:
        self.closed += 1


class Scene:
    """links: what each dial gives, an exception where it fails. turns: waits until it has ended."""

    def __init__(self, patch: pytest.MonkeyPatch, *links: Any, turns: int = 99, address: tuple[str, int] = ("h", 7),
                 tls: Any = None) -> None:
        self.links, self.turns = list(links), turns
        self.did: list[Any] = []
        self.said: list[Any] = []
        patch.setattr(module, "dial", self._dial)
        patch.setattr(module, "greet", lambda link, token, **said: self.did.append(("greet", token, said)))
        common: Any = SimpleNamespace(steps_now=lambda: MINE, hear=self._hear, wait=self._wait, wake=lambda: None)
        self.one = _Neighbour(address, lambda: b"token", common, lambda event, **fields: self.said.append(
            (event, fields)), tls, 3.0, 11.0)
        patch.setattr(self.one, "_ended", SimpleNamespace(is_set=lambda: self.turns <= 0, wait=self._pause,
                                                         set=lambda: None))

    def _dial(self, address: Any, tls: Any, seconds: float) -> Hand:
        self.did.append(("dial", address, tls, seconds))
        found = self.links.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Hand)
        return found

    def _hear(self, said: Any, name: str) -> None:
        self.did.append(("hear", said, name))

    def _wait(self, seen: int, seconds: float) -> int:
        self.did.append(("wait", seen, seconds))
        self.turns -= 1
        return seen + 5

    def _pause(self, seconds: float) -> None:
        self.did.append(("pause", seconds))
        self.turns -= 1

    def kinds(self) -> list[str]:
        return [one[0] for one in self.did]


GREETING = {"run_id": "", "epoch": 0, "rank": 0, "ranks": 1, "group": "", "role": "peer"}


def test_it_tells_and_hears_over_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Hand(ITS, ITS)
    at = Scene(monkeypatch, link, turns=2, tls="context")
    at.one._main()
    assert at.did == [
        ("dial", ("h", 7), "context", 3.0), ("greet", b"token", GREETING), ("hear", ITS, "h:7"),
        ("wait", -1, BEAT_SECONDS), ("hear", ITS, "h:7"), ("wait", 4, BEAT_SECONDS),
    ]
    assert link.sent == [(MINE, 3.0)] * 2 and link.waits == [3.0] * 2 and at.said == []
    assert link.limits() == Limits(TEXT, seconds=3.0) and link.closed == 1 and at.one._link is None


def test_one_that_fails_is_named_once_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = RecordsError("connection lost", where="x")
    broken, whole = Hand(ITS, gone), Hand(ITS, TimeoutError())
    at = Scene(monkeypatch, OSError(111, "Connection refused"), gone, broken, whole, turns=6)
    at.one._main()
    assert at.kinds() == ["dial", "pause", "dial", "pause", "dial", "greet", "hear", "wait", "pause", "dial", "greet",
                          "hear", "wait", "pause"]
    assert {one for one in at.did if one[0] == "pause"} == {("pause", 11.0)}
    assert at.said == [("absent", {"node": "h:7", "why": "Connection refused"}), ("present", {"node": "h:7"}),
                       ("absent", {"node": "h:7", "why": "connection lost"}), ("present", {"node": "h:7"}),
                       ("absent", {"node": "h:7", "why": "no answer"})]
    assert (broken.closed, whole.closed) == (1, 1)


@pytest.mark.parametrize(("error", "why"), [
    (TimeoutError(), "no answer"), (OSError(113, "No route to host"), "No route to host"),
    (RecordsError("closed", where="x"), "closed"), (ssl.SSLError(), "no answer"),
])
def test_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    at = Scene(monkeypatch, error, turns=1)
    at.one._main()
    assert at.said == [("absent", {"node": "h:7", "why": why})] and at.kinds() == ["dial", "pause"]


def test_one_that_breaks_at_the_end_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end itself has closed its connection."""
    class Ends(Hand):
        def receive(self, *, wait: float) -> tuple[Any, int]:
            at.turns = 0
            raise RecordsError("connection closed", where="x")

    link = Ends()
    at = Scene(monkeypatch, link)
    at.one._main()
    assert at.said == [] and at.kinds() == ["dial", "greet"] and link.closed == 1


def test_an_end_while_it_connects_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Hand()
    at = Scene(monkeypatch, link)

    def dial(*_: Any) -> Hand:
        at.turns = 0
        return link

    monkeypatch.setattr(module, "dial", dial)
    at.one._main()
    assert at.did == [] and at.said == [] and link.closed == 1 and link.sent == []


@pytest.mark.parametrize("address", [("10.0.0.1", 7), ("::1", 7)])
def test_how_it_is_called(monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]) -> None:
    one = Scene(monkeypatch, address=address).one
    assert one.name == ("[::1]:7" if ":" in address[0] else "10.0.0.1:7")
    assert one.thread.name == f"flowcheck to node {one.name}" and one.thread.daemon


def test_the_end_closes_what_is_open_and_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    gate = threading.Event()
    common: Any = SimpleNamespace(wake=lambda: woken.append(gate.set() is None))
    addresses = [("h", 7), ("h", 8), ("h", 9)]
    ran: list[str] = []
    monkeypatch.setattr(_Neighbour, "_main", lambda one: ran.append(one.name) or gate.wait(60))
    at = Neighbours(addresses, lambda: b"token", common, lambda *_, **__: None, "context")  # type: ignore[arg-type]
    assert {(one._token(), one._common is common, one._tls) for one in at._all} == {(b"token", True, "context")}
    assert [(one.name, one._seconds, one._pause) for one in at._all] == [
        (f"h:{port}", module.ANSWER_SECONDS, module.PAUSE_SECONDS) for port in (7, 8, 9)]
    links = [Hand(), Hand()]
    at._all[0]._link, at._all[2]._link = links  # type: ignore[assignment]
    at.start()
    at.close()
    assert [link.closed for link in links] == [1, 1] and woken == [True]
    assert sorted(ran) == ["h:7", "h:8", "h:9"]
    assert all(one._ended.is_set() and not one.thread.is_alive() for one in at._all)
    at.close()


def test_what_never_began_can_be_closed() -> None:
    common: Any = SimpleNamespace(wake=lambda: None)
    Neighbours([("h", 7)], lambda: b"token", common, lambda *_, **__: None).close()
