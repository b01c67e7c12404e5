"""Fixtures of the trainer's side: a node made by hand, and DDP models without a second process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from torch.nn.parallel import DistributedDataParallel

from flowcheck.rebuild.version import partial

from ..updater.conftest import shm
from . import pair
from .hand_node import HandNode

__all__ = ["hand_node", "shm", "wrapped"]


@pytest.fixture
def hand_node() -> Iterator[HandNode]:
    node = HandNode()
    yield node
    node.close()


@pytest.fixture(scope="module")
def wrapped() -> Iterator[Callable[..., DistributedDataParallel]]:
    """wrapped(module, rank=0, ranks=2, **options) -> a real DDP model on that rank of a job."""
    yield pair.wrapped
    pair.leave()


@pytest.fixture(autouse=True)
def first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for ranges are counted from 1 in each test; a node counts them as long as it lives."""
    monkeypatch.setattr(partial, "NUMBERS", itertools.count(1))
