"""Replicas in memory: every probability by brute force, every number of Gemini's that can be counted."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint.coding.holders import Placement, place, ring
from flowcheck.errors import UserError
from flowcheck.plan.holders.placement import (
    beyond_most,
    survival,
    union_bound,
)

SMALL = [(n, m) for n in range(1, 9) for m in range(1, n + 1)]


def corollary_1(machines: int, replicas: int, lost: int) -> float:
    """As Gemini prints it, for replicas that divide machines."""
    if lost < replicas:
        return 1.0
    fatal = machines * math.comb(machines - replicas, lost - replicas)
    return max(0.0, 1 - fatal / (replicas * math.comb(machines, lost)))


def by_force(placement: Placement, lost: int) -> float:
    sets = list(combinations(range(placement.machines), lost))
    return sum(placement.survives(gone) for gone in sets) / len(sets)


@pytest.mark.parametrize(("machines", "replicas"), SMALL)
def test_exact_is_exact(machines: int, replicas: int) -> None:
    for placement in (place(machines, replicas), ring(machines, replicas)):
        for lost in range(machines + 1):
            exact = survival(placement, lost)
            assert exact == pytest.approx(by_force(placement, lost), abs=1e-12), (placement.strategy, lost)
            assert union_bound(placement, lost) <= exact + 1e-12


@pytest.mark.parametrize(("machines", "replicas"), SMALL)
def test_algorithm_1(machines: int, replicas: int) -> None:
    placement = place(machines, replicas)
    assert placement.strategy == ("mixed" if machines % replicas else "group")
    for machine, holders in enumerate(placement.holders):
        assert machine in holders and len(set(holders)) == len(holders) == replicas
    if placement.strategy == "mixed":
        size, circle = placement.blocks[-1]
        assert circle and replicas < size < 2 * replicas
    assert sum(size for size, _ in placement.blocks) == machines


@pytest.mark.parametrize(("machines", "replicas"), [(n, m) for m in (2, 3, 4) for n in range(m, 13)])
def test_theorem_1(machines: int, replicas: int) -> None:
    """Fatal sets of mixed: (g - 1) + r, of any placement at least ceil(N / m); they part by at most 2m - 3."""
    fatal, least = len(place(machines, replicas).fatal_sets()), -(-machines // replicas)
    if machines % replicas == 0:
        assert fatal == least == machines // replicas
    else:
        groups = machines // replicas
        rest = machines - replicas * (groups - 1)
        assert fatal == groups - 1 + rest and least <= fatal <= least + 2 * replicas - 3
        assert (fatal - least == 2 * replicas - 3) == (rest == 2 * replicas - 1)


@pytest.mark.parametrize(("machines", "replicas"), [(5, 2), (7, 2), (8, 3), (11, 4)])
def test_theorem_1_is_tight(machines: int, replicas: int) -> None:
    fatal, least = len(place(machines, replicas).fatal_sets()), -(-machines // replicas)
    assert fatal - least == 2 * replicas - 3


@pytest.mark.parametrize(
    ("lost", "group_bound", "group_exact", "ring_bound", "ring_exact"),
    [(2, 0.9333, 0.9333, 0.8667, 0.8667), (3, 0.8, 0.8, 0.6, 0.6286), (4, 0.6, 0.6154, 0.2, 0.3626)],
)
def test_the_table_of_16_machines(
    lost: int, group_bound: float, group_exact: float, ring_bound: float, ring_exact: float
) -> None:
    group, circle = place(16, 2), ring(16, 2)
    assert corollary_1(16, 2, lost) == pytest.approx(group_bound, abs=5e-5)
    assert union_bound(group, lost) == pytest.approx(corollary_1(16, 2, lost))
    assert survival(group, lost) == pytest.approx(group_exact, abs=5e-5)
    assert union_bound(circle, lost) == pytest.approx(ring_bound, abs=5e-5)
    assert survival(circle, lost) == pytest.approx(ring_exact, abs=5e-5)


def test_ring_25_percent_lower_is_bound_against_bound() -> None:
    assert 1 - union_bound(ring(16, 2), 3) / corollary_1(16, 2, 3) == pytest.approx(0.25)
    assert 1 - survival(ring(16, 2), 3) / survival(place(16, 2), 3) == pytest.approx(0.214, abs=5e-4)


@given(st.integers(2, 6), st.integers(1, 30), st.data())
def test_corollary_1_is_exact_below_two_groups(replicas: int, groups: int, data: st.DataObject) -> None:
    machines = replicas * groups
    lost = data.draw(st.integers(0, machines))
    exact, printed = survival(place(machines, replicas), lost), corollary_1(machines, replicas, lost)
    assert printed <= exact + 1e-12
    if lost < 2 * replicas:
        assert printed == pytest.approx(exact, abs=1e-12)


@given(st.integers(2, 200), st.data())
def test_ring_of_two(machines: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, machines - 1))
    others = machines - lost
    printed = machines / others * math.comb(others, lost) / math.comb(machines, lost)
    assert survival(ring(machines, 2), lost) == pytest.approx(printed)


@pytest.mark.parametrize(("machines", "group", "most"), [(8, 4, 2), (7, 3, 1), (6, 6, 5), (8, 2, 0), (5, 2, 2)])
def test_groups_that_bear_some(machines: int, group: int, most: int) -> None:
    full = machines // group * group
    for lost in range(machines + 1):
        sets = list(combinations(range(machines), lost))
        good = sum(
            all(sum(one // group == which and one < full for one in gone) <= most for which in range(machines // group))
            for gone in sets
        )
        assert beyond_most(machines, group, most, lost) == pytest.approx(good / len(sets), abs=1e-12)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: place(0, 1), "machines"), (lambda: place(4, 5), "replicas"), (lambda: ring(4, 0), "replicas"),
        (lambda: survival(place(4, 2), 5), "simultaneous"),
        (lambda: beyond_most(4, 5, 1, 1), "group"),
    ],
)
def test_what_makes_no_sense_is_refused(call, where: str) -> None:
    with pytest.raises(UserError) as refused:
        call()
    assert refused.value.where == where and refused.value.remedy
