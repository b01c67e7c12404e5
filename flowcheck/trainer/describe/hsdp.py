"""Parts of a model that fully_shard has sharded over a mesh of replicas and shards (HSDP).

    parts = hsdp_parts(model)               one for each process group that AllReduces shards across replicas

Gradients are reduce-scattered among the ranks that share the model, and what each has is then AllReduced with the ranks
that have the same shard of it in the other replicas: that AllReduce carries the whole gradient of this rank's shard. So
a part is what one rank holds: entries have the shapes of its shards, and the ranks of a part have equal ones. One
AllReduce is of one parameter group of torch's: the padded shards of its parameters, one behind the other, in their
order (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce).

What the groups are is read from fully_shard's own objects, in which order they are reduced from the hooks that it
calls when a parameter has its gradient, right after the AllReduce. A torch whose objects are others is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.model import Bucket, BucketSlice
from flowcheck.trainer.describe.parts import Layout, Part, after_backward, local, position

__all__ = ["Hsdp", "has_replicas", "hsdp_parts", "is_sharded"]

WHERE = "fully_shard"
_Came = tuple[int, int, int]  # a gradient: its parameter group, its place there, where it lies in what was reduced
KINDS = (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG)


def is_sharded(module: torch.nn.Module) -> bool:
    """Has fully_shard been here?"""
    return hasattr(module, "_get_fsdp_state")


def _groups(module: torch.nn.Module) -> list[Any]:
    """torch's parameter groups, those of inner modules, too. Raises UserError for a torch that has others."""
    found: dict[int, Any] = {}
    for one in module.modules():
        if is_sharded(one):
            state: Any = one._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)  # 2.9 and later; before that one at most
            if groups is None:
                groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
            found |= {id(group): group for group in groups}
    for group in found.values():
        for name in ("mesh_info", "fsdp_params", "_reduce_dtype", "offload_policy"):
            if not hasattr(group, name) and name != "_reduce_dtype":  # which comes with the first iteration
                raise _unknown(f"its parameter groups have no {name}")
    return list(found.values())


def has_replicas(module: torch.nn.Module) -> bool:
    """Of each shard?"""
    return any(getattr(group.mesh_info, "replicate_process_group", None) is not None for group in _groups(module))


def _unknown(what: str) -> UserError:
    return UserError(f"torch {torch.__version__} has another {WHERE} than is known: {what}", where=WHERE,
                     remedy="a version of torch that the tests name (docs/use/layouts.md), or DistributedDataParallel")


def hsdp_parts(module: torch.nn.Module, name: str = "") -> list[Hsdp]:
    """In the order of the module's parameters. name: put before that of the mesh position. Raises UserError where a
    gradient is on no wire, or on one in a form that is not followed."""
    groups = _groups(module)
    if not groups:
        raise UserError("has no parameters that it shards", where=WHERE, remedy="fully_shard(model, mesh=...)")
    by_communicator: dict[str, list[Any]] = {}
    for group in groups:
        communicator = getattr(group.mesh_info, "replicate_process_group", None)
        if communicator is None:
            fqn = getattr(group, "_module_fqn", None) or type(group.modules[0]).__name__
            raise UserError(
                f"{fqn} is sharded by fully_shard without replicas: ReduceScatter puts no reduced gradient on the wire",
                where="model",
                remedy='attach(source="feed") (docs/use/feed.md); a mesh of replicas and shards (HSDP), or'
                       " DistributedDataParallel; what replay can rebuild of FSDP and ZeRO: docs/use/qualify.md",
            )
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise UserError("uses CPUOffloadPolicy", where=WHERE, remedy="leave it out for this job")
        by_communicator.setdefault(communicator.group_name, []).append(group)
    parts: list[Hsdp] = []
    for found in by_communicator.values():
        info = found[0].mesh_info
        words = [name, position(info.mesh, info.replicate_mesh_dim)]
        parts.append(Hsdp(module, info.replicate_process_group, ".".join(filter(None, words)), found,
                          whole=not parts))
    return parts


class Hsdp(Part):
    """What one process group AllReduces across replicas. groups: torch's parameter groups of it. whole: it has the
    buffers, and what is sharded by nobody."""

    by = WHERE

    def __init__(
        self, module: torch.nn.Module, group: dist.ProcessGroup, name: str, groups: list[Any], *, whole: bool
    ) -> None:
        super().__init__(module, group, name)
        module.state_dict(keep_vars=True)  # after which modules hold their shards
        self._groups, self._whole = groups, whole
        self._params: list[list[tuple[Any, torch.nn.Parameter]]] = [
            [(one, getattr(one._module_info.module, one._module_info.param_name)) for one in group.fsdp_params]
            for group in groups
        ]
        self._mine = {id(parameter) for group in self._params for _, parameter in group}
        self._sharded = {  # by anybody
            id(getattr(one._module_info.module, one._module_info.param_name))
            for group in _groups(module) for one in group.fsdp_params
        }
        self._heard: list[_Came] = []  # as gradients came
        self._order: list[_Came] = []  # of the iteration that is over
        self._known: list[_Came] = []  # of those that the job was described with; empty: it is not known
        self._set: list[tuple[Any, ...]] = []  # what they were set to then
        self._last: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}  # the gradient objects of the last time
        self._trouble = ""
        self._stop: Callable[[], None] = lambda: None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, place))
            for number, group in enumerate(self._params) for place, (_, parameter) in enumerate(group)
            if parameter.requires_grad
        ]

    def _hook(self, number: int, place: int) -> Any:
        this = weakref.ref(self)

        def came(parameter: torch.Tensor) -> None:
            part = this()
            if part is not None:
                part._came(number, place, parameter)

        return came

    def _came(self, number: int, place: int, parameter: torch.Tensor) -> None:
        """Called by fully_shard when a parameter has its reduced gradient."""
        gradient, before = parameter.grad, self._last.get((number, place))
        if gradient is None:
            return
        there = local(gradient)
        self._heard.append((number, place, int(there.storage_offset()) if there.numel() else -1))
        if before is not None and before() is gradient:  # added to what was there, which is nothing of this AllReduce
            self._trouble = (
                "gradients were added to those of an earlier AllReduce: optimizer.zero_grad() was left out, called with"
                " set_to_none=False, or an iteration reduces each gradient more than once"
            )
        self._last[number, place] = weakref.ref(gradient)

    def _entries(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in super()._entries().items()
                if id(value) in self._mine or (self._whole and id(value) not in self._sharded)}

    def extra(self) -> dict[str, Any]:
        return super().extra() if self._whole else {}

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in self._entries().items()
                if id(value) in self._mine and value.requires_grad]

    # -- at boundaries --

    def over(self) -> None:
        self._order, self._heard = self._heard, []

    def known(self, known: bool) -> None:
        self._known, self._set = (self._order, self._settings()) if known else ([], [])

    @property
    def changed(self) -> bool:
        return bool(self._known) and (self._order != self._known or self._settings() != self._set)

    def _settings(self) -> list[tuple[Any, ...]]:
        """What decides, besides the calls, what becomes of a gradient. A script may set it at any time."""
        names = ("_all_reduce_hook", "gradient_divide_factor", "force_sum_reduction_for_comms")
        return [tuple(getattr(group, name, None) for name in names) for group in self._groups]

    def check(self) -> None:
        if self._trouble:
            raise UserError(self._trouble, where=WHERE, remedy="optimizer.zero_grad() in each iteration, and"
                            " set_requires_gradient_sync(False) in all micro-batches but the last")

    def layout(self, names: Mapping[int, str]) -> Layout | None:
        buckets: list[Bucket] = []
        counts: list[int] = []
        runs = _runs(self._order)
        if runs is None or not runs:
            return None
        for number, places in runs:
            slices, offset = [], 0
            for place, lies in places:
                param, parameter = self._params[number][place]
                if lies not in (-1, offset):
                    raise _unknown("gradients lie elsewhere in what is reduced")
                if id(parameter) in names and lies >= 0:
                    slices.append(BucketSlice(names[id(parameter)], offset, local(parameter).numel()))
                offset += math.prod(param.padded_sharded_param_size)
            buckets.append(Bucket(slices))
            counts.append(offset)
        found = {self._wire(self._groups[number]) for number, _ in runs}
        if len(found) > 1:
            said = " and ".join(sorted(f"{dtype} over {divisor}" for dtype, divisor in found))
            raise UserError(f"reduces gradients as {said}", where=WHERE, remedy="one MixedPrecisionPolicy for all")
        dtype, self.divisor = found.pop()
        return buckets, counts, dtype

    def _wire(self, group: Any) -> tuple[str, int]:
        """(type on the wire, what it is divided by afterwards) of a parameter group. Asked from torch."""
        param = next(one for one, parameter in self._params[self._groups.index(group)] if parameter.requires_grad)
        dtype = group._reduce_dtype or param.param_dtype or param.orig_dtype
        if (hook := getattr(group, "_all_reduce_hook", None)) is not None:
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise UserError(f"has an all-reduce hook ({name}), which may do anything", where=WHERE,
                            remedy="leave it out")
        info = group.mesh_info
        try:
            from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

            _, after, _, kind = _get_gradient_divide_factors(
                getattr(info, "shard_process_group", None), info.replicate_process_group, dtype,
                group.device.type, group.gradient_divide_factor, group.force_sum_reduction_for_comms,
            )
        except (ImportError, TypeError, AttributeError) as error:
            raise _unknown(f"{type(error).__name__}: {error}") from None
        if kind not in KINDS:
            raise UserError(f"AllReduces by {kind}", where=WHERE, remedy="sums or averages")
        if after is not None and (after != int(after) or after < 1):
            raise UserError(f"divides reduced gradients by {after}", where=WHERE,
                            remedy="a whole number for set_gradient_divide_factor")
        if group._orig_dtype is not None and group._orig_dtype != torch.float32 and group._orig_dtype != dtype:
            raise UserError(f"reduces gradients of {group._orig_dtype} parameters in {dtype}", where=WHERE,
                            remedy="parameters in float32, and MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
        return DTYPES[dtype][0], 1 if after is None else int(after)

    def gradients(self) -> list[torch.Tensor]:
        return [value for _, value in self.reduced() if id(value) not in self.others]

    def listen(self, call: Callable[[bool], None]) -> None:
        self._stop()
        if self._order:
            number, place, _ = self._order[-1]
            self._stop = after_backward(self._params[number][place][1], lambda: call(True))

    def close(self) -> None:
        self._stop()
        for hook in self._hooks:
            hook.remove()


def _runs(order: list[_Came]) -> list[tuple[int, list[tuple[int, int]]]] | None:
    """Parameter groups, each with its parameters and where their gradients lie, in the order of their AllReduces; None:
    one came twice."""
    runs: list[tuple[int, list[tuple[int, int]]]] = []
    for number, place, lies in order:
        if not runs or runs[-1][0] != number:
            runs.append((number, []))
        runs[-1][1].append((place, lies))
    twice = len({(number, place) for number, place, _ in order}) < len(order)
    return None if twice or len({number for number, _ in runs}) < len(runs) else runs
