"""Step records: what trainers say of each iteration and the wire does not carry.

Every rank sends one. The first that has all that is declared counts, and later ones must say the same; where they do
not, nothing is built on either. One that comes when its iteration has closed is held against what was built with, and
refused if it says otherwise: its rank has another state than the version. Memory: a record for each iteration that may
still close, and what the last CLOSED ones said without their tensors. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from updater.step import StepValues

__all__ = ["RecordWait", "StepRecord", "StepRecords"]

CLOSED = 256  # iterations that have closed, whose records are held against those of slower ranks
WAIT_SAID = 0.5  # seconds that a record may be later than its traffic before that is said


@dataclass(frozen=True)
class StepRecord:
    """groups: hyper-parameters of the step by parameter group. clip: factor that gradients were multiplied with. scale:
    loss scale. skipped: the optimizer did nothing. checksums: 16 hexadecimal digits per model entry, after the step.
    buffers: by name, those of rank 0."""

    groups: Sequence[Mapping[str, Any]] = ()
    clip: float | None = None
    scale: float | None = None
    skipped: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)

    def values(self) -> StepValues:
        """As the updater takes them. Raises UpdaterError for values that no optimizer can use."""
        return StepValues(tuple(self.groups), self.clip, self.scale, self.skipped, buffers=self.buffers)

    def sums(self) -> dict[str, int]:
        return {name: int(text, 16) for name, text in self.checksums.items()}


class StepRecords:
    """Of one job. newest: iteration of the newest record, -1: none has come."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self._clock = clock
        self._names = {entry.name for entry in job.model}
        self._needs_buffers = any(entry.kind == "buffer" for entry in job.model)
        self._kept: dict[int, StepRecord] = {}
        self._disputed: set[int] = set()  # iterations of which ranks said different things
        self._closed: dict[int, StepRecord] = {}  # records that were built with
        self._uncounted: dict[int, StepRecord] = {}  # of ranks without what has to be kept, before one with it
        self.newest = -1

    def __contains__(self, iteration: int) -> bool:
        """Has a record of it come, whether it can be believed or not?"""
        return iteration in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, iteration: int) -> StepRecord | None:
        """The record of an iteration; None: none has come that can be believed."""
        return None if iteration in self._disputed else self._kept.get(iteration)

    def counts(self, rank: int) -> bool:
        """Are the records of this rank kept? DDP's buffers are those of rank 0."""
        return rank == 0 or not self._needs_buffers

    def since(self, oldest: int) -> int | None:
        """The first iteration, `oldest` or later, from which on no record is missing up to the newest that is kept."""
        found = None
        for iteration in sorted(self._kept, reverse=True):
            if iteration < oldest or (found is not None and iteration != found - 1):
                break
            found = iteration
        return found

    def keep(self, iteration: int, record: StepRecord, rank: int, oldest: int) -> None:
        """oldest: iterations before it have closed. Raises UserError where a record cannot be believed."""
        self.newest = max(self.newest, iteration)
        if iteration < oldest:
            if (built_with := self._closed.get(iteration)) is not None and built_with != record:
                raise self._differs(iteration, rank)
            return
        if not self.counts(rank):
            before = self._kept.get(iteration) or self._uncounted.setdefault(iteration, record)
            if before != record:
                self._disputed.add(iteration)
                raise self._differs(iteration, rank)
            return
        for name, text in record.checksums.items():
            if name not in self._names or not re.fullmatch("[0-9a-f]{16}", text):
                raise UserError(f"a checksum {text[:20]!r} of {name[:80]!r}", where=f"rank {rank}")
        if self._kept.setdefault(iteration, record) != record or self._uncounted.get(iteration, record) != record:
            self._disputed.add(iteration)
            raise self._differs(iteration, rank)

    def _differs(self, iteration: int, rank: int) -> UserError:
        return UserError(
            f"rank {rank} and another one sent different step records of iteration {self._clock.number(iteration)}",
            where=f"rank {rank}", remedy="learning rates, clipping and skipped steps that are the same on all ranks",
        )

    def forget(self, iteration: int) -> None:
        """It has closed: its record and older ones are of no more use."""
        for old in [t for t in self._kept if t <= iteration]:
            self._closed[old] = replace(self._kept.pop(old), buffers={})
        self._uncounted = {t: one for t, one in self._uncounted.items() if t > iteration}
        while len(self._closed) > CLOSED:
            del self._closed[next(iter(self._closed))]
        self._disputed &= self._kept.keys() | self._uncounted.keys()


class RecordWait:
    """How long the iteration that could close has waited for its record. seconds: how long it may."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: tuple[int, float] | None = None  # the iteration, and since when
        self._said = False

    def look(self, iteration: int, now: float) -> tuple[bool, bool]:
        """(must it wait longer, is that to be said now); now: seconds of a clock that never goes back."""
        if self._since is None or self._since[0] != iteration:
            self._since, self._said = (iteration, now), False
        waited = now - self._since[1]
        say = waited > min(WAIT_SAID, self._seconds / 2) and not self._said
        self._said |= say
        return waited < self._seconds, say
