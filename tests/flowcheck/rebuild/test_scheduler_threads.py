"""The scheduler where placing threads read the rings: it asks them what they have done, and reads nothing itself."""

import pytest

from flowcheck.rebuild.scheduler import ArenaScheduler

from ..fake_engine import FakeEngine, Packet
from ..scheduled import live


class FakePlacers:
    """said[stream]: packets that its thread has taken since it began, and whether it stands before one."""

    def __init__(self, *said: tuple[int, bool]) -> None:
        self.said = list(said)

    def look(self, stream: int) -> tuple[int, bool]:
        return self.said[stream]


def of_threads(*said: tuple[int, bool], arenas: int = 2) -> tuple[ArenaScheduler, FakeEngine, FakePlacers]:
    """A scheduler of live streams whose packets are left to threads, after its first look."""
    sources = [live([Packet(0)]) for _ in said]
    engine, placers = FakeEngine(None, sources, arenas=arenas), FakePlacers(*(len(said) * [(0, False)]))
    engine.begins_here = True
    scheduler = ArenaScheduler(engine, sources, (1, 1))
    scheduler.poll()
    engine.runs.clear()
    scheduler.leave_to(placers)
    placers.said = list(said)
    return scheduler, engine, placers


def test_what_threads_have_taken_is_asked_of_each_and_nothing_is_read() -> None:
    scheduler, engine, placers = of_threads((5, False), (0, False))
    before = scheduler.consumed
    assert scheduler.poll() is True and scheduler.consumed == before + 5
    assert scheduler.poll() is False and scheduler.consumed == before + 5
    placers.said = [(5, False), (7, False)]
    assert scheduler.poll() is True and scheduler.consumed == before + 12
    placers.said = [(6, False), (9, False)]
    assert scheduler.poll() is True and scheduler.consumed == before + 15
    assert engine.runs == []


@pytest.mark.parametrize(("wanted", "waits"), [(1, False), (2, True), (3, True)])
def test_a_thread_stands_before_a_packet_only_while_that_has_no_arena(wanted: int, waits: bool) -> None:
    """A thread that says it is blocked may have its arena by now."""
    scheduler, engine, placers = of_threads((1, False), (1, True))
    engine.want[1] = wanted
    scheduler.poll()
    assert scheduler.blocked is waits
    placers.said[1] = (1, False)
    scheduler.poll()
    assert scheduler.blocked is False


def test_a_thread_that_is_not_blocked_waits_for_nothing_whatever_it_wanted_before() -> None:
    scheduler, engine, _ = of_threads((1, False))
    engine.want[0] = 9
    scheduler.poll()
    assert scheduler.blocked is False


def test_new_threads_count_from_nothing_and_without_them_the_rings_are_read() -> None:
    scheduler, engine, placers = of_threads((5, False))
    scheduler.poll()
    before, placers.said = scheduler.consumed, [(3, False)]
    scheduler.leave_to(placers)
    assert scheduler.poll() is True and scheduler.consumed == before + 3
    scheduler.leave_to(None)
    engine.sources[0].packets.append(Packet(0))
    assert scheduler.poll() is True and scheduler.consumed == before + 4 and engine.runs == [(0, 2048, 1)]
