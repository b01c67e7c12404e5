"""The set of parameters that an iteration gathered: which elements, of which step, and what is written of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowcheck.checkpoint.directory import load_parameters
from flowcheck.job.clock import Clock
from flowcheck.job.model import Collective, Job
from flowcheck.rebuild.iteration.evidence import BucketCoverage, bucket_coverage
from flowcheck.rebuild.iteration.sharded import Gathered, ShardedParameters
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import sharded_job
from tests.flowcheck.fake_engine import FakeEngine


class Scene:
    """Two groups of 25 and 6 elements, by two ranks. parts: group -> name -> its values, as the wire brings them."""

    def __init__(self, job: Job | None = None, **options: Any) -> None:
        self.plan: JobPlan = plan_job(job or sharded_job(count=(25, 6), dtype="float32", **options))
        self.engine = FakeEngine(self.plan.engine)

    def gather(self, iteration: int, shift: float = 0.0) -> list[BucketCoverage]:
        """Element i of group g is 100 g + i + shift."""
        self.engine.cells(iteration)[:] = True
        groups = bucket_coverage(self.plan, self.engine, iteration)
        for group in groups:
            group.tensor().copy_(torch.arange(group.place.elements) + 100 * group.place.index + shift)
        return groups


WHOLE = {
    "group0.weight": [*range(22)], "group0.bias": [22, 23, 24], "group1.weight": [100, 101, 102, 103, 104, 105],
}


def values(found: Gathered) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in found.parameters.items()}


def test_there_is_none_before_the_first() -> None:
    plan = Scene().plan
    at = ShardedParameters(plan)
    assert (at.step, at.due, at.dtype, at.newest) == (-1, False, "mixed", Gathered(plan.job, -1, {}))
    assert at.take(1, []) is at.newest and at.step == -1 and not at.due


def test_a_set_has_every_entry_in_the_models_order() -> None:
    scene = Scene()
    at = ShardedParameters(scene.plan)
    found = at.take(1, scene.gather(1)[::-1])
    assert found is at.newest and values(found) == WHOLE and list(found.parameters) == list(WHOLE)
    assert (at.step, at.due, at.dtype, found.job) == (1, True, "float32", scene.plan.job)
    assert [tensor.shape for tensor in found.parameters.values()] == [(22,), (3,), (6,)]


def test_blocks_hold_a_piece_of_every_tensor() -> None:
    """Of rank 0 eleven weights and two biases, then of rank 1 eleven and one."""
    scene = Scene(sharded_job(count=(25,), dtype="float32", per_parameter=True))
    found = ShardedParameters(scene.plan).take(1, scene.gather(1))
    assert values(found) == {"group0.weight": [*range(11), *range(13, 24)], "group0.bias": [11, 12, 24]}


def test_a_tensor_has_its_own_shape_and_the_type_of_the_wire() -> None:
    job = sharded_job(count=(25, 6), dtype="bfloat16")
    job.model[0].shape[:] = [2, 11]
    scene = Scene(job)
    at = ShardedParameters(scene.plan)
    found = at.take(1, scene.gather(1)).parameters
    assert at.dtype == "bfloat16" and {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert found["group0.weight"].tolist() == [[*range(11)], [*range(11, 22)]]


def test_a_set_is_of_the_arena_no_more() -> None:
    scene = Scene()
    at = ShardedParameters(scene.plan)
    first = at.take(1, scene.gather(1))
    second = at.take(2, scene.gather(2, 0.5))
    scene.gather(1, 7.0)
    assert values(first) == WHOLE and values(second)["group0.bias"] == [22.5, 23.5, 24.5] and at.newest is second
    assert at.take(3, []) is second and at.step == 2, "an iteration that brings nothing"


@pytest.mark.parametrize(("after_update", "clock", "step"), [
    (False, None, 3), (True, None, 4), (False, Clock(10), 13), (True, Clock(10), 14),
])
def test_its_number_is_that_of_the_updates_that_it_has_seen(after_update: bool, clock: Clock | None, step: int) -> None:
    scene = Scene(after_update=after_update)
    at = ShardedParameters(scene.plan, clock)
    assert at.take(3, scene.gather(3)).step == at.step_of(3) == at.step == step


def test_the_first_iteration_has_calls_of_its_own() -> None:
    """There the first group's call says nothing of what lies in it."""
    job = sharded_job(count=(25, 6), dtype="float32")
    job.collectives.iteration_0 = [
        replace(call, layout=[]) if call.bucket == 0 else call for call in job.collectives.iteration_0
    ]
    scene = Scene(job)
    at = ShardedParameters(scene.plan)
    assert list(at.take(0, scene.gather(0)).parameters) == ["group1.weight"]
    assert list(at.take(1, scene.gather(1)).parameters) == list(WHOLE)


def test_a_group_may_name_its_tensors_alone() -> None:
    job = sharded_job(count=(25, 6), dtype="float32")

    def bare(call: Collective) -> Collective:
        return replace(call, layout=[], tensors=["group0.weight", "group0.bias"]) if call.bucket == 0 else call

    for calls in ("iteration_0", "steady"):
        setattr(job.collectives, calls, [bare(call) for call in getattr(job.collectives, calls)])
    scene = Scene(job)
    assert values(ShardedParameters(scene.plan).take(1, scene.gather(1))) == WHOLE


def test_what_types_it_has() -> None:
    job = Scene().plan.job
    half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert Gathered(job, 1, {"a": half, "b": half}).dtype == "bfloat16"
    assert Gathered(job, 1, {"a": half, "b": full}).dtype == "mixed"
    assert (Gathered(job).step, dict(Gathered(job).parameters)) == (-1, {})


def test_a_set_is_due_until_it_is_written(tmp_path: Path) -> None:
    scene = Scene()
    at = ShardedParameters(scene.plan)
    at.take(4, scene.gather(4))
    assert at.due
    path = at.write(tmp_path, ["one", "two"])
    assert path == tmp_path / "parameters-000004" and not at.due
    at.take(5, scene.gather(5))
    assert at.due
    loaded = load_parameters(path)
    assert {name: tensor.tolist() for name, tensor in loaded.parameters.items()} == WHOLE
    assert {name: loaded.manifest[name] for name in ("run_id", "epoch", "step", "status", "unproven", "absent")} == {
        "run_id": scene.plan.job.run_id, "epoch": 0, "step": 4, "status": "unverified", "unproven": ["one", "two"],
        "absent": [],
    }


def test_what_was_not_gathered_is_named_in_what_is_written(tmp_path: Path) -> None:
    """And whose it is: a set knows its job."""
    job = replace(Scene().plan.job, run_id="another", epoch=3)
    one = Gathered(job, 7, {"group0.bias": torch.ones(3)})
    manifest = load_parameters(one.write(tmp_path, ())).manifest
    assert manifest["absent"] == ["group0.weight", "group1.weight"] and manifest["unproven"] == []
    assert (manifest["run_id"], manifest["epoch"], manifest["step"]) == ("another", 3, 7)
