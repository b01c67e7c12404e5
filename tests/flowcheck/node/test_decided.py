"""What the registry's texts say: what was written is read again, all of it; what is none of it is as if it were not
there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.placement import Decided, Have, Member, Parity, Part, Recovery

MOST = (1 << 53) - 1
A, B = Member(Site("a", "h1", "l1", "r1"), "[::1]:7071"), Member(Site("b", "h2", "l2", "r2"), "b.example:7072", False)
C = Member(Site("c"), "c:3", True, True, True)
LOST = Recovery(4, ("a", "b"), ("b",), (("run", 1, "s0"), ("run", 1, "s1"), ("x", 0, "")), (("x", 0, ""),),
                {("run", 1): 0, ("x", 0): MOST})
ALL = Decided(5, {"a": A, "b": B, "c": C}, {"a": ("b", "c"), "b": ("a",), "c": ()}, LOST, Parity(("a", ""), ("b",)))


# -- a member ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [A, B, C], ids=lambda one: one.site.name)
def test_a_member_is_read_as_it_was_written(member: Member) -> None:
    assert Member.of(member.site.name, member.text()) == member
    said = json.loads(member.text())
    assert said["name"] == member.site.name and Member.of("z", member.text()) != member  # its key names it


def test_what_a_member_says_nothing_of_is_as_it_was_before_there_was_that() -> None:
    assert Member.of("a", '{"address": "a:1"}') == Member(Site("a"), "a:1", True, False, False)


@pytest.mark.parametrize("change", [
    {"address": ":7071"}, {"address": "a"}, {"address": "a:"}, {"address": "a:x"}, {"address": "a:-1"}, {"address": 7},
    {"host": 3}, {"leaf": None}, {"rack": ["r"]}, {"follows": 1}, {"standby": None}, {"parity": "true"},
], ids=str)
def test_one_thing_that_cannot_be_makes_it_none(change: dict[str, Any]) -> None:
    assert Member.of("a", json.dumps(json.loads(A.text()) | change)) is None


# -- what it has ---------------------------------------------------------------------------------------------------

HAS = {
    "epoch": 5, "own": [{"run_id": "run", "epoch": 1, "shard": "s0"}, {"run_id": "x", "epoch": 0, "shard": ""}],
    "copies": [{"source": "b:2/s/1", "run_id": "run", "epoch": 1, "steps": [0, 4]},
               {"source": "b:2/", "run_id": "x", "epoch": 0, "steps": []}],
    "parity": [{"run_id": "run", "epoch": 1, "step": 4, "stream": 2}, {"run_id": "run", "epoch": 1, "step": 6,
               "stream": 3}, {"run_id": "run", "epoch": 2, "step": 0, "stream": 2}],
}


def test_what_a_member_has() -> None:
    """A shard's name may have a slash, as may be seen in its source's."""
    assert Have.of(json.dumps(HAS)) == Have(
        5, frozenset({("run", 1, "s0"), ("x", 0, "")}),
        {("b:2", ("run", 1, "s/1")): frozenset({0, 4}), ("b:2", ("x", 0, "")): frozenset()},
        {("run", 1): frozenset({(4, 2), (6, 3)}), ("run", 2): frozenset({(0, 2)})})
    assert Have.of('{"epoch": 0, "copies": []}') == Have()
    assert Have.of('{"epoch": 3, "copies": []}') == Have(3)


def one_changed(said: dict[str, Any], *path: Any, value: Any) -> str:
    said = json.loads(json.dumps(said))
    at: Any = said
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(said)


@pytest.mark.parametrize("value", [-1, MOST + 1, "x", None, ...], ids=str)
@pytest.mark.parametrize("path", [
    ("epoch",), ("own", 1, "epoch"), ("copies", 0, "epoch"), ("copies", 0, "steps", 1), ("parity", 1, "epoch"),
    ("parity", 1, "step"), ("parity", 1, "stream"),
], ids=str)
def test_one_number_that_cannot_be_makes_it_nothing(path: tuple[Any, ...], value: Any) -> None:
    if value is ... and path[-1] == 1:
        return  # a shorter list is one, too
    assert Have.of(one_changed(HAS, *path, value=value)) == Have()


def test_numbers_up_to_the_largest_are_counted_on() -> None:
    assert Have.of(one_changed(HAS, "epoch", value=MOST)).epoch == MOST
    assert Have.of(one_changed(HAS, "copies", 0, "steps", value=[MOST])).copies["b:2", ("run", 1, "s/1")] == {MOST}


# -- what was decided ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decided", [
    ALL, Decided(), Decided(1, {"a": A}, {"a": ()}), Decided(2, {"a": A}, {"a": ()}, Recovery(2)),
    Decided(3, {"a": A, "c": C}, {"a": ("c",), "c": ("a",)}, None, Parity(("", "a"), ("", "c"))),
], ids=["all", "none", "one", "a loss", "parity"])
def test_a_decision_is_read_as_it_was_written(decided: Decided) -> None:
    assert Decided.of(decided.text()) == decided
    assert Decided.of(Decided.of(decided.text()).text()).text() == decided.text()


def test_equal_decisions_have_one_text() -> None:
    """Members compare what they follow with what lies in the registry, by its text."""
    turned = Decided(5, dict(reversed(ALL.members.items())), dict(reversed(ALL.holders.items())), Recovery(
        LOST.number, LOST.lost, LOST.asked, LOST.shards, LOST.void, dict(reversed(LOST.steps.items()))), ALL.parity)
    assert turned == ALL and turned.text() == ALL.text()


SAID = json.loads(ALL.text())


@pytest.mark.parametrize(("path", "value"), [
    (("epoch",), True), (("epoch",), 5.0), (("epoch",), MOST + 1), (("epoch",), -1), (("epoch",), ...),
    (("members", "a"), {"address": "nothing"}), (("members", "a"), ...), (("holders", "a"), ...),
    (("holders", "z"), []), (("holders", "a"), ["b", "z"]), (("holders", "a"), 3), (("members",), ...),
    (("holders",), ...), (("recovery",), 3), (("recovery", "number"), -1), (("recovery", "lost"), ...),
    (("recovery", "asked"), ...), (("recovery", "shards", 1), ["run", 1]), (("recovery", "shards", 0), ["run", -1, ""]),
    (("recovery", "void", 0), ["x", 0, "", ""]), (("recovery", "steps", 0), ["run", 1, -1]),
    (("recovery", "steps", 0), ["run", -1, 1]), (("recovery", "steps", 0), ["run", 1]), (("parity",), []),
    (("parity", "data"), []), (("parity", "holders"), []), (("parity", "data"), ["a", "b"]),
    (("parity", "data"), ["a", "a"]), (("parity", "data"), ["a", "z"]), (("parity", "holders"), ["z"]),
    (("parity", "holders"), ...),
], ids=str)
def test_one_thing_that_cannot_be_decided_makes_it_no_decision(path: tuple[Any, ...], value: Any) -> None:
    """A part of it is not followed either: a copy that another member does not keep would be let go."""
    assert Decided.of(json.dumps(SAID)) == ALL
    assert Decided.of(one_changed(SAID, *path, value=value)) == Decided()


def test_a_member_that_is_none_is_not_left_out() -> None:
    """Although what is left would be a decision."""
    said = json.loads(Decided(1, {"a": A}, {"a": ()}).text())
    said["members"]["b"] = {"address": "nothing"}
    assert Decided.of(json.dumps(said)) == Decided()


@pytest.mark.parametrize("left_out", ["recovery", "parity"])
def test_what_an_older_root_did_not_say_is_not_there(left_out: str) -> None:
    found = Decided.of(one_changed(SAID, left_out, value=...))
    assert found.epoch == 5 and getattr(found, left_out) is None and found.members == ALL.members


# -- what follows from it for a member -----------------------------------------------------------------------------


def test_whose_copies_a_member_keeps() -> None:
    """Who has data keeps its own, too; who keeps parity, or has no part in it, does not."""
    assert ALL.sources("a") == {"a": "[::1]:7071", "b": "b.example:7072"}
    assert ALL.sources("b") == {"a": "[::1]:7071"} and ALL.sources("c") == {"a": "[::1]:7071"}
    assert ALL.sources("z") == {}
    plain = Decided(5, ALL.members, ALL.holders)
    assert plain.sources("a") == {"b": "b.example:7072"}


def test_what_a_holder_of_parity_does() -> None:
    """Who has no data any more is not asked for it."""
    decided = Decided(5, ALL.members, ALL.holders, None, Parity(("", "a", "c"), ("", "b")))
    assert decided.part("b") == Part((3, 2), 4, ("[::1]:7071", "c:3"))
    assert decided.part("a") is None and decided.part("") is None and decided.part("z") is None
    assert Decided(5, ALL.members, ALL.holders).part("b") is None
    assert decided.grouped("b") == ["[::1]:7071", "c:3"] and decided.grouped("a") == ["c:3", "b.example:7072"]
    assert Decided(5, ALL.members, ALL.holders).grouped("b") == []


def test_others_in_the_same_places() -> None:
    group = Parity(("a", "b"), ("c", ""))
    assert group.instead({"b": "e", "c": "", "z": "q"}) == Parity(("a", "e"), ("", ""))
