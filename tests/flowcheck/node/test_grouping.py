"""Which members make a group with parity: data where the shards are, parity where the group has the fewest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from flowcheck.checkpoint.coding.holders import Site, code_groups
from flowcheck.errors import UserError
from flowcheck.node.protect.placement import Decided, Member, Parity, Shard
from flowcheck.node.protect.placement_groups import grouped


def members(leaves: Mapping[str, str]) -> dict[str, Member]:
    """By name: those that begin with n, or with a, have a mirror port."""
    return {name: Member(Site(name, leaf=leaf), f"{name}:1", name[0] in "na", parity=True)
            for name, leaf in leaves.items()}


def own(**followed: str) -> dict[str, frozenset[Shard]]:
    return {name: frozenset(("run", 0, shard) for shard in shards.split()) for name, shards in followed.items()}


FOUR = members({"n0": "l1", "n1": "l2", "h2": "l1", "h3": "l2"})
STAGES = own(n0="stage0", n1="stage1")
GROUP = Parity(("n0", "n1"), ("h2", "h3"))


def test_data_is_where_the_shards_are_and_parity_where_there_is_no_port() -> None:
    assert grouped((2, 2), FOUR, STAGES) == GROUP
    assert grouped((2, 2), FOUR, own(n0="stage1", n1="stage0")) == Parity(("n1", "n0"), ("h2", "h3"))
    assert grouped((2, 2), FOUR, {}) is None  # no job yet
    more = FOUR | members({"a4": "l1", "n5": "l2"})
    assert grouped((2, 2), more, STAGES) == GROUP  # nodes with a port are left for shards


def test_parity_lies_where_the_group_has_the_fewest() -> None:
    """Leaves first, whoever has a port; then racks."""
    there = members({"n0": "l1", "n1": "l2", "h2": "l1", "h3": "l2", "n6": "l3", "n7": "l4"})
    assert grouped((2, 2), there, STAGES) == Parity(("n0", "n1"), ("n6", "n7"))
    there = {name: Member(Site(name, leaf=name, rack=rack), f"{name}:1", name[0] == "n", parity=True)
             for name, rack in {"n0": "r1", "n1": "r2", "h2": "r1", "h3": "r2", "h4": "r3", "h5": "r4"}.items()}
    assert grouped((2, 2), there, STAGES) == Parity(("n0", "n1"), ("h4", "h5"))


@pytest.mark.parametrize("leaves", [*itertools.product(("l1", "l2", "l3"), repeat=4)], ids=" ".join)
def test_as_the_planner_says_it(leaves: Sequence[str]) -> None:
    """Where there are as many members as the code has streams, `flowcheck plan holders` has the same group; with more
    it has the same holders."""
    there = members(dict(zip(("n0", "n1", "h2", "h3"), leaves, strict=True)))
    sites = [one.site for one in there.values()]
    (plain,), (known,) = code_groups(sites, 2, 2), code_groups(sites, 2, 2, follows=[0, 1])
    assert sorted(plain.members) == sorted(known.members) == [0, 1, 2, 3]
    if max(map(leaves.count, leaves)) > 2:
        with pytest.raises(UserError, match=r"leaf l. would be lost with more than 2 members of the group"):
            grouped((2, 2), there, STAGES)
        return
    made = grouped((2, 2), there, STAGES)
    assert made is not None and set(made.names) == {sites[at].name for at in plain.members}
    more = there | members({"h4": "l1", "h5": "l4"})
    made = grouped((2, 2), more, STAGES)
    (known,) = code_groups([one.site for one in more.values()], 2, 2, follows=[0, 1])
    assert made is not None and made.names == tuple([*more][at] for at in known.members)


@pytest.mark.parametrize(("there", "owns", "why"), [
    (["n0", "n1", "h2"], STAGES, "1 members beside the 2 that follow its shards may keep parity, and 2 have to"),
    (FOUR, own(n0="stage0"), r"1 shards \('stage0'\) for 2 streams of data"),
    ([*FOUR, "n4"], own(n0="stage0", n1="stage1", n4="stage2"), r"3 shards \('stage0', 'stage1', 'stage2'\) for 2"),
    (FOUR, own(n0="stage0 stage1"), "n0 follows 'stage0', 'stage1', which would be lost together"),
    (FOUR, STAGES | {"n1": frozenset({("other", 0, "stage1")})}, "several jobs are followed: 'other', 'run'"),
], ids=["too few members", "fewer shards", "more shards", "several at one node", "several jobs"])
def test_what_is_no_group(there: Sequence[str], owns: Mapping[str, frozenset[Shard]], why: str) -> None:
    known = FOUR | members({"n4": "l3"})
    with pytest.raises(UserError, match=why) as refused:
        grouped((2, 2), {name: known[name] for name in there}, owns)
    assert refused.value.where == "protect.parity"


def test_who_takes_no_part_is_not_taken() -> None:
    """Its settings have no protect.parity: a stream there would never be made."""
    apart = FOUR | {"h1": Member(Site("h1", leaf="l3"), "h1:1", False)}
    assert grouped((2, 2), apart, STAGES) == GROUP
    apart["n1"] = Member(Site("n1", leaf="l2"), "n1:1")
    with pytest.raises(UserError, match=r"n1 follows 'stage1', and has no protect\.parity"):
        grouped((2, 2), apart, STAGES)


def test_who_has_a_place_keeps_it() -> None:
    """Others that would be better placed, another mirror of a shard, a member that is gone: nothing moves for those."""
    better = FOUR | members({"h6": "l3", "h7": "l4", "a0": "l5"})
    assert grouped((2, 2), better, STAGES | own(a0="stage0"), GROUP) == GROUP
    assert grouped((2, 2), better, STAGES | own(a0="stage0")) == Parity(("a0", "n1"), ("h2", "h6"))
    left = {name: one for name, one in FOUR.items() if name != "n0"}
    assert grouped((2, 2), left, own(n1="stage1"), GROUP) == GROUP
    left = {name: one for name, one in FOUR.items() if name != "h3"}
    assert grouped((2, 2), left, STAGES, GROUP) == GROUP
    assert grouped((2, 2), {"h2": FOUR["h2"]}, {}, GROUP) == GROUP


def test_a_place_is_taken_by_who_is_there() -> None:
    left = {name: one for name, one in FOUR.items() if name != "h3"}
    both = left | members({"h6": "l1", "h7": "l2"})
    assert grouped((2, 2), both, STAGES, GROUP) == Parity(("n0", "n1"), ("h2", "h7"))
    assert grouped((2, 2), left | members({"h6": "l1"}), STAGES, GROUP) == Parity(("n0", "n1"), ("h2", "h6"))
    given_up = Parity(("n0", "n1"), ("", "h3"))
    assert grouped((2, 2), FOUR, STAGES, given_up) == GROUP
    left = {name: one for name, one in FOUR.items() if name not in ("n0", "h3")}  # nobody follows stage0 meanwhile
    assert grouped((2, 2), left | members({"h6": "l1"}), own(n1="stage1"), GROUP) == Parity(("n0", "n1"), ("h2", "h6"))
    left = {name: one for name, one in FOUR.items() if name != "n0"}
    mirror = own(n1="stage1", n8="stage0")  # the shard of one that is lost has another mirror
    assert grouped((2, 2), left | members({"n8": "l1"}), mirror, GROUP) == Parity(("n8", "n1"), ("h2", "h3"))


def test_another_code_begins_anew() -> None:
    more = FOUR | members({"h1": "l3"})
    assert grouped((2, 1), more, STAGES, GROUP) == Parity(("n0", "n1"), ("h1",))
    assert grouped((2, 1), FOUR, {}, GROUP) == GROUP  # with no job there is nothing to begin with


def test_what_a_decision_says_of_it() -> None:
    decided = Decided(4, FOUR, dict.fromkeys(FOUR, ()), None, Parity(("n0", "n1"), ("", "h3")))
    assert Decided.of(decided.text()) == decided
    assert decided.sources("n0") == {"n0": "n0:1"} and decided.sources("h2") == decided.sources("h3") == {}
    part = decided.part("h3")
    assert part is not None and (part.code, part.number, part.data) == ((2, 2), 3, ("n0:1", "n1:1"))
    assert decided.part("h2") is None and decided.part("n0") is None and decided.part("") is None
    assert decided.grouped("h3") == ["n0:1", "n1:1"] and decided.grouped("h2") == ["n0:1", "n1:1", "h3:1"]
