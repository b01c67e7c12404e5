"""A job of which a log is kept: no replica steps with it, and iterations follow each other in a journal (keeping.py).

    log = LogRepair(follower)
    log.record(iteration)           a record has come: the log begins there, or again

Nothing is made whole: where an iteration is lost the log has a hole, and goes on behind it. What its trainers need to
go on from there is a base that is newer (node/versions/journal/logbook.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from flowcheck.job.version_status import UNVERIFIED
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.version.building import Built
from flowcheck.rebuild.version.chain import Chain
from flowcheck.rebuild.version.events import Broken, Event
from flowcheck.rebuild.version.follower import Follower

__all__ = ["LogRepair"]


class LogRepair:
    """A Repair (repair.py). Of one follower, whose chain has no replica."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def record(self, iteration: int) -> list[Event]:
        """From the first record on, trainers send one of each iteration. Its own may have closed before it came."""
        chain = self._follower.chain
        if chain.next is None:
            chain.move(Chain.FOLLOWING, max(iteration, self._follower.arenas.oldest))
            chain.status = UNVERIFIED
        return []

    def lost(self, last: int, why: str) -> Event | None:
        chain, clock = self._follower.chain, self._follower.clock
        assert chain.next is not None
        event = Broken(chain.next, last, why)
        chain.move(Chain.FOLLOWING, clock.next(clock.after(last)))
        return event

    def wants(self, iteration: int) -> bool:
        return False

    def passed(self, iteration: int) -> bool:
        return False

    def builds(self, iteration: int) -> bool:
        return False

    def awaits(self, iteration: int) -> tuple[bool, list[Event]]:
        return False, []

    def fill(self, iteration: int) -> Iterator[Event]:
        return iter(())

    def may_build(self, judged: Judged) -> bool:
        return False

    def after(self, judged: Judged, built: Built) -> tuple[Judged, list[Event]]:
        return judged, []

    def started(self) -> None:
        """A log starts without a state."""

    def ended(self) -> None:
        """The next record begins it again."""
