"""Slack, what took longest, and how long a node that is too slow can go on: against a node that is played through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.rebuild.iteration.deadline import MOST, SAMPLES, Times, Trend, iterations_left

WHOLE = {"first": 100, "last": 200, "covered": 210, "record": 250, "applied": 300, "published": 330, "next": 400}


def test_slack_is_from_the_version_to_the_next_iteration() -> None:
    assert Times(7, **WHOLE).slack == 70
    assert Times(7, **WHOLE | {"next": 329}).slack == -1
    assert Times(7, **WHOLE | {"next": None}).slack is None and Times(7, **WHOLE | {"published": None}).slack is None


@pytest.mark.parametrize(("changed", "stage"), [
    ({}, "update"), ({"covered": 260, "record": 262}, "placing"), ({"record": 290}, "record"),
    ({"published": 380}, "checksums"),
    ({"covered": 300, "record": 250, "applied": 310, "published": 312}, "placing"),
    ({"covered": None, "record": None, "applied": None, "published": None}, "placing"),
    ({"record": None, "applied": None, "published": None}, "record"),
    ({"applied": None, "published": None}, "update"), ({"published": None}, "checksums"),
    ({"covered": 200, "record": 200, "applied": 200, "published": 200}, "placing"),  # nothing took any time
    ({"last": None, "covered": 1, "record": 2, "applied": 3, "published": 4}, "placing"),  # of like ones the first
    ({"measured": 290, "covered": 291, "record": 250}, "telemetry"), ({"measured": 150}, "update"),
    ({"covered": 199, "record": 202, "applied": 203, "published": 204}, "record"),
])
def test_what_took_longest_or_is_waited_for(changed: dict[str, int | None], stage: str) -> None:
    assert Times(7, **WHOLE | changed).stage(records=True) == stage


def test_without_records_none_is_waited_for() -> None:
    times = Times(7, **WHOLE | {"record": None, "applied": None, "published": None})
    assert times.stage(records=False) == "update"


def played(period: int, work: int, iterations: int) -> list[Times]:
    """A node that needs `work` for an iteration, of which one comes each `period`, and that begins with one when it has
    come and the one before is done."""
    times, done = [], 0
    for i in range(iterations):
        first, came = i * period + 1, (i + 1) * period
        done = max(came, done) + work
        times.append(Times(i, first, came, came, None, done, done, came + 1))
    return times


@given(st.integers(10, 1000), st.integers(1, 2000), st.integers(2, 40))
def test_only_a_node_that_needs_longer_than_the_period_gets_later(period: int, work: int, iterations: int) -> None:
    made, trend = played(period, work, iterations), Trend()
    for times in made:
        trend.add(times)
    assert trend.period == period and trend.growth == max(work - period, 0)
    assert (trend.left(0, 3) is None) == (work <= period)


@given(st.integers(10, 1000), st.integers(1, 3000), st.integers(2, 20), st.integers(1, 12))
def test_the_projection_is_what_comes(period: int, more: int, seen: int, iterations: int) -> None:
    """There is room for so many iterations beside the one that is being made: the first one that finds none is the one
    that was said."""
    made, trend = played(period, period + more, 2000), Trend()
    for times in made[:seen]:
        trend.add(times)
    now = made[seen - 1]
    assert now.slack is not None and now.published is not None
    left = trend.left(-now.slack, iterations)
    # the one that comes after `iterations` others has begun when the version is there: there was no room for it
    full = next((t.iteration for t in made if t.published is not None and t.next is not None
                 and t.published - t.next >= iterations * period), None)
    assert left is not None and (full is None or seen - 1 + left == max(full, seen - 1))


@given(st.integers(0, 10**12), st.integers(-(10**9), 10**9), st.integers(0, 10**12), st.integers(0, 10**6))
def test_something_is_left_as_long_as_there_is_room(late: int, growth: int, period: int, room: int) -> None:
    left = iterations_left(late, growth, period, room)
    if growth <= 0 or period <= 0 or (room * period - late) / growth > MOST:
        assert left is None
    else:
        assert left is not None and left >= 0 and (left > 0) == (room * period - late > 0)


@pytest.mark.parametrize(("late", "growth", "period", "room", "left"), [
    (0, 1, MOST, 1, MOST), (0, 1, MOST + 1, 1, None),  # further away is never
    (0, 1, 1, 5, 5), (0, 1, 0, 5, None), (0, 0, 1, 5, None), (7, 2, 10, 1, 2),
])
def test_how_many_are_left(late: int, growth: int, period: int, room: int, left: int | None) -> None:
    assert iterations_left(late, growth, period, room) == left


def test_a_trend_is_from_the_first_to_the_last_of_its_iterations() -> None:
    trend = Trend()
    for iteration, first, late in ((0, 0, 0), (1, 100, 90), (4, 430, 40)):
        trend.add(Times(iteration, first=first, published=1000 + late, next=1000))
    assert (trend.period, trend.growth) == (430 / 4, 10)


def test_a_trend_is_of_the_last_iterations_and_begins_anew() -> None:
    trend = Trend()
    assert (trend.period, trend.growth, trend.left(5, 3)) == (0, 0, None)
    slow, fast = played(100, 150, SAMPLES), played(100, 50, 2 * SAMPLES)
    for times in [*slow, *fast[SAMPLES:]]:
        trend.add(times)
    assert trend.growth == 0
    for times in slow:
        trend.add(times)
    trend.forget()
    trend.add(slow[0])
    assert trend.growth == 0


def test_iterations_without_a_version_or_a_first_byte_make_no_trend() -> None:
    trend, (one, other, third) = Trend(), played(100, 150, 3)
    for times in (one, Times(1), other, Times(2, None, *[500] * 6)):
        trend.add(times)
    assert trend.growth == 50
    trend.add(third)
    assert trend.growth == 50
