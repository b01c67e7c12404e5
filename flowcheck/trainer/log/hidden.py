"""What a step changes that neither state nor groups have: found by looking before it and after it.

    hidden = Hidden(optimizer)
    hidden.before(); hidden.after()          around the update, in its hooks
    hidden.found                             a UserError to raise; None: nothing was found

A new optimizer in another process would not have it, so its steps would not be the same. Looked at are

    attributes      of the optimizer, and of objects in them: numbers, texts, containers, which tensors and whether they
                    were written to (torch counts that), random generators
    generators      python's, numpy's and torch's own, by which steps round randomly
    shared state    a tensor that the states of several parameters have, and that steps write to

What changes in TIMES of the first STEPS steps is found; what only one of them changes is taken for something that is
made when it is first needed. Not looked at is what an object of C++ keeps, a module or a closure: of the first those
that are known are refused by name (refusals.py), and what remains shows in the checksums of the records. A number that
another thread draws meanwhile looks like one of the step's.

torch and the standard library. The training thread.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.trainer.describe.parts import local

__all__ = ["STEPS", "TIMES", "Hidden"]

STEPS, TIMES = 4, 2
MOST = 20_000  # values of an optimizer that are looked at
DEEP = 6
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, torch.nn.Module, torch.dtype, torch.device)
# What torch itself, its schedulers and its scalers keep there: it decides nothing of an update, or is in the record.
_OWN = {
    "state", "param_groups", "defaults", "step", "grad_scale", "found_inf", "_opt_called", "_step_count",
    "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured",
}


class Hidden:
    """found: see above."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._looks = 0
        self._times: Counter[str] = Counter()
        self._before: dict[str, Any] = {}
        self.found: UserError | None = None

    @property
    def over(self) -> bool:
        """Nothing more is looked at."""
        return self._looks >= STEPS or self.found is not None

    def before(self) -> None:
        if not self.over:
            self._before = self._look()

    def after(self) -> None:
        if self.over:
            return
        now = self._look()
        self._looks += 1
        for what in self._before.keys() | now.keys():
            if what in self._before and self._before[what] != now.get(what):
                self._times[what] += 1
                if self._times[what] == TIMES and self.found is None:
                    self.found = self._error(what)
            elif what not in self._before and not what.startswith("shared"):
                self._times[what] += 1

    def _error(self, what: str) -> UserError:
        kind, _, name = what.partition(" ")
        said, remedy = {
            "attribute": (f"changes its attribute {name} in its steps, which no log has",
                          "keep it in optimizer.state[parameter] or in the groups"),
            "generator": (f"draws random numbers in its steps ({name})", "an optimizer that draws none"),
            "shared": ("writes to one tensor in the state of several parameters", "a tensor for each parameter"),
        }[kind]
        return UserError(f"{type(self._optimizer).__name__} {said}: its steps cannot be made again from a log",
                         where="optimizer", remedy=remedy)

    def _look(self) -> dict[str, Any]:
        here = _Walk(self._optimizer)
        out = {f"attribute {name}": here.mark(value) for name, value in vars(self._optimizer).items()
               if name not in _OWN and not (name.startswith("_optimizer_") and name.endswith("_hooks"))}
        out |= {f"generator {name}": state for name, state in _generators(here.devices)}
        out |= {f"shared {number}": version for number, version in here.shared()}
        return out


def _generators(devices: Collection[torch.device]) -> Iterator[tuple[str, Any]]:
    yield "python's", hash(random.getstate())
    yield "torch's", bytes(torch.default_generator.get_state().tolist())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)["state"]
        yield "numpy's", [(name, value.tobytes() if hasattr(value, "tobytes") else value)
                          for name, value in state.items()]
    for device in devices:
        if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "get_rng_state"):
            yield f"torch's on {device}", bytes(module.get_rng_state(device).tolist())


class _Walk:
    """Marks of values: equal as long as nothing that can be seen has changed. Tensors that a step is there to change
    have none: parameters, gradients, state, and what lies in the same memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: set[int] = set()
        self.devices: set[torch.device] = set()
        for group in optimizer.param_groups:
            for one in group["params"]:
                self.devices.add(local(one).device)
                for tensor in (one, one.grad, *optimizer.state.get(one, {}).values()):
                    if isinstance(tensor, torch.Tensor):
                        self._known |= {id(tensor), _storage(tensor)}
        self._known.discard(0)

    def shared(self) -> Iterator[tuple[int, int]]:
        """(number, how often it was written to) of tensors that are in several parameters' state."""
        states: Mapping[Any, Any] = self._optimizer.state
        held = [value for state in states.values() if isinstance(state, dict)
                for value in {id(one): one for one in state.values() if isinstance(one, torch.Tensor)}.values()]
        count = Counter(map(id, held))
        for value in {id(one): one for one in held if count[id(one)] > 1}.values():
            yield id(value), value._version

    def mark(self, value: Any) -> Any:
        self._room = MOST
        self._seen: set[int] = set()
        return self._mark(value, 0)

    def _mark(self, value: Any, deep: int) -> Any:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        self._room -= 1
        if deep > DEEP or self._room < 0 or isinstance(value, _CODE):
            return id(value)
        if isinstance(value, torch.Tensor):
            known = id(value) in self._known or _storage(value) in self._known or value.is_inference()
            return None if known else (id(value), value._version)
        if isinstance(value, torch.Generator):
            return bytes(value.get_state().tolist())
        if isinstance(value, random.Random):
            return hash(value.getstate())
        if id(value) in self._seen:
            return "again"
        self._seen.add(id(value))
        if isinstance(value, Mapping):
            return [(id(key) if isinstance(key, torch.Tensor) else repr(key), self._mark(one, deep + 1))
                    for key, one in value.items()]
        if isinstance(value, list | tuple | set | frozenset):
            return len(value), [self._mark(one, deep + 1) for one in value]
        if (bits := getattr(value, "bit_generator", None)) is not None:  # numpy's
            return repr(bits.state)
        if hasattr(value, "__dict__"):
            return id(value), [(name, self._mark(one, deep + 1)) for name, one in vars(value).items()]
        return id(value), repr(value)[:200] if hasattr(value, "__slots__") or hasattr(value, "tobytes") else ""


def _storage(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0: it has none, or torch does not say it."""
    held = local(tensor)
    return held.untyped_storage().data_ptr() if held.layout is torch.strided and not held.is_meta else 0
