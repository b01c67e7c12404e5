"""One job's iterations into versions: arenas -> what may close -> evidence -> verdict -> replica.

                                     `-> buckets that are complete -> the replica's workers -^

    follower = Follower(plan, arenas, Policy.offline(), JobReplica(plan, init))
    for event in follower.run(): ...                   captures, to their end

    follower = Follower(plan, arenas, Policy.live(30.0), clock=Clock(first))
    follower.keep_record(...), start(replica, iteration)        what trainers send; and `trainers.announce(iteration)`
    for event in follower.poll(): ...                  again and again, and finish() where training ends

Whoever drives it learns what happened from the events that it returns (events.py), one at a time: the current version
and the arena are as the event says until the next one is asked for. What a replay and a node do differently is the
policy's (policy.py). Where the chain of versions is, and which changes are legal: chain.py.

An iteration that cannot be published ends the chain, unless a repair (repair.py) knows how to go on: the version before
stays the current one, and later ones are refused (clause `previous`) until there is a state to go on from.

Complete buckets of the iteration that the version waits for are applied while it is still open (building.py); the
verdict publishes the version or drops it. What is left when the verdict stands is done by workers, and so are the sums
where a record brings checksums: arenas are filled meanwhile, and no other iteration closes before this one has ended.
Its arena is free again once all of it was applied, and copied where somebody keeps it (keeping.py).

One thread drives it, which waits for no worker while something comes. Where threads fill the arenas it looks every half
millisecond. Memory: a replica, and as many step records as iterations can be open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.version_status import DIVERGED, UNVERIFIED
from flowcheck.rebuild.iteration.arena_source import ArenaSource
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.building import Built, VersionBuilder
from flowcheck.rebuild.version.chain import Chain, VersionChain
from flowcheck.rebuild.version.events import Event, Lost, Read, Skipped, Waiting, closed
from flowcheck.rebuild.version.keeping import Keeping, NotKept
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.records import RecordWait, StepRecord
from flowcheck.rebuild.version.repair import Repair
from flowcheck.rebuild.version.replica import JobReplica
from flowcheck.rebuild.version.timekeeper import Timekeeper
from flowcheck.rebuild.version.trainers import Trainers
from updater.errors import UpdaterError

__all__ = ["Follower", "StateTooLate"]

LOOK_SECONDS = 0.001  # that an idle poll waits for the workers
NOTHING_CAME = "while no packet came"
NO_ROOM = "no slot of the replica is free: readers pin the others; gradients wait in their arenas"


class StateTooLate(UserError):
    """What a state is the state before has passed."""


class Follower:
    """replica: of the captures' weights; None: none until `start`. clock: the trainer's; without trainers the first
    iteration says it. now: seconds of a clock that never goes back. stamp: nanoseconds of the clock that iterations are
    timed by.

    chain: the versions, and the iteration that the next one waits for.
    repairs: how to go on where an iteration has not come whole; whoever has some adds them.
    keeping: who is handed each iteration whose verdict stands.
    first_iteration: that closed; -1: none has.
    moved: did the last poll find anything to do, besides what threads have placed? closing_seconds: spent on iterations
    that closed, and on updates.
    """

    def __init__(
        self, plan: JobPlan, arenas: ArenaSource, policy: Policy, replica: JobReplica | None = None,
        clock: Clock | None = None, now: Callable[[], float] = time.monotonic, stamp: Callable[[], int] = time.time_ns,
    ) -> None:
        self.plan, self.arenas, self.policy, self.clock, self.now = plan, arenas, policy, clock or Clock(), now
        self.chain = VersionChain(replica)
        self.repairs: list[Repair] = []
        self.keeping: Keeping = NotKept()
        self.trainers = Trainers(plan, self.clock, policy.record_seconds)
        self.records = self.trainers.records
        self.keeper = Timekeeper(arenas, records=bool(plan.job.step_values), now=stamp)
        self.builder = VersionBuilder(plan, arenas, self.records)
        self._room = RecordWait(math.inf)  # for a slot: readers let go of theirs, or their processes end
        self._gradients = bool(plan.job.gradient_calls(0))  # otherwise all that iterations bring are parameters
        self.first_iteration, self.moved, self.closing_seconds = -1, False, 0.0
        self._gap = False  # iterations were skipped
        self._pending: Judged | None = None  # workers are at its version
        self._closed: range | None = None  # its arena is still read

    # -- from trainers --

    def keep_record(self, iteration: int, record: StepRecord, rank: int) -> list[Event]:
        """Keep a step record of an iteration. Raises UserError where it cannot be believed."""
        if self.chain.replica is not None:
            self.chain.replica.heard(self.clock.after(iteration))
        said = self.trainers.keep(iteration, record, rank, self.arenas.oldest, self.chain.next)
        if not said and iteration in self.records:
            self.keeper.note("record", iteration)
        return list(said)

    def check(self, iteration: int) -> None:
        """Raises StateTooLate if a state before `iteration` is."""
        if iteration < (oldest := self.arenas.oldest) and self.arenas.begun >= 0:
            number, passed = self.clock.number(iteration), self.clock.number(oldest - 1)
            raise StateTooLate(f"the state before iteration {number} is here, and {passed} has passed")

    def start(self, replica: JobReplica, iteration: int) -> None:
        """Go on from a version that waits for `iteration`. No other may have to be ended (settle)."""
        self.go_on(replica, iteration, Chain.FOLLOWING)
        for repair in self.repairs:
            repair.started()

    def go_on(self, replica: JobReplica, iteration: int, state: Chain) -> None:
        """Go on at `iteration`: from a version (FOLLOWING), or from one whose elements are stale (HOLDING)."""
        assert self._pending is None
        self.builder.drop()
        self.chain.put(replica)
        self.chain.move(state, iteration)
        self.chain.status, self.chain.verified = UNVERIFIED, None
        self.trainers.begin()
        self.keeper.begin()
        self.keeping.begin()

    # -- driving --

    def run(self) -> Iterator[Event]:
        """All that happens until every source has ended. Rests while nothing moves."""
        while not self.arenas.ended:
            yield from self.poll()
            yield Read(self.arenas.consumed)
            if not self.moved:
                time.sleep(IDLE_SECONDS)
        yield from self.finish()

    def poll(self) -> Iterator[Event]:
        """One look at the rings, and what may close."""
        if self.trainers.contradicted:
            yield from self.settle()
            why, self.trainers.contradicted = self.trainers.contradicted, ""
            for event in self.lose(why, DIVERGED):
                yield replace(event, apart=True) if isinstance(event, Lost) else event
        taken = self.arenas.poll()
        self._release()
        here = taken and not self.arenas.fills_itself  # else looking again at once would only take their processor
        moved = yield from self._finish_pending(0 if here else LOOK_SECONDS)
        while due := self.arenas.due():
            if self.arenas.is_whole(due[0]):
                self.keeper.note("covered", due[0])
            wait, said = self._must_wait(due[0])
            yield from said
            if wait:
                break
            moved = True
            yield from self._close(due)
        if (moved or taken) and self.chain.next is not None and self.chain.ready and self._pending is None:
            assert self.chain.replica is not None
            begin = self.now()
            self.builder.look(self.chain.replica, self.chain.next)
            self.closing_seconds += self.now() - begin
        self.moved = moved or here or self._pending is not None

    def finish(self) -> Iterator[Event]:
        """No more traffic: judge what is still open, and say what has nothing that could be judged."""
        why = "while their packets waited for an arena" if self.arenas.blocked else NOTHING_CAME
        self.arenas.finish()
        self.trainers.withdraw()
        yield from self.settle()
        for iteration in self.arenas.open:
            while any(repair.wants(iteration) for repair in self.repairs):
                time.sleep(IDLE_SECONDS)  # nobody polls any more, and there is nothing else to do
            yield from self._close(range(iteration, iteration + 1))
            yield from self.settle()
        if unseen := self.records.after(self.arenas.begun):  # trainers are through with them
            yield from self._skip(unseen[0], unseen[-1], why)
            self.records.forget(unseen[-1])
        self.trainers.hurries = False

    def settle(self) -> Iterator[Event]:
        """Wait for the version that workers are at, if there is one, and end it."""
        while self._pending is not None:
            yield from self._finish_pending(-1)

    def close(self) -> None:
        """Let go of the threads and of the replica."""
        while self.keeping.reads:
            time.sleep(IDLE_SECONDS)
        self.arenas.stop()
        self.builder.drop()
        if self.chain.replica is not None:
            self.chain.replica.close()

    # -- one iteration --

    def _must_wait(self, iteration: int) -> tuple[bool, list[Event]]:
        """Must this iteration stay open for something that does not come over the wire, and is that to be said?"""
        if any(repair.wants(iteration) for repair in self.repairs):
            return True, []
        wait, said = self._must_wait_for_trainers(iteration)
        if wait or self.trainers.hurries or iteration != self.chain.next:
            return wait, said
        for repair in self.repairs:
            longer, late = repair.awaits(iteration)
            wait, said = wait or longer, said + late
        return wait, said

    def _must_wait_for_trainers(self, iteration: int) -> tuple[bool, list[Event]]:
        """For a state, a record, or a slot that readers pin?"""
        if self._pending is not None or self._closed is not None or self.trainers.holds_up(iteration):
            return True, []
        if iteration != self.chain.next:
            return False, []
        if self.trainers.lack_record(iteration) and not any(repair.passed(iteration) for repair in self.repairs):
            if self.trainers.hurries:
                return False, []
            wait, say = self.trainers.wait.look(iteration, self.now())
            return wait, [Waiting(iteration, "its step record is not here")] if say else []
        if self._has_room(iteration):
            return False, []
        return True, [Waiting(iteration, NO_ROOM)] if self._room.look(iteration, self.now())[1] else []

    def _has_room(self, iteration: int) -> bool:
        """Is there a slot for the version of an iteration, if one will be built?"""
        if self.chain.replica is None or not self.chain.ready:
            return True
        if not self.arenas.complete(iteration) and not any(repair.builds(iteration) for repair in self.repairs):
            return True
        return self.builder.reserve(self.chain.replica, iteration)

    def _close(self, due: range) -> Iterator[Event]:
        begin = self.now()
        while not self._release():
            time.sleep(IDLE_SECONDS)  # nobody polls any more, and it is read at the speed of memory
        self.arenas.close(due)
        try:
            yield from self._skip(due[0], due[-1]) if len(due) > 1 else self.judge(due[0])
        finally:
            self._closed = due
            self._release()
            self.closing_seconds += self.now() - begin

    def _release(self) -> bool:
        """Free the arena of what has closed, unless somebody reads it. True if none is left."""
        if self._closed is not None and not self.builder.reads and not self.keeping.reads:
            self.arenas.release(self._closed)
            self._closed = None
        return self._closed is None

    def judge(self, iteration: int) -> Iterator[Event]:
        """Judge an iteration; if the verdict stands, have its version built."""
        for repair in self.repairs:
            yield from repair.fill(iteration)
        if self.first_iteration < 0:
            self.first_iteration = iteration
            yield from self._begin(iteration)
        record = self.records.of(iteration)
        follows = iteration == self.chain.next or not self._chained
        judged = self.arenas.judge(iteration, record=record is not None, follows=follows)
        stands = judged.verdict.publishable or any(repair.may_build(judged) for repair in self.repairs)
        if stands and self.chain.ready:
            stands = yield from self._build(judged, record)
        if stands and judged.verdict.publishable:
            self.keeping.offer(judged, record, self.arenas.region(iteration))
        if stands and self.chain.ready:
            self._pending = judged
            self.chain.move(Chain.PATCHING if self.chain.holds else Chain.BUILDING, iteration)
            yield from self._finish_pending(0)
        else:
            yield from self._end(judged, stands)
        self.records.forget(iteration)
        if self.policy.endless and iteration > self.first_iteration + 1:
            self.arenas.forget()  # but what may refute the manifest as a whole stays for the first two

    def _begin(self, iteration: int) -> Iterator[Event]:
        """The first iteration closes."""
        chain = self.chain
        if self.policy.trainers and chain.next is not None and iteration > chain.next:
            yield from self._miss(chain.next, iteration - 1)  # the mirror began after the trainer's state
        if self.policy.trainers:
            return
        assert chain.replica is not None
        chain.replica.learn(self.arenas.first_weights)
        if not chain.ready:  # gradients alone are a chain, too
            if not self._gap:
                chain.move(Chain.FOLLOWING, iteration)
            return
        # Iterations count from the communicator's birth. Captures that begin with it go on from whatever step the
        # weights have; captures that begin later need weights of just that step.
        self.clock = Clock(chain.replica.first_step if iteration == 0 else 0)
        chain.move(Chain.FOLLOWING, self.clock.next(chain.replica.step))

    def _build(self, judged: Judged, record: StepRecord | None) -> Generator[Event, None, bool]:
        """Hand what is left of the next version to the workers. Can it be built?"""
        assert self.chain.replica is not None
        iteration = judged.verdict.iteration
        try:
            self.builder.conclude(self.chain.replica, iteration, judged.buckets, record)
        except UpdaterError as error:
            yield from self.lose(f"iteration {self.clock.number(iteration)} cannot be applied: {error}")
            return False
        return True

    def _finish_pending(self, seconds: float) -> Generator[Event, None, bool]:
        """End the version that workers are at once they are done, for which this waits so long (negative: until they
        are). True if it did."""
        if self._pending is None:
            return False
        try:
            built = self.builder.built(seconds)
            if not self.builder.reads:
                self.keeper.note("applied", self._pending.verdict.iteration)
            if built is not None:
                judged, self._pending = self._pending, None
                yield from self._end_built(judged, built)
            return built is not None
        finally:
            self._release()

    def _end_built(self, judged: Judged, built: Built) -> Iterator[Event]:
        if built.differs is not None:
            judged = judged.with_checksum("mismatch" if built.differs else "match")
        if built.differs:
            assert self.chain.replica is not None
            self.chain.replica.discard()
            self.chain.matches = 0
            number = self.clock.number(judged.verdict.iteration)
            why = f"tensor {built.differs!r} of iteration {number} differs from the trainer's"
            yield from self.lose(why, DIVERGED)
            yield from self._end(judged, False)
        else:
            self.chain.matches += built.differs == ""
            said: list[Event] = []
            for repair in self.repairs:
                judged, more = repair.after(judged, built)
                said += more
            yield from self._end(judged, True, built)
            yield from said

    def _end(self, judged: Judged, stands: bool, built: Built | None = None) -> Iterator[Event]:
        """Publish the version that was built for this iteration, or give the chain up; say what became of it."""
        iteration, chain = judged.verdict.iteration, self.chain
        published = stands
        if stands:
            step = self.clock.after(iteration)
            published = built is None or chain.publish(step, judged, matched=built.differs == "")
            awaited = self.clock.next(step)
            chain.move(Chain.HOLDING if judged.evidence.stale else Chain.FOLLOWING, awaited)
        self.keeper.ended(iteration, published=published)
        lag = max(self.records.newest - self.published, 0)
        yield closed(judged, built or Built(), published=published, status=chain.status, lag=lag,
                     lost=chain.next is None)
        if chain.next is not None and iteration >= chain.next and not stands:
            clause, reason = judged.verdict.failing[0]
            number = self.clock.number(iteration)
            yield from self.lose(f"iteration {number} is not published: {clause.value}: {reason}", last=iteration)

    def _skip(self, first: int, last: int, why: str = NOTHING_CAME) -> Iterator[Event]:
        self._gap = True
        yield Skipped(first, last, why)
        yield from self._miss(first, last, why)

    def _miss(self, first: int, last: int, why: str = NOTHING_CAME) -> Iterator[Event]:
        if self.chain.next is not None and self.chain.next <= last:
            one, other = self.clock.number(first), self.clock.number(last)
            said = f"iterations {one} to {other}" if first < last else f"iteration {other}"
            yield from self.lose(f"{said} passed {why}", last=last)

    def lose(self, why: str, status: str = "lost", last: int | None = None) -> Iterator[Event]:
        """The iteration that is awaited will have no version. last: it was lost, and those up to this one, which a
        repair may go on behind; None: more is wrong than that, and the chain ends."""
        chain = self.chain
        if chain.next is None or not self._chained:
            return
        for repair in self.repairs:
            if last is not None and (event := repair.lost(last, why)) is not None:
                yield event
                return
        for repair in self.repairs:
            repair.ended()
        self.builder.drop()
        step = self.clock.after(chain.next)
        withdrawn = chain.end(status)
        yield Lost(why, withdrawn, step) if status == DIVERGED else Lost(why)

    @property
    def _chained(self) -> bool:
        """Does an iteration need the one before it? Gathered parameters alone do not."""
        return self.policy.trainers or self.chain.ready or self._gradients

    @property
    def published(self) -> int:
        """The iteration whose version is current, -1 and less: none of those that were followed."""
        replica = self.chain.replica
        return self.clock.made(replica.step) if replica is not None and replica.serves else -1
