"""Jobs that are kept as a log, in the lab: a rank is killed, and the job's own optimizer makes the steps since the base
again. All state of all ranks is then that of a run that nobody disturbed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from lab.fault import results
from lab.jobs import Training
from lab.network.fabric import Fabric
from lab.optimizers import OPTIMIZERS
from lab.run import LabRun
from lab.shape import FabricConfig
from lab.trainer import INSTANTS

AFTER = 6  # iterations that are compared
SEEDS = 20
SETTINGS: list[dict[str, Any]] = [
    {"clip": 0.5, "accumulate": 2, "schedule": "cosine", "dropout": 0.1},
    {"loss_scale": 65536.0, "overflow_at": (20, 31), "schedule": "step", "softroce": {"protocol": "LL"}},
    {"model": "conv", "size": {"width": 4, "layers": 1}, "schedule": "warmup", "softroce": {"protocol": "SIMPLE"}},
]


def lost_and_redone(out: Path, job: Training, seed: int) -> None:
    chance = random.Random(seed)
    mirrored = ((0,),) if job.ranks == 2 else ((0, 1, 2),)  # of four: the rings of both pieces
    config = FabricConfig(name=f"fclog{seed % 100}", ranks=job.ranks, mirrored=mirrored)
    with Fabric(config) as fabric, LabRun(fabric, out, checksums=5, api=True) as run:
        run.start_nodes(job)
        run.attach(job, most=120)
        run.train(chance.randrange(3, 40))
        died = run.iterations[-1]["iteration"] + 2
        run.train_and_die(died + AFTER, rank=chance.randrange(job.ranks), iteration=died, at=chance.choice(INSTANTS))
        run.start_trainers_again()
        run.begin(job, attach=True, recover=True)
        step = run.recovered[0]["step"]
        assert died - 2 <= step <= died + 1 and "log" in run.recovered[0]["source"]
        run.train(AFTER)
        again = results(run, job)
        run.end()
        run.finish_nodes()
        run.begin(job)
        run.train(step + AFTER)
        run.end()
        undisturbed = results(run, job)
        assert [number for number in range(step, step + AFTER) if again.get(number) != undisturbed[number]] == []
        run.finish_trainers()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), list(zip(itertools.cycle(OPTIMIZERS), range(max(SEEDS, len(OPTIMIZERS))))))
def test_a_job_of_any_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, name: str, seed: int) -> None:
    lr = {"adadelta": 1.0, "rprop": 1e-3}.get(name, 0.01)
    more = {"model": "mlp", "softroce": {"protocol": "LL128"}} | SETTINGS[seed % len(SETTINGS)]
    lost_and_redone(tmp_path, Training(ranks=2, optimizer={"name": name, "lr": lr}, kind="log", **more), seed)


def test_a_job_of_muon_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    job = Training(model="mlp", ranks=2, optimizer={"name": "muon", "lr": 0.01}, kind="log",
                   softroce={"protocol": "LL128"}, **SETTINGS[0])
    lost_and_redone(tmp_path, job, seed=77)
