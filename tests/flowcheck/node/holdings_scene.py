"""Replicas in files and what a shelf offers of them, for tests of what a node has to recover from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flowcheck.job.model import BucketSlice
from flowcheck.node.versions.held import Held
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica

WHOLE = Layout([[BucketSlice("w", 0, 3)]], {"w": (3,)}, [3])
GROUPS = [(["w"], {"lr": 1.0, "momentum": 0.5})]


def advance(replica: Replica, steps: int = 1) -> None:
    for _ in range(steps):
        slot = replica.build(replica.current.step + 1, WHOLE)
        slot.apply(0, torch.full((3,), 2.0))
        replica.publish(slot)


@contextlib.contextmanager
def replicas(folder: Path) -> Iterator[Callable[..., Replica]]:
    """make(name, steps, **options): a replica in a file of that name, after so many steps."""
    with contextlib.ExitStack() as stack:

        def made(name: str = "flowcheck-n-dp0-1.replica", steps: int = 2, **options: Any) -> Replica:
            tensors = {"w": torch.zeros(3), "k": torch.tensor([4, 5])}
            spec = OptimizerSpec.check("sgd", GROUPS)
            given = {"run_id": "run", "epoch": 3, "slots": 4, "unproven": ["a mark"]} | options
            replica = Replica(tensors, spec, path=folder / name, **given)
            stack.enter_context(contextlib.closing(replica))
            advance(replica, steps)
            return replica

        yield made


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(shelf: Any) -> list[tuple[int, int, str]]:
    return [(one.offer.epoch, one.offer.step, one.offer.shard) for one in shelf.look()]


def id_of(shelf: Any, step: int) -> str:
    return next(one.offer.id for one in shelf.look() if one.offer.step == step)


def whole(held: Held, file: str, piece: int = 7) -> bytes:
    data = b""
    while len(data) < held.size(file):
        data += held.read(file, len(data), piece)
    return data
