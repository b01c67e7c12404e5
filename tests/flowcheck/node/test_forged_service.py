"""What docs/understand/security.md says, through the whole node: a packet with another byte in place of one that never
comes makes a version with wrong bytes, which nothing on the wire shows; the next checksum of the trainer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowcheck.checkpoint.directory import tensor_sha256
from flowcheck.control.protocol import Joined, Refused, Wanted
from updater.reader import Reader

from ..altered import altered, spots
from .test_service import _iteration, _job, _join, _run

pytestmark = pytest.mark.root


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
    trainer.record(t, groups=[{}], checksums=run.sums())
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
    trainer.record(t, groups=[{}], checksums=run.sums())
    line = node.wait("iteration", iteration=t)
    assert line["published"] and line["status"] == "verified"
    assert json.loads((tmp_path / "hashes.jsonl").read_text().splitlines()[-1])["tensors"] == shas(run)


def forge(run: Any, lan: Any, trainer: Any, job: Any) -> int:
    """One iteration, of which a packet has another byte, and its ICRC put right. Its number."""
    t = run.step
    made = run.traffic(t)
    spot = next(spot for flow in job.flows for spot in spots(made, "ll", flow.qpns[0], t))
    forged, _ = altered(made.packets, spot, packet=0, byte=2, flip=0x40)
    lan.send([frame for _, frame in forged])
    run.advance(made)
    trainer.record(t, groups=[{}])
    return t


def compared(node: Any, run: Any, lan: Any, trainer: Any) -> dict[str, Any]:
    """One iteration with checksums, and what the node says of it."""
    t = run.step
    made = run.traffic(t)
    lan.send([frame for _, frame in made.packets])
    run.advance(made)
    trainer.record(t, groups=[{}], checksums=run.sums())
    line: dict[str, Any] = node.wait("iteration", iteration=t)
    return line


def offered(tmp_path: Path) -> dict[int, str]:
    """Step and status of what whoever reads the replica finds."""
    found = {}
    for path in tmp_path.glob("*.replica"):
        reader = Reader(path)
        found |= reader.statuses
        reader.close()
    return found


def test_a_good_checksum_and_then_a_forged_packet(start_node, attach, truth, lan, tmp_path: Path) -> None:
    """No version after it is verified, all of them are withdrawn at the next checksum, and the one before it stays. The
    second time the job is refused."""
    job = _job()
    node, run = start_node(), _run(truth, job, 2)
    trainer = attach(node, job)
    _join(trainer, run)
    good = compared(node, run, lan, trainer)
    assert good["status"] == "verified" and (step := run.step) == good["iteration"] + 1
    wrong = forge(run, lan, trainer, job)
    line = node.wait("iteration", iteration=wrong)
    assert line["published"] and line["status"] == f"follows {step}" and line["missing"] == {}, line
    said = json.loads((tmp_path / "hashes.jsonl").read_text().splitlines()[-1])
    assert said["iteration"] == wrong and said["tensors"] != shas(run), "the forger did not reach anything"
    assert offered(tmp_path)[step] == "verified" and offered(tmp_path)[wrong + 1] == f"follows {step}"
    line = compared(node, run, lan, trainer)
    assert (line["published"], line["failed"], line["status"]) == (False, ["checksum"], "diverged")
    [diverged] = node.said("diverged")
    assert (diverged["step"], diverged["verified"], diverged["times"]) == (run.step, step, 1)
    left = offered(tmp_path)
    assert max(left) == step and left[step] == "verified" and node.said("lost")[-1]["serves"] == good["iteration"]

    trainer.expect(Wanted, what=["state"])
    trainer.state(run.step, run.tensors(), run.state())
    trainer.expect(Joined, iteration=run.step)
    begins = run.step
    for _ in range(2):
        wrong = forge(run, lan, trainer, job)
        line = node.wait("iteration", iteration=wrong)
        assert line["published"] and line["status"] == "unverified", "a new state follows nothing"
    assert compared(node, run, lan, trainer)["status"] == "diverged"
    refused = node.wait("job_refused")
    assert "differs from the trainer's" in refused["why"] and refused["serves"] == -1
    trainer.expect(Refused, final=True)
    assert not [one for one in offered(tmp_path) if one > begins], "nothing that is wrong can be read"
    again = attach(node, job)
    again.expect(Refused, final=True)
