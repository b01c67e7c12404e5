"""Hashing versions in the background, over HTTP: who asks for one waits for as long as it goes on."""

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

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import MEMORY
from flowcheck.ask.receiving import AskError
from flowcheck.control.version import MODEL
from flowcheck.node.api.routes import make_app
from flowcheck.node.versions import hashing
from flowcheck.node.versions.holdings import MemoryShelf
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

from ..hand_api import KEY
from .test_access import answering_here


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
        nodes = [NodeClient(address, KEY, seconds=1.0) for _ in range(3)]
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
        node = NodeClient(address, KEY, seconds=1.5)
        (offer,) = node.offers()
        began = time.monotonic()
        with pytest.raises(AskError, match=r"has hashed no more of it for 1\.5 s: 0 of"):
            node.version(offer)
        assert 1.4 < time.monotonic() - began < 30


def test_a_version_that_is_removed_while_it_is_hashed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, Slow(600.0), monkeypatch) as address:
        node = NodeClient(address, KEY, seconds=60.0)
        (offer,) = node.offers()
        soon = threading.Timer(1.0, (tmp_path / "flowcheck-n-g-1.replica").unlink)
        soon.start()
        began = time.monotonic()
        with pytest.raises(AskError, match=r"let go before it was hashed|no such version"):
            node.version(offer)
        soon.join()
        assert time.monotonic() - began < 30
