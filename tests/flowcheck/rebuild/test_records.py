"""Step records of several ranks: what is built with is what all of them say, whenever they say it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import ModelEntry
from flowcheck.rebuild.version.records import StepRecord, StepRecords


def records(*, buffers: bool) -> StepRecords:
    """Of a job, of which only the entries of its model matter here."""
    model = [ModelEntry("weight", [2], "float32"), *([ModelEntry("count", [], "int64", "buffer")] if buffers else [])]
    return StepRecords(SimpleNamespace(kind="replica", model=model), Clock())  # type: ignore[arg-type]


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("closes", [0, 1, 2, 3])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("odd", [None, 0, 1, 2])
def test_a_rank_that_says_something_else_is_never_passed_over(buffers, closes, order, odd) -> None:
    """closes: after how many records the iteration closes."""
    kept, refused = records(buffers=buffers), 0
    for came, rank in enumerate(order):
        if came == closes:
            kept.forget(5)
        rate = 0.5 if rank == odd else 0.25
        try:
            kept.keep(5, StepRecord([{"lr": rate}]), rank, 6 if came >= closes else 5)
        except UserError:
            refused += 1
    alone = [rank for rank in order[:closes] if kept.counts(rank)] == []  # nothing was built with any of them
    assert refused >= (odd is not None and not alone)
    assert odd is not None or not refused


def test_what_closed_long_ago_is_forgotten() -> None:
    kept = records(buffers=False)
    for iteration in range(1000):
        kept.keep(iteration, StepRecord([{"lr": float(iteration)}]), 0, iteration)
        kept.forget(iteration)
    kept.keep(3, StepRecord([{"lr": 9.0}]), 1, 1000)
    with pytest.raises(UserError):
        kept.keep(999, StepRecord([{"lr": 9.0}]), 1, 1000)
