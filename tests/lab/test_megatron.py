"""Four ranks of Megatron-Core, two instances of its distributed optimizer of two ranks each: AllReduces across
instances over RoCE, what is inside an instance over gloo. Each piece's replica is its rank's main parameters and
optimizer's states after every iteration, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.fault import Fault, lose_a_rank
from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of
from .test_logged import lost_and_redone
from .test_parts import SMALL, follow

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabRun]:
    """Three mirrored ports: all of the ring of two in both pieces."""
    pytest.importorskip("megatron.core", reason="Megatron-Core (extra `dev`) is not installed")
    with lab_of(ranks=4, mirrored=((0, 1, 2),)) as fabric:
        with LabRun(fabric, tmp_path_factory.mktemp("four")) as run:
            yield run


def job_of(dtype: str, reduce: str, **settings: Any) -> Training:
    """bucket_mb: small, so that there are several buckets, which cut parameters."""
    return Training(**{
        "ranks": 4, "shards": 2, "megatron": dtype, "reduce": reduce, "size": SMALL, "bucket_mb": 0.05,
        "softroce": {"protocol": "LL128", "channels": 2, "seed": 1},
    } | settings)


@pytest.mark.parametrize("job", [
    pytest.param(job_of("bfloat16", "float32", clip=0.1, schedule="cosine"), id="bf16, reduced in float32"),
    pytest.param(job_of("bfloat16", "bfloat16", accumulate=2), id="bf16, reduced in bf16"),
    pytest.param(job_of("float32", "float32", clip=0.1, optimizer={"name": "adam", "lr": 1e-3}), id="float32"),
])
def test_every_piece_is_equal(four: LabRun, job: Training) -> None:
    follow(four, job)
    calls = [call for call in four.communicators[0]["calls"] if call["op"] == "AllReduce"]
    assert {call["dtype"] for call in calls} == {job.reduce}
    assert len(calls) >= 3 * len(four.iterations)  # several buckets


def test_a_job_goes_on_from_its_pieces(tmp_path: Path) -> None:
    """A rank is killed; all ranks take their pieces from the node, into main parameters, states and the model, and what
    they compute then is what they would have computed."""
    with lab_of(ranks=4, mirrored=((0, 1, 2),)) as fabric, LabRun(fabric, tmp_path, api=True) as run:
        job = job_of("bfloat16", "float32", clip=0.1, schedule="cosine", noise=True)
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        outcome = lose_a_rank(run, job, Fault(2))
        assert outcome.equal, outcome
        assert outcome.step > 3 and {one["step"] for one in run.recovered} <= {outcome.step}


def test_pieces_that_are_kept_as_a_log_are_redone(tmp_path: Path) -> None:
    """By Megatron-Core's inner optimizer, on each rank; what the job computes then is what it would have computed."""
    lost_and_redone(tmp_path, job_of("bfloat16", "float32", clip=0.1, schedule="cosine", noise=True, kind="log"), 61)
