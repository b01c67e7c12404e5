"""The scheduler where placing threads read the rings: it asks them what they have done, and reads nothing itself."""

from collections.abc import Iterable
from typing import Any

import pytest
from parser.machine import NOTHING_SEEN

from flowcheck.rebuild.iteration.holes import Finality
from flowcheck.rebuild.iteration.scheduler import ArenaScheduler

from ..fake_engine import FakeEngine, FakeSource, Packet
from ..scheduled import live


class FakeSeat:
    """said[stream]: packets that its thread has taken since it began, and whether it stands before one. others: packets
    of other jobs that went by in each ring. rings[stream]: packets that wait there, and its room."""

    def __init__(self, *said: tuple[int, bool]) -> None:
        self.said, self.others, self.left = list(said), 100, 0
        self.rings = [(0, 8) for _ in said]

    def look(self, stream: int) -> tuple[int, bool]:
        return self.said[stream]

    def ring(self, stream: int) -> tuple[int, int, int]:
        return self.others + self.said[stream][0], *self.rings[stream]

    def mark(self) -> list[int]:
        return [7]

    def passed(self, mark: list[int]) -> bool:
        return mark != [7]

    def leave(self) -> None:
        self.left += 1

    def drained(self, stream: int) -> bool:
        return False


def of_threads(
    *said: tuple[int, bool], arenas: int = 2, holes: Any = None
) -> tuple[ArenaScheduler, FakeEngine, FakeSeat]:
    """A scheduler of live streams whose packets are left to threads, after its first look."""
    sources = [live([Packet(0)]) for _ in said]
    engine, seat = FakeEngine(None, sources, arenas=arenas), FakeSeat(*(len(said) * [(0, False)]))
    engine.begins_here = True
    scheduler = ArenaScheduler(engine, sources, (1, 1), holes=holes)
    scheduler.poll()
    engine.runs.clear()
    scheduler.leave_to(seat)
    seat.said = list(said)
    return scheduler, engine, seat


def test_what_threads_have_taken_is_asked_of_each_and_nothing_is_read() -> None:
    scheduler, engine, seat = of_threads((5, False), (0, False))
    before = scheduler.consumed
    assert scheduler.poll() is True and scheduler.consumed == before + 5
    assert scheduler.poll() is False and scheduler.consumed == before + 5
    seat.said = [(5, False), (7, False)]
    assert scheduler.poll() is True and scheduler.consumed == before + 12
    seat.said = [(6, False), (9, False)]
    assert scheduler.poll() is True and scheduler.consumed == before + 15
    assert engine.runs == []


@pytest.mark.parametrize(("wanted", "waits"), [(1, False), (2, True), (3, True)])
def test_a_thread_stands_before_a_packet_only_while_that_has_no_arena(wanted: int, waits: bool) -> None:
    """A thread that says it is blocked may have its arena by now."""
    scheduler, engine, seat = of_threads((1, False), (1, True))
    engine.want[1] = wanted
    scheduler.poll()
    assert scheduler.blocked is waits
    seat.said[1] = (1, False)
    scheduler.poll()
    assert scheduler.blocked is False


def test_a_thread_that_is_not_blocked_waits_for_nothing_whatever_it_wanted_before() -> None:
    scheduler, engine, _ = of_threads((1, False))
    engine.want[0] = 9
    scheduler.poll()
    assert scheduler.blocked is False


def test_packets_of_other_jobs_count_and_are_nothing_that_moved() -> None:
    scheduler, _, seat = of_threads((5, False))
    scheduler.poll()
    before, seat.others = scheduler.consumed, 130
    assert scheduler.poll() is False and scheduler.consumed == before + 30


def test_what_waits_is_what_the_threads_still_have_before_them() -> None:
    """Whoever holds the ring up: another job's packets are none of this one's."""
    scheduler, _, seat = of_threads((5, False), (5, False))
    seat.rings = [(3, 8), (10, 64)]
    scheduler.poll()
    assert (scheduler.fullest, scheduler.fill, scheduler.room) == ((3, 8), 3 / 8, 72)
    seat.rings = [(0, 8), (1, 64)]
    scheduler.poll()
    assert scheduler.fullest == (1, 64) and scheduler.take_highest() == (3, 8) and scheduler.take_highest() == (1, 64)


def test_all_that_was_in_the_rings_was_taken_or_waits_for_an_arena() -> None:
    scheduler, engine, seat = of_threads((5, False))
    assert scheduler.mark() == [7] and not scheduler.passed([7]) and scheduler.passed([6])
    engine.want[0], seat.said = 2, [(5, True)]
    scheduler.poll()
    assert scheduler.passed([7])
    scheduler.leave_to(None)
    assert scheduler.mark() == [] and scheduler.passed([]) and seat.left == 1


def test_new_threads_count_from_nothing_and_without_them_the_rings_are_read() -> None:
    scheduler, engine, seat = of_threads((5, False))
    scheduler.poll()
    before, fresh = scheduler.consumed, FakeSeat((0, False))
    scheduler.leave_to(fresh)
    assert seat.left == 1 and scheduler.poll() is False
    fresh.said = [(3, False)]
    assert scheduler.poll() is True and scheduler.consumed == before + 3
    scheduler.leave_to(None)
    assert fresh.left == 1
    engine.sources[0].packets.append(Packet(0))
    assert scheduler.poll() is True and scheduler.consumed == before + 4 and engine.runs == [(0, 2048, 1)]


class _Lost:
    """What is missing is lost for good."""

    def final(self, iteration: int, streams: Iterable[int]) -> Finality:
        return "passed"


def test_what_a_ring_keeps_for_other_jobs_is_not_waited_for() -> None:
    """The second stream has brought nothing of the job, and its ring holds packets for a job that has no arena."""
    scheduler, engine, seat = of_threads((5, False), (0, False), holes=_Lost())
    engine.stand[:] = [1, NOTHING_SEEN]
    engine.begun = 0
    engine.sources[1].packets = [Packet(0)] * 3
    seat.rings[1] = (3, 8)
    assert not scheduler.due(), "these may be the job's: its thread has not looked at them"
    seat.rings[1] = (0, 8)
    assert scheduler.due() == range(1) and scheduler.final(0) == "passed"


class _Opening(FakeEngine):
    """A thread begins in mid-stream, with iteration 5, just after somebody has read what the oldest one is."""

    @property
    def oldest(self) -> int:
        said, self._oldest = self._oldest, 5
        self.begun, self.stand[0] = 5, 6
        return said

    @oldest.setter
    def oldest(self, value: int) -> None:
        self._oldest = value


def test_nothing_of_before_the_first_iteration_closes_while_a_thread_begins() -> None:
    engine = _Opening(None, [FakeSource([], open=True)])
    scheduler = ArenaScheduler(engine, engine.sources, (1, 1), holes=_Lost())
    assert (engine.begun, engine._oldest) == (-1, 0)
    assert not scheduler.due(), "5 would be closed in the name of 0"
    assert scheduler.due() == range(5, 6)
