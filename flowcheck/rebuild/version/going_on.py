"""A follower that goes on from lost gradients: versions are built with holes, held, patched, and then published.

    follower = PartialFollower(plan, sources, names, policy, ..., patched=True)
    follower.partial.ask(budget, ranks), take(patch)           whoever talks to the trainers (node/groups/ranges.py)
    follower.give_up_ranges(why)                                they cannot: the chain ends as it does without
    follower.begin_from(replica)                                of a job of which nothing is here, or not any more
    follower.begin_from(replica, whole=True)                    with what an earlier process left of it
    follower.expect(step); go_on_with(...) or go_on_without()   a version of a peer comes in place of all of it

What was lost of an iteration is stale (partial.py). One that was lost whole, or of which more is wrong than that
gradients are missing, leaves everything stale. Nothing is published before the last stale element was patched, and the
last complete version is served meanwhile. An iteration waits for the records of ranks that were asked, as it does for
its own: with them their patches are here. A job is begun in the same way, at the oldest step of which records are here
without a gap behind them. With what an earlier process left it goes on as if it had been there: the iterations that
were missed meanwhile are iterations that were lost whole, and if there are none, nothing is stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.verdict import Clause
from flowcheck.rebuild.version.building import Built
from flowcheck.rebuild.version.events import Begun, Event, Held, Patched, Waiting
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.partial import Partial
from flowcheck.rebuild.version.records import RecordWait, StepRecord
from flowcheck.rebuild.version.replica import JobReplica
from updater.errors import UpdaterError
from updater.replica import Slot

__all__ = ["PartialFollower"]


class PartialFollower(Follower):
    """patched: may versions be built with holes? It takes trainers that can be asked, step records, and three slots.
    partial: what is stale; None: nothing may be."""

    def __init__(self, *given: Any, patched: bool = False, **named: Any) -> None:
        super().__init__(*given, **named)
        self.partial = Partial(self.plan) if patched else None
        self._builder.partial = self.partial
        self._patches_wait = RecordWait(self.policy.record_seconds)
        self.emptied = 0  # how often everything became stale
        self._expects = False  # a peer's version
        self._begins = False  # with the next record
        self._since: int | None = None  # the first iteration of which no version was published
        self._before = (0, 0)  # elements patched until then, and bytes of state that had come

    # -- from trainers --

    def keep_record(self, iteration: int, record: StepRecord, rank: int) -> list[Event]:
        if self.partial is not None:
            self.partial.heard(rank, iteration)
        begun: list[Event] = []
        if self._begins and self.records.counts(rank):
            begun = self._begin_at(max(iteration, self.engine.oldest))  # whose record comes, too
        return begun + super().keep_record(iteration, record, rank)

    def start(self, replica: JobReplica, iteration: int) -> None:
        if self.partial is not None:
            self.partial.clear()
        self._since, self._begins = None, False
        super().start(replica, iteration)

    def begin_from(self, replica: JobReplica, *, whole: bool = False) -> list[Event]:
        """Go on without a state, as soon as there is a record to go on with: from `replica`, which is empty, or has a
        version that is served until there is a newer one. whole: that version is of this very start of the job and good
        to build on, so no record is waited for. No other may have to be ended (settle)."""
        assert self._pending is None and self.partial is not None and self.next is None
        self._builder.drop()
        if self.replica is not None and self.replica is not replica:
            self.replica.close()
        if whole and (next_ := self.clock.next(replica.step)) >= self.engine.oldest:
            self.start(replica, next_)
            return [Begun(next_, 0)]
        self.replica, self._begins = replica, True
        first = self.records.since(self.engine.oldest)
        return [] if first is None else self._begin_at(first)

    def _begin_at(self, iteration: int) -> list[Event]:
        """All that the version before this iteration holds is stale."""
        assert self.partial is not None and self.replica is not None
        try:
            self.replica.leap(self.clock.before(iteration))
        except UpdaterError:  # readers pin every slot, or it has this iteration already: with a later record
            return []
        super().start(self.replica, iteration)
        self._begins = False
        self.emptied += 1
        if self.replica.serves:
            self.partial.clear()
            self.partial.lost_all()
        else:
            self.partial.begin()
        self._begin_stale(iteration)
        return [Begun(iteration, self.partial.elements)]

    # -- from a peer --

    @property
    def useful(self) -> tuple[int, int]:
        """Least and greatest step of a version that could be gone on from now. One that is greater cannot be there: of
        the iteration that would have made it nothing has come."""
        return self.clock.before(max(self.next or 0, self.engine.oldest)), self.clock.after(self.engine.begun)

    @property
    def expecting(self) -> bool:
        """Does the wire wait for a peer's version? False also where its trainers are gone."""
        return self._expects and self._coming is not None

    @property
    def gives_up(self) -> bool:
        """Are iterations lost meanwhile that this version waits for?"""
        given_up: range = self.engine.given_up
        return bool(self._coming is not None and given_up and given_up.stop > self._coming)

    @property
    def building(self) -> bool:
        """Are workers at a version?"""
        return self._pending is not None

    def expect(self, step: int) -> Slot:
        """Version `step` comes from a peer: the iteration that it waits for is kept, and those behind it; nothing is
        built, and of trainers nothing wanted, before `go_on_with` or `go_on_without`. Returns where it goes. Raises
        UserError: it is of no use any more; UpdaterError: no slot is free."""
        least, most = self.useful
        if self.next is None or self.replica is None or self.partial is None or not least <= step <= most:
            raise UserError(f"step {step} is of no use any more")
        assert self._pending is None
        self._builder.drop()
        self.partial.clear()
        if self.replica.serves:
            self.replica.abandon()
        self._since = self.next = None
        self._expects = True
        self.announce(self.clock.next(step))
        return self.replica.receive(step)

    def go_on_with(
        self, step: int, optimizer: Mapping[str, Any], apart: Mapping[str, torch.Tensor], source: str
    ) -> int:
        """What was expected is there. optimizer, apart: as of JobReplica.received. source: whose it is, for its mark.
        The iteration that it waits for. Raises UserError: that has passed; UpdaterError: it is not of this job."""
        assert self._expects and self.replica is not None
        iteration = self.clock.next(step)
        self.check(iteration)
        self.replica.received(optimizer, apart, source)
        self._expects = False
        self.withdraw()
        self.matches = 0
        self.start(self.replica, iteration)
        return iteration

    def go_on_without(self) -> list[Event]:
        """It does not come, or is not good: all is asked for by ranges, from the next record on."""
        if not self._expects:
            return []
        self._expects = False
        self.withdraw()
        assert self.replica is not None
        if self.replica.building:
            self.replica.discard()
        return self.begin_from(self.replica)

    # -- without all of it --

    def give_up_ranges(self, why: str) -> Iterator[Event]:
        """Elements that are stale will not come: end the chain, if there are any, and go on as without ranges."""
        yield from self.settle()
        stale = self.partial is not None and self.partial.elements > 0
        self._forget_stale()
        self.partial = self._builder.partial = None
        if stale:
            yield from self._lose(why)

    # -- one iteration --

    def _must_wait(self, iteration: int) -> tuple[bool, list[Event]]:
        wait, said = super()._must_wait(iteration)
        if wait or self._hurries or self.partial is None or iteration != self.next:
            return wait, said
        if not self.partial.awaits(iteration):
            return wait, said
        wait, say = self._patches_wait.look(iteration, self._now())
        if not wait:
            self.partial.give_up(iteration)
        late = [Waiting(iteration, "the step record of a rank that was asked is not here")] if say else []
        return wait, [*said, *late]

    def _awaits_record(self, iteration: int) -> bool:
        """Trainers that were away have sent none of some iterations, and those that come are in order."""
        past = self.partial is not None and self.partial.passed(iteration, self.records.counts)
        return super()._awaits_record(iteration) and not past

    def _has_room(self, iteration: int) -> bool:
        """With holes or without, its version will be built."""
        if self.partial is None or self.replica is None or not self.replica.ready:
            return super()._has_room(iteration)
        return self._builder.reserve(self.replica, iteration)

    def _buildable(self, judged: Judged) -> bool:
        iteration, clauses = judged.verdict.iteration, {clause for clause, _ in judged.verdict.failing}
        if self.partial is None or clauses != {Clause.COVERED} or iteration != self.next or not self._ready:
            return super()._buildable(judged)
        self.partial.lost(iteration, judged.buckets)
        return True

    def _end(
        self, judged: Judged, counts: dict[str, int], stands: bool, built: Built | None = None
    ) -> Iterator[Event]:
        if self.partial is None or built is None or not stands:
            yield from super()._end(judged, counts, stands, built)
            return
        stale, iteration = self.partial.elements, judged.verdict.iteration
        if self._since is None and (stale or built.patched):
            self._begin_stale(iteration, built.patched)
            held = stale > 0
        else:
            held = False
        if self._since is not None:
            judged = judged.with_stale(stale)
        yield from super()._end(judged, counts, stands, built)
        if held:
            yield Held(iteration, stale, all=False, why="gradients were lost")
        elif self._since is not None and not stale:
            since, self._since = self._since, None
            healed, received = self._before
            yield Patched(iteration, since, self.partial.healed - healed, self.partial.received - received)

    def _publish(self, judged: Judged, built: Built) -> bool:
        assert self.replica is not None
        if not judged.verdict.publishable:
            self.replica.hold()
            return False
        if self._since is not None:  # what was patched does not follow what was compared before
            self.verified = None
        return super()._publish(judged, built)

    def _lose(self, why: str, status: str = "lost", last: int | None = None) -> Iterator[Event]:
        """Leap over what was lost, if that is all that is wrong."""
        if last is None or self.next is None or not self._leap(last):
            self._forget_stale()
            yield from super()._lose(why, status, last)
            return
        assert self.partial is not None
        before, self.next = self.next, last + 1
        if self._since is None:
            self._begin_stale(before)
        yield Held(last, self.partial.elements, all=True, why=why)

    def _begin_stale(self, iteration: int, patched: int = 0) -> None:
        """No version is published from this iteration on. patched: elements of its own."""
        assert self.partial is not None
        self._since, self._before = iteration, (self.partial.healed - patched, self.partial.received)

    def _leap(self, last: int) -> bool:
        if self.partial is None or self.replica is None or not self._ready:
            return False
        if self.collector.refused(self.engine.disagreements()):
            return False
        self._builder.drop()
        try:
            self.replica.leap(self.clock.after(last))
        except UpdaterError:  # readers pin every slot
            return False
        self.partial.lost_all()
        self.emptied += 1
        return True

    def _forget_stale(self) -> None:
        """The chain ends: the next version is built from no partial one."""
        if self.partial is not None:
            self._builder.drop()
            self.partial.clear()
            if self.replica is not None and self.replica.serves:
                self.replica.abandon()
            elif self.replica is not None:  # it never had a version
                self.replica.close()
                self.replica = None
            self._since = None
