"""torch's own SGD, Adam and AdamW, described by name and checked before anything is built.

Options have their torch names. Which roundings they are computed with is the replica's rounding mode
(updater/rounding_modes.py), so `fused` and `foreach` may stand here only if they agree with it; capturable and
differentiable have roundings of their own and are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from updater.errors import OptimizerError

__all__ = ["Group", "OptimizerSpec", "pack", "packed", "unpack"]

_CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
_ADAM = {
    "lr": "number", "betas": "betas", "eps": "number", "weight_decay": "number", "amsgrad": "flag",
    "maximize": "flag",
}
_OPTIONS = {
    "sgd": {
        "lr": "number", "momentum": "number", "dampening": "real", "weight_decay": "number",
        "nesterov": "flag", "maximize": "flag",
    },
    "adam": {**_ADAM, "decoupled_weight_decay": "flag"},
    "adamw": _ADAM,
}
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_OTHER_ORDER = ("capturable", "differentiable")


@dataclass(frozen=True)
class Group:
    """One parameter group: names of tensors and torch.optim options (checked, betas as a tuple)."""

    params: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer on tensors of these names, with the arrays of state it keeps. Make one with `check`."""

    name: str
    groups: tuple[Group, ...]

    @classmethod
    def check(
        cls, name: str, groups: Iterable[tuple[Sequence[str], Mapping[str, Any]]], *, fused: bool = False
    ) -> OptimizerSpec:
        """Validate (params, options) per group. Raises OptimizerError naming the group and the option.

        fused: whether the rounding mode is a fused one; options that say otherwise are refused.
        """
        if name not in _CLASSES:
            raise OptimizerError(f"optimizer {name!r} is not one of {', '.join(_CLASSES)}")
        checked = tuple(
            Group(tuple(params), _check_options(name, options, f"{name} group {i}", fused))
            for i, (params, options) in enumerate(groups)
        )
        names = [param for group in checked for param in group.params]
        twice = [param for param, times in Counter(names).items() if times > 1]
        if twice:
            raise OptimizerError(f"{name}: parameter {twice[0]!r} is in two groups")
        if not names:
            raise OptimizerError(f"{name}: no group names a parameter")
        for i, group in enumerate(checked):
            # torch checks ranges only of the constructor's arguments, never of a group's own options.
            try:
                _optimizer(name, group.options)
            except ValueError as error:
                raise OptimizerError(f"{name} group {i}: torch refuses the options: {error}") from None
        return cls(name, checked)

    @property
    def params(self) -> list[str]:
        """Names of all optimized tensors, group by group."""
        return [param for group in self.groups for param in group.params]

    def states(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """torch's names of the arrays that a group with these options keeps per tensor."""
        if self.name == "sgd":
            return ("momentum_buffer",) if options.get("momentum") else ()
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if options.get("amsgrad") else 2]

    def with_values(self, values: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Options of every group in one step: its own, with what a step record or a schedule says instead.

        values: one mapping per group, or none at all. What would add or drop an array of state is refused.
        """
        if not values:
            return tuple(group.options for group in self.groups)
        if len(values) != len(self.groups):
            raise OptimizerError(f"{self.name} has {len(self.groups)} groups, the step has values for {len(values)}")
        out = []
        for i, (group, given) in enumerate(zip(self.groups, values, strict=True)):
            whole = {**group.options, **given}
            options = {**group.options, **_check_options(self.name, whole, f"{self.name} group {i}", True)}
            if any(beta >= 1 for beta in options.get("betas", ())):  # torch would divide by zero, and so should we
                raise OptimizerError(f"{self.name} group {i}: betas are below 1, found {options['betas']!r}")
            if self.states(options) != self.states(group.options):
                raise OptimizerError(f"{self.name} group {i}: amsgrad or momentum cannot be switched in mid-run")
            out.append(options)
        return tuple(out)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: name and groups with their options, in the manifest's form."""
        groups = [{"params": list(group.params), "options": dict(group.options)} for group in self.groups]
        return {"name": self.name, "groups": groups}


def packed(name: str) -> int:
    """How many numbers hold the options of one group of this optimizer."""
    return sum(2 if kind == "betas" else 1 for kind in _OPTIONS[name].values())


def _optimizer(name: str, options: Mapping[str, Any]) -> None:
    """Make torch's own. Imported here, because torch takes a second to load, which commands that only name an
    optimizer need not wait for."""
    import torch

    made = getattr(torch.optim, _CLASSES[name])
    # Adding a group loads torch's compiler, which takes another second and has nothing to say about options.
    type(made.__name__, (made,), {"add_param_group": lambda self, group: None})([torch.zeros(1)], **options)


def pack(name: str, options: Mapping[str, Any]) -> list[float]:
    """Checked options of one group as numbers, NaN for what is not given: so that a version can carry its own."""
    out: list[float] = []
    for key, kind in _OPTIONS[name].items():
        given = options.get(key, (math.nan, math.nan) if kind == "betas" else math.nan)
        out += map(float, given if kind == "betas" else [given])
    return out


def unpack(name: str, numbers: Sequence[float]) -> dict[str, Any]:
    """The options that `pack` was given."""
    rest, out = list(numbers), {}
    for key, kind in _OPTIONS[name].items():
        values = [rest.pop(0) for _ in range(2 if kind == "betas" else 1)]
        if not math.isnan(values[0]):
            out[key] = tuple(values) if kind == "betas" else bool(values[0]) if kind == "flag" else values[0]
    return out


def _check_options(name: str, options: Mapping[str, Any], where: str, fused: bool) -> dict[str, Any]:
    kinds = _OPTIONS[name]
    checked: dict[str, Any] = {}
    for key, value in options.items():
        if key == "foreach":
            continue
        if key in _OTHER_ORDER or key == "fused":
            if value and not (key == "fused" and fused):
                raise OptimizerError(
                    f"{where}: {key}={value!r} is computed in another rounding mode than that of this job;"
                    " a replica would not equal the trainer"
                )
            continue
        if name == "adamw" and key == "decoupled_weight_decay" and value is True:
            continue  # torch lists it in AdamW's groups; it is what makes it AdamW
        if key not in kinds:
            raise OptimizerError(f"{where}: unknown option {key!r}; known: {', '.join(kinds)}")
        checked[key] = _check_value(kinds[key], value, f"{where}: {key}")
    if "lr" not in checked:
        # torch has a default; a manifest that forgot the learning rate is likelier than one that means it.
        raise OptimizerError(f"{where}: lr is not given")
    return checked


def _check_value(kind: str, value: Any, where: str) -> Any:
    if kind == "flag":
        if not isinstance(value, bool):
            raise OptimizerError(f"{where} is true or false, found {value!r}")
        return value
    if kind == "betas":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise OptimizerError(f"{where} is a pair of numbers, found {value!r}")
        return tuple(_check_value("number", part, where) for part in value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptimizerError(f"{where} is a finite number, found {value!r}")
    if abs(value) > _FLOAT32_MAX:
        raise OptimizerError(f"{where} is too large for a 32-bit float: {value!r}")
    if kind == "number" and value < 0:
        raise OptimizerError(f"{where} is not negative, found {value!r}")
    return value
