"""A schedule changes hyper-parameters from step to step: each version carries those of the step that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowcheck.checkpoint.directory import load_step
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from updater.errors import OptimizerError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec, pack, packed, unpack
from updater.reader import Reader
from updater.replica import Replica
from updater.step import StepValues

from .test_replica import gradients, job, weights

ROUNDING = "torch-cpu-fused"
OPTIONS = {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}
RATES = [1e-3, 7e-4, 2e-4]


class Piece:
    name, offset, length, start = "w", 0, 5, 0


def scheduled(path: Path) -> tuple[JobReplica, torch.nn.Module, torch.optim.Optimizer]:
    """The job's replica in a file after three steps of a schedule, and the trainer that took the same ones."""
    described = job(optimizer="adamw", options=OPTIONS)
    replica = JobReplica(plan_job(described), None, ReplicaOptions(slots=3, path=path))
    replica.start(weights(), {}, 0)
    model = torch.nn.Module()
    for number, (name, tensor) in enumerate(weights().items()):
        layer, _, part = name.partition(".")
        if not hasattr(model, layer):
            model.add_module(layer, torch.nn.Module())
        getattr(model, layer).register_parameter(part, torch.nn.Parameter(tensor.clone()))
        assert list(dict(model.named_parameters()))[number] == name
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    for iteration, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        step(model, optimizer, iteration)
        values = {name: torch.full_like(tensor, iteration + 1.0) for name, tensor in weights().items()}
        record = StepValues(groups=tuple({"lr": rate} for _ in described.optimizer.groups))  # type: ignore[union-attr]
        replica.build(iteration, gradients(replica, iteration, values), record)
        replica.publish()
    return replica, model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, iteration + 1.0)
    optimizer.step()


def options(optimizer: dict) -> list[dict]:
    return [group["options"] for group in optimizer["groups"]]


def test_a_checkpoint_carries_the_hyper_parameters_of_the_step_that_made_it(shm: Path, tmp_path: Path) -> None:
    """The restore snippet of docs/reference/checkpoint.md, taken from there, where a schedule has moved the learning
    rate: torch goes on from the checkpoint as the trainer does."""
    replica, model, optimizer = scheduled(shm / "replica")
    with replica.pinned() as version:
        path = replica.write(tmp_path, [], version)
    fresh = torch.nn.Module()
    for name, child in model.named_children():
        fresh.add_module(name, torch.nn.Module())
        for part, parameter in child.named_parameters():
            getattr(fresh, name).register_parameter(part, torch.nn.Parameter(torch.zeros_like(parameter)))
    names = {"torch": torch, "load_step": load_step, "path": path, "model": fresh}
    page = (Path(__file__).parents[3] / "docs" / "reference" / "checkpoint.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], names)
    restored = names["optimizer"]
    assert all(group["lr"] == RATES[-1] for group in restored.param_groups)
    for group in restored.param_groups:
        group["fused"] = True
    step(model, optimizer, 3)
    step(fresh, restored, 3)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_kept_version_of_a_replica_file_has_its_own_hyper_parameters(shm: Path) -> None:
    """As a reader in another process and one who goes on with the file see them."""
    replica, _, _ = scheduled(shm / "replica")
    reader = Reader(shm / "replica")
    for version in reader.steps:
        with reader.pinned(version) as pinned:
            assert [each["lr"] for each in options(pinned.optimizer)] == [RATES[version - 1]]
            assert [(each["betas"], each["weight_decay"]) for each in options(pinned.optimizer)] == [((0.9, 0.95), 0.1)]
    assert reader.steps == [1, 2, 3]
    replica.close()
    again = Replica.attach(shm / "replica")
    assert options(again.current.optimizer)[0]["lr"] == RATES[-1]
    again.close()


def test_a_state_brings_the_hyper_parameters_it_was_made_with(tmp_path: Path) -> None:
    """A trainer that is attached, or asked again, in the middle of a schedule."""
    described = job(optimizer="adamw", options=OPTIONS)
    replica = JobReplica(plan_job(described), None)
    count = len(described.optimizer.groups)  # type: ignore[union-attr]
    replica.start(weights(), {}, 41, [{"lr": 5e-4, "betas": [0.8, 0.9]}] * count)
    with replica.pinned() as version:
        held = load_step(replica.write(tmp_path, [], version)).manifest["optimizer"]
    assert [(each["lr"], each["betas"], each["weight_decay"]) for each in options(held)] == [(5e-4, [0.8, 0.9], 0.1)]


def test_a_skipped_step_carries_its_own_too_and_a_refused_one_leaves_the_version_alone() -> None:
    spec = OptimizerSpec.check("sgd", [(["w"], {"lr": 0.5, "momentum": 0.9, "nesterov": True})])
    layout = Layout([[Piece()]], {"w": (5,)}, [5])
    replica = Replica({"w": torch.ones(5)}, spec)
    slot = replica.build(1, layout, StepValues(groups=({"lr": 0.25},), skip=True))
    slot.apply(0, torch.ones(5))
    replica.publish(slot)
    assert options(replica.current.optimizer) == [{"lr": 0.25, "momentum": 0.9, "nesterov": True}]
    with pytest.raises(OptimizerError, match="amsgrad or momentum"):
        replica.build(2, layout, StepValues(groups=({"momentum": 0.0},)))
    assert options(replica.current.optimizer) == [{"lr": 0.25, "momentum": 0.9, "nesterov": True}]


@pytest.mark.parametrize(("name", "given"), [
    ("sgd", {"lr": 1e-3}),
    ("sgd", {"lr": 0.5, "momentum": 0.9, "dampening": -0.0, "weight_decay": 1e-45, "nesterov": False}),
    ("adam", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 0.0, "maximize": True, "decoupled_weight_decay": False}),
    ("adamw", {"lr": 3.3333333333333335e-5, "betas": (0.0, 1.0), "weight_decay": 0.0}),
])
def test_options_come_back_from_their_numbers_as_they_were(name: str, given: dict) -> None:
    numbers = pack(name, given)
    assert len(numbers) == packed(name)
    found = unpack(name, numbers)
    assert found == given and {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in given.items()
    }
