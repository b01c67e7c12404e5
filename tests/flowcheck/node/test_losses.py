"""What a loss of members means: which step stays, what is nowhere any more, and when all is whole again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from flowcheck.ask.offer import COPY, DISK, MEMORY, STORE, Offer
from flowcheck.checkpoint.coding.holders import Site
from flowcheck.node.protect.losses import frozen, newest_persistent, whole
from flowcheck.node.protect.placement import Decided, Have, Member, Parity, Recovery, Run, Shard

RUN, OTHER = ("run", 1), ("job", 0)
S0, S1, S2 = (*RUN, "s0"), (*RUN, "s1"), (*RUN, "s2")
X0 = (*OTHER, "x0")
MEMBERS = {name: Member(Site(name), f"{name}:1") for name in "abcd"}
PLAIN = Decided(7, MEMBERS, {"a": ("b",), "b": ("a",), "c": ("d",), "d": ("c",)})


def has(own: Iterable[Shard] = (), streams: Mapping[Run, Iterable[tuple[int, int]]] | None = None,
        **copies: Mapping[Shard, Iterable[int]]) -> Have:
    """copies: by the name of the source."""
    return Have(7, frozenset(own), {(f"{name}:1", shard): frozenset(steps) for name, of in copies.items()
                                    for shard, steps in of.items()},
                {run: frozenset(some) for run, some in (streams or {}).items()})


# -- what is frozen ------------------------------------------------------------------------------------------------


def test_the_newest_step_that_copies_of_all_shards_have_stays() -> None:
    """Of each run; copies of one shard may lie with several."""
    haves = {"b": has([S1], a={S0: [3, 4]}, z={S0: [6]}), "c": has([S2], b={S1: [3, 4, 5, 6]}),
             "d": has([X0], c={S2: [2, 3, 4]}, d={X0: [0, 9]})}
    assert frozen(PLAIN, ["a"], haves, {"a": has([S0])}, 8) == Recovery(
        8, ("a",), (), (S0,), (), {RUN: 4, OTHER: 9})


def test_a_shard_without_a_copy_holds_up_its_run_alone() -> None:
    """It is still there, at the node that follows it, and so it is not void."""
    haves = {"b": has([S1], a={S0: [4]}), "c": has([X0], c={X0: [5]})}
    assert frozen(PLAIN, ["a"], haves, {}, 8) == Recovery(8, ("a",), (), (S0,), (), {OTHER: 5})


def test_a_step_zero_is_one() -> None:
    assert frozen(PLAIN, ["a"], {"b": has(a={S0: [0]})}, {}, 8).steps == {RUN: 0}


@pytest.mark.parametrize(("haves", "void"), [
    ({"b": has()}, (S0, S1)), ({"b": has(a={S0: [], S1: [4]})}, (S0,)), ({"b": has([S0])}, (S1,)),
    ({"b": has([S0], c={S1: [4]})}, ()),
], ids=["nobody has a copy", "a copy of no step", "somebody else follows it", "a copy, wherever it is from"])
def test_what_is_nowhere_any_more_is_void(haves: dict[str, Have], void: tuple[Shard, ...]) -> None:
    found = frozen(PLAIN, ["a"], haves, {"a": has([S1, S0])}, 8)
    assert (found.void, found.shards) == (void, (S0, S1))


def test_what_a_lost_member_followed_is_known_by_who_keeps_copies_of_it() -> None:
    """Also if a new root has never seen it; copies of others say nothing about it."""
    found = frozen(PLAIN, ["d", "a"], {"b": has(a={S0: [4]}, c={S1: [4]})}, {"c": has([S2])}, 8)
    assert (found.lost, found.shards, found.void, found.steps) == (("a", "d"), (S0,), (), {RUN: 4})


def test_another_loss_goes_on_with_the_first() -> None:
    """Its number stays with who calls; what was lost before stays lost, and who has come back was asked for no more."""
    before = replace(PLAIN, recovery=Recovery(6, ("a", "b"), ("a", "b"), (S2, S0)))
    found = frozen(before, ["c", "a"], {}, {"c": has([S1]), "a": has([S0])}, 6)
    assert found == Recovery(6, ("a", "c"), ("a",), (S0, S1, S2), (S0, S1), {})


GROUP = replace(PLAIN, parity=Parity(("a", "b"), ("c", "d")))


@pytest.mark.parametrize(("haves", "steps"), [
    ({"b": has(b={S1: [4, 6]}), "c": has(streams={RUN: [(4, 2)]})}, {RUN: 4}),
    ({"b": has(b={S1: [6]}), "c": has(streams={RUN: [(4, 2)]}), "d": has(streams={RUN: [(4, 3), (6, 3)]})}, {RUN: 6}),
    ({"c": has(streams={RUN: [(4, 2)]}), "d": has(streams={RUN: [(4, 3), (6, 3)]})}, {RUN: 4}),
    ({"c": has(streams={RUN: [(4, 2)]}), "d": has(streams={RUN: [(4, 2)]})}, {}),
    ({"b": has(b={S1: [4]}), "d": has(b={S1: [4]})}, {}),
    ({"b": has(b={S1: [4]}), "c": has(streams={("run", 2): [(4, 2)]})}, {}),
    ({"b": has(b={S1: [4]}), "c": has(streams={("job", 1): [(4, 2)]})}, {}),
], ids=["data and parity", "the newest", "parity alone", "one stream twice", "one shard twice", "another epoch",
        "another run"])
def test_a_step_stays_of_which_as_many_pieces_are_there_as_there_are_shards(
    haves: dict[str, Have], steps: dict[Run, int]
) -> None:
    found = frozen(GROUP, ["a"], haves, {"a": has([S0]), "b": has([S1])}, 8)
    assert found.steps == steps and found.void == (() if steps else (S0,))
    assert frozen(PLAIN, ["a"], haves, {"a": has([S0])}, 8).void == (S0,)  # without parity its streams say nothing
    more = replace(PLAIN, parity=Parity(("a", "b", "c"), ("d",)))  # two pieces of three
    assert frozen(more, ["a"], haves, {"a": has([S0])}, 8).void == (S0,)


# -- when it is over -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "over"), [
    ([], False), ([S1], False), ([S0, S1], True), ([X0], True), ([("run", 2, "s0")], True), ([("run", 2, "s1")], True),
], ids=["nobody follows anything", "its run without it", "followed again", "another job", "another start of the job",
        "another start without it"])
def test_each_lost_shard_is_followed_again_unless_its_run_is_over(own: list[Shard], over: bool) -> None:
    decided = Decided(8, MEMBERS, dict.fromkeys(MEMBERS, ()), Recovery(7, shards=(S0,)))
    assert whole(decided, {"a": has(own)}) == over
    assert whole(replace(decided, recovery=None), {"a": has(own)})


def test_each_holder_has_a_copy_of_each_shard_that_it_is_to_keep() -> None:
    decided = Decided(8, MEMBERS, {"a": ("b", "c"), "b": (), "c": ("a",), "d": ()}, Recovery(7))
    held = {"a": has([S0, S1], c={S2: [4]}), "b": has(a={S0: [3], S1: [4]}), "c": has([S2], a={S0: [4], S1: [2]})}
    assert whole(decided, held)
    for name, less in (("b", has(a={S0: [3]})), ("c", has([S2], a={S0: [4], S1: []})), ("a", has([S0, S1])),
                       ("c", has([S2], b={S0: [4], S1: [2]}))):
        assert not whole(decided, held | {name: less}), name
    assert not whole(decided, {name: one for name, one in held.items() if name != "b"})  # it says nothing yet


def data(name: str, shard: Shard, *steps: int) -> Have:
    """A node with data that keeps copies of its own versions of these steps."""
    return has([shard], None, **{name: {shard: steps}})


@pytest.mark.parametrize(("haves", "over"), [
    ({"a": data("a", S0, 4, 6), "b": data("b", S1, 4, 6), "c": {(4, 2), (6, 2)}, "d": {(6, 3)}}, True),
    ({"a": data("a", S0, 4, 6), "b": data("b", S1, 4), "c": {(6, 2)}, "d": {(4, 3), (6, 3)}}, False),
    ({"a": data("a", S0, 6), "b": data("b", S1, 6), "c": {(6, 3)}, "d": {(6, 3)}}, False),
    ({"a": data("a", S0, 6), "b": data("b", S1, 6), "c": {(6, 2)}}, False),
    ({"a": data("x", S0, 6), "b": data("b", S1, 6), "c": {(6, 2)}, "d": {(6, 3)}}, False),
    ({"a": data("a", S0, 6), "c": {(6, 2)}, "d": {(6, 3)}}, False),
    ({"a": Have(1), "b": Have(1), "c": {(6, 2)}}, True),
], ids=["all of one step", "other steps", "another stream", "a holder has none", "copies of another",
        "one with data is not followed", "no job"])
def test_all_pieces_of_one_step_are_there(haves: dict[str, Have | set[tuple[int, int]]], over: bool) -> None:
    decided = replace(GROUP, holders=dict.fromkeys(MEMBERS, ()), recovery=Recovery(2))
    given = {name: one if isinstance(one, Have) else has(streams={RUN: one}) for name, one in haves.items()}
    assert whole(decided, given) == over
    given_up = replace(decided, parity=Parity(("a", "b"), ("c", "")))
    assert whole(given_up, given) == (over or "d" not in given)


def test_a_place_with_data_that_was_given_up_is_not_waited_for() -> None:
    decided = replace(GROUP, holders=dict.fromkeys(MEMBERS, ()), parity=Parity(("", "b"), ("c", "d")))
    held = {"b": data("b", S1, 6), "c": has(streams={RUN: [(6, 2)]}), "d": has(streams={RUN: [(6, 3)]})}
    assert whole(decided, held) and not whole(decided, held | {"b": data("b", S1, 4)})
    assert whole(replace(decided, parity=Parity(("", ""), ("c", "d"))), held)
    moved = {"b": data("b", S1, 6), "c": has(streams={RUN: [(6, 3)]}), "d": has(streams={RUN: [(6, 2)]})}
    assert not whole(decided, moved)
    assert not whole(decided, held | {"c": has(streams={("run", 2): [(6, 2)]})})  # of another start


# -- what is left on disks and in stores -----------------------------------------------------------------------------


def test_where_a_recovery_ends_if_nothing_in_memory_is_left() -> None:
    """Of each run, at the newest that all of its shards have on a disk or in a store."""
    def offer(tier: str, shard: Shard, step: int, epoch: int = 1, status: str = "verified") -> Offer:
        return Offer("m1", tier, shard[0], epoch, step, shard[2], status, 1)

    offers = [offer(DISK, S0, 9), offer(STORE, S1, 9, status="unverified"), offer(DISK, S0, 11), offer(COPY, S1, 11),
              offer(MEMORY, S1, 11), offer(DISK, S1, 4), offer(STORE, S0, 4), offer(DISK, X0, 2, 0),
              offer(DISK, S2, 11), offer(DISK, X0, 1, 3)]
    assert newest_persistent(offers, [S1, S0]) == {"run": (1, 9)}
    assert newest_persistent(offers, [X0, S1, S0]) == {"run": (1, 9), "job": (3, 1)}
    assert newest_persistent(offers, [S0, (*RUN, "nobody's"), X0]) == {"run": None, "job": (3, 1)}
    assert newest_persistent([], []) == {}
