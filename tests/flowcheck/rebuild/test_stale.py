"""Stale elements against plain sets of (entry, element, when)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import flowcheck.rebuild.version.stale
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.version.stale import AGES, SHARE, Range, Stale, by_entry, deal

SIZES = {"w": 40, "b": 7, "c": 12}
COST = {"w": 12, "b": 12, "c": 6}
EACH = {name: st.integers(0, size) for name, size in SIZES.items()}


def runs_of(name: str) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(EACH[name], EACH[name]).map(lambda pair: (min(pair), max(pair))), max_size=4)


parts = st.sampled_from(sorted(SIZES)).flatmap(lambda name: st.tuples(st.just(name), runs_of(name)))


def elements(name: str, pairs: list[tuple[int, int]]) -> set[tuple[str, int]]:
    return {(name, i) for start, end in pairs for i in range(start, end)}


def asked(ranges: list[Range]) -> list[tuple[str, int]]:
    return [(name, i) for name, start, length in ranges for i in range(start, start + length)]


def runs(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


class Sets(RuleBasedStateMachine):
    """The same, element by element: since when is each one stale?"""

    def __init__(self) -> None:
        super().__init__()
        self.stale, self.since, self.now = Stale(SIZES, COST), dict[tuple[str, int], int](), 0

    @rule(part=parts)
    def add(self, part: tuple[str, list[tuple[int, int]]]) -> None:
        self.stale.add(part[0], runs(part[1]))
        for element in elements(*part):
            self.since.setdefault(element, self.now)

    @rule()
    def add_all(self) -> None:
        self.stale.add_all(SIZES)
        for name, size in SIZES.items():
            for element in elements(name, [(0, size)]):
                self.since.setdefault(element, self.now)

    @rule(part=parts)
    def remove(self, part: tuple[str, list[tuple[int, int]]]) -> None:
        self.stale.remove(part[0], runs(part[1]))
        for element in elements(*part):
            self.since.pop(element, None)

    @rule()
    def begin(self) -> None:
        self.stale.begin()
        self.now += 1

    @rule()
    def clear(self) -> None:
        self.stale.clear()
        self.since.clear()

    @rule(budget=st.integers(-1, 800), part=parts)
    def oldest(self, budget: int, part: tuple[str, list[tuple[int, int]]]) -> None:
        found = asked(self.stale.oldest(budget, {part[0]: intervals(part[1])}))
        open_ = self.since.keys() - elements(*part)
        cost = sum(COST[name] for name, _ in found)
        assert len(set(found)) == len(found) and set(found) <= open_
        if budget < 1 or not open_:
            assert found == []
            return
        assert cost <= budget or len(found) == 1
        left = open_ - set(found)
        assert found and (not left or budget - cost < max(COST.values())), "more would have fitted"
        assert all(self.since[a] <= self.since[b] for a in found for b in left), "something older was left out"

    @invariant()
    def equal(self) -> None:
        assert self.stale.elements == len(self.since) and bool(self.stale) == bool(self.since)
        assert self.stale.names == {name for name, _ in self.since}
        for name in SIZES:
            held = self.stale.of(name)
            assert elements(name, held.tolist()) == {one for one in self.since if one[0] == name}
            assert held.tolist() == intervals(held).tolist(), "sorted, apart, not empty"


TestSets = Sets.TestCase
TestSets.settings = settings(max_examples=60)


def test_what_is_younger_does_not_come_first_because_it_costs_less() -> None:
    stale = Stale({"w": 9, "c": 9}, {"w": 12, "c": 8})
    stale.add("w", runs([(0, 9)]))
    stale.begin()
    stale.add("c", runs([(0, 9)]))
    assert stale.oldest(20, {}) == [("w", 0, 1)]
    assert stale.oldest(9 * 12 + 8, {}) == [("w", 0, 9), ("c", 0, 1)]


def test_more_ages_than_are_told_apart() -> None:
    stale = Stale({"w": 10 * AGES}, {"w": 1})
    for i in range(2 * AGES):
        stale.begin()
        stale.add("w", runs([(2 * i, 2 * i + 1)]))
    assert stale.elements == 2 * AGES
    assert [start for _, start, _ in stale.oldest(AGES, {})] == [2 * i for i in range(AGES)]
    stale.remove("w", runs([(0, 2)]))
    assert stale.oldest(1, {}) == [("w", 2, 1)]


def test_elements_outside_of_an_entry_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="outside of 'b'"):
        Stale(SIZES, COST).add("b", runs([(6, 8)]))


@pytest.mark.parametrize("share", [1, 40, 500, SHARE])
@pytest.mark.parametrize("shares", [1, 2, 3, 8])
def test_parts_are_all_of_it_and_about_the_same(monkeypatch: pytest.MonkeyPatch, shares: int, share: int) -> None:
    monkeypatch.setattr(flowcheck.rebuild.version.stale, "SHARE", share)
    ranges: list[Range] = [("w", 3, 30), ("c", 0, 12), ("b", 2, 1), ("w", 36, 4)]
    dealt = deal(ranges, COST, shares)
    assert sorted(asked([one for part in dealt for one in part])) == sorted(asked(ranges))
    sizes = [sum(length * COST[name] for name, _, length in part) for part in dealt]
    assert 1 <= len(dealt) <= shares and all(sizes)
    assert all(size - max(sizes) >= -2 * max(COST.values()) for size in sizes[:-1])
    assert min(shares, -(-sum(sizes) // share)) - len(dealt) in (0, 1), "each has a little more than its part"
    if share == SHARE:
        assert dealt == [ranges], "little is not cut"


def test_nothing_is_dealt_of_nothing_and_to_nobody() -> None:
    assert deal([], COST, 3) == [] == deal([("w", 0, 3)], COST, 0)


def test_ranges_by_entry() -> None:
    found = by_entry([("w", 5, 2), ("b", 0, 1), ("w", 7, 1)])
    assert {name: each.tolist() for name, each in found.items()} == {"w": [[5, 8]], "b": [[0, 1]]}


# -- ages ----------------------------------------------------------------------------------------------------


def order(stale: Stale) -> list[int]:
    """The elements, as they are asked for one by one."""
    found = []
    while first := stale.oldest(1, {}):
        [(name, element, _)] = first
        found.append(element)
        stale.remove(name, runs([(element, element + 1)]))
    return found


def single() -> Stale:
    return Stale({"a": 4 * AGES}, {"a": 1})


def test_what_is_added_without_a_beginning_is_of_the_same_age() -> None:
    stale = single()
    stale.begin()
    stale.add("a", runs([(9, 10)]))
    stale.add("a", runs([(3, 4)]))
    assert order(stale) == [3, 9]
    stale.add("a", runs([(9, 10)]))
    stale.begin()
    stale.add("a", runs([(3, 4)]))
    assert order(stale) == [9, 3]


def test_the_age_that_may_grow_is_the_newest_as_long_as_anything_of_it_is_left() -> None:
    stale = single()
    stale.begin()
    stale.add("a", runs([(20, 21)]))
    stale.begin()
    stale.add("a", runs([(8, 10)]))
    stale.remove("a", runs([(8, 9)]))
    stale.add("a", runs([(5, 6)]))  # of the same age as 9
    stale.begin()
    stale.add("a", runs([(1, 2)]))
    assert order(stale) == [20, 5, 9, 1]


def test_an_age_that_is_gone_grows_no_more() -> None:
    stale = single()
    stale.begin()
    stale.add("a", runs([(20, 21)]))
    stale.begin()
    stale.add("a", runs([(8, 9)]))
    stale.remove("a", runs([(8, 9)]))
    stale.add("a", runs([(5, 6)]))  # younger than 20
    assert order(stale) == [20, 5]


def test_so_many_ages_are_told_apart_and_no_more() -> None:
    stale = single()
    for age in range(AGES + 3):
        stale.begin()
        stale.add("a", runs([(4 * AGES - 1 - age, 4 * AGES - age)]))
    last = 4 * AGES - 1 - (AGES + 2)
    told = [4 * AGES - 1 - age for age in range(AGES - 1)]
    assert order(stale) == [*told, *range(last, last + 4)]


def test_a_budget_of_one_byte_brings_one_element_of_any_size() -> None:
    stale = Stale({"a": 5}, {"a": 16})
    stale.add("a", runs([(0, 5)]))
    assert stale.oldest(1, {}) == [("a", 0, 1)] and stale.oldest(0, {}) == []


def test_a_share_is_full_when_it_has_its_bytes() -> None:
    """Cut at the element with which it has them, and nothing is added to one that is full."""
    cost = {"a": SHARE}
    assert deal([("a", 0, 3)], cost, 3) == [[("a", 0, 1)], [("a", 1, 1)], [("a", 2, 1)]]
    assert deal([("a", 0, 1), ("a", 5, 1)], cost, 2) == [[("a", 0, 1)], [("a", 5, 1)]]
    odd = {"a": SHARE - 1, "b": 1}
    assert deal([("a", 0, 1), ("b", 0, 2)], odd, 2)[0] == [("a", 0, 1), ("b", 0, 1)]
