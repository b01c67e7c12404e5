"""How a part's model and optimizer were described, and whether the optimizer still steps as they were.

    how = stepping(optimizer, entries, kind)        what a node, or a redo, has to know of its steps
    options = group_options(model, optimizer)       hyper-parameters of each group, for a step record
    check_gradients(model, optimizer)               before the step of an optimizer: it steps what the manifest says

torch and the standard library. Raises UserError for what could not be followed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from flowcheck.control.numbers import is_numpy, plain
from flowcheck.errors import UserError
from flowcheck.job.model import LOG, NARROW, REPLICA, ModelEntry
from flowcheck.trainer.describe.optimizers import members
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.describe.rounding import check_fused, corrections_of, rounding_of
from flowcheck.trainer.describe.wrapped import refuse_optimizer
from flowcheck.trainer.log.codec import record_tree
from flowcheck.trainer.log.record import StepRecord
from flowcheck.trainer.log.refusals import coupled, refused

__all__ = ["Model", "Stepping", "check_gradients", "group_options", "named", "stepping"]

_CLASSES: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
_OPTIONS = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
}
_RAW = {"sgd": ("lr", "momentum", "weight_decay"), "adam": ("eps", "weight_decay"), "adamw": ("eps",)}
OTHERWISE = 'or attach(kind="log"), with [journal] in the node\'s settings (docs/use/log.md)'
_grad = attrgetter("grad")


def _refuse(what: str, where: str, remedy: str) -> UserError:
    return UserError(what, where=where, remedy=remedy)


@dataclass(frozen=True)
class Stepping:
    """How an optimizer steps. name, rounding, threads, corrections: as job.Optimizer has them, rounding with the
    version of torch; threads are said where parameters have 16 bits (whose bits depend on them), otherwise 0. name: "":
    no replica steps with it, and its steps are redone by itself."""

    name: str = ""
    rounding: tuple[str, str] = ("", "")
    threads: int = 0
    corrections: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Of versions (Job.kind)."""
        return REPLICA if self.name else LOG


@dataclass(frozen=True)
class Model:
    """entries: of the state_dict. names: id of an optimized parameter -> its entry. groups: per parameter group the
    entries that are optimized, None for one without any. extra: entries that are no tensors of the model (extra.py)."""

    entries: list[ModelEntry]
    names: Mapping[int, str]
    groups: list[list[str] | None]
    stepping: Stepping
    extra: tuple[str, ...] = ()

    @cached_property
    def buffers(self) -> list[str]:
        return [entry.name for entry in self.entries if entry.kind == "buffer"]

    def of(self, optimizer: torch.optim.Optimizer, which: int) -> Model:
        """For one of an optimizer's members, as if it were the only one."""
        sizes = [len(one.param_groups) for one in members(optimizer)]
        first = sum(sizes[:which])
        return self if len(sizes) == 1 else replace(self, groups=self.groups[first : first + sizes[which]])


def named(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The parameters that it steps, of those that have a name. names: as of Model."""
    return {names[id(one)]: one for group in optimizer.param_groups for one in group["params"] if id(one) in names}


def stepping(
    optimizer: torch.optim.Optimizer, entries: Sequence[ModelEntry], names: Mapping[int, str], kind: str = REPLICA
) -> Stepping:
    """names: as of Model. kind: of versions (Job.kind). Raises UserError: they cannot be had of it."""
    each = members(optimizer)
    for one in each:
        refuse_optimizer(one)
    if kind == LOG:
        if (error := refused(optimizer, named(optimizer, names), at_once=bool(coupled(optimizer)))) is not None:
            raise error
        return Stepping()
    classes = list(dict.fromkeys(map(type, each)))
    name = _CLASSES.get(classes[0]) if len(classes) == 1 else None
    if name is None:
        raise _refuse(f"{' with '.join(one.__name__ for one in classes)} is not followed", "optimizer",
                      f"torch.optim's SGD, Adam or AdamW, one of them for all; {OTHERWISE}")
    rounding = rounding_of(optimizer)
    narrow = [one for one in entries if one.kind == "optimized" and one.dtype in NARROW]
    if narrow:
        _check_narrow(narrow[0], optimizer, rounding[0])
    corrections = corrections_of(optimizer) if rounding[0] == "torch-cuda-fused" else {}
    return Stepping(name, rounding, torch.get_num_threads() if narrow else 0, corrections)


def _check_narrow(entry: ModelEntry, optimizer: torch.optim.Optimizer, rounding: str) -> None:
    """16-bit parameters, which the optimizer steps as they are: that has kernels for torch's loop on a CPU alone."""
    if rounding != "torch-cpu":
        raise _refuse(f"is optimized in {entry.dtype} without fp32 masters, in the order {rounding}",
                      f"state_dict: {entry.name}", "keep parameters in float32 and use autocast")
    for group in optimizer.param_groups:
        if group.get("foreach"):
            raise _refuse(f"has foreach=True, which rounds {entry.dtype} parameters in an order of its own",
                          "optimizer", "leave foreach out")
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != "step" and isinstance(value, torch.Tensor) and value.dtype != parameter.dtype:
                    raise _refuse(f"holds {key} in {value.dtype} of a parameter in {parameter.dtype}", "optimizer",
                                  "states of the parameters' type, as torch makes them")


def group_options(model: Model, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyper-parameters of every group that optimizes something, as plain numbers; for a log one tree of all that the
    optimizer steps with (log/codec.py), of several one for each. Raises UserError if they are none, or if the groups
    are no longer those that the job was described with."""
    if len(optimizer.param_groups) != len(model.groups):
        raise _refuse(f"has {len(optimizer.param_groups)} parameter groups, and had {len(model.groups)}", "optimizer",
                      "attach anew after changing them")
    if model.stepping.kind == LOG:
        return [record_tree(StepRecord.of(one)) for one in members(optimizer)]
    keys = _OPTIONS[model.stepping.name]
    return [
        {key: _plain(group[key], key, _raw(model.stepping.name, group)) for key in keys if key in group}
        for group, names in zip(optimizer.param_groups, model.groups, strict=True) if names is not None
    ]


def check_gradients(model: Model, optimizer: torch.optim.Optimizer, all_there: bool = False) -> None:
    """Call before an optimizer step. Raises UserError if it would leave a parameter alone that the manifest has as
    optimized (torch skips one without a gradient, although DDP's bucket carries zeros for it: static_graph), or step
    one that the manifest has as constant. In 16 bits, and fused on a GPU, also if its bits would no longer be those of
    the manifest. all_there: all parameters of the optimizer are known to be optimized, and to have a gradient."""
    threads = model.stepping.threads
    if model.stepping.corrections:
        check_fused(optimizer, model.stepping.corrections)
    if threads and torch.get_num_threads() != threads:
        raise _refuse(f"torch has {torch.get_num_threads()} threads, and had {threads}: 16-bit parameters are rounded"
                      " otherwise", "optimizer", "set_num_threads() before attaching")
    if all_there and not threads:
        return
    for number, group in enumerate(optimizer.param_groups):
        held = group["params"]
        if not threads and all(map(model.names.__contains__, map(id, held))) and (
            not any(map(is_, map(_grad, held), repeat(None)))
        ):
            continue  # the same, of hundreds of parameters in microseconds
        for parameter in held:
            if (parameter.grad is None) == (id(parameter) in model.names):
                name = model.names.get(id(parameter), f"one of shape {tuple(parameter.shape)}, group {number}")
                what = "has no gradient" if parameter.grad is None else "has a gradient and had requires_grad off"
                raise _refuse(f"parameter {name} {what}", "optimizer",
                              "give the optimizer the parameters that every iteration trains, and attach anew")
            if threads and parameter.grad is not None and not local(parameter.grad).is_contiguous():
                raise _refuse(f"the gradient of {model.names[id(parameter)]} is not in row-major order, which rounds"
                              " 16-bit parameters otherwise", "optimizer", "gradients in their parameters' order")


def _raw(optimizer: str, group: Mapping[str, Any]) -> Collection[str]:
    """Options that torch hands on to its kernels as they are, each of which takes the double of the same value. With
    the others it computes in Python before that."""
    if group.get("fused"):
        return _OPTIONS[optimizer]
    return _RAW[optimizer] if not group.get("decoupled_weight_decay") else _RAW["adamw"]


def _plain(value: Any, key: str, raw: Collection[str]) -> Any:
    """Python's own numbers, and numpy's where torch computes with the same double: with a float32 numpy itself would
    round otherwise than here, and so would torch with a tensor."""
    if type(value) in (float, int, bool) and math.isfinite(value):
        return value
    numbers = list(map(plain, value)) if isinstance(value, tuple) else [plain(value)]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise _refuse(f"{key} is {value!r}", "optimizer", "finite Python numbers")
    for given in value if isinstance(value, tuple) else (value,):
        if is_numpy(given) and given.dtype.kind != "b" and (given.dtype.kind == "u" or (
                key not in raw and not isinstance(given * 0.5, float))):
            raise _refuse(f"{key} is {given!r}, with which numpy computes otherwise than Python with the same value",
                          "optimizer", f"float({key})")
    return numbers if isinstance(value, tuple) else numbers[0]
