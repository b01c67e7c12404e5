"""The job's replica: where its first weights come from, what an update makes of them, and what is said about it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowcheck.checkpoint.directory import load_step
from flowcheck.control.checksum import checksum
from flowcheck.errors import UserError
from flowcheck.job.model import Job, ModelEntry
from flowcheck.rebuild.iteration.evidence import bucket_coverage
from flowcheck.rebuild.iteration.first_weights import first_weights
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.recipe import replica_bytes
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from lab.synth import example_job
from updater.errors import NoFreeSlot, OptimizerError, ReplicaError
from updater.reader import Reader
from updater.replica import Replica, Slot
from updater.step import StepValues

from ...updater.idle_pool import IdlePool
from ..fake_engine import FakeEngine

NAMES = ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]


def job(**settings: object) -> Job:
    """SGD with a step of 0.5, so that whole numbers stay exact. Buckets: 33 elements, later 24 and 9."""
    described = example_job(**{"ranks": 2, "count": [24, 9], "options": {"lr": 0.5}, **settings})
    assert described.optimizer is not None
    described.optimizer.rounding, described.optimizer.torch_version = "torch-cpu-fused", "2.13.0"
    described.run_id, described.epoch = "a-run", 3
    return described


def weights(first: float = 1.0) -> dict[str, torch.Tensor]:
    """Every element another whole number, counted in model order."""
    numbers = torch.arange(33, dtype=torch.float32) + first
    return {
        "layer0.weight": numbers[:8].reshape(2, 4).clone(), "layer0.bias": numbers[8:9].clone(),
        "layer1.weight": numbers[9:30].clone(), "layer1.bias": numbers[30:].clone(),
    }


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def broadcast(engine: FakeEngine, tensors: dict[str, torch.Tensor]) -> FakeEngine:
    """All parameters came, in model order."""
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    engine.region(None)[: len(data)] = np.frombuffer(data, np.uint8)
    engine.cells(None)[:] = True
    return engine


def started(described: Job | None = None, **options: object) -> JobReplica:
    replica = JobReplica(plan_job(described or job()), None, ReplicaOptions(**options))  # type: ignore[arg-type]
    replica.start(weights(), {}, 0)
    return replica


def gradients(replica: JobReplica, iteration: int, values: dict[str, torch.Tensor]) -> list:
    """The iteration's buckets as the engine has them when it closes, filled as the manifest lays them out."""
    plan = replica._plan
    engine = FakeEngine(plan.engine)
    engine.cells(iteration)[:] = True
    for place, bucket in zip(plan.iteration_buckets(iteration), plan.job.bucket_layout(iteration), strict=True):
        flat = np.zeros(place.elements, np.float32)
        for piece in bucket.slices:
            part = values[piece.name].reshape(-1)[piece.start : piece.start + piece.length]
            flat[piece.offset : piece.offset + piece.length] = part.numpy()
        engine.region(iteration)[place.offset : place.offset + place.nbytes] = flat.view(np.uint8)
    return bucket_coverage(plan, engine, iteration)


def parameters(replica: JobReplica) -> dict[str, torch.Tensor]:
    with replica.pinned() as version:
        return {name: tensor.clone() for name, tensor in version.parameters.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(found[name].equal(expected[name]) for name in expected)


# -- none at all ----------------------------------------------------------------------------------------


def test_an_option_that_says_fused_must_agree_with_the_rounding() -> None:
    described = job(options={"lr": 0.5, "fused": True})
    assert JobReplica(plan_job(described), None).absent == ""
    assert described.optimizer is not None
    described.optimizer.rounding = "torch-cpu"
    with pytest.raises(UserError, match="fused"):
        JobReplica(plan_job(described), None)


@pytest.mark.parametrize("betas", ["ab", 5, [None, None], ["x", "y"], None, True, [True, False], [0.9]])
@pytest.mark.parametrize("corrections", [{}, {"0.9": {}}])
def test_betas_that_are_none_are_named_in_every_order(betas: object, corrections: dict[str, dict[str, float]]) -> None:
    """A fused one on a GPU asks for each beta, before anything is built."""
    described = job(optimizer="adamw", options={"lr": 0.5, "betas": betas})
    assert described.optimizer is not None
    described.optimizer.corrections = corrections
    for rounding in ("torch-cpu", "torch-cuda-fused"):
        described.optimizer.rounding = rounding
        with pytest.raises(UserError, match="adamw group 0: betas is a"):
            JobReplica(plan_job(described), None)


def test_without_an_optimizer_there_is_no_replica(tmp_path: Path) -> None:
    described = job()
    described.optimizer = None
    plan = plan_job(described)
    replica = JobReplica(plan, None)
    replica.learn(partial(first_weights, plan, broadcast(FakeEngine(plan.engine), weights())))
    assert (replica.absent, replica.ready, replica.step, replica.first_step) == (
        "the manifest names no optimizer", False, 0, 0
    )
    assert replica.unproven == []
    replica.close()
    with pytest.raises(UserError, match="--init given, but the job manifest has no optimizer") as refused:
        JobReplica(plan, saved(tmp_path / "init.safetensors", weights()))
    assert refused.value.where == str(tmp_path / "init.safetensors") and "drop --init" in refused.value.remedy


@pytest.mark.parametrize(("change", "words"), [
    (lambda j: j.optimizer.groups[0].options.update(lr=-1.0), "lr"),
    (lambda j: setattr(j.optimizer, "rounding", "torch-tpu"), "torch-tpu"),
    (lambda j: setattr(j.optimizer, "rounding", "torch-cuda-fused"), "fused SGD on CUDA"),
    (lambda j: setattr(j.collectives.steady[0], "count", 23), "bucket 0"),  # of 24 described elements
    (lambda j: j.buckets.steady[1].slices.pop(), "layer0"),
    (lambda j: j.buckets.iteration_0[0].slices.pop(), "layer1"),
])
def test_a_manifest_that_the_updater_cannot_follow_is_refused(change, words: str) -> None:
    described = job()
    change(described)
    with pytest.raises(UserError, match=words) as refused:
        JobReplica(plan_job(described), None)
    assert refused.value.where == "job manifest"
    assert refused.value.remedy == "correct optimizer, model or buckets"


# -- the first weights ----------------------------------------------------------------------------------


def test_weights_come_from_a_complete_broadcast() -> None:
    plan = plan_job(job())
    replica = JobReplica(plan, None)
    assert not replica.ready and replica.absent == ""
    replica.learn(partial(first_weights, plan, broadcast(FakeEngine(plan.engine), weights())))
    assert replica.ready and (replica.step, replica.first_step, replica.absent) == (0, 0, "")
    assert same(parameters(replica), weights())
    replica.learn(partial(first_weights, plan, broadcast(FakeEngine(plan.engine), weights(100))))  # only once
    assert same(parameters(replica), weights())


@pytest.mark.parametrize(("cell", "name"), [
    (0, "layer0.weight"), (3, "layer0.weight"), (4, "layer0.bias"), (14, "layer1.weight"), (16, "layer1.bias"),
])
def test_a_broadcast_with_a_gap_gives_no_weights(cell: int, name: str) -> None:
    plan = plan_job(job())
    engine = broadcast(FakeEngine(plan.engine), weights())
    engine.cells(None)[cell] = False
    replica = JobReplica(plan, None)
    replica.learn(partial(first_weights, plan, engine))
    assert not replica.ready
    assert replica.absent == f"no initial weights: no --init, and '{name}' is in no complete broadcast"
    assert replica.unproven == []


def test_a_broadcast_whose_copies_differ_gives_no_weights(tmp_path: Path) -> None:
    """Which of two mirrors is right nobody knows; weights that are given need neither."""
    plan = plan_job(job())
    engine = broadcast(FakeEngine(plan.engine), weights(50))
    engine.copied[None] = (1, 24, 132)
    replica = JobReplica(plan, None)
    replica.learn(partial(first_weights, plan, engine))
    assert not replica.ready
    assert replica.absent == (
        "no initial weights: no --init, and copies of the broadcast parameters differ, first at byte 24"
    )
    given = JobReplica(plan, saved(tmp_path / "init.safetensors", weights(7)))
    given.learn(partial(first_weights, plan, engine))
    assert given.ready and same(parameters(given), weights(7))


def test_a_job_without_a_broadcast_has_no_weights_but_those_given(tmp_path: Path) -> None:
    plan = plan_job(job(startup=False))
    replica = JobReplica(plan, None)
    replica.learn(partial(first_weights, plan, FakeEngine(plan.engine)))
    assert replica.absent == "no initial weights: no --init, and 'layer0.weight' is in no complete broadcast"
    given = JobReplica(plan, saved(tmp_path / "init.safetensors", weights(7)))
    given.learn(partial(first_weights, plan, FakeEngine(plan.engine)))
    assert given.ready and given.absent == "" and same(parameters(given), weights(7))


def test_given_weights_must_be_those_of_the_broadcast_bit_for_bit(tmp_path: Path) -> None:
    plan, sent = plan_job(job()), weights()
    sent["layer1.weight"][3], sent["layer1.weight"][4] = torch.nan, 0.0
    engine = broadcast(FakeEngine(plan.engine), sent)
    path = saved(tmp_path / "same.safetensors", sent)
    replica = JobReplica(plan, path)
    replica.learn(partial(first_weights, plan, engine))
    assert replica.ready and (replica.step, replica.first_step) == (0, 0)
    for name, index, value in (("layer1.bias", 2, 0.5), ("layer1.weight", 4, -0.0)):
        other = {key: tensor.clone() for key, tensor in sent.items()}
        other[name][index] = value
        path = saved(tmp_path / f"{name}.safetensors", other)
        refused = JobReplica(plan, path)
        with pytest.raises(UserError) as error:
            refused.learn(partial(first_weights, plan, engine))
        assert error.value.what == (
            f"tensor '{name}' differs from the parameters that rank 0 broadcast in the capture"
        )
        assert error.value.where == str(path) and "leave --init out" in error.value.remedy
        assert not refused.ready


def test_a_gap_in_the_broadcast_leaves_the_given_weights(tmp_path: Path) -> None:
    plan = plan_job(job())
    engine = broadcast(FakeEngine(plan.engine), weights(50))
    engine.cells(None)[0] = False
    replica = JobReplica(plan, saved(tmp_path / "init.safetensors", weights(7)))
    replica.learn(partial(first_weights, plan, engine))
    assert replica.ready and same(parameters(replica), weights(7))


def test_a_checkpoint_brings_its_step_and_the_optimizers_state(tmp_path: Path) -> None:
    described = job(startup=False, options={"lr": 0.5, "momentum": 0.5})
    before = started(described)
    ones = {name: torch.ones_like(tensor) for name, tensor in weights().items()}
    before.build(0, gradients(before, 0, ones))
    before.publish()
    with before.pinned() as version:
        path = before.write(tmp_path, [], version)
    plan = plan_job(described)
    replica = JobReplica(plan, path)
    assert (replica.step, replica.first_step) == (0, 1)
    replica.learn(partial(first_weights, plan, FakeEngine(plan.engine)))
    assert (replica.step, replica.first_step) == (1, 1)
    for each in (before, replica):
        each.build(1, gradients(each, 1, ones))
        assert each.publish() == 2
    # momentum: 1, then 0.5 * 1 + 1; each times 0.5
    assert same(parameters(replica), {name: tensor - 0.5 - 0.75 for name, tensor in weights().items()})
    assert same(parameters(replica), parameters(before))


def test_tied_entries_share_what_was_broadcast() -> None:
    described = job()
    described.model.append(ModelEntry("head.weight", [2, 4], tied="layer0.weight"))
    plan = plan_job(described)
    replica = JobReplica(plan, None)
    replica.learn(partial(first_weights, plan, broadcast(FakeEngine(plan.engine), weights())))
    assert same(parameters(replica), {**weights(), "head.weight": weights()["layer0.weight"]})
    replica.build(0, gradients(replica, 0, weights()))
    replica.publish()
    found = parameters(replica)
    assert found["head.weight"].equal(0.5 * weights()["layer0.weight"])


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    few = weights()
    del few["layer1.bias"]
    replica = JobReplica(plan_job(job()), None)
    with pytest.raises(UserError, match=r"layer1\.bias") as refused:
        replica.start(few, {}, 0)
    assert refused.value.where == "job manifest" and not replica.ready
    path = saved(tmp_path / "init.safetensors", weights())
    replica = JobReplica(plan_job(job()), path)
    with pytest.raises(UserError, match=r"layer1\.bias") as refused:
        replica.start(few, {}, 0)
    assert refused.value.where == str(path)


def test_a_replica_starts_once() -> None:
    replica = started()
    with pytest.raises(AssertionError):
        replica.start(weights(100), {}, 9)
    assert replica.step == 0 and same(parameters(replica), weights())


# -- updates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iteration", "divisor"), [(0, 1), (1, 1), (7, 1), (1, 2)])
def test_an_update_takes_every_bucket_of_its_iteration(iteration: int, divisor: int) -> None:
    """Iteration 0 has one bucket in model order, later ones have two in reverse."""
    described = job()
    described.gradients.divisor = divisor
    replica = started(described)
    replica.build(iteration, gradients(replica, iteration, weights(2)))
    assert replica.step == 0 and same(parameters(replica), weights())
    assert replica.publish() == 1 and replica.step == 1
    first, gradient = weights(), weights(2)
    assert same(parameters(replica), {name: first[name] - 0.5 * gradient[name] / divisor for name in first})


def test_buckets_are_known_by_their_numbers_whatever_their_order() -> None:
    replica = started()
    replica.build(1, gradients(replica, 1, weights(2))[::-1])
    replica.publish()
    first, gradient = weights(), weights(2)
    assert same(parameters(replica), {name: first[name] - 0.5 * gradient[name] for name in first})


def test_a_checksum_is_of_what_the_workers_have_done() -> None:
    replica = started()
    build = replica._replica.build  # type: ignore[union-attr]

    def idle(*given: object) -> Slot:
        made = build(*given)  # type: ignore[arg-type]
        made._pool = IdlePool(made._pool)
        return made

    replica._replica.build = idle  # type: ignore[union-attr, method-assign]
    replica.build(0, gradients(replica, 0, weights()))
    assert replica.compare({name: checksum(0.5 * tensor) for name, tensor in weights().items()}).differing() == ""


def test_an_update_that_is_thrown_away_leaves_the_version_before() -> None:
    replica = started()
    replica.build(0, gradients(replica, 0, weights()))
    replica.discard()
    assert replica.step == 0 and same(parameters(replica), weights())
    replica.build(0, gradients(replica, 0, weights()))
    assert replica.publish() == 1


@pytest.mark.parametrize("end", ["publish", "discard"])
def test_a_version_ends_once(end: str) -> None:
    replica = started()
    with pytest.raises(AssertionError):
        getattr(replica, end)()
    replica.build(0, gradients(replica, 0, weights()))
    getattr(replica, end)()
    with pytest.raises(AssertionError):
        getattr(replica, end)()


def test_values_of_the_step_count() -> None:
    replica = started()
    replica.build(0, gradients(replica, 0, weights()), StepValues(groups=({"lr": 0.25},)))
    replica.publish()
    assert same(parameters(replica), {name: 0.75 * tensor for name, tensor in weights().items()})
    replica.build(1, gradients(replica, 1, weights()), StepValues(skip=True))
    assert replica.publish() == 2
    assert same(parameters(replica), {name: 0.75 * tensor for name, tensor in weights().items()})


def test_values_that_cannot_be_used_build_nothing() -> None:
    replica = started()
    with pytest.raises(OptimizerError):
        replica.build(0, gradients(replica, 0, weights()), StepValues(groups=({"lr": -1.0},)))
    replica.build(0, gradients(replica, 0, weights()))
    assert replica.publish() == 1


def test_a_bucket_of_nothing_is_applied_like_any_other() -> None:
    described = job(count=[24, 9])
    described.collectives.steady[1].count = 0
    described.collectives.steady[0].count = 33
    described.buckets.steady[0].slices = described.buckets.iteration_0[0].slices
    described.buckets.steady[1].slices = []
    replica = started(described)
    replica.build(1, gradients(replica, 1, weights()))
    assert replica.publish() == 1


def test_gradients_are_read_in_their_own_type() -> None:
    described = job(dtype="bfloat16")
    first = {name: tensor.to(torch.bfloat16) for name, tensor in weights().items()}
    replica = JobReplica(plan_job(described), None)
    replica.start(first, {}, 0)
    engine = FakeEngine(replica._plan.engine)
    engine.cells(0)[:] = True
    engine.region(0)[:66] = torch.full((33,), 2.0, dtype=torch.bfloat16).view(torch.uint8).numpy()
    replica.build(0, bucket_coverage(replica._plan, engine, 0))
    replica.publish()
    assert same(parameters(replica), {name: tensor - 1 for name, tensor in first.items()})


def test_a_job_that_ends_after_iteration_0_needs_no_later_buckets() -> None:
    described = job()
    described.collectives.steady, described.collectives.rebuild, described.buckets.steady = [], [], []
    replica = started(described)
    replica.build(0, gradients(replica, 0, weights()))
    assert replica.publish() == 1


@pytest.mark.parametrize(("slots", "free"), [(2, False), (3, True)])
def test_a_version_that_is_read_keeps_its_slot(slots: int, free: bool) -> None:
    replica = started(slots=slots)
    with replica.pinned() as version:
        replica.build(0, gradients(replica, 0, weights()))
        replica.publish()
        if free:
            replica.build(1, gradients(replica, 1, weights()))
            assert replica.publish() == 2
        else:
            with pytest.raises(NoFreeSlot):
                replica.build(1, gradients(replica, 1, weights()))
        assert version.step == 0 and same(dict(version.parameters), weights())


def test_two_slots_unless_asked_otherwise() -> None:
    assert ReplicaOptions() == ReplicaOptions(slots=2, path=None, threads=0, buffers=False)


@pytest.mark.parametrize("wrong", [None, *NAMES])
def test_every_tensor_is_compared_with_the_trainers_checksum(wrong: str | None) -> None:
    """Of the version that is being built, not of the current one."""
    replica = started()
    replica.build(0, gradients(replica, 0, weights()))
    sums = {name: checksum(0.5 * tensor) for name, tensor in weights().items()}
    if wrong:
        sums[wrong] ^= 1 << 63
    assert replica.compare(sums).differing() == (wrong or "")
    assert replica.compare({}).differing() == ""
    before = {name: checksum(tensor) for name, tensor in weights().items()}
    assert replica.compare(before).differing() == "layer0.weight"


# -- files, and what is said ----------------------------------------------------------------------------


def test_a_version_that_is_written_has_its_own_step_and_not_the_newest(tmp_path: Path) -> None:
    replica = started(slots=3)
    with replica.pinned() as version:
        replica.build(0, gradients(replica, 0, weights()))
        replica.publish()
        path = replica.write(tmp_path, [], version)
    assert path == tmp_path / "step-000000" and same(load_step(path).parameters, weights())


@pytest.mark.parametrize("said", [(), ("verified",), ("verified", "stage1")])
def test_a_version_is_written_with_all_that_is_known_of_it(tmp_path: Path, said: tuple[str, ...]) -> None:
    replica = started()
    replica.build(0, gradients(replica, 0, weights()))
    replica.publish()
    with replica.pinned() as version:
        path = replica.write(tmp_path, ["icrc off"], version, *said)
    assert path == tmp_path / "step-000001"
    loaded = load_step(path)
    assert loaded.step == 1 and same(loaded.parameters, {name: 0.5 * t for name, t in weights().items()})
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["run_id"], manifest["epoch"]) == ("a-run", 3)
    assert (manifest["status"], manifest["shard"]) == (said[0] if said else "unverified", said[1] if said[1:] else "")
    assert manifest["unproven"] == ["icrc off"] and manifest["rounding"] == "torch-cpu-fused"
    assert manifest["optimizer"]["name"] == "sgd" and manifest["optimizer"]["groups"][0]["params"] == NAMES


def test_a_file_outlives_the_replica(tmp_path: Path) -> None:
    replica = started(path=tmp_path / "replica")
    replica.build(0, gradients(replica, 0, weights()))
    replica.publish()
    replica.close()
    replica.close()
    again = Replica.attach(tmp_path / "replica", run_id="a-run", epoch=3)
    assert again.current.step == 1
    assert (again.rounding.name, again.rounding.torch_version) == ("torch-cpu-fused", "2.13.0")
    again.close()


def test_workers_end_with_the_replica() -> None:
    before = len(os.listdir("/proc/self/task"))
    replica = started(threads=2)
    assert len(os.listdir("/proc/self/task")) == before + 2
    replica.close()
    assert len(os.listdir("/proc/self/task")) == before


def buffered() -> Job:
    described = job(startup=False)
    described.model.append(ModelEntry("mean", [2], kind="buffer"))
    described.model.append(ModelEntry("steps", [], "int64", kind="buffer"))
    described.model.append(ModelEntry("scale", [3], kind="constant"))
    return described


def test_buffers_come_with_the_step() -> None:
    replica = JobReplica(plan_job(buffered()), None, ReplicaOptions(buffers=True))
    fixed = {"mean": torch.zeros(2), "steps": torch.tensor(0), "scale": torch.ones(3)}
    replica.start({**weights(), **fixed}, {}, 5)
    assert replica.step == 5 and replica.unproven == []
    replica.build(0, gradients(replica, 0, weights()), StepValues(buffers={"mean": torch.tensor([4.0, 5.0])}))
    assert replica.publish() == 6
    found = parameters(replica)
    assert found["mean"].tolist() == [4.0, 5.0] and found["steps"].tolist() == 0


def test_what_nothing_has_shown_is_a_mark() -> None:
    described = buffered()
    assert JobReplica(plan_job(described), None).unproven == ["buffers are as at the start: mean, steps"]
    assert JobReplica(plan_job(job()), None).unproven == []
    assert described.optimizer is not None
    described.optimizer.rounding, described.optimizer.torch_version = "torch-cuda-foreach", "2.13.0+cu130"
    doubt = "rounding mode torch-cuda-foreach is proven for torch 2.11, not for 2.13"
    assert JobReplica(plan_job(described), None).unproven == ["buffers are as at the start: mean, steps", doubt]
    assert JobReplica(plan_job(described), None, ReplicaOptions(buffers=True)).unproven == [doubt]
    described.optimizer.rounding, described.optimizer.torch_version = "torch-cpu-fused", "2.6.0+cu126"
    assert JobReplica(plan_job(described), None, ReplicaOptions(buffers=True)).unproven == [
        "rounding mode torch-cpu-fused is proven for torch 2.13, not for 2.6"
    ]


# -- partial versions, late buffers, memory ---------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "change"), [
    ({"optimizer": "adam", "options": {"lr": 0.1}}, None),
    ({"optimizer": "adam", "options": {"lr": 0.1}, "dtype": "bfloat16"}, None),
    ({"optimizer": "adam", "options": {"lr": 0.1}, "dtype": "bfloat16", "masters": "none"}, None),
    ({}, "buffer"), ({}, "tied"),
])
@pytest.mark.parametrize("slots", [2, 4])
def test_the_memory_that_a_replica_takes_is_known_before(settings: dict, change: str | None, slots: int) -> None:
    """To some pages: a file has its description as well, and begins each slot on one."""
    described = job(count=[40000, 20000], **settings)
    assert described.optimizer is not None
    described.optimizer.rounding = "torch-cpu"
    described.optimizer.threads = 1
    if change:
        one = described.model[0]
        described.model.append(ModelEntry("more", one.shape, one.dtype, kind="buffer" if change == "buffer" else
                                          "parameter", tied=one.name if change == "tied" else ""))
    made = JobReplica(plan_job(described), None, ReplicaOptions(slots=slots))
    tensors = {entry.name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in described.model}
    made.start(tensors, {}, 0)
    assert made._replica is not None
    assert 0 <= made._replica.nbytes - replica_bytes(described, slots) <= 4096 * (slots + 3)
    made.close()


def test_an_optimizer_that_no_replica_can_follow_takes_no_memory_but_is_refused() -> None:
    described = job(options={"lr": -1.0})
    with pytest.raises(UserError, match="lr") as refused:
        replica_bytes(described, 2)
    assert (refused.value.where, refused.value.remedy) == ("job manifest", "correct the optimizer")


def test_a_state_has_the_values_of_its_step() -> None:
    replica = JobReplica(plan_job(job()), None)
    replica.start(weights(), {}, 4, [{"lr": 0.25}])
    with replica.pinned() as version:
        assert version.optimizer["groups"][0]["options"]["lr"] == 0.25 and replica.step == 4


def test_what_was_built_with_holes_is_held_and_patched() -> None:
    """Held, built upon, patched, published; beside it the version before is what is read."""
    replica = started(slots=3)
    ones = {name: torch.ones_like(tensor) for name, tensor in weights().items()}
    replica.build(0, gradients(replica, 0, ones))
    assert replica.written(-1)
    replica.hold()
    assert replica.step == 0 and same(parameters(replica), weights())
    replica.build(1, gradients(replica, 1, ones))
    assert replica.written(-1)
    replica.patch([("layer0.bias", 0, 1)], {"layer0.bias": torch.tensor([77.0])}, {})
    with pytest.raises(ReplicaError, match="not optimized"):
        replica.patch([("layer0.bias", 1, 1)], {"layer0.bias": torch.tensor([77.0])}, {})
    assert replica.publish() == 2
    held = {name: tensor - 1.0 for name, tensor in weights().items()} | {"layer0.bias": torch.tensor([77.0])}
    assert same(parameters(replica), held)


def test_a_leap_goes_on_at_a_later_step_and_can_be_given_up() -> None:
    replica = started(slots=3)
    replica.leap(7)
    ones = {name: torch.ones_like(tensor) for name, tensor in weights().items()}
    replica.build(1, gradients(replica, 1, ones))
    assert replica.publish() == 8
    replica.leap(20)
    replica.abandon()
    replica.build(1, gradients(replica, 1, ones))
    assert replica.publish() == 9
    JobReplica(plan_job(job()), None).abandon()  # there is nothing yet


def test_buffers_may_come_after_the_buckets() -> None:
    described = job()
    described.model.append(ModelEntry("mean", [2], "float32", kind="buffer"))
    replica = JobReplica(plan_job(described), None, ReplicaOptions(buffers=True))
    replica.start(weights() | {"mean": torch.zeros(2)}, {}, 0)
    replica.build(0, gradients(replica, 0, weights()))
    replica.finish({"mean": torch.tensor([3.0, 4.0])})
    replica.publish()
    assert parameters(replica)["mean"].tolist() == [3.0, 4.0]


def test_only_what_was_compared_is_marked_as_verified(tmp_path: Path) -> None:
    replica = started(path=tmp_path / "flowcheck-n-g-1.replica")
    reader = Reader(tmp_path / "flowcheck-n-g-1.replica")
    for verified, newest in ((None, None), (False, None), (True, 3)):
        replica.build(1, gradients(replica, 1, weights()))
        replica.publish() if verified is None else replica.publish(verified)
        assert reader.verified == newest
    reader.close()
    replica.close()
