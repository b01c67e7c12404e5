"""A version that is kept as a log: the steps since a base, redone by the optimizer that the script has made.

    logged = Logged(sources, step, groups, together)
    loaded = logged.load(entries, optimizer, fits)  downloads and redoes, entry by entry; if it fails nothing is changed

A source is one base with the entries since then. The first that makes `step` is taken, if no checksum differs. Where a
rank has none, all ranks go back to the newest step that was as the trainer's checksums on the way on each of them: its
redo is made again, and its checksums are compared again.

What the wire carried becomes the gradients that the optimizer has read: `Wire` (log/record.py). Torch and the standard
library. The training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowcheck.ask.logs import LogEntry, LogSource, OpenLog
from flowcheck.ask.receiving import AskError
from flowcheck.ask.sources import when_free
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.model import Job
from flowcheck.trainer.describe.optimizers import members, parameters_of
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.base import Base, BaseHead, BasePiece
from flowcheck.trainer.log.codec import record_of, unpacked
from flowcheck.trainer.log.copies import Place, TensorCopy
from flowcheck.trainer.log.record import Entry, Wire
from flowcheck.trainer.log.redo import Before, Redone, redo
from flowcheck.trainer.recover.own import Given, given_of, own_state
from flowcheck.trainer.recover.statements import check_no_errors, error_text, lacking
from flowcheck.trainer.recover.together import Ranks

__all__ = ["Loaded", "Logged", "Together"]

_log = logging.getLogger("flowcheck")
_REMEDY = "step= an older one, or another node"
MOST_SAID = 1 << 12  # steps that a rank says it could go back to


@dataclass(frozen=True)
class Together:
    """What `recover` was called with. own, as_many: whose own states are taken, as of own_state. only: the step was
    asked for by its number, and no other will do."""

    ranks: Ranks
    own: int | None
    as_many: bool
    shard: str
    only: bool


@dataclass(frozen=True)
class Loaded:
    """step: that was made. verified, unproven: as of Redone. why: it was not made of the first source, or is not the
    step that was chosen: then `given` is what this rank gave of itself with it."""

    step: int
    verified: int | None
    unproven: tuple[str, ...]
    why: str = ""
    given: Given | None = None


@dataclass(frozen=True)
class _Made:
    """What came of one source. done: None: nothing was redone. values: of what no optimizer steps. why: it is not to be
    used; "": it is in place. steps: that can be made of it."""

    why: str
    done: Redone | None = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    steps: range = range(0)


@dataclass
class _Tried:
    """left: sources that were not tried. made: by the first that made the step; None: by none. whys: of those before
    it. back: sources of each step that was as the trainer's checksums on the way."""

    left: list[LogSource]
    made: _Made | None = None
    whys: list[str] = field(default_factory=list)
    back: dict[int, list[LogSource]] = field(default_factory=dict)

    def note(self, source: LogSource, made: _Made) -> None:
        for step in made.done.matched if made.done is not None else ():
            if step in made.steps:
                self.back.setdefault(step, []).append(source)


@dataclass(frozen=True, repr=False)
class Logged:
    """sources: in the order in which they are tried. step: that is to be made. groups: options of the optimizer's
    groups with which the iteration after it began, as this rank gave them; empty: as the last step left them."""

    sources: Sequence[LogSource]
    step: int
    groups: Sequence[Mapping[str, Any]]
    together: Together

    def load(
        self, entries: Mapping[str, Any], optimizer: torch.optim.Optimizer, fits: Callable[[int, Given], None]
    ) -> Loaded:
        """entries: tensors of the model's state_dict, parameters as the optimizer has them. fits: raises where the
        script cannot go on with an older step, and with what its rank gave then.

        Raises UserError: model or optimizer are not those of the job, or cannot be redone; EnvironmentProblem: the
        log cannot be had any more, or what it makes differs from the trainer's checksums, and no step to go back to
        was verified. Both are then as before."""
        work = _Work(entries, optimizer)
        try:
            tried = self._on_all(lambda: self._try(work))
            said = self.together.ranks.exchange({"made": tried.made is not None, "whys": tried.whys})
            check_no_errors(said)
            if tried.made is not None and all(one["made"] for one in said):
                loaded, values = self._loaded(tried.made, tried.whys), tried.made.values
                groups = self.groups
            else:
                loaded, values = self._back(work, tried, said)
                assert loaded.given is not None
                fits(loaded.step, loaded.given)
                groups = loaded.given.groups
        except BaseException:
            work.restore()
            raise
        work.finish(values, groups)
        self._say(loaded)
        return loaded

    def _on_all(self, do: Callable[[], Any]) -> Any:
        """Nobody waits for a rank that has given up."""
        try:
            with self.together.ranks.busy():
                return do()
        except Exception as error:
            self.give_up(error)
            raise

    def give_up(self, error: Exception) -> None:
        """To be called where `load` will not be: the other ranks hear of it."""
        with suppress(EnvironmentProblem):
            self.together.ranks.exchange({"wrong": error_text(error)})

    def _try(self, work: _Work) -> _Tried:
        tried = _Tried(list(self.sources))
        while tried.left and tried.made is None:
            source = tried.left.pop(0)
            tried.note(source, made := work.make(source, self.step))
            if made.why:
                tried.whys.append(made.why)
            else:
                tried.made = made
        return tried

    def _try_the_rest(self, work: _Work, tried: _Tried) -> None:
        for source in tried.left:
            tried.note(source, work.make(source, self.step))

    def _back(
        self, work: _Work, tried: _Tried, said: Sequence[Mapping[str, Any]]
    ) -> tuple[Loaded, Mapping[str, torch.Tensor]]:
        """To the newest step that every rank has seen verified. Raises EnvironmentProblem."""
        whys = "; ".join(sorted({why for one in said for why in one["whys"]}))
        self._on_all(lambda: self._try_the_rest(work, tried))  # another rank may have made it of none
        said = self.together.ranks.exchange({"steps": sorted(tried.back)[-MOST_SAID:]})
        check_no_errors(said)
        steps = set.intersection(*(set(one["steps"]) for one in said))
        step, where = max(steps, default=None), self.sources[0].where
        if step is None or self.together.only:
            older = f"; step {step} is as the trainer's checksums" if step is not None else ""
            raise EnvironmentProblem(f"step {self.step} cannot be redone: {whys}{older}", where=where,
                                     remedy=f"step={step}" if step is not None else _REMEDY)
        source = tried.back[step][0]
        source = LogSource(source.node, replace(source.offer, step=step))
        made, state, why_none = self._on_all(lambda: (work.make(source, step), *self._own(source)))
        why = made.why or ("" if made.done.verified == step else "its checksums were not there again")
        said = self.together.ranks.exchange({
            "why": why, "own": self.together.own, "has": bool(state), "missing": dict(state.get("missing", {}))})
        check_no_errors(said)
        if again := [one["why"] for one in said if one["why"]]:
            raise EnvironmentProblem(f"step {self.step} cannot be redone: {whys}; nor can step {step}: {again[0]}",
                                     where=where, remedy=_REMEDY)
        given = given_of(state, lacking(said, self.together.own, state, why_none), self.together.shard,
                         self.together.own)
        loaded = self._loaded(made, [f"step {self.step} cannot be redone, so this is step {step}, the newest that is as"
                                     f" the trainer's checksums: {whys}"])
        return replace(loaded, step=step, given=given), made.values

    def _own(self, source: LogSource) -> tuple[dict[str, Any], str]:
        """What this rank gave of itself with that step; {}: nothing, and why."""
        own = self.together.own
        if own is None:
            return {}, ""
        try:
            return own_state(source.node.user(source.offer, own), own, self.together.as_many)
        except AskError as error:
            return {}, f"{source.where}: {error.what}"
        finally:
            source.node.close()

    def _loaded(self, made: _Made, whys: Sequence[str]) -> Loaded:
        assert made.done is not None
        return Loaded(self.step, made.done.verified, made.done.unproven, "; ".join(whys))

    def _say(self, loaded: Loaded) -> None:
        if loaded.why:
            _log.warning("flowcheck: %s", loaded.why)
        if loaded.unproven:
            _log.warning("flowcheck: step %d is redone otherwise than it was made: %s", loaded.step,
                         "; ".join(loaded.unproven))
        if loaded.verified is None:
            _log.warning("flowcheck: step %d is redone, and no checksum of the trainer's is in the log", loaded.step)


class _Work:
    """Model and optimizer, as they were when it began and as they are made."""

    def __init__(self, entries: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        self._held = entries
        self._optimizer = optimizer
        stepped = set(map(id, parameters_of(optimizer)))
        self._before = Before({name: one for name, one in self._held.items() if id(one) in stepped}, optimizer)

    def restore(self) -> None:
        self._before.restore()

    def make(self, source: LogSource, step: int) -> _Made:
        """Where it is not to be used all is as it was before. Raises UserError: it is of another model or optimizer."""
        where = source.where
        try:
            when_free(source.node, source.head)
            with source.opened() as log:
                base, constants = _base(log, where)
                where = f"{where}, from the base of step {base.last}"
                rest = _others(log.head.job, self._held, base, constants)
                buffers: dict[str, torch.Tensor] = {}
                parameters = {name: self._held[name] for name in base.pieces if name in self._held}
                entries = _entries(log, step, buffers, self._held, len(members(self._optimizer)))
                done = redo(parameters, self._optimizer, base, entries, _log.info, to=step, before=self._before)
        except AskError as error:
            return _Made(f"{where}: {error.what}")
        return _Made(f"{where}: {done.differs}" if done.differs else "", done, rest | buffers, log.head.steps)

    def finish(self, values: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                local(self._held[name]).copy_(value)
        for group, said in zip(self._optimizer.param_groups, groups, strict=False):
            group.update({key: value for key, value in said.items() if key != "params"})


def _base(log: OpenLog, where: str) -> tuple[Base, dict[str, BasePiece]]:
    """And what no optimizer steps. Raises AskError."""
    base: Base | None = None
    constants: dict[str, BasePiece] = {}
    for data in log.pieces():
        try:
            part = unpacked(data, where)
            if isinstance(part, BasePiece) and base is not None and part.name in base.head.names:
                base.add(part)
                continue
        except UserError as error:
            raise AskError(f"its base is damaged: {error.what}", where=where) from None
        if isinstance(part, BaseHead) and base is None:
            base = Base(part)
        elif isinstance(part, BasePiece) and base is not None:
            constants[part.name] = part
        else:
            raise AskError("its base is not one: its head comes first, and then its pieces", where=where)
    if base is None or not base.whole:
        raise AskError("its base is not whole", where=where)
    return base, constants


def _others(
    job: Job, held: Mapping[str, Any], base: Base, constants: Mapping[str, BasePiece]
) -> dict[str, torch.Tensor]:
    """Values of entries that no optimizer steps, of a base. Raises UserError: the model has others."""
    others = {entry.name for entry in job.model if entry.tied or entry.kind == "buffer"}
    due = others | base.pieces.keys() | constants.keys()
    if odd := sorted(due ^ held.keys()):
        where = "the log" if odd[0] in due else "this model"
        raise _other_model(f"{odd[0]!r} is only in {where}")
    for entry in job.model:
        here = local(held[entry.name])
        said, is_here = (entry.dtype, list(entry.shape)), (str(here.dtype).removeprefix("torch."), list(here.shape))
        if said != is_here:
            raise _other_model(f"{entry.name!r} is {said[0]} {said[1]}, and here {is_here[0]} {is_here[1]}")
    _check_ties(job, held)
    for name, piece in constants.items():
        if tuple(local(held[name]).shape) != tuple(piece.value.tensor.shape):
            raise _other_model(f"{name!r} has another shape")
    return {name: piece.value.tensor for name, piece in constants.items()}


def _check_ties(job: Job, held: Mapping[str, Any]) -> None:
    """What a step writes is all that it writes. Raises UserError."""
    stepped = {id(held[entry.name]): entry.name for entry in job.model if entry.kind == "optimized" and not entry.tied}
    for entry in job.model:
        here = stepped.get(id(held[entry.name]), "")
        was = entry.tied or (entry.name if entry.kind == "optimized" else "")
        if here != was:
            said, is_here = (f"is stepped as {one!r}" if one else "is not stepped" for one in (was, here))
            raise _other_model(f"{entry.name!r} {said}, and here it {is_here}")


def _other_model(what: str) -> UserError:
    return UserError(what, where="recover", remedy="the model of the job that made it")


def _entries(
    log: OpenLog, step: int, buffers: dict[str, torch.Tensor], held: Mapping[str, Any], optimizers: int
) -> Iterator[Entry]:
    """buffers: gets those of the last one. held: what they go into. optimizers: that step."""
    job, first = log.head.job, log.head.first
    due = {one.name for one in job.model if one.kind == "buffer" and not one.tied}
    memory: dict[str, torch.Tensor] = {}
    for entry in log.entries(step):
        where = f"iteration {entry.iteration} of the log"
        groups, skipped = entry.record["groups"], bool(entry.record["skipped"])
        if len(groups) != optimizers or entry.buffers.keys() != due:
            raise UserError(f"says with which options {len(groups)} optimizers stepped, and here are {optimizers}; or"
                            " not all buffers", where=where, remedy=f"the optimizers that the job had; {_REMEDY}")
        if odd := [name for name, value in entry.buffers.items() if value.shape != local(held[name]).shape]:
            raise UserError(f"has buffer {odd[0]!r} in another shape", where=where, remedy=_REMEDY)
        stepped = [record_of(one, where) for one in groups]
        fused = any(one.grad_scale is not None for one in stepped)  # then the optimizer itself unscales
        wire = Wire(job.gradients.divisor, None if fused else entry.record["scale"], entry.record["clip"])
        gradients = _gradients(job, entry, entry.iteration - first, memory, where)
        buffers.clear()
        buffers |= entry.buffers
        yield Entry(
            entry.iteration, stepped,
            {name: TensorCopy(value, Place.SHARD if isinstance(held[name], DTensor) else Place.DEVICE)
             for name, value in gradients.items()}, skipped,
            entry.record["checksums"], wire,
        )


def _tensor(data: bytearray, dtype: str, where: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if len(data) % kind.itemsize:
        raise UserError(f"has {len(data)} bytes of {dtype}", where=where, remedy=_REMEDY)
    return torch.frombuffer(data, dtype=kind) if data else torch.zeros(0, dtype=kind)


def _gradients(
    job: Job, entry: LogEntry, iteration: int, memory: dict[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """By parameter, as the wire carried them, until the next entry is read. memory: kept for those that lie in several
    slices, all of it is written. Raises UserError: not all of it is there."""
    layout, spans = job.bucket_layout(iteration), entry.buckets
    shapes = {one.name: one.shape for one in job.model if one.kind == "optimized" and not one.tied}
    if len(layout) != len(spans):
        raise UserError(f"has {len(spans)} buckets, and {len(layout)} are described", where=where, remedy=_REMEDY)
    kind = getattr(torch, job.gradients.dtype)
    totals = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    found = {name: torch.zeros(0, dtype=kind) for name, total in totals.items() if not total}
    left = dict(totals)
    for bucket, data in zip(layout, spans, strict=True):
        flat = _tensor(data, job.gradients.dtype, where)
        for one in bucket.slices:
            if one.name not in totals or one.offset + one.length > len(flat):
                raise UserError(f"has a slice of {one.name!r} that is not there", where=where, remedy=_REMEDY)
            part = flat[one.offset : one.offset + one.length]
            if one.length == totals[one.name]:
                found[one.name] = part
            else:
                if one.name not in memory:
                    memory[one.name] = torch.zeros(totals[one.name], dtype=kind)
                found[one.name] = memory[one.name]
                found[one.name][one.start : one.start + one.length] = part
            left[one.name] -= one.length
    if lacks := [name for name, count in left.items() if count]:
        raise UserError(f"lacks elements of {lacks[0]!r}", where=where, remedy=_REMEDY)
    return {name: value.view(shapes[name]) for name, value in found.items()}
