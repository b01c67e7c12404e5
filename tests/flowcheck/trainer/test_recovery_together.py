"""With whom `recover` agrees: the ranks of torch.distributed, through the store that it was started with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake", which has no peers

from flowcheck.errors import EnvironmentProblem
from flowcheck.trainer import together


@contextmanager
def group(rank: int, ranks: int, store: dist.Store) -> Iterator[None]:
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_a_job_agree_through_its_store(ranks: int) -> None:
    """Exchange after exchange, each what was said in it, by rank."""
    store = dist.HashStore()
    with group(0, ranks, store):
        mine = together.ranks_of(True)
        assert isinstance(mine, together._Together)
        found = dist.distributed_c10d._get_default_store()
        others = [together._Together(found, rank, ranks) for rank in range(1, ranks)]
        for turn in range(2):
            with ThreadPoolExecutor(ranks) as threads:
                heard = [threads.submit(one.exchange, {"from": number + turn})
                         for number, one in enumerate([mine, *others])]
            assert [one.result() for one in heard] == [[{"from": rank + turn} for rank in range(ranks)]] * ranks


def test_who_is_alone_agrees_with_nobody() -> None:
    assert isinstance(together.ranks_of(True), together._Alone), "torch.distributed is not up"
    with group(0, 1, dist.HashStore()):
        assert isinstance(together.ranks_of(True), together._Alone)
    with group(0, 2, dist.HashStore()):
        alone = together.ranks_of(False)
        assert isinstance(alone, together._Alone) and alone.exchange({"a": 1}) == [{"a": 1}]


def test_a_rank_that_says_nothing_is_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked less and less often, twice a second at last."""
    times = [0.0]

    class Store:
        def set(self, name: str, value: str) -> None: ...

        def check(self, names: list[str]) -> bool:
            return False

    monkeypatch.setattr(together.time, "monotonic", lambda: times[-1])
    monkeypatch.setattr(together.time, "sleep", lambda seconds: times.append(times[-1] + seconds))
    with pytest.raises(EnvironmentProblem, match="rank 1 has not said what it can have: nothing came of it in 600 s"):
        together._Together(Store(), 0, 2).exchange({})
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert 600 <= times[-1] < 601 and pauses[0] == together.POLL_SECONDS and 0.49 < pauses[-1] < 0.51


@pytest.mark.parametrize("what", ["set", "check", "get"])
def test_a_store_that_has_gone_is_an_error_of_ours(what: str) -> None:
    """Whatever is asked of it when rank 0, which has it, is gone: torch's own words, and what to do."""

    class Store:
        def set(self, name: str, value: str) -> None:
            self._may("set")

        def wait(self, names: list[str], timeout: timedelta) -> None: ...

        def check(self, names: list[str]) -> bool:
            self._may("check")
            return True

        def get(self, name: str) -> bytes:
            self._may("get")
            return b"flowcheck/recover/x"

        def _may(self, asked: str) -> None:
            if asked == what:
                raise dist.DistNetworkError("the connection was closed\nframe 1")

    with pytest.raises(EnvironmentProblem, match="rank 0 has not said what it can have: the connection was closed"):
        together._Together(Store(), 1, 2).exchange({})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of minutes; a store waits for one at least."""
    for name, value in (("TOGETHER_SECONDS", 3.0), ("STEP_SECONDS", 1.0), ("BEAT_SECONDS", 0.1)):
        monkeypatch.setattr(together, name, value)


def test_a_rank_that_lives_is_waited_for_however_long_it_takes(quick: None) -> None:
    store = dist.HashStore()
    first, second = together._Together(store, 0, 2), together._Together(store, 1, 2)
    with ThreadPoolExecutor(2) as threads:
        heard = [threads.submit(rank.exchange, {}) for rank in (first, second)]
        assert [one.result() for one in heard] == [[{}, {}]] * 2
        waits = threads.submit(first.exchange, {"a": 1})
        with second.busy(), pytest.raises(TimeoutError):
            waits.result(3 * together.TOGETHER_SECONDS)
        second.exchange({"b": 2})
        assert waits.result() == [{"a": 1}, {"b": 2}]


def test_a_rank_that_lives_is_waited_for_after_another_that_took_long(quick: None) -> None:
    store = dist.HashStore()
    first, *others = ranks = [together._Together(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        heard = [threads.submit(rank.exchange, {}) for rank in ranks]
        assert [one.result() for one in heard] == [[{}, {}, {}]] * 3
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
    store = dist.HashStore()
    first, second = together._Together(store, 0, 2), together._Together(store, 1, 2)
    with ThreadPoolExecutor(2) as threads:
        heard = [threads.submit(rank.exchange, {}) for rank in (first, second)]
        assert [one.result() for one in heard] == [[{}, {}]] * 2
    with second.busy():
        while not store.check([f"{second._session}/lives/1"]):
            pass
    with pytest.raises(EnvironmentProblem, match="rank 1 has not said what it can have"):
        first.exchange({})
