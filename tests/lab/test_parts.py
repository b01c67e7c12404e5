"""Several groups of a job: shards of a model that fully_shard replicates, and experts beside what all ranks share. Each
group's replica is its ranks' own state after every iteration, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.fault import Fault, lose_a_rank
from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

pytestmark = pytest.mark.root
VERSIONS = 6
SMALL = {"width": 33, "layers": 2, "context": 16}  # 33 rows are no two equal shards: the second is padded


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabRun]:
    """Four ranks that run one job after the other. Three mirrored ports: one of each pair, and all of the ring."""
    with lab_of(ranks=4, mirrored=((0, 1, 2),)) as fabric:
        with LabRun(fabric, tmp_path_factory.mktemp("four")) as run:
            yield run


def said(run: LabRun, event: str) -> list[dict[str, Any]]:
    return [one for _, one in run.events if one["event"] == event]


def follow(run: LabRun, job: Training) -> None:
    """Every group's every version from the first on is equal, and a checksum of the trainer's has said so, too."""
    run.start_nodes(job)
    first = run.attach(job)
    run.train(VERSIONS)
    run.end()
    run.wait_for_nodes(first + VERSIONS - 1)
    assert set(run.finish_nodes()) == {0}
    summary = run.ledger.summary()
    assert summary.all_equal and summary.published >= VERSIONS * len(job.names), (
        summary, [event for _, event in run.events][-6:])
    assert {one["resync"] for one in said(run, "attached")} == {"ranges"}, "no rank waits"
    lines = said(run, "iteration")
    assert {line["name"] for line in lines} == {one["name"] for one in said(run, "attached")} == set(job.names)
    for name in job.names:
        assert "verified" in {line["status"] for line in lines if line["name"] == name}


def shards(reduce: str, model: str = "gpt", **settings: Any) -> Training:
    softroce = {"protocol": "LL128", "channels": 2, "seed": 1}
    size = {"size": SMALL} if model == "gpt" else {}
    return Training(model=model, ranks=4, shards=2, reduce=reduce, softroce=softroce, **{**size, **settings})


@pytest.mark.slow  # each rank imports torch's compiler, which is most of it; the trainer's test_hsdp.py is always run
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_hsdp(four: LabRun, reduce: str) -> None:
    """2 x 2: each AllReduce is of one block's padded shard, and blocks that are alike follow one another."""
    job = shards(reduce, clip=0.1) if reduce == "float32" else shards(reduce, accumulate=2)
    follow(four, job)
    calls = four.communicators[0]["calls"]
    assert {call["dtype"] for call in calls if call["op"] == "AllReduce"} == {reduce}
    counts = [call["count"] for call in calls if call["op"] == "AllReduce"]
    assert len(set(counts)) < len(counts) // len(four.iterations)  # two layers of one size


@pytest.mark.slow
@pytest.mark.parametrize("job", [
    pytest.param(shards("float32", "conv", optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}), id="buffers"),
    pytest.param(shards("bfloat16", "mlp", clip=0.1, schedule="step"), id="bf16 and clipping"),
    pytest.param(shards("float32", "mlp", size={"width": 1, "context": 8}), id="a shard without elements"),
])
def test_hsdp_besides(four: LabRun, job: Training) -> None:
    follow(four, job)


def test_experts_beside_what_all_ranks_share(four: LabRun) -> None:
    """Two groups a rank, one attachment: the layers among two ranks, the rest among four."""
    softroce = {"protocol": "LL", "seed": 1}
    job = Training(size=SMALL, ranks=4, experts=2, accumulate=2, schedule="cosine", softroce=softroce)
    follow(four, job)


@pytest.mark.slow
def test_an_embedding_that_two_stages_share(tmp_path: Path) -> None:
    """Reduced twice: in DDP's bucket, which nobody steps, and by the script, which is what the replica has to have."""
    with lab_of(ranks=4, mirrored=((0, 1, 2, 3),)) as fabric, LabRun(fabric, tmp_path) as run:
        size = {"width": 32, "layers": 2, "context": 16}
        follow(run, Training(size=size, ranks=4, stages=2, tied=True, softroce={"protocol": "SIMPLE", "seed": 1}))


@pytest.mark.slow
@pytest.mark.parametrize(("job", "killed"), [
    pytest.param(shards("bfloat16", clip=0.1, schedule="cosine", noise=True), 2, id="bf16"),
    # Linear(64, 1): one of its two shards has no elements, so nothing but its count of steps comes by ranges
    pytest.param(shards("float32", "mlp", size={"width": 1, "context": 64}), 1, id="a shard without elements"),
    pytest.param(shards("float32", "mlp", size={"width": 1, "context": 64}), 2, id="the other shard, without any"),
])
def test_hsdp_goes_on_from_the_node(tmp_path: Path, job: Training, killed: int) -> None:
    """A rank is killed; all ranks take their shards from the node, into DTensors, and what they compute then is what
    they would have computed."""
    with lab_of(ranks=4, mirrored=((0, 1, 2),)) as fabric, LabRun(fabric, tmp_path, api=True) as run:
        run.start_nodes(job)
        run.wait_for_nodes(run.attach(job))
        outcome = lose_a_rank(run, job, Fault(killed))
        assert outcome.equal, outcome
        assert outcome.step > 3 and {one["step"] for one in run.recovered} <= {outcome.step}
