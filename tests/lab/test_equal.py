"""The replica is the trainers' state after every iteration, bit for bit: over protocols, rings and trees, channels and
switches; and with everything that a training step may do besides stepping."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.run import LabRun

from .conftest import lab_of

pytestmark = pytest.mark.root

PROTOCOLS = ("LL", "LL128", "SIMPLE")
SHAPES = (("ring", 2), ("ring", 3), ("ring", 4), ("tree", 4))
CHANNELS = (1, 2)
SWITCHES = ("tc", "ovs")
VERSIONS = 6

# Every pair of values of any two factors is in at least one row.
PAIRWISE = {
    "tc": [("LL", "ring", 2, 1), ("LL", "ring", 4, 2), ("LL128", "ring", 3, 1), ("LL128", "tree", 4, 2),
           ("SIMPLE", "ring", 2, 2), ("SIMPLE", "ring", 3, 2)],
    "ovs": [("LL", "ring", 3, 2), ("LL", "tree", 4, 1), ("LL128", "ring", 2, 2), ("LL128", "ring", 4, 1),
            ("SIMPLE", "ring", 4, 1), ("SIMPLE", "tree", 4, 1)],
}


def job_of(protocol: str, algorithm: str, ranks: int, channels: int, **settings: Any) -> Training:
    softroce = {"protocol": protocol, "algorithm": algorithm, "channels": channels, "seed": 1}
    return Training(model="mlp", ranks=ranks, softroce=softroce, **settings)


def follow(run: LabRun, job: Training, versions: int = VERSIONS) -> int:
    """Train a job with nodes; every version from the first on must be equal. Returns the first one's iteration."""
    run.start_nodes(job)
    first = run.attach(job)
    run.train(versions)
    run.end()
    run.wait_for_nodes(first + versions - 1)
    assert set(run.finish_nodes()) == {0}
    summary = run.ledger.summary()
    assert summary.all_equal and summary.published >= versions * job.stages, (
        summary, [event for _, event in run.events][-6:])
    return first


def said(run: LabRun, event: str) -> list[dict[str, Any]]:
    return [one for _, one in run.events if one["event"] == event]


@pytest.fixture(scope="module", params=SWITCHES)
def lab_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LabRun]]:
    """Four ranks that run one job after the other, on either switch; every mirrored port in both directions."""
    switch: str = request.param
    with lab_of(ranks=4, switch=switch, mirrored=((0, 1),), algorithm="any") as fabric:
        with LabRun(fabric, tmp_path_factory.mktemp(switch)) as run:
            yield switch, run


def test_pairs_are_all_there() -> None:
    rows = [(p, (a, n), c, s) for s, some in PAIRWISE.items() for p, a, n, c in some]
    for one, other in itertools.combinations(range(4), 2):
        factors = (PROTOCOLS, SHAPES, CHANNELS, SWITCHES)
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(factors[one], factors[other]))


@pytest.mark.parametrize("index", range(6))
def test_equal_pairwise(lab_run: tuple[str, LabRun], index: int) -> None:
    switch, run = lab_run
    follow(run, job_of(*PAIRWISE[switch][index]))
    if switch == "tc" and PAIRWISE[switch][index][2] == 2:  # rx of one port, tx of the other
        assert sum(line["duplicates"] for line in said(run, "iteration")) > 100


@pytest.mark.slow
@pytest.mark.parametrize("case", list(itertools.product(PROTOCOLS, SHAPES, CHANNELS)), ids=str)
def test_equal_all(lab_run: tuple[str, LabRun], case: tuple[str, tuple[str, int], int]) -> None:
    _, run = lab_run
    protocol, (algorithm, ranks), channels = case
    follow(run, job_of(protocol, algorithm, ranks, channels), 10)


STEPS: dict[str, dict[str, Any]] = {
    "clipping": {"clip": 0.1},
    "accumulation": {"accumulate": 3},
    "loss scale": {"loss_scale": 1024.0, "overflow_at": tuple(range(1, 60, 4))},
    "schedule": {"schedule": "cosine", "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "buffers": {"model": "conv", "optimizer": {"name": "adam", "lr": 1e-3}},
    "all at once": {"model": "conv", "clip": 0.1, "accumulate": 2, "loss_scale": 512.0, "schedule": "step",
                    "overflow_at": tuple(range(1, 60, 5))},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabRun]:
    """Two ranks on a bridge, both mirrored, that run one job after the other."""
    with lab_of(ranks=2, mirrored=((0, 1),)) as fabric, LabRun(fabric, tmp_path_factory.mktemp("pair")) as run:
        yield run


# Each alone takes its time; together, and the schedule with momentum, they are in every run.
ALONE = [pytest.param(name, marks=pytest.mark.slow) for name in STEPS if name not in ("schedule", "all at once")]


@pytest.mark.parametrize("name", ["schedule", "all at once", *ALONE])
def test_what_a_step_may_do(pair: LabRun, name: str) -> None:
    settings = {"model": "mlp", **STEPS[name]}
    first = follow(pair, Training(ranks=2, softroce={"protocol": "LL128", "seed": 1}, **settings), 8)
    lines = [line for line in pair.iterations if line["iteration"] >= first]
    assert any(line["skipped"] for line in lines) == ("loss_scale" in settings)
    assert any((line["clip"] or 1) < 1 for line in lines) == ("clip" in settings)
    # a checksum of the trainer's own parameters has been compared on the way, and agreed
    last = said(pair, "iteration")[-1]
    assert last["status"].split()[0] in ("verified", "follows")
    published = [line for line in said(pair, "iteration") if line["published"] and line["iteration"] >= first]
    assert all(line["sampled"] for line in published)  # every record has a sample, and all have agreed
    if not settings.keys() & {"clip", "loss_scale", "schedule"}:  # every record says the same
        assert last["updates"] == "early"


PIPELINE = {"model": "gpt", "size": {"width": 32, "layers": 2, "context": 16}, "ranks": 4, "stages": 2, "clip": 1.0}
GROUPS = ((0, 1), (2, 3))


@pytest.mark.parametrize("nodes", [2, 1], ids=["a node per stage", "one node for both"])
def test_pipeline_stages(tmp_path: Path, nodes: int) -> None:
    """The paper's DP-MP: activations cross the same ports between the allreduces of two groups."""
    config: dict[str, Any] = {"mirrored": GROUPS, "groups": GROUPS} if nodes == 2 else {"mirrored": ((0, 1, 2, 3),)}
    with lab_of(ranks=4, **config) as fabric, LabRun(fabric, tmp_path) as run:
        follow(run, Training(softroce={"protocol": "SIMPLE", "seed": 1}, **PIPELINE))
        assert {name for name, _ in run.events} == {f"node {node}" for node in range(nodes)}
        assert {line["name"] for line in said(run, "iteration")} == {"stage0", "stage1"}


def test_a_step_record_that_does_not_come(tmp_path: Path) -> None:
    """Both ranks' control cables are cut while they train on: the node waits, says so, and applies nothing."""
    with lab_of(ranks=2, mirrored=((0,),)) as fabric, LabRun(fabric, tmp_path) as run:
        job = Training(model="mlp", ranks=2, softroce={"seed": 1})
        run.start_nodes(job)
        run.attach(job)
        run.train(2)
        withheld = run.iterations[-1]["iteration"] + 1
        run.wait_for_nodes(withheld - 1)  # so the records until then have come
        for rank in (0, 1):
            fabric.control_link(rank, False)
        run.train(2)
        waits = run.wait_for_event("waiting", iteration=withheld)
        assert "record" in waits["why"]
        versions = [line["iteration"] for line in said(run, "iteration") if line["published"]]
        assert max(versions) < withheld and run.ledger.row(0, withheld).verdict == "waiting"
        for rank in (0, 1):
            fabric.control_link(rank, True)
        run.wait_for_nodes(withheld)
        run.end()
        run.finish_nodes()
        assert run.ledger.row(0, withheld).verdict == "equal" and run.ledger.summary().all_equal
