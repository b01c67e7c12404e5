"""Which elements of a partial version are anything, until a trainer's own state of them is written there.

    stale = Stale({"w": 300}, {"w": 12})      elements of each entry, and bytes of state of each element
    stale.add("w", runs)         of a gradient that was lost; stale.add_all(names): of a whole iteration
    stale.remove("w", runs)      patched
    stale.oldest(budget, but)    what to ask for now: (entry, first element, elements), the longest waiting first
    deal(ranges, cost, shares)   the same elements in so many parts of about the same bytes

Runs are as in iteration/intervals.py. An element that becomes stale again keeps its place in the order. Memory and time
grow with what was lost, never with the size of the model: a whole entry is one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from flowcheck.rebuild.iteration.intervals import intervals, total, without

__all__ = ["Range", "Stale", "by_entry", "deal"]

Range = tuple[str, int, int]  # entry, first element, elements
AGES = 32  # that are kept apart; what comes later is as old as the newest of them
SHARE = 64 << 10  # bytes; less than this is not cut for another rank
_NONE = np.empty((0, 2), np.int64)


class Stale:
    """sizes: elements of every entry that can be stale. cost: bytes of parameter and optimizer state of an element."""

    def __init__(self, sizes: Mapping[str, int], cost: Mapping[str, int]) -> None:
        self._sizes, self._cost = dict(sizes), dict(cost)
        self._ages: list[dict[str, np.ndarray]] = []  # disjoint, the oldest first
        self._open = False  # may the newest of them still grow?

    def __bool__(self) -> bool:
        return any(self._ages)

    @property
    def elements(self) -> int:
        return sum(total(runs) for age in self._ages for runs in age.values())

    @property
    def names(self) -> set[str]:
        """Entries of which something is stale."""
        return {name for age in self._ages for name in age}

    def of(self, name: str) -> np.ndarray:
        """The stale elements of an entry."""
        return intervals(np.concatenate([_NONE, *(age[name] for age in self._ages if name in age)]))

    def begin(self) -> None:
        """What is added from now on is younger than what was added before."""
        self._open = False

    def add(self, name: str, runs: np.ndarray) -> None:
        fresh = without(intervals(runs), self.of(name))
        if not len(fresh):
            return
        assert fresh[0, 0] >= 0 and fresh[-1, 1] <= self._sizes[name], f"elements outside of {name!r}"
        if not self._open and len(self._ages) < AGES:
            self._ages.append({})
        self._open = True
        newest = self._ages[-1]
        newest[name] = intervals(np.concatenate([newest.get(name, _NONE), fresh]))

    def add_all(self, names: Iterable[str]) -> None:
        """Whole entries."""
        for name in names:
            self.add(name, np.array([(0, self._sizes[name])], np.int64))

    def remove(self, name: str, runs: np.ndarray) -> None:
        runs = intervals(runs)
        for age in self._ages:
            if name in age:
                left = without(age.pop(name), runs)
                if len(left):
                    age[name] = left
        newest = self._ages[-1] if self._ages else None
        self._ages = [age for age in self._ages if age]
        self._open = self._open and bool(newest)

    def clear(self) -> None:
        self._ages, self._open = [], False

    def oldest(self, budget: int, but: Mapping[str, np.ndarray]) -> list[Range]:
        """Stale elements that are not in `but`, at most so many bytes of state, but one element at least if there is
        one and the budget is above 0."""
        found: list[Range] = []
        for age in self._ages:
            for name, runs in age.items():
                for start, end in without(runs, but.get(name, _NONE)).tolist():
                    room = budget // self._cost[name]
                    if room < 1 and (found or budget < 1):
                        return found
                    length = min(end - start, max(room, 1))
                    found.append((name, start, length))
                    budget -= length * self._cost[name]
                    if length < end - start:
                        return found  # what is younger and costs less would still have room
        return found


def by_entry(ranges: Iterable[Range]) -> dict[str, np.ndarray]:
    """Entry -> runs."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, start, length in ranges:
        found.setdefault(name, []).append((start, start + length))
    return {name: intervals(pairs) for name, pairs in found.items()}


def deal(ranges: Sequence[Range], cost: Mapping[str, int], shares: int) -> list[list[Range]]:
    """The same elements in at most `shares` lists of about the same bytes; none is empty."""
    whole = sum(length * cost[name] for name, _, length in ranges)
    return list(_cut(ranges, cost, max(-(-whole // shares), SHARE))) if whole and shares else []


def _cut(ranges: Sequence[Range], cost: Mapping[str, int], share: int) -> Iterator[list[Range]]:
    """Lists of at least `share` bytes, by less than an element, but for the last one."""
    part: list[Range] = []
    room = share
    for name, start, length in ranges:
        while length:
            taken = min(length, max(-(-room // cost[name]), 1))
            part.append((name, start, taken))
            room -= taken * cost[name]
            start, length = start + taken, length - taken
            if room <= 0:
                yield part
                part, room = [], share
    if part:
        yield part
