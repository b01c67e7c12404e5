"""The scheduler through a whole replay: who is read first, when it ends, and that nothing waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parser.machine import Engine

from flowcheck.rebuild.iteration.scheduler import ArenaScheduler
from flowcheck.rebuild.plan import plan_job
from lab.synth import example_job, generate

from ..fake_engine import FakeSource, Packet, whole
from ..memory_ring import MemoryRing
from ..scheduled import Scheduled, at, live

# -- a whole replay -------------------------------------------------------------------------------------


def test_a_run_closes_what_is_open_after_the_last_packet() -> None:
    """What lies aside is given up first: then all is judged, complete or not."""
    made = Scheduled(FakeSource([*whole(0), Packet(1)]), FakeSource(whole(0)))
    finished = []
    made.when_closed = lambda iteration: finished.append(made.engine.finished)
    made.run()
    assert made.closed == {0: ["ended", "ended"], 1: ["ended", "ended"]}
    assert finished == [1, 1] and made.asked == []


def test_a_run_closes_what_is_complete_on_its_way() -> None:
    made = Scheduled(FakeSource(whole(0, 1)), live(whole(0)), arenas=4)
    states = []

    def when_closed(iteration: int) -> None:
        states.append((iteration, made.engine.finished, made.closed[iteration]))
        made.engine.sources[1].end()

    made.when_closed = when_closed
    made.run()
    assert states == [(0, 0, ["ended", "past"]), (1, 1, ["ended", "ended"])]


@pytest.mark.parametrize(("last", "closed", "finished"), [(1, [0, 1], 0), (2, [0, 1, 2], 1), (9, [0, 1, 2, 3], 1)])
def test_a_run_ends_when_close_says_so(last: int, closed: list[int], finished: int) -> None:
    """Iterations 0 and 1 close because an arena is needed, 2 and 3 after the end."""
    made = Scheduled(FakeSource(whole(0, 1, 2, 3)), arenas=2, complete=False, last=last).run()
    assert (list(made.closed), made.engine.finished) == (closed, finished)
    assert made.engine.retired == [1] * len(closed)


def test_no_capture_brings_anything() -> None:
    made = Scheduled(FakeSource(), FakeSource()).run()
    assert (made.closed, made.engine.finished, made.engine.runs) == ({}, 1, [])


def test_progress_is_told_in_packets() -> None:
    made = Scheduled(FakeSource([Packet(0)] * 3000, late=2)).run()
    assert made.consumed == [0, 0, 2048, 3000] and made.scheduler.consumed == 3000


def test_silence_is_waited_out() -> None:
    made = Scheduled(FakeSource(whole(0, 1), late=3), FakeSource(whole(0, 1), late=7)).run()
    assert list(made.closed) == [0, 1] and made.scheduler.consumed == 4


# -- the order in which captures are opened -------------------------------------------------------------


NOISE = [Packet(-1)]


@pytest.mark.parametrize("turn", [1, -1])
def test_the_earliest_packet_is_read_first_until_an_iteration_has_begun(turn: int) -> None:
    early, later = at(100, *NOISE * 32, *whole(0)), at(120, *NOISE * 5, *whole(0))
    made = Scheduled(*[early, later][::turn]).run()
    first, second = (0, 1) if turn == 1 else (1, 0)
    # 32 of the early one from 100 on; then 120 comes before 132 and brings the first iteration
    assert made.engine.runs[:2] == [(first, 32, 32), (second, 32, 6)]
    assert made.engine.runs[2][1] == 2048
    assert made.consumed[:3] == [32, 38, 39]


def test_a_capture_that_begins_in_mid_stream_is_read_when_its_time_has_come() -> None:
    late, early = at(5000, *whole(3, 4)), at(100, *NOISE, *whole(0, 1, 2))
    made = Scheduled(late, early, arenas=3)
    made.engine.begins_here = False
    made.run()
    assert list(made.closed) == [0, 1, 2, 3, 4] and made.engine.missed_iteration == -1
    assert made.engine.runs[0] == (1, 32, 4)


def test_all_heads_must_be_there_before_one_is_chosen() -> None:
    """The first packet of the second ring comes later than the first looks, and is the earliest of all."""
    one, other = at(100, *whole(0)), at(50, *whole(0))
    other.late = 3
    made = Scheduled(one, other).run()
    assert made.engine.runs[0] == (1, 32, 1) and list(made.closed) == [0]


def test_an_empty_capture_is_not_waited_for() -> None:
    made = Scheduled(at(100, *NOISE * 40, *whole(0)), FakeSource(), at(200, *whole(0))).run()
    assert made.engine.runs[:2] == [(0, 32, 32), (0, 32, 9)]
    assert made.closed == {0: ["ended", "ended", "ended"]}


def test_captures_without_an_iteration_are_read_to_their_ends() -> None:
    made = Scheduled(at(100, *NOISE * 40), at(110, *NOISE * 3)).run()
    assert made.engine.runs == [(0, 32, 32), (1, 32, 3), (0, 32, 8)]
    assert made.closed == {} and made.scheduler.consumed == 43


def test_a_capture_that_blocks_at_once_ends_the_opening() -> None:
    """Connections begin in these captures, so iteration 9 cannot be the first: who else has packets brings them."""
    made = Scheduled(at(100, *whole(9)), at(200, *whole(8)), arenas=2, complete=False).run()
    assert made.engine.runs[0] == (0, 32, 0)
    assert list(made.closed) == list(range(10))


def test_one_capture_needs_no_order() -> None:
    made = Scheduled(at(100, *NOISE * 40, *whole(0))).run()
    assert made.engine.runs == [(0, 2048, 41)]


def test_every_ring_is_looked_into_before_any_is_read() -> None:
    sources = [FakeSource(whole(0), slow=slow) for slow in (0, 2, 3)]
    made = Scheduled(*sources)
    made.run()
    assert made.engine.looks == [0, 1, 1, 1, 2, 2, 2, 2] and list(made.closed) == [0]


# -- nothing waits for ever -----------------------------------------------------------------------------


scripts = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), min_size=1, max_size=4,
)


@given(scripts, st.integers(2, 4), st.sets(st.integers(0, 40)), st.integers(0, 3))
def test_every_iteration_closes_once_and_no_packet_comes_too_late(made_up, arenas, gaps, late) -> None:
    """Streams with steps of any width: none dead-locks, and none is overtaken by an early close."""
    sources = []
    for script in made_up:
        packets, iteration = [], 0
        for step, past in script:
            iteration += step
            packets.append(Packet(iteration, past=iteration + past))
        sources.append(FakeSource(packets, late=late))
    total = sum(len(source.packets) for source in sources)
    newest = max((packet.iteration for source in sources for packet in source.packets), default=-1)
    made = Scheduled(*sources, arenas=arenas, complete=lambda iteration: iteration not in gaps).run()
    assert list(made.closed) == list(range(newest + 1))
    assert made.scheduler.consumed == total
    assert [counts["late"] for counts in made.engine.counts] == [(0, 0)] * len(sources)
    assert all(state != "behind" for states in made.closed.values() for state in states)


@pytest.mark.parametrize("behind", [0, 1])
def test_two_captures_of_real_packets_one_far_behind(behind: int) -> None:
    """One arena set of two iterations: every one is complete, and all that the second capture brings is compared."""
    job = example_job(ranks=2, count=3000, protocol="ll")
    packets = generate(job, iterations=6).packets
    plan = plan_job(job, streams=2, arenas=2)
    engine, rings = Engine(plan.engine), [MemoryRing(), MemoryRing()]
    scheduler, closed, compared = ArenaScheduler(engine, rings, plan.cells, in_order=True), [], []

    def close(due: range) -> None:
        for iteration in due:
            closed.append((iteration, engine.covered(iteration) == plan.cells[min(iteration, 1)]))
            cells = sum(place.nbytes for place in plan.iteration_buckets(iteration))
            compared.append(engine.copies(iteration)[2] >= cells)
        scheduler.retire(due)

    def look() -> None:
        while scheduler.poll():
            while due := scheduler.due():
                close(due)

    rings[1 - behind].put(packets, 1 - behind)
    rings[1 - behind].end()
    for start in range(0, len(packets), 7):
        rings[behind].put(packets[start : start + 7], behind)
        look()
    rings[behind].end()
    look()
    assert scheduler.ended
    engine.finish()
    close(scheduler.open)
    assert closed == [(iteration, True) for iteration in range(6)]
    assert compared == [True] * 6
