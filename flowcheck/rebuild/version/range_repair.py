"""Going on from lost gradients: versions are built with holes, held, patched by trainers, and then published.

    repair = RangeRepair(follower);  follower.repairs.append(repair)
    repair.partial.ask(budget, ranks), take(patch)      whoever talks to the trainers (node/groups/ranges.py)
    repair.give_up(why)                                 they cannot: the chain ends as it does without

What was lost of an iteration is stale (partial.py). One that was lost whole, or of which more is wrong than that
gradients are missing, leaves everything stale. Nothing is published before the last stale element was patched, and the
last complete version is served meanwhile. An iteration waits for the records of ranks that were asked, as it does for
its own: with them their patches are here.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.verdict import Clause
from flowcheck.rebuild.version.building import Built
from flowcheck.rebuild.version.chain import Chain
from flowcheck.rebuild.version.events import Event, Held, Patched, Waiting
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.partial import Partial
from flowcheck.rebuild.version.records import RecordWait
from updater.errors import UpdaterError

__all__ = ["RangeRepair"]


class RangeRepair:
    """A Repair (repair.py has what the methods mean). It takes trainers that can be asked, step records, and three
    slots. partial: what is stale. emptied: how often everything became stale. given_up: trainers cannot be asked."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.partial = follower.builder.partial = Partial(follower.plan)
        self.emptied = 0
        self.given_up = False
        self._wait = RecordWait(follower.policy.record_seconds)
        self._since = 0  # while versions are held: the first iteration of which none was published
        self._before = (0, 0)  # elements patched until then, and bytes of state that had come

    def empty(self, *, constants: bool) -> None:
        """All that the next version holds is stale. constants: also what the optimizer does not touch."""
        self.emptied += 1
        if constants:
            self.partial.begin()
        else:
            self.partial.lost_all()

    def hold_from(self, iteration: int, patched: int = 0) -> None:
        """No version is published from this iteration on. patched: elements of its own."""
        self._since, self._before = iteration, (self.partial.healed - patched, self.partial.received)

    def give_up(self, why: str) -> Iterator[Event]:
        """Elements that are stale will not come: end the chain, if there are any, and go on as without ranges."""
        yield from self.follower.settle()
        stale = self.partial.elements > 0
        self.ended()
        self.given_up = True
        self.follower.repairs.remove(self)
        self.follower.builder.partial = None
        if stale:
            yield from self.follower.lose(why)

    # -- before it closes --

    def wants(self, iteration: int) -> bool:
        return False

    def passed(self, iteration: int) -> bool:
        """Trainers that were away have sent none of some iterations, and those that come are in order."""
        return self.partial.passed(iteration, self.follower.records.counts)

    def builds(self, iteration: int) -> bool:
        """With holes or without."""
        return True

    def awaits(self, iteration: int) -> tuple[bool, list[Event]]:
        if not self.partial.awaits(iteration):
            return False, []
        wait, say = self._wait.look(iteration, self.follower.now())
        if not wait:
            self.partial.give_up(iteration)
        return wait, [Waiting(iteration, "the step record of a rank that was asked is not here")] if say else []

    # -- when it has closed --

    def fill(self, iteration: int) -> Iterator[Event]:
        yield from ()

    def may_build(self, judged: Judged) -> bool:
        """If nothing is wrong but that gradients are missing."""
        iteration, clauses = judged.verdict.iteration, {clause for clause, _ in judged.verdict.failing}
        if clauses != {Clause.COVERED} or iteration != self.follower.chain.next or not self.follower.chain.ready:
            return False
        self.partial.lost(iteration, judged.buckets)
        return True

    def after(self, judged: Judged, built: Built) -> tuple[Judged, list[Event]]:
        stale, iteration, held = self.partial.elements, judged.verdict.iteration, self.follower.chain.holds
        if not held and not stale and not built.patched:
            return judged, []
        if not held:
            self.hold_from(iteration, built.patched)
        said: list[Event] = []
        if not held and stale:
            said = [Held(iteration, stale, all=False, why="gradients were lost")]
        elif not stale:
            healed, received = self._before
            patched, nbytes = self.partial.healed - healed, self.partial.received - received
            said = [Patched(iteration, self._since, patched, nbytes)]
        return judged.with_stale(stale), said

    def lost(self, last: int, why: str) -> Event | None:
        """Leap over what was lost, if that is all that is wrong."""
        chain = self.follower.chain
        if chain.replica is None or not chain.ready or chain.next is None or self.follower.arenas.refused():
            return None
        self.follower.builder.drop()
        try:
            chain.replica.leap(self.follower.clock.after(last))
        except UpdaterError:  # readers pin every slot
            return None
        self.empty(constants=False)
        if not chain.holds:
            self.hold_from(chain.next)
        chain.move(Chain.HOLDING, last + 1)
        return Held(last, self.partial.elements, all=True, why=why)

    def started(self) -> None:
        self.partial.clear()

    def ended(self) -> None:
        """A partial version is given up; a replica that never had a whole one is, too."""
        chain = self.follower.chain
        self.follower.builder.drop()
        self.partial.clear()
        if chain.replica is not None and chain.replica.serves:
            chain.replica.abandon()
        else:
            chain.put(None)
