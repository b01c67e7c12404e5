"""How a follower goes on from what was lost, or from nothing: what is stale then, and since when.

Engine and replica are made up (going.py). What is asked of trainers, and what becomes of real versions, is in
tests/flowcheck/node/test_live_partial.py, test_live_begin.py and test_live_resumed.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowcheck.rebuild.version.events import Begun, Held, Lost, Patched, Waiting
from flowcheck.rebuild.version.follower import NO_ROOM
from updater.errors import NoFreeSlot

from ..fake_engine import FakeSource, Packet, whole
from .followed import port
from .going import OPTIMIZED, OTHERS, Going, LeapingReplica


@pytest.fixture
def live(monkeypatch) -> Callable[..., Going]:
    return lambda *sources, **options: Going(monkeypatch, *sources, **options)


# -- begun without a state -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("serves", "stale"), [(True, OPTIMIZED), (False, OPTIMIZED + OTHERS)])
def test_a_job_is_begun_with_the_first_record(live, serves: bool, stale: int) -> None:
    """Where a version of the job is served its constants are there, and its buffers."""
    at = live(port(), first=5)
    replica, begun = at.begin(9, serves=serves)
    assert begun == [] and at.next is None and at.ranges.emptied == 0
    at.record(3)
    assert at.of(Begun) == [Begun(3, stale)] and replica.calls == ["leap 8"]
    assert (at.next, at.ranges.emptied, at.elements) == (3, 1, stale)
    at.record(4)
    assert len(at.of(Begun)) == 1 and at.ranges.emptied == 1


def test_or_with_those_that_are_here_without_a_gap(live) -> None:
    at = live(port())
    at.record(2, 4, 5)
    replica, begun = at.begin(1)
    assert begun == [Begun(4, OPTIMIZED)] and at.next == 4 and replica.calls == ["leap 4"]


def test_the_record_of_an_iteration_that_has_closed_begins_the_oldest_one(live) -> None:
    at = live(port(2, 3), arenas=4)
    assert at.look() == ["not 2", "not 3"]
    at.begin(1)
    at.record(2)
    assert at.of(Begun) == [Begun(4, OPTIMIZED)]


def test_while_readers_pin_every_slot_a_later_record_begins_it(live) -> None:
    at = live(port())
    replica, _ = at.begin(1)
    replica.pinned = True
    at.record(2)
    assert at.of(Begun) == [] and (at.next, at.ranges.emptied, replica.calls) == (None, 0, [])
    replica.pinned = False
    at.record(3)
    assert at.of(Begun) == [Begun(3, OPTIMIZED)] and at.ranges.emptied == 1


@pytest.mark.parametrize(("whole_", "closed", "begun"), [
    (True, 0, [Begun(2, 0)]), (True, 1, [Begun(2, 0)]), (True, 2, []), (False, 0, []),
])
def test_what_an_earlier_process_left_is_gone_on_with_if_nothing_was_missed(
    live, whole_: bool, closed: int, begun: list[Any]
) -> None:
    """Only of this very start of the job, and only if the iteration that it waits for has not closed."""
    at = live(port(*range(1, closed + 1)), arenas=4)
    at.look()
    assert at.engine.oldest == (closed + 1 if closed else 0)
    _, said = at.begin(2, whole=whole_)
    assert said == begun and at.next == (2 if begun else None) and at.ranges.emptied == 0
    assert at.elements == 0


def test_another_replica_is_closed_and_the_same_is_not(live) -> None:
    at = live(port())
    one, _ = at.begin(1)
    other, _ = at.begin(1)
    assert one.calls == ["close"] and at.chain.replica is other
    at.joining.begin_from(other)
    assert other.calls == []


# -- lost iterations ---------------------------------------------------------------------------------------------


def lossy(
    live, *, readers: bool = False, patched: bool = True, ready: bool = True, refuted: bool = False
) -> tuple[Going, LeapingReplica]:
    """Iterations 2 to 2997 go by while nobody hears them. refuted: what was heard contradicts the manifest."""
    at = live(port(1, 3000), patched=patched)
    at.look()
    replica = at.state(2)
    replica.pinned, replica.ready = readers, ready
    at.arenas.collector.refused = lambda disagreements: "no such job" if refuted else ""
    at.now += 60
    at.look()
    at.now += 60
    at.look()
    return at, replica


def test_what_was_lost_whole_is_leapt_over(live) -> None:
    at, replica = lossy(live)
    (held,) = at.of(Held)
    assert (held.iteration, held.stale, held.all) == (2997, OPTIMIZED, True)
    assert held.why == "iterations 2 to 2997 passed while no packet came"
    assert at.of(Lost) == [] and replica.calls[:1] == ["leap 2998"] and at.ranges.emptied == len(at.of(Held)) == 1
    assert at.next is not None and at.next >= 2998 and at.elements == OPTIMIZED


@pytest.mark.parametrize(
    "options", [{"readers": True}, {"patched": False}, {"ready": False}, {"refuted": True}], ids=str)
def test_where_no_leap_is_possible_the_chain_ends(live, options: dict[str, bool]) -> None:
    at, replica = lossy(live, **options)
    assert at.of(Held) == [] and at.of(Lost)[0].why == "iterations 2 to 2997 passed while no packet came"
    assert not any(call.startswith("leap") for call in replica.calls)
    assert (at.next, at.chain.status, at.ranges.emptied) == (None, "lost", 0)


def test_an_iteration_with_holes_is_built_and_held(live) -> None:
    at = live(FakeSource([Packet(2, past=3, cells=(0, 10)), *whole(3, 4)], open=True))
    replica = at.state(2)
    at.record(2)
    assert at.look()[:1] == ["not 2"]
    (held,) = at.of(Held)
    assert (held.iteration, held.all, held.why) == (2, False, "gradients were lost") and held.stale == 13
    assert "hold" in replica.calls and at.of(Lost) == [] and at.next == 3 and at.ranges.emptied == 0
    assert at.chain.status == "unverified" and at.of(Patched) == []


def test_one_element_is_enough_to_hold_a_version(live) -> None:
    """The last cell of the second bucket has one."""
    at = live(FakeSource([Packet(2, past=3, cells=(0, 20)), *whole(3, 4)], open=True))
    at.state(2)
    at.record(2)
    at.look()
    assert [(held.stale, held.iteration) for held in at.of(Held)] == [(1, 2)]


def test_what_is_patched_in_the_iteration_that_lacked_it_counts(live, monkeypatch) -> None:
    """Its version is published at once."""
    at = live(FakeSource([Packet(2, past=3, cells=(0, 10)), *whole(3, 4)], open=True))
    at.state(2)
    at.record(2)
    stale, patches = at.ranges.partial, [13]

    def write(replica: Any, iteration: int) -> int:
        patched = patches.pop() if patches else 0
        stale.healed += patched
        stale.stale.clear()
        return patched

    monkeypatch.setattr(stale, "write", write)
    at.look()
    at.look()
    assert at.of(Patched) == [Patched(2, 2, 13, 0)] and at.of(Held) == []


def test_each_iteration_waits_anew_for_ranks_that_were_asked(live) -> None:
    at = live(FakeSource([Packet(2, past=3, cells=(0, 10)), *whole(3, 4, 5)], open=True), arenas=4)
    at.engine.hopes[0, 2] = "passed"
    at.state(2)
    at.record(2)
    at.look()
    assert len(at.of(Held)) == 1
    for iteration in (3, 4):
        assert at.ranges.partial.ask(1 << 20, (1,))
        at.record(iteration)  # of rank 0 alone
        for seconds in (0.0, 6.0, 3.9):
            at.now += seconds
            at.look()
            assert at.engine.oldest == iteration
        assert at.of(Waiting)[-1] == Waiting(iteration, "the step record of a rank that was asked is not here")
        at.now += 0.1
        at.look()
        assert at.engine.oldest == iteration + 1
    assert len(at.of(Waiting)) == 2


class Full(LeapingReplica):
    """Readers pin what there is."""

    full = True

    def begin(self, iteration: int, values: Any) -> None:
        if self.full:
            raise NoFreeSlot("no")
        super().begin(iteration, values)


@pytest.mark.parametrize(("patched", "cells"), [(True, (0, 10)), (True, (0, None)), (False, (0, None))])
def test_what_will_be_built_waits_for_a_slot(live, patched: bool, cells: tuple[int, int | None]) -> None:
    """With holes, too, where it may have some."""
    at = live(FakeSource([Packet(2, past=3, cells=cells), *whole(3, 4)], open=True), patched=patched)
    replica = Full(2)
    at.follower.start(replica, 2)
    at.record(2)
    at.look()
    at.now += 1e6
    at.look()
    assert at.of(Waiting) == [Waiting(2, NO_ROOM)] and at.engine.oldest == 2
    replica.full = False
    at.look()
    at.look()
    assert at.engine.oldest == 3 and at.of(Lost) == []


@pytest.mark.parametrize(("patched", "ready"), [(False, True), (True, False)])
def test_what_will_not_be_built_waits_for_none(live, patched: bool, ready: bool) -> None:
    at = live(FakeSource([Packet(2, past=3, cells=(0, 10)), *whole(3, 4)], open=True), patched=patched)
    replica = Full(2)
    replica.ready = ready
    at.follower.start(replica, 2)
    at.record(2)
    assert at.look()[:2] == ["not 2", "lost"] and at.of(Waiting) == []


def test_without_a_version_there_is_nothing_to_build(live) -> None:
    at = live(port(2))
    replica = at.state(2)
    replica.ready = False
    at.record(2)
    assert at.look() == ["closed 2"] and replica.calls == []


def test_versions_have_no_holes_without_ranges(live) -> None:
    at = live(FakeSource([Packet(2, past=3, cells=(0, 10)), *whole(3, 4)], open=True), patched=False)
    at.state(2)
    at.record(2)
    assert at.look()[:2] == ["not 2", "lost"] and at.of(Held) == []


def test_ranges_that_are_given_up_end_the_chain_if_something_is_stale(live) -> None:
    at, replica = lossy(live)
    at.events.clear()
    at.take(at.ranges.give_up("no trainer can"))
    assert at.of(Lost) == [Lost("no trainer can")] and at.ranges.given_up and at.next is None
    assert replica.calls[-1:] == ["abandon"] and at.chain.replica is replica
    at = live(port())
    replica = at.state(2)
    at.take(at.ranges.give_up("no trainer can"))
    assert at.events == [] and at.ranges.given_up and at.next == 2


def test_what_never_had_a_version_is_closed_with_its_ranges(live) -> None:
    at = live(port())
    replica, _ = at.begin(0, serves=False)
    at.record(2)
    at.take(at.ranges.give_up("no trainer can"))
    assert replica.calls[-1] == "close" and at.chain.replica is None and at.of(Lost) == [Lost("no trainer can")]
