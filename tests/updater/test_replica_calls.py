"""What a replica does beside its slots' states: who may write, buffers, checksums, values of the first version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.control.checksum import checksums
from flowcheck.job.model import BucketSlice
from updater.errors import OptimizerError, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.rounding_modes import RoundingMode
from updater.slot import Slot
from updater.step import StepValues

from .idle_pool import IdlePool

ROUNDING = RoundingMode("torch-cuda-foreach", "2.13.0")  # its root needs no search
WHOLE = Layout([[BucketSlice("w", 0, 3)], [BucketSlice("w", 0, 1, 3)]], {"w": (4,)}, [3, 1])


def replica(path: Path | None = None, **options: Any) -> Replica:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 1.0})])
    tensors = {"w": torch.zeros(4), "k": torch.arange(2)}
    return Replica(tensors, spec, **{"path": path, "rounding": ROUNDING, "buffers": frozenset("k"), **options})


def built(made: Replica, value: float = 1.0) -> Slot:
    slot = made.build(made.base.step + 1, WHOLE)
    slot.apply(0, torch.full((3,), value))
    slot.apply(1, torch.full((1,), value))
    return slot


def test_a_replica_that_is_told_nothing_is_of_no_run(shm: Path) -> None:
    made = replica(shm / "r")
    reader = Reader(shm / "r")
    assert (reader.run_id, reader.epoch) == ("", 0)
    made.close()


@pytest.mark.parametrize("threads", [0, 2])
def test_it_has_the_workers_that_were_asked_for(shm: Path, threads: int) -> None:
    made = replica(shm / "r", threads=threads)
    assert made._pool.threads == threads
    made.close()
    again = Replica.attach(shm / "r") if not threads else Replica.attach(shm / "r", threads=threads)
    assert again._pool.threads == threads
    again.close()


# -- buffers -------------------------------------------------------------------------------------------------


def test_buffers_that_come_late_are_the_new_versions() -> None:
    made = replica()
    slot = built(made)
    made.finish(slot, {"k": torch.tensor([5, 6])})
    made.publish(slot)
    assert made.current.parameters["k"].tolist() == [5, 6]
    assert [s.parameters["k"].tolist() for s in made.slots if s.state.value == "complete"] == [[0, 1], [5, 6]]


@pytest.mark.parametrize(
    ("buffers", "said"),
    [({"w": torch.zeros(4)}, "'w' is not a buffer"), ({"other": torch.zeros(4)}, "'other' is not a buffer"),
     ({"k": torch.zeros(2)}, "buffer 'k' is int64"), ({"k": torch.arange(3)}, "buffer 'k' is int64")],
)
def test_what_is_none_of_its_buffers_changes_nothing(buffers: Mapping[str, torch.Tensor], said: str) -> None:
    made = replica()
    slot = built(made)
    with pytest.raises(ReplicaError, match=said):
        made.finish(slot, {"k": torch.tensor([5, 6]), **buffers})
    made.publish(slot)
    assert made.current.parameters["k"].tolist() == [0, 1]


def test_only_a_version_that_is_built_is_finished() -> None:
    made = replica()
    with pytest.raises(ReplicaError) as refused:
        made.finish(made.current, {})
    assert str(refused.value) == "slot 0 is complete; only a slot being built can be finished"


# -- comparison ----------------------------------------------------------------------------------------------


def test_the_step_that_was_verified_is_said_in_the_file(shm: Path) -> None:
    made = replica(shm / "r", step=3)
    reader = Reader(shm / "r")
    assert reader.verified is None
    for _ in range(2):
        made.publish(built(made))
    built(made)
    made.mark_verified()
    assert reader.verified == 5  # of the current version, not of the one that is built
    made.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_version_that_is_built_is_compared(threads: int) -> None:
    made = replica(threads=threads)
    slot = built(made, value=-2.0)
    theirs = checksums({"w": torch.full((4,), 2.0), "k": torch.arange(2)})
    assert made.compare(slot, theirs).differing() == ""
    assert made.compare(slot, {"w": theirs["w"]}).differing() == ""
    assert made.compare(slot, {**theirs, "w": theirs["w"] + 1}).differing() == "w"
    assert made.compare(made.current, theirs).differing() == "w"
    assert made._comparers is not None
    if threads:
        assert made._comparers is made._pool
    else:  # workers of its own, one per processor; they are kept
        kept = made._comparers
        assert kept is not made._pool and kept.threads == len(os.sched_getaffinity(0))
        assert made.compare(slot, theirs).differing() == "" and made._comparers is kept
    made.close()


def test_what_is_not_written_yet_is_waited_for() -> None:
    made = replica()
    slot = made.build(1, WHOLE)
    slot._pool = pool = IdlePool(slot._pool)
    slot.apply(0, torch.full((3,), -2.0))
    slot.apply(1, torch.full((1,), -2.0))
    assert len(pool.queued) == 2
    assert made.compare(slot, checksums({"w": torch.full((4,), 2.0)})).differing() == ""


# -- values --------------------------------------------------------------------------------------------------


def test_the_first_version_has_the_values_of_its_step() -> None:
    """A schedule: what the optimizer's state says of the learning rate is the one of that step."""
    made = replica(values=({"lr": 0.25},), step=9)
    assert made.current.optimizer["groups"][0]["options"]["lr"] == 0.25
    assert replica(step=9).current.optimizer["groups"][0]["options"]["lr"] == 1.0


@pytest.mark.parametrize(("dtype", "masters", "alone"), [
    (torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, True, False),
])
def test_only_what_is_updated_in_16_bits_alone_takes_no_loss_scale(
    dtype: torch.dtype, masters: bool, alone: bool
) -> None:
    spec = OptimizerSpec.check("adam", [(["v", "w"], {"lr": 1.0})])
    tensors = {"v": torch.zeros(2), "w": torch.zeros(4, dtype=dtype)}
    layout = Layout([[BucketSlice("w", 0, 4), BucketSlice("v", 4, 2)]], {"w": (4,), "v": (2,)}, [6])
    kind = RoundingMode("torch-cpu", "2.13.0", threads=1) if alone else ROUNDING
    state = None if not alone else {name: {} for name in tensors}
    made = Replica(tensors, spec, rounding=kind, masters=masters, optimizer_state=state)
    if alone:
        with pytest.raises(OptimizerError, match=r"^'w' is updated in 16 bits alone"):
            made.build(1, layout, StepValues(loss_scale=2.0))
        made.discard(made.build(1, layout, StepValues()))
    else:
        made.discard(made.build(1, layout, StepValues(loss_scale=2.0)))
    made.close()


# -- slots ---------------------------------------------------------------------------------------------------


def test_what_is_thrown_away_is_not_done_first() -> None:
    """Of two buckets that wait, the second one is never begun."""
    made = replica()
    slot = made.build(1, WHOLE)
    slot._pool = pool = IdlePool(slot._pool)
    slot.apply(0, torch.full((3,), -2.0))
    slot.apply(1, torch.full((1,), -2.0))
    done: list[Any] = []
    submit = pool._pool.submit
    pool._pool = type("Counted", (), {
        "submit": lambda self, *given: (done.append(given), submit(*given))[1],
        "wait": lambda self, ticket, seconds=-1: True,
    })()
    made.discard(slot)
    assert len(done) == 1


def test_slots_are_looked_at_from_the_oldest_version_on() -> None:
    made = replica(slots=4)
    for _ in range(3):
        made.publish(built(made))
    assert made.steps == [0, 1, 2, 3]
    made.slots[0].step, made.slots[1].step = 1, 0  # the oldest version is not the first slot
    made.keep((1,))
    made.publish(built(made))
    assert made.steps == [1, 2, 3, 4]
