"""What the thread that sits in the registry hands to its seat, and what it makes of the answers: turn by turn, with a
seat, a shelf and a clock that are the test's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.ask.offer import COPY, DISK, MEMORY, STORE, Offer
from flowcheck.ask.receiving import AskError
from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect import registry_loop as sitting
from flowcheck.node.protect.border import RegistrySettings
from flowcheck.node.protect.placement import Decided, Member, Recovery, Shard
from flowcheck.node.protect.registry_loop import TURN_SECONDS, Persistent

from ..hand_node import LONGEST, until

SAID = {"endpoints": ["http://etcd:1"], "cluster": "c", "ca": "ca.pem", "cert": None, "user": "",
        "replicas": 3, "grace": 7.0,
        "address": "127.0.0.1:9", "site": {"name": "holder", "host": "h", "leaf": "l", "rack": "r"}, "follows": False,
        "standby": True, "own": False, "replace": [], "replace_seconds": 60.0, "code": None, "directory": "/replicas",
        "password": "", "kept": "/placement.json"}


def sits(**more: Any) -> RegistrySettings:
    """What `sit` is given, as it comes over the process's stdin."""
    return RegistrySettings.model_validate_json(json.dumps(SAID | more))


def offer(shard: str, step: int, age: float | None, run_id: str = "run", epoch: int = 0) -> Offer:
    return Offer("m1", MEMORY, run_id, epoch, step, shard, "verified", 1, age_seconds=age)


class Sat:
    """All that `sit` has made and called. answers: of each turn, what the seat says; an exception is raised. takes: of
    each of these, whether it can be followed. offers: what lies in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Sequence[Any] = ({},), takes: Sequence[Any] = (),
                 spent: float = 0.0, **said: Any) -> None:
        self.made: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.turns: list[tuple[Any, ...]] = []
        self.took: list[tuple[Any, ...]] = []
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.waited: list[float] = []
        self.closed: list[str] = []
        self.offers: list[Offer] = [offer("s1", 3, 1.0), offer("s0", 4, None, epoch=2)]
        self.steps, self.part = {("run", 0): 4}, object()
        self._answers, self._takes, self._spent, self._at = list(answers), list(takes), spent, 50.0
        for name in ("Etcd", "Signed", "Operator", "Seat", "MemoryShelf"):
            monkeypatch.setattr(sitting, name, lambda *given, name=name, **named: self._make(name, given, named))
        monkeypatch.setattr(sitting, "time", SimpleNamespace(monotonic=lambda: self._at))
        sitting.sit(sits(**said), lambda: ["held"], lambda: ["streams"], self._take,
                    "node", lambda: [b"k"], lambda event, **fields: self.said.append((event, fields)), self)  # type: ignore[arg-type]

    def _make(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.made[name] = given, named
        return SimpleNamespace(name=name, turn=self._turn, close=lambda: self.closed.append(name), steps=self.steps,
                               part=self.part, look=lambda: [SimpleNamespace(offer=one) for one in self.offers])

    def _turn(self, *given: Any) -> Mapping[str, str]:
        self.turns.append(given)
        self._at += self._spent
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _take(self, *given: Any) -> None:
        self.took.append(given)
        if self._takes and (error := self._takes.pop(0)) is not None:
            raise error

    def is_set(self) -> bool:
        return not self._answers

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)


def test_what_a_seat_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    sat = Sat(monkeypatch)
    given, named = sat.made["Seat"]
    assert sat.made["Etcd"] == ((("http://etcd:1",), "c", "ca.pem"), {"cert": None, "login": None})
    registry, cluster, keys, _ = sat.made["Signed"][0]
    assert (given[0].name, registry.name, cluster, keys()) == ("Signed", "Etcd", "c", [b"k"])
    assert given[1] == Member(Site("holder", "h", "l", "r"), "127.0.0.1:9", False, True, False)
    assert given[2:4] == (3, 7.0) and given[5] == Path("/placement.json")
    assert (named["operator"], named["wait"], named["code"]) == (None, 60.0, None)
    assert isinstance(named["void"], Persistent) and named["void"]._node == "node"
    assert sat.made["MemoryShelf"] == ((Path("/replicas"), "holder"), {})
    assert sorted(sat.closed) == ["MemoryShelf", "Seat"]
    given[4]("placed", epoch=3)
    named["void"]._say("fallback", name="dp0")
    assert sat.said == [("placed", {"epoch": 3}), ("fallback", {"name": "dp0"})]


def test_with_parity_and_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    sat = Sat(monkeypatch, code=[2, 1], replace=["bring", "one"], follows=True, standby=False)
    given, named = sat.made["Seat"]
    assert given[1] == Member(Site("holder", "h", "l", "r"), "127.0.0.1:9", True, False, True)
    assert named["code"] == (2, 1) and named["operator"].name == "Operator"
    command, cluster, tell = sat.made["Operator"][0]
    assert (command, cluster) == (("bring", "one"), "c")
    tell("replacing", lost="a")
    assert sat.said == [("replacing", {"lost": "a"})]


def test_what_is_handed_over_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the seat what is here; from it whose copies to take, each address once, and what may not go."""
    sat = Sat(monkeypatch, [{}, {"b": "10.0.0.2:7", "a": "10.0.0.1:7", "c": "10.0.0.2:7"}])
    own = [{"run_id": "run", "epoch": 2, "shard": "s0"}, {"run_id": "run", "epoch": 0, "shard": "s1"}]
    assert sat.turns == [(["held"], own, ["streams"])] * 2
    assert sat.took == [([], sat.steps, sat.part), ([("10.0.0.1", 7), ("10.0.0.2", 7)], sat.steps, sat.part)]
    assert sat.said == []


def test_a_node_whose_own_versions_are_copied_takes_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sat = Sat(monkeypatch, [{}, {"a": "10.0.0.1:7"}], own=True)
    assert [sources for sources, _, _ in sat.took] == [[("127.0.0.1", 9)], [("127.0.0.1", 9), ("10.0.0.1", 7)]]


def test_what_cannot_be_followed_is_said_once_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, worse = AskError("is odd", where="ca.pem", remedy="another"), RuntimeError("of a library")
    sat = Sat(monkeypatch, [{}, {}, {}, worse, worse, {}, worse], [bad, bad, bad, None])
    problem, other = [("problem", {"why": f"placement is not followed: {why}"})
                      for why in (bad.message(), "RuntimeError: of a library")]
    assert sat.said == [problem, other, other] and len(sat.turns) == 7


@pytest.mark.parametrize(("spent", "waited"), [(0.0, TURN_SECONDS), (0.25, 0.75), (1.0, 0.1), (20.0, 0.1)])
def test_a_turn_each_second_however_long_one_takes(
    monkeypatch: pytest.MonkeyPatch, spent: float, waited: float
) -> None:
    assert Sat(monkeypatch, [{}, {}], spent=spent).waited == [waited, waited]


def test_of_several_runs_the_one_that_was_published_last_is_followed() -> None:
    found = sitting._own([offer("s", 90, 500.0, "old"), offer("s", 3, 1.0, "new", 2), offer("s", 4, None, "unknown"),
                          offer("r", 4, None, "first"), offer("r", 5, None, "second"), offer("q", 7, 2.0, "x")])
    assert found == [{"run_id": "x", "epoch": 0, "shard": "q"}, {"run_id": "first", "epoch": 0, "shard": "r"},
                     {"run_id": "new", "epoch": 2, "shard": "s"}]


# -- where a recovery would end ------------------------------------------------------------------------------------


class Nodes:
    """By host: what each offers; None: it does not answer."""

    def __init__(self, **offers: Sequence[Offer] | None) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.threads: list[threading.Thread] = []
        self.asked, self.closed, self._offers = set[tuple[str, int]](), 0, offers
        self.look = Persistent(self._node, self._say)  # type: ignore[arg-type]

    def _say(self, event: str, **fields: Any) -> None:
        self.threads.append(threading.current_thread())
        self.said.append((event, fields))

    def _node(self, address: tuple[str, int]) -> Any:
        self.asked.add(address)

        def offers() -> Sequence[Offer]:
            found = self._offers[address[0]]
            if found is None:
                raise AskError("is gone", where=address[0])
            return found

        return SimpleNamespace(offers=offers, close=self._close)

    def _close(self) -> None:
        self.closed += 1


def held(tier: str, shard: Shard, step: int) -> Offer:
    return Offer("d1", tier, shard[0], shard[1], step, shard[2], "verified", 1)


S0, S1, S2, X0 = ("run", 1, "s0"), ("run", 1, "s1"), ("run", 1, "s2"), ("job", 0, "x0")
MEMBERS = {name: Member(Site(name), f"{name}:{port}") for port, name in enumerate("abcd", 1)}


def decided(lost: Sequence[str], shards: Sequence[Shard], void: Sequence[Shard]) -> Decided:
    return Decided(3, MEMBERS, dict.fromkeys(MEMBERS, ()), Recovery(2, tuple(lost), (), tuple(shards), tuple(void)))


def why(lost: str, shards: int, back: str) -> str:
    return (f"all that kept {lost} is lost: until the trainers have given it anew, all {shards} shards would go back to"
            f" {back}")


def test_where_a_recovery_would_end_is_asked_of_all_that_are_there() -> None:
    """All shards of the job count: also those that nobody has lost, and those that only somebody's offer names."""
    nodes = Nodes(a=[held(DISK, S0, 4), held(DISK, S0, 9), held(MEMORY, S2, 9)],
                  b=[held(STORE, S1, 9), held(STORE, S1, 4), held(DISK, S2, 4), held(DISK, X0, 8)], c=None)
    nodes.look.look(decided("d", [S1, S0, X0], [S1, S0]))
    assert nodes.asked == {("a", 1), ("b", 2), ("c", 3)} and nodes.closed == 3
    assert nodes.said == [("fallback", {"run_id": "run", "shards": ["s0", "s1"], "step": 4, "why": why(
        "'s0', 's1'", 3, "step 4, the newest that is persistent")})]


def test_each_run_of_which_something_is_nowhere_is_said() -> None:
    nodes = Nodes(a=[held(DISK, S0, 9), held(COPY, X0, 9)])
    nodes.look.look(decided("bcd", [S0, X0], [X0, S0]))
    assert nodes.said == [
        ("fallback", {"run_id": "job", "shards": ["x0"], "step": None, "why": why(
            "'x0'", 1, "nothing: none is persistent")}),
        ("fallback", {"run_id": "run", "shards": ["s0"], "step": 9, "why": why(
            "'s0'", 1, "step 9, the newest that is persistent")})]


def test_nobody_is_left_to_be_asked() -> None:
    nodes = Nodes()
    nodes.look.look(decided("abcd", [S0], [S0]))
    assert nodes.asked == set() and nodes.said[0][1]["step"] is None


def test_all_are_asked_at_once() -> None:
    """However many: each that is gone takes its time to say so."""
    together = threading.Barrier(40)

    def offers() -> list[Offer]:
        together.wait(LONGEST)
        return []

    members = {f"m{port}": Member(Site(f"m{port}"), f"m:{port}") for port in range(1, 41)}
    said: list[dict[str, Any]] = []
    look = Persistent(lambda address: SimpleNamespace(offers=offers, close=lambda: None),  # type: ignore[arg-type,return-value]
                      lambda event, **fields: said.append(fields))
    look.look(Decided(3, members, dict.fromkeys(members, ()), Recovery(2, (), (), (S0,), (S0,))))
    assert [one["step"] for one in said] == [None]


def test_the_lease_does_not_wait_for_it() -> None:
    """It is asked on a thread that the end of the process does not wait for either."""
    nodes = Nodes(a=[held(DISK, S0, 9)])
    nodes.look(decided("bcd", [S0], [S0]))
    until(lambda: nodes.said)
    assert nodes.said[0][1]["step"] == 9
    assert nodes.threads[0] is not threading.current_thread() and nodes.threads[0].daemon
