"""What "equal" means: nothing is equal that is not, and what was not published is never called equal."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.lab.compare import Ledger


def trainer(iteration: int, rank: int = 0, stage: int = 0, **changes: Any) -> dict[str, Any]:
    line = {"iteration": iteration, "rank": rank, "stage": stage, "loss": 1.0, "buffers": ["mean"],
            "tensors": {"w": f"w{iteration}", "mean": f"m{iteration}"},
            "optimizer": {"w.exp_avg": f"e{iteration}"}}  # fmt: skip
    return {**line, **changes}


def node(iteration: int, name: str = "", **changes: Any) -> dict[str, Any]:
    return {"iteration": iteration, "name": name, "tensors": {"w": f"w{iteration}", "mean": f"m{iteration}"},
            "optimizer": {"w.exp_avg": f"e{iteration}"}, **changes}  # fmt: skip


def status(iteration: int, published: bool, why: Any = (), name: str = "") -> dict[str, Any]:
    return {"event": "iteration", "iteration": iteration, "published": published, "why": list(why), "name": name}


def filled(*, versions: tuple[int, ...] = (2, 3, 4)) -> Ledger:
    ledger = Ledger(2, [""])
    for iteration in range(5):
        ledger.trainer(trainer(iteration))
        ledger.trainer(trainer(iteration, 1))
    for iteration in versions:
        ledger.node(node(iteration))
    return ledger


def test_all_equal_from_the_first_version_on() -> None:
    summary = filled().summary()
    assert summary.all_equal and (summary.published, summary.equal, summary.before, summary.tensors) == (3, 3, 2, 9)


@pytest.mark.parametrize("changes, name", [
    ({"tensors": {"w": "other", "mean": "m3"}}, "w"),
    ({"tensors": {"w": "w3", "mean": "other"}}, "mean"),
    ({"optimizer": {"w.exp_avg": "other"}}, "w.exp_avg"),
    ({"optimizer": {}}, "w.exp_avg"),
    ({"optimizer": {"w.exp_avg": "e3", "w.exp_avg_sq": "x"}}, "w.exp_avg_sq"),
])  # fmt: skip
def test_one_tensor_that_differs_is_named(changes: dict[str, Any], name: str) -> None:
    ledger = filled(versions=(2, 4))
    ledger.node(node(3, **changes))
    assert (ledger.row(0, 3).verdict, ledger.row(0, 3).why) == ("differs", name)
    summary = ledger.summary()
    assert not summary.all_equal and [row.iteration for row in summary.differing] == [3]


def test_ranks_that_differ_are_no_equality() -> None:
    ledger = filled()
    ledger.trainer(trainer(3, 1, tensors={"w": "other", "mean": "m3"}))
    assert ledger.row(0, 3).verdict == "differs" and "rank 1" in ledger.row(0, 3).why
    ledger.trainer(trainer(3, 1, tensors={"w": "w3", "mean": "its own"}))  # a buffer is each rank's own
    assert ledger.row(0, 3).verdict == "equal"


def test_a_version_that_is_not_there() -> None:
    ledger = filled(versions=(2, 4))
    assert ledger.row(0, 3).verdict == "waiting" and not ledger.summary().all_equal
    ledger.status(status(3, False, [["coverage", "4 elements"], ["previous", "..."]]))
    assert (ledger.row(0, 3).verdict, ledger.row(0, 3).why) == ("not published", "coverage, previous")
    assert [row.iteration for row in ledger.summary().unpublished] == [3]


def test_nothing_published_is_not_all_equal() -> None:
    summary = filled(versions=()).summary()
    assert not summary.all_equal and summary.before == 5 and summary.equal == 0


def test_two_stages_are_kept_apart() -> None:
    ledger = Ledger(1, ["stage0", "stage1"])
    for stage in (0, 1):
        ledger.trainer(trainer(0, stage, stage))
    ledger.node(node(0, "stage1", tensors={"w": "other", "mean": "m0"}))
    ledger.node(node(0, "stage0"))
    assert [ledger.row(stage, 0).verdict for stage in (0, 1)] == ["equal", "differs"]
