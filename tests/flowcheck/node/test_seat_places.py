"""Who takes which place of those that are lost, and how all are placed where nobody does: what a root decides of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.placement import Decided, Have, Member, Parity, Recovery
from flowcheck.node.protect.registry import Shared
from flowcheck.node.protect.registry_member import Seat, _fits, _shared

Of = Callable[..., Seat]


def member(name: str, leaf: str = "", follows: bool = True, parity: bool = True, port: int = 1) -> Member:
    return Member(Site(name, leaf=leaf), f"{name}:{port}", follows, False, parity)


FOUR = {name: member(name, leaf) for name, leaf in {"a": "l1", "b": "l2", "c": "l3", "d": "l4"}.items()}
PAIRS = {"a": ("b",), "b": ("a",), "c": ("d",), "d": ("c",)}
LOST = Recovery(6, ("a", "c"), ("a",), (("run", 0, "s0"),), (), {("run", 0): 4})


@pytest.fixture
def of(tmp_path: Path) -> Of:
    def seat(decided: Decided, replicas: int = 2, code: tuple[int, int] | None = None) -> Seat:
        one = Seat(Shared().session(), member("r"), replicas, 10.0, lambda *_, **__: None, tmp_path / "x", code=code)
        one.decided = decided
        return one

    return seat


def replaced(seat: Seat, *come: Member, there: Mapping[str, Member] = FOUR) -> Decided | None:
    """By those that come, in this order; the others are there as `there` has them."""
    recovery = seat.decided.recovery
    assert recovery is not None
    members = {name: one for name, one in there.items() if name not in recovery.lost}
    return seat._replaced(members | {one.site.name: one for one in come}, list(recovery.lost),
                          [one.site.name for one in come], recovery, 9)


# -- replaced ------------------------------------------------------------------------------------------------------


def test_one_that_comes_takes_a_place_and_nothing_else_moves(of: Of) -> None:
    """The order of places is what it was; who has another address by now is known there."""
    seat, come, moved = of(Decided(7, FOUR, PAIRS, LOST)), member("e", "l2"), member("b", "l2", port=2)
    found = replaced(seat, come, there=FOUR | {"b": moved})
    assert found == Decided(9, {"a": FOUR["a"], "b": moved, "e": come, "d": FOUR["d"]},
                            {"a": ("b",), "b": ("a",), "e": ("d",), "d": ("e",)},
                            Recovery(6, ("a",), ("a",), LOST.shards, (), LOST.steps))
    assert list(found.members) == ["a", "b", "e", "d"] and list(found.holders) == ["a", "b", "e", "d"]
    assert seat.decided.holders == PAIRS


def test_each_where_it_shares_a_leaf_with_the_fewest(of: Of) -> None:
    """It needs pieces of one, and another needs its own: both count. Otherwise the first place by name."""
    seat = of(Decided(7, FOUR, PAIRS, LOST))
    found = replaced(seat, member("e", "l2"), member("f", "l4"))
    assert found is not None and list(found.holders) == ["f", "b", "e", "d"]
    assert found.recovery == Recovery(6, (), (), LOST.shards, (), LOST.steps)
    found = replaced(seat, member("e", "l9"), member("f", "l9"))
    assert found is not None and list(found.holders) == ["e", "b", "f", "d"]
    found = replaced(seat, member("e"), member("f"), member("g"))
    assert found is not None and list(found.holders) == ["e", "b", "f", "d"] and "g" not in found.members


def test_a_place_goes_to_who_is_like_the_one_that_had_it(of: Of) -> None:
    """With a mirror port or without, before any leaf."""
    there = FOUR | {"c": member("c", "l3", follows=False)}
    seat = of(Decided(7, there, PAIRS, LOST))
    found = replaced(seat, member("e", "l4", follows=False), member("f", "l2"), there=there)
    assert found is not None and list(found.holders) == ["f", "b", "e", "d"]


def test_nobody_that_fits_takes_no_place(of: Of) -> None:
    """One that takes no part in parity, or has no port where data is; the next one may."""
    group = Parity(("a", "b"), ("c", "d"))
    seat = of(Decided(7, FOUR, dict.fromkeys(FOUR, ()), Recovery(6, ("a",)), group))
    assert replaced(seat) is None
    assert replaced(seat, member("e", parity=False), member("f", follows=False)) is None
    found = replaced(seat, member("e", parity=False), member("f", follows=False), member("g"))
    assert found is not None and found.parity == Parity(("g", "b"), ("c", "d"))
    assert list(found.members) == ["g", "b", "c", "d"] and found.recovery == Recovery(6)


def test_two_that_take_places_of_a_group(of: Of) -> None:
    group = Parity(("a", "b"), ("c", "d"))
    seat = of(Decided(7, FOUR, dict.fromkeys(FOUR, ()), Recovery(6, ("a", "c")), group))
    found = replaced(seat, member("e", "l2"), member("f", "l4"))
    assert found is not None and found.parity == Parity(("e", "b"), ("f", "d"))


def test_where_a_member_fits() -> None:
    group = Parity(("a", "b"), ("c", ""))
    plain, holder, both = member("e", parity=False), member("e", follows=False), member("e")
    assert all(_fits(one, "a", None) and _fits(one, "z", group) for one in (plain, holder, both))
    assert [_fits(one, "a", group) for one in (plain, holder, both)] == [False, False, True]
    assert [_fits(one, "c", group) for one in (plain, holder, both)] == [False, True, True]


def test_with_how_many_a_leaf_would_be_shared() -> None:
    """Those whose copies lie there, those that keep its own, and the group with parity; itself is none of them."""
    members = {name: member(name, "l1" if name in "abcd" else "l2") for name in "abcdef"}
    holders = {"a": ("b", "e"), "b": ("c",), "c": ("a",), "d": (), "e": (), "f": ("a",)}
    at = Site("n", leaf="l1")
    assert _shared(at, "a", holders, members, None) == 2  # b and c; e and f are elsewhere
    assert _shared(at, "b", holders, members, None) == 2 and _shared(at, "d", holders, members, None) == 0
    assert _shared(Site("n", leaf="l2"), "a", holders, members, None) == 2
    assert _shared(Site("n"), "a", holders, {name: member(name) for name in members}, None) == 0  # no leaf is known
    group = Parity(("a", "d"), ("", "e"))
    assert _shared(at, "a", holders, members, group) == 3 and _shared(at, "d", holders, members, group) == 1
    assert _shared(at, "b", holders, members, group) == 2


# -- placed anew ---------------------------------------------------------------------------------------------------


def test_all_are_placed_anew(of: Of) -> None:
    """As many copies as there may be; what is lost is given up, and what it was is not forgotten."""
    seat = of(Decided(7, FOUR, PAIRS, LOST), replicas=3)
    there = {name: one for name, one in FOUR.items() if name in "bd"}
    found = seat._from_nothing(there, {}, 9)
    assert found == Decided(9, there, {"b": ("d",), "d": ("b",)}, Recovery(6, (), (), LOST.shards, (), LOST.steps))
    assert of(Decided(7, FOUR, PAIRS))._from_nothing(there, {}, 9) == Decided(9, there, {"b": ("d",), "d": ("b",)})
    found = of(Decided(), replicas=3)._from_nothing(FOUR, {}, 1)
    assert found is not None and {name: len(keep) for name, keep in found.holders.items()} == dict.fromkeys("abcd", 2)
    assert of(Decided())._from_nothing({}, {}, 1) is None


def test_a_group_keeps_its_places_and_lets_the_lost_ones_go(of: Of) -> None:
    """Others take what they can; without a code as root it is left as it is."""
    group = Parity(("a", "b"), ("c", "d"))
    decided = Decided(7, FOUR, dict.fromkeys(FOUR, ()), LOST, group)
    there = {name: one for name, one in FOUR.items() if name in "bd"} | {"e": member("e", "l5", follows=False)}
    owns = {"b": Have(7, frozenset({("run", 0, "s1")}))}
    found = of(decided, 1, (2, 2))._from_nothing(there, owns, 9)
    assert found is not None and found.parity == Parity(("", "b"), ("e", "d"))
    found = of(decided, 1)._from_nothing(there, owns, 9)
    assert found is not None and found.parity == Parity(("", "b"), ("", "d"))
    two = owns | {"d": Have(7, frozenset({("another", 0, "s1")}))}  # there can be no group, and why was said
    found = of(decided, 1, (2, 2))._from_nothing(there, two, 9)
    assert found is not None and found.parity == Parity(("", "b"), ("", "d"))
