"""Trainers that send their gradients, as a source of arenas: what their optimizers have read, bucket by bucket.

    arenas = FedArenas(plan, sum_of)
    arenas.wait(rank, iteration, over)              a connection: until there is an arena; False: nobody wants it
    arenas.give(rank, iteration, bucket, first, data, total, sum)       the same
    arenas.withhold(rank, iteration, why)           that does not come; "": this rank made no step
    arenas.left(rank, why)                          nothing more comes from this one, until `wait`

Of ranks that have the same each sends its share (flowcheck/job/givers.py), and nothing of another's. A bucket is there
when all of its bytes are, and their checksum is the trainer's; never in part. An iteration closes when all buckets are
there, when a rank or the end of its connection has said that they do not come, or when a rank of which some lack has
sent gradients of a later one: each sends in order. One in which no rank made a step has zeros.

Connections give and wait, on threads of their own, and one thread judges. Memory: `arenas` iterations of gradients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from flowcheck.errors import UserError
from flowcheck.job.givers import givers
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.iteration.verdict import BucketEvidence, Evidence, StreamEvidence, judge
from flowcheck.rebuild.plan import BucketPlace, JobPlan
from updater.memory import anonymous

__all__ = ["FedArenas"]

NAME = "feed"
CAUSE = "not_fed"
DIFFER = "one rank made a step, and another one that has the same did not"
LOOK_SECONDS = 0.2


@dataclass
class _Iteration:
    """came: bytes of each bucket. there: buckets that are whole and right. idle: ranks that made no step. why: no more
    comes, and why not."""

    came: list[int]
    there: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    why: str = ""
    closed: bool = False
    first: int = 0
    last: int = 0


class FedArenas:
    """An ArenaSource (arena_source.py has what the methods mean). sum_of: the checksum that trainers form of bytes."""

    def __init__(self, plan: JobPlan, sum_of: Callable[[memoryview], str]) -> None:
        self.plan, self._sum_of = plan, sum_of
        self._bytes = plan.engine.gradient_bytes
        self._memory = np.frombuffer(anonymous(max(self.capacity * self._bytes, 1)), np.uint8)
        self._iterations: dict[int, _Iteration] = {}
        self._changed = threading.Condition()
        sizes = [place.nbytes for place in plan.iteration_buckets(1)]
        self._givers = givers(sizes, plan.job.communicator.ranks)
        self._coming = dict.fromkeys(self._givers, 0)  # the newest iteration of each that has a share
        self._gone: dict[int, str] = {}  # of those, who has left, and why
        self._oldest, self._begun = 0, -1
        self._taken = self._seen = 0  # messages
        self._ended = False

    # -- connections --

    def wait(self, rank: int, iteration: int, over: Callable[[], bool]) -> bool:
        """Until there is an arena for an iteration. over: has the connection been closed? False: it has passed. Raises
        UserError: nothing is to come from this rank."""
        if rank not in self._coming:
            raise UserError(f"no gradients come from rank {rank}", where=NAME)
        with self._changed:
            self._gone.pop(rank, None)
            self._coming[rank] = max(self._coming[rank], iteration)
            while iteration >= self._oldest + self.capacity and not self._ended and not over():
                self._changed.wait(LOOK_SECONDS)
            return self._wanted(iteration)

    def give(
        self, rank: int, iteration: int, bucket: int, first: int, data: bytes | bytearray, total: int, checksum: str
    ) -> None:
        """Bytes of a bucket, from byte `first` on, of one that `wait` has said True of. total, checksum: of the bucket.
        Raises UserError: it is not what comes next of a bucket of this rank's, or its bytes are damaged."""
        place = self._place(rank, iteration, bucket)
        with self._changed:
            if not self._wanted(iteration):
                return
            one = self._begin(iteration)
            if one.idle:
                one.why = DIFFER
                return
            due = place is not None and bucket not in one.there and (total, first) == (place.nbytes, one.came[bucket])
            if place is None or not due or first + len(data) > total:
                raise UserError(f"bytes {first} to {first + len(data)} of {total} of bucket {bucket} of iteration"
                                f" {iteration} are not what comes next from rank {rank}", where=NAME)
            at = place.offset + first
            self._region(iteration)[at : at + len(data)] = np.frombuffer(data, np.uint8)
            one.came[bucket] += len(data)
            one.last = time.time_ns()
            if one.came[bucket] < total:
                return
            whole = self._region(iteration)[place.offset : place.offset + total]
        right = self._sum_of(whole.data) == checksum  # nobody else writes there, whatever closes meanwhile
        with self._changed:
            if right and self._iterations.get(iteration) is one and not one.closed:
                one.there.add(bucket)
                self._changed.notify_all()
        if not right:
            raise UserError(f"the checksum of bucket {bucket} of iteration {iteration} differs", where=NAME)

    def withhold(self, rank: int, iteration: int, why: str) -> None:
        """Of one that `wait` has said True of."""
        with self._changed:
            if not self._wanted(iteration):
                return
            one = self._begin(iteration)
            one.idle.add(rank)
            if why or any(one.came):
                one.why = one.why or why or DIFFER
            elif one.idle == self._coming.keys():
                self._region(iteration)[:] = 0
                one.there = set(range(len(one.came)))

    def left(self, rank: int, why: str) -> None:
        with self._changed:
            if rank in self._coming:
                self._gone[rank] = why
            for one in self._iterations.values():
                if rank in self._lacking(one):
                    one.why = one.why or why

    def _place(self, rank: int, iteration: int, bucket: int) -> BucketPlace | None:
        """None: that is not this rank's."""
        places = self.plan.iteration_buckets(iteration)
        return places[bucket] if bucket < len(places) and self._givers[bucket] == rank else None

    def _wanted(self, iteration: int) -> bool:
        one = self._iterations.get(iteration)
        return (self._oldest <= iteration < self._oldest + self.capacity and not self._ended
                and not (one is not None and (one.closed or one.why)))

    def _begin(self, iteration: int) -> _Iteration:
        if iteration not in self._iterations:
            self._iterations[iteration] = one = _Iteration([0] * len(self.plan.iteration_buckets(iteration)))
            one.there = {place.index for place in self.plan.iteration_buckets(iteration) if not place.nbytes}
            one.why = next(iter(self._gone.values()), "")
            one.first = one.last = time.time_ns()
            self._begun = max(self._begun, iteration)
        self._taken += 1
        return self._iterations[iteration]

    # -- which iterations have begun --

    @property
    def oldest(self) -> int:
        return self._oldest

    @property
    def begun(self) -> int:
        return self._begun

    @property
    def open(self) -> range:
        return range(self._oldest, self._begun + 1)

    @property
    def given_up(self) -> range:
        return range(0)

    def poll(self) -> bool:
        seen, self._seen = self._seen, self._taken
        return self._seen > seen

    # -- may they close --

    def due(self) -> range:
        with self._changed:
            first = min(self._iterations, default=max(self._coming.values(), default=0))
            if first > self._oldest or first not in self._iterations:
                return range(self._oldest, first)
            one = self._iterations[first]
            over = one.why or self._ended or any(self._coming[giver] > first for giver in self._lacking(one))
            return range(first, first + 1) if over or self._whole(first) else range(0)

    def _lacking(self, one: _Iteration) -> set[int]:
        """Ranks of which buckets are not there."""
        return {giver for bucket, giver in enumerate(self._givers) if bucket not in one.there}

    def is_whole(self, iteration: int) -> bool:
        with self._changed:
            return self._whole(iteration)

    def _whole(self, iteration: int) -> bool:
        one = self._iterations.get(iteration)
        return one is not None and len(one.there) == len(one.came)

    def close(self, due: range) -> None:
        with self._changed:
            for iteration in due:
                if iteration in self._iterations:
                    self._iterations[iteration].closed = True

    def judge(self, iteration: int, *, record: bool, follows: bool) -> Judged:
        buckets, region = [], self.region(iteration)
        one = self._iterations.get(iteration)
        for place in self.plan.iteration_buckets(iteration):
            there = one is not None and place.index in one.there
            count = place.elements if there else 0
            buckets.append(BucketCoverage(
                place, region[place.offset : place.offset + place.nbytes], count, ((0, count),) if count else (),
                {} if there else {CAUSE: place.elements}))
        missing = [bucket for bucket in buckets if not bucket.complete]
        final = (one.why if one is not None else "") or "gradients of a later iteration have come"
        evidence = Evidence(
            iteration=iteration,
            buckets=tuple(BucketEvidence(b.place.index, b.place.elements, b.covered, b.missing) for b in buckets),
            final=final if missing else "", unanchored=(), disagreements=(), recovered=(), icrc_checked=True,
            streams=(StreamEvidence(NAME, "ended" if self._ended else "past"),), differences=(), copies_disagreed=0,
            copies_first="", step_record_declared=bool(self.plan.job.step_values), step_record_present=record,
            checksum=None, refused="", another_run="", times=(), previous_published=follows, stale=None, from_peers="",
        )
        cells = sum(b.place.cells.stop - b.place.cells.start for b in buckets if b.complete)
        none = dict.fromkeys(("packets", "placed", "gaps", "duplicates"), 0)
        return Judged(evidence, judge(evidence), buckets, [], {NAME: cells} if cells else {}, none)

    def refused(self) -> str:
        return ""

    # -- coverage and bytes --

    def complete(self, iteration: int) -> bool:
        return self.is_whole(iteration)

    def covered_places(self, iteration: int) -> np.ndarray:
        with self._changed:
            one = self._iterations.get(iteration)
            there = one.there if one is not None else set()
            return np.array([place.cells.stop - place.cells.start if place.index in there else 0
                             for place in self.plan.iteration_places(iteration)], np.int64)

    def missing(self, iteration: int, first: int, end: int) -> np.ndarray:
        with self._changed:
            one = self._iterations.get(iteration)
            return intervals([(max(place.cells.start, first), min(place.cells.stop, end))
                              for place in self.plan.iteration_buckets(iteration)
                              if one is None or place.index not in one.there])

    def region(self, iteration: int) -> np.ndarray:
        return self._region(iteration)

    def _region(self, iteration: int) -> np.ndarray:
        at = iteration % self.capacity * self._bytes
        return self._memory[at : at + self._bytes]

    def first_weights(self) -> Mapping[str, torch.Tensor] | str:
        return "gradients alone are sent"

    # -- letting go --

    def release(self, due: range) -> None:
        with self._changed:
            for iteration in due:
                self._iterations.pop(iteration, None)
            self._oldest = max(self._oldest, due.stop)
            self._changed.notify_all()

    def forget(self) -> None:
        """Nothing is known of closed ones."""

    def finish(self) -> None:
        self.stop()

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # -- keeping up --

    @property
    def capacity(self) -> int:
        return self.plan.engine.arenas

    @property
    def fills_itself(self) -> bool:
        return True

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def blocked(self) -> bool:
        return False

    @property
    def consumed(self) -> int:
        return self._taken

    @property
    def fill(self) -> float:
        return 0.0

    @property
    def room(self) -> int:
        return self.capacity

    def take_highest(self) -> tuple[int, int]:
        return 0, self.room

    def times(self, iteration: int) -> tuple[int, int] | None:
        one = self._iterations.get(iteration)
        return (one.first, one.last) if one is not None else None
