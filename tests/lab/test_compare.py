"""What "equal" means: nothing is equal that is not, and what was not published is never called equal."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lab.compare import Ledger
from lab.experiment import LabOptions, attach_steps, report
from lab.jobs import Training
from lab.shape import FabricConfig


def trainer(iteration: int, rank: int = 0, stage: int = 0, **changes: Any) -> dict[str, Any]:
    line = {"iteration": iteration, "rank": rank, "stage": stage, "loss": 1.0, "buffers": ["mean"],
            "tensors": {"w": f"w{iteration}", "mean": f"m{iteration}"},
            "optimizer": {"w.exp_avg": f"e{iteration}"}}
    return {**line, **changes}


def node(iteration: int, name: str = "", **changes: Any) -> dict[str, Any]:
    return {"iteration": iteration, "name": name, "tensors": {"w": f"w{iteration}", "mean": f"m{iteration}"},
            "optimizer": {"w.exp_avg": f"e{iteration}"}, **changes}


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
])
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


def lossy() -> Ledger:
    """State before iteration 2; 2 to 7 are lost with every copy of something, versions from 8 on: what `lab run --model
    mlp --protocol SIMPLE --mirror-loss 0.01 --seed 1` gives."""
    ledger = Ledger(2, [""])
    ledger.state({"event": "state", "iteration": 2, "name": ""})
    for iteration in range(33):
        ledger.trainer(trainer(iteration))
        ledger.trainer(trainer(iteration, 1))
        ledger.status(status(iteration, iteration >= 8, [] if iteration >= 8 else ["coverage"]))
        if iteration >= 8:
            ledger.node(node(iteration))
    ledger.over = True
    return ledger


def test_iterations_lost_before_the_first_version_are_not_published() -> None:
    ledger = lossy()
    assert [ledger.row(0, i).verdict for i in (0, 1, 2, 7, 8)] == [
        "no state yet", "no state yet", "not published", "not published", "equal"
    ]
    summary = ledger.summary()
    assert [row.iteration for row in summary.unpublished] == [2, 3, 4, 5, 6, 7]
    assert (summary.equal, summary.before, summary.all_equal) == (25, 2, False)


def test_the_last_words_of_a_run_are_those_of_its_table(tmp_path: Path) -> None:
    options = LabOptions(FabricConfig(ranks=2, mirrored=((0, 1),)), Training(model="mlp", ranks=2), tmp_path, 25)
    out = io.StringIO()
    assert report(options, lossy().summary(), [], (1.0, 2.0), Console(file=out, width=110)) == 1
    said = " ".join(out.getvalue().split())
    assert "of 31 iterations from the first state on 25 are equal, 0 differ, 6 were not published" in said
    assert said.count("not published: coverage") == 6


def test_a_run_whose_node_followed_nothing_says_what_stood_in_its_way(tmp_path: Path) -> None:
    """As `lab run --protocol SIMPLE --direction ingress --mirror 0,2` gives: not "0 mirrored packets" alone."""
    options = LabOptions(FabricConfig(ranks=2, mirrored=((0,),)), Training(model="mlp", ranks=2), tmp_path, 2)
    ledger = Ledger(2, [""])
    ledger.state({"event": "state", "iteration": 0, "name": ""})
    for rank in range(2):
        ledger.trainer(trainer(0, rank))
    ledger.over = True
    events = [
        {"event": "silent", "name": "", "why": "an older reason"},
        {"event": "silent", "name": "", "why": "mirror both directions"},
        {"event": "mirror_back", "name": "", "why": "never mind"},
        {"event": "capture", "text": "af_packet:mir0: 1509 arrived"},
    ]
    out = io.StringIO()
    assert report(options, ledger.summary(), events, (1.0, 2.0), Console(file=out, width=110)) == 1
    said = out.getvalue()
    assert "a node said  silent: mirror both directions\n" in said and "older" not in said and "never" not in said
    assert "a node had   af_packet:mir0: 1509 arrived\n" in said and "0 mirrored packets" not in said


@given(st.data())
def test_the_summary_counts_the_rows_of_the_table(data: st.DataObject) -> None:
    """Whatever came and whatever did not, in whatever order: once it is over no row is left out of the count."""
    ledger = Ledger(1, [""])
    for iteration in range(data.draw(st.integers(1, 8))):
        ledger.trainer(trainer(iteration))
        said = data.draw(st.sampled_from(["", "published", "not published", "differs"]))
        if said:
            ledger.status(status(iteration, said != "not published", ["coverage"]))
        if said in ("published", "differs"):
            changes = {"optimizer": {}} if said == "differs" else {}
            ledger.node(node(iteration, **changes))
    for first in data.draw(st.lists(st.integers(0, 8), max_size=2)):
        ledger.state({"event": "state", "iteration": first, "name": ""})
    ledger.over = True
    rows = Counter(ledger.row(0, iteration).verdict for iteration in ledger.iterations(0))
    summary = ledger.summary()
    counted = Counter({"equal": summary.equal, "differs": len(summary.differing),
                       "not published": len(summary.unpublished), "no state yet": summary.before})
    assert +counted == rows


@pytest.mark.parametrize(("steps", "first", "said"), [
    ([0.1, 0.1, 9.0, 0.2, 0.5, 0.3, 0.9, 0.1, 0.3, 0.2], 5, [
        "longest step 900.0 ms (iteration 6 of 3 to 6,", "median of the 3 after them 200.0 ms, longest 300.0 ms"]),
    ([0.1, 0.1, 9.0, 0.2, 0.5, 0.3, 0.9, 0.1, 0.3, 0.2], 4, [
        "longest step 500.0 ms (iteration 4 of 3 to 5,", "median of the 4 after them 250.0 ms, longest 900.0 ms"]),
    ([0.1, 0.1, 0.1, 0.1], 4, ["too few steps"]),
])
def test_the_longest_step_around_attach_is_named(steps: list[float], first: int, said: list[str]) -> None:
    """The first three were before it."""
    text = " ".join(attach_steps(list(enumerate(steps)), first).split())
    assert all(part in text for part in said), text
