"""A node that does not keep up says so before it loses anything, loses whole iterations, and stops losing them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.rebuild.version.events import Behind, Closed, Event, GivenUp, Lost, OnTime, TakenUp, Timed
from flowcheck.rebuild.version.overload import Overload, is_over, must_give_up
from flowcheck.rebuild.version.timekeeper import CALM

from .load_scene import PACKETS, TICK, Loaded


@pytest.fixture
def loaded(monkeypatch) -> Callable[..., Loaded]:
    return lambda **options: Loaded(monkeypatch, **options)


# -- on time ----------------------------------------------------------------------------------------------------


def test_who_keeps_up_says_only_when_everything_was(loaded) -> None:
    at = loaded(work=1)
    at.come(12, period=20)
    at.check()
    assert at.order() == [f"+{t}" for t in range(12)] and at.dropped == 0
    for event in at.said(Timed):
        times = event.times
        assert times.first < times.last <= min(times.covered, times.record)
        assert max(times.covered, times.record) <= times.applied <= times.published < times.next
        assert times.slack == times.next - times.published > 0
        assert event.arenas[0] in (1, 2) and event.arenas[1] == 3 and 0 < event.rings[0] <= PACKETS
    at.events += at.session.finish()
    assert at.said(Timed)[-1].times.next is None and at.said(Timed)[-1].times.iteration == 11


def test_one_late_version_is_told_and_is_over_after_some_that_are_on_time(loaded) -> None:
    at = loaded(work=1)
    at.come(3, period=10)
    at.work = 15
    at.come(1, period=10)
    at.work = 1
    at.come(CALM + 4, period=10)
    at.check()
    (behind,), (on_time,) = at.said(Behind), at.said(OnTime)
    assert behind.late == TICK or behind.late > 0
    assert (behind.in_a_row, behind.stage) == (0, "update") and behind.iteration == 3
    assert on_time.iteration == 3 + CALM and not at.said(Lost, GivenUp)
    assert [event.times.iteration for event in at.said(Timed) if (event.times.slack or 0) < 0] == [3]


def test_a_late_record_is_named_and_not_the_node(loaded) -> None:
    at = loaded(work=0)
    at.come(2, period=10)
    records, at.session.follower.keep_record = at.session.follower.keep_record, lambda *said: []
    at.come(2, period=10)
    at.session.follower.keep_record = records
    (behind,) = at.said(Behind)
    assert behind.stage == "record" and behind.iteration == 2


# -- behind -------------------------------------------------------------------------------------------------------


def test_who_falls_behind_says_in_how_many_iterations_there_is_no_room(loaded) -> None:
    """An update takes 12 ticks and a period is 10: each version is 2 later. Of three arenas one is in work; the ring
    holds 64 packets, of which three quarters count, and an iteration has 8: there is room for 2 + 6 more."""
    at = loaded(work=12)
    at.come(60, period=10)
    at.check()
    first, given_up = at.said(Behind)[0], at.said(GivenUp)[0]
    assert first.iteration == 0 and given_up.waits and given_up.rings[1] == 64
    forecasts = [(said.iteration + said.left, said.left) for said in at.said(Behind) if said.left is not None]
    assert len(forecasts) > 1 and all(later < earlier for (_, earlier), (_, later) in pairwise(forecasts))
    # what is given up is what comes behind those that wait: some 8 further on than the one in work
    in_work = given_up.first - 8
    assert all(abs(end - in_work) <= 6 for end, _ in forecasts[1:]), (forecasts, given_up)


def test_iterations_are_lost_whole_from_a_boundary_to_a_boundary_and_then_it_recovers(loaded) -> None:
    at = loaded(work=40)
    at.come(60, period=10)
    at.check()
    order = at.order()
    assert at.dropped == 0 and order.index("Behind") < order.index("GivenUp") < order.index("Lost")
    given_up = at.said(GivenUp)[0].first
    published = [closed.iteration for closed in at.said(Closed) if closed.published]
    assert published == list(range(given_up)), "those that had begun are whole"
    at.work = 2
    at.come(10, period=10)
    (one,) = at.said(TakenUp)[-1:]
    assert at.engine.given_up.stop == one.last + 1
    lost = [closed for closed in at.said(Closed) if closed.missing]
    assert [closed.iteration for closed in lost] == sorted(
        t for said in at.said(TakenUp) for t in range(said.first, said.last + 1))
    assert sum(said.packets for said in at.said(TakenUp)) == at.session.overload.packets == PACKETS * len(lost)
    assert {clause for closed in lost for clause, _ in closed.why} >= {"covered"}
    at.begin(at.iteration)
    at.come(5, period=10)
    at.check()
    assert [closed.published for closed in at.said(Closed)[-4:]] == [True] * 4
    assert at.said(Lost)[0].why.startswith(
        f"iteration {given_up} is not published: covered: bucket 0: 0 of 24 elements, missing by cause: overload 24")


def test_nothing_is_given_up_anew_before_what_was_has_closed(loaded) -> None:
    at = loaded(work=40)
    for _ in range(3):
        at.come(60, period=10)
        assert at.said(TakenUp), "versions have ended, so what waits is done at once"
        at.begin(at.iteration)
    assert len(at.said(GivenUp)) == 3
    at.check()
    for before, later in zip(at.said(TakenUp), at.said(GivenUp)[1:], strict=False):
        assert later.first > before.last


def test_a_ring_that_is_emptied_too_slowly_is_told_as_well(loaded, monkeypatch) -> None:
    """Nothing waits for an arena; packets are not taken fast enough."""
    at = loaded(work=0, room=16)
    run = at.engine.run
    monkeypatch.setattr(at.engine, "run", lambda stream, ring, limit: run(stream, ring, 1))
    at.come(60, period=6)
    order = at.order()
    assert order.index("Behind") < order.index("GivenUp") and not at.said(GivenUp)[0].waits
    assert at.said(Behind)[0].stage in ("rings", "placing")


def test_an_overload_ends_with_the_traffic(loaded) -> None:
    at = loaded(work=40)
    at.come(12, period=10)
    at.tick(200)
    at.events += at.session.finish()
    at.check()
    assert [closed.iteration for closed in at.said(Closed)] == list(range(12))


# -- whatever happens ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(2, 12), st.integers(0, 60)), min_size=1, max_size=6),
    st.integers(2, 5), st.sampled_from([32, 64, 256]),
)
def test_nobody_is_late_or_loses_a_part_without_having_said_so(
    phases: list[tuple[int, int, int]], arenas: int, room: int
) -> None:
    """phases: (iterations, period, ticks that an update takes). A state comes where there is none as one begins."""
    with pytest.MonkeyPatch.context() as patch:
        at = Loaded(patch, arenas=arenas, room=room)
        for iterations, period, work in phases:
            at.work = work
            if at.session.next is None and at.iteration >= at.engine.oldest:
                at.begin(at.iteration)
            at.come(iterations, period)
            at.check()
        at.work = 0
        at.tick(100)
        at.events += at.session.finish()
        at.check()
    assert at.dropped == 0
    assert [closed.iteration for closed in at.said(Closed)] == list(range(at.iteration))
    assert at.session.overload.packets == PACKETS * sum(bool(closed.missing) for closed in at.said(Closed))


# -- giving up and taking up, by hand -------------------------------------------------------------------------------


class Pressed:
    """An overload by hand: the engine gives up and takes up whenever it is told."""

    def __init__(self, oldest: int = 0, begun: int = 0) -> None:
        self.dropped, self.given_up, self.oldest, self.begun = 0, range(0), oldest, begun
        self.fill, self.blocked, self.fullest = 0.0, False, (60, 64)
        self.config = SimpleNamespace(streams=2)
        self.overload = Overload(self, self)  # type: ignore[arg-type]

    def outcomes(self, stream: int) -> dict[str, tuple[int, int]]:
        return {"overload": (self.dropped + stream, 0)}

    def give_up(self) -> int:
        self.given_up = range(self.begun, 1 << 40)
        return self.begun

    def take_up(self) -> int:
        self.given_up = range(self.given_up.start, self.begun + 1)
        return self.begun + 1

    def look(self, **options: bool) -> list[Event]:
        return list(self.overload.look(**options))


@pytest.mark.parametrize("first", [0, 1, 7])
def test_what_was_given_up_is_told_when_it_is_over(first: int) -> None:
    at = Pressed(oldest=first, begun=first)
    at.fill, at.blocked, at.dropped = 0.8, True, 10
    assert at.overload.packets == 21
    assert at.look() == [GivenUp(first, (60, 64), True)]
    assert at.look() == []  # not twice, and it is not over
    at.fill, at.dropped, at.begun, at.oldest = 0.1, 40, first + 3, first + 3
    assert at.look() == [TakenUp(first, first + 3, 60)]  # of this time only
    assert at.look() == []
    at.fill, at.begun, at.oldest = 0.95, first + 9, first + 9
    assert at.look() == [GivenUp(first + 9, (60, 64), True)]  # anew
    at.fill, at.dropped = 0.0, 41
    assert at.look() == [TakenUp(first + 9, first + 9, 2)]


def test_it_is_not_over_while_a_version_is_made() -> None:
    at = Pressed(oldest=4, begun=4)
    at.fill = 1.0
    assert at.look() == [GivenUp(4, (60, 64), False)]
    at.fill, at.begun = 0.0, 5
    assert at.look(busy=True) == [] and at.look() == []  # an iteration is not done, besides the one that arrives
    at.oldest = 5
    assert at.look(busy=True) == []
    assert at.look() == [TakenUp(4, 5, 0)]


@pytest.mark.parametrize(("begun", "oldest", "stop", "pressed"), [
    (0, 0, 0, True), (-1, 0, 0, False), (5, 5, 5, True), (5, 5, 6, False),
])
def test_nothing_is_given_up_before_traffic_nor_before_what_was_given_up_last_has_closed(
    begun: int, oldest: int, stop: int, pressed: bool
) -> None:
    at = Pressed(oldest, begun)
    at.fill, at.given_up = 1.0, range(stop)
    assert at.overload.pressed is pressed


@pytest.mark.parametrize(("fill", "waits", "must"), [
    (0.74, True, False), (0.75, True, True), (0.93, False, False), (0.94, False, True), (1.0, False, True),
])
def test_a_ring_is_given_up_earlier_while_its_packets_wait(fill: float, waits: bool, must: bool) -> None:
    assert must_give_up(fill, waits) is must


@pytest.mark.parametrize(("fill", "backlog", "over"), [
    (0.125, 0, True), (0.126, 0, False), (0.0, 1, False), (0, -1, True),
])
def test_it_is_over_when_nothing_waits(fill: float, backlog: int, over: bool) -> None:
    assert is_over(fill, backlog) is over
