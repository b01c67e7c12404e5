"""One job's packets into versions: sources -> arena scheduler -> coverage -> evidence -> verdict -> replica.

                                              `-> buckets that are complete -> the replica's workers -^

    follower = Follower(plan, sources, names, Policy.offline(), JobReplica(plan, init))
    for event in follower.run(): ...                   captures, to their end

    follower = Follower(plan, sources, names, Policy.live(30.0), clock=Clock(first))
    follower.keep_record(...), announce(iteration), start(replica, iteration)        what trainers send
    for event in follower.poll(): ...                  again and again, and finish() where training ends

Whoever drives it learns what happened from the events that it returns (events.py), one at a time: the current version
and the arena are as the event says until the next one is asked for. What a replay and a node do differently is the
policy's (policy.py).

The wire may be joined in mid-stream: each connection finds its place by what never restarts (LL and LL128 flags, the
index of a clear-to-send), checked against the manifest's whole history of calls; until then its packets are
`unanchored`. An iteration that cannot be published ends the chain: its predecessor stays the current version, and later
ones are refused (clause `previous`) until there is a state to go on from.

Complete buckets of the iteration that the version waits for are applied while it is still open (building.py); the
verdict publishes the version or drops it. What is left when the verdict stands is done by workers, and so are the sums
where a record brings checksums: the rings are drained meanwhile, and no other iteration closes before this one has
ended. Its memory is free again once all of it was applied.

One thread drives it, which waits for no worker while there is something in the rings. A node's threads may place for it
(parser.placers); then it looks every half millisecond, and leaves them the processors meanwhile. Memory: `arenas`
iterations of gradients, a replica, and as many step records as iterations can be open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from parser.machine import Engine
from parser.placers import Placers

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.version_status import DIVERGED, UNVERIFIED, VERIFIED, VersionStatus
from flowcheck.rebuild.iteration.capture_times import CaptureTimes
from flowcheck.rebuild.iteration.collector import EvidenceCollector, Judged
from flowcheck.rebuild.iteration.holes import Finality, HoleWatch
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS, ArenaScheduler, Source
from flowcheck.rebuild.iteration.verdict import StreamEvidence
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.building import Built, VersionBuilder
from flowcheck.rebuild.version.events import Event, Lost, Read, Skipped, Waiting, closed
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.records import RanksDiffer, RecordWait, StepRecord, StepRecords
from flowcheck.rebuild.version.replica import JobReplica
from flowcheck.rebuild.version.timekeeper import Timekeeper
from updater.errors import UpdaterError

__all__ = ["Follower", "StateTooLate"]

RECORDS_AHEAD = 256  # records kept of iterations whose traffic has not closed yet
RECORDS_BYTES = 1 << 30  # of their buffers, or as many as there are arenas
LOOK_SECONDS = 0.001  # that an idle poll waits for the workers
NOTHING_CAME = "while no packet came"
NO_ROOM = "no slot of the replica is free: readers pin the others; gradients wait in their arenas"


class StateTooLate(UserError):
    """What a state is the state before has passed."""


class Follower:
    """sources[i]: the ring of stream i; names[i]: what people call it. replica: of the captures' weights; None: there
    is no version until `start`. clock: the trainer's; without trainers the first iteration says it. now: seconds of a
    clock that never goes back. stamp: nanoseconds of the clock of the sources' time stamps.

    status: of the newest version, or what keeps it from being one (docs/reference/events.md).
    verified: the newest step of this unbroken chain whose own checksums matched; None: there is none.
    matches: the trainer's checksums that have matched; a mismatch makes it 0 again.
    next: the iteration that the current version waits for; None: there is no version, or its chain has ended.
    moved: did the last poll find anything to do? What threads have placed is no such thing. closing_seconds: spent on
    iterations that closed, and on updates.
    """

    def __init__(
        self, plan: JobPlan, sources: Sequence[Source], names: Sequence[str], policy: Policy,
        replica: JobReplica | None = None, clock: Clock | None = None, now: Callable[[], float] = time.monotonic,
        stamp: Callable[[], int] = time.time_ns,
    ) -> None:
        self.plan, self.policy, self.replica, self.clock = plan, policy, replica, clock or Clock()
        self._names, self._now = names, now
        self.engine = Engine(plan.engine)
        self.collector = EvidenceCollector(plan, self.engine)
        if policy.sources_wait:
            self.collector.times = CaptureTimes(self.engine, names)
        self.scheduler = ArenaScheduler(
            self.engine, sources, plan.cells, in_order=policy.sources_wait, holes=HoleWatch(plan, self.engine)
        )
        self.keeper = Timekeeper(self.engine, self.scheduler, records=bool(plan.job.step_values), now=stamp)
        self.records = StepRecords(plan.job, self.clock)
        self._builder = VersionBuilder(plan, self.engine, self.records)
        self._wait = RecordWait(policy.record_seconds)
        self._room = RecordWait(math.inf)  # for a slot: readers let go of theirs, or their processes end
        self._gradients = bool(plan.job.gradient_calls(0))  # otherwise all that iterations bring are parameters
        self.next: int | None = None
        self.status = "waiting"
        self.verified: int | None = None
        self.matches = 0  # of this run, whatever its versions were patched with
        self.first_iteration = -1  # that closed
        self.moved = False
        self.closing_seconds = 0.0
        self._gap = False  # iterations were skipped
        self._over = False  # there is no more traffic
        self._hurries = False  # nor anything from trainers
        self._contradicted = ""  # by the record of another rank: an iteration that has been built with
        self._coming: int | None = None  # a state before this iteration is on its way
        self._ahead = False  # records run ahead of the traffic, and that was said
        self._pending: tuple[Judged, dict[str, int]] | None = None  # workers are at its version; what `grown` said
        self._held: range | None = None  # closed, and workers still read its arena

    # -- from trainers --

    def keep_record(self, iteration: int, record: StepRecord, rank: int) -> list[Event]:
        """Keep a step record of an iteration. Raises UserError where it cannot be believed."""
        if self.replica is not None:
            self.replica.heard(self.clock.after(iteration))
        awaited = max(self.engine.oldest, self.next or 0)  # a state may be far ahead of what still has to close
        nbytes = sum(tensor.nbytes for tensor in record.buffers.values())
        ahead = min(RECORDS_AHEAD, max(self.plan.engine.arenas, RECORDS_BYTES // max(nbytes, 1)))
        if iteration > awaited + ahead:
            if self._ahead:
                return []
            self._ahead = True  # a mirror that is down; what these belong to will not be complete either
            return [Waiting(
                awaited, f"no packets of it, while a record says that iteration {self.clock.number(iteration)} is over;"
                f" records further than {ahead} ahead are not kept",
            )]
        self._ahead = False
        try:
            self.records.keep(iteration, record, rank, self.engine.oldest)
        except RanksDiffer as error:
            if not error.closed or self.next is None:
                raise
            self._contradicted = error.what  # nobody knows whose state the versions since then are
            return []
        if iteration in self.records:
            self.keeper.note("record", iteration)
        return []

    def announce(self, iteration: int) -> None:
        """A state before `iteration` is being sent: keep that iteration and what follows until it is here."""
        self._coming = iteration

    def withdraw(self) -> None:
        """The state that was announced will not come."""
        self._coming = None

    def hurry(self) -> None:
        """Nothing more comes from trainers: until `finish` no iteration waits for a word of theirs."""
        self._hurries, self._coming = True, None

    def check(self, iteration: int) -> None:
        """Raises StateTooLate if a state before `iteration` is."""
        if iteration < self.engine.oldest and self.engine.begun >= 0:
            number, passed = self.clock.number(iteration), self.clock.number(self.engine.oldest - 1)
            raise StateTooLate(f"the state before iteration {number} is here, and {passed} has passed")

    def start(self, replica: JobReplica, iteration: int) -> None:
        """Go on from a version that waits for `iteration`. No other may have to be ended (settle)."""
        assert self._pending is None
        self._builder.drop()
        if self.replica is not None and self.replica is not replica:
            self.replica.close()
        self.replica, self.next, self.status, self.verified = replica, iteration, UNVERIFIED, None
        self._ahead = False
        self.keeper.begin()

    # -- driving --

    def place_in_threads(self, placers: Placers) -> None:
        """From now on these threads take packets, at all times; else poll() does. Their rings are those of the sources.
        Until finish() or close()."""
        self.scheduler.leave_to(placers.attach(self.engine))

    def leave_threads(self) -> None:
        """The threads take nothing more for this job."""
        self.scheduler.leave_to(None)

    def run(self) -> Iterator[Event]:
        """All that happens until every source has ended. Rests while nothing moves."""
        while not self.scheduler.ended:
            yield from self.poll()
            yield Read(self.scheduler.consumed)
            if not self.moved:
                time.sleep(IDLE_SECONDS)
        yield from self.finish()

    def poll(self) -> Iterator[Event]:
        """One look at the rings, and what may close."""
        if self._contradicted:
            yield from self.settle()
            why, self._contradicted = self._contradicted, ""
            for event in self._lose(why, DIVERGED):
                yield replace(event, apart=True) if isinstance(event, Lost) else event
        taken = self.scheduler.poll()
        here = taken and not self.scheduler.by_threads  # else looking again at once would only take their processor
        moved = yield from self._heed(0 if here else LOOK_SECONDS)
        while due := self.scheduler.due():
            if self.scheduler.is_whole(due[0]):
                self.keeper.note("covered", due[0])
            wait, said = self._must_wait(due[0])
            yield from said
            if wait:
                break
            moved = True
            yield from self._close(due)
        if (moved or taken) and self.next is not None and self._ready and self._pending is None:
            assert self.replica is not None
            begin = self._now()
            self._builder.look(self.replica, self.next)
            self.closing_seconds += self._now() - begin
        self.moved = moved or here or self._pending is not None

    def finish(self) -> Iterator[Event]:
        """No more traffic: judge what is still open, and say what has nothing that could be judged."""
        why = "while their packets waited for an arena" if self.scheduler.blocked else NOTHING_CAME
        self.leave_threads()
        self.engine.finish()
        self._over = True
        self._coming = None
        yield from self.settle()
        for iteration in self.scheduler.open:
            yield from self._close(range(iteration, iteration + 1))
            yield from self.settle()
        if unseen := self.records.after(self.engine.begun):  # trainers are through with them
            yield from self._skip(unseen[0], unseen[-1], why)
            self.records.forget(unseen[-1])
        self._hurries = False

    def settle(self) -> Iterator[Event]:
        """Wait for the version that workers are at, if there is one, and end it."""
        while self._pending is not None:
            yield from self._heed(-1)

    def close(self) -> None:
        """Let go of the threads and of the replica."""
        self.leave_threads()
        self._builder.drop()
        if self.replica is not None:
            self.replica.close()

    # -- one iteration --

    def _must_wait(self, iteration: int) -> tuple[bool, list[Event]]:
        """Must this iteration stay open for something that does not come over the wire, and is that to be said?"""
        if self._pending is not None or (self._coming is not None and iteration >= self._coming):
            return True, []
        if iteration != self.next:
            return False, []
        if self._awaits_record(iteration):
            if self._hurries:
                return False, []
            wait, say = self._wait.look(iteration, self._now())
            return wait, [Waiting(iteration, "its step record is not here")] if say else []
        if self._has_room(iteration):
            return False, []
        _, say = self._room.look(iteration, self._now())
        return True, [Waiting(iteration, NO_ROOM)] if say else []

    def _awaits_record(self, iteration: int) -> bool:
        """May a record that this iteration needs still come?"""
        return bool(self.plan.job.step_values) and iteration not in self.records

    def _has_room(self, iteration: int) -> bool:
        """Is there a slot for the version of an iteration that is complete? Of another one none will be built."""
        complete = self.engine.covered(iteration) >= self.plan.cells[min(iteration, 1)]
        if not complete or self.replica is None or not self.replica.ready:
            return True
        return self._builder.reserve(self.replica, iteration)

    def _close(self, due: range) -> Iterator[Event]:
        begin = self._now()
        self.scheduler.close(due)
        try:
            yield from self._skip(due[0], due[-1]) if len(due) > 1 else self.judge(due[0])
        finally:
            self._held = due
            self._release()
            self.closing_seconds += self._now() - begin

    def _release(self) -> None:
        """Free the arena of what has closed, unless workers read it."""
        if self._held is not None and not self._builder.reads:
            self.scheduler.retire(self._held)
            self._held = None

    def judge(self, iteration: int) -> Iterator[Event]:
        """Judge an iteration; if the verdict stands, have its version built."""
        if self.first_iteration < 0:
            self.first_iteration = iteration
            yield from self._begin(iteration)
        streams = tuple(
            StreamEvidence(name, self.scheduler.state(i, iteration)) for i, name in enumerate(self._names)
        )
        record = self.records.of(iteration)
        follows = iteration == self.next or not self._chained
        flows = self.engine.flows()
        judged = self.collector.collect(
            iteration, streams, record=record is not None, follows=follows, final=self._final(iteration), flows=flows
        )
        counts = self.collector.grown(flows)
        stands = self._buildable(judged)
        if stands and self._ready:
            stands = yield from self._build(judged, record)
        if stands and self._ready:
            self._pending = judged, counts
            yield from self._heed(0)
        else:
            yield from self._end(judged, counts, stands)
        self.records.forget(iteration)
        if self.policy.endless and iteration > self.first_iteration + 1:
            self.engine.forget()  # but what may refute the manifest as a whole stays for the first two

    def _buildable(self, judged: Judged) -> bool:
        """May the version of this iteration be built?"""
        return judged.verdict.publishable

    def _final(self, iteration: int) -> Finality:
        return "ended" if self._over else self.scheduler.final(iteration)

    def _begin(self, iteration: int) -> Iterator[Event]:
        """The first iteration closes."""
        if self.policy.trainers:
            if self.next is not None and iteration > self.next:  # the mirror began after the trainer's state
                yield from self._miss(self.next, iteration - 1)
            return
        assert self.replica is not None
        self.replica.learn(self.engine)
        if not self.replica.ready:  # gradients alone are a chain, too
            self.next = None if self._gap else iteration
            return
        # Iterations count from the communicator's birth. Captures that begin with it go on from whatever step the
        # weights have; captures that begin later need weights of just that step.
        self.clock = Clock(self.replica.first_step if iteration == 0 else 0)
        self.next = self.clock.next(self.replica.step)

    def _build(self, judged: Judged, record: StepRecord | None) -> Generator[Event, None, bool]:
        """Hand what is left of the next version to the workers. Can it be built?"""
        assert self.replica is not None
        iteration = judged.verdict.iteration
        try:
            self._builder.conclude(self.replica, iteration, judged.buckets, record)
        except UpdaterError as error:
            yield from self._lose(f"iteration {self.clock.number(iteration)} cannot be applied: {error}")
            return False
        return True

    def _heed(self, seconds: float) -> Generator[Event, None, bool]:
        """End the version that workers are at once they are done, for which this waits so long (negative: until they
        are). True if it did."""
        if self._pending is None:
            return False
        try:
            built = self._builder.built(seconds)
            if not self._builder.reads:
                self.keeper.note("applied", self._pending[0].verdict.iteration)
            if built is not None:
                (judged, counts), self._pending = self._pending, None
                yield from self._end_built(judged, counts, built)
            return built is not None
        finally:
            self._release()

    def _end_built(self, judged: Judged, counts: dict[str, int], built: Built) -> Iterator[Event]:
        if built.differs is not None:
            judged = judged.with_checksum("mismatch" if built.differs else "match")
        if built.differs:
            assert self.replica is not None
            self.replica.discard()
            self.matches = 0
            number = self.clock.number(judged.verdict.iteration)
            why = f"tensor {built.differs!r} of iteration {number} differs from the trainer's"
            yield from self._lose(why, DIVERGED)
            yield from self._end(judged, counts, False)
        else:
            self.matches += built.differs == ""
            yield from self._end(judged, counts, True, built)

    def _end(
        self, judged: Judged, counts: dict[str, int], stands: bool, built: Built | None = None
    ) -> Iterator[Event]:
        """Publish the version that was built for this iteration, or give the chain up; say what became of it."""
        iteration = judged.verdict.iteration
        published = stands
        if stands:
            published = built is None or self._publish(judged, built)
            self.next = self.clock.next(self.clock.after(iteration))
        self.keeper.ended(iteration, published=published)
        lag = max(self.records.newest - self.published, 0)
        yield closed(judged, counts, built or Built(), published=published, status=self.status, lag=lag,
                     lost=self.next is None)
        if self.next is not None and iteration >= self.next and not stands:
            clause, reason = judged.verdict.failing[0]
            number = self.clock.number(iteration)
            yield from self._lose(f"iteration {number} is not published: {clause.value}: {reason}", last=iteration)

    def _publish(self, judged: Judged, built: Built) -> bool:
        """Publish the version that was built. False: it is one that must not be."""
        assert self.replica is not None
        status = VersionStatus() if self.verified is None else VersionStatus.follows(self.verified)
        if built.differs == "":
            status, self.verified = VersionStatus(VERIFIED), self.clock.after(judged.verdict.iteration)
        self.status = str(status)
        self.replica.publish(status.verified, self.status, judged.verdict.unproven, self.matches)
        return True

    def _skip(self, first: int, last: int, why: str = NOTHING_CAME) -> Iterator[Event]:
        self._gap = True
        yield Skipped(first, last, why)
        yield from self._miss(first, last, why)

    def _miss(self, first: int, last: int, why: str = NOTHING_CAME) -> Iterator[Event]:
        if self.next is not None and self.next <= last:
            one, other = self.clock.number(first), self.clock.number(last)
            said = f"iterations {one} to {other}" if first < last else f"iteration {other}"
            yield from self._lose(f"{said} passed {why}", last=last)

    def _lose(self, why: str, status: str = "lost", last: int | None = None) -> Iterator[Event]:
        """last: the iteration that was lost, and those before it; None: more is wrong than that."""
        if self.next is None or not self._chained:
            return
        self._builder.drop()
        step = self.clock.after(self.next)
        self.next, self.status, self.verified = None, status, None
        if status != DIVERGED:
            yield Lost(why)
            return
        withdrawn = False
        if self.replica is not None:
            served = self.replica.serves
            self.replica.withdraw()  # what was wrong may have been wrong since the last match
            if not self.replica.serves:
                withdrawn = served
                self.replica.close()
                self.replica = None
        yield Lost(why, withdrawn, step)

    @property
    def _ready(self) -> bool:
        """Is there a version?"""
        return self.replica is not None and self.replica.ready

    @property
    def _chained(self) -> bool:
        """Does an iteration need the one before it? Gathered parameters alone do not."""
        return self.policy.trainers or self._ready or self._gradients

    # -- what is said of it --

    @property
    def published(self) -> int:
        """The iteration whose version is current, -1 and less: none of those that were followed."""
        return self.clock.made(self.replica.step) if self.replica is not None and self.replica.serves else -1
