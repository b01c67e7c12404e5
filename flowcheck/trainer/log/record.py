"""What a redo needs of one iteration: the options that the optimizer stepped with, and its gradients.

    options_of(optimizer)                     all options of all groups, by copies; in a hook before the step
    set_options(optimizer, options)           the inverse: each group has these and no others
    StepRecord.of(optimizer, ...)             with what a loss scaler has hung on the optimizer; in that hook
    Entry(...)                                one iteration of the log

Some optimizers count in their groups, under keys that are not there before the first step; schedules write into a
learning rate that is a tensor. So options are copied whole, before the step, and set whole. What cannot be written (a
function, an object) is noted as Opaque: a redo leaves the option of that name as the script has made it.

torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.copies import TensorCopy, copy_of, live, nbytes_of

__all__ = ["Entry", "Opaque", "StepRecord", "Wire", "options_of", "set_options"]

MEMBERS = ("params", "param_names")  # keys of a group that are no options
MOST = 1 << 16  # bytes of tensors in a group's options: they go with each step
_Group = dict[str, Any]


@dataclass(frozen=True)
class Opaque:
    """An option that cannot be written. kind: its class."""

    kind: str


def _option(value: Any, like: torch.Tensor | None, where: str) -> Any:
    """What holds something that cannot be written is opaque as a whole."""
    strange: list[Any] = []
    copied = copy_of(value, like, where, lambda one, _: strange.append(one))
    return Opaque(f"{type(value).__module__}.{type(value).__qualname__}") if strange else copied


def options_of(optimizer: torch.optim.Optimizer) -> list[_Group]:
    """Per group its options, tensors as TensorCopy. Raises UserError for one that no step record can have."""
    out = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in MEMBERS}
        for key, value in options.items():
            if nbytes_of(value) > MOST:
                raise UserError(f"has tensors of {nbytes_of(value):,} bytes, which would go with each step",
                                where=f"group {number}[{key!r}]", remedy="keep them in optimizer.state[parameter]")
        first = _first(group)
        out.append({key: _option(value, first, f"group {number}[{key!r}]") for key, value in options.items()})
    return out


def set_options(groups: Sequence[_Group], options: Sequence[Mapping[str, Any]]) -> None:
    """groups: `optimizer.param_groups`. Raises UserError, and changes nothing, where there are others, or where an
    option cannot be written and is not here."""
    if len(groups) != len(options):
        raise UserError(f"has {len(groups)} parameter groups, and the record {len(options)}", where="optimizer",
                        remedy="the groups that the job had")
    for number, (group, recorded) in enumerate(zip(groups, options, strict=True)):
        for key, value in recorded.items():
            if isinstance(value, Opaque) and key not in group:
                raise UserError(f"has no option {key!r}, which was a {value.kind} and could not be written",
                                where=f"group {number}", remedy="make the optimizer as the job did")
    for group, recorded in zip(groups, options, strict=True):
        for key in [key for key in group if key not in MEMBERS and key not in recorded]:
            del group[key]
        group.update(_made_options(recorded, group))


def _made_options(recorded: Mapping[str, Any], group: Mapping[str, Any]) -> _Group:
    """Of one group, without what is opaque; tensors are new ones, on the device of the group's parameters."""
    like = _first(group)
    like = like if like is not None else torch.empty(0)
    return {key: live(value, like) for key, value in recorded.items() if not isinstance(value, Opaque)}


def _first(group: Mapping[str, Any]) -> torch.Tensor | None:
    return next(iter(group["params"]), None)


@dataclass(frozen=True)
class StepRecord:
    """What the optimizer stepped with.

    options: per group, as of `options_of`, as they were before the step.
    grad_scale, found_inf: what a GradScaler hangs on an optimizer that unscales in its kernel; None: nothing.
    """

    options: list[_Group]
    grad_scale: TensorCopy | None = None
    found_inf: TensorCopy | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepRecord:
        """Raises UserError as `options_of`. The copies are made in the order of the stream: before the update."""
        scaler = {name: _hung(getattr(optimizer, name, None), name) for name in ("grad_scale", "found_inf")}
        return cls(options_of(optimizer), **scaler)


def _hung(value: Any, name: str) -> TensorCopy | None:
    found = copy_of(value if isinstance(value, torch.Tensor) else None, None, f"optimizer.{name}")
    return found if isinstance(found, TensorCopy) else None


@dataclass(frozen=True)
class Wire:
    """What was done to a gradient between the wire and the optimizer, in this order.

    divisor: it was divided by this, in the wire's type. scale: then converted to the parameter's type, and multiplied
    with this loss scale's reciprocal; None: there was none. clip: then multiplied with this.
    """

    divisor: int = 1
    scale: float | None = None
    clip: float | None = None


@dataclass(frozen=True)
class Entry:
    """One iteration of the log.

    iteration: counted by the trainer; the first is 0.
    calls: of `optimizer.step()`; of several optimizers one of each, in their order.
    gradients: by parameter, as the optimizer has read it; None: it had none. Every parameter is there, unless the
        step was skipped.
    skipped: a loss scaler left the step out.
    checksums: of parameters and state after it, as a step record has them; may be empty.
    wire: what gradients still lack of what the optimizer has read; None: nothing.
    """

    iteration: int
    calls: Sequence[StepRecord]
    gradients: Mapping[str, TensorCopy | None] = field(default_factory=dict)
    skipped: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict)
    wire: Wire | None = None

    def gradient(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """As the optimizer has read it, on the parameter's device. Raises UserError: the entry does not say it."""
        if name not in self.gradients:
            raise UserError(f"has no gradient of {name!r}", where=f"iteration {self.iteration} of the log",
                            remedy="an older step, or another copy of the log")
        copied = self.gradients[name]
        if copied is None:
            return None
        if tuple(copied.tensor.shape) != tuple(local(parameter).shape):
            raise UserError(f"the gradient of {name!r} has the shape {list(copied.tensor.shape)}, and the parameter"
                            f" {list(local(parameter).shape)}", where=f"iteration {self.iteration} of the log",
                            remedy="the model that was trained")
        gradient: torch.Tensor = live(copied, parameter)
        if self.wire is not None:
            gradient = _read(gradient, self.wire, parameter.dtype)
        return gradient


def _read(gradient: torch.Tensor, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    """By the operations that DDP, GradScaler.unscale_ and clip_grad_norm_ call."""
    with torch.no_grad():
        held = local(gradient)
        if wire.divisor != 1:
            held.div_(wire.divisor)
        if held.dtype != dtype:
            gradient = gradient.to(dtype)
            held = local(gradient)
        if wire.scale is not None:
            scale = torch.tensor(wire.scale, dtype=torch.float32, device=held.device)
            inverse, found = scale.double().reciprocal().float(), torch.zeros(1, device=held.device)
            torch._amp_foreach_non_finite_check_and_unscale_([held], found, inverse)
        if wire.clip is not None:
            held.mul_(torch.tensor(wire.clip, dtype=torch.float32, device=held.device))
    return gradient
