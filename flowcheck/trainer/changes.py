"""What a script changes besides what an iteration does, read from what torch counts and names.

    changes = Changes(optimizer, gradients, constants, names)
    changes.reduced(0)                          a backward pass is over: part 0 has reduced its gradients
    changes.compare(); ...; changes.altered()   around something that is known to change gradients (clipping, unscale_)
    changes.ready(True); changes.stepped()      right before the optimizer's update, and right after it; of several
                                                optimizers with the number of the one that steps
    changes.over([1]) -> Change | None          at a boundary, after so many steps: the first thing that was changed
    changes.begin()                             as things are now they are right

torch counts what is written into a tensor (`_version`), and objects have identities. So a look costs some nanoseconds a
tensor, no kernel, and no wait for a device:

    between reduction and step       gradients: the objects, and their versions
    from boundary to boundary        parameters: their versions move by what a step of this optimizer moves them, and
                                     by nothing else, and those of parameters that nobody steps not at all; the
                                     optimizer's groups, their members, options that decide how it
                                     rounds, and its state: which object, how many entries
    from a step to the next one      of WINDOW parameters of each optimizer, others each time: where they lie, and the
                                     objects, keys and versions of their state

What nothing counts (writing through `.data`) is left to the sample in the step records. torch and the standard library;
the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, cycle
from typing import Any

import torch

from flowcheck.trainer.boundary import places_of
from flowcheck.trainer.describe.optimizers import members, parameters_of
from flowcheck.trainer.looks import MOVED, OTHERS, WRITTEN, look, looks_at
from flowcheck.trainer.unchanged import Unchanged

__all__ = ["WINDOW", "Change", "Changes", "Rule"]

WINDOW = 8  # parameters whose memory and optimizer state are looked at in one iteration
FLAGS = ("fused", "foreach", "capturable", "differentiable", "maximize", "amsgrad", "nesterov",
         "decoupled_weight_decay")


class Rule(StrEnum):
    """What becomes of an attachment: the table in docs/use/hook.md has these words."""

    RENEWED = "joined anew"
    REFUSED = "refused"


@dataclass(frozen=True)
class Change:
    """gradients: it is of gradients, and the script may say by which factor (`step(clip=..., scale=...)`)."""

    what: str
    rule: Rule
    gradients: bool = False


@dataclass
class _Gradients:
    """Of one part. held: as the last backward pass left them, until the step. there: each parameter had one. whole:
    that pass reduced them."""

    parameters: list[torch.Tensor]
    held: list[Any] = field(default_factory=list)
    versions: bytes = b""
    there: bool = False
    whole: bool = False
    expected: bool = False  # each iteration has such a pass, and it is heard


_ODD = {
    MOVED: "a parameter lies in other memory than the optimizer's last step left it in",
    OTHERS: "the optimizer's state of a parameter is another object, or has other keys",
    WRITTEN: "the optimizer's state was written to outside of optimizer.step()",
}


class _Window:
    """What WINDOW parameters and their state in the optimizer were after the last step; others after the next one."""

    def __init__(self, looks: Any, state: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._looks, self._state = looks, state
        all_of_them = [parameters[at : at + WINDOW] for at in range(0, len(parameters), WINDOW)] or [[]]
        self._turns = cycle([(one, places_of(one)) for one in all_of_them])
        self.turn()

    def turn(self) -> None:
        parameters, places = next(self._turns)
        self._now = parameters, places, *self._looks.window(self._state, parameters, places)

    def odd(self) -> int:
        return int(self._looks.same_window(self._state, *self._now))


class Changes:
    """optimizer: that steps. gradients: of each part of this rank the parameters whose gradients the optimizer finds as
    the wire carried them. constants: parameters that nobody steps. names: by a parameter's id, for messages.
    complete: when gradients were compared last, each parameter of the optimizer had the one that was reduced. trained:
    a byte of each parameter at the last boundary: an optimizer that has it steps it; None: not known."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: Iterable[Sequence[torch.Tensor]],
        constants: Sequence[torch.Tensor], names: Mapping[int, str],
    ) -> None:
        self._optimizer, self._constants, self._names = optimizer, list(constants), names
        self._gradients = [_Gradients(list(one)) for one in gradients]
        # By member and options: how far one step moves the parameters' versions.
        self._moves: dict[tuple[Any, ...], int] = {}
        self.begin()

    def begin(self) -> None:
        """At a boundary: what was changed until now is not held against the script any more."""
        optimizer = self._optimizer
        self._found: Change | None = None
        self._before: int | None = None  # versions before a step whose move is not known
        self._groups, self._state, self._entries = optimizer.param_groups, optimizer.state, len(optimizer.state)
        self._held = [list(group["params"]) for group in optimizer.param_groups]
        self._flags = list(map(_flags, optimizer.param_groups))
        self._options = Unchanged()  # what is said of them: their move, None: not known yet; are the flags as before
        parameters = list(chain.from_iterable(self._held))
        self._looks = looks_at([*parameters, *chain.from_iterable(one.parameters for one in self._gradients),
                                *self._constants])
        self._windows = [_Window(looks_at(held), self._state, held) for held in map(parameters_of, members(optimizer))]
        self._versions, self._kept = self._written(), self._looks.versions(self._constants)
        self._drop()
        heard = {id(one) for each in self._gradients for one in each.parameters}
        self._all_heard = heard == set(map(id, parameters))
        self.complete = False
        self.trained: bytes | None = None

    def _written(self) -> int:
        """How often all parameters together were written to."""
        written, _ = self._looks.look([{"params": one} for one in self._held], self._held)
        return int(written)

    def _drop(self) -> None:
        """A gradient that is held takes memory."""
        for one in self._gradients:
            one.held, one.versions, one.whole = [], b"", False

    def _find(self, what: str, rule: Rule = Rule.RENEWED, *, gradients: bool = False) -> None:
        if self._found is None or (rule is Rule.REFUSED and self._found.rule is Rule.RENEWED):
            self._found = Change(what, rule, gradients)

    # -- gradients --

    def reduced(self, part: int, whole: bool = True) -> None:
        """whole: the backward pass that is over has reduced what it left; else it has added to it on this rank."""
        one = self._gradients[part]
        if one.whole and not whole:
            self._find("a backward pass without a reduction (no_sync) came after the one that reduced gradients",
                       Rule.REFUSED)
        one.held, one.versions, one.there = self._looks.gradients(one.parameters)
        one.whole = whole

    def compare(self) -> None:
        """Are gradients as they were left by the last backward pass, and by what is known?"""
        self.complete = self._all_heard
        for one in self._gradients:
            if not one.held:  # no backward pass was seen since the last step
                self.complete &= not one.parameters
                continue
            if self._looks.same_gradients(one.parameters, one.held, one.versions):
                self.complete &= one.there
                continue
            self.complete = False
            first = self._names.get(id(one.parameters[self._first_odd(one)]), "one")
            self._find(f"gradients ({first} first) were changed between their reduction and the optimizer's step",
                       Rule.REFUSED, gradients=True)

    def _first_odd(self, one: _Gradients) -> int:
        """Another object first, or else one that was written to."""
        now, versions, _ = self._looks.gradients(one.parameters)
        odd = [a is not b for a, b in zip(now, one.held, strict=True)]
        if not any(odd):
            odd = [a != b for a, b in zip(*(memoryview(of).cast("q") for of in (versions, one.versions)), strict=True)]
        return odd.index(True) % len(one.parameters)

    def altered(self) -> None:
        """Gradients were changed by something that is known; `compare` came right before that."""
        for one in self._gradients:
            one.versions = self._looks.versions(one.held)

    # -- the step --

    def expect(self, part: int, expected: bool) -> None:
        """From the next iteration on each has a backward pass that is heard of."""
        self._gradients[part].expected = expected and bool(self._gradients[part].parameters)

    def ready(self, alone: bool, which: int = 0) -> None:
        """Right before the update, with the gradients that it takes. alone: nothing of the script's comes between this
        and `stepped`. Else what it writes there would be taken for the optimizer's."""
        self.compare()
        if not self.complete and any(one.expected and not one.held for one in self._gradients):
            self._find("the optimizer stepped with gradients that no backward pass of this iteration has reduced: is"
                       " attachment.step() called before optimizer.step()?", Rule.REFUSED)
        self._look_through(self._windows[which])
        self._before = self._written() if alone and self._said()[0][which] is None else None

    def stepped(self, which: int = 0) -> None:
        """Right after the update."""
        if self._before is not None:
            self._moves[self._deciding(which)] = self._written() - self._before
            self._before, self._options = None, Unchanged()
        self._drop()
        self._windows[which].turn()

    @property
    def regrouped(self) -> bool:
        """Has the optimizer more or fewer groups since the boundary? The next one says so."""
        return len(self._optimizer.param_groups) != len(self._held)

    def _look_through(self, window: _Window) -> None:
        if self._optimizer.state is self._state and (odd := window.odd()):
            self._find(_ODD[odd])

    def _said(self) -> tuple[list[int | None], bool]:
        """Of the options that there are: how far a step of each member moves the parameters' versions, None: not known
        yet; and are all flags as they were."""
        said: tuple[list[int | None], bool] = self._options.of(self._optimizer.param_groups, self._of_options)
        return said

    def _of_options(self) -> tuple[list[int | None], bool]:
        moves = [self._moves.get(self._deciding(which)) for which in range(len(members(self._optimizer)))]
        return moves, list(map(_flags, self._optimizer.param_groups)) == self._flags

    def _deciding(self, which: int) -> tuple[Any, ...]:
        """What decides how often a step writes to a parameter."""
        return which, *(
            (bool(group.get("weight_decay")), bool(group.get("momentum")), len(group["params"]), *_flags(group))
            for group in members(self._optimizer)[which].param_groups
        )

    # -- the boundary --

    def over(self, steps: Sequence[int]) -> Change | None:
        """steps: of each member since the last boundary, as its hooks were called. A change is said once; then
        `begin` has to be called before the next iteration, or what follows from it is found again."""
        moves, same = self._said()
        written = self._look_at_groups(same)
        if self._found is None:
            for window in self._windows:
                self._look_through(window)
        due = self._versions + sum(count * (move or 0) for count, move in zip(steps, moves, strict=True))
        if self._found is None and written != due:
            self._find("parameters were written to outside of optimizer.step()" if any(steps) else
                       "parameters were written to, and optimizer.step() was not heard")
        if self._found is None and len(set(steps)) > 1:
            self._find("one of its optimizers stepped, and another did not")
        if self._found is None and self._constants and self._looks.versions(self._constants) != self._kept:
            self._find("parameters that no optimizer steps were written to (an average of weights is followed as a"
                       " registered buffer)")
        self._versions, self._entries = written, len(self._state)
        self._drop()
        found, self._found = self._found, None
        return found

    def _look_at_groups(self, same: bool) -> int:
        """How often all parameters together were written to. same: are all flags as they were."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        looked = self._looks.look(groups, self._held) or look(groups, self._held)
        if groups is not self._groups or state is not self._state:
            self._find("the optimizer's groups or its state are other objects (load_state_dict)")
        elif looked is None:
            self._find("the optimizer's groups have other parameters than before")
        elif not same:
            flags = list(map(_flags, groups))
            name, now = next((name, now) for one, other in zip(flags, self._flags, strict=True)
                             for name, now, before in zip(FLAGS, one, other, strict=True) if now != before)
            self._find(f"the optimizer's option {name} is {now!r} now")
        elif len(state) < self._entries:
            self._find("entries of the optimizer's state were taken away")
        if looked is None:
            self.trained = None
            return self._written()
        self.trained = looked[1]
        return int(looked[0])


def _flags(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(map(group.get, FLAGS))

