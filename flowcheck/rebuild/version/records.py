"""Step records: what trainers say of each iteration and the wire does not carry.

Every rank sends one. The first that has all that is declared counts, and later ones must say the same; where they do
not, nothing is built on either. Where the model has buffers those of rank 0 count, and what other ranks say of all else
must be the same all the same. A record that comes when its iteration has closed is held against what was built with,
and refused if it says otherwise: its rank has another state than the version. Memory: a record for each iteration that
may still close, and what the last CLOSED ones said without their tensors. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import LOG, Job
from flowcheck.job.sampling import KEYS, Sample, state_name
from flowcheck.rebuild.version.sampled import Sampled
from updater.step import StepValues

__all__ = ["RanksDiffer", "RecordWait", "StepRecord", "StepRecords"]

CLOSED = 256  # iterations that have closed, whose records are held against those of slower ranks
WAIT_SAID = 0.5  # seconds that a record may be later than its traffic before that is said


class RanksDiffer(UserError):
    """Two ranks said different things of one iteration. closed: it had been built with what one of them said."""

    closed = False


@dataclass(frozen=True)
class StepRecord:
    """groups: hyper-parameters of the step by parameter group. clip: factor that gradients were multiplied with. scale:
    loss scale. skipped: the optimizer did nothing. checksums: 16 hexadecimal digits per model entry, and per tensor of
    the optimizer's state, after the step; empty: not of this one. sample: some of their elements, "": none. buffers: by
    name, those of rank 0."""

    groups: Sequence[Mapping[str, Any]] = ()
    clip: float | None = None
    scale: float | None = None
    skipped: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    sample: str = ""

    def values(self) -> StepValues:
        """As the updater takes them. Raises UpdaterError for values that no optimizer can use."""
        return StepValues(tuple(self.groups), self.clip, self.scale, self.skipped, buffers=self.buffers)

    def sums(self) -> dict[str, int]:
        return {name: int(text, 16) for name, text in self.checksums.items()}


class StepRecords:
    """Of one job. newest: iteration of the newest record, -1: none has come."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self._clock = clock
        self.sampled = Sampled(job)
        self._names = {entry.name for entry in job.model}
        self._names |= {state_name(entry.name, key) for entry in job.model if entry.kind == "optimized" for key in KEYS}
        self._buffers = {entry.name for entry in job.model if entry.kind == "buffer"}
        self._logged = job.kind == LOG  # whose optimizer keeps whatever it likes
        self._kept: dict[int, StepRecord] = {}
        self._common: dict[int, StepRecord] = {}  # what all ranks have said, without their buffers
        self._disputed: set[int] = set()  # iterations of which ranks said different things
        self._closed: dict[int, StepRecord] = {}  # the same of iterations that have closed
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
        return rank == 0 or not self._buffers

    def since(self, oldest: int) -> int | None:
        """The first iteration, `oldest` or later, from which on no record is missing up to the newest that is kept."""
        found = None
        for iteration in sorted(self._kept, reverse=True):
            if iteration < oldest or (found is not None and iteration != found - 1):
                break
            found = iteration
        return found

    def after(self, iteration: int) -> range:
        """From the first to the last one behind `iteration` of which a record is kept."""
        kept = [one for one in self._kept if one > iteration]
        return range(min(kept), max(kept) + 1) if kept else range(0)

    def keep(self, iteration: int, record: StepRecord, rank: int, oldest: int) -> None:
        """oldest: iterations before it have closed. Raises UserError where a record cannot be believed."""
        self.newest = max(self.newest, iteration)
        if iteration < oldest:
            before = self._closed.get(iteration)
            if before is not None and _both(before, self._without_buffers(record)) is None:
                error = self._differs(iteration, rank)
                error.closed = True
                raise error
            return
        if record not in (self._kept.get(iteration), self._common.get(iteration)):  # else all of it was looked at
            self._check(iteration, record, f"rank {rank}")
        self._agree(self._common, iteration, self._without_buffers(record), rank)
        if self.counts(rank):
            self._agree(self._kept, iteration, record, rank)

    def _agree(self, said: dict[int, StepRecord], iteration: int, record: StepRecord, rank: int) -> None:
        before = said.get(iteration)
        both = record if before is None else _both(before, record)
        if both is None:
            self._disputed.add(iteration)
            raise self._differs(iteration, rank)
        said[iteration] = both

    def _differs(self, iteration: int, rank: int) -> RanksDiffer:
        return RanksDiffer(
            f"rank {rank} and another one sent different step records of iteration {self._clock.number(iteration)}",
            where=f"rank {rank}", remedy="learning rates, clipping and skipped steps that are the same on all ranks",
        )

    def _without_buffers(self, record: StepRecord) -> StepRecord:
        """What must be the same on all ranks although each may have buffers of its own."""
        sums = {name: text for name, text in record.checksums.items() if name not in self._buffers}
        return replace(record, checksums=sums, buffers={})

    def sample(self, iteration: int) -> tuple[Sample, int] | None:
        """That of an iteration's record, and the trainer's number of it; None: it has none."""
        record, number = self.of(iteration), self._clock.number(iteration)
        if record is None or not record.sample:
            return None
        return self.sampled.sample(record.sample, number, "record"), number

    def _check(self, iteration: int, record: StepRecord, where: str) -> None:
        for name, text in record.checksums.items():
            known = name in self._names or (self._logged and name.startswith(state_name("", "")[:-1]))
            if not known or not re.fullmatch("[0-9a-f]{16}", text):
                raise UserError(f"a checksum {text[:20]!r} of {name[:80]!r}", where=where)
        if record.sample:
            self.sampled.sample(record.sample, self._clock.number(iteration), where)

    def forget(self, iteration: int) -> None:
        """It has closed: its record and older ones are of no more use but to be compared with."""
        for old in [t for t in self._kept if t <= iteration]:
            del self._kept[old]
        for old in [t for t in self._common if t <= iteration]:
            self._closed[old] = self._common.pop(old)
        while len(self._closed) > CLOSED:
            del self._closed[next(iter(self._closed))]
        self._disputed = {t for t in self._disputed if t > iteration}


def _both(one: StepRecord, other: StepRecord) -> StepRecord | None:
    """What two ranks say of an iteration; None: they contradict each other. Checksums, and a sample, that only one of
    them has are its own matter: how often a rank sends checksums depends on what they cost there."""
    bare = (replace(each, checksums={}, sample="") for each in (one, other))
    said = all(not a or not b or a == b for a, b in ((one.checksums, other.checksums), (one.sample, other.sample)))
    if not said or next(bare) != next(bare):
        return None
    return replace(one, checksums=one.checksums or other.checksums, sample=one.sample or other.sample)


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
