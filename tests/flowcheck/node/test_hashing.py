"""Hashing versions in the background: what is hashed, by how many threads, and that versions do not wait in a row."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowcheck.node.versions import hashing
from flowcheck.node.versions.hashing import Hashers, Work

from ..hand_node import until


@pytest.fixture
def hashers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashers]:
    """Of two cores, with 64 bytes a turn."""
    monkeypatch.setattr(hashing.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(hashing, "SLICE", 64)
    with contextlib.closing(Hashers()) as made:
        yield made


def numbers(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(size, dtype=torch.float32) + index for index, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (16,), (17,), (1000, 0, 3, 16, 5, 33), (2, 2, 2, 200)])
def test_every_tensor_has_its_hash(hashers: Hashers, sizes: tuple[int, ...]) -> None:
    tensors = numbers(*sizes)
    work = hashers.begin(tensors)
    assert work.sums.result(60) == [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]
    assert work.hashed == work.total == 4 * sum(sizes)


class Waiting:
    """hashlib that notes which threads hash, and holds each piece back for a moment."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def sha256(self) -> Any:
        return self

    def update(self, piece: memoryview) -> None:
        with self.lock:
            self.threads.add(threading.get_ident())
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.001)
        with self.lock:
            self.now -= 1

    def hexdigest(self) -> str:
        return "x"


def test_versions_grow_together_and_share_the_cores(hashers: Hashers, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()
    monkeypatch.setattr(hashing, "hashlib", waiting)
    large, small = hashers.begin(numbers(160_000, 160_000)), hashers.begin(numbers(160))
    small.sums.result(60)
    assert 0 < large.hashed < large.total and not large.sums.done()
    assert waiting.most <= 2 and len(waiting.threads) <= 2
    large.end(RuntimeError("nobody wants it"))
    with pytest.raises(RuntimeError, match="nobody"):
        large.sums.result(0)
    until(lambda: not waiting.now)
    hashed = large.hashed
    time.sleep(0.05)
    assert large.hashed <= hashed + 2 * 64 < large.total


def test_what_cannot_be_hashed_is_not_waited_for(hashers: Hashers) -> None:
    with pytest.raises(ValueError, match="contiguous: False"):
        hashers.begin([*numbers(5), torch.zeros(4, 4).t()]).sums.result(60)


def test_nothing_is_hashed_after_the_end(hashers: Hashers) -> None:
    hashers.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        hashers.begin(numbers(5)).sums.result(0)


def test_the_end_waits_for_nobody_and_begins_nothing_more(hashers: Hashers, monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(Waiting):
        def __init__(self) -> None:
            super().__init__()
            self.came, self.gate = threading.Semaphore(0), threading.Event()

        def update(self, piece: memoryview) -> None:
            self.came.release()
            assert self.gate.wait(60)

    held = Held()
    monkeypatch.setattr(hashing, "hashlib", held)
    first = hashers.begin(numbers(8, 8))
    for _ in range(2):
        assert held.came.acquire(timeout=60)
    second = hashers.begin(numbers(8, 8))
    hashers.close()
    held.gate.set()
    assert first.sums.result(60) == ["x", "x"]
    for thread in hashers._pool._threads:
        thread.join(60)
    assert second.hashed == 0 and not second.sums.done()


# -- turn by turn --------------------------------------------------------------------------------------------------


class Pool:
    """Work that waits until a test does it."""

    def __init__(self) -> None:
        self.left: list[tuple[Any, Any]] = []

    def submit(self, work: Any, *given: Any) -> None:
        self.left.append((work, given))

    def turn(self) -> None:
        work, given = self.left.pop(0)
        work(*given)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hashing, "SLICE", 64)
    return Pool()


def sums(tensors: list[torch.Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]


@pytest.mark.parametrize(("sizes", "hashed"), [
    ((10, 10, 40), [64, 128, 192, 240]), ((16, 16), [64, 128, 128]), ((), [0]), ((33,), [64, 128, 132]),
])
def test_a_turn_is_a_slice_over_all_tensors(pool: Any, sizes: tuple[int, ...], hashed: list[int]) -> None:
    """And then it is the turn of whatever else there is."""
    tensors = numbers(*sizes)
    work, other = Work(tensors, pool, 1), Work(numbers(400), pool, 1)
    assert work.total == 4 * sum(sizes)
    for number, count in enumerate(hashed):
        assert not work.sums.done() and len(pool.left) == 2
        pool.turn()
        assert work.hashed == count and other.hashed == 64 * number
        pool.turn()
    assert work.sums.result(0) == sums(tensors) and not other.sums.done()


def test_each_core_takes_a_tensor_and_the_last_one_tells(pool: Any) -> None:
    tensors = numbers(20, 3, 20)
    work = Work(tensors, pool, 4)
    assert len(pool.left) == 4
    for hashed, left in ((64, 4), (128, 4), (128, 3), (128, 2), (144, 1)):
        pool.turn()
        assert (work.hashed, len(pool.left), work.sums.done()) == (hashed, left, False)
    pool.turn()
    assert work.sums.result(0) == sums(tensors) and work.hashed == work.total == 172


def test_what_was_ended_takes_no_turn(pool: Any) -> None:
    work = Work(numbers(40), pool, 2)
    pool.turn()
    work.end(RuntimeError("nobody wants it"))
    while pool.left:
        pool.turn()
    assert work.hashed == 64
    work.end(RuntimeError("nor anybody else"))
    with pytest.raises(RuntimeError, match="nobody wants it"):
        work.sums.result(0)


def test_what_is_over_has_no_end(pool: Any) -> None:
    tensors = numbers(3)
    work = Work(tensors, pool, 1)
    pool.turn()
    work.end(RuntimeError("too late"))
    assert work.sums.result(0) == sums(tensors)


def test_an_end_in_the_last_turn_is_an_end(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends(Waiting):
        def hexdigest(self) -> str:
            work.end(RuntimeError("let go"))
            return "x"

    monkeypatch.setattr(hashing, "hashlib", Ends())
    work = Work(numbers(3), pool, 1)
    pool.turn()
    with pytest.raises(RuntimeError, match="let go"):
        work.sums.result(0)
    assert pool.left == []


def test_a_lane_that_fails_ends_all_of_them(pool: Any) -> None:
    work = Work([torch.zeros(4, 4).t(), *numbers(40)], pool, 2)
    while pool.left:
        pool.turn()
    assert work.hashed == 0
    with pytest.raises(ValueError, match="contiguous: False"):
        work.sums.result(0)
