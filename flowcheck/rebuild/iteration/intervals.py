"""Sets of whole numbers as runs: int64 arrays (n, 2) of [start, end), sorted, neither touching nor empty.

What is missing of an iteration, and why, is a matter of runs: their number grows with what was lost, never with the
size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

__all__ = ["both", "intervals", "total", "without"]


def intervals(pairs: Iterable[tuple[int, int]] | np.ndarray) -> np.ndarray:
    """The numbers in any of these [start, end), which may overlap, touch or be empty."""
    runs = np.array(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.int64).reshape(-1, 2)
    runs = runs[runs[:, 0] < runs[:, 1]]
    if not len(runs):
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    first = np.concatenate(([True], runs[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((runs[first, 0], reach[last]), axis=1)


def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The numbers in a and in b."""
    return _combine(a, b, np.logical_and)


def without(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The numbers in a that are not in b."""
    return _combine(a, b, np.greater)


def total(a: np.ndarray) -> int:
    """How many numbers."""
    return int((a[:, 1] - a[:, 0]).sum())


def _combine(a: np.ndarray, b: np.ndarray, keep: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    at = np.unique(np.concatenate((a.ravel(), b.ravel())))  # between two of these nothing changes
    kept = keep(_inside(a, at), _inside(b, at))
    changes = np.flatnonzero(np.diff(np.concatenate(([False], kept)).astype(np.int8)))
    return at[changes].reshape(-1, 2)


def _inside(runs: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Is each of these numbers in one of the runs?"""
    return np.searchsorted(runs[:, 0], at, "right") > np.searchsorted(runs[:, 1], at, "right")
