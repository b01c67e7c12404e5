"""The scheduler: which iteration closes when, what holds it, and where each stream stands."""

import pytest
from parser.machine import NOTHING_SEEN

from flowcheck.errors import UserError
from flowcheck.rebuild.iteration.scheduler import ArenaScheduler
from flowcheck.rebuild.plan import JobPlan, plan_job
from lab.synth import example_job, sharded_job

from ..fake_engine import FakeEngine, FakeSource, Packet, whole
from ..scheduled import Scheduled, live

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
    assert made.scheduler.poll() is True
    assert made.scheduler.due() == range(1) and made.advance()
    assert list(made.closed) == [0, 1, 2]
    assert made.scheduler.poll() is False and made.scheduler.due() == range(0)


def test_nothing_closes_before_a_packet_of_it_came() -> None:
    made = Scheduled(live([Packet(-1, past=7)]))
    assert made.look() == [] and made.asked == []
    made = Scheduled(live([]))
    assert made.look() == []


def test_an_iteration_with_gaps_stays_open_until_its_arena_is_needed() -> None:
    one = live(whole(0, 1))
    made = Scheduled(one, arenas=2, complete=False)
    assert made.look() == [] and not made.scheduler.blocked
    one.packets += whole(2)  # there are arenas for 0 and 1
    assert made.look() == [0] and made.closed[0] == ["past"]
    assert not made.scheduler.blocked


def test_late_packets_fill_the_gap_while_the_iteration_is_open() -> None:
    one, there = live(whole(0, 1)), set()
    made = Scheduled(one, complete=lambda iteration: iteration in there)
    assert made.look() == []
    there.add(0)
    assert made.look() == [0]


def test_an_iteration_that_is_not_full_is_not_closed_for_the_next_ones_sake() -> None:
    made = Scheduled(live(whole(0, 1, 2)), arenas=4, complete=lambda iteration: iteration != 0)
    assert made.look() == []


@pytest.mark.parametrize(("packets", "open", "closes", "states"), [
    ([Packet(0)], True, False, None),  # behind: nobody may take its place
    ([], True, False, None),  # it has not even begun
    (whole(0), True, True, ["lost", "past"]),
    ([Packet(0)], False, True, ["lost", "ended"]),
    ([], False, True, ["lost", "ended"]),
    ([Packet(0), Packet(2)], True, True, ["lost", "lost"]),  # blocked itself
    ([Packet(1)], True, True, ["lost", "past"]),
])
def test_an_early_close_needs_every_stream_past_or_ended_or_blocked(packets, open, closes, states) -> None:
    """The first stream waits for an arena; it lacks the end of iteration 0. All depends on the second one."""
    made = Scheduled(live([Packet(0), Packet(2)]), FakeSource(packets, open=open), complete=False)
    made.scheduler.poll()
    assert made.scheduler.blocked
    made.advance()
    assert made.closed == ({0: states} if closes else {})
    assert made.scheduler.blocked is not closes  # whoever waited for the arena may read on


@pytest.mark.parametrize("far", range(3))
def test_a_stream_far_behind_is_waited_for(far: int) -> None:
    """Three captures, two of them far ahead: the third brings its copies in good time."""
    sources = [live(whole(*range(8))) for _ in range(3)]
    sources[far].packets.clear()
    made = Scheduled(*sources, complete=False)
    for iteration in range(5):
        assert made.look() == []
        sources[far].packets.append(Packet(iteration))
        assert made.look() == []
        sources[far].packets.append(Packet(iteration, past=iteration + 1))
        assert made.look() == [iteration]
    assert [counts["late"] for counts in made.engine.counts] == [(0, 0)] * 3


def due_without(iteration: int, absent: list[int], plan: JobPlan) -> range:
    """What may close after a capture of all cells of an iteration but these."""
    source = live([Packet(iteration, past=iteration + 1)])
    engine = FakeEngine(plan.engine, [source])
    scheduler = ArenaScheduler(engine, [source], plan.cells)
    assert scheduler.poll()
    engine.cells(iteration)[absent] = False
    return scheduler.due()


@pytest.mark.parametrize(("iteration", "absent", "complete"), [
    (1, [], True),
    (1, [0], False),
    (1, [20], False),  # the last cell of the last bucket
    (1, [12, 15, 21], True),  # between the buckets and after them lies nothing
    (0, [16], False),  # the only bucket of iteration 0 ends here
    (0, [17, 20], True),
])
def test_an_iteration_is_complete_with_every_cell_of_every_bucket(
    iteration: int, absent: list[int], complete: bool
) -> None:
    """Steady buckets: 24 elements in cells 0..11, 9 in cells 16..20."""
    plan = plan_job(example_job(ranks=2, count=[24, 9]))
    assert due_without(iteration, absent, plan) == (range(iteration, iteration + 1) if complete else range(0))


@pytest.mark.parametrize("absent", [[], [12], [16], [18]])
def test_an_iteration_is_not_complete_without_its_gathered_parameters(absent: list[int]) -> None:
    """Cells of both blocks of the second group. Late packets may still bring them."""
    plan = plan_job(sharded_job(count=(25, 6), dtype="float32"))
    assert bool(due_without(1, absent, plan)) is not bool(absent)


# -- what holds an iteration ----------------------------------------------------------------------------


def test_an_iteration_that_is_held_stays_open_and_streams_block() -> None:
    one, held = live(whole(0, 1, 2)), {0}
    made = Scheduled(one, hold=held.__contains__)
    assert made.look() == [] and made.look() == []
    assert made.scheduler.blocked and [p.iteration for p in one.packets] == [2]
    assert made.asked.count(("complete", 0)) == 1  # found once, not looked for at every look
    held.clear()
    assert made.look() == [0, 1] and made.look() == [2]


def test_a_hold_is_asked_for_only_when_the_iteration_could_close() -> None:
    one = live([Packet(0)])
    made = Scheduled(one, hold=lambda iteration: False)
    made.look()
    assert made.asked == []
    one.packets += [Packet(0, past=1)]
    assert made.look() == [0]
    assert made.asked == [("complete", 0), ("hold", 0)]


def test_an_early_close_can_be_held_too() -> None:
    made = Scheduled(live(whole(0, 1, 2)), complete=False, hold=lambda iteration: True)
    assert made.look() == [] and made.scheduler.blocked


# -- iterations that nobody saw -------------------------------------------------------------------------


def test_unseen_iterations_close_one_by_one() -> None:
    made = Scheduled(FakeSource(whole(0, 6)), arenas=2, complete=False).run()
    assert list(made.closed) == [0, 1, 2, 3, 4, 5, 6] and made.skipped == []
    assert made.engine.retired == [1] * 7


@pytest.mark.parametrize(("wanted", "skipped", "closed"), [
    (1003, [], [*range(1004)]),  # a thousand are unseen beside those that the arenas have room for
    (1004, [(1, 1001)], [0, 1002, 1003, 1004]),
    (5000, [(1, 4997)], [0, 4998, 4999, 5000]),
])
def test_after_a_very_long_outage_all_but_the_last_are_skipped(wanted, skipped, closed) -> None:
    made = Scheduled(FakeSource(whole(0, wanted)), arenas=2, complete=False).run()
    assert (made.skipped, list(made.closed)) == (skipped, closed)


def test_the_stream_that_is_blocked_earliest_says_how_many_were_unseen() -> None:
    sources = [FakeSource(whole(0, 9000)), FakeSource(whole(0, 5000)), FakeSource(whole(0))]
    made = Scheduled(*sources, arenas=2, complete=False)
    made.run()
    assert made.skipped == [(1, 4997), (5001, 8997)]
    assert list(made.closed) == [0, 4998, 4999, 5000, 8998, 8999, 9000]
    assert [counts["late"] for counts in made.engine.counts] == [(0, 0)] * 3


def test_what_an_earlier_blocked_stream_wanted_counts_no_more() -> None:
    """Stream 1 was blocked at iteration 2 and has ended since."""
    made = Scheduled(FakeSource(whole(0, 1, 5000)), FakeSource(whole(0, 1, 2)), arenas=2, complete=False).run()
    assert made.engine.want == [5000, 2]
    assert made.skipped == [(3, 4997)]


def test_an_outage_that_is_held_skips_nothing() -> None:
    made = Scheduled(live(whole(0, 5000)), arenas=2, complete=False, hold=lambda iteration: iteration > 0)
    for _ in range(3):
        made.look()
    assert (list(made.closed), made.skipped, made.engine.oldest) == ([0], [], 1)


# -- where a stream stands ------------------------------------------------------------------------------


def test_where_a_stream_stands() -> None:
    ended, past, blocked, behind = FakeSource(whole(0)), live(whole(0)), live([Packet(0), Packet(2)]), live([Packet(0)])
    made = Scheduled(ended, past, blocked, behind)
    made.scheduler.poll()
    assert [made.scheduler.state(i, 0) for i in range(4)] == ["ended", "past", "lost", "behind"]
    assert [made.scheduler.state(i, 1) for i in range(4)] == ["ended", "behind", "lost", "behind"]


def test_a_live_stream_that_brings_nothing_of_the_job_holds_nothing_up() -> None:
    """Its port, or its queue, may be for other jobs alone. Of a capture more may come: its file waits."""
    one, other = live(whole(0, 1)), live([])
    made = Scheduled(one, other)
    made.engine.stand[1] = NOTHING_SEEN
    assert made.look() == [0, 1] and made.closed[0] == ["past", "past"]
    other.packets += [Packet(2)]
    one.packets += whole(2)
    assert made.look() == []  # now it is one of the job's
    other.packets += [Packet(2, past=3)]
    assert made.look() == [2]
    engine = FakeEngine(None, [live(whole(0)), live([])])
    engine.stand[1] = NOTHING_SEEN
    assert ArenaScheduler(engine, engine.sources, (1, 1), in_order=True).state(1, 0) == "behind"


# -- one look -------------------------------------------------------------------------------------------


def test_a_look_takes_a_batch_of_every_stream_that_has_not_ended() -> None:
    one, other = FakeSource([Packet(0)] * 3000), live([Packet(0)] * 10)
    made = Scheduled(one, other)
    assert made.scheduler.poll() is True
    assert made.engine.runs == [(0, 2048, 2048), (1, 2048, 10)] and made.scheduler.consumed == 2058
    assert made.scheduler.poll() is True
    assert made.engine.runs[2:] == [(0, 2048, 952), (1, 2048, 0)] and made.scheduler.consumed == 3010
    assert made.scheduler.poll() is False  # the first has ended, the second is silent
    assert made.engine.runs[4:] == [(1, 2048, 0)]


def test_an_end_is_a_movement_too() -> None:
    one, other = live([]), live([Packet(0)])
    made = Scheduled(one, other)
    assert made.scheduler.poll() is True and made.scheduler.poll() is False
    one.end()
    assert made.scheduler.poll() is True and made.scheduler.state(0, 0) == "ended"
    assert made.scheduler.state(1, 0) == "behind" and made.scheduler.poll() is False


def test_lost_flows_are_looked_at_once_after_new_disagreements() -> None:
    one = live([])
    made = Scheduled(one)
    considered = []
    for disagreed in (0, 1, 1, 3, 3):
        made.engine.disagreed = disagreed
        made.scheduler.poll()
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
