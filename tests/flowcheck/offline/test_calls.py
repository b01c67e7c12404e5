"""flowcheck.replay, inspect and learn as functions: values, errors that cross from the child, and what it leaves."""

from __future__ import annotations

import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowcheck
from flowcheck.errors import EnvironmentProblem, InternalError, UserError
from flowcheck.job.model import Bucket, BucketSlice
from flowcheck.offline import child
from flowcheck.offline.gradients import gradients_of
from flowcheck.offline.result import Missing, result_of
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.plan import BucketPlace
from lab.synth import example_job

PCAPS = Path(__file__).resolve().parents[3] / "pcaps"
CAPTURE, JOB = PCAPS / "ring2-ll.pcap", PCAPS / "ring2-ll.job.json"


# -- through a child -----------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_truth_and_the_directory_goes_with_the_result() -> None:
    """A job given as an object, no `out`: every bucket put together again from its tensors has the truth's bytes."""
    job = flowcheck.load_job(JOB)
    result = flowcheck.replay([CAPTURE], job, gradients=True)
    truth = json.loads((PCAPS / "ring2-ll.truth.json").read_text())["iterations"]
    assert [one.number for one in result.iterations] == [one["iteration"] for one in truth] == list(range(6))
    for iteration in range(6):
        found = result.gradients(iteration)
        for bucket, said in zip(job.bucket_layout(iteration), truth[iteration]["buckets"], strict=True):
            flat = torch.zeros(said["elements"])
            for piece in bucket.slices:
                part = found[piece.name].reshape(-1)[piece.start : piece.start + piece.length]
                flat[piece.offset : piece.offset + piece.length] = part
            assert hashlib.sha256(flat.numpy().tobytes()).hexdigest() == said["sha256"]
    assert result.ok and result.missing == () and result.load().step == 6
    out = result.out
    assert out.is_dir()
    del result
    gc.collect()
    assert not out.exists()


def test_errors_cross_with_what_where_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        flowcheck.replay(tmp_path / "none.pcap", JOB, tmp_path / "out")
    assert refused.value.where.startswith(str(tmp_path / "none.pcap")) and refused.value.what and refused.value.remedy
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong", [{"every": -1}, {"arenas": 1}, {"arenas": 65}, {"iterations": 0}, {"every": "2"}], ids=str
)
def test_arguments_that_cannot_be_are_refused_before_anything_starts(wrong: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(child.subprocess, "Popen", None)
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}: .* is not a whole number"):
        flowcheck.replay(CAPTURE, JOB, **wrong)


@pytest.mark.parametrize(("code", "error", "said"), [
    ("import os; os.kill(os.getpid(), 9)", EnvironmentProblem, "was killed"),
    ("import os; os.kill(os.getpid(), 11)", InternalError, "ended with SIGSEGV"),
    ("print('some last words'); raise ValueError('of ours')", InternalError, "ended with status 1"),
    ("print('some last words'); raise SystemExit(3)", InternalError, "ended with status 3"),
])
def test_a_child_that_does_not_answer(code: str, error: type[Exception], said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(child, "_START", code)
    with pytest.raises(error, match=said) as caught:
        child.run_task("replay", {})
    assert ("some last words" in "".join(getattr(caught.value, "__notes__", []))) == ("words" in code)


def test_a_child_ends_when_its_caller_lets_go(monkeypatch: Any) -> None:
    """An interrupted call does not wait for the task."""
    monkeypatch.setattr(child, "_START", (
        "import sys, time; sys.stdin.buffer.readline()\n"
        "from flowcheck.offline.child import serve\n"
        "serve({'task': 't', 'given': {}, 'answer': 1}, {'t': lambda given: time.sleep(3600)})\n"
    ))
    started = []
    popen = child.subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        monkeypatch.setattr(child.json, "dumps", interrupt)
        return started[0]

    def interrupt(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(child.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child.run_task("replay", {})
    assert started[0].wait(timeout=60) is not None


# -- what a result says -----------------------------------------------------------------------------------------


def covered(index: int, values: list[float], *placed: tuple[int, int]) -> BucketCoverage:
    data = np.array(values, np.float32)
    count = sum(end - start for start, end in placed)
    place = BucketPlace(index, len(values), 0, data.nbytes)
    return BucketCoverage(place, data.view(np.uint8), count, placed, {"lost": len(values) - count})


def test_only_tensors_without_a_missing_element_become_gradients() -> None:
    """One in a bucket with a hole elsewhere, one over two buckets, one with a hole, one bucket that nothing names."""
    job = example_job(ranks=2, count=[700, 300])
    a, b, c = (entry.name for entry in job.model[:3])
    for entry, shape in zip(job.model[:3], ([2, 2], [3], [2]), strict=True):
        entry.shape = shape
    job.buckets.iteration_0 = []
    job.buckets.steady = [
        Bucket([BucketSlice(a, 0, 4), BucketSlice(b, 4, 1), BucketSlice(c, 5, 2)]), Bucket([BucketSlice(b, 1, 2, 1)]),
        Bucket(),
    ]
    found = gradients_of(job, 3, [
        covered(0, [1, 2, 3, 4, 5, 6, 7], (0, 6)), covered(1, [0, 8, 9], (1, 3)), covered(2, [1, 2], (0, 2)),
    ])
    assert sorted(found) == sorted([f"gradient.{a}", f"gradient.{b}", "bucket.2"])
    assert found[f"gradient.{a}"].tolist() == [[1, 2], [3, 4]] and found[f"gradient.{b}"].tolist() == [5, 8, 9]
    assert found["bucket.2"].tolist() == [1, 2]
    half = gradients_of(job, 3, [covered(0, [1, 2, 3, 4, 5, 6, 7], (0, 7)), covered(1, [0, 8, 9])])
    assert sorted(half) == sorted([f"gradient.{a}", f"gradient.{c}"])
    assert gradients_of(job, 3, [covered(2, [1, 2], (0, 1))]) == {}


def report(**changes: Any) -> dict[str, Any]:
    placed = [{"start": 2, "end": 4}, {"start": 6, "end": 9}]
    bucket = {"index": 0, "elements": 10, "placed": placed, "missing": {"lost": 5}}
    whole = {"index": 1, "elements": 4, "placed": [{"start": 0, "end": 4}], "missing": {}}
    verdict = {"complete": False, "publishable": False, "failing": [{"clause": "covered", "reason": "5 of 10"}]}
    return {
        "ok": False, "unproven": ["icrc off"], "checkpoint": None, "parameter_checkpoint": None,
        "iterations": [{"iteration": 4, "buckets": [bucket, whole], "verdict": verdict}],
    } | changes


def test_missing_ranges_are_what_was_not_placed() -> None:
    result = result_of(report(), "1 of 1 iterations are incomplete", Path("out"), False)
    (one,) = result.iterations
    assert one.missing == (Missing(0, 0, 2), Missing(0, 4, 6), Missing(0, 9, 10)) and one.causes == {"lost": 5}
    assert result.missing[0] == (4, Missing(0, 0, 2)) and [part.elements for part in one.missing] == [2, 2, 1]
    assert one.failing == {"covered": "5 of 10"} and one.elements == 14
    assert repr(one) == "Iteration(4: incomplete, 5 of 14 elements missing; covered: 5 of 10)"
    assert repr(result) == (
        "Result(NOT OK: 0 of 1 iterations complete, unproven: icrc off, failed: 1 of 1 iterations are incomplete,"
        " no checkpoint in out)"
    )


def test_what_a_result_does_not_have_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    bare = result_of(report(), "why not", tmp_path, False)
    with pytest.raises(UserError, match="gradients were not kept\n  remedy: replay again with gradients=True"):
        bare.gradients(4)
    for call in (bare.load, bare.state_dict, bare.optimizer_state_dict):
        with pytest.raises(UserError, match="no checkpoint was written: why not"):
            call()
    kept = result_of(report(), "the traffic differs", tmp_path, True)
    with pytest.raises(UserError, match="iteration 5 was not replayed\n  remedy: one of 4 to 4"):
        kept.gradients(5)
    with pytest.raises(UserError, match="the gradients were withdrawn: the traffic differs"):
        kept.gradients(4)


def test_standard_input_is_the_commands_alone() -> None:
    with pytest.raises(UserError, match="standard input"):
        flowcheck.inspect(["-"])
