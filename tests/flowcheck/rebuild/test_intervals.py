"""Runs of whole numbers against Python's sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.rebuild.iteration.intervals import both, intervals, total, without

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def numbers(given: list[tuple[int, int]]) -> set[int]:
    return {n for start, end in given for n in range(start, end)}


def members(runs: np.ndarray) -> set[int]:
    """What they hold; they are sorted, and between two of them is a number that neither has."""
    assert runs.dtype == np.int64 and runs.shape == (len(runs), 2)
    assert (runs[:, 0] < runs[:, 1]).all() and (runs[1:, 0] > runs[:-1, 1]).all()
    return numbers([(int(a), int(b)) for a, b in runs])


@given(pairs, pairs)
def test_they_are_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, two = intervals(a), intervals(np.array(b, np.int64).reshape(-1, 2))
    assert members(one) == numbers(a) and members(two) == numbers(b)
    assert members(both(one, two)) == numbers(a) & numbers(b)
    assert members(without(one, two)) == numbers(a) - numbers(b)
    assert total(one) == len(numbers(a))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], []),
        ([(3, 3), (5, 4)], []),
        ([(0, 2), (2, 5)], [[0, 5]]),
        ([(4, 6), (0, 3), (5, 9)], [[0, 3], [4, 9]]),
        ([(0, 10), (2, 3), (9, 12)], [[0, 12]]),
        ([(0, 2**40), (2**40 + 1, 2**41)], [[0, 2**40], [2**40 + 1, 2**41]]),
    ],
)
def test_runs_that_touch_are_one(given: list[tuple[int, int]], found: list[list[int]]) -> None:
    assert intervals(given).tolist() == found
