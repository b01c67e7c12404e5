"""The scheduler and its rings: how full they are, and how far a capture without data is read."""

import pytest
from parser.machine import NOTHING_SEEN

from flowcheck.rebuild.iteration.scheduler import ArenaScheduler

from ..fake_engine import FakeEngine, FakeSource, Packet
from ..scheduled import Scheduled, live

# -- how full they are ------------------------------------------------------------------------------------


def ring(packets: int, room: int) -> FakeSource:
    source = live([Packet(0)] * packets)
    source.room = room
    return source


def test_before_the_first_look_nothing_waits() -> None:
    scheduler = Scheduled(ring(5, 8)).scheduler
    assert (scheduler.fill, scheduler.room, scheduler.take_highest()) == (0, 0, (0, 1))


def test_the_fullest_ring_is_the_one_with_the_least_room_for_its_size() -> None:
    """Not the one with most packets, and not the largest."""
    scheduler = Scheduled(ring(10, 100), ring(5, 8), ring(0, 300)).scheduler
    scheduler.poll()
    assert scheduler.fullest == (5, 8) and scheduler.fill == 5 / 8
    assert scheduler.room == 408


def test_empty_rings_are_told_as_empty() -> None:
    scheduler = Scheduled(ring(0, 100), ring(0, 8)).scheduler
    scheduler.poll()
    assert (scheduler.fullest[0], scheduler.fill, scheduler.room) == (0, 0, 108)


def test_a_ring_that_has_ended_is_none_of_them() -> None:
    sources = [ring(5, 8), ring(2, 100)]
    scheduler = Scheduled(*sources).scheduler
    sources[0].end()
    scheduler.poll()
    scheduler.poll()
    assert (scheduler.fullest[0], scheduler.room) == (0, 100)
    sources[1].end()
    scheduler.poll()
    scheduler.poll()
    assert (scheduler.fullest, scheduler.room) == ((0, 1), 0)


def test_the_most_is_kept_until_it_is_asked_for() -> None:
    source = ring(50, 100)
    scheduler = Scheduled(source).scheduler
    for waiting in (50, 80, 60, 10):
        source.packets = [Packet(0)] * waiting
        scheduler.poll()
    assert scheduler.fullest == (10, 100)
    assert scheduler.take_highest() == (80, 100)
    assert scheduler.take_highest() == (10, 100)  # since then: the last look's


def test_the_most_is_by_share_and_not_by_number() -> None:
    small, large = ring(6, 8), ring(0, 100)
    scheduler = Scheduled(small, large).scheduler
    scheduler.poll()
    large.packets = [Packet(0)] * 20
    scheduler.poll()
    assert scheduler.fullest == (20, 100) and scheduler.take_highest() == (6, 8)


# -- what is whole ----------------------------------------------------------------------------------------


def test_whole_is_the_iteration_of_which_all_is_there_and_no_other() -> None:
    there: set[int] = set()
    made = Scheduled(live([Packet(0, past=1), Packet(1, past=2)]), complete=there.__contains__, hold=lambda _: True)
    made.look()
    assert not any(made.scheduler.is_whole(iteration) for iteration in (0, 1, 2))
    there.add(0)
    made.look()
    assert [made.scheduler.is_whole(iteration) for iteration in (0, 1, 2)] == [True, False, False]


# -- captures without data ----------------------------------------------------------------------------------


def quiet(*times: int) -> FakeSource:
    """A live capture without data of the job: its packets say nothing of where it stands."""
    return live([Packet(-1, past=NOTHING_SEEN, ns=ns) for ns in times])


def begun(*sources: FakeSource) -> tuple[ArenaScheduler, FakeEngine]:
    """The first iteration has begun in the one live capture with data, which has no packet left; the others have."""
    engine = FakeEngine(None, sources, arenas=2)
    engine.begins_here = True
    engine.stand = [NOTHING_SEEN for _ in sources]
    (data,) = (source for source in sources if source.packets[0].iteration == 0)
    scheduler = ArenaScheduler(engine, sources, (1, 1), in_order=True)
    assert scheduler.poll() is True and not data.packets
    engine.runs.clear()
    return scheduler, engine


FIRST = Packet(0, ns=1)


@pytest.mark.parametrize(("its", "batches"), [
    (1000, [32, 32, 32, 4, 0]),  # to its end, and looked once more
    (80, [32, 32, 32]),  # the next one, of 106, is later
    (42, [32, 32]),  # a packet of the same time is read
    (41, [32]),
    (10, [32]),  # the first one may be as early
    (9, []),
])
def test_it_is_read_as_far_as_those_with_data_are(its: int, batches: list[int]) -> None:
    other, data = quiet(*range(10, 110)), live([FIRST])
    scheduler, engine = begun(other, data)
    data.packets = [Packet(0, ns=its)]
    assert scheduler.poll() is True
    assert engine.runs == [(0, 32, taken) for taken in batches] + [(1, 2048, 1)]


def test_it_waits_while_nobody_knows_how_far_the_others_are() -> None:
    other, data = quiet(*range(10, 110)), live([FIRST])
    scheduler, engine = begun(other, data)
    assert scheduler.poll() is False and engine.runs == [(1, 2048, 0)]
    scheduler, engine = begun(data := live([FIRST]), other := quiet(*range(10, 110)))
    data.packets = [Packet(0, ns=500)]
    assert scheduler.poll() is True  # the one with data moved; it is read first, and then nobody knows
    assert engine.runs == [(0, 2048, 1)] and len(other.packets) == 100


def test_who_waits_for_an_arena_does_not_hold_it() -> None:
    other, data = quiet(*range(10, 50)), live([FIRST])
    scheduler, engine = begun(other, data)
    data.packets = [Packet(2, ns=5)]
    assert scheduler.poll() is False and engine.runs == [(1, 2048, 0)] and scheduler.blocked
    assert scheduler.poll() is True
    assert engine.runs[1:] == [(0, 32, 32), (0, 32, 8), (0, 32, 0), (1, 2048, 0)]


def test_who_has_ended_does_not_hold_it() -> None:
    other, data = quiet(*range(10, 50)), live([FIRST])
    scheduler, engine = begun(other, data)
    data.end()
    assert scheduler.poll() is True and engine.runs == [(1, 2048, 0)]
    assert scheduler.poll() is True and scheduler.poll() is False and not other.packets


def test_two_without_data_do_not_hold_each_other() -> None:
    early, late, data = quiet(*range(10, 30)), quiet(*range(15, 35)), live([FIRST])
    scheduler, engine = begun(late, early, data)
    data.packets = [Packet(0, ns=900)]
    assert scheduler.poll() is True
    assert engine.runs == [(0, 32, 20), (0, 32, 0), (1, 32, 20), (1, 32, 0), (2, 2048, 1)]


def test_nothing_has_moved_while_a_first_packet_is_awaited() -> None:
    one, other = live([Packet(0, ns=5)]), live([])
    scheduler = ArenaScheduler(engine := FakeEngine(None, [one, other]), [one, other], (1, 1), in_order=True)
    assert scheduler.poll() is False and engine.runs == []
