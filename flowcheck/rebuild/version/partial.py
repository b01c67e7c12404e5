"""Going on from lost gradients: which elements of the next version are anything, and the trainers' own state of them.

    partial = Partial(plan)
    partial.lost(buckets)                       an iteration closed with holes; lost_all(): it was lost whole
    partial.begin()                             nothing of the job is here yet
    partial.ask(budget, ranks)                  what each rank is to be asked for now
    partial.take(patch)                         what one has answered
    partial.heard(rank, iteration)              its record of an iteration is here
    partial.awaits(iteration)                   may a patch of this iteration still come?
    partial.write(replica, iteration)           into the version that is being built; stale shrinks

An optimizer that works element by element applies an iteration with holes to every element all the same. At a hole the
arena holds anything, so the updated element is wrong: it is stale until a trainer sends its own state of it, a patch.
A rank sends its patch of an iteration before its record of it, on one connection. So once the records of an
iteration are here, its patches are, and nothing is kept of the iterations between.

A job that is begun so lacks its constants, too. They are asked of rank 0, whose model DDP gave to all others. Buffers
are not asked for: each record of rank 0 brings them, and other ranks may have other ones.

A request is answered once. While it is, and until its answer was written, its elements are not asked for again; those
of a request whose rank has left, or whose answer came too late, are. One thread.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowcheck.errors import UserError
from flowcheck.job.model import Job, dtype_size
from flowcheck.job.sampling import KEYS, state_name
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.iteration.intervals import both, intervals, without
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.replica import JobReplica
from flowcheck.rebuild.version.stale import Range, Stale, by_entry, deal
from updater.errors import UpdaterError

__all__ = ["Partial", "Patch", "cost_of"]

MOST = 8192  # ranges that are asked for at once
NUMBERS = itertools.count(1)  # of all: what a rank was asked before its job was joined anew is answered later
OPEN = 4  # requests of a rank that it has not answered: a trainer takes a few at a time


@dataclass(frozen=True)
class Patch:
    """A rank's answer: the state of `ranges` after `iteration`. parameters, state: as updater/slot.py takes them."""

    rank: int
    request: int
    iteration: int
    ranges: tuple[Range, ...]
    parameters: Mapping[str, torch.Tensor]
    state: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Request:
    rank: int
    ranges: tuple[Range, ...]


def cost_of(job: Job) -> dict[str, int]:
    """Bytes of parameter and optimizer state of one element, by optimized entry."""
    assert job.optimizer is not None
    states: dict[str, int] = {}
    for group in job.optimizer.groups:
        kept = {"sgd": 1 if group.options.get("momentum") else 0}.get(job.optimizer.name, 2)
        states |= dict.fromkeys(group.params, kept + bool(group.options.get("amsgrad")))
    narrow = set(job.narrow) if job.optimizer.masters != "none" else set()
    sizes = {entry.name: dtype_size(entry.dtype) for entry in job.model if entry.name in states}
    return {n: 2 + 4 * (1 + states[n]) if n in narrow else size * (1 + states[n]) for n, size in sizes.items()}


class Partial:
    """stale: of the version that comes next; `absent`: buffers that no record has brought. asked, received: bytes of
    state. healed: stale elements that were patched. refused: why no trainer can be asked, "" as long as one can."""

    def __init__(self, plan: JobPlan) -> None:
        self._job, self._optimized = plan.job, cost_of(plan.job)
        self._sizes = {entry.name: math.prod(entry.shape) for entry in plan.job.model}
        self._constants = {e.name: dtype_size(e.dtype) for e in plan.job.model if e.kind == "constant"}
        self.cost = self._constants | self._optimized
        self.stale = Stale({name: self._sizes[name] for name in self.cost}, self.cost)
        self.absent: set[str] = set()
        self._requests: dict[int, _Request] = {}
        self._turn = 0  # which rank is asked first
        self._heard: dict[int, int] = {}
        self._patches: dict[int, list[Patch]] = {}
        self.asked = self.received = self.healed = 0
        self.refused = ""

    # -- what is stale --

    def lost(self, iteration: int, buckets: Sequence[BucketCoverage]) -> None:
        """The gradients that buckets of a closed iteration lack."""
        self.stale.begin()
        layout = self._job.bucket_layout(iteration)
        for bucket in buckets:
            if bucket.complete:
                continue
            placed = np.array(bucket.placed, np.int64).reshape(-1, 2)
            holes = without(intervals([(0, bucket.place.elements)]), placed)
            for piece in layout[bucket.place.index].slices:
                found = both(holes, intervals([(piece.offset, piece.offset + piece.length)]))
                if len(found):
                    self.stale.add(piece.name, found + (piece.start - piece.offset))

    def lost_all(self) -> None:
        self.stale.begin()
        self.stale.add_all(self._optimized)

    def begin(self) -> None:
        """The version that comes next has nothing of the job yet."""
        self.clear()
        self.stale.add_all(self.cost)
        self.absent = {entry.name for entry in self._job.model if entry.kind == "buffer"}

    def brought(self, buffers: Collection[str]) -> None:
        """The record of the version that is being built has these."""
        self.absent.difference_update(buffers)

    @property
    def elements(self) -> int:
        """How many of the version that comes next are anything."""
        return self.stale.elements + sum(self._sizes[name] for name in self.absent)

    def clear(self) -> None:
        """There is a state of everything, or none of anything."""
        self.stale.clear()
        self.absent.clear()
        self._patches.clear()
        self._requests.clear()
        self.refused = ""

    def trusted(self, sums: Mapping[str, int]) -> dict[str, int]:
        """Those of a trainer's sums that can be compared: of entries of which nothing is stale."""
        stale = self._doubtful()
        if not stale:
            return dict(sums)
        owner = {state_name(name, key): name for name in self._optimized for key in KEYS}
        owner |= {entry.name: entry.tied or entry.name for entry in self._job.model}
        return {name: value for name, value in sums.items() if owner[name] not in stale}

    def trusts(self) -> Callable[[str], bool]:
        """May the tensors of an entry be compared? Nothing of it is stale."""
        stale = self._doubtful()
        return lambda entry: entry not in stale

    def _doubtful(self) -> set[str]:
        """Entries that wait for a trainer. One without elements is never asked for; its count of steps comes with any
        patch, so it waits as long as anything does."""
        waiting = set(self.stale.names)
        if waiting:
            waiting |= {name for name in self._optimized if not self._sizes[name]}
        return waiting | self.absent

    # -- asking --

    def left(self, ranks: Collection[int]) -> bool:
        """Only these ranks are there. Were others asked?"""
        self._heard = {rank: iteration for rank, iteration in self._heard.items() if rank in ranks}
        before = len(self._requests)
        self._requests = {number: one for number, one in self._requests.items() if one.rank in ranks}
        return len(self._requests) < before

    def ask(self, budget: int, ranks: Collection[int]) -> list[tuple[int, int, list[Range]]]:
        """(rank, request, ranges) to be sent now. budget: bytes of state that may be under way. ranks: who is there;
        requests to others are given up."""
        self.left(ranks)
        if not self.stale or not ranks:
            return []
        open_ = [range_ for one in self._requests.values() for range_ in one.ranges]
        room = budget - sum(length * self.cost[name] for name, _, length in open_)
        here = [range_ for patches in self._patches.values() for one in patches for range_ in one.ranges]
        busy = Counter(one.rank for one in self._requests.values())
        order = [rank for rank in sorted(ranks) if busy[rank] < OPEN]
        later = [] if 0 in order else [(name, 0, self._sizes[name]) for name in self._constants]
        wanted = self.stale.oldest(room, by_entry(open_ + here + later))[:MOST]
        fixed = [range_ for range_ in wanted if range_[0] in self._constants]
        found = [self._request(0, fixed)] if fixed else []
        for part in deal([range_ for range_ in wanted if range_[0] in self._optimized], self.cost, len(order)):
            found.append(self._request(order[self._turn % len(order)], part))
            self._turn += 1
        return found

    def _request(self, rank: int, part: list[Range]) -> tuple[int, int, list[Range]]:
        number = next(NUMBERS)
        self._requests[number] = _Request(rank, tuple(part))
        self.asked += sum(length * self.cost[name] for name, _, length in part)
        return rank, number, part

    def take(self, patch: Patch, first: int) -> bool:
        """Keep an answer until its iteration is built; iterations before `first` were. False: it is of no use any more.
        Raises UserError if it is not what was asked for."""
        request = self._requests.get(patch.request)
        if request is None:
            return False  # given up, or of a state before this one
        if (request.rank, request.ranges) != (patch.rank, patch.ranges):
            raise UserError(f"a patch of other elements than request {patch.request} names", where=f"rank {patch.rank}")
        del self._requests[patch.request]
        self.received += sum(length * self.cost[name] for name, _, length in patch.ranges)
        if patch.iteration < first:
            return False
        self._patches.setdefault(patch.iteration, []).append(patch)
        return True

    def refuse(self, request: int, why: str) -> None:
        """A trainer cannot answer this."""
        if self._requests.pop(request, None) is not None:
            self.refused = why

    # -- building --

    def heard(self, rank: int, iteration: int) -> None:
        self._heard[rank] = max(self._heard.get(rank, -1), iteration)

    def passed(self, iteration: int, counts: Callable[[int], bool]) -> bool:
        """Is each rank that is there, and whose records count, past this iteration? Then no record of it will come."""
        heard = [newest for rank, newest in self._heard.items() if counts(rank)]
        return bool(heard) and min(heard) > iteration

    def awaits(self, iteration: int) -> bool:
        """Has a rank been asked whose record of the iteration, and with it its answer, may still come?"""
        return any(self._heard.get(one.rank, -1) < iteration for one in self._requests.values())

    @property
    def owing(self) -> set[int]:
        """Ranks that have not answered all that they were asked."""
        return {one.rank for one in self._requests.values()}

    def give_up(self, iteration: int) -> None:
        """Records of this iteration that are not here will not come: nor will what their ranks were asked for."""
        late = [n for n, one in self._requests.items() if self._heard.get(one.rank, -1) < iteration]
        for number in late:
            del self._requests[number]

    def write(self, replica: JobReplica, iteration: int) -> int:
        """Patch the version after an iteration, all of which is written; how many elements. 0: there is nothing to
        patch, or nothing any more."""
        written = 0
        for patch in self._patches.pop(iteration, []):
            try:
                replica.patch(patch.ranges, patch.parameters, patch.state)
            except UpdaterError as error:
                self.refused = f"what rank {patch.rank} sent does not fit: {error}"
                continue
            for name, runs in by_entry(patch.ranges).items():
                written += int((both(self.stale.of(name), runs) @ [-1, 1]).sum())
                self.stale.remove(name, runs)
        self._patches = {later: held for later, held in self._patches.items() if later > iteration}
        self.healed += written
        return written
