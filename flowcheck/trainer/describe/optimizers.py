"""Which optimizers step a model: one, or several that each step once an iteration and are followed as one.

    optimizer = optimizer_of(given)     what a script has: torch's own, a list or dict of them, torchtitan's container,
                                        what get_megatron_optimizer gave
    members(optimizer)                  the optimizers that step: it, or those in it
    parameters_of(optimizer)            that it has
    refresh(optimizer)                  before what it keeps is looked at: of several it is kept by each

Groups of several are those of all, in this order; so is their state, by parameter. torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from operator import is_not
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.megatron_pieces import torch_optimizers

__all__ = ["Several", "members", "optimizer_of", "parameters_of", "refresh"]


class _States(dict[Any, Any]):
    """What optimizers keep of each parameter. What is written here is written to the optimizer that has the
    parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__()
        self._optimizers = optimizers
        self.kept = [one.state for one in optimizers]
        self.reread()

    def reread(self) -> None:
        """They have stepped since. What one still keeps of a parameter that another has by now is nobody's."""
        super().clear()
        own = [dict.fromkeys(parameters_of(one)) for one in self._optimizers]
        for mine, state in zip(own, self.kept, strict=True):
            foreign = set() if state.keys() <= mine.keys() else {
                id(key) for key in state.keys() - mine.keys() if any(key in theirs for theirs in own)}
            super().update({key: value for key, value in state.items() if id(key) not in foreign} if foreign else state)

    def _home(self, key: Any) -> Any:
        for one, state in zip(self._optimizers, self.kept, strict=True):
            if any(key is parameter for parameter in parameters_of(one)):
                return state
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        for state in self.kept:
            state.pop(key, None)

    def pop(self, key: Any, *default: Any) -> Any:
        for state in self.kept:
            state.pop(key, None)
        return super().pop(key, *default)

    def clear(self) -> None:
        for state in self.kept:
            state.clear()
        super().clear()

    def update(self, given: Any) -> None:  # type: ignore[override]
        for key, value in dict(given).items():
            self[key] = value


class Several(torch.optim.Optimizer):
    """As one of torch's own to whoever reads groups and state. Nothing of torch's class is made: it has no groups of
    its own, and its members' hooks are called, not its."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.members = list(optimizers)
        self.defaults = {}
        self.param_groups = _groups(self.members)
        self._lists = [one.param_groups for one in self.members]
        self.state: Any = _States(self.members)

    def refresh(self) -> None:
        """As `members` are now. Other objects where theirs are others."""
        lists = [one.param_groups for one in self.members]
        if any(map(is_not, lists, self._lists)):
            self._lists, self.param_groups = lists, _groups(self.members)
        else:
            self.param_groups[:] = _groups(self.members)
        if any(one.state is not kept for one, kept in zip(self.members, self.state.kept, strict=True)):
            self.state = _States(self.members)
        else:
            self.state.reread()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """In torch's numbering of all parameters, one optimizer's after the other's."""
        groups, state = iter(state_dict["param_groups"]), state_dict["state"]
        for one in self.members:
            mine = list(islice(groups, len(one.param_groups)))
            numbers = {number: at for at, number in enumerate(n for group in mine for n in group["params"])}
            one.load_state_dict({
                "state": {numbers[number]: held for number, held in state.items() if number in numbers},
                "param_groups": [{**group, "params": [numbers[n] for n in group["params"]]} for group in mine],
            })
        self.refresh()


def members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return optimizer.members if isinstance(optimizer, Several) else [optimizer]


def refresh(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, Several):
        optimizer.refresh()


def optimizer_of(given: Any) -> Any:
    """Anything else comes back as it is. Raises UserError: two of several have one parameter."""
    found = _all(given)
    if not found or not all(isinstance(one, torch.optim.Optimizer) for one in found):
        return given
    if len(found) == 1:
        return found[0]
    held = [id(parameter) for one in found for parameter in parameters_of(one)]
    if len(set(held)) < len(held):
        what = "one of several is there twice" if len(set(map(id, found))) < len(found) else (
            "two of several have the same parameter")
        raise UserError(what, where="optimizer", remedy="each parameter in one optimizer")
    return Several(found)


def _all(given: Any) -> list[Any]:
    """Also of what holds others."""
    if isinstance(given, Several):
        return [given]
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        return [found for one in given for found in _all(one)]
    if (inner := torch_optimizers(given)) is not None:
        return inner
    held = getattr(given, "optimizers", None)  # torchtitan's container: its own groups have no options
    if isinstance(given, torch.optim.Optimizer) and isinstance(held, list) and held and all(
            isinstance(one, torch.optim.Optimizer) for one in held):
        return held
    return [given]


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for one in optimizers for group in one.param_groups]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
