"""How a rank of the lab has its model reduced: torch's own wrappers, and what of the rank's state is which group's.

    wrapped = wrap(job, rank, groups)
    wrapped.call(inputs), wrapped.reduces(last)         forward; is this micro-batch's backward the one that reduces?
    wrapped.given                                       what flowcheck.attach is given as the model
    wrapped.views                                       of each group of the job: number, entries, optimizer's keys

    ddp        DistributedDataParallel over the group of a pipeline stage, or of all ranks
    shards     fully_shard over a mesh of replicas and shards: replicas over the backend of the lab, shards over gloo
    experts    DistributedDataParallel twice: the layers among ranks of one expert, the rest among all
    tied       the embedding besides, whose copies in the first and the last pipeline stage the script reduces itself

What a group's entries are is worked out here from the model itself, not by flowcheck.trainer, which is on trial.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.lab.jobs import Training, stage_of, whole_model

__all__ = ["View", "Wrapped", "hashes", "make_groups", "wrap"]


@dataclass(frozen=True)
class View:
    """What a rank has of one group of the job. number: the group's. module: whose state_dict has it. called: what the
    node calls an entry, "": it is another group's."""

    number: int
    module: nn.Module
    called: Callable[[str], str] = lambda name: name

    @property
    def buffers(self) -> list[str]:
        return [name for name, _ in self.module.named_buffers() if self.called(name)]

    def hashes(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
        return hashes(self.module, optimizer, self.called)


@dataclass(frozen=True)
class Wrapped:
    """model: of all parameters that the optimizer steps. shape: of what a pipeline stage gets. group: of the first
    view."""

    model: nn.Module
    call: Callable[[torch.Tensor], torch.Tensor]
    given: Any
    views: list[View]
    group: Any
    reduces: Callable[[bool], AbstractContextManager[Any]]
    shape: tuple[int, ...] = ()
    tied: tuple[nn.Parameter, Any] | None = None  # what the script reduces itself, and among whom

    def reduce_tied(self) -> None:
        """Call once all gradients are there."""
        if self.tied is not None:
            dist.all_reduce(self.tied[0].grad, group=self.tied[1])


def hashes(
    model: nn.Module, optimizer: torch.optim.Optimizer, called: Callable[[str], str] = lambda name: name
) -> dict[str, dict[str, str]]:
    """SHA-256 of every state_dict entry and of every tensor of the optimizer's state ("NAME.exp_avg") but its counter
    of steps, which is a number. Of what is sharded: of this rank's shard."""
    state: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and called(name):
                state[f"{called(name)}.{key}"] = tensor_sha256(_mine(value))
    tensors = {called(name): tensor_sha256(_mine(value)) for name, value in model.state_dict().items() if called(name)}
    return {"tensors": tensors, "optimizer": state}


def _mine(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value


def make_groups(job: Training) -> tuple[list[Any], list[Any]]:
    """(data-parallel groups of the job, groups of the ranks of one replica). Every rank of the lab makes all."""
    reducing = [dist.new_group(job.group(number)) for number in range(len(job.names))]
    replicas = range(job.ranks // job.shards) if job.shards > 1 else ()
    inside = [dist.new_group(list(range(one * job.shards, (one + 1) * job.shards)), backend="gloo")
              for one in replicas]
    return reducing, inside


def wrap(job: Training, rank: int, groups: tuple[list[Any], list[Any]]) -> Wrapped:
    if job.shards > 1:
        return _shards(job, rank, groups)
    return _experts(job, rank, groups[0]) if job.experts > 1 else _ddp(job, rank, groups[0])


def _ddp(job: Training, rank: int, groups: list[Any]) -> Wrapped:
    stage = rank // job.data_ranks
    model, shape = stage_of(job, stage)
    ddp = DistributedDataParallel(model.train(), process_group=groups[stage], bucket_cap_mb=job.bucket_mb)
    given: Any = ddp
    views, tied = [View(stage, model)], None
    if job.tied:
        place = job.stages + rank % job.data_ranks
        name = {0: "first.token.weight", job.stages - 1: "last.1.weight"}.get(stage, "")
        given = {job.names[stage]: ddp}
        if name:
            tied = model.get_parameter(name), groups[place]
            views = [View(stage, model, lambda one: one if one != name else ""),
                     View(place, model, lambda one: "embedding" if one == name else "")]
            given[job.names[place]] = flowcheck.Reduced({"embedding": tied[0]}, tied[1])
    return Wrapped(model, ddp, given, views, groups[stage],
                   lambda last: contextlib.nullcontext() if last else ddp.no_sync(), shape, tied)


def _shards(job: Training, rank: int, groups: tuple[list[Any], list[Any]]) -> Wrapped:
    replica, shard = divmod(rank, job.shards)
    mesh = DeviceMesh.from_group(
        [groups[0][shard], groups[1][replica]], "cpu", mesh=torch.arange(job.ranks).view(-1, job.shards),
        mesh_dim_names=("replicate", "shard"),
    )
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, job.reduce))
    model = whole_model(job).train()
    for block in model:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded: Any = fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def reduces(last: bool) -> Any:
        sharded.set_requires_all_reduce(last)
        yield

    return Wrapped(model, model, model, [View(shard, model)], groups[0][shard], reduces)


class _Dense(nn.Module):
    """The chain of blocks, its layers in one module that another wrapper reduces."""

    def __init__(self, blocks: nn.Sequential, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.last = blocks[0], experts, blocks[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.experts(self.first(x)))
        return out


def _experts(job: Training, rank: int, groups: list[Any]) -> Wrapped:
    expert = rank % job.experts
    blocks = whole_model(job)
    layers = nn.Sequential(OrderedDict(list(whole_model(job, 1 + expert).named_children())[1:-1]))
    inner = DistributedDataParallel(layers, process_group=groups[1 + expert], bucket_cap_mb=job.bucket_mb)
    model = _Dense(blocks, inner).train()
    names = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    outer = DistributedDataParallel(model, process_group=groups[0], bucket_cap_mb=job.bucket_mb)

    @contextlib.contextmanager
    def reduces(last: bool) -> Any:
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(outer.no_sync())
                stack.enter_context(inner.no_sync())
            yield

    views = [View(0, model, lambda name: "" if name.startswith("experts.") else name), View(1 + expert, layers)]
    return Wrapped(model, outer, {"dense": outer, f"expert{expert}": inner}, views, groups[0], reduces)
