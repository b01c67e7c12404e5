"""What a node counts of its events: sums, what holds now, the last iterations; bounded, and never in the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowcheck.node.status import counters as module
from flowcheck.node.status.counters import EVENTS, MOST_GROUPS, Tally
from flowcheck.node.status.event_log import Events
from flowcheck.node.status.group_tally import BUCKETS, CONDITIONS, MOST_TEXT, ROWS, STAGES

from .told_scene import START, Clock, attached, iteration, tally, times


def group(made: Tally, name: str = "dp0") -> dict[str, Any]:
    return next(one for one in made.document()["groups"] if one["name"] == name)


def test_events_go_on_and_are_counted() -> None:
    said: list[Any] = []
    made = Tally("n")
    say = made.counting(lambda event, **fields: said.append((event, fields)))
    say("listening", control="a")
    say("waiting", name="dp0", iteration=3, why="w")
    say("waiting", name="dp1", iteration=3, why="w")
    say("waiting", name="dp1", iteration=4, why="w")
    assert said[:2] == [("listening", {"control": "a"}), ("waiting", {"name": "dp0", "iteration": 3, "why": "w"})]
    assert made.document()["counts"] == {"listening": {"": 1}, "waiting": {"dp0": 1, "dp1": 2}}


def test_a_fault_in_counting_ends_nothing_and_is_said_once() -> None:
    said: list[Any] = []
    say = Tally("n").counting(lambda event, **fields: said.append((event, fields)))
    for _ in range(3):
        say("iteration", name="dp0")  # without any of its fields
    assert [event for event, _ in said] == ["iteration", "problem", "iteration", "iteration"]
    assert "the event iteration could not be counted: KeyError" in said[1][1]["why"]


def test_parameters_alone_are_no_version_and_no_checkpoint() -> None:
    """Of a job that no trainer attaches. What stands in the event as published are its parameters."""
    clock = Clock()
    made = tally(attached(manifest="job.json"), iteration(6, status="parameters", parameters=6), clock=clock)
    clock.now += 5
    made.hear("gathered", {"name": "dp0", "step": 6, "path": "p"})
    found = group(made)
    assert (found["manifest"], found["status"], found["counts"]["published"]) == ("job.json", "parameters", 1)
    assert found["parameters"] == {"step": 6, "time": START + 5}
    assert (found["step"], found["step_time"], found["checkpoint"]) == (0, 0.0, {"step": 0, "time": 0.0})
    made.hear(*attached(run_id="another"))
    assert group(made)["parameters"] == {"step": 0, "time": 0.0} and group(made)["manifest"] == ""


def test_a_group_that_is_attached() -> None:
    clock = Clock()
    made = group(tally(attached(), clock=clock))
    assert (made["job"], made["epoch"], made["ranks"], made["flows"], made["resync"]) == ("run-7", 1, 4, 8, "ranges")
    assert made["attached"] == START and made["status"] == "waiting" and made["step_time"] == 0.0


def test_a_job_has_nothing_of_the_one_before_it() -> None:
    """Else its versions and its checkpoints would be old before it has any."""
    before = attached(), iteration(6, lag=3), ("written", {"name": "dp0", "step": 7, "path": "p"})
    other = group(tally(*before, attached(run_id="run-8")))
    assert (other["step"], other["step_time"], other["lag"]) == (0, 0.0, 0)
    assert other["checkpoint"] == {"step": 0, "time": 0.0} and other["counts"]["published"] == 1
    again = group(tally(*before, attached(epoch=2)))  # the same job, started again, has its versions
    assert (again["step"], again["step_time"], again["checkpoint"]["step"]) == (7, START, 7)


def test_a_job_that_is_refused_is_known_until_it_is_attached_or_has_a_version() -> None:
    refused = "refused", {"name": "dp0", "rank": 1, "why": "w"}
    assert group(tally(refused))["refused"] == group(tally(attached(), refused))["refused"] == START
    assert group(tally(refused, iteration(1, published=False)))["refused"] == START
    for after in (attached(), iteration(1)):
        assert group(tally(refused, after))["refused"] == 0.0


def test_sums_over_iterations() -> None:
    made = group(tally(
        attached(), iteration(0),
        iteration(1, published=False, status="lost", missing={"lost": 5, "icrc": 2}, failed=["covered", "previous"],
                  why=[["covered", "bucket 0 lacks 7"], ["previous", "p"]], healed=3, packets=50, placed=20,
                  duplicates=1, filled={"stream": 10, "peer": 4}, stale=7, lag=2),
        iteration(2, missing={"lost": 1}, patched=7, filled={"trainer": 4}),
    ))
    assert made["counts"] == {"published": 2, "not_published": 1, "packets": 250, "placed": 140, "duplicates": 81,
                              "healed": 3}
    assert made["missing"] == {"lost": 6, "icrc": 2} and made["clauses"] == {"covered": 1, "previous": 1}
    assert made["filled"] == {"stream": 1010, "peer": 4, "trainer": 4} and made["patched"] == 7
    assert made["status"] == "verified" and made["stale"] == 0 and made["lag"] == 0


def test_the_last_complete_step_is_that_of_what_was_published() -> None:
    """The version after iteration N has step N + 1; one that is not published changes nothing."""
    clock = Clock()
    made = tally(attached(), iteration(6), clock=clock)
    clock.now += 10
    made.hear(*iteration(7, published=False, status="unverified", stale=9, lag=3))
    assert (group(made)["step"], group(made)["step_time"]) == (7, START)
    assert (group(made)["stale"], group(made)["lag"], group(made)["status"]) == (9, 3, "unverified")
    made.hear(*iteration(8))
    assert (group(made)["step"], group(made)["step_time"]) == (9, START + 10)


def test_what_is_summed_and_what_is_the_newest() -> None:
    made = group(tally(iteration(1, patched=7, missing={"lost": 1}), iteration(2, patched=5, missing={"lost": 2}),
                       times(1, slack=-1.0), times(2, slack=-2.0), times(3, slack=-3.0)))
    assert (made["patched"], made["late"], made["slack"]) == (12, 3, -0.003) and made["missing"] == {"lost": 3}


def test_a_count_that_goes_back_is_not_taken_away() -> None:
    made = group(tally(iteration(0), iteration(1, duplicates=-3)))
    assert made["counts"]["duplicates"] == 40


def test_the_replica_of_an_earlier_process_stays_until_there_is_a_version() -> None:
    made = tally(("kept", {"name": "dp0", "run_id": "old", "step": 40, "path": "p", "needs": "n"}),
                 ("kept", {"name": "dp0", "run_id": "older", "step": 30, "path": "p", "needs": "n"}), attached())
    assert group(made)["kept"] == {"job": "old", "step": 40}
    made.hear(*iteration(4))
    assert group(made)["kept"] is None and group(made)["step"] == 5


# -- times -----------------------------------------------------------------------------------------------------


def stage(made: Any, name: str) -> tuple[int, float]:
    return made["stages"][name]["counts"][-1], round(made["stages"][name]["sum"], 6)


def test_stages_are_what_each_took_after_the_one_before() -> None:
    """The record came before everything was covered, so nothing waited for it."""
    made = group(tally(times(3)))
    assert stage(made, "receive") == (1, 0.04) and stage(made, "place") == (1, 0.002)
    assert stage(made, "record") == (1, 0.0)
    assert stage(made, "update") == (1, 0.018) and stage(made, "publish") == (1, 0.001)
    counts = made["stages"]["update"]["counts"]
    assert len(counts) == len(BUCKETS) + 1
    assert [n for n, bound in zip(counts, BUCKETS, strict=False) if bound >= 0.018] == [1] * sum(
        bound >= 0.018 for bound in BUCKETS)
    assert not any(n for n, bound in zip(counts, BUCKETS, strict=False) if bound < 0.018)


def test_what_has_not_happened_is_not_counted() -> None:
    made = group(tally(times(3, record=None, applied=None, published=None, slack=None)))
    assert [stage(made, name)[0] for name in STAGES] == [1, 0, 1, 0, 0, 0]
    assert made["slack"] is None and made["late"] == 0


@pytest.mark.parametrize(("slack", "late"), [(39.0, 0), (0.0, 0), (-0.001, 1)])
def test_a_late_version_is_counted(slack: float, late: int) -> None:
    made = group(tally(times(3, slack=slack)))
    assert (made["slack"], made["late"]) == (slack / 1e3, late)


def test_rings_and_arenas_are_the_newest() -> None:
    made = tally(times(3, rings=[0, 1]), times(4), times(5, rings=[5, 4096], arenas=[1, 2]))
    assert (group(made)["rings"], group(made)["arenas"]) == ((5, 4096), (1, 2))
    made.hear(*times(6, rings=[0, 1]))  # nothing has waited: no ring was looked at
    assert group(made)["rings"] == (0, 4096)


def test_a_row_is_an_iteration_with_its_times_and_its_end() -> None:
    made = group(tally(iteration(3, missing={"lost": 2}, filled={"stream": 1, "peer": 2}, why=[["covered", "c"]]),
                       times(3), iteration(4)))
    first, second = made["rows"]
    assert first == {
        "iteration": 3, "published": True, "missing": {"lost": 2}, "filled": {"stream": 1, "peer": 2}, "why": "c",
        "times": {"first": START + 3, "last": 40.0, "measured": None, "covered": 42.0, "record": 41.0,
                  "applied": 60.0, "published": 61.0, "next": 100.0},
    }
    assert second["iteration"] == 4 and "times" not in second


def test_rows_are_bounded_and_those_of_the_start_before_go() -> None:
    made = tally(*(iteration(number) for number in range(ROWS + 5)))
    assert [row["iteration"] for row in group(made)["rows"]] == list(range(5, ROWS + 5))
    made.hear(*attached())
    assert group(made)["rows"] == [] and group(made)["counts"]["published"] == ROWS + 5


# -- what holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "begins", "ends"),
    [("silent", "silent", "mirror_back"), ("behind", "behind", "on_time"), ("overload", "overload", "recovered"),
     ("stale", "stale", "patched"), ("stale", "begun", "patched"), ("stale", "stale", "state")],
)
def test_a_condition_holds_from_one_event_to_another(condition: str, begins: str, ends: str) -> None:
    clock = Clock()
    made = tally((begins, {"name": "dp0", "elements": 9}), clock=clock)
    clock.now += 5
    made.hear(begins, {"name": "dp0", "elements": 9})
    made.hear(begins, {"name": "dp1", "elements": 9})
    assert group(made)["since"] == {condition: START}
    made.hear(ends, {"name": "dp0"})
    assert group(made)["since"] == {} and group(made, "dp1")["since"] == {condition: START + 5}


def begun(elements: int) -> dict[str, Any]:
    return {"name": "dp0", "iteration": 4, "elements": elements, "kernels": "k", "why": "w"}


def test_nothing_is_stale_where_a_replica_was_taken_up() -> None:
    """It is said to begin, and no `patched` follows."""
    made = tally(attached(), ("begun", begun(0)))
    assert group(made)["since"] == {}
    made.hear("begun", begun(9))
    assert group(made)["since"].keys() == {"stale"}


def test_a_version_of_a_peer_ends_what_was_lost_and_what_was_stale() -> None:
    made = tally(attached(), ("lost", {"name": "dp0", "why": "w", "serves": 3, "dropped": {}}), ("begun", begun(9)))
    assert group(made)["since"].keys() == {"lost", "stale"}
    made.hear("caught_up", {"name": "dp0", "step": 5, "iteration": 5, "source": "s", "bytes": 9, "seconds": 0.1})
    assert group(made)["since"] == {}


def test_a_job_that_lacks_ranks_is_seen() -> None:
    """It was never attached: the page and the alerts know of it all the same."""
    made = tally(("incomplete", {"name": "dp0", "run_id": "r", "ranks": 8, "absent": [7], "why": "w"}))
    assert (group(made)["ranks"], group(made)["ended"], group(made)["status"]) == (8, False, "waiting")


@pytest.mark.parametrize("condition", list(CONDITIONS))
def test_a_new_job_has_none_of_them(condition: str) -> None:
    begins = sorted(CONDITIONS[condition][0])[0]
    for ends in (attached(), ("end", {"name": "dp0", "run_id": "r", "serves": 3})):
        assert group(tally((begins, {"name": "dp0", "elements": 9}), ends))["since"] == {}


def test_lost_and_what_ends_it() -> None:
    made = tally(iteration(3), ("lost", {"name": "dp0", "why": "w", "serves": 3, "dropped": {}}))
    assert group(made)["status"] == "lost" and "lost" in group(made)["since"]
    made.hear("state", {"name": "dp0", "iteration": 4, "kernels": "k"})
    assert group(made)["status"] == "unverified" and group(made)["since"] == {}


def test_the_end_of_a_job_is_known_until_the_next() -> None:
    made = tally(attached(), ("end", {"name": "dp0", "run_id": "r", "serves": 3}))
    assert group(made)["ended"]
    made.hear(*attached())
    assert not group(made)["ended"]


# -- bytes, files, failures ------------------------------------------------------------------------------------


def test_bytes_that_were_asked_for() -> None:
    made = group(tally(("ranges", {"name": "dp0", "iteration": 1, "elements": 2, "bytes": 24, "ranks": [0]}),
                       ("ranges", {"name": "dp0", "iteration": 2, "elements": 2, "bytes": 6, "ranks": [0]}),
                       ("peers", {"name": "dp0", "iteration": 1, "bytes": 128, "filled": {}, "failed": {}})))
    assert made["asked"] == {"trainers": 30, "peers": 128}


def test_the_newest_checkpoint() -> None:
    made = group(tally(("written", {"name": "dp0", "step": 20, "path": "p"})))
    assert made["checkpoint"] == {"step": 20, "time": START}


def test_failures_are_summed_and_the_last_ones_kept() -> None:
    event = {"name": "dp0", "iteration": 6, "detected": 1.0, "restored": 2.0, "resumed": 4.5, "seconds": 3.5,
             "repeated": 2}
    made = tally(*(("job_recovered", event | {"iteration": number}) for number in range(20)))
    assert group(made)["failures"] == {"count": 20, "seconds": 70.0, "repeated": 40}
    assert [one["iteration"] for one in group(made)["failed"]] == list(range(4, 20))


# -- the list of events ----------------------------------------------------------------------------------------


def test_events_that_somebody_should_read() -> None:
    made = tally(iteration(3), times(3), attached(), ("placing", {"text": "t"}),
                 ("dropped", {"port": "eth1", "drops": {"ring_full": 3}, "why": "raise\n  capture.ring_size"}),
                 ("silent", {"name": "dp0", "why": "no packet", "empty": "", "none": None, "list": []}))
    told = made.document()["events"]
    assert [one["event"] for one in told] == ["attached", "dropped", "silent"]
    assert told[1] == {"event": "dropped", "time": START,
                       "text": "port eth1, drops {'ring_full': 3}, raise capture.ring_size"}
    assert told[2] == {"event": "silent", "time": START, "text": "no packet", "name": "dp0"}


def test_a_line_of_the_list_has_its_time_and_neither_name_nor_job() -> None:
    clock = Clock()
    clock.now += 0.12349
    (told,) = tally(("left", {"name": "dp0", "job": "run-7", "rank": 1}), clock=clock).document()["events"]
    assert told == {"event": "left", "time": START + 0.123, "text": "rank 1", "name": "dp0"}


def test_moments_are_shown_as_people_read_them() -> None:
    made = tally(("job_recovered", {"name": "dp0", "iteration": 6, "detected": 1e9, "restored": 1e9 + 2,
                                    "resumed": 1e9 + 4, "seconds": 4.0, "repeated": 0}))
    assert "detected 2001-09-09 01:46:40 UTC, restored" in made.document()["events"][0]["text"]


def test_strangers_push_nothing_out_of_the_list() -> None:
    made = tally(("problem", {"why": "w"}), *[("connection", {"peer": "10.0.0.9:1", "why": "w"})] * (EVENTS + 1))
    assert [one["event"] for one in made.document()["events"]] == ["problem"]
    assert made.document()["counts"]["connection"] == {"": EVENTS + 1}


def test_events_and_their_text_are_bounded() -> None:
    made = tally(*(("problem", {"why": f"{number} " + "x" * 10_000}) for number in range(EVENTS + 9)))
    told = made.document()["events"]
    assert len(told) == EVENTS and told[0]["text"].startswith("9 ") and len(told[0]["text"]) == MOST_TEXT
    assert len(made.document(events=3)["events"]) == 3 and made.document(events=0)["events"] == []


def test_groups_are_bounded_and_the_one_that_was_heard_longest_ago_goes() -> None:
    made = tally(*(attached(f"g{number}") for number in range(MOST_GROUPS)))
    made.hear(*iteration(1, "g0"))
    made.hear(*attached("new"))
    names = [one["name"] for one in made.document()["groups"]]
    assert len(names) == MOST_GROUPS and "g1" not in names and {"g0", "new"} <= set(names)
    assert made.document()["counts"]["attached"]["g1"] == 1, "a counter never goes back while its name is remembered"


def test_a_holder_counts_the_events_of_all_that_it_copies() -> None:
    """It has a name for each shard, many more than a node follows groups; and none of them is a group of its own."""
    made = Tally("h")
    for _ in range(2):
        for number in range(100):
            made.hear("copied", {"name": f"s{number}", "step": 3})
    assert made.document()["counts"]["copied"] == {f"s{number}": 2 for number in range(100)}
    assert made.document()["groups"] == []


def test_names_are_bounded_and_the_one_that_was_heard_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NAMES", 3)
    made = Tally("h")
    made.hear("listening", {})
    for name in ("a", "b", "c", "a", "d"):
        made.hear("copied", {"name": name})
        made.hear("uncopied", {"name": name})
    wanted = {"c": 1, "a": 2, "d": 1}
    assert made.document()["counts"] == {"listening": {"": 1}, "copied": wanted, "uncopied": wanted}


def test_a_document_is_plain_and_does_not_change_afterwards() -> None:
    made = tally(attached(), iteration(1), times(1))
    before = made.document()
    text = json.dumps(before)
    for event in (iteration(2, missing={"lost": 3}), times(2), ("silent", {"name": "dp0", "why": "w"})):
        made.hear(*event)
    assert json.dumps(before) == text
    assert made.document(rows=1)["groups"][0]["rows"][0]["iteration"] == 2
    assert made.document(rows=0)["groups"][0]["rows"] == []


def test_a_document_is_of_its_node_and_its_moment() -> None:
    """And has what is wrong by then."""
    clock = Clock()
    made = tally(("unstored", {"name": "dp0", "why": "no room", "again": 5.0}), clock=clock)
    clock.now += 90
    told = made.document()
    assert told.keys() == {"node", "started", "time", "groups", "counts", "events", "wrong", "replaced"}
    assert (told["node"], told["started"], told["time"]) == ("node-a", START, START + 90)
    assert told["wrong"] == [{"what": "unstored", "name": "dp0", "since": START, "text": "no room"}]


def test_what_standard_output_says_by_itself_is_counted_too(capfd: pytest.CaptureFixture[str]) -> None:
    made = Tally("n")
    with Events(False, None) as say:
        made.counting(say)("listening")
        say._tell("events_dropped", count=3, why="w")
    assert made.document()["counts"] == {"listening": {"": 1}, "events_dropped": {"": 1}}


def test_groups_are_sorted_by_name() -> None:
    made = tally(attached("b"), attached("a"))
    assert [one["name"] for one in made.document()["groups"]] == ["a", "b"]
