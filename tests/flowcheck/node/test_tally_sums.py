"""What a node's counts are after several events of a kind: sums, histograms, and what the newest one alone decides."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.node.status.counters import Tally
from flowcheck.node.status.group_tally import BUCKETS, MOST_TEXT, STAGES

from .told_scene import START, Clock, attached, iteration, tally, times


def group(*events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return tally(*events).document()["groups"][0]


def test_a_histogram_has_each_span_in_all_that_bound_it() -> None:
    """A span of just the bound is within it; the last one counts all."""
    spans = [0.5, 0.5, 1.0, 2.5, 30_000.0, 40_000.0]  # milliseconds
    made = group(*(times(number, last=span, measured=span, covered=span, record=span, applied=span, published=span)
                   for number, span in enumerate(spans)))
    found = made["stages"]["receive"]
    assert found["counts"] == [sum(span / 1e3 <= bound for span in spans) for bound in BUCKETS] + [6]
    assert found["counts"][:3] == [2, 3, 3] and found["counts"][-2:] == [5, 6]
    assert found["sum"] == pytest.approx(sum(spans) / 1e3)
    for stage in list(STAGES)[1:]:
        assert made["stages"][stage] == {"counts": [6] * (len(BUCKETS) + 1), "sum": 0.0}


def test_each_stage_begins_where_the_one_before_it_has_ended() -> None:
    """One that did not happen is left out, and one that came early shortens nothing."""
    made = group(times(1, last=10.0, covered=None, record=4.0, applied=30.0, published=31.0))
    assert {stage: round(one["sum"], 6) for stage, one in made["stages"].items()} == {
        "receive": 0.01, "telemetry": 0.0, "place": 0.0, "record": 0.0, "update": 0.02, "publish": 0.001}
    assert made["stages"]["place"]["counts"][-1] == made["stages"]["telemetry"]["counts"][-1] == 0
    made = group(times(1, last=10.0, measured=13.0, covered=14.0, record=None, applied=None, published=None))
    assert {stage: round(one["sum"], 6) for stage, one in made["stages"].items() if one["sum"]} == {
        "receive": 0.01, "telemetry": 0.003, "place": 0.001}


def test_bytes_of_all_questions() -> None:
    made = group(*(("peers", {"name": "dp0", "bytes": size}) for size in (128, 7)),
                 *(("ranges", {"name": "dp0", "bytes": size}) for size in (24, 6)))
    assert made["asked"] == {"trainers": 30, "peers": 135}


def test_reasons_and_causes_of_all_iterations() -> None:
    made = group(*(iteration(number, published=False, failed=["covered", "record"], missing={"lost": number},
                             filled={"peer": 2}, why=[["covered", f"c{number}"], ["record", "r"]])
                   for number in (1, 2)), iteration(3, failed=["record"]))
    assert made["clauses"] == {"covered": 2, "record": 3} and made["missing"] == {"lost": 3}
    assert made["filled"] == {"peer": 4, "stream": 1000}
    assert [row["why"] for row in made["rows"]] == ["c1; r", "c2; r", ""]
    assert made["counts"] | {"published": 1, "not_published": 2} == made["counts"]


def test_a_long_reason_is_cut() -> None:
    made = group(iteration(1, why=[["covered", "x" * 2 * MOST_TEXT]]))
    assert made["rows"][0]["why"] == "x" * MOST_TEXT


def test_of_replicas_that_were_left_the_furthest_is_kept() -> None:
    def kept(run_id: str, step: int) -> tuple[str, dict[str, Any]]:
        return "kept", {"name": "dp0", "run_id": run_id, "step": step}

    assert group(kept("a", 40), kept("b", 40), kept("c", 39))["kept"] == {"job": "a", "step": 40}
    assert group(kept("a", 40), kept("b", 41))["kept"] == {"job": "b", "step": 41}
    assert group(kept("a", 40), iteration(1, published=False))["kept"] == {"job": "a", "step": 40}


def test_another_start_begins_with_nothing_of_what_held() -> None:
    """What was counted goes on."""
    before = (attached(), iteration(6, status="lost", stale=9, lag=3), times(6), ("refused", {"name": "dp0"}),
              ("end", {"name": "dp0"}))
    made = group(*before, attached(epoch=2, ranks=5, flows=9, resync="state"))
    wanted = {"job": "run-7", "epoch": 2, "ranks": 5, "flows": 9, "resync": "state", "ended": False, "refused": 0.0,
              "status": "waiting", "stale": 0, "slack": None, "matches": 0, "manifest": "", "rows": [], "lag": 3}
    assert made | wanted == made and made["counts"]["published"] == 1


def test_a_job_that_lacks_ranks_has_not_ended() -> None:
    made = group(attached(), ("end", {"name": "dp0"}), ("incomplete", {"name": "dp0", "ranks": 6}))
    assert (made["ended"], made["ranks"], made["attached"]) == (False, 6, START)


@pytest.mark.parametrize(("rings", "found"), [
    ([[5, 64]], (5, 64)), ([[5, 64], [7, 32]], (7, 64)), ([[5, 64], [0, 1]], (0, 64)), ([[5, 32], [9, 64]], (9, 64)),
])
def test_a_ring_is_as_large_as_it_was_ever_said_to_be(rings: list[list[int]], found: tuple[int, int]) -> None:
    assert group(*(times(number, rings=one) for number, one in enumerate(rings)))["rings"] == found


def test_what_waits_is_said_once_and_dated_by_its_beginning() -> None:
    clock = Clock()
    made = tally(attached(), clock=clock)
    for seconds, event, since in ((1, "behind", {"behind": START + 1}), (2, "behind", {"behind": START + 1}),
                                  (3, "on_time", {}), (4, "behind", {"behind": START + 4}), (5, "end", {})):
        clock.now = START + seconds
        made.hear(event, {"name": "dp0"})
        assert made.document()["groups"][0]["since"] == since


def test_events_of_no_group_make_none() -> None:
    made = Tally("n")
    for event, fields in (("problem", {"why": "w"}), ("written", {"name": None}), ("stored", {"name": "s"}),
                          ("silent", {"name": "dp1"})):
        made.hear(event, fields)
    assert [one["name"] for one in made.document()["groups"]] == ["dp1"]
    made.hear("stored", {"name": "dp1", "step": 3})
    assert made.document()["counts"]["stored"] == {"s": 1, "dp1": 1}


def test_the_last_rows_and_events_are_those_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tally(*(iteration(number) for number in range(5)),
                 *(("problem", {"why": str(number)}) for number in range(5)))
    told = made.document(rows=2, events=3)
    assert [row["iteration"] for row in told["groups"][0]["rows"]] == [3, 4]
    assert [one["text"] for one in told["events"]] == ["2", "3", "4"]
    monkeypatch.setattr("flowcheck.node.status.group_tally.ROWS", 3)
    made.hear(*iteration(9))
    assert [row["iteration"] for row in made.document()["groups"][0]["rows"]] == [3, 4, 9]
