"""What docs/understand/security.md says, through the whole node: a packet with another byte in place of one that never
comes makes a version with wrong bytes, which nothing on the wire shows; the next checksum of the trainer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.checksum import checksums
from flowcheck.control.protocol import Joined, Wanted

from ..altered import altered, spots
from .test_service import _iteration, _job, _join, _run

pytestmark = pytest.mark.root


def sums(run: Any) -> dict[str, str]:
    return {name: f"{value:016x}" for name, value in checksums(run.tensors()).items()}


def shas(run: Any) -> dict[str, str]:
    return {name: tensor_sha256(tensor) for name, tensor in run.tensors().items()}


def test_the_next_checksum_catches_a_forged_byte(start_node, attach, truth, lan, tmp_path: Path) -> None:
    """With a checksum every third iteration: two versions are wrong, say that they are unverified, are withdrawn."""
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    t = _iteration(run, lan, trainer)
    assert node.wait("iteration", iteration=t)["published"]

    t = run.step
    made = run.traffic(t)
    found = [spot for flow in job.flows for spot in spots(made, "ll", flow.qpns[0], t)]
    assert found, "nothing to forge: this test would show nothing"
    forged, _ = altered(made.packets, found[0], packet=0, byte=2, flip=0x40)
    assert len(forged) == len(made.packets) and sum(a != b for a, b in zip(forged, made.packets, strict=True)) == 1
    lan.send([frame for _, frame in forged])
    run.advance(made)
    trainer.record(t, groups=[{}])
    wrong = [t, t + 1]
    for number in wrong:
        line = node.wait("iteration", iteration=number)
        assert line["published"] and line["status"] == "unverified" and line["missing"] == {}, line
        said = json.loads((tmp_path / "hashes.jsonl").read_text().splitlines()[-1])
        assert said["iteration"] == number and said["tensors"] != shas(run), "the forger did not reach anything"
        if number == wrong[0]:
            _iteration(run, lan, trainer)

    t = run.step
    made = run.traffic(t)
    lan.send([frame for _, frame in made.packets])
    run.advance(made)
    trainer.record(t, groups=[{}], checksums=sums(run))
    line = node.wait("iteration", iteration=t)
    assert (line["published"], line["failed"], line["status"]) == (False, ["checksum"], "diverged")
    assert "differs from the trainer's" in node.said("lost")[-1]["why"] and node.said("lost")[-1]["serves"] == -1
    assert not list(tmp_path.glob("*.replica")), "what is wrong is served no more"

    trainer.expect(Wanted, what=["state"])
    trainer.state(run.step, run.tensors(), run.state())
    trainer.expect(Joined, iteration=run.step)
    t = run.step
    made = run.traffic(t)
    lan.send([frame for _, frame in made.packets])
    run.advance(made)
    trainer.record(t, groups=[{}], checksums=sums(run))
    line = node.wait("iteration", iteration=t)
    assert line["published"] and line["status"] == "verified"
    assert json.loads((tmp_path / "hashes.jsonl").read_text().splitlines()[-1])["tensors"] == shas(run)
