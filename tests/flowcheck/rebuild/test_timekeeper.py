"""The stamps of a follower by hand: what is told of an iteration, when a node is behind and when on time again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowcheck.rebuild.iteration.deadline import Times
from flowcheck.rebuild.version.events import Behind, OnTime, Timed
from flowcheck.rebuild.version.overload import FULL
from flowcheck.rebuild.version.timekeeper import CALM, KEPT, Timekeeper


class Watched:
    """A keeper by hand: `spans` are the engine's times by iteration, `now` is the clock."""

    def __init__(self, *, records: bool = True, arenas: int = 4) -> None:
        self.spans: dict[int, tuple[int, int]] = {}
        self.arenas = SimpleNamespace(
            begun=-1, oldest=0, capacity=arenas, times=self.times, fill=0.0, room=0, consumed=0,
            take_highest=lambda: (5, 64),
        )
        self.now = 0
        self.keeper = Timekeeper(self.arenas, records=records, now=lambda: self.now)

    def times(self, iteration: int | None) -> tuple[int, int] | None:
        assert iteration is not None
        return self.spans.get(iteration)

    def come(self, iteration: int, first: int, last: int) -> None:
        """All packets of an iteration have."""
        self.spans[iteration], self.arenas.begun = (first, last), iteration

    def end(self, iteration: int, now: int, *, published: bool = True) -> None:
        """It closes, and is published."""
        self.now = now
        self.keeper.ended(iteration, published=published)
        self.arenas.oldest = iteration + 1


def late(*iterations: int, by: int = 5, at: Watched | None = None) -> tuple[Watched, list]:
    """Iterations come each 100, the last packet after 50, and each version is `by` after the next one's first byte."""
    at, events = at or Watched(), []
    for iteration in iterations:
        at.come(iteration, iteration * 100 + 1, iteration * 100 + 51)
        at.come(iteration + 1, iteration * 100 + 101, iteration * 100 + 151)
        at.end(iteration, iteration * 100 + 101 + by)
        events += at.keeper.look(None)
    return at, events


# -- what is told ----------------------------------------------------------------------------------------


def test_all_stamps_are_told_when_the_next_iteration_has_begun() -> None:
    at = Watched()
    at.come(3, 100, 180)
    for now, what in ((200, "covered"), (210, "record"), (250, "applied"), (999, "covered")):
        at.now = now
        at.keeper.note(what, 3)  # type: ignore[arg-type]
    at.end(3, 300)
    assert at.keeper.look(None) == []  # nothing of a later one has come
    at.come(4, 400, 480)
    (told,) = at.keeper.look(None)
    assert told == Timed(Times(3, 100, 180, 200, 210, 250, 300, 400), (5, 64), told.arenas)
    assert at.keeper.look(None) == []


def test_what_was_not_published_or_not_seen_has_no_such_stamp() -> None:
    at = Watched()
    at.end(0, 50, published=False)
    at.come(1, 60, 70)
    (told,) = at.keeper.look(None)
    assert told.times == Times(0, next=60)


def test_without_stamps_of_its_own_an_iteration_is_told_all_the_same() -> None:
    at = Watched()
    at.come(0, 10, 20)
    at.end(0, 30)
    assert at.keeper.rest() == [Timed(Times(0, 10, 20, published=30), (5, 64), (0, 4))]


def test_the_rest_are_told_in_order_without_a_next_one() -> None:
    at = Watched()
    for iteration in range(3):
        at.come(iteration, 10 * iteration + 1, 10 * iteration + 5)
        at.end(iteration, 10 * iteration + 6)
    told = at.keeper.rest()
    assert [event.times.iteration for event in told] == [0, 1, 2] and all(e.times.next is None for e in told)
    assert at.keeper.rest() == []


def test_the_next_one_is_the_first_of_which_anything_was_seen() -> None:
    at = Watched()
    at.come(0, 10, 20)
    at.end(0, 30)
    at.come(3, 70, 80)  # 1 and 2 passed unseen
    (told,) = at.keeper.look(None)
    assert told.times.next == 70


def test_an_iteration_that_only_announces_itself_is_not_the_next() -> None:
    """The engine has times of iteration 2 already, from another use of its place, and it has not begun."""
    at = Watched()
    at.come(0, 10, 20)
    at.end(0, 30)
    at.arenas.begun = 1
    at.spans[2] = (1, 2)
    (told,) = at.keeper.look(None)
    assert told.times.next is None


def test_stamps_of_iterations_that_were_skipped_are_forgotten_and_no_others() -> None:
    at = Watched()
    for iteration in (1, 2, 5):
        at.now = 7 + iteration
        at.keeper.note("record", iteration)
    at.come(4, 10, 20)
    at.end(4, 30)
    at.come(5, 40, 50)
    at.end(5, 60)
    assert [event.times.record for event in at.keeper.rest()] == [None, 12]
    at.end(2, 70)
    assert at.keeper.rest()[0].times.record is None


def test_no_more_are_kept_than_the_engine_knows() -> None:
    at = Watched()
    for iteration in range(KEPT + 9):
        at.come(iteration, iteration * 10 + 1, iteration * 10 + 2)
        at.end(iteration, iteration * 10 + 3)
    assert [event.times.iteration for event in at.keeper.rest()] == list(range(9, KEPT + 9))


@pytest.mark.parametrize(("begun", "oldest", "most"), [(0, 0, 1), (2, 0, 3), (3, 0, 4), (9, 0, 4), (7, 6, 2)])
def test_arenas_in_use_are_told_once(begun: int, oldest: int, most: int) -> None:
    at = Watched()
    at.arenas.begun, at.arenas.oldest = begun, oldest
    at.keeper.look(None)
    at.end(0, 5)
    at.end(1, 6)
    assert [event.arenas for event in at.keeper.rest()] == [(most, 4), (0, 4)]


# -- behind, and on time again ------------------------------------------------------------------------------


def test_a_late_version_is_told_before_its_times_and_only_the_first_of_them() -> None:
    at, events = late(0, 1, 2)
    assert [type(event) for event in events] == [Behind, Timed, Timed, Timed]
    assert events[0] == Behind(0, 5, 1, None, "placing")
    assert at.keeper.behind is True


def test_a_version_in_the_same_moment_as_the_next_byte_is_on_time() -> None:
    at, events = late(0, by=0)
    assert [type(event) for event in events] == [Timed] and at.keeper.behind is False


def test_what_it_was_late_for_is_named() -> None:
    at = Watched()
    at.come(0, 1, 10)
    for now, what in ((20, "covered"), (25, "record"), (90, "applied")):
        at.now = now
        at.keeper.note(what, 0)  # type: ignore[arg-type]
    at.come(1, 80, 81)
    at.end(0, 95)
    assert at.keeper.look(None)[0] == Behind(0, 15, 1, None, "update")


@pytest.mark.parametrize(("records", "stage"), [(True, "record"), (False, "update")])
def test_a_record_is_missed_only_where_one_is_needed(records: bool, stage: str) -> None:
    at = Watched(records=records)
    at.come(0, 1, 10)
    at.now = 12
    at.keeper.note("covered", 0)
    at.come(1, 80, 81)
    at.now = 90
    (said,) = at.keeper.look(0)
    assert said == Behind(0, 10, 0, None, stage)


@pytest.mark.parametrize(("records", "stage"), [(True, "record"), (False, "update")])
def test_a_version_that_is_there_missed_a_record_only_where_one_is_needed(records: bool, stage: str) -> None:
    at = Watched(records=records)
    at.come(0, 1, 10)
    for now, what in ((12, "covered"), (90, "applied")):
        at.now = now
        at.keeper.note(what, 0)  # type: ignore[arg-type]
    at.come(1, 80, 81)
    at.end(0, 95)
    assert at.keeper.look(None)[0] == Behind(0, 15, 1, None, stage)


def test_it_is_on_time_again_after_enough_in_a_row() -> None:
    at, _ = late(0, 1)
    _, events = late(*range(2, 2 + CALM), by=-20, at=at)
    assert [type(event) for event in events] == [*[Timed] * (CALM - 1), OnTime, Timed]
    assert events[-2] == OnTime(1 + CALM) and at.keeper.behind is False
    _, events = late(20, at=at)
    assert events[0] == Behind(20, 5, 1, None, "placing")  # said anew, with nothing of before


def test_one_late_one_begins_the_count_anew() -> None:
    at, _ = late(0)
    late(*range(1, CALM), by=-20, at=at)
    late(CALM, at=at)
    _, events = late(*range(CALM + 1, 2 * CALM), by=-20, at=at)
    assert not any(isinstance(event, OnTime) for event in events)
    _, events = late(2 * CALM, by=-20, at=at)
    assert isinstance(events[0], OnTime)


def test_while_a_ring_is_half_full_it_is_not_on_time_again() -> None:
    at, _ = late(0)
    at.arenas.fill = 0.5
    _, events = late(*range(1, 2 + CALM), by=-20, at=at)
    assert not any(isinstance(event, OnTime) for event in events)
    at.arenas.fill = 0.49
    _, events = late(2 + CALM, by=-20, at=at)
    assert isinstance(events[0], OnTime)


def test_versions_that_begin_anew_know_of_no_delay() -> None:
    at, _ = late(0, 1, 2)
    at.keeper.begin()
    assert at.keeper.behind is False
    _, events = late(3, at=at)
    assert events[0] == Behind(3, 5, 1, None, "placing")


# -- the version that is not there yet -----------------------------------------------------------------------


def watched(first_next: int | None, now: int, fill: float = 0.0, *, at: Watched | None = None) -> list:
    at = at or Watched()
    at.come(0, 1, 10)
    if first_next is not None:
        at.come(1, first_next, first_next)
    at.arenas.fill, at.now = fill, now
    return at.keeper.look(0)


@pytest.mark.parametrize(("first_next", "now", "fill", "said"), [
    (None, 90, 0.0, None),  # nothing of the next one has come
    (80, 80, 0.0, None),  # it has come just now
    (80, 79, 0.0, None),  # two clocks
    (80, 81, 0.0, (1, None, "placing")),
    (None, 90, 0.49, None),
    (None, 90, 0.5, (0, 0, "rings")),  # packets wait: there is no time left
    (80, 80, 0.5, (0, 0, "rings")),
    (80, 85, 0.5, (5, None, "placing")),  # late, and the trend is not known
])
def test_a_version_that_is_due_or_a_ring_that_fills_is_told(
    first_next: int | None, now: int, fill: float, said: tuple[int, int | None, str] | None
) -> None:
    events = watched(first_next, now, fill)
    assert events == ([] if said is None else [Behind(0, said[0], 0, *said[1:])])


def test_it_is_told_once() -> None:
    at = Watched()
    assert len(watched(80, 85, at=at)) == 1
    at.now = 95
    assert at.keeper.look(0) == [] and at.keeper.behind


def test_nobody_waits_for_a_version_that_no_state_has_begun() -> None:
    at = Watched()
    at.come(0, 1, 10)
    at.come(1, 80, 81)
    at.now = 200
    assert at.keeper.look(None) == []


@pytest.mark.parametrize(("stamps", "stage"), [
    ([], "placing"), (["covered"], "record"), (["covered", "record"], "update"),
    (["covered", "record", "applied"], "checksums"),
])
def test_what_it_waits_for_is_named(stamps: list[str], stage: str) -> None:
    at = Watched()
    for i, what in enumerate(stamps):
        at.now = 20 + i
        at.keeper.note(what, 0)  # type: ignore[arg-type]
    assert watched(80, 85, at=at) == [Behind(0, 5, 0, None, stage)]


def growing(late_by: int) -> Watched:
    """Three versions, each 20 later than the one before: the last by `late_by`. Iterations come each 100."""
    at = Watched(arenas=4)
    for iteration in range(3):
        late(iteration, by=late_by - 20 * (2 - iteration), at=at)
    return at


def test_the_forecast_is_said_again_only_when_half_of_it_is_left() -> None:
    """3 arenas of 100 are free beside the one in work. At 60 late there are 240 left, 12 iterations of 20."""
    at = growing(60)
    assert at.keeper.behind
    said = []
    for late_now in (60, 180, 181, 200, 220, 221, 239, 240, 241, 260, 280, 299, 300, 400):
        at.now = at.spans[3][0] + late_now
        at.arenas.begun = 3
        said += [(late_now, event.left) for event in at.keeper.look(2)]
    assert said == [(60, 12), (180, 6), (240, 3), (280, 1), (300, 0)]


def test_rings_add_to_the_room_that_is_left() -> None:
    """64 packets of room, of which FULL are used, and 16 packets an iteration."""
    at = growing(60)
    at.keeper.begin()
    at.arenas.room = 64
    for iteration, consumed in ((3, 100), (4, 116)):
        at.arenas.consumed = consumed
        late(iteration, by=60 + 20 * (iteration - 2), at=at)
    at.keeper.behind = False
    at.now = at.spans[5][0] + 100
    (said,) = at.keeper.look(4)
    assert said.left == int(((3 + FULL * 64 / 16) * 100 - 100) / 20)
