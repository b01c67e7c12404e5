"""A version that is kept as a log: the steps since a base, redone by the optimizer that the script has made.

    logged = Logged(source, step, groups)
    logged.load(model, optimizer)           downloads and redoes, entry by entry; if it fails nothing is changed

What the wire carried becomes the gradients that the optimizer has read: `Wire` (log/record.py). Torch and the standard
library. The training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flowcheck.ask.logs import LogEntry, LogSource, OpenLog
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.model import Job
from flowcheck.trainer.describe.extra import is_extra
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.log.base import Base, BaseHead, BasePiece
from flowcheck.trainer.log.codec import record_of, unpacked
from flowcheck.trainer.log.copies import Place, TensorCopy
from flowcheck.trainer.log.record import Entry, Wire
from flowcheck.trainer.log.redo import Redone, redo

__all__ = ["Logged"]

_log = logging.getLogger("flowcheck")
_REMEDY = "step= an older one, or another node"


@dataclass(frozen=True, repr=False)
class Logged:
    """step: that is to be made. groups: options of the optimizer's groups with which the iteration after it began, as
    this rank gave them; empty: as the last step left them."""

    source: LogSource
    step: int
    groups: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Redone:
        """Raises UserError: model or optimizer are not those of the job, or cannot be redone; EnvironmentProblem: the
        log cannot be had any more, or what it makes differs from the trainer's checksums. Both are then as before."""
        held = {name: value for name, value in model.state_dict(keep_vars=True).items() if not is_extra(name)}
        with self.source.opened() as log:
            base, constants = self._base(log)
            rest = _others(log.head.job, held, base, constants)
            buffers: dict[str, torch.Tensor] = {}
            parameters = {name: held[name] for name in base.pieces if name in held}
            done = redo(parameters, optimizer, base, _entries(log, self.step, buffers), _log.info, to=self.step)
            if done.differs:
                raise EnvironmentProblem(f"step {self.step} cannot be redone: {done.differs}", where=self.source.where,
                                         remedy=_REMEDY)
        with torch.no_grad():
            for name, value in (rest | buffers).items():
                local(held[name]).copy_(value)
        for group, said in zip(optimizer.param_groups, self.groups, strict=False):
            group.update({key: value for key, value in said.items() if key != "params"})
        if done.unproven:
            _log.warning("flowcheck: step %d is redone otherwise than it was made: %s", done.step,
                         "; ".join(done.unproven))
        if done.verified is None:
            _log.warning("flowcheck: step %d is redone, and no checksum of the trainer's is in the log", done.step)
        return done

    def _base(self, log: OpenLog) -> tuple[Base, dict[str, BasePiece]]:
        """And what no optimizer steps. Raises UserError."""
        base: Base | None = None
        constants: dict[str, BasePiece] = {}
        for data in log.pieces():
            part = unpacked(data, self.source.where)
            if isinstance(part, BaseHead) and base is None:
                base = Base(part)
            elif isinstance(part, BasePiece) and base is not None:
                if part.name in base.head.names:
                    base.add(part)
                else:
                    constants[part.name] = part
            else:
                raise UserError("its base is not one: its head comes first, and then its pieces",
                                where=self.source.where, remedy=_REMEDY)
        assert base is not None  # there is a first piece
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


def _entries(log: OpenLog, step: int, buffers: dict[str, torch.Tensor]) -> Iterator[Entry]:
    """buffers: gets those of the last one."""
    job, first = log.head.job, log.head.first
    due = {one.name for one in job.model if one.kind == "buffer" and not one.tied}
    for entry in log.entries(step):
        where = f"iteration {entry.iteration} of the log"
        groups, skipped = entry.record["groups"], bool(entry.record["skipped"])
        if len(groups) != 1 or entry.buffers.keys() != due:
            raise UserError("does not say with which options its step was made, or not all buffers", where=where,
                            remedy=_REMEDY)
        stepped = record_of(groups[0], where)
        fused = stepped.grad_scale is not None  # then the optimizer itself unscales
        wire = Wire(job.gradients.divisor, None if fused else entry.record["scale"], entry.record["clip"])
        gradients = _gradients(job, entry, entry.iteration - first, where)
        buffers.clear()
        buffers |= entry.buffers
        yield Entry(
            entry.iteration, [stepped],
            {name: TensorCopy(value, Place.DEVICE) for name, value in gradients.items()}, skipped,
            entry.record["checksums"], wire,
        )


def _tensor(data: bytearray, dtype: str, where: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if len(data) % kind.itemsize:
        raise UserError(f"has {len(data)} bytes of {dtype}", where=where, remedy=_REMEDY)
    return torch.frombuffer(data, dtype=kind) if data else torch.zeros(0, dtype=kind)


def _gradients(job: Job, entry: LogEntry, iteration: int, where: str) -> dict[str, torch.Tensor]:
    """By parameter, as the wire carried them. Raises UserError: not all of it is there."""
    layout, spans = job.bucket_layout(iteration), entry.buckets
    shapes = {one.name: one.shape for one in job.model if one.kind == "optimized" and not one.tied}
    if len(layout) != len(spans):
        raise UserError(f"has {len(spans)} buckets, and {len(layout)} are described", where=where, remedy=_REMEDY)
    found = {name: torch.zeros(torch.Size(shape).numel(), dtype=getattr(torch, job.gradients.dtype))
             for name, shape in shapes.items()}
    left = {name: value.numel() for name, value in found.items()}
    for bucket, data in zip(layout, spans, strict=True):
        flat = _tensor(data, job.gradients.dtype, where)
        for one in bucket.slices:
            if one.name not in found or one.offset + one.length > len(flat):
                raise UserError(f"has a slice of {one.name!r} that is not there", where=where, remedy=_REMEDY)
            found[one.name][one.start : one.start + one.length] = flat[one.offset : one.offset + one.length]
            left[one.name] -= one.length
    if lacks := [name for name, count in left.items() if count]:
        raise UserError(f"lacks elements of {lacks[0]!r}", where=where, remedy=_REMEDY)
    return {name: value.view(shapes[name]) for name, value in found.items()}
