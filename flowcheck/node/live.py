"""One job's mirrored traffic into versions, without an end: what a replay does, with a trainer at the other side.

    session = LiveSession(plan, sources, hooks, first, ...)
    session.poll()                    again and again: rings -> engine -> verdict -> updater
    session.record(...), announce(iteration), state(...)        what trainers send, on the same thread

The wire is joined in mid-stream: each connection finds its place by what never restarts (LL and LL128 flags, the
index of a clear-to-send), checked against the manifest's whole history of calls; until then its packets are
`unanchored`. Iterations before the trainer's state are closed and thrown away. An iteration that cannot be published
ends the chain: its predecessor stays the current version, later ones are refused (clause `previous`), and the hooks
ask for a state to go on from.

Iterations are counted as the manifest does, from 0; what is said to people, and the steps of versions, as the trainer
does: `first` later.

Where a record brings checksums, the version is built and its iteration's memory is free again while workers compare
them; the rings are drained meanwhile, and no other iteration closes before the result is heeded.

One thread. Memory: `arenas` iterations of gradients, V slots, and as many step records as iterations can be open.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parser.machine import Engine

from flowcheck.control.protocol import Record
from flowcheck.errors import UserError
from flowcheck.node.silence import Arrivals, Silence
from flowcheck.rebuild.collector import Judge, Judged
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.replica import JobReplica, ReplicaOptions
from flowcheck.rebuild.scheduler import Source, Streams
from flowcheck.rebuild.verdict import Clause, StreamEvidence
from updater.errors import UpdaterError
from updater.step import StepValues
from updater.verify import Comparison

__all__ = ["Closed", "Hooks", "LiveSession"]

RECORDS_AHEAD = 256  # records kept of iterations whose traffic has not closed yet
LOOK_SECONDS = 0.001  # that an idle poll waits for a comparison
WAIT_SAID = 0.5  # seconds that a record may be later than its traffic before that is said


@dataclass(frozen=True)
class Closed:
    """One iteration as it went by. Counts are of packets, since the iteration before closed.

    missing: elements by cause. healed: packets that some stream or connection lacked although nothing is missing.
    why: (clause, reason) of what failed; clauses alone for iterations before the state.
    """

    iteration: int
    published: bool
    status: str
    packets: int
    placed: int
    missing: dict[str, int]
    healed: int
    duplicates: int
    lag: int
    why: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Hooks:
    """What the session tells its owner. closed: after each iteration. lost(why): a state is wanted.
    waiting(iteration, why): a complete iteration has no record yet, or records run far ahead of the traffic.
    silent(why): the mirror brings nothing of the job; "": it does again."""

    closed: Callable[[Closed], None]
    lost: Callable[[str], None]
    waiting: Callable[[int, str], None]
    silent: Callable[[str], None] = lambda why: None


@dataclass
class _Kept:
    """The step record of one iteration. buffers: by name, from rank 0. disputed: ranks said different things."""

    record: Record
    buffers: Mapping[str, torch.Tensor]
    disputed: bool = False


@dataclass(frozen=True)
class _Compared:
    """A version that is built, while its checksums are compared. counts: what `_count` said when it closed."""

    judged: Judged
    counts: dict[str, int]
    comparison: Comparison


class LiveSession:
    """sources[i]: ring of stream i. first: the trainer's number of iteration 0. replica_path(iteration): a file for a
    new replica. record_seconds: how long an iteration that could close waits for its record before that counts as
    one that will not come. port: what the sources belong to."""

    def __init__(
        self, plan: JobPlan, sources: Sequence[Source], hooks: Hooks, first: int = 0, *, slots: int, threads: int,
        replica_path: Callable[[int], Path | None], record_seconds: float, port: Arrivals | None = None,
    ) -> None:
        self.plan, self._hooks, self._first = plan, hooks, first
        self._slots, self._threads, self._path = slots, threads, replica_path
        self._record_seconds = record_seconds
        self.engine = Engine(plan.engine)
        self.judge = Judge(plan, self.engine)
        self.streams = Streams(self.engine, sources, self.judge.full, self._skipped, self._hold)
        self._names = {entry.name for entry in plan.job.model}
        self._needs_buffers = any(entry.kind == "buffer" for entry in plan.job.model)
        self.replica: JobReplica | None = None
        self.next: int | None = None  # the iteration that the current version waits for
        self.status = "waiting"
        self.matched = 0
        self._coming: int | None = None  # a state before this iteration is on its way
        self._records: dict[int, _Kept] = {}
        self._newest = -1  # iteration of the newest record
        self._since: tuple[int, float] | None = None  # the iteration that waits for a record, and since when
        self._waited = False  # that was said of it
        self._ahead = False  # records run ahead of the traffic, and that was said
        self._counted = (0, 0, 0, 0)
        self._begins = -1  # first iteration that closed
        self._compared: _Compared | None = None
        self._silence = Silence(plan, self.engine, port or Arrivals(), first, hooks.silent, time.monotonic)

    # -- from trainers --

    def record(self, record: Record, buffers: Mapping[str, torch.Tensor], rank: int) -> str:
        """Keep a step record; returns why it is refused, or "". Every rank sends one: the first that has all that
        is declared counts, and later ones must say the same."""
        self._silence.over(record.iteration)
        awaited = max(self.engine.oldest, self.next or 0)  # a state may be far ahead of what still has to close
        if record.iteration > awaited + RECORDS_AHEAD:
            if not self._ahead:  # a mirror that is down; what these belong to will not be complete either
                self._ahead = True
                over = record.iteration + self._first
                self._hooks.waiting(
                    awaited, f"no packets of it, while a record says that iteration {over} is over; records"
                    f" further than {RECORDS_AHEAD} ahead are not kept",
                )
            return ""
        self._ahead = False
        self._newest = max(self._newest, record.iteration)
        if record.iteration < self.engine.oldest:
            return ""
        if self._needs_buffers and rank != 0:
            return ""  # DDP's buffers are those of rank 0
        for name, text in record.checksums.items():
            if name not in self._names or not re.fullmatch("[0-9a-f]{16}", text):
                return f"a checksum {text[:20]!r} of {name[:80]!r}"
        held = self._records.get(record.iteration)
        if held is not None:
            if held.record != record:
                held.disputed = True  # whoever is right: nothing is built on either
                number = record.iteration + self._first
                return f"rank {rank} and another one sent different step records of iteration {number}"
            return ""
        self._records[record.iteration] = _Kept(record, buffers)
        return ""

    def announce(self, iteration: int) -> None:
        """A state before `iteration` is being sent: keep that iteration and what follows until it is here."""
        self._coming = iteration

    def withdraw(self) -> None:
        """The state that was announced will not come."""
        self._coming = None

    def state(
        self, iteration: int, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Go on from a trainer's state. groups: hyper-parameters of the step before it. Raises UserError if it does not
        fit the job, or is too late."""
        self._coming = None
        self._heed()
        if iteration < self.engine.oldest and self.engine.begun >= 0:
            passed = self.engine.oldest - 1 + self._first
            raise UserError(f"the state before iteration {iteration + self._first} is here, and {passed} has passed")
        options = ReplicaOptions(self._slots, self._path(iteration), self._threads, True)
        fresh = JobReplica(self.plan, None, options)
        fresh.start(parameters, state, iteration + self._first, groups)
        if self.replica is not None:
            self.replica.close()
        self.replica, self.next, self.status, self.matched = fresh, iteration, "unverified", 0
        self._ahead = False

    @property
    def serves(self) -> int:
        """The trainer's number of the iteration that the version which can be read stands behind, -1: there is none."""
        return self.replica.step - 1 if self.replica is not None else -1

    # -- driving --

    def poll(self) -> bool:
        """One look at the rings; closes what may close. True if anything moved, or a comparison is under way."""
        moved = self.streams.poll()
        moved |= self._heed(0 if moved else LOOK_SECONDS)
        closed, _ = self.streams.advance(self._close)
        self._silence.look(self.streams.blocked)
        return moved or closed or self._compared is not None

    def finish(self) -> None:
        """No more traffic: judge what is still open."""
        self.engine.finish()
        self._coming = None
        self._heed()
        while self.engine.oldest <= self.engine.begun:
            self._close(self.engine.oldest)
            self.engine.retire()
            self._heed()

    def close(self) -> None:
        if self.replica is not None:
            self.replica.close()

    @property
    def published(self) -> int:
        """The iteration whose version is current, -1 and less: none of those that were followed."""
        return self.replica.step - 1 - self._first if self.replica is not None else -1

    def _hold(self, iteration: int) -> bool:
        """Must this iteration stay open for something that does not come over the wire?"""
        if self._compared is not None:
            return True
        if self._coming is not None and iteration >= self._coming:
            return True
        if iteration != self.next or not self.plan.job.step_values or iteration in self._records:
            return False
        now = time.monotonic()
        if self._since is None or self._since[0] != iteration:
            self._since, self._waited = (iteration, now), False
        waited = now - self._since[1]
        if waited > min(WAIT_SAID, self._record_seconds / 2) and not self._waited:
            self._waited = True
            self._hooks.waiting(iteration, "its step record is not here")
        return waited < self._record_seconds

    def _skipped(self, first: int, last: int) -> None:
        if self.next is not None and self.next <= last:
            one, other = first + self._first, last + self._first
            said = f"iterations {one} to {other}" if first < last else f"iteration {other}"
            self._lose(f"{said} passed while no packet came")

    def _close(self, iteration: int) -> bool:
        if self._begins < 0:
            self._begins = iteration
            if self.next is not None and iteration > self.next:  # the mirror began after the trainer's state
                self._skipped(self.next, iteration - 1)
        streams = tuple(
            StreamEvidence(f"queue {i}", self.streams.state(i, iteration)) for i in range(self.plan.engine.streams)
        )
        kept = self._records.get(iteration)
        if kept is not None and kept.disputed:
            kept = None
        judged = self.judge.look(iteration, streams, record=kept is not None, follows=iteration == self.next)
        counts = self._count()
        comparison, built = None, False
        if judged.verdict.publishable:
            comparison, built = self._build(judged, kept)
        if comparison is not None:
            self._compared = _Compared(judged, counts, comparison)
        else:
            self._end(judged, counts, built)
        for old in [t for t in self._records if t <= iteration]:
            del self._records[old]
        if iteration > self._begins + 1:
            self.engine.forget()  # but what may refute the manifest as a whole stays for the first two
        return True

    def _build(self, judged: Judged, kept: _Kept | None) -> tuple[Comparison | None, bool]:
        """Build the next version; (its comparison with the trainer's checksums, if there are any, is it built?)."""
        assert self.replica is not None
        iteration = judged.verdict.iteration
        try:
            self.replica.build(iteration, judged.buckets, _values(kept))
        except UpdaterError as error:
            self._lose(f"iteration {iteration + self._first} cannot be applied: {error}")
            return None, False
        if kept is None or not kept.record.checksums:
            return None, True
        return self.replica.compare({name: int(text, 16) for name, text in kept.record.checksums.items()}), True

    def _heed(self, seconds: float = -1) -> bool:
        """Act on the comparison under way once its result is there, for which this waits so long (negative: until it
        is). True if it did."""
        if self._compared is None:
            return False
        differs = self._compared.comparison.differing(seconds)
        if differs is None:
            return False
        compared, self._compared = self._compared, None
        judged = compared.judged.with_checksum("mismatch" if differs else "match")
        if differs:
            assert self.replica is not None
            self.replica.discard()
            number = judged.verdict.iteration + self._first
            self._lose(f"tensor {differs!r} of iteration {number} differs from the trainer's", "diverged")
        else:
            self.matched += 1
        self._end(judged, compared.counts, not differs, verified=not differs)
        return True

    def _end(self, judged: Judged, counts: dict[str, int], built: bool, *, verified: bool = False) -> None:
        """Publish the version that was built for this iteration, or give the chain up; say what became of it."""
        iteration = judged.verdict.iteration
        if built:
            assert self.replica is not None
            self.replica.publish(verified)
            self.next = iteration + 1
            self.status = "verified" if self.matched else "unverified"
        self._tell(judged, counts, built)
        if self.next is not None and iteration >= self.next and not built:
            clause, reason = judged.verdict.failing[0]
            self._lose(f"iteration {iteration + self._first} is not published: {clause.value}: {reason}")

    def _lose(self, why: str, status: str = "lost") -> None:
        if self.next is None:
            return
        self.next, self.status = None, status
        if status == "diverged" and self.replica is not None:
            self.replica.close()  # what was wrong may have been wrong for some iterations: it is served no more
            self.replica = None
        self._hooks.lost(why)

    def _count(self) -> dict[str, int]:
        """Counts of packets since the iteration before closed."""
        streams = range(self.plan.engine.streams)
        outcomes = [self.engine.outcomes(stream) for stream in streams]
        flows = [counters for stream in streams for counters in self.engine.flow_counters(stream)]
        now = (
            sum(packets for row in outcomes for packets, _ in row.values()),
            sum(row["placed"][0] for row in outcomes),
            sum(self.engine.gaps(stream) for stream in streams),
            sum(c["duplicates"] for c in flows),
        )
        grown = (new - old for new, old in zip(now, self._counted, strict=True))
        self._counted = now
        return dict(zip(("packets", "placed", "gaps", "duplicates"), grown, strict=True))

    def _tell(self, judged: Judged, counts: dict[str, int], published: bool) -> None:
        missing: dict[str, int] = {}
        for bucket in judged.buckets:
            for cause, count in bucket.missing.items():
                missing[cause] = missing.get(cause, 0) + count
        clauses = [(clause.value, reason) for clause, reason in judged.verdict.failing]
        if self.next is None and not published:
            clauses = [(name, reason) for name, reason in clauses if name != Clause.STEP_RECORD.value]
        healed = max(counts["gaps"], 0) if judged.verdict.complete else 0
        self._hooks.closed(Closed(
            judged.verdict.iteration, published, self.status, counts["packets"], counts["placed"], missing, healed,
            counts["duplicates"], max(self._newest - self.published, 0), clauses,
        ))


def _values(kept: _Kept | None) -> StepValues | None:
    if kept is None:
        return None
    record = kept.record
    return StepValues(tuple(record.groups), record.clip, record.scale, record.skipped, buffers=kept.buffers)
