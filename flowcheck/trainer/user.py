"""What a rank gives of itself at each boundary: random numbers, scheduler, scaler, and what the script adds.

    kept = Keeper(optimizer, scheduler, scaler)
    kept.give(user, step, rank, ranks, say) -> bytes    at the boundary where the next iteration begins
    restore_rng(state)                                  so that repeating that iteration draws the same numbers

The state of random generators is taken as it is: python's `random`, numpy's global one if numpy is imported, torch's on
the CPU and on the devices that the model is on. Where the groups of the optimizer stand is taken too, because a
scheduler may have changed them after the step that made the version. Torch and the standard library; the training
thread.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from flowcheck.control.user_state import pack
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.trainer.loop import Given
from flowcheck.trainer.parts import stepped

__all__ = ["Keeper", "restore_rng", "rng_state"]


class Keeper:
    """scheduler, scaler: with `state_dict`, or None. why: the newest
    boundary has no state, "": it has."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any = None, scaler: Any = None) -> None:
        for what, one in (("scheduler", scheduler), ("scaler", scaler)):
            if one is not None and not callable(getattr(one, "state_dict", None)):
                raise UserError(f"a {type(one).__name__} has no state_dict()", where=what,
                                remedy="an object of torch's, or user= in step()")
        self._optimizer = optimizer
        self._devices: list[str] | None = None  # types of those that the model is on
        self._scheduler, self.scaler = scheduler, scaler
        self._given: Any = None  # how far the scheduler was at the last boundary
        self._warned = False
        self.why = ""

    def give(
        self, user: Given, step: int, rank: int, ranks: int, say: Callable[[str], None]
    ) -> bytes | None:
        """This rank's own state. user: what the script adds, or a function that says it. None: something of it cannot
        be kept, which is said once as long as it lasts; a part of a state is no state."""
        self._given = self._far()
        try:
            given = self._pack(user, step, rank, ranks)
        except Exception as error:  # an object of the script's own may raise anything
            what = error.message() if isinstance(error, FlowcheckError) else f"{type(error).__name__}: {error}"
            if not self.why:
                say(f"versions are without this rank's own state: {what}")
            self.why = f"step {step} is without this rank's own state: {what}"
            return None
        self.why = ""
        return given

    def look(self, say: Callable[[str], None]) -> None:
        """Before a step of the optimizer: has the scheduler gone on since the boundary? What is kept does not have
        that. A script that calls it at the begin of an iteration does so again when it repeats that; at the end of one
        it does not, and nothing shows which of the two this is."""
        if self._given is not None and self._given != self._far() and not self._warned:
            self._warned = True
            say("the scheduler stepped after attachment.step(), so what is kept with a version is from before that:"
                " call scheduler.step() first, unless that is how an iteration begins")

    def _far(self) -> Any:
        return getattr(self._scheduler, "last_epoch", None)

    def _pack(self, user: Given, step: int, rank: int, ranks: int) -> bytes:
        if callable(user):
            user = user()
        if user is not None and type(user) is not dict:
            raise UserError(f"a {type(user).__name__} is not a dict", where="user", remedy='user={"loader": ...}')
        if self._devices is None:
            held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            self._devices = sorted({parameter.device.type for parameter in held} - {"cpu", "meta"})
        groups = [{**group, "params": [stepped(parameter) for parameter in group["params"]]}
                  for group in self._optimizer.param_groups]
        state: dict[str, Any] = {"rng": rng_state(self._devices), "groups": groups, "user": user or {}}
        for what, one in (("scheduler", self._scheduler), ("scaler", self.scaler)):
            if one is not None:
                state[what] = one.state_dict()
        return pack(state, step=step, rank=rank, ranks=ranks)


def rng_state(devices: Collection[str] = ()) -> dict[str, Any]:
    """Of this process. devices: types, each of which torch has a module for."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys), *rest)
    for device in devices:
        module = torch.get_device_module(device)
        # Of all devices of this process where torch can tell them apart: one rank may use several.
        every = getattr(module, "get_rng_state_all", None)
        state[f"device {device}"] = every() if every is not None else [module.get_rng_state()]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """What `rng_state` gave, in a process that has the same kinds of devices. Raises UserError; then some generators
    may be set and others not."""
    try:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            name, keys, *rest = state["numpy"]
            if (numpy := sys.modules.get("numpy")) is None:
                raise ValueError("numpy's had one, and numpy is not imported here yet")
            numpy.random.set_state((name, keys.numpy(), *rest))
        for what, states in state.items():
            if what.startswith("device "):
                _restore_devices(what.removeprefix("device "), states)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"the state of random numbers does not fit this process: {type(error).__name__}: {error}",
                        where="recover", remedy="the same packages and devices, or seeds of your own") from None


def _restore_devices(device: str, states: list[torch.Tensor]) -> None:
    module = torch.get_device_module(device)
    if not hasattr(module, "set_rng_state_all"):
        module.set_rng_state(states[0])
    elif len(states) != module.device_count():
        raise ValueError(f"{len(states)} {device} devices had one, here are {module.device_count()}")
    else:
        module.set_rng_state_all(states)
