"""What is wrong until an event says that it is over: checkpoints, stores, the registry; for a while anything else."""

from __future__ import annotations

import json
from typing import Any

from flowcheck.node.status.counters import Tally
from flowcheck.node.status.problems import MOST, MOST_TEXT, SECONDS, Wrong

from .told_scene import START, Clock


def wrong(tally: Tally) -> list[tuple[Any, ...]]:
    return [(one["what"], one["name"], one["since"], one["text"]) for one in tally.document()["wrong"]]


def test_a_checkpoint_that_cannot_be_written_is_wrong_until_one_is() -> None:
    clock = Clock()
    tally = Tally("node-a", clock)
    for step in (4, 5):
        clock.now = START + step
        tally.hear("problem", {"name": "dp0", "step": step, "why": f"step {step}:\n no space"})
    tally.hear("written", {"name": "dp1", "step": 5, "path": "/out"})
    clock.now += 2 * SECONDS
    assert wrong(tally) == [("unwritten", "dp0", START + 4, "step 5: no space")]
    tally.hear("written", {"name": "dp0", "step": 6, "path": "/out"})
    assert wrong(tally) == []


def test_a_store_and_a_registry_until_they_answer() -> None:
    tally = Tally("node-a", Clock())
    tally.hear("unstored", {"name": "", "step": None, "why": "no answer", "again": None})
    tally.hear("unstored", {"name": "dp0", "step": 3, "why": "quota", "again": 5.0})
    tally.hear("unregistered", {"why": "no quorum", "epoch": 1, "copies": []})
    assert [one[:2] for one in wrong(tally)] == [("unstored", ""), ("unstored", "dp0"), ("unregistered", "")]
    tally.hear("stored", {"name": "dp0", "step": 4})
    assert [one[:2] for one in wrong(tally)] == [("unregistered", "")]
    tally.hear("registered", {"members": 3, "root": "a", "epoch": 2})
    assert wrong(tally) == []


def test_another_problem_is_there_for_a_while_after_it_was_said_last() -> None:
    clock = Clock()
    tally = Tally("node-a", clock)
    for _ in range(2):
        tally.hear("problem", {"why": "status.json: no space"})
        clock.now += SECONDS
    assert wrong(tally) == [("problem", "", START, "status.json: no space")]
    clock.now += 1
    assert wrong(tally) == []


def test_a_problem_that_says_what_it_is_about_is_there_until_that_is_solved() -> None:
    clock = Clock()
    tally = Tally("node-a", clock)
    tally.hear("problem", {"process": "api", "cause": "ended", "why": "the process has ended"})
    tally.hear("problem", {"about": "access", "why": "token: no such file"})
    tally.hear("problem", {"about": "status_file", "why": "status.json: no space"})
    clock.now += 10 * SECONDS
    assert [text for *_, text in wrong(tally)] == [
        "the process has ended", "token: no such file", "status.json: no space"]
    tally.hear("solved", {"about": "api"})
    tally.hear("access", {"why": "a file has changed", "roles": [], "tls": False})
    assert [text for *_, text in wrong(tally)] == ["status.json: no space"]
    tally.hear("solved", {"about": "status_file"})
    assert wrong(tally) == []


def test_it_is_bounded_and_what_was_said_last_stays() -> None:
    held = Wrong()
    for number in range(MOST + 5):
        held.hear("problem", {"name": f"g{number}", "why": "x" * 10_000}, START)
    held.hear("problem", {"name": "g5", "why": "again"}, START)
    told = held.document(START)
    assert [one["name"] for one in told] == [*(f"g{number}" for number in range(6, MOST + 5)), "g5"]
    assert len(told) == MOST and told[-1] == {"what": "problem", "name": "g5", "since": START, "text": "again"}
    assert len(json.dumps(told)) < 1024 * MOST


def heard(*events: tuple[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    held = Wrong()
    for event, fields in events:
        held.hear(event, fields, START)
    return [(one["what"], one["name"], one["text"]) for one in held.document(START)]


def test_each_is_ended_by_its_own_event_and_of_its_own_group() -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("problem", {"name": "dp0", "step": 0, "why": "w0"}), ("problem", {"name": "dp1", "step": 4, "why": "w1"}),
        ("unstored", {"name": "dp0", "why": "s0"}), ("unregistered", {"name": None, "why": "r"}),
        ("problem", {"name": "dp0", "step": None, "why": "p"}),
    ]
    all_ = [("unwritten", "dp0", "w0"), ("unwritten", "dp1", "w1"), ("unstored", "dp0", "s0"),
            ("unregistered", "", "r"), ("problem", "dp0", "p")]
    assert heard(*bad) == all_
    for event, name, ended in (("written", "dp0", 0), ("gathered", "dp1", 1), ("stored", "dp0", 2),
                               ("registered", "", 3), ("registered", None, 3)):
        assert heard(*bad, (event, {"name": name})) == [one for one in all_ if one != all_[ended]]
    assert heard(*bad, ("written", {"name": "dp2"}), ("placed", {"why": "nothing"}), ("restored", {})) == all_
    assert heard(("problem", {"step": 4, "why": "of all"}), ("written", {"name": "dp0"})) == []


def test_what_was_said_last_is_its_text_and_the_first_time_its_beginning() -> None:
    held = Wrong()
    held.hear("unstored", {"why": "one\n\ttwo"}, START)
    held.hear("problem", {"why": 7}, START + 1)
    held.hear("unstored", {"why": "x" * (MOST_TEXT + 1)}, START + 2)
    assert held.document(START + 2) == [
        {"what": "problem", "name": "", "since": START + 1, "text": "7"},
        {"what": "unstored", "name": "", "since": START, "text": "x" * MOST_TEXT}]
    assert len(held.document(START + 1 + SECONDS)) == 2 and len(held.document(START + 2 + SECONDS)) == 1


def test_who_does_not_know_its_job_is_wrong_until_it_is_followed_or_gone() -> None:
    clock = Clock()
    tally = Tally("node-a", clock)
    for name in ("dp0", "dp1"):
        tally.hear("watching", {"name": name, "rank": 0, "why": "no bucket"})
    tally.hear("attached", {"name": "dp0", "run_id": "r", "epoch": 0, "ranks": 2, "flows": 2, "resync": "ranges"})
    assert [one[:2] for one in wrong(tally)] == [("watching", "dp1")]
    clock.now += SECONDS + 1
    assert wrong(tally) == []
