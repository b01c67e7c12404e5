"""The live node on real packets: synth's traffic over a veth pair, records over TCP, versions compared with torch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import Bye, Joined, Wanted
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job
from lab.synth import example_job

pytestmark = pytest.mark.root


def _job(**options: Any) -> Job:
    job = example_job(
        **{"ranks": 2, "count": [700, 300], "optimizer": "adamw", "options": {"lr": 0.01}, "seed": 3, **options}
    )
    job.step_values = ["lr"]
    return job


def _hashes(truth: Any) -> dict[str, dict[str, str]]:
    state = {
        f"{name}.{key}": tensor_sha256(value)
        for name, states in truth.state().items() for key, value in states.items() if key != "step"
    }
    return {"tensors": {n: tensor_sha256(t) for n, t in truth.tensors().items()}, "optimizer": state}


def _begin(node: Any, trainers: list[Any], truth: Any, at: int) -> None:
    """Everybody joins; the state before iteration `at` is the truth's."""
    for trainer in trainers:
        trainer.flows()
    body = trainers[0].job.to_dict() | {"flows": []}
    trainers[0].job = job_from_dict(body)
    trainers[0].manifest()
    trainers[0].expect(Wanted, what=["state"])
    assert truth.step == at
    trainers[0].state(at, truth.tensors(), truth.state())
    trainers[0].expect(Joined, iteration=at)


@pytest.mark.parametrize("options", [
    {"protocol": "ll"},
    {"protocol": "ll128", "ranks": 3, "channels": 2, "count": [9000, 4001]},
    {"protocol": "simple", "ranks": 3, "count": [50_000, 301], "mtu": 1024},
    {"protocol": "ll", "algorithm": "tree", "ranks": 4},
])
def test_versions_equal_the_trainer(start_node, attach, truth, lan, tmp_path: Path, options) -> None:
    """Joined in mid-stream at iteration 2, with a state; a schedule in the records; verified by checksums."""
    job = _job(**options)
    node = start_node()
    run = truth(job)
    for t in range(2):
        run.advance(run.traffic(t))
    trainers = [attach(node, job, rank) for rank in range(job.communicator.ranks)]
    _begin(node, trainers, run, 2)
    expected = {}
    for t in range(2, 8):
        lr = 0.01 / (t + 1)
        made = run.traffic(t)
        lan.send([frame for _, frame in made.packets])
        run.advance(made, lr=lr)
        sums = run.sums() if t % 2 else {}
        for trainer in trainers:
            trainer.record(t, groups=[{"lr": lr}], checksums=sums)
        expected[t] = _hashes(run)
        line = node.wait("iteration", iteration=t)
        assert line["published"] and line["missing"] == {} and line["lag"] == 0, line
        assert line["status"] == ("verified" if sums else f"follows {t}" if t > 2 else "unverified")
    trainers[0].link.send(Bye())
    node.wait("end", serves=7)
    assert node.end() == 0
    found = [json.loads(text) for text in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in found] == list(range(2, 8))
    for line in found:
        assert {key: line[key] for key in ("tensors", "optimizer")} == expected[line["iteration"]]
