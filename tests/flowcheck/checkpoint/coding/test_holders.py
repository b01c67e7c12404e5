"""Who keeps what: never two in one leaf while another has room; what may be lost is what the theory says, in bytes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.holders import (
    CodeGroup,
    Placement,
    Site,
    across_domains,
    code_groups,
    crowded,
    joining,
    place,
    place_across,
    ring,
    spread,
    together,
)
from flowcheck.errors import UserError
from flowcheck.plan.holders.placement import code_survival, survival, union_bound


def partitions(total: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """How many machines each leaf has, the largest leaf first."""
    if not total:
        yield ()
    for first in range(min(total, total if most is None else most), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


@cache
def possible(rows: tuple[int, ...], columns: tuple[int, ...], cap: int) -> bool:
    """Is there a matrix of numbers from 0 to cap with these sums? By trying."""
    if not columns:
        return not any(rows)
    most = [min(cap, row) for row in rows]
    for given_ in itertools.product(*(range(one + 1) for one in most)):
        if sum(given_) == columns[0]:
            left = tuple(sorted(row - one for row, one in zip(rows, given_, strict=True)))
            if possible(left, columns[1:], cap):
                return True
    return False


def sites_of(counts: Sequence[int]) -> list[Site]:
    return [Site(f"n{leaf}.{at}", f"h{leaf}.{at}", f"leaf{leaf}") for leaf, count in enumerate(counts)
            for at in range(count)]


def most_in_one_leaf(members: Sequence[int], sites: Sequence[Site]) -> int:
    leaves = [sites[one].leaf for one in members]
    return max(map(leaves.count, leaves))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_two_in_one_leaf_only_if_no_groups_of_these_sizes_avoid_it(replicas: int) -> None:
    for machines in range(replicas, 10):
        sizes = tuple(size for size, _ in place(machines, replicas).blocks)
        for counts in partitions(machines):
            sites = sites_of(counts)
            placement = place_across(sites, replicas)
            apart = all(most_in_one_leaf(holders, sites) == 1 for holders in placement.holders)
            assert apart == possible(tuple(sorted(sizes)), counts, 1), (counts, placement)
            assert apart == (not together(list(placement.fatal_sets()), sites))
            assert placement.blocks == place(machines, replicas).blocks


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_no_leaf_takes_a_group_if_that_can_be(replicas: int) -> None:
    for groups in (2, 3):
        for counts in partitions(groups * replicas):
            sites = sites_of(counts)
            placement = place_across(sites, replicas)
            safe = all(most_in_one_leaf(holders, sites) < replicas for holders in placement.holders)
            assert safe == possible((replicas,) * groups, counts, replicas - 1), counts


@pytest.mark.parametrize(("data", "parity"), [(2, 1), (2, 2), (3, 2), (1, 3), (4, 1)])
def test_no_leaf_takes_more_than_parity_if_that_can_be(data: int, parity: int) -> None:
    for machines in range(data + parity, 10):
        for counts in partitions(machines):
            sites = sites_of(counts)
            groups = code_groups(sites, data, parity)
            sizes = tuple(sorted(len(one.members) for one in groups))
            safe = all(most_in_one_leaf(one.members, sites) <= parity for one in groups)
            assert safe == possible(sizes, counts, parity), (counts, groups)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 4))
def test_groups_lie_across_leaves(leaves: int, per_leaf: int, replicas: int) -> None:
    """By names of leaves alone, in the order in which groups are numbered."""
    domains = [f"leaf{leaf}" for leaf in range(leaves) for _ in range(per_leaf)]
    if len(domains) < replicas:
        return
    order = across_domains(domains, replicas)
    assert sorted(order) == list(range(len(domains)))
    groups = len(domains) // replicas
    if per_leaf <= groups and len(domains) % replicas == 0:
        for at in range(groups):
            members = [domains[machine] for machine in order[at * replicas : (at + 1) * replicas]]
            assert len(set(members)) == replicas


@pytest.mark.parametrize("replicas", [3, 4])
def test_a_ring_survives_the_loss_of_a_leaf_if_that_can_be(replicas: int) -> None:
    """Of one leaf no more follow each other than must, where others of the circle can come between them."""
    for machines in range(replicas + 1, 2 * replicas):
        for counts in partitions(machines):
            placement, at = place_across(sites_of(counts), replicas), 0
            for count in counts:
                in_a_row = -(-count // (machines - count)) if count < machines else machines
                assert placement.survives(range(at, at + count)) == (in_a_row < replicas), (counts, placement)
                at += count


def test_domains_are_dealt_by_name() -> None:
    assert across_domains(["b", "a", "a", "b"], 2) == [1, 0, 2, 3]


def test_groups_are_dealt_to_in_turn_while_they_have_room() -> None:
    """That which got one longest ago comes first, and a full one gets none, however many a domain has."""
    assert spread([0, 1, 2, 3, 4, 5], list("abcdef"), [2, 2, 2]) == [[0, 3], [1, 4], [2, 5]]
    assert spread([0, 1, 2, 3], ["b", "b", "a", "a"], [3, 1]) == [[0, 2, 3], [1]]
    assert spread([0, 1, 2, 3, 4], ["a"] * 5, [1, 4]) == [[1], [0, 2, 3, 4]]


def test_racks_and_hosts_decide_where_leaves_do_not() -> None:
    """Two racks of two leaves each, two machines a leaf: pairs are of both racks."""
    sites = [Site(f"{rack}{leaf}{at}", f"{rack}{leaf}", f"{rack}{leaf}", rack) for rack in "ab" for leaf in "12"
             for at in "xy"]
    placement = place_across(sites, 2)
    assert not together(list(placement.fatal_sets()), sites, "rack")
    hosts = [Site(f"n{at}", f"h{at // 2}", "leaf") for at in range(8)]  # one leaf: hosts are what can be kept apart
    assert not together(list(place_across(hosts, 2).fatal_sets()), hosts, "host")
    unknown = [Site(f"n{at}", f"h{at // 2}") for at in range(8)]
    assert not together(list(place_across(unknown, 2).fatal_sets()), unknown, "host")


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(2, 3))
def test_the_order_of_members_decides_nothing(seed: int, machines: int, replicas: int) -> None:
    if machines < replicas:
        return
    dice = random.Random(seed)
    sites = [Site(f"n{at}", leaf=f"leaf{dice.randrange(4)}") for at in range(machines)]
    shuffled = dice.sample(sites, machines)

    def named(order: list[Site]) -> dict[str, list[str]]:
        holders = place_across(order, replicas).holders
        return {order[at].name: [order[one].name for one in keep] for at, keep in enumerate(holders)}

    assert named(sites) == named(shuffled)


# -- what may be lost ----------------------------------------------------------------------------------------------


class Cluster:
    """Machines with bytes: each has its own state and copies of those that it is to keep."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.states = [random.Random(at).randbytes(16) for at in range(placement.machines)]
        self.memory = [
            {at: self.states[at], **{other: self.states[other] for other in placement.kept_by(at)}}
            for at in range(placement.machines)
        ]

    def recovered(self, lost: Sequence[int]) -> bool:
        """All states again, from those that are left; where they are whole, they are equal."""
        found = []
        for machine in range(self.placement.machines):
            sources = self.placement.left(machine, lost)
            if not sources:
                return False
            found.append(self.memory[sources[0]][machine])
        assert found == self.states
        return True


def theory(placement: Placement, lost: Sequence[int]) -> bool:
    """By its blocks alone: a group is lost if all of it is, a ring if `replicas` neighbours of it are."""
    after = {holders[0]: holders[1] for holders in placement.holders} if placement.replicas > 1 else {}
    gone = set(lost)
    for start in gone if placement.replicas > 1 else ():
        row, at = 0, start
        while at in gone and row < placement.replicas:
            row, at = row + 1, after[at]
        if row == placement.replicas:
            return False
    return placement.replicas > 1 or not gone


@pytest.mark.parametrize(("machines", "replicas"), [(n, m) for n in range(2, 9) for m in range(1, min(n, 4) + 1)])
def test_every_subset_of_holders_is_killed(machines: int, replicas: int) -> None:
    leaves = [Site(f"n{at}", leaf=f"leaf{at % 3}") for at in range(machines)]
    for placement in (place(machines, replicas), ring(machines, replicas), place_across(leaves, replicas)):
        cluster = Cluster(placement)
        for count in range(min(machines, replicas + 1) + 1):
            sets = list(itertools.combinations(range(machines), count))
            good = [cluster.recovered(lost) for lost in sets]
            assert good == [theory(placement, lost) for lost in sets] == [placement.survives(lost) for lost in sets]
            measured = sum(good) / len(sets)
            assert measured == pytest.approx(survival(placement, count), abs=1e-12)
            assert measured >= union_bound(placement, count) - 1e-12


def test_bound_and_exact_form_part_where_the_paper_does_not_say() -> None:
    """16 machines, 2 replicas: every set of lost machines is tried."""
    group, circle = Cluster(place(16, 2)), Cluster(ring(16, 2))
    found = {}
    for count in (2, 3, 4):
        sets = list(itertools.combinations(range(16), count))
        found[count] = [sum(map(one.recovered, sets)) / math.comb(16, count) for one in (group, circle)]
    for count, both in {2: (0.9333, 0.8667), 3: (0.8, 0.6286), 4: (0.6154, 0.3626)}.items():
        assert found[count] == pytest.approx(both, abs=5e-5)
    assert union_bound(group.placement, 4) == union_bound(circle.placement, 3) == pytest.approx(0.6)


@pytest.mark.parametrize("machines", range(2, 9))
def test_every_subset_of_code_groups_is_killed(machines: int) -> None:
    for data, parity in ((k, m) for k in range(1, machines) for m in range(1, machines - k + 1)):
        groups = code_groups([Site(f"n{at}") for at in range(machines)], data, parity)
        assert sorted(one for group in groups for one in group.members) == list(range(machines))
        streams = {}
        for group in groups:
            assert len(group.members) == group.data + group.parity and group.parity == parity
            every = [random.Random(str((machines, at))).randbytes(64) for at in group.members[: group.data]]
            every += [bytearray(64) for _ in range(parity)]
            Code(group.data, parity).encode(every[: group.data], every[group.data :])
            streams |= dict(zip(group.members, every, strict=True))
        for count in range(min(machines, parity + 1) + 1):
            good = 0
            sets = list(itertools.combinations(range(machines), count))
            for lost in sets:
                too_many = any(len(set(group.members) & set(lost)) > parity for group in groups)
                assert all(_back(group, streams, lost) for group in groups) != too_many
                good += not too_many
            assert good / len(sets) == pytest.approx(code_survival(groups, count), abs=1e-12)


def _back(group, streams, lost) -> bool:
    """All streams of a group, from those that are left."""
    there = {at: streams[one] for at, one in enumerate(group.members) if one not in lost}
    gone = {at: bytearray(64) for at, one in enumerate(group.members) if one in lost}
    try:
        Code(group.data, group.parity).rebuild(there, gone)
    except UserError:
        return False
    return all(gone[at] == streams[group.members[at]] for at in gone)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: place_across([], 1), "machines"), (lambda: place_across([Site("a")], 2), "replicas"),
        (lambda: place_across([Site("a"), Site("b"), Site("a")], 2), "members"),
        (lambda: across_domains(["a"], 0), "replicas"),
        (lambda: code_groups([Site("a")] * 3, 2, 2), "code"), (lambda: code_groups([Site("a")] * 3, 0, 2), "code"),
    ],
)
def test_what_makes_no_sense_is_refused(call, where: str) -> None:
    with pytest.raises(UserError) as refused:
        call()
    assert refused.value.where == where and refused.value.remedy


def test_sizes_have_to_add_up() -> None:
    with pytest.raises(ValueError, match="3 machines for groups of 4"):
        spread([0, 1, 2], ["a", "b", "c"], [2, 2])


def test_how_machines_are_placed_is_said() -> None:
    """Groups where they divide, the last one a ring where they do not; or one ring of all."""
    assert (place(4, 2).strategy, place(4, 2).blocks) == ("group", ((2, False), (2, False)))
    assert (place(5, 2).strategy, place(5, 2).blocks) == ("mixed", ((2, False), (3, True)))
    assert place(5, 2).holders == ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    assert ring(4, 3) == Placement("ring", 3, ((0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1)), ((4, True),))
    assert place(1, 1).blocks == ((1, False),) and place(1, 1).replicas == 1
    assert place(5, 2).left(3, [4]) == [3] and place(5, 2).left(3, [3, 4]) == [] and place(5, 2).kept_by(4) == [3]
    assert place(4, 2).fatal_sets() == {frozenset({0, 1}), frozenset({2, 3})}


def test_a_domain_that_takes_too_many_with_it_is_named() -> None:
    """A leaf; where none is known a host; and who is known by its name alone is lost alone."""
    sites = [Site("a", "h1", "l1"), Site("b", "h2", "l1"), Site("c", "h3"), Site("d", "h3"), Site("e"),
             Site("f", "", "l1")]
    assert crowded([0, 1, 5], sites, 2) == "leaf l1" and crowded([0, 1, 5], sites, 3) == ""
    assert crowded([0, 2, 3, 4], sites, 1) == "host h3" and crowded([0, 2, 4], sites, 1) == ""
    assert crowded([0, 1, 2, 3], sites, 1) == "host h3"  # of two the first by name
    assert crowded([4], sites, 0) == "name e" and crowded([], sites, 0) == ""


def test_groups_with_two_of_one_place_are_found() -> None:
    sites = [Site("a", "h1", "l1", "r1"), Site("b", "h1", "l2", "r1"), Site("c", "h2", "l1"), Site("d")]
    groups = [[1, 0], [0, 1], [2, 0], [3, 1], [3]]
    assert together(groups, sites) == [(0, 2)]
    assert together(groups, sites, "host") == together(groups, sites, "rack") == [(0, 1)]


def test_who_joins_a_group() -> None:
    """Where it has the fewest; then from another rack and host; then in the order in which they are named."""
    sites = [Site("a", "h1", "l1", "r1"), Site("b", "h2", "l2", "r1"), Site("c", "h3", "l1", "r2"),
             Site("d", "h2", "l3", "r2"), Site("e", "h4", "l4", "r2"), Site("f", "h5", "l5", "r3")]
    assert joining(sites, [0, 1], [2, 3, 4, 5], 4) == [4, 5, 3, 2]
    assert joining(sites, [0, 1, 4], [3, 2, 5], 2) == [5, 3]
    assert joining(sites, [0, 1], [5, 4], 1) == [5] and joining(sites, [0, 1], [4, 5], 0) == []
    assert joining(sites, [], [3, 2], 2) == [3, 2] and joining(sites, [0], [], 2) == []
    plain = [Site(name) for name in "abcd"]
    assert joining(plain, [0], [3, 1, 2], 9) == [3, 1, 2]


def test_a_group_of_those_that_follow_a_shard() -> None:
    sites = [Site(f"n{at}", leaf=f"l{at}") for at in range(5)]
    assert code_groups(sites, 2, 2, [3, 0]) == [CodeGroup((3, 0, 1, 2), 2, 2)]
    with pytest.raises(UserError, match="1 machines follow a shard each, and there are 2 streams of data"):
        code_groups(sites, 2, 2, [3])
    with pytest.raises(UserError, match="'n0' is given twice") as refused:
        code_groups([*sites, Site("n0")], 2, 2, [3, 0])
    assert refused.value.where == "members"


@pytest.mark.parametrize(("machines", "sizes"), [(4, [(2, 2)]), (5, [(3, 2)]), (6, [(4, 2)]), (7, [(2, 2), (1, 2)]),
                                                 (8, [(2, 2), (2, 2)]), (10, [(2, 2), (4, 2)])])
def test_machines_that_fill_no_group(machines: int, sizes: list[tuple[int, int]]) -> None:
    """A smaller one if more than parity are left, otherwise the last one is larger."""
    groups = code_groups([Site(f"n{at}") for at in range(machines)], 2, 2)
    assert [(one.data, one.parity) for one in groups] == sizes
    assert sum(len(one.members) for one in groups) == machines
