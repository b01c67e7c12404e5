"""How a rank of the lab has its model reduced: torch's own wrappers, and what of the rank's state is which group's.

    wrapped = wrap(job, rank, groups)
    wrapped.call(inputs), wrapped.reduces(last)         forward; is this micro-batch's backward the one that reduces?
    wrapped.given                                       what flowcheck.attach is given as the model
    wrapped.views                                       of each group of the job: number, entries, optimizer's keys

    ddp        DistributedDataParallel over the group of a pipeline stage, or of all ranks
    shards     fully_shard over a mesh of replicas and shards: replicas over the backend of the lab, shards over gloo
    megatron   Megatron-Core's DistributedDataParallel and its optimizer, of several instances over the backend of the
               lab, inside an instance over gloo (megatron.py)
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
from lab.jobs import Training, stage_of, whole_model
from lab.megatron import Places, as_cuda, make

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

    def hashes(self, optimizer: Any) -> dict[str, dict[str, str]]:
        return hashes(self.module, optimizer, self.called)


class _Main(View):
    """Of Megatron-Core: its main parameters, and what its optimizer has of them, as it gives them for a checkpoint."""

    def hashes(self, optimizer: Any) -> dict[str, dict[str, str]]:
        (one,) = optimizer.chained_optimizers
        found: dict[str, dict[str, str]] = {"tensors": {}, "optimizer": {}}
        for name, parameter in self.module.named_parameters():
            if parameter in one.model_param_gbuf_map:  # this rank has some of it
                where = one._get_model_param_range_map(parameter)["param"]
                held = one._get_main_param_and_optimizer_states(parameter)
                called = f"{name}[{where.start}:{where.end}]"
                found["tensors"][called] = tensor_sha256(held.pop("param").detach())
                found["optimizer"] |= {f"{called}.{key}": tensor_sha256(value) for key, value in held.items()
                                       if key != "step"}
        return found


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Wrapped:
    """model: of all parameters that the optimizer steps. shape: of what a pipeline stage gets. group: of the first
    view. begin, finish: before the first backward of a step, and after the last. optimizer: made already, with what
    torch's schedules take of it. within: what all of a step is done in."""

    model: nn.Module
    call: Callable[[torch.Tensor], torch.Tensor]
    given: Any
    views: list[View]
    group: Any
    reduces: Callable[[bool], AbstractContextManager[Any]]
    shape: tuple[int, ...] = ()
    begin: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    optimizer: tuple[Any, torch.optim.Optimizer] | None = None
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


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
    members = [list(range(one * job.shards, (one + 1) * job.shards)) for one in replicas]
    if job.megatron:  # and all ranks, and each alone
        members += [list(range(job.ranks)), *([rank] for rank in range(job.ranks))]
    return reducing, [dist.new_group(one, backend="gloo") for one in members]


def wrap(job: Training, rank: int, groups: tuple[list[Any], list[Any]]) -> Wrapped:
    if job.shards > 1:
        return _megatron(job, rank, groups) if job.megatron else _shards(job, rank, groups)
    return _experts(job, rank, groups[0]) if job.experts > 1 else _ddp(job, rank, groups[0])


def _ddp(job: Training, rank: int, groups: list[Any]) -> Wrapped:
    stage = rank // job.data_ranks
    model, shape = stage_of(job, stage)
    ddp = DistributedDataParallel(model.train(), process_group=groups[stage], bucket_cap_mb=job.bucket_mb)
    given: Any = ddp
    views, finish = [View(stage, model)], _nothing
    if job.tied:
        place = job.stages + rank % job.data_ranks
        name = {0: "first.token.weight", job.stages - 1: "last.1.weight"}.get(stage, "")
        given = {job.names[stage]: ddp}
        if name:
            tied, pair = model.get_parameter(name), groups[place]
            views = [View(stage, model, lambda one: one if one != name else ""),
                     View(place, model, lambda one: "embedding" if one == name else "")]
            given[job.names[place]] = flowcheck.Reduced({"embedding": tied}, pair)

            def finish() -> None:
                dist.all_reduce(tied.grad, group=pair)
    return Wrapped(model, ddp, given, views, groups[stage],
                   lambda last: contextlib.nullcontext() if last else ddp.no_sync(), shape, finish=finish)


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


def _megatron(job: Training, rank: int, groups: tuple[list[Any], list[Any]]) -> Wrapped:
    instance, shard = divmod(rank, job.shards)
    number = job.ranks // job.shards
    inside, (all_ranks, *alone) = groups[1][:number], groups[1][number:]
    places = Places(groups[0][shard], inside[instance], all_ranks, alone[rank])
    options = {key: value for key, value in job.optimizer.items() if key != "name"}
    betas = options.pop("betas", (0.9, 0.95))
    options |= {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_eps": options.pop("eps", 1e-8)}
    with as_cuda():
        ddp, optimizer = make(
            whole_model(job).train().to(getattr(torch, job.megatron)), places, instances=number,
            bucket_elements=int(job.bucket_mb * (1 << 18)), reduce_float32=job.reduce == "float32",
            clip=job.clip or 0.0,
            optimizer={"decoupled_weight_decay": job.optimizer["name"] == "adamw", "weight_decay": 0.01, **options},
        )
    model = ddp.module

    def finish() -> None:
        ddp.finish_grad_sync()

    return Wrapped(model, lambda inputs: ddp(inputs).float(), ddp, [_Main(shard, model)], groups[0][shard],
                   lambda last: contextlib.nullcontext() if last else ddp.no_sync(), begin=ddp.zero_grad_buffer,
                   finish=finish, optimizer=(optimizer, optimizer.optimizer), within=as_cuda)


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
