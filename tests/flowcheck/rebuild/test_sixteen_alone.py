"""Jobs whose optimizer updates 16-bit parameters as they are: replayed and attached to, equal to torch in every bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.checkpoint.directory import load_step
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.evidence import bucket_coverage
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.replica import JobReplica
from flowcheck.trainer.describe.described import check_gradients
from flowcheck.trainer.describe.description import Watch, entries
from lab.synth import example_job, generate
from updater.rounding_modes import GRAIN

from ..fake_engine import FakeEngine
from ..trainer.described import call, net, refusal

CLASSES: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
LARGE = GRAIN + 7001


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def alone(
    count: int = 3000, dtype: str = "bfloat16", optimizer: str = "adamw", threads: int = 0, **options: Any
) -> Job:
    """A job of buckets of `count` and 9 elements."""
    described = example_job(count=[count, 9], protocol="simple", dtype=dtype, optimizer=optimizer, masters="none",
                            options={"lr": 0.01, **options})
    assert described.optimizer is not None
    described.optimizer.threads = threads
    return described


def tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    """What synth has of such a type: bfloat16 as uint16."""
    held = torch.from_numpy(values.copy())
    return held.view(torch.bfloat16) if dtype == "bfloat16" else held


def trained(job: Job, made: Any, threads: int) -> Iterator[dict[str, torch.Tensor]]:
    """The trainer's parameters and states after each iteration."""
    assert job.optimizer is not None
    dtype, shapes = job.gradients.dtype, {entry.name: entry.shape for entry in job.model}
    own = {
        name: tensor(values, dtype).reshape(shapes[name]).requires_grad_(True)
        for name, values in made.parameters.items()
    }
    optimizer = CLASSES[job.optimizer.name](own.values(), **job.optimizer.groups[0].options)
    torch.set_num_threads(threads)
    for iteration in range(3):
        for index, bucket in enumerate(job.bucket_layout(iteration)):
            data = tensor(made.reduced[iteration, index], dtype)
            for piece in bucket.slices:
                own[piece.name].grad = data[piece.offset : piece.offset + piece.length].reshape(shapes[piece.name])
        optimizer.step()
        out = {name: parameter.detach() for name, parameter in own.items()}
        for name, parameter in own.items():
            out |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items() if value is not None}
        yield out


def same_bits(found: torch.Tensor, right: torch.Tensor) -> bool:
    return found.dtype == right.dtype and torch.equal(
        found.reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize(("job", "threads"), [
    (alone(), 1), (alone(dtype="float16"), 1), (alone(optimizer="adam", weight_decay=0.1), 2),
    (alone(LARGE, optimizer="sgd", momentum=0.9, weight_decay=0.1, threads=2), 2),
    (alone(LARGE, "float16", "adam", weight_decay=0.1, threads=1), 1), (alone(LARGE), 2),
], ids=["adamw", "adamw-float16", "adam", "sgd-shared", "adam-float16-large", "adamw-shared"])
def test_a_replay_holds_what_torch_holds(replayed: Any, tmp_path: Path, job: Job, threads: int) -> None:
    made = generate(job, iterations=3, seed=5)
    made.write(tmp_path / "job.pcap")
    (tmp_path / "job.json").write_text(job.to_json())
    report, failure, out = replayed(tmp_path / "job.pcap", tmp_path / "job.json", every=1)
    assert failure == "" and report["ok"] is True and report["unproven"] == []
    for step, right in enumerate(trained(job, made, threads), 1):
        loaded = load_step(out / f"step-{step:06}")
        held = {
            f"{name}.{key}": value for name, state in loaded.optimizer_state.items() for key, value in state.items()
        }
        found = loaded.parameters | held
        assert found.keys() == right.keys()
        assert [name for name in right if not same_bits(found[name], right[name])] == []


@pytest.mark.parametrize(("job", "marked"), [
    (alone(LARGE, optimizer="sgd"), True), (alone(LARGE, optimizer="sgd", threads=1), False),
    (alone(GRAIN, optimizer="sgd"), False), (alone(LARGE), False), (alone(LARGE, optimizer="adam"), False),
    (alone(LARGE, optimizer="adam", weight_decay=0.1), True),
])
def test_a_number_of_threads_that_bits_depend_on_is_said_or_the_result_marked(job: Job, marked: bool) -> None:
    replica = JobReplica(plan_job(job), None)
    assert [mark.split(":")[0] for mark in replica.unproven] == ["threads"] * marked
    if marked:
        assert "'layer1.weight'" in replica.unproven[0] and "optimizer.threads" in replica.unproven[0]


def test_a_decay_that_a_record_may_bring_counts() -> None:
    job = alone(LARGE, optimizer="adam")
    job.step_values = ["lr"]
    assert [mark.split(":")[0] for mark in JobReplica(plan_job(job), None).unproven] == ["threads"]


@pytest.mark.parametrize("rounding", ["torch-cuda-foreach", "torch-cuda-fused", "torch-cpu-fused"])
def test_orders_without_a_kernel_for_it_are_refused(rounding: str) -> None:
    job = alone()
    assert job.optimizer is not None
    job.optimizer.rounding = rounding
    with pytest.raises(UserError, match=f"without fp32 masters have no kernel in the order {rounding}"):
        JobReplica(plan_job(job), None)
    job.optimizer.masters = "upcast"
    JobReplica(plan_job(job), None)


@pytest.mark.parametrize(("field", "value", "where", "what"), [
    ("dtype", "float16", "optimizer.masters",
     "'layer1.weight' is updated in float16 alone, and gradients are bfloat16"),
    ("foreach", True, "optimizer.groups[0].options.foreach", "foreach rounds 16-bit parameters"),
    ("threads", -1, "optimizer.threads", "-1"),
])
def test_a_manifest_of_what_cannot_be_exact_is_refused(field: str, value: Any, where: str, what: str) -> None:
    described = alone().to_dict()
    if field == "dtype":
        next(entry for entry in described["model"] if entry["name"] == "layer1.weight")["dtype"] = value
    elif field == "foreach":
        described["optimizer"]["groups"][0]["options"][field] = value
    else:
        described["optimizer"][field] = value
    with pytest.raises(UserError) as refused:
        job_from_dict(described)
    assert where in str(refused.value.where) and what in str(refused.value)


def test_foreach_makes_no_difference_where_there_are_masters() -> None:
    described = alone().to_dict()
    described["optimizer"] |= {"masters": "upcast"}
    described["optimizer"]["groups"][0]["options"]["foreach"] = True
    job_from_dict(described)


# -- attached ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "options"), [
    ("adamw", {"lr": 0.1}), ("adam", {"lr": 0.1, "weight_decay": 0.1}), ("sgd", {"lr": 0.1, "momentum": 0.9}),
])
def test_the_manifest_of_live_objects_makes_a_replica_equal_to_them(
    wrapped: Any, dtype: torch.dtype, name: str, options: dict[str, Any]
) -> None:
    """DDP with 16-bit parameters: described after three iterations, followed for three more from its state."""
    torch.set_num_threads(2)
    kind = str(dtype).removeprefix("torch.")
    model = wrapped(net().to(dtype))
    optimizer = CLASSES[name](model.parameters(), **options)
    described = entries(model, optimizer)
    said: list[dict[str, Any]] = []
    watch = Watch(model, optimizer, described, lambda since: said[since:],
                  lambda: {"ranks": 2, "nccl_version": "2.27.7"}, "run", 0)

    def iterate() -> None:
        optimizer.zero_grad()
        (model(torch.randn(3, 2, dtype=dtype)) ** 2).sum().backward()
        check_gradients(described, optimizer)
        optimizer.step()

    job = None
    for _ in range(3):
        iterate()
        said.append(call("AllReduce", 12, kind))
        job = watch.look()
    assert job is not None and job.optimizer is not None and job.gradients.dtype == kind
    assert (job.optimizer.masters, job.optimizer.threads, job.optimizer.rounding) == ("none", 2, "torch-cpu")
    named = dict(model.module.named_parameters())
    plan = plan_job(job)
    replica = JobReplica(plan, None)
    state = {n: {k: v for k, v in optimizer.state[p].items() if v is not None} for n, p in named.items()}
    replica.start(model.module.state_dict(), state, 3)
    for iteration in range(1, 4):
        iterate()
        engine = FakeEngine(plan.engine)
        engine.cells(iteration)[:] = True
        (place,), (bucket,) = plan.iteration_buckets(iteration), job.bucket_layout(iteration)
        flat = torch.cat([named[piece.name].grad.reshape(-1) for piece in bucket.slices])
        engine.region(iteration)[place.offset : place.offset + place.nbytes] = flat.view(torch.uint8).numpy()
        replica.build(iteration, bucket_coverage(plan, engine, iteration))
        replica.publish()
        with replica.pinned() as version:
            for entry, parameter in named.items():
                assert same_bits(version.parameters[entry], parameter.detach())
                for key, value in version.optimizer_state[entry].items():
                    assert same_bits(value, optimizer.state[parameter][key]), (entry, key)
    assert replica.unproven == []


def _sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def _with_wide_state(model: Any) -> torch.optim.Optimizer:
    optimizer = _sgd(model, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
    return optimizer


@pytest.mark.parametrize(("make", "where", "what"), [
    (lambda m: _sgd(m, foreach=True), "optimizer",
     "has foreach=True, which rounds bfloat16 parameters in an order of its own"),
    (lambda m: _sgd(m, fused=True), "state_dict: first.weight", "is optimized in bfloat16 without fp32 masters, in the"
     " order torch-cpu-fused"),
    (_with_wide_state, "optimizer", "holds momentum_buffer in torch.float32 of a parameter in torch.bfloat16"),
])
def test_optimizers_that_cannot_be_followed_in_16_bits(wrapped: Any, make: Any, where: str, what: str) -> None:
    model = wrapped(net().bfloat16())
    assert refusal(lambda: entries(model, make(model))) == (where, what)


def test_what_would_round_16_bits_otherwise_is_refused_in_mid_run(wrapped: Any) -> None:
    torch.set_num_threads(1)
    model = wrapped(net().bfloat16())
    optimizer = _sgd(model)
    described = entries(model, optimizer)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    check_gradients(described, optimizer)
    weight = model.module.first.weight
    right = weight.grad
    weight.grad = right.t().contiguous().t()
    assert refusal(lambda: check_gradients(described, optimizer))[1].startswith(
        "the gradient of first.weight is not in row-major order"
    )
    weight.grad = right
    torch.set_num_threads(2)
    assert refusal(lambda: check_gradients(described, optimizer))[1].startswith("torch has 2 threads, and had 1")
