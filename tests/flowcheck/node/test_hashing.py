"""Hashing versions in the background: what is hashed, by how many threads, that versions do not wait in a row, and that
who asks for one over HTTP waits for as long as it goes on."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.ask import MEMORY, AskError, Node
from flowcheck.control.version import MODEL
from flowcheck.node import hashing
from flowcheck.node.api import make_app
from flowcheck.node.hashing import Hashers
from flowcheck.node.holdings import MemoryShelf
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_api import KEY
from ..hand_node import until
from .test_access import answering_here


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


# -- over HTTP ---------------------------------------------------------------------------------------------


class Slow:
    """hashlib that takes `seconds` for each piece, on whatever thread of the pool."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.over = seconds, threading.Event()

    def sha256(self) -> Any:
        digest, slow = hashlib.sha256(), self

        class Slowly:
            hexdigest = staticmethod(digest.hexdigest)

            def update(self, piece: memoryview) -> None:
                slow.over.wait(slow.seconds)
                digest.update(piece)

        return Slowly()


@contextlib.contextmanager
def served(folder: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A node's API over a version in memory of 16 MiB, hashed a MiB at a time by two threads."""
    monkeypatch.setattr(hashing, "hashlib", slow)
    monkeypatch.setattr(hashing, "SLICE", 1 << 20)
    monkeypatch.setattr(hashing.os, "sched_getaffinity", lambda pid: {0, 1})
    tensors = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(4)}
    spec = OptimizerSpec.check("sgd", [(list(tensors), {"lr": 0.5})])
    made = Replica(tensors, spec, path=folder / "flowcheck-n-g-1.replica", run_id="run", step=7, slots=4)
    try:
        with answering_here(make_app({MEMORY: MemoryShelf(folder, "n")}, KEY)) as address:
            yield address
    finally:
        slow.over.set()
        made.close()


def test_a_version_that_takes_long_to_hash_is_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as long as a node may be silent; several who ask wait for the same hashes."""
    with served(tmp_path, Slow(0.4), monkeypatch) as address:
        nodes = [Node(address, KEY, seconds=1.0) for _ in range(3)]
        (offer,) = nodes[0].offers()
        began = time.monotonic()
        versions: list[Any] = []
        threads = [threading.Thread(target=lambda node: versions.append(node.version(offer)), args=(node,))
                   for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert time.monotonic() - began > 3.0 and versions[0] == versions[1] == versions[2]
        found = nodes[0].tensors(offer, versions[0], MODEL, {})
        assert found["w3"].tolist() == [3.0] * (1 << 20)


def test_a_version_that_is_not_hashed_any_further_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, Slow(600.0), monkeypatch) as address:
        node = Node(address, KEY, seconds=1.5)
        (offer,) = node.offers()
        began = time.monotonic()
        with pytest.raises(AskError, match=r"has hashed no more of it for 1\.5 s: 0 of"):
            node.version(offer)
        assert 1.4 < time.monotonic() - began < 30


def test_a_version_that_is_removed_while_it_is_hashed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, Slow(600.0), monkeypatch) as address:
        node = Node(address, KEY, seconds=60.0)
        (offer,) = node.offers()
        soon = threading.Timer(1.0, (tmp_path / "flowcheck-n-g-1.replica").unlink)
        soon.start()
        began = time.monotonic()
        with pytest.raises(AskError, match=r"let go before it was hashed|no such version"):
            node.version(offer)
        soon.join()
        assert time.monotonic() - began < 30
