"""What a node says of the times of iterations, of falling behind and of giving up: words, units, whose numbers."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.node.status.event_fields import closed_fields, line
from flowcheck.node.status.event_log import as_text
from flowcheck.rebuild.iteration.deadline import Times
from flowcheck.rebuild.version.events import (
    Asked,
    Begun,
    Behind,
    CaughtUp,
    Closed,
    Event,
    FromPeers,
    GivenUp,
    Held,
    Lost,
    NotCaughtUp,
    OnTime,
    Patched,
    TakenUp,
    Timed,
    Waiting,
)

FIRST = 1_795_364_912_250_000_000


def said(event: Event) -> tuple[str, dict[str, Any]]:
    found = line(event, lambda iteration: iteration + 100)
    assert found is not None
    return found


def test_times_are_milliseconds_after_the_first_byte() -> None:
    ms = 1_000_000
    times = Times(7, FIRST, FIRST + 3 * ms, FIRST + 4 * ms, FIRST + 9 * ms, FIRST + 12 * ms, FIRST + 12_500_000,
                  FIRST + 12 * ms, FIRST + 3_500_000)
    assert said(Timed(times, (31, 16384), (2, 4))) == ("times", {
        "iteration": 107, "first": 1_795_364_912.25, "last": 3.0, "measured": 3.5, "covered": 4.0, "record": 9.0,
        "applied": 12.0, "published": 12.5, "next": 12.0, "slack": -0.5, "rings": [31, 16384], "arenas": [2, 4],
    })


def test_what_is_not_known_is_null_and_not_in_the_text() -> None:
    name, fields = said(Timed(Times(7, FIRST, FIRST + 10**6), (0, 64), (1, 4)))
    assert {key for key, value in fields.items() if value is None} == {
        "measured", "covered", "record", "applied", "published", "next", "slack"}
    assert as_text({"event": name, **fields}) == (
        "times: iteration 107, first 1795364912.25, last 1.0, rings [0, 64], arenas [1, 4]")
    assert said(Timed(Times(7), (0, 64), (1, 4)))[1]["first"] is None


def test_what_is_stale_is_asked_for_and_patched() -> None:
    name, fields = said(Held(7, 30, False, "gradients were lost"))
    assert (name, fields["iteration"], fields["elements"]) == ("stale", 107, 30)
    assert fields["why"] == (
        "gradients were lost; its version is built without them, and none is published until the trainers have sent"
        " their own state of these elements")
    _, fields = said(Held(7, 30, True, "no record of it came"))
    assert fields["why"].startswith("no record of it came; the iteration was lost whole, and none is published until")
    assert said(Asked(8, 30, 360, (0, 2))) == ("ranges", {
        "iteration": 108, "elements": 30, "bytes": 360, "ranks": [0, 2]})
    assert said(Patched(9, 7, 30, 360)) == ("patched", {
        "iteration": 109, "since": 107, "elements": 30, "bytes": 360, "source": "trainer"})


def test_what_peers_have_given_is_said_by_peer() -> None:
    assert said(FromPeers(9, 640, {"b:7070": 3}, {"c:7070": "no answer in time"})) == ("peers", {
        "iteration": 109, "bytes": 640, "filled": {"b:7070": 3}, "failed": {"c:7070": "no answer in time"}})


def test_a_version_of_a_peer_is_said_and_why_none_was_taken() -> None:
    assert said(CaughtUp(8, 108, "b:7071", 360, 1.23456)) == ("caught_up", {
        "iteration": 108, "step": 108, "source": "b:7071", "bytes": 360, "seconds": 1.235})
    name, fields = said(NotCaughtUp({"b:7071": "too slow"}))
    assert (name, fields["failed"]) == ("not_caught_up", {"b:7071": "too slow"}) and "by ranges" in fields["why"]


@pytest.mark.parametrize(("stage", "remedy"), [
    ("placing", "capture.queues"), ("record", "the control network"), ("update", "replica.threads"),
    ("checksums", "checksum_every"), ("rings", "capture.place_cores"),
])
def test_who_is_behind_says_by_how_much_for_how_long_and_what_to_change(stage: str, remedy: str) -> None:
    name, fields = said(Behind(7, 35_200_000, 3, 14, stage))
    assert name == "behind" and fields["why"].count(remedy) == 1
    assert {key: value for key, value in fields.items() if key != "why"} == {
        "iteration": 107, "late_ms": 35.2, "in_a_row": 3, "left": 14}
    assert fields["why"].startswith(
        "the next iteration had begun 35.2 ms before the version was there; 3 versions in a row were late; in about 14"
        " iterations there is no room for another one; ")


def test_who_is_late_once_makes_no_forecast() -> None:
    _, fields = said(Behind(7, 200_000, 0, None, "update"))
    assert fields["why"] == (
        "the next iteration had begun 0.2 ms before the version was there; its update is late: raise replica.threads,"
        " with cores that nothing else uses")
    assert said(OnTime(9)) == ("on_time", {"iteration": 109})


@pytest.mark.parametrize(("waits", "why"), [(True, "wait for arenas"), (False, "come faster than they are placed")])
def test_what_is_given_up_begins_and_ends_with_a_number(waits: bool, why: str) -> None:
    name, fields = said(GivenUp(12, (12400, 16384), waits))
    assert name == "overload" and fields["iteration"] == 112
    assert why in fields["why"] and "12400 of 16384" in fields["why"]
    assert said(TakenUp(12, 15, 3200)) == ("recovered", {"first": 112, "last": 115, "packets": 3200})


def test_events_to_which_more_belongs_have_no_line_here() -> None:
    closed = Closed(1, True, "verified", 5, 4, {}, 0, 0, 0, [("covered", "x"), ("previous", "y")])
    assert line(closed, int) is line(Lost("why"), int) is None
    assert said(Waiting(3, "its step record is not here")) == (
        "waiting", {"iteration": 103, "why": "its step record is not here"})
    fields = closed_fields(closed, 101, {"ring_full": 3}, lost=True, matches=0)
    assert fields["why"] == [("covered", "x")] and fields["failed"] == ["covered", "previous"]
    assert fields["dropped"] == {"ring_full": 3} and fields["iteration"] == 101
    assert closed_fields(closed, 101, {}, lost=False, matches=0)["why"] == closed.why


@pytest.mark.parametrize("lost", [False, True])
def test_every_field_of_an_iteration_has_its_name(lost: bool) -> None:
    """Where there is no version to go on from, the first reason is enough."""
    why = [("covered", "a hole"), ("previous", "no")]
    one = Closed(7, True, "verified", 11, 12, {"lost": 13}, 14, 15, 16, why, "early", 17, None, 18, 19, "passed",
                 {"stream": 20}, ["a mark"], 23)
    assert closed_fields(one, 107, {"ring_full": 21}, lost=lost, matches=22) == {
        "iteration": 107, "published": True, "status": "verified", "packets": 11, "placed": 12, "missing": {"lost": 13},
        "healed": 14, "duplicates": 15, "dropped": {"ring_full": 21}, "lag": 16, "updates": "early", "rebuilt": 17,
        "patched": 18, "stale": 19, "final": "passed", "filled": {"stream": 20}, "unproven": ["a mark"], "matches": 22,
        "sampled": 23, "failed": ["covered", "previous"], "why": why[:1] if lost else why,
    }


def test_a_job_that_is_begun_says_how_much_has_to_come() -> None:
    assert said(Begun(7, 1234)) == ("begun", {
        "iteration": 107, "elements": 1234,
        "why": "all of the job's state is asked for by ranges: no version is published until the trainers have sent"
               " their own state of these elements",
    })


@pytest.mark.parametrize(("waits", "why"), [
    (True, "iterations wait for arenas"), (False, "packets come faster than they are placed"),
])
def test_why_iterations_are_given_up(waits: bool, why: str) -> None:
    event, fields = said(GivenUp(7, (12, 16), waits))
    assert (event, fields["iteration"]) == ("overload", 107)
    assert fields["why"].startswith(f"{why}, and a ring has 12 of 16 packets: from here on")


def test_one_late_version_is_not_a_row_of_them_and_milliseconds_have_three_places() -> None:
    def why(in_a_row: int, late: int) -> str:
        found = str(said(Behind(7, late, in_a_row, None, "update"))[1]["why"])
        return found

    assert "in a row" not in why(1, 5) and "2 versions in a row were late" in why(2, 5)
    assert "had begun 12345.679 ms before" in why(1, 12_345_678_901)
