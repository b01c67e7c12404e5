"""Fixtures of the trainer's side: a node made by hand, DDP models without a second process, and slow file systems."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from flowcheck.rebuild.version import partial

from ..updater.conftest import mounted, shm
from . import pair
from .hand_node import HandNode

__all__ = ["hand_node", "mounted", "shm", "slow_files", "wrapped"]


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


@pytest.fixture(scope="session")
def slow_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """slow_files.c, compiled."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("slow") / "slow_files.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(made),
                    str(Path(__file__).with_name("slow_files.c")), "-ldl"], check=True)
    return made


@pytest.fixture(autouse=True)
def first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for ranges are counted from 1 in each test; a node counts them as long as it lives."""
    monkeypatch.setattr(partial, "NUMBERS", itertools.count(1))
