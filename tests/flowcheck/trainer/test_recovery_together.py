"""With whom `recover` agrees: the ranks of torch.distributed, through the store that it was started with."""

from __future__ import annotations

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


def test_a_rank_is_waited_for_until_the_deadline_and_no_less_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[timedelta] = []

    class Store:
        def set(self, name: str, value: str) -> None: ...

        def wait(self, names: list[str], timeout: timedelta) -> None:
            waited.append(timeout)
            times.append(1000.0)
            if len(waited) == 3:
                raise RuntimeError("not there")

        def get(self, name: str) -> bytes:
            return b"{}"

    times = [0.0]
    monkeypatch.setattr(together.time, "monotonic", lambda: times[-1])
    with pytest.raises(EnvironmentProblem, match="rank 1 has not said what it can have: not there"):
        together._Together(Store(), 0, 2).exchange({})
    assert waited == [timedelta(seconds=together.TOGETHER_SECONDS), timedelta(seconds=1), timedelta(seconds=1)]


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


def test_who_waits_for_a_long_download_waits_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first, second = together._Together(store, 0, 2), together._Together(store, 1, 2)
    monkeypatch.setattr(together, "TOGETHER_SECONDS", 120.0)
    with ThreadPoolExecutor(2) as threads:
        heard = [threads.submit(rank.exchange, {}) for rank in (first, second)]
        assert [one.result() for one in heard] == [[{}, {}]] * 2
        monkeypatch.setattr(together, "TOGETHER_SECONDS", 0.0)
        waits = threads.submit(first.exchange, {"a": 1}, 120.0)
        with pytest.raises(TimeoutError):
            waits.result(1.5)  # a store waits for a second at least
        second.exchange({"b": 2}, 120.0)
        assert waits.result() == [{"a": 1}, {"b": 2}]
