"""A version that was made elsewhere, and received into a slot: what it has then, and when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from updater.errors import NoFreeSlot, OptimizerError, ReplicaError
from updater.optimizers import OptimizerSpec
from updater.reader import Reader
from updater.replica import Replica
from updater.slot import Slot

from .test_replica_calls import ROUNDING, WHOLE, built, replica


def adam(path: Path | None = None, **options: Any) -> Replica:
    spec = OptimizerSpec.check("adam", [(["w"], {"lr": 1.0})])
    tensors = {"w": torch.zeros(4, dtype=torch.bfloat16), "k": torch.arange(2), "c": torch.ones(1)}
    return Replica(tensors, spec, **{"path": path, "rounding": ROUNDING, "buffers": frozenset("k"), **options})


def write(slot: Slot, value: float) -> None:
    slot.parameters["w"].fill_(value)
    slot.parameters["k"].fill_(int(value))
    for tensor in slot.optimizer_state["w"].values():
        tensor.fill_(value)


def test_everything_that_a_version_has_is_written_where_it_lies(shm: Path) -> None:
    made = adam(shm / "r", step=3)
    slot = made.receive(9)
    assert set(slot.optimizer_state["w"]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    write(slot, 9.0)
    assert made.current.step == 3 and Reader(shm / "r").steps == [3], "nobody finds it before it is published"
    slot.received([{"lr": 0.25}])
    made.publish(slot, "unverified", ["a mark"])
    with Reader(shm / "r").pinned() as found:
        assert (found.step, found.unproven, found.optimizer["groups"][0]["options"]["lr"]) == (9, ("a mark",), 0.25)
        assert found.parameters["w"].tolist() == [9.0] * 4 and found.parameters["k"].tolist() == [9, 9]
        assert {key: one.flatten()[0].item() for key, one in found.optimizer_state["w"].items()} == dict.fromkeys(
            ("step", "exp_avg", "exp_avg_sq", "master"), 9.0)
        assert found.parameters["c"].tolist() == [1.0]
    assert made.base is made.current and made.base.step == 9
    made.close()


def test_it_is_built_upon() -> None:
    made = replica(step=3)
    slot = made.receive(9)
    slot.parameters["w"].fill_(5.0)
    slot.received(())
    made.publish(slot)
    following = built(made)
    made.publish(following)
    assert following.step == 10 and made.current.parameters["w"].tolist() == [4.0] * 4


def test_in_place_of_a_partial_one_and_of_none(shm: Path) -> None:
    made = replica(shm / "r", empty=True, step=7)
    with pytest.raises(ReplicaError, match="step 6 cannot be received after step 7"):
        made.receive(6)
    slot = made.receive(7)
    slot.parameters["w"].fill_(5.0)
    assert not (shm / "r").exists() and made.partial is not None
    made.publish(slot)
    assert made.partial is None and Reader(shm / "r").steps == [7]
    made.close()


def test_what_does_not_come_leaves_all_as_it_was() -> None:
    made = replica(step=3, slots=2)
    slot = made.receive(4)
    write_over = slot.parameters["w"].fill_(9.0)
    with pytest.raises(ReplicaError, match="step 5 cannot be received after step 4"):
        made.receive(5)
    with pytest.raises(ReplicaError, match="still being built"):
        made.build(4, WHOLE)
    made.discard(slot)
    assert made.steps == [3] and made.current.parameters["w"].tolist() == [0.0] * 4 and write_over[0] == 9.0
    made.publish(built(made))
    assert made.current.step == 4 and made.current.parameters["w"].tolist() == [-1.0] * 4


def test_steps_and_slots_that_there_are_not() -> None:
    made = replica(step=3, slots=2)
    for step in (2, 3):
        with pytest.raises(ReplicaError, match=f"step {step} cannot be received after step 3"):
            made.receive(step)
    made.publish(built(made))
    with made.pinned():
        made.publish(built(made))
        with pytest.raises(NoFreeSlot):
            made.receive(9)
    slot = made.receive(9)
    with pytest.raises(OptimizerError):
        slot.received([{"lr": "much"}])
