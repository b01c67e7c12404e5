"""What is wrong until an event says that it is over: checkpoints, stores, the registry; for a while anything else."""

from __future__ import annotations

import json
from typing import Any

from flowcheck.node.tally import Tally
from flowcheck.node.wrong import MOST, SECONDS, Wrong

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


def test_it_is_bounded_and_what_was_said_last_stays() -> None:
    held = Wrong()
    for number in range(MOST + 5):
        held.hear("problem", {"name": f"g{number}", "why": "x" * 10_000}, START)
    held.hear("problem", {"name": "g5", "why": "again"}, START)
    told = held.document(START)
    assert len(told) == MOST and told[-1] == {"what": "problem", "name": "g5", "since": START, "text": "again"}
    assert len(json.dumps(told)) < 1024 * MOST
