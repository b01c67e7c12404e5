"""The scheduler: who may read on, when an iteration closes, and that nothing waits for ever."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parser.machine import Engine

from flowcheck.errors import UserError
from flowcheck.jobplan import plan_job
from flowcheck.judging import Judge
from flowcheck.streams import Streams
from flowcheck.synth import example_job, generate

from .fake_engine import FakeEngine, FakeSource, Packet, whole
from .memory_ring import MemoryRing


class Scheduled:
    """Streams of a scripted engine, and what came of them. full, hold: the answers, for all iterations or by iteration.
    asked: (question, iteration) in order. closed: iteration -> states of the streams when it closed."""

    def __init__(
        self, *sources: FakeSource, arenas: int = 2, full: bool | Callable[[int], bool] = True,
        hold: Callable[[int], bool] | None = None, last: int = 10**9,
    ) -> None:
        self.engine = FakeEngine(None, sources, arenas=arenas)
        self.engine.begins_here = True
        self.full, self.hold, self.last = full, hold, last
        self.asked: list[tuple[str, int]] = []
        self.closed: dict[int, list[str]] = {}
        self.skipped: list[tuple[int, int]] = []
        self.progress: list[int] = []
        more = {"hold": self._hold} if hold else {}
        self.streams = Streams(self.engine, sources, self._full, self._skipped, **more)

    def _full(self, iteration: int) -> bool:
        self.asked.append(("full", iteration))
        return self.full(iteration) if callable(self.full) else self.full

    def _hold(self, iteration: int) -> bool:
        self.asked.append(("hold", iteration))
        assert self.hold is not None
        return self.hold(iteration)

    def _skipped(self, first: int, last: int) -> None:
        self.skipped.append((first, last))

    def close(self, iteration: int) -> bool:
        assert iteration == self.engine.oldest and iteration not in self.closed
        self.closed[iteration] = [self.streams.state(i, iteration) for i in range(len(self.engine.sources))]
        return iteration < self.last

    def look(self) -> list[int]:
        """One look at the rings; the iterations that closed."""
        before = len(self.closed)
        self.streams.poll()
        self.streams.advance(self.close)
        return list(self.closed)[before:]

    def run(self) -> "Scheduled":
        self.streams.run(self.close, self.progress.append)
        return self


def live(packets: list[Packet]) -> FakeSource:
    return FakeSource(packets, open=True)


# -- what closes an iteration ---------------------------------------------------------------------------


def test_an_iteration_closes_when_every_stream_is_past_it_and_nothing_is_missing() -> None:
    one, other = live(whole(0, 1)), live([Packet(0)])
    made = Scheduled(one, other)
    assert made.look() == []  # the other one may still bring more of iteration 0
    other.packets += [Packet(0, past=1)]
    assert made.look() == [0]
    assert made.closed == {0: ["past", "past"]} and made.engine.retired == [1]
    other.packets += [Packet(1, past=2)]
    assert made.look() == [1]


def test_several_iterations_close_in_one_look() -> None:
    made = Scheduled(live(whole(0, 1, 2)), arenas=4)
    assert made.streams.poll() is True
    assert made.streams.advance(made.close) == (True, True)
    assert list(made.closed) == [0, 1, 2]
    assert made.streams.poll() is False and made.streams.advance(made.close) == (False, True)


def test_nothing_closes_before_a_packet_of_it_came() -> None:
    made = Scheduled(live([Packet(-1, past=7)]))
    assert made.look() == [] and made.asked == []
    made = Scheduled(live([]))
    assert made.look() == []


def test_an_iteration_with_gaps_stays_open_until_its_arena_is_needed() -> None:
    one = live(whole(0, 1))
    made = Scheduled(one, arenas=2, full=False)
    assert made.look() == [] and not made.streams.blocked
    one.packets += whole(2)  # there are arenas for 0 and 1
    assert made.look() == [0] and made.closed[0] == ["past"]
    assert not made.streams.blocked


def test_late_packets_fill_the_gap_while_the_iteration_is_open() -> None:
    one, there = live(whole(0, 1)), set()
    made = Scheduled(one, full=lambda iteration: iteration in there)
    assert made.look() == []
    there.add(0)
    assert made.look() == [0]


def test_an_iteration_that_is_not_full_is_not_closed_for_the_next_ones_sake() -> None:
    made = Scheduled(live(whole(0, 1, 2)), arenas=4, full=lambda iteration: iteration != 0)
    assert made.look() == []


@pytest.mark.parametrize(("packets", "open", "closes", "states"), [
    ([Packet(0)], True, False, None),  # behind: nobody may take its place
    ([], True, False, None),  # it has not even begun
    (whole(0), True, True, ["lost", "past"]),
    ([Packet(0)], False, True, ["lost", "ended"]),
    ([], False, True, ["lost", "ended"]),
    ([Packet(0), Packet(2)], True, True, ["lost", "lost"]),  # blocked itself
    ([Packet(1)], True, True, ["lost", "past"]),
])  # fmt: skip
def test_an_early_close_needs_every_stream_past_or_ended_or_blocked(packets, open, closes, states) -> None:
    """The first stream waits for an arena; it lacks the end of iteration 0. All depends on the second one."""
    made = Scheduled(live([Packet(0), Packet(2)]), FakeSource(packets, open=open), full=False)
    made.streams.poll()
    assert made.streams.blocked
    made.streams.advance(made.close)
    assert made.closed == ({0: states} if closes else {})
    assert made.streams.blocked is not closes  # whoever waited for the arena may read on


@pytest.mark.parametrize("far", range(3))
def test_a_stream_far_behind_is_waited_for(far: int) -> None:
    """Three captures, two of them far ahead: the third brings its copies in good time."""
    sources = [live(whole(*range(8))) for _ in range(3)]
    sources[far].packets.clear()
    made = Scheduled(*sources, full=False)
    for iteration in range(5):
        assert made.look() == []
        sources[far].packets.append(Packet(iteration))
        assert made.look() == []
        sources[far].packets.append(Packet(iteration, past=iteration + 1))
        assert made.look() == [iteration]
    assert [counts["late"] for counts in made.engine.counts] == [(0, 0)] * 3


# -- what holds an iteration ----------------------------------------------------------------------------


def test_an_iteration_that_is_held_stays_open_and_streams_block() -> None:
    one, held = live(whole(0, 1, 2)), {0}
    made = Scheduled(one, hold=held.__contains__)
    assert made.look() == [] and made.look() == []
    assert made.streams.blocked and [p.iteration for p in one.packets] == [2]
    assert made.asked.count(("full", 0)) == 1  # found once, not looked for at every look
    held.clear()
    assert made.look() == [0, 1] and made.look() == [2]


def test_a_hold_is_asked_for_only_when_the_iteration_could_close() -> None:
    one = live([Packet(0)])
    made = Scheduled(one, hold=lambda iteration: False)
    made.look()
    assert made.asked == []
    one.packets += [Packet(0, past=1)]
    assert made.look() == [0]
    assert made.asked == [("full", 0), ("hold", 0)]


def test_an_early_close_can_be_held_too() -> None:
    made = Scheduled(live(whole(0, 1, 2)), full=False, hold=lambda iteration: True)
    assert made.look() == [] and made.streams.blocked


# -- iterations that nobody saw -------------------------------------------------------------------------


def test_unseen_iterations_close_one_by_one() -> None:
    made = Scheduled(FakeSource(whole(0, 6)), arenas=2, full=False).run()
    assert list(made.closed) == [0, 1, 2, 3, 4, 5, 6] and made.skipped == []
    assert made.engine.retired == [1] * 7


@pytest.mark.parametrize(("wanted", "skipped", "closed"), [
    (1003, [], [*range(1004)]),  # a thousand are unseen beside those that the arenas have room for
    (1004, [(1, 1001)], [0, 1002, 1003, 1004]),
    (5000, [(1, 4997)], [0, 4998, 4999, 5000]),
])  # fmt: skip
def test_after_a_very_long_outage_all_but_the_last_are_skipped(wanted, skipped, closed) -> None:
    made = Scheduled(FakeSource(whole(0, wanted)), arenas=2, full=False).run()
    assert (made.skipped, list(made.closed)) == (skipped, closed)


def test_the_stream_that_is_blocked_earliest_says_how_many_were_unseen() -> None:
    made = Scheduled(FakeSource(whole(0, 9000)), FakeSource(whole(0, 5000)), FakeSource(whole(0)), arenas=2, full=False)
    made.run()
    assert made.skipped == [(1, 4997), (5001, 8997)]
    assert list(made.closed) == [0, 4998, 4999, 5000, 8998, 8999, 9000]
    assert [counts["late"] for counts in made.engine.counts] == [(0, 0)] * 3


def test_what_an_earlier_blocked_stream_wanted_counts_no_more() -> None:
    """Stream 1 was blocked at iteration 2 and has ended since."""
    made = Scheduled(FakeSource(whole(0, 1, 5000)), FakeSource(whole(0, 1, 2)), arenas=2, full=False).run()
    assert made.engine.want == [5000, 2]
    assert made.skipped == [(3, 4997)]


def test_an_outage_that_is_held_skips_nothing() -> None:
    made = Scheduled(live(whole(0, 5000)), arenas=2, full=False, hold=lambda iteration: iteration > 0)
    for _ in range(3):
        made.look()
    assert (list(made.closed), made.skipped, made.engine.oldest) == ([0], [], 1)


# -- where a stream stands ------------------------------------------------------------------------------


def test_where_a_stream_stands() -> None:
    ended, past, blocked, behind = FakeSource(whole(0)), live(whole(0)), live([Packet(0), Packet(2)]), live([Packet(0)])
    made = Scheduled(ended, past, blocked, behind)
    made.streams.poll()
    assert [made.streams.state(i, 0) for i in range(4)] == ["ended", "past", "lost", "behind"]
    assert [made.streams.state(i, 1) for i in range(4)] == ["ended", "behind", "lost", "behind"]


# -- one look -------------------------------------------------------------------------------------------


def test_a_look_takes_a_batch_of_every_stream_that_has_not_ended() -> None:
    one, other = FakeSource([Packet(0)] * 3000), live([Packet(0)] * 10)
    made = Scheduled(one, other)
    assert made.streams.poll() is True
    assert made.engine.runs == [(0, 2048, 2048), (1, 2048, 10)] and made.streams.consumed == 2058
    assert made.streams.poll() is True
    assert made.engine.runs[2:] == [(0, 2048, 952), (1, 2048, 0)] and made.streams.consumed == 3010
    assert made.streams.poll() is False  # the first has ended, the second is silent
    assert made.engine.runs[4:] == [(1, 2048, 0)]


def test_an_end_is_a_movement_too() -> None:
    one, other = live([]), live([Packet(0)])
    made = Scheduled(one, other)
    assert made.streams.poll() is True and made.streams.poll() is False
    one.end()
    assert made.streams.poll() is True and made.streams.state(0, 0) == "ended"
    assert made.streams.state(1, 0) == "behind" and made.streams.poll() is False


def test_lost_flows_are_looked_at_once_after_new_disagreements() -> None:
    one = live([])
    made = Scheduled(one)
    considered = []
    for disagreed in (0, 1, 1, 3, 3):
        made.engine.disagreed = disagreed
        made.streams.poll()
        considered.append(made.engine.considered)
    assert considered == [0, 1, 1, 2, 2]


def test_a_source_that_failed_ends_the_run_with_its_words() -> None:
    """What its ring still holds is read first."""
    one, other = FakeSource(whole(0)), FakeSource(whole(0))
    made = Scheduled(one, other)
    other.error = OSError("the file was cut while it was read")
    with pytest.raises(UserError, match=r"^the file was cut while it was read$"):
        made.run()
    assert made.engine.counts[1]["placed"] == (1, 8) and made.closed == {}


def test_an_error_of_an_empty_capture_is_found_when_captures_are_opened() -> None:
    one, other = FakeSource(whole(0)), FakeSource()
    other.error = ValueError("no capture file")
    made = Scheduled(one, other)
    with pytest.raises(UserError, match="no capture file"):
        made.run()
    assert made.engine.runs == []


# -- a whole replay -------------------------------------------------------------------------------------


def test_a_run_closes_what_is_open_after_the_last_packet() -> None:
    """What lies aside is given up first: then all is judged, full or not."""
    made = Scheduled(FakeSource([*whole(0), Packet(1)]), FakeSource(whole(0)))
    finished = []

    def close(iteration: int) -> bool:
        finished.append(made.engine.finished)
        return made.close(iteration)

    made.streams.run(close, made.progress.append)
    assert made.closed == {0: ["ended", "ended"], 1: ["ended", "ended"]}
    assert finished == [1, 1] and made.asked == []


def test_a_run_closes_what_is_complete_on_its_way() -> None:
    made = Scheduled(FakeSource(whole(0, 1)), live(whole(0)), arenas=4)
    states = []

    def close(iteration: int) -> bool:
        states.append((iteration, made.engine.finished, [made.streams.state(i, iteration) for i in range(2)]))
        made.engine.sources[1].end()
        return True

    made.streams.run(close, made.progress.append)
    assert states == [(0, 0, ["ended", "past"]), (1, 1, ["ended", "ended"])]


@pytest.mark.parametrize(("last", "closed", "finished"), [(1, [0, 1], 0), (2, [0, 1, 2], 1), (9, [0, 1, 2, 3], 1)])
def test_a_run_ends_when_close_says_so(last: int, closed: list[int], finished: int) -> None:
    """Iterations 0 and 1 close because an arena is needed, 2 and 3 after the end."""
    made = Scheduled(FakeSource(whole(0, 1, 2, 3)), arenas=2, full=False, last=last).run()
    assert (list(made.closed), made.engine.finished) == (closed, finished)
    assert made.engine.retired == [1] * len(closed)


def test_no_capture_brings_anything() -> None:
    made = Scheduled(FakeSource(), FakeSource()).run()
    assert (made.closed, made.engine.finished, made.engine.runs) == ({}, 1, [])


def test_progress_is_told_in_packets() -> None:
    made = Scheduled(FakeSource([Packet(0)] * 3000, late=2)).run()
    assert made.progress == [0, 0, 2048, 3000] and made.streams.consumed == 3000


def test_silence_is_waited_out() -> None:
    made = Scheduled(FakeSource(whole(0, 1), late=3), FakeSource(whole(0, 1), late=7)).run()
    assert list(made.closed) == [0, 1] and made.streams.consumed == 4


# -- the order in which captures are opened -------------------------------------------------------------


def at(ns: int, *packets: Packet) -> FakeSource:
    """A capture whose packets are one nanosecond apart."""
    return FakeSource([dataclasses.replace(packet, ns=ns + i) for i, packet in enumerate(packets)])


NOISE = [Packet(-1)]


@pytest.mark.parametrize("turn", [1, -1])
def test_the_earliest_packet_is_read_first_until_an_iteration_has_begun(turn: int) -> None:
    early, later = at(100, *NOISE * 32, *whole(0)), at(120, *NOISE * 5, *whole(0))
    made = Scheduled(*[early, later][::turn]).run()
    first, second = (0, 1) if turn == 1 else (1, 0)
    # 32 of the early one from 100 on; then 120 comes before 132 and brings the first iteration
    assert made.engine.runs[:2] == [(first, 32, 32), (second, 32, 6)]
    assert made.engine.runs[2][1] == 2048
    assert made.progress[:3] == [32, 38, 39]


def test_a_capture_that_begins_in_mid_stream_is_read_when_its_time_has_come() -> None:
    late, early = at(5000, *whole(3, 4)), at(100, *NOISE, *whole(0, 1, 2))
    made = Scheduled(late, early, arenas=3)
    made.engine.begins_here = False
    made.run()
    assert list(made.closed) == [0, 1, 2, 3, 4] and made.engine.unopened == -1
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
    assert made.closed == {} and made.streams.consumed == 43


def test_a_capture_that_blocks_at_once_ends_the_opening() -> None:
    """Connections begin in these captures, so iteration 9 cannot be the first: who else has packets brings them."""
    made = Scheduled(at(100, *whole(9)), at(200, *whole(8)), arenas=2, full=False).run()
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
    made = Scheduled(*sources, arenas=arenas, full=lambda iteration: iteration not in gaps).run()
    assert list(made.closed) == list(range(newest + 1))
    assert made.streams.consumed == total
    assert [counts["late"] for counts in made.engine.counts] == [(0, 0)] * len(sources)
    assert all(state != "behind" for states in made.closed.values() for state in states)


@pytest.mark.parametrize("behind", [0, 1])
def test_two_captures_of_real_packets_one_far_behind(behind: int) -> None:
    """One arena set of two iterations: every one is complete, and all that the second capture brings is compared."""
    job = example_job(ranks=2, count=3000, protocol="ll")
    packets = generate(job, iterations=6).packets
    plan = plan_job(job, streams=2, arenas=2)
    engine, rings = Engine(plan.engine), [MemoryRing(), MemoryRing()]
    judge, closed, compared = Judge(plan, engine), [], []

    def close(iteration: int) -> bool:
        cells = sum(place.nbytes for place in plan.iteration_buckets(iteration))
        closed.append((iteration, judge.full(iteration)))
        compared.append(engine.copies(iteration)[2] >= cells)
        return True

    streams = Streams(engine, rings, judge.full, lambda first, last: None)
    rings[1 - behind].put(packets, 1 - behind)
    rings[1 - behind].end()
    for start in range(0, len(packets), 7):
        rings[behind].put(packets[start : start + 7], behind)
        while streams.poll():
            streams.advance(close)
    rings[behind].end()
    streams.run(close, lambda packets: None)
    assert closed == [(iteration, True) for iteration in range(6)]
    assert compared == [True] * 6
