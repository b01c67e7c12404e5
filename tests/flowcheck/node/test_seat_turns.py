"""One seat, turn by turn: what it says of itself, what it makes of what others say, and how long it waits. Others are
texts in the registry; time is the test's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.placement import Decided, Member, Parity, Recovery
from flowcheck.node.protect.registry import HAVE, MEMBERS, PLACEMENT, ROOT, RegistryError, Shared
from flowcheck.node.protect.registry_member import PATIENCE, Seat

GRACE = 10.0
NOTHING = '{"epoch": 0, "copies": []}'


class Around:
    """A seat of member "a", the root, and others that are texts."""

    def __init__(self, folder: Path, **named: Any) -> None:
        self.at, self.shared = 0.0, Shared(lambda: self.at)
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.void: list[Decided] = []
        self.others: dict[str, tuple[Any, Member, str]] = {}
        self.fails: RegistryError | None = None
        session = self.shared.session()
        self.registry = SimpleNamespace(renew=self._renew, read=session.read, elect=session.elect,
                                        decide=session.decide, close=session.close)
        self._session = session
        self.kept = folder / "placement.json"
        named = {"replicas": 2, "grace": GRACE, "kept": self.kept, "void": self.void.append} | named
        self.seat = Seat(self.registry, Member(Site("a", leaf="l1"), "a:1", parity=True), say=self._say,
                         now=lambda: self.at, **named)

    def _renew(self, keys: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self._session.renew(keys)

    def _say(self, event: str, **fields: Any) -> None:
        self.said.append((event, fields))

    def come(self, *names: str, have: str = NOTHING, leaf: str = "l2", **about: Any) -> None:
        for name in names:
            site = Site(name, leaf=leaf)
            session = self.others[name][0] if name in self.others else self.shared.session()
            self.others[name] = session, Member(site, f"{name}:1", parity=True, **about), have

    def go(self, *names: str) -> None:
        for name in names:
            self.others.pop(name)[0].close()

    def turns(self, seconds: float, **given: Any) -> dict[str, str]:
        """The last one's answer."""
        found: dict[str, str] = {}
        for _ in range(int(seconds)):
            self.at += 1.0
            for name, (session, member, have) in self.others.items():
                session.renew({MEMBERS + name: member.text(), HAVE + name: have})
            found = self.seat.turn(**given)
        return found

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.said if one == event]

    def values(self) -> dict[str, str]:
        return {key: entry.value for key, entry in self.shared.session().read().items()}


def has(epoch: int, own: Iterable[str] = (), copies: Sequence[tuple[str, str, int]] = ()) -> str:
    """copies: source, shard and step."""
    return json.dumps({
        "epoch": epoch, "own": [{"run_id": "run", "epoch": 0, "shard": shard} for shard in own],
        "copies": [{"source": f"{source}:1/{shard}", "run_id": "run", "epoch": 0, "steps": [step]}
                   for source, shard, step in copies]})


@pytest.fixture
def around(tmp_path: Path) -> Around:
    return Around(tmp_path)


# -- what it says, and hears ---------------------------------------------------------------------------------------


def test_what_a_member_says_of_itself(around: Around) -> None:
    """Each turn: where it is, and what it has of the decision that it follows."""
    around.turns(1)
    around.come("b")
    around.turns(GRACE + 1, copies=[{"c": 1}], own=[{"o": 2}], parity=[{"p": 3}])
    assert around.seat.decided.epoch == 1
    around.turns(1, copies=[{"c": 1}], own=[{"o": 2}], parity=[{"p": 3}])
    said = around.values()
    assert Member.of("a", said[MEMBERS + "a"]) == around.seat.me and said[ROOT] == "a"
    assert json.loads(said[HAVE + "a"]) == {"epoch": 1, "copies": [{"c": 1}], "own": [{"o": 2}], "parity": [{"p": 3}]}
    assert around.events("registered") == [{"members": 1, "root": "a", "epoch": 0}]
    assert around.events("placed") == [{
        "epoch": 1, "members": 2, "copies": ["b"], "holders": ["b"], "alone": [], "together": [], "parity": None}]


def test_while_nobody_is_root_none_is_named_and_nothing_decided(around: Around) -> None:
    """Another member was as quick to stand for it, and its lease ended before it was read."""
    around.registry.elect = lambda name: False
    around.come("b")
    assert around.turns(GRACE + 3) == {} and around.seat.decided.epoch == 0
    assert around.events("registered") == [{"members": 2, "root": "", "epoch": 0}]


def test_an_error_that_differs_in_its_details_is_said_once(around: Around) -> None:
    around.come("b")
    around.turns(GRACE + 3)
    for number in range(3):
        around.fails = RegistryError(f"etcd does not answer (Refused (Caused by {number}) (more))", where="http://e:1")
        assert around.turns(1) == {"b": "b:1"}
    assert around.events("unregistered") == [{
        "why": "http://e:1: etcd does not answer (Refused (Caused by 0) (more))", "epoch": 1, "copies": ["b"]}]
    around.fails = RegistryError("a is somebody else's", where="http://e:1")
    around.turns(2)
    assert [one["why"] for one in around.events("unregistered")[1:]] == ["http://e:1: a is somebody else's"]
    around.fails = None
    around.turns(2)
    assert around.events("registered")[1:] == [{"members": 2, "root": "a", "epoch": 1}]


def test_a_wait_begins_anew_after_the_registry_was_gone(around: Around) -> None:
    """What it did not see meanwhile it does not know."""
    around.come("b")
    around.turns(GRACE)
    around.fails = RegistryError("gone", where="x")
    around.turns(1)
    around.fails = None
    around.turns(GRACE)
    assert around.seat.decided.epoch == 0
    around.turns(1)
    assert around.seat.decided.epoch == 1


def test_a_decision_that_cannot_be_kept_in_a_file_holds_all_the_same(tmp_path: Path) -> None:
    around = Around(tmp_path, kept=tmp_path / "missing" / "placement.json")
    around.come("b")
    assert around.turns(GRACE + 2) == {"b": "b:1"}
    (problem,) = around.events("problem")
    assert str(tmp_path / "missing") in problem["why"] and "cannot be written" in problem["why"]
    assert len(around.events("placed")) == 1


@pytest.mark.parametrize("data", [b"\xff", b"", None], ids=["no text", "empty", "a directory"])
def test_a_file_that_cannot_be_read_is_no_decision(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "placement.json"
    path.write_bytes(data) if data is not None else path.mkdir()
    assert Around(tmp_path).seat.decided == Decided()


def test_a_decision_is_kept_in_the_file(around: Around, tmp_path: Path) -> None:
    around.come("b")
    around.turns(GRACE + 2)
    assert Decided.of(around.kept.read_text()) == around.seat.decided
    again = Around(tmp_path)
    assert again.seat.decided == around.seat.decided
    again.fails = RegistryError("gone", where="x")
    assert again.turns(1) == {"b": "b:1"} and again.seat.steps == {} and again.seat.part is None


def test_who_leaves_says_so(tmp_path: Path) -> None:
    closed: list[str] = []
    operator: Any = SimpleNamespace(close=lambda: closed.append("operator"))
    around = Around(tmp_path, operator=operator)
    around.turns(1)
    around.seat.close()
    assert closed == ["operator"] and around.values() == {}
    Around(tmp_path).seat.close()


# -- how long it waits ---------------------------------------------------------------------------------------------


def test_it_decides_after_a_grace_and_not_before(around: Around) -> None:
    around.come("b")
    around.turns(GRACE)
    assert around.seat.decided.epoch == 0  # the first turn began it
    around.turns(1)
    assert around.seat.decided.epoch == 1


def test_who_is_there_for_a_part_of_it_makes_it_longer(around: Around) -> None:
    around.come("b")
    around.turns(GRACE)
    around.come("c")
    around.turns(GRACE)
    assert around.seat.decided.epoch == 0
    around.turns(1)
    assert around.seat.decided.epoch == 1 and sorted(around.seat.decided.members) == ["a", "b", "c"]
    around.come("d")
    around.turns(GRACE - 1)
    around.go("d")
    around.turns(1)
    around.come("d")
    around.turns(GRACE)
    assert around.seat.decided.epoch == 1
    around.turns(1)
    assert around.seat.decided.epoch == 2


@pytest.mark.parametrize(("wait", "patience"), [(None, PATIENCE * GRACE), (1.0, PATIENCE * GRACE), (70.0, 70.0)])
def test_a_place_is_kept_as_long_as_somebody_may_come(tmp_path: Path, wait: float | None, patience: float) -> None:
    """With an operator as long as its settings say, and as long as without one at least."""
    operator: Any = SimpleNamespace(ask=lambda number, member: False, close=lambda: None)
    around = Around(tmp_path, **({} if wait is None else {"operator": operator, "wait": wait}))
    around.come("b", "c")
    around.turns(GRACE + 1)
    around.go("c")
    around.turns(GRACE)
    assert around.seat.decided.recovery is None
    around.turns(1)
    assert around.seat.decided.recovery == Recovery(2, ("c",))
    around.turns(patience)
    assert around.seat.decided.epoch == 2
    around.turns(1)
    assert around.seat.decided.epoch == 3 and sorted(around.seat.decided.members) == ["a", "b"]
    assert around.seat.decided.recovery == Recovery(2)


def test_who_comes_while_a_replacement_fills_itself_waits_a_grace(tmp_path: Path) -> None:
    """Patience, and what cannot wait, are for places that nobody has taken: none is left, though not all is whole. A
    place in the group that was given up is taken with that."""
    around = Around(tmp_path, code=(2, 1))
    around.come("b", "c")
    around.turns(GRACE + 1)
    filling, group = Recovery(2, shards=(("run", 0, "s2"),)), Parity(("a", "b"), ("",))
    around.shared.put(PLACEMENT, replace(around.seat.decided, epoch=9, recovery=filling, parity=group).text(), None)
    own = [{"run_id": "run", "epoch": 0, "shard": "s0"}]
    around.come("b", have=has(9, ["s1"]))
    around.turns(1, own=own)
    around.come("d")
    around.turns(GRACE, own=own)
    assert around.seat.decided.epoch == 9 and around.seat.decided.parity == group
    around.turns(1, own=own)
    assert around.seat.decided.epoch == 10 and sorted(around.seat.decided.members) == ["a", "b", "c", "d"]
    assert around.seat.decided.recovery == filling  # still waited for
    assert around.seat.decided.parity == Parity(("a", "b"), ("c",))


def test_a_command_that_has_succeeded_is_waited_for_once_more(tmp_path: Path) -> None:
    done: set[str] = set()
    asked: list[tuple[int, str]] = []

    def ask(number: int, member: Member) -> bool:
        asked.append((number, member.site.name))
        return member.site.name in done

    operator: Any = SimpleNamespace(ask=ask, close=lambda: None)
    around = Around(tmp_path, operator=operator, wait=60.0, replicas=1)
    around.come("b", "c", "d")
    around.turns(GRACE + 1)
    around.go("b", "c")
    around.turns(GRACE + 1)
    assert asked == [] and around.seat.decided.epoch == 2
    around.turns(50)
    assert set(asked) == {(2, "b"), (2, "c")}
    done.add("c")
    around.turns(1)
    assert around.seat.decided == Decided(3, around.seat.decided.members, dict.fromkeys("abcd", ()),
                                          Recovery(2, ("b", "c"), ("c",)))
    asked.clear()
    around.turns(60)
    assert set(asked) == {(2, "b")} and around.seat.decided.epoch == 3
    done.add("b")
    around.turns(1)
    assert around.seat.decided.recovery == Recovery(2, ("b", "c"), ("b", "c"))
    around.turns(60)
    assert around.seat.decided.epoch == 4
    around.turns(1)
    assert around.seat.decided.epoch == 5 and sorted(around.seat.decided.members) == ["a", "d"]


# -- what is decided -----------------------------------------------------------------------------------------------


def test_epochs_go_on_from_the_highest_that_anybody_follows(around: Around) -> None:
    around.come("b", have=has(40))
    around.come("c", have=has(7))
    around.turns(GRACE + 1)
    assert around.seat.decided.epoch == 41


def test_what_others_know_of_a_lost_shard_stays_known(around: Around) -> None:
    """What it said before it went; that of a second one that goes later, too."""
    around.come("b", have=has(1, ["s0"]))
    around.come("c", have=has(1, ["s1"]), leaf="l3")
    around.come("d", leaf="l4")
    around.turns(GRACE + 1)
    around.go("b")
    around.turns(GRACE + 3)
    around.go("c")
    around.turns(GRACE + 3)
    recovery = around.seat.decided.recovery
    assert recovery is not None and recovery.lost == ("b", "c")
    assert recovery.shards == recovery.void == (("run", 0, "s0"), ("run", 0, "s1"))
    assert [one.epoch for one in around.void] == [3]  # once for each loss
    assert around.events("recovering")[-1] == {
        "epoch": around.seat.decided.epoch, "lost": ["b", "c"], "asked": [], "steps": [], "void": ["s0", "s1"]}


def test_a_step_is_kept_from_the_moment_that_a_lease_is_over(around: Around) -> None:
    """By itself, and until that member is back, or a decision says which."""
    around.come("b", have=has(1, ["s0"]))
    around.come("c", have=has(1, [], [("b", "s0", 4)]), leaf="l3")
    around.turns(GRACE + 1)
    around.go("b")
    around.turns(1)
    assert around.seat.steps == {("run", 0): 4}
    around.come("c", have=has(1, [], [("b", "s0", 9)]), leaf="l3")
    around.turns(2)
    assert around.seat.steps == {("run", 0): 4}  # as it was then
    around.come("b", have=has(1, ["s0"]))
    around.turns(1)
    assert around.seat.steps == {}
    around.go("b")
    around.turns(GRACE + 2)
    recovery = around.seat.decided.recovery
    assert recovery is not None and around.seat.steps == recovery.steps == {("run", 0): 9}


def test_a_newer_decision_in_the_registry_holds(around: Around) -> None:
    around.come("b")
    around.turns(GRACE + 1)
    newer = Decided(9, around.seat.decided.members, {"a": (), "b": ("a",)})
    around.shared.put(PLACEMENT, newer.text(), None)
    assert around.turns(1) == {"b": "b:1"} and around.seat.decided == newer
    older = Decided(3, around.seat.decided.members, {"a": ("b",), "b": ()})
    around.shared.put(PLACEMENT, older.text(), None)
    around.turns(1)
    assert around.seat.decided == newer and Decided.of(around.values()[PLACEMENT]) == newer


def test_pieces_that_would_be_lost_together_are_said(around: Around) -> None:
    """Copies in one leaf, who has none anywhere, and a group with parity of which a leaf has more than may be lost."""
    members = {name: Member(Site(name, leaf="l1" if name in "abe" else name), f"{name}:1", parity=True)
               for name in "abcdefg"}
    holders = {"a": ("b",), "b": ("a", "c"), "c": ("d",), "d": (), "e": (), "f": (), "g": ("a",)}
    group = Parity(("a", "d"), ("f", "b"))
    around.shared.put(PLACEMENT, Decided(9, members, holders, None, group).text(), None)
    around.turns(1)
    (placed,) = around.events("placed")
    assert placed == {
        "epoch": 9, "members": 7, "copies": ["a", "b", "g"], "holders": ["b"], "alone": ["e"],
        "together": [["a", "b"], ["a", "b", "c"]], "parity": group.said()}
    around.shared.put(PLACEMENT, Decided(10, members, holders, None, Parity(("a", "e"), ("b",))).text(), None)
    around.turns(1)
    assert around.events("placed")[1]["together"] == [["a", "b"], ["a", "b", "c"], ["a", "e", "b"]]
    assert around.events("placed")[1]["alone"] == ["d", "f"]
