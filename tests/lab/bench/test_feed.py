"""The endless traffic of the live node's benches: what it becomes in an engine, lap by lap, and what is lost of it."""

import json

import numpy as np
import pytest
from lab.bench.limits import PacketRing
from parser.machine import Engine

from lab.bench import closing, loss
from lab.bench.feed import MTU, Feed, Window, drain, flows_for


def taken(engine: Engine, feed: Feed) -> int:
    done, blocked = engine.run(0, feed.ring_address, feed.waiting)
    assert not blocked
    return int(done)


@pytest.mark.parametrize("flows", [1, 4])
def test_every_lap_is_placed_at_the_next_place(flows: int) -> None:
    window = Window(flows)
    plan, feed = window.plan(2), Feed(window)
    assert plan.engine.gradient_bytes == 2 * window.gradient_bytes
    engine = Engine(plan.engine)
    for lap in range(6):
        assert feed.fill() == window.packets == taken(engine, feed)
        assert engine.begun == lap // 2 and engine.past(0) == (lap + 1) // 2
        if lap % 2:
            assert engine.cells(lap // 2).all()
            engine.retire()
    assert engine.outcomes(0)["placed"][0] == 6 * window.packets and not engine.disagreements()


def test_the_bytes_are_those_of_the_window() -> None:
    """In iteration 0 there is one bucket, and the first half of each flow's part comes in the first lap."""
    window = Window(2)
    engine, feed = Engine(window.plan(2).engine), Feed(window)
    for _ in range(2):
        feed.fill()
        taken(engine, feed)
    region = engine.region(0).reshape(2, 2, -1)  # flow, lap
    assert (region == window.expected.reshape(2, 1, -1)).all()


def test_packet_sequence_numbers_begin_again() -> None:
    window = Window(1)
    engine, feed = Engine(window.plan(1).engine), Feed(window)
    laps = 2**24 // window.each + 2
    for _ in range(laps):
        feed.fill()
        taken(engine, feed)
        engine.retire()
    assert engine.outcomes(0)["placed"][0] == laps * window.packets and not engine.disagreements()


def test_what_is_lost_is_missing() -> None:
    window = Window(1)
    engine, feed = Engine(window.plan(1).engine), Feed(window)
    assert feed.fill(lost=[512, 700, 4095]) == window.packets - 3 == taken(engine, feed)
    feed.fill()
    taken(engine, feed)
    whole = engine.cells(0).reshape(-1, MTU // 8)  # a row per packet
    assert np.flatnonzero(~whole.all(axis=1)).tolist() == [512, 700, 4095] and not whole[[512, 700, 4095]].any()
    assert engine.flows()["gaps"].sum() == 3


def test_the_lap_before_must_be_taken_first() -> None:
    feed = Feed(Window(1))
    feed.fill()
    with pytest.raises(AssertionError):
        feed.fill()
    with pytest.raises(AssertionError, match="4096 packets are left"):
        drain(feed, lambda: False)


def test_a_window_is_as_large_as_megabytes_allow() -> None:
    assert [flows_for(n << 20) for n in (1, 16, 100, 128, 256, 4096)] == [1, 1, 4, 8, 16, 16]


def test_a_ring_shows_what_it_is_told_to() -> None:
    ring = PacketRing(np.array([64, 128, 192], np.uint64), np.array([60, 60, 60], np.uint32), closed=False)
    assert (ring.packets, ring.waiting) == (3, 3)
    ring.show(np.array([2, 0], np.uint32))
    assert ring.waiting == 2
    with pytest.raises(ValueError, match="of 3"):
        ring.show(np.array([3], np.uint32))


# -- one packet in so many -----------------------------------------------------------------------------


def test_one_packet_in_so_many_is_lost_wherever_laps_end() -> None:
    window = Window(1)
    lossy = loss.Contender(window, 2, every=1000)
    lost = []
    for _ in range(5):
        first = lossy.feed.laps * window.packets
        lost += [first + i for i in lossy.next_lost()]
        lossy.feed.laps += 1
    assert lost == list(range(500, 5 * window.packets, 1000))
    assert dict(lossy.lost) == {0: 8, 1: 8, 2: 4}


def test_a_session_with_losses_says_what_is_missing() -> None:
    window = Window(1)
    lossy, whole = loss.Contender(window, 1, every=1000), loss.Contender(window, 1, every=None)
    for _ in range(3):
        assert lossy.measure(2) > 0 and whole.measure(2) > 0
    assert whole.next == 6 and lossy.next == 5  # nothing follows the last one: what it lacks may come


def test_a_session_that_misses_other_packets_is_refused() -> None:
    window = Window(1)
    whole = loss.Contender(window, 1, every=None)
    whole.feed.fill(lost=[7])
    drain(whole.feed, whole.poll)
    with pytest.raises(AssertionError):
        whole.measure(3)


# -- the rows ------------------------------------------------------------------------------------------


def test_rows_of_losses_and_closings() -> None:
    rows = loss.run(1, 1 << 20) + closing.run(2, 1 << 20)
    assert [(row.name, row.unit, row.target) for row in rows] == [
        ("loss.128MB", "Mpkt/s", 0.95), ("loss.1GB", "Mpkt/s", 0.95),
        ("closing.complete", "ms/GB", 1.0), ("closing.lost", "ms/GB", None),
    ]
    assert all(row.value > 0 and row.p10 <= row.ratio <= row.p90 for row in rows)
    assert [row.limit for row in rows[2:]] == [5.0, 5.0] and rows[2].less_is_better
    assert json.dumps([row.as_dict() for row in rows])
