"""The judge of the scenarios sees each way in which something can be wrong: without it a scenario could not fail."""

from __future__ import annotations

from typing import Any

import pytest

from . import scripts
from .judge import Boundary, Offer, Version, judge
from .table import PERIOD, SCENARIOS, Expected

AT, LAST = 11, 18
__all__ = ["scripts"]


def boundaries(said: dict[int, tuple[str, str]] | None = None, start: int = 0, **other: Any) -> list[Boundary]:
    """Of two ranks; attached from iteration 3 on. said: (state, why) from an iteration on."""
    out, now = [], ("watching", "nothing is known yet")
    for i in range(LAST + 1):
        now = (said or {}).get(i, ("attached", "") if i == 3 else now)
        out += [Boundary(start, i, rank, {"w": f"{start} {i}"}, {"w.m": str(i)}, state=now[0], why=now[1], **other)
                for rank in (0, 1)]
    return out


def versions(last: int = LAST, wrong: range = range(0), status: str = "unverified", start: int = 0) -> list[Version]:
    return [Version(start, i, {"w": f"{start} {i}"}, {"w.m": "odd" if i in wrong else str(i)}, frozenset({status}))
            for i in range(4, last + 1)]


NAMED = {11: ("refused", "gradients were clipped")}


@pytest.mark.parametrize(("outcome", "said", "made", "more"), [
    ("equal", {}, versions(), {}),
    ("nothing", {}, [], {}),
    ("named", NAMED, versions(10), {}),
    ("named", {12: ("lost", "no connection")}, versions(11), {}),
    ("named", {11: ("attached", "no record")}, versions(10), {}),
    ("late", {14: ("refused", "at last")}, versions(10), {}),
    ("early", {5: ("refused", "something else")}, versions(4), {}),
    ("named", {5: ("refused", "something else")}, [], {"at": None}),
    ("named", {3: ("watching", "it never agrees")}, [], {"at": None}),
    ("silent", {}, versions(wrong=range(11, 19)), {}),
    ("silent", NAMED, versions(12, wrong=range(10, 11)), {"at": None, "period": 0}),
    ("silent", {}, versions(wrong=range(11, 19)), {"said": {11 + PERIOD + 1: "diverged"}}),
    ("silent", {}, versions(wrong=range(11, 19)), {"said": {12: "diverged"}}),  # and wrong again
    ("caught", {}, versions(11 + PERIOD, wrong=range(11, 18)), {"said": {11 + PERIOD: "diverged"}}),
    ("caught", {12: ("refused", "a sample differs")}, versions(12, wrong=range(11, 13)), {}),
    ("verified", {}, versions(17, wrong=range(11, 12), status="verified"), {"said": {11: "diverged"}}),
    ("kept", {}, versions(12, wrong=range(11, 13)), {"said": {12: "diverged"}, "offers": [Offer(11, "follows 9")]}),
    ("caught", {}, versions(12, wrong=range(11, 13)), {"said": {12: "diverged"}, "offers": [Offer(11, "diverged")]}),
    ("equal", {}, versions(), {"offers": [Offer(18, "verified", True, {"w": "0 18"})]}),
    ("abandoned", {}, versions(), {"offers": [Offer(18, "verified", True, {"w": "1 18"})]}),
])
def test_each_outcome(outcome: str, said: Any, made: list[Version], more: dict[str, Any]) -> None:
    more = {"at": AT, "said": {}, **more}
    assert judge(boundaries=boundaries(said), versions=made, **more).outcome == outcome


def test_a_version_of_one_rank_alone_is_wrong() -> None:
    """Each rank's state counts, but for buffers, which are those of rank 0."""
    odd = [Boundary(0, 11, 1, {"w": "odd", "b": "odd"}, {"w.m": "11"}, buffers=["b"])]
    truth = [one for one in boundaries() if (one.iteration, one.rank) != (11, 1)] + odd
    assert judge(AT, truth, versions(), {}).wrong == [11]
    mended = [Boundary(0, 11, 1, {"w": "0 11", "b": "odd"}, {"w.m": "11"}, buffers=["b"])]
    assert judge(AT, truth[:-1] + mended, versions(), {}).outcome == "equal"


def test_what_recover_gives_has_to_be_of_the_last_start() -> None:
    """A step that the last start has not done again may be of the one before."""
    truth = [*boundaries(), *(one for one in boundaries(start=1) if one.iteration >= 6)]
    made = [*versions(), *(one for one in versions(start=1) if one.iteration >= 6)]
    for step, start, outcome in ((18, 0, "abandoned"), (18, 1, "equal"), (5, 0, "equal"), (5, 1, "abandoned")):
        offer = Offer(step, "verified", True, {"w": f"{start} {step}"})
        assert judge(None, truth, made, {}, [offer]).outcome == outcome, (step, start)


def test_a_second_attachment_begins_anew() -> None:
    """What it says while it watches is no complaint; that it never gets further is one."""
    early = [one for one in boundaries() if one.iteration < AT]
    late = [one for one in boundaries({AT: ("watching", "so far"), 15: ("attached", "")}, attachment=1)
            if one.iteration >= AT]
    assert judge(AT, early + late, versions(), {}).outcome == "equal"
    never = [one for one in boundaries({AT: ("watching", "so far")}, attachment=1) if one.iteration >= AT]
    assert judge(AT, early + never, versions(10), {}).marks == [LAST]


def test_a_better_outcome_than_the_least_is_good() -> None:
    for made, good in ((versions(), (True, True, True)), (versions(wrong=range(11, 19)), (False, False, False))):
        verdict = judge(AT, boundaries(), made, {})
        assert tuple(verdict.good(one) for one in Expected) == good
    verdict = judge(AT, boundaries(NAMED), versions(10), {})
    assert [verdict.good(one) for one in Expected] == [True, True, False]


def test_there_are_enough_and_each_says_what_it_is() -> None:
    assert len(SCENARIOS) >= 80 and all(one.about for one in SCENARIOS.values())
    assert 4 <= sum(one.quick for one in SCENARIOS.values()) <= 8
