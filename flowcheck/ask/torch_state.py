"""A version's optimizer state in the form of torch's own `state_dict`. Torch and the standard library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowcheck.control.version import odd_optimizer
from flowcheck.errors import UserError

__all__ = ["torch_state"]

ANOTHER = "another version of the run; this one is damaged, or not ours"
_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}


def torch_state(
    optimizer: Mapping[str, Any], state: Mapping[str, Mapping[str, torch.Tensor]], rounding: str, where: str
) -> dict[str, Any]:
    """What `torch.optim.Optimizer.state_dict()` of the trainer would have given.

    optimizer: name and groups in the manifest's form. Options that a group does not name have torch's defaults. An
    optimizer that rounds as `fused` does is said to be fused. Raises UserError without an optimizer, or for an odd one.
    """
    if not optimizer.get("name"):
        raise UserError(
            "has no optimizer state", where=where,
            remedy="name the optimizer in the job manifest; a job that gathers parameters puts none on the wire",
        )
    if why := odd_optimizer(optimizer):
        raise UserError(f"has an optimizer that {why}", where=where, remedy=ANOTHER)
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for group in optimizer["groups"]:
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in group["options"].items()}
        made = _CLASSES[optimizer["name"]]([{"params": [torch.zeros(1, device="cpu")], **options}])
        (complete,) = made.param_groups
        for key, value in options.items():
            if key in made.defaults and not _like(made.defaults[key], value):
                raise UserError(f"has an optimizer whose {key} is {str(value)[:40]!r}", where=where,
                                remedy=ANOTHER)
        if rounding.endswith("-fused"):
            complete["fused"] = True
        first = len(numbers)
        numbers.update({name: first + i for i, name in enumerate(group["params"])})
        groups.append({**complete, "params": list(range(first, len(numbers)))})
    if odd := sorted(state.keys() - numbers.keys()):
        raise UserError(f"has state of {odd[0]!r}, which is in none of its optimizer's groups", where=where,
                        remedy=ANOTHER)
    held = {numbers[name]: dict(values) for name, values in state.items()}
    return {"state": dict(sorted(held.items())), "param_groups": groups}


def _like(default: Any, value: Any) -> bool:
    """Is it what torch has for this option? It looks at defaults alone, not at what groups say."""
    if isinstance(default, bool) or default is None:
        return value is None or isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) == len(default) and all(map(_like, default, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
