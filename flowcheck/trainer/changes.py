"""What a script changes besides what an iteration does, read from what torch counts and names.

    changes = Changes(optimizer, gradients, constants, names)
    changes.reduced(0)                          a backward pass is over: part 0 has reduced its gradients
    changes.compare(); ...; changes.altered()   around something that is known to change gradients (clipping, unscale_)
    changes.ready(); changes.stepped()          right before the optimizer's update, and right after it
    changes.over(1) -> Change | None            at a boundary, after so many steps: the first thing that was changed
    changes.begin()                             as things are now they are right

torch counts what is written into a tensor (`_version`), and objects have identities. So a look costs some nanoseconds a
tensor, no kernel, and no wait for a device:

    between reduction and step       gradients: the objects, and their versions
    from boundary to boundary        parameters: their versions move by what a step of this optimizer moves them, and
                                     by nothing else, and those of parameters that nobody steps not at all; the
                                     optimizer's groups, their members, options that decide how it
                                     rounds, and its state: which object, how many entries
    from a step to the next one      of WINDOW parameters, others each time: where they lie, and the objects, keys and
                                     versions of their state

What nothing counts (writing through `.data`) is left to the sample in the step records. torch and the standard library;
the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["WINDOW", "Change", "Changes", "Rule"]

WINDOW = 8  # parameters whose memory and optimizer state are looked at in one iteration
_version, _gradient, _shard = attrgetter("_version"), attrgetter("grad"), attrgetter("_local_tensor")
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
    """Of one part. held: as the last backward pass left them, until the step. whole: that pass reduced them."""

    parameters: Sequence[torch.Tensor]
    held: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    whole: bool = False
    expected: bool = False  # each iteration has such a pass, and it is heard


class _Window:
    """What some parameters and their state in the optimizer were right after a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._places = _places(parameters)
        get: Any = optimizer.state.get
        self._entries = [(one, entry, tuple(entry.values())) for one in parameters if (entry := get(one))]
        self._tensors = [value for _, _, values in self._entries for value in values if isinstance(value, torch.Tensor)]
        self._versions = _versions(self._tensors)

    def odd(self) -> str:
        """What is otherwise now, "": nothing."""
        if _places(self._parameters) != self._places:
            return "a parameter lies in other memory than the optimizer's last step left it in"
        get: Any = self._optimizer.state.get
        for one, entry, values in self._entries:
            if get(one) is not entry or len(entry) != len(values) or not all(map(is_, entry.values(), values)):
                return "the optimizer's state of a parameter is another object, or has other keys"
        if _versions(self._tensors) != self._versions:
            return "the optimizer's state was written to outside of optimizer.step()"
        return ""


class Changes:
    """optimizer: that steps. gradients: of each part of this rank the parameters whose gradients the optimizer finds as
    the wire carried them. constants: parameters that nobody steps. names: by a parameter's id, for messages.
    complete: when gradients were compared last, each parameter of the optimizer had the one that was reduced."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: Iterable[Sequence[torch.Tensor]],
        constants: Sequence[torch.Tensor], names: Mapping[int, str],
    ) -> None:
        self._optimizer, self._constants, self._names = optimizer, list(constants), names
        self._gradients = [_Gradients(list(one)) for one in gradients]
        self._moves: dict[tuple[Any, ...], int] = {}  # by options: how far one step moves the parameters' versions
        self._at = 0  # first parameter of the next window
        self.begin()

    def begin(self) -> None:
        """At a boundary: what was changed until now is no longer held against the script."""
        optimizer = self._optimizer
        self._found: Change | None = None
        self._before: int | None = None  # versions before a step whose move is not known
        self._groups, self._state, self._entries = optimizer.param_groups, optimizer.state, len(optimizer.state)
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._flags = list(map(_flags, optimizer.param_groups))
        self._parameters = list(chain.from_iterable(self._members))
        self._shards = [one for one in self._parameters if isinstance(one, DTensor)]
        self._turn_window()
        self._versions, self._kept = self._written(), _versions(self._constants)
        self._drop()
        heard = {id(one) for each in self._gradients for one in each.parameters}
        self._all_heard = heard == set(map(id, self._parameters))
        self.complete = False

    def _written(self) -> int:
        """How often all parameters together were written to."""
        return sum(map(_version, self._parameters)) + sum(map(_version, map(_shard, self._shards)))

    def _drop(self) -> None:
        """A gradient that is held takes memory."""
        for one in self._gradients:
            one.held, one.versions, one.whole = [], [], False

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
        one.held, one.whole = list(map(_gradient, one.parameters)), whole
        one.versions = _versions(one.held)

    def compare(self) -> None:
        """Are gradients as they were left by the last backward pass, and by what is known?"""
        self.complete = self._all_heard
        for one in self._gradients:
            if not one.held:  # no backward pass was seen since the last step
                self.complete &= not one.parameters
                continue
            now = list(map(_gradient, one.parameters))
            if all(map(is_, now, one.held)):
                versions = _versions(now)
                odd = [a != b for a, b in zip(versions, one.versions, strict=True)] if versions != one.versions else []
            else:
                odd = [a is not b for a, b in zip(now, one.held, strict=True)]
            self.complete &= not odd and -1 not in one.versions
            if odd:
                first = self._names.get(id(one.parameters[odd.index(True) % len(one.parameters)]), "one")
                self._find(f"gradients ({first} first) were changed between their reduction and the optimizer's step",
                           Rule.REFUSED, gradients=True)

    def altered(self) -> None:
        """Gradients were changed by something that is known; `compare` came right before that."""
        for one in self._gradients:
            one.versions = _versions(one.held)

    # -- the step --

    def expect(self, part: int, expected: bool) -> None:
        """From the next iteration on each has a backward pass that is heard of."""
        self._gradients[part].expected = expected and bool(self._gradients[part].parameters)

    def ready(self) -> None:
        """Right before the update, with the gradients that it takes."""
        self.compare()
        if any(one.expected and not one.held for one in self._gradients):
            self._find("the optimizer stepped with gradients that no backward pass of this iteration has reduced: is"
                       " attachment.step() called before optimizer.step()?", Rule.REFUSED)
        self._look_through_window()
        self._before = self._written() if self._options() not in self._moves else None

    def stepped(self) -> None:
        """Right after the update."""
        if self._before is not None:
            self._moves[self._options()] = self._written() - self._before
            self._before = None
        self._drop()
        self._turn_window()

    def _turn_window(self) -> None:
        self._window = _Window(self._optimizer, self._parameters[self._at : self._at + WINDOW])
        self._at = self._at + WINDOW if self._at + WINDOW < len(self._parameters) else 0

    def _options(self) -> tuple[Any, ...]:
        """What decides how often a step writes to a parameter."""
        return tuple(
            (bool(group.get("weight_decay")), bool(group.get("momentum")), len(group["params"]), *_flags(group))
            for group in self._optimizer.param_groups
        )

    def _look_through_window(self) -> None:
        if odd := self._window.odd():
            self._find(odd)

    # -- the boundary --

    def over(self, steps: int) -> Change | None:
        """steps: of the optimizer since the last boundary, as its hooks were called. A change is said once; then
        `begin` has to be called before the next iteration, or what follows from it is found again."""
        self._look_at_groups()
        if self._found is None:
            self._look_through_window()
        written, due = self._written(), self._versions + steps * self._moves.get(self._options(), 0)
        if self._found is None and written != due:
            self._find("parameters were written to outside of optimizer.step()" if steps else
                       "parameters were written to, and optimizer.step() was not heard")
        if self._found is None and _versions(self._constants) != self._kept:
            self._find("parameters that no optimizer steps were written to (an average of weights is followed as a"
                       " registered buffer)")
        self._versions, self._entries = written, len(self._state)
        self._drop()
        found, self._found = self._found, None
        return found

    def _look_at_groups(self) -> None:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if groups is not self._groups or state is not self._state:
            self._find("the optimizer's groups or its state are other objects (load_state_dict)")
        elif len(groups) != len(self._members) or not all(map(_same_members, groups, self._members)):
            self._find("the optimizer's groups have other parameters than before")
        elif (flags := list(map(_flags, groups))) != self._flags:
            name, now = next((name, now) for one, other in zip(flags, self._flags, strict=True)
                             for name, now, before in zip(FLAGS, one, other, strict=True) if now != before)
            self._find(f"the optimizer's option {name} is {now!r} now")
        elif len(state) < self._entries:
            self._find("entries of the optimizer's state were taken away")


def _flags(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(map(group.get, FLAGS))


def _same_members(group: Mapping[str, Any], before: Sequence[torch.Tensor]) -> bool:
    return len(group["params"]) == len(before) and all(map(is_, group["params"], before))


def _versions(tensors: Sequence[Any]) -> list[int]:
    """How often each was written to, -1 of None; of shards both the whole's count and the shard's."""
    try:
        found = list(map(_version, tensors))
    except AttributeError:
        return [-1 if one is None else one._version for one in tensors]
    if tensors and isinstance(tensors[0], DTensor):
        found += [one._local_tensor._version for one in tensors if isinstance(one, DTensor)]
    return found


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [(one._local_tensor if isinstance(one, DTensor) else one).data_ptr() for one in tensors]
