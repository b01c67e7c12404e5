"""What is said of a job that lost a rank: equal only where every loss, tensor and version is."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from flowcheck.cli import app
from flowcheck.errors import UserError
from lab.compare import Row, Summary
from lab.fault import Fault, Outcome, say

VERSIONS = Summary(published=9, equal=9, differing=[], unpublished=[], before=2, tensors=90)
GOOD = Outcome(Fault(2), died=20, step=19, recovered="Recovered(step 19)", seconds=12.5,
               losses={19: (3.25, 3.25), 20: (3.5, 3.5)}, differ=(), tensors=440, versions=VERSIONS)


def said(outcome: Outcome) -> tuple[bool, str]:
    out = io.StringIO()
    return say(outcome, Console(file=out, width=200)), out.getvalue()


def test_equal_says_how_much_was_compared() -> None:
    equal, text = said(GOOD)
    assert equal and "killed       rank 2, in the backward of iteration 20" in text and "1 iteration repeated" in text
    assert "12.5 s from the death" in text and "EQUAL: 11 losses" in text and "440 tensors" in text
    assert [line for line in text.splitlines() if "goes on here" in line] == [
        "  19      3.250000      3.250000   <- goes on here"]


@pytest.mark.parametrize("worse", [
    {"differ": (20,)}, {"tensors": 0}, {"versions": replace(VERSIONS, differing=[Row(0, 21, "differs", "a.weight")])},
    {"versions": replace(VERSIONS, unpublished=[Row(0, 21, "not published")])},
    {"versions": replace(VERSIONS, equal=0)},
], ids=["another tensor", "nothing compared", "another version", "a version is not there", "no version"])
def test_anything_else_is_not_equal(worse: dict[str, object]) -> None:
    equal, text = said(replace(GOOD, **worse))  # type: ignore[arg-type]
    assert not equal and "NOT EQUAL: of 11 iterations" in text and "\nEQUAL" not in text


def test_a_loss_that_differs_is_marked() -> None:
    _, text = said(replace(GOOD, losses={20: (3.5, 3.5000001)}, differ=(20,), died=20, step=20))
    assert "differs <- goes on here" in text and "no iterations repeated" in text


@pytest.mark.parametrize(("words", "why"), [("--kill 4", "none of 0 to 3"), ("--kill 1 --stages 2", "stages, exp")])
def test_a_rank_that_cannot_be_killed_is_refused(words: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        app(f"lab run --ranks 4 --mirror 0,1,2,3 {words}".split(), standalone_mode=False)
