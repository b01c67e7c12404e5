"""What torch calls around an optimizer's step: right before the update, and right after it.

    hooks = StepHooks(optimizer, ready, stepped)    they are called with the number of the member that steps
    hooks.begin(); ...; hooks.end()
    hooks.taken()                   steps of each member since the last such call
    hooks.is_last(which)            does nothing come between `ready` and the update?
    hooks.are_near(which)           nor between the update and `stepped`?
    hooks.keep_places()             at a boundary, whatever other hooks the script has registered meanwhile

A class whose step() calls that of the class above it makes one step, not two: torch calls hooks for each of them, and
of those of one optimizer that are within each other the outermost counts.

The training thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import torch

from flowcheck.trainer.describe.optimizers import members

__all__ = ["StepHooks"]


class StepHooks:
    """ready: called when the gradients of a step are all there, stepped: when it is over. Neither may raise."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, ready: Callable[[int], None], stepped: Callable[[int], None]
    ) -> None:
        self._each = [_Hooks(one, partial(ready, which), partial(stepped, which))
                      for which, one in enumerate(members(optimizer))]

    def begin(self) -> None:
        for one in self._each:
            one.begin()

    def end(self) -> None:
        for one in self._each:
            one.end()

    def keep_places(self) -> None:
        for one in self._each:
            one.keep_places()

    def is_last(self, which: int) -> bool:
        return self._each[which].is_last

    def are_near(self, which: int) -> bool:
        return self._each[which].are_near

    def taken(self) -> list[int]:
        out = [one.steps for one in self._each]
        for one in self._each:
            one.steps = 0
        return out


class _Hooks:
    """Of one member. steps: since the caller has set it to 0."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, ready: Callable[[], None], stepped: Callable[[], None]
    ) -> None:
        self._optimizer, self._ready, self._stepped = optimizer, ready, stepped
        self._handles: tuple[Any, Any] | None = None
        self._within: FrameType | None = None  # torch's, of the step that is under way; left behind by one that raised
        self.steps = 0

    def begin(self) -> None:
        self._handles = (self._optimizer.register_step_pre_hook(self._before_step),
                         self._optimizer.register_step_post_hook(self._after_step))
        self.keep_places()

    def end(self) -> None:
        if self._handles is not None:
            before, after = self._handles
            try:
                before.remove()
            finally:
                after.remove()

    @property
    def is_last(self) -> bool:
        hooks = self._optimizer._optimizer_step_pre_hooks
        return self._handles is not None and next(reversed(hooks), None) == self._handles[0].id

    @property
    def are_near(self) -> bool:
        hooks = self._optimizer._optimizer_step_post_hooks
        return self.is_last and self._handles is not None and next(iter(hooks), None) == self._handles[1].id

    def keep_places(self) -> None:
        """Before the update comes what was registered first, and after it what comes first: the hook that looks at
        gradients is the last one before it, and the one that reads what the step has used the first one after it."""
        if self._handles is None:
            return
        before, after = self._handles
        for hooks, hook, last in ((self._optimizer._optimizer_step_pre_hooks, before, True),
                                  (self._optimizer._optimizer_step_post_hooks, after, False)):
            if len(hooks) > 1 and hook.id in hooks and next(reversed(hooks) if last else iter(hooks)) != hook.id:
                cast(Any, hooks).move_to_end(hook.id, last=last)

    def _before_step(self, optimizer: torch.optim.Optimizer, given: Any, named: dict[str, Any]) -> Any:
        """Called by torch. A closure makes the gradients within the step: what is looked at comes after it."""
        caller = sys._getframe(1)
        if self._is_inner(caller):
            return None
        self._within = caller
        self.steps += 1
        closure = named.get("closure", given[1] if len(given) > 1 else None)
        if not callable(closure):
            self._ready()
            return None

        def then_ready() -> Any:
            result = closure()
            self._ready()
            return result

        if "closure" in named:
            return given, named | {"closure": then_ready}
        return (given[0], then_ready, *given[2:]), named

    def _after_step(self, *_: Any) -> None:
        """Called by torch."""
        if not self._is_inner(sys._getframe(1)):
            self._within = None
            self._stepped()

    def _is_inner(self, caller: FrameType) -> bool:
        """Is the step that is under way further up?"""
        frame = caller.f_back if self._within is not None else None
        while frame is not None and frame is not self._within:
            frame = frame.f_back
        return frame is not None
