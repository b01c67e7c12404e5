"""A rank is killed, and the job goes on from the node: what it then computes is what it would have computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lab.jobs import Training
from lab.run import LabRun
from lab.trainer import INSTANTS

from .conftest import lab_of

pytestmark = pytest.mark.root

AFTER = 5  # iterations that the job trains on after the fault
SHAPES: list[dict[str, Any]] = [
    {"optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 0.1, "dropout": 0.2, "noise": True, "schedule": "cosine"},
    {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "schedule": "cosine", "loss_scale": 1024.0,
     "dropout": 0.5},
    {"model": "conv", "optimizer": {"name": "adam", "lr": 1e-3}, "schedule": "step", "accumulate": 2},
]


def results(run: LabRun) -> dict[int, tuple[float, Any]]:
    """iteration -> the loss of the first rank, and every rank's hashes of all its state."""
    ledger = run.ledger
    return {
        line["iteration"]: (line["loss"], [
            {part: one[part] for part in ("tensors", "optimizer")}
            for _, one in sorted(ledger._trainers[0, line["iteration"]].items())
        ])
        for line in run.iterations
    }


def check(seed: int, out: Path) -> None:
    """The job of a seed, undisturbed and killed once: four ranks, one of them mirrored, and a node that serves."""
    with lab_of(ranks=4, mirrored=((0,),)) as fabric, LabRun(fabric, out, api=True, checksums=1) as run:
        disturbed(run, seed)


def disturbed(run: LabRun, seed: int) -> None:
    draw = random.Random(seed)
    job = Training(**{"model": "mlp", **SHAPES[seed % len(SHAPES)]}, ranks=4, softroce={"seed": seed}, seed=seed)
    run.start_nodes(job)
    run.wait_for_nodes(run.attach(job))
    dies = len(run.iterations) + draw.randrange(1, 4)
    last = dies + AFTER
    rank, at = draw.randrange(4), INSTANTS[seed % len(INSTANTS)]
    run.train_and_die(last, rank=rank, iteration=dies, at=at)
    run.wait_for_nodes(dies - 1)
    run.start_trainers_again()
    run.begin(job, attach=True, recover=True)
    (step,) = {one["step"] for one in run.recovered}
    assert len(run.recovered) == 4 and all(one["source"].endswith("memory") for one in run.recovered), run.recovered
    # At most one iteration that was done is repeated: what a rank gave last may not have left it when it dies. (Each is
    # verified: an older one that is would be preferred to one that is not.)
    assert dies - 1 <= step <= dies + 1, (dies, at, run.recovered[0]["text"])
    run.train(last - step)
    again = results(run)
    run.end()
    assert set(run.finish_nodes()) == {0}

    run.begin(job)
    run.train(last)
    undisturbed = results(run)
    run.end()
    assert sorted(undisturbed) == list(range(last))
    assert again == {number: undisturbed[number] for number in range(step, last)}


@pytest.mark.parametrize("seed", range(1))
def test_a_killed_job_goes_on_bit_for_bit(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_a_killed_job_goes_on_bit_for_bit_again(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path)
