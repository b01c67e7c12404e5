"""What the optimizer holds of 16-bit parameters: said by the manifest, or a result that is marked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from flowcheck.checkpoint.directory import Meta, write_step
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.rebuild.iteration.first_weights import first_weights
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.replica import JobReplica
from lab.synth import example_job

from ..by_hand import Replayed, begin_session
from ..fake_engine import FakeEngine
from .test_replica import broadcast, job, weights


def narrow(dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights().items()}


def masters(first: float = 0.25) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"master": tensor.float() + first} for name, tensor in narrow().items()}


@pytest.mark.parametrize(("dtype", "said", "marked"), [
    ("float32", "", False), ("bfloat16", "", True), ("float16", "", True), ("bfloat16", "upcast", False),
    ("float16", "state", False),
])
def test_a_version_is_marked_where_nobody_says_what_the_optimizer_holds(dtype: str, said: str, marked: bool) -> None:
    replica = JobReplica(plan_job(job(dtype=dtype, masters=said)), None)
    replica.start(narrow(dtype), masters() if dtype != "float32" else {}, 0)
    assert [mark.split(":")[0] for mark in replica.unproven] == ["masters"] * marked


def test_a_replay_of_16_bit_parameters_is_unproven_unless_their_masters_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As synth-job --dtype bfloat16 --optimizer adamw writes it: it was "ok" with nothing unproven."""
    def unproven(said: str) -> list[str]:
        described = example_job(count=[20, 9], dtype="bfloat16", optimizer="adamw", masters=said)
        replayed: Replayed = begin_session(monkeypatch, tmp_path, described, into=said or "unsaid")
        replayed.close(0, 1, 2)
        report, failure = replayed.finish()
        assert failure == "" and report["checkpoint"]["step"] == 3
        return [mark for mark in report["unproven"] if mark.startswith("masters")]

    assert len(unproven("")) == 1 and unproven("upcast") == []


def test_masters_that_began_earlier_come_with_the_weights_or_are_refused(tmp_path: Path) -> None:
    plan = plan_job(job(dtype="bfloat16", masters="state"))
    with pytest.raises(UserError, match=r"no fp32 master of 'layer0.weight' came with the first weights"):
        JobReplica(plan, None).learn(partial(first_weights, plan, broadcast16(FakeEngine(plan.engine))))
    partly = masters()
    del partly["layer1.bias"]
    with pytest.raises(UserError, match=r"no fp32 master of 'layer1.bias'"):
        JobReplica(plan, None).start(narrow(), partly, 4)
    path = write_step(tmp_path, 4, narrow(), masters(), Meta())
    replica = JobReplica(plan, path)
    replica.learn(partial(first_weights, plan, broadcast16(FakeEngine(plan.engine))))
    with replica.pinned() as version:
        assert version.step == 4
        for name, state in masters().items():
            assert version.masters[name].equal(state["master"])


def test_masters_that_begin_as_the_first_parameters_are_those_widened() -> None:
    plan = plan_job(job(dtype="bfloat16", masters="upcast"))
    replica = JobReplica(plan, None)
    replica.learn(partial(first_weights, plan, broadcast16(FakeEngine(plan.engine))))
    with replica.pinned() as version:
        assert all(version.masters[name].equal(tensor.float()) for name, tensor in narrow().items())


@pytest.mark.parametrize(("dtype", "said", "words"), [
    ("bfloat16", "fp32", "'fp32' is not one of none, upcast, state"),
    ("float32", "upcast", "no optimized entry has 16 bits"),
    ("float32", "state", "no optimized entry has 16 bits"),
])
def test_what_the_manifest_says_of_masters_must_make_sense(dtype: str, said: str, words: str) -> None:
    described = job(dtype=dtype).to_dict()
    described["optimizer"]["masters"] = said
    with pytest.raises(UserError, match=words) as refused:
        job_from_dict(described)
    assert "optimizer.masters" in str(refused.value.where)
    described["optimizer"]["masters"] = ""
    assert job_from_dict(described).narrow == ([] if dtype == "float32" else list(weights()))


def broadcast16(engine: FakeEngine) -> FakeEngine:
    return broadcast(engine, {name: tensor.view(torch.int16) for name, tensor in narrow().items()})
