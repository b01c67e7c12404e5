"""Steps made again by the trainer's own optimizer, on its own device: a base, and the log's entries since.

    redone = redo(parameters, optimizer, base, entries, say)
    redone.step, redone.verified, redone.differs, redone.matched

For each iteration: parameters that the base has of just this step are put in place (value and state), the optimizer's
options are those of the record and no others, gradients are as it had them (None where it had none, or where the
parameter has not begun), and `optimizer.step()` is called, unless the step was skipped. Hooks of the script are not
called: what they change in gradients is in the log already.

State is assigned into `optimizer.state`; `load_state_dict` would change types. Where anything fails, parameters, state,
options and gradients are left as they were. torch and the standard library. The training thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import optimizer as all_optimizers

from flowcheck.control.checksum import begin_checksums
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.trainer.describe.optimizers import members, parameters_of, refresh
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.base import Base, BasePiece, Made, groups_of
from flowcheck.trainer.log.copies import live
from flowcheck.trainer.log.record import Entry, StepRecord, set_options
from flowcheck.trainer.log.refusals import coupled, refused
from flowcheck.trainer.log.summed import summed

__all__ = ["Before", "Redone", "redo"]

SAY_SECONDS = 5.0  # between two lines of progress
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_SCALER = ("grad_scale", "found_inf")


@dataclass(frozen=True)
class Redone:
    """What came of it.

    step: iterations done, as the state has them.
    verified: the newest step whose checksums, of all parameters, are those of the trainer; None: no entry had them.
    differs: the first tensor whose checksum is another, and after which step; or which entry cannot be had, and why;
        "" otherwise. Model and optimizer are then as they were before.
    matched: all steps whose checksums, of all parameters, are those of the trainer, up to there.
    unproven: what is otherwise than where the steps were first made, and may round otherwise.
    calls: of `optimizer.step()`.
    seconds: that it took.
    """

    step: int
    verified: int | None
    differs: str
    unproven: tuple[str, ...]
    calls: int
    seconds: float
    matched: tuple[int, ...] = ()


def redo(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, base: Base, entries: Iterable[Entry],
    say: Callable[[str], None], *, to: int | None = None, before: Before | None = None,
) -> Redone:
    """parameters: by the names of the base, as the optimizer has them.
    entries: of iterations base.first and later, in order; read one at a time. Where that raises a FlowcheckError, the
        redo ends as where a checksum differs.
    say: a line of the log.
    to: the step to make; None: as far as the entries go. Options are then as its last step has left them: schedules
        change them after that.
    before: model and optimizer as they are to be left where it fails; None: as they are now.

    Raises UserError, and leaves model and optimizer as they were: the base is not whole or of another optimizer or
    model, an entry is missing or lacks a gradient, or the optimizer is one that cannot be redone."""
    begun = time.monotonic()
    unproven = _check(parameters, optimizer, base)
    last = base.last if to is None else to
    if last < base.last:
        raise UserError(f"step {to} lies before the base, which is whole from step {base.last} on", where="redo",
                        remedy="an older base")
    run = _Run(parameters, optimizer, base)
    before = before or Before(parameters, optimizer)
    spoken = begun
    try:
        with _quiet(optimizer), _threads(base.head.made.threads):
            run.begin()
            for entry in _had(entries, run):
                if to is not None and run.step >= to:
                    break
                run.make(entry)
                if run.differs:
                    break
                if time.monotonic() - spoken > SAY_SECONDS:
                    spoken = time.monotonic()
                    say(f"redone to step {run.step}" + (f" of {to}" if to is not None else ""))
            if not run.differs:
                run.end(last)
    except BaseException:
        before.restore()
        raise
    seconds = time.monotonic() - begun
    if run.differs:
        before.restore()
        say(f"the redo from step {base.first} is not used: {run.differs}")
    else:
        before.give_gradients()
        said = f"as the trainer's checksums at step {run.verified}" if run.verified is not None else "not verified"
        say(f"redone from step {base.first} to {run.step}: {run.calls} steps in {seconds:.2f} s, {said}")
    return Redone(run.step, None if run.differs else run.verified, run.differs, unproven, run.calls, seconds,
                  tuple(run.matched))


def _had(entries: Iterable[Entry], run: _Run) -> Iterator[Entry]:
    """Until one cannot be had."""
    try:
        yield from entries
    except FlowcheckError as error:
        run.differs = f"iteration {run.step} cannot be had: {error.what}"


def _check(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, base: Base
) -> tuple[str, ...]:
    """Raises UserError for what can be seen before anything is changed."""
    at_once = base.whole and base.first == base.last
    if (error := refused(optimizer, parameters, at_once=at_once)) is not None:
        raise error
    if base.head.others and base.first != base.last:
        raise UserError("has state of all parameters together, and pieces of several steps", where="base",
                        remedy="a base of all parameters at once")
    if not base.whole:
        raise UserError(f"has {len(base.pieces)} of {len(base.head.names)} parameters", where="base",
                        remedy="an older base, which is whole")
    here, made = Made.by(optimizer), base.head.made
    if here.optimizer != made.optimizer:
        raise UserError(f"is of {made.optimizer}, and here is {here.optimizer}", where="base",
                        remedy="the optimizer of the job that made it")
    if here.device.partition(" ")[0] != made.device.partition(" ")[0]:
        raise UserError(f"is of parameters on {made.device}, and here they are on {here.device}", where="base",
                        remedy="the device that the steps were made on: others round otherwise")
    if parameters.keys() != base.pieces.keys():
        lost = sorted(parameters.keys() ^ base.pieces.keys())[0]
        where = "here" if lost in parameters else "in the base"
        raise UserError(f"{lost!r} is only {where}", where="base", remedy="the model of the job that made it")
    in_order = bool(base.head.others or coupled(optimizer))
    _check_groups(groups_of(optimizer, parameters), base.head.groups, in_order)
    for name, piece in base.pieces.items():
        held, value = local(parameters[name]), piece.value.tensor
        if held.shape != value.shape or held.dtype != value.dtype:
            raise UserError(f"{name!r} is {value.dtype} {list(value.shape)}, and here {held.dtype} {list(held.shape)}",
                            where="base", remedy="the model of the job that made it, sharded as it was")
    pairs = (("the optimizer's module", made.module, here.module), ("torch", made.version, here.version),
             ("device", made.device, here.device),
             ("precision of matmul", made.matmul, here.matmul))
    return tuple(f"{what} was {was}, and is {now}" for what, was, now in pairs if was != now)


def _check_groups(here: list[list[str]], made: list[list[str]], in_order: bool) -> None:
    """Each group has options of its own. in_order: the optimizer adds something up over its parameters. Raises
    UserError."""
    if len(here) != len(made):
        raise UserError(f"has {len(made)} parameter groups, and here are {len(here)}", where="base",
                        remedy="the groups that the job had")
    for number, (mine, theirs) in enumerate(zip(here, made, strict=True)):
        if odd := sorted({*mine} ^ {*theirs}):
            where = "here" if odd[0] in mine else "in the base"
            raise UserError(f"group {number} has {odd[0]!r} only {where}", where="base",
                            remedy="the groups that the job had, with the same parameters")
        if in_order and mine != theirs:
            raise UserError(f"group {number} has its parameters in another order", where="base",
                            remedy="the groups that the job had, in their order")


class _Run:
    """step: iterations done. calls: of the optimizer. matched, differs: as of Redone."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, base: Base
    ) -> None:
        self._parameters, self._optimizer, self._base = parameters, optimizer, base
        self._all = parameters_of(optimizer)
        self._begin: dict[int, list[BasePiece]] = {}
        for piece in base.pieces.values():
            self._begin.setdefault(piece.step, []).append(piece)
        self._begun: set[str] = set()
        self.step, self.calls = base.first, 0
        self.matched: list[int] = []
        self.differs = ""

    @property
    def verified(self) -> int | None:
        return self.matched[-1] if self.matched else None

    def begin(self) -> None:
        """All pieces, for optimizers that look at the state of parameters without a gradient, too. One that begins
        later is put in place again then, and what they have made of it until then is dropped."""
        for piece in self._base.pieces.values():
            self._put(piece)
        state: Any = self._optimizer.state
        known = {id(one) for one in self._all}
        for key in [key for key in state if id(key) not in known]:
            del state[key]
        for key, value in self._base.head.others.items():
            state[key] = live(value, next(iter(self._parameters.values())))
        self._start()

    def make(self, entry: Entry) -> None:
        if entry.iteration != self.step:
            raise UserError(f"iteration {self.step} is missing; after it comes {entry.iteration}", where="log",
                            remedy="an older step, or a newer base")
        each = members(self._optimizer)
        if len(entry.calls) != len(each) and (entry.calls or not entry.skipped):
            raise UserError(f"has {len(entry.calls)} steps of optimizers, and here are {len(each)}",
                            where=f"iteration {entry.iteration} of the log", remedy="the optimizers that the job had")
        # A fused optimizer is called on a skipped step, too.
        calls = [(one, call) for one, call in zip(each, entry.calls, strict=False)
                 if not entry.skipped or call.found_inf is not None]
        if calls:
            self._give(entry)
        for one, call in calls:
            set_options(one.param_groups, call.options)
            with self._scaler(one, call):
                one.step()
            self.calls += 1
        self.step += 1
        self._compare(entry)
        self._start()

    def end(self, last: int) -> None:
        if self.step < last:
            raise UserError(f"ends before iteration {self.step}, and step {last} is to be made", where="log",
                            remedy="an older step, or an older base")

    def _start(self) -> None:
        for piece in self._begin.pop(self.step, ()):
            if piece.step != self._base.first:
                self._put(piece)
            self._begun.add(piece.name)

    def _put(self, piece: BasePiece) -> None:
        parameter = self._parameters[piece.name]
        with torch.no_grad():
            local(parameter).copy_(piece.value.tensor)
        if piece.state is None:
            self._optimizer.state.pop(parameter, None)
        else:
            self._optimizer.state[parameter] = live(piece.state, parameter)

    def _give(self, entry: Entry) -> None:
        """Gradients."""
        for parameter in self._all:
            parameter.grad = None
        for name in self._begun:
            parameter = self._parameters[name]
            gradient = entry.gradient(name, parameter)
            if gradient is not None and gradient.dtype != parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient

    @contextlib.contextmanager
    def _scaler(self, optimizer: torch.optim.Optimizer, record: StepRecord) -> Iterator[None]:
        hung = {name: value for name in _SCALER if (value := getattr(record, name)) is not None}
        for name, value in hung.items():
            setattr(optimizer, name, live(value, next(iter(self._parameters.values()))))
        try:
            yield
        finally:
            for name in hung:
                delattr(optimizer, name)

    def _compare(self, entry: Entry) -> None:
        """With the trainer's checksums, of what has begun."""
        if not entry.checksums:
            return
        refresh(self._optimizer)
        here = begin_checksums(summed(self._parameters, self._optimizer, self._begun)).get()
        said = [name for name in here if name in entry.checksums]
        for name in said:
            if f"{here[name]:016x}" != entry.checksums[name]:
                self.differs = f"the checksum of {name} after step {self.step} is not the trainer's"
                return
        if len(said) == len(here) and len(self._begun) == len(self._parameters):
            self.matched.append(self.step)


class Before:
    """Model and optimizer as they were. State is kept by reference: a redo puts other objects in its place."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [(one, local(one).detach().clone()) for one in parameters.values()]
        self._gradients = [(one, one.grad, getattr(one, "grad_dtype", None))
                           for one in parameters_of(optimizer)]
        self._state = dict(optimizer.state)
        self._groups = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._values:
                local(parameter).copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        groups, held = self._groups
        for group, options in zip(groups, held, strict=True):
            group.clear()
            group |= options
        self._optimizer.param_groups = groups
        self.give_gradients()

    def give_gradients(self) -> None:
        for parameter, gradient, dtype in self._gradients:
            parameter.grad = None
            if dtype is not None and parameter.grad_dtype != dtype:
                parameter.grad_dtype = dtype
            parameter.grad = gradient


@contextlib.contextmanager
def _quiet(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Without hooks of steps: the optimizer's, and those that torch has for all of them."""
    places: list[tuple[Any, str]] = [(one, name) for one in members(optimizer) for name in _HOOKS]
    places += [(all_optimizers, one) for one in _GLOBAL]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
    for owner, name, _ in kept:
        setattr(owner, name, OrderedDict())
    try:
        yield
    finally:
        for owner, name, hooks in kept:
            setattr(owner, name, hooks)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """On a CPU sums and 16-bit steps depend on them. number: 0: they do not matter."""
    here = torch.get_num_threads()
    if number and number != here:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch.get_num_threads() != here:
            torch.set_num_threads(here)
