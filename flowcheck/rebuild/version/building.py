"""The version that comes next: its buckets are applied as they become complete, before there is a verdict.

    builder = VersionBuilder(plan, arenas, records)
    builder.look(replica, iteration)            at every look at the rings, for the iteration that the version waits for
    builder.reserve(replica, iteration)         it is complete: is there a slot? If not, it has to stay open
    builder.conclude(replica, iteration, ...)   the verdict stands: what is left, with the values of the record
    built = builder.built(seconds)              workers have written it, and it was compared with the record's sample;
                                                with its checksums by workers, where there are any
    builder.drop()                              the verdict does not stand: nothing was built

What is handed over is applied by the replica's workers, into a slot that nobody reads. Nothing is published on it: a
bucket whose copies differ later, or whose connection disagrees later, fails the verdict, and the slot is dropped.

A step's learning rates, clip coefficient, loss scale and skip come with its record, mostly after its gradients. Until
it is here they are assumed to be as in the record before (`Assumption`); where the record says otherwise the slot is
dropped and built again from the arena, which is whole until its iteration is retired. Where nothing may be assumed the
version is begun when its iteration closes.

One thread. Costs of a look: a number for each bucket, and the bits of one that seems complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from flowcheck.job.sampling import Sample
from flowcheck.rebuild.iteration.arena_source import ArenaSource
from flowcheck.rebuild.iteration.evidence import BucketCoverage, elements_of
from flowcheck.rebuild.plan import BucketPlace, JobPlan
from flowcheck.rebuild.version.partial import Partial
from flowcheck.rebuild.version.records import StepRecord, StepRecords
from flowcheck.rebuild.version.replica import JobReplica
from updater.errors import NoFreeSlot, UpdaterError
from updater.step import StepValues
from updater.verify import Comparison

__all__ = ["Assumption", "Built", "VersionBuilder"]

AGREED = 2  # records in a row that say what the one before said, before the next one is assumed to
MOST = 256  # of them, after assumptions that were wrong


class Assumption:
    """Which values are taken for a step whose record is not here: those of the record before, if the last ones agreed.

    known: the manifest declares no value of a step, so a step without a record has none.
    Each assumption that was wrong doubles the number of records that have to agree before the next one; it is AGREED
    again when as many assumptions have been right. So a job that clips in every step is soon left alone, and one whose
    loss scale changes now and then is not.
    """

    def __init__(self, *, known: bool) -> None:
        self._last = StepValues() if known else None
        self._agreed, self._wanted = 0, 0 if known else AGREED

    @property
    def values(self) -> StepValues | None:
        """None: nothing may be assumed now."""
        return self._last if self._agreed >= self._wanted else None

    def learn(self, values: StepValues) -> None:
        """What the step after the last one that was learnt has had."""
        agrees = self._last is not None and self._last.updates_as(values)
        if not agrees and self.values is not None:
            self._wanted = min(max(2 * self._wanted, AGREED), MOST)
        self._agreed = self._agreed + 1 if agrees else 0
        if self._wanted > AGREED and self._agreed >= 2 * self._wanted:
            self._wanted = AGREED
        self._last = replace(values, skip=False, buffers={})  # a step that is skipped says nothing of the next one


@dataclass(frozen=True)
class Built:
    """How a version was built.

    updates: "early": its buckets were applied as they became complete, with values that were known or rightly assumed;
        "at_record": all of them after its iteration had closed; "": nothing was built.
    rebuilt: how often it was begun in vain, because its record said otherwise.
    differs: the first tensor that is not the trainer's. "": all were compared and are the trainer's. None: not all were
        compared.
    patched: elements into which the trainer's own state was written.
    sampled: tensors of which the record had some elements, and all of these are the trainer's."""

    updates: Literal["", "early", "at_record"] = ""
    rebuilt: int = 0
    differs: str | None = None
    patched: int = 0
    sampled: int = 0


class VersionBuilder:
    """One version at a time, of the replica that `look` or `conclude` is given. Order: look, again and again; then
    conclude, and built until it says something; or drop. partial: what is stale in it; None: nothing may be."""

    def __init__(self, plan: JobPlan, arenas: ArenaSource, records: StepRecords) -> None:
        self.partial: Partial | None = None
        self._plan, self._arenas, self._records = plan, arenas, records
        self._assumption = Assumption(known=not plan.job.step_values)
        self._replica: JobReplica | None = None  # that is building
        self._values = StepValues()  # that it builds with
        self._handed: set[int] = set()  # buckets that it has
        self._seen = (-1, b"")  # the iteration that was looked at last, and how many cells of each place were there
        self._rebuilt = 0
        self._concluded: Built | None = None  # the version that workers are at
        self._iteration = -1  # that makes it
        self._sums: dict[str, int] = {}  # the trainer's of it
        self._sample: tuple[Sample, int] | None = None
        self._comparison: Comparison | None = None

    def look(self, replica: JobReplica, iteration: int) -> None:
        """Hand over the buckets of an open iteration that have become complete, if its values are known or assumed."""
        covered = self._arenas.covered_places(iteration)
        seen = (iteration, covered.tobytes())
        if seen == self._seen or not covered.any():
            return
        self._seen = seen
        record = self._records.of(iteration)
        try:
            values = self._assumption.values if record is None else record.values()
            if record is not None and values is not None:
                self._learn_of(values)
            if values is None or not (places := self._complete(iteration, covered)):
                return
            if self._replica is None:
                self._begin(replica, iteration, values)
            region = self._arenas.region(iteration)
            for place in places:
                self._apply(place, elements_of(region, place))
        except UpdaterError:  # no slot is free now, or the values are of no use: heeded when the iteration is complete
            self.drop()
            self._seen = seen

    def reserve(self, replica: JobReplica, iteration: int) -> bool:
        """The iteration is complete and its record, if it has one, is here: begin its version, if nothing has. False:
        no slot is free, and the update has to wait. What else may be wrong is said by `conclude`."""
        record = self._records.of(iteration)
        try:
            values = StepValues() if record is None else record.values()
            self._learn_of(values)
            if self._replica is None:
                self._begin(replica, iteration, values)
        except NoFreeSlot:
            return False
        except UpdaterError:
            self.drop()
        return True

    def conclude(
        self, replica: JobReplica, iteration: int, buckets: Sequence[BucketCoverage], record: StepRecord | None
    ) -> None:
        """All buckets are complete, and the verdict stands, or what they lack is known to `partial`: hand over what is
        left. Raises UpdaterError; then nothing is being built."""
        try:
            values = StepValues() if record is None else record.values()
            assumed = self._assumption.values
            self._learn_of(values)
            early = bool(self._handed) or (assumed is not None and assumed.updates_as(values))
            self._assumption.learn(values)
            if self._replica is None:
                self._begin(replica, iteration, values)
            for bucket in buckets:
                if bucket.place.index not in self._handed:
                    self._apply(bucket.place, bucket.tensor())
            replica.finish(values.buffers)
            if self.partial is not None:
                self.partial.brought(values.buffers)
        except UpdaterError:
            self.drop()
            raise
        self._concluded, self._iteration = Built("early" if early else "at_record", self._rebuilt), iteration
        self._sums = {} if record is None else record.sums()
        self._sample = None if record is None else self._records.sample(iteration)
        self._handed.clear()
        self._rebuilt = 0

    @property
    def reads(self) -> bool:
        """Do workers read the arena of a version that was concluded?"""
        return self._concluded is not None and self._comparison is None

    def built(self, seconds: float) -> Built | None:
        """The version that was concluded, to be published or discarded by the caller; None: workers are still at it.
        Waits for the step that they are at, writing or comparing, at most so long (negative: until it is done)."""
        assert self._replica is not None and self._concluded is not None
        differs: str | None = None
        if self._comparison is not None:
            differs = self._comparison.differing(seconds)
            if differs is None:
                return None
            if not differs and not self._comparison.whole:
                differs = None
        elif not self._replica.written(seconds) or self._patch():
            return None
        elif not (differs := self._sampled(self._replica)) and self._sums:
            self._comparison = self._replica.compare(self._sums)
            return None
        built = replace(self._concluded, differs=differs)
        self._replica = self._concluded = self._comparison = None
        return built

    def _sampled(self, replica: JobReplica) -> str | None:
        """Hold the record's sample against the version, which is written. The first tensor that differs."""
        assert self._concluded is not None
        if self._sample is None:
            return None
        trusted = self.partial.trusts() if self.partial is not None else lambda entry: True
        differs, count = self._records.sampled.compare(*self._sample, replica.version, trusted)
        self._concluded = replace(self._concluded, sampled=count)
        return differs or None

    def _patch(self) -> bool:
        """Write what the trainers have sent of this version's elements, once; are workers at it?"""
        if self.partial is None:
            return False
        assert self._replica is not None and self._concluded is not None
        patched = self.partial.write(self._replica, self._iteration)
        self._concluded = replace(self._concluded, patched=self._concluded.patched + patched)
        self._sums = self.partial.trusted(self._sums)
        return patched > 0

    def drop(self) -> None:
        """Let go of what was begun, if anything was; not of what was concluded."""
        if self._replica is None or self._concluded is not None:
            return
        self._replica.discard()
        self._replica, self._rebuilt = None, 0
        self._handed.clear()
        self._seen = (-1, b"")

    def _learn_of(self, values: StepValues) -> None:
        """The record is here: drop what was begun with other values."""
        if self._replica is not None and not self._values.updates_as(values):
            rebuilt = self._rebuilt + 1
            self.drop()
            self._rebuilt = rebuilt

    def _begin(self, replica: JobReplica, iteration: int, values: StepValues) -> None:
        replica.begin(iteration, values)
        self._replica, self._values = replica, values

    def _apply(self, place: BucketPlace, elements: torch.Tensor) -> None:
        assert self._replica is not None
        self._replica.apply(place.index, elements)
        self._handed.add(place.index)

    def _complete(self, iteration: int, covered: np.ndarray) -> list[BucketPlace]:
        """Buckets that are complete and were not handed over yet. covered: cells that are there, by place.

        The bits have the last word: of several placing threads two may count the same cell, and a thread shows its bits
        after a fence."""
        found = []
        for place, there in zip(self._plan.iteration_buckets(iteration), covered.tolist(), strict=False):
            first, end = place.cells.start, place.cells.stop
            if place.index not in self._handed and there >= end - first:
                found += [] if len(self._arenas.missing(iteration, first, end)) else [place]
        return found
