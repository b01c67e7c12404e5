"""Ranks that wait for each other in `recover`, in seconds that pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer.recover import together


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of minutes; a store waits for one at least."""
    for name, value in (("TOGETHER_SECONDS", 3.0), ("STEP_SECONDS", 1.0), ("BEAT_SECONDS", 0.1)):
        monkeypatch.setattr(together, name, value)


def met(count: int) -> list[together._Together]:
    """Ranks that have heard of each other once."""
    store = dist.HashStore()
    ranks = [together._Together(store, rank, count) for rank in range(count)]
    with ThreadPoolExecutor(count) as threads:
        heard = [threads.submit(rank.exchange, {}) for rank in ranks]
        assert [one.result() for one in heard] == [[{}] * count] * count
    return ranks


def test_a_rank_that_lives_is_waited_for_however_long_it_takes(quick: None) -> None:
    first, second = met(2)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(first.exchange, {"a": 1})
        with second.busy(), pytest.raises(TimeoutError):
            waits.result(3 * together.TOGETHER_SECONDS)
        second.exchange({"b": 2})
        assert waits.result() == [{"a": 1}, {"b": 2}]


def test_a_rank_that_lives_is_waited_for_after_another_that_took_long(quick: None) -> None:
    first, *others = met(3)
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(first.exchange, {"a": 1})
        with others[1].busy():
            with others[0].busy(), pytest.raises(TimeoutError):
                waits.result(1.5 * together.TOGETHER_SECONDS)
            second = threads.submit(others[0].exchange, {"b": 2})
            with pytest.raises(TimeoutError):  # neither of them has given up
                waits.result(together.STEP_SECONDS)
        others[1].exchange({"c": 3})
        assert waits.result() == second.result() == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_one_that_died_while_it_was_busy_is_not(quick: None) -> None:
    first, second = met(2)
    with second.busy():
        while not second._store.check([f"{second._session}/lives/1"]):
            pass
    with pytest.raises(EnvironmentProblem, match="rank 1 has not said what it can have"):
        first.exchange({})
