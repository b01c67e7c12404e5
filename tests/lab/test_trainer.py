"""The programs of the ranks: what they train is the same over softroce and over gloo, and all of them agree."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from flowcheck.errors import EnvironmentProblem, UserError
from lab.jobs import Text, Training, stage_of, whole_model
from lab.network import netns
from lab.network.impair import Impairment
from lab.run import LabRun

STEPS = 8
SETTINGS = {"clip": 0.1, "accumulate": 2, "loss_scale": 1024.0, "overflow_at": (3,), "schedule": "step"}


def lines(out: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.root
@pytest.mark.slow
def test_every_setting_over_softroce_as_over_gloo(fabric, tmp_path: Path) -> None:
    """Two pipeline stages; two ranks add in the same order whoever carries the bytes, so the bits are the same."""
    size = {"width": 32, "layers": 2, "context": 16}
    lab = fabric(ranks=4, mirrored=())
    for backend in ("softroce", "gloo"):
        with LabRun(lab, tmp_path / backend, backend=backend) as run:
            run.begin(Training(size=size, ranks=4, stages=2, **SETTINGS))
            run.train(STEPS - 3)
            run.train(3)
            run.end()
            run.finish_trainers()
    for rank in range(4):
        over, other = lines(tmp_path / "softroce", rank), lines(tmp_path / "gloo", rank)
        assert len(over) == STEPS and [line["tensors"] for line in over] == [line["tensors"] for line in other]
        assert [line["optimizer"] for line in over] == [line["optimizer"] for line in other]
    for stage in (0, 1):
        one, same = lines(tmp_path / "softroce", 2 * stage), lines(tmp_path / "softroce", 2 * stage + 1)
        assert [line["tensors"] for line in one] == [line["tensors"] for line in same]
        assert [line["skipped"] for line in one] == [step == 3 for step in range(STEPS)]
        assert one[2]["tensors"] == one[3]["tensors"] != one[4]["tensors"]  # a skipped step changes nothing
        assert one[3]["scale"] > one[4]["scale"] and any(line["clip"] < 1 for line in one)


@pytest.mark.root
def test_outputs_that_no_lab_has_written_stay(fabric, tmp_path: Path) -> None:
    """--out may be anybody's folder, and the names are not ours alone."""
    lab = fabric(ranks=2, mirrored=())
    kept = {tmp_path / "out" / "rank7.log", tmp_path / "out" / "node1-2" / "data"}
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    with pytest.raises(UserError, match="is there, and no lab has written it"), LabRun(lab, tmp_path / "out"):
        pass
    assert all(path.read_text() == "mine" for path in kept)
    for path in kept:
        path.rename(tmp_path / path.name)
    (tmp_path / "out" / "node1-2").rmdir()
    (tmp_path / "out" / "notes").write_text("mine")
    for _ in range(2):  # its own it removes, and nothing else
        with LabRun(lab, tmp_path / "out"):
            assert (tmp_path / "out" / "rank1.log").exists() and not (tmp_path / "out" / "rank7.log").exists()
        assert (tmp_path / "out" / "notes").read_text() == "mine"
        (tmp_path / "out" / "rank7.log").touch()


@pytest.mark.root
def test_a_rank_that_dies_is_named_with_its_log(fabric, tmp_path: Path) -> None:
    job = Training(model="mlp", ranks=2, softroce={"protocol": "none such"})
    with pytest.raises(EnvironmentProblem, match=r"rank \d ended with status 1(.|\n)*none such"):
        with LabRun(fabric(ranks=2, mirrored=()), tmp_path) as run:
            run.begin(job)


@pytest.mark.root
@pytest.mark.parametrize("part", ["impairer", "switch"])
def test_a_part_of_the_network_that_dies_is_named(fabric, tmp_path: Path, part: str) -> None:
    """Not by waiting until everybody has been silent for long enough."""
    switch, wires = ("ovs", ()) if part == "switch" else ("tc", (Impairment("r0"),))
    lab = fabric(ranks=2, mirrored=(), switch=switch, impairments=wires)
    process = {"impairer": "impair", "switch": "ovs-vswitchd"}[part]
    pids = [pid for pid in netns.processes(lab.config.namespace("leaf"))
            if process in Path(f"/proc/{pid}/cmdline").read_text()]
    with LabRun(lab, tmp_path) as run:
        run.begin(Training(model="mlp", ranks=2))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EnvironmentProblem, match="ended with status -9"):
            run.train(1000)
        assert pids and time.monotonic() - begun < 30


@pytest.mark.parametrize("model", ["gpt", "conv", "mlp"])
def test_stages_are_the_whole_model(model: str) -> None:
    whole = Training(model=model)
    halves = [stage_of(Training(model=model, stages=2), stage) for stage in (0, 1)]
    assert [*halves[0][0].state_dict(), *halves[1][0].state_dict()] == list(whole_model(whole).state_dict())
    inputs, _ = Text(whole).batch(1, 2, 0)
    with torch.no_grad():
        middle = halves[0][0].eval()(inputs)
        assert tuple(middle.shape) == halves[1][1]
        assert torch.equal(halves[1][0].eval()(middle), whole_model(whole).eval()(inputs))
    assert 1e6 < sum(p.numel() for p in whole_model(Training()).parameters()) < 1e7


def test_batches_are_real_text_and_everybodys_own() -> None:
    text = Text(Training(batch=3))
    inputs, targets = text.batch(0, 5, 1)
    assert torch.equal(inputs, text.batch(0, 5, 1)[0]) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, text.batch(1, 5, 1)[0]) and not torch.equal(inputs, text.batch(0, 5, 2)[0])
    assert bytes(inputs[0].tolist()).decode("utf-8", "ignore").strip()


def test_the_text_is_none_that_somebody_edits_while_a_job_runs() -> None:
    """A rank that is started again has to train on what the others have."""
    opened: list[str] = []
    sys.addaudithook(lambda event, what: opened.append(str(what[0])) if event == "open" and listening else None)
    listening = True
    Text(Training())
    listening = False
    root = Path(__file__).resolve().parents[3]
    assert opened and not [name for name in opened if root in Path(name).parents and ".venv" not in name]


@pytest.mark.parametrize("wrong", [
    {"model": "bert"}, {"schedule": "none"}, {"optimizer": {"name": "adam"}}, {"ranks": 3, "stages": 2},
    {"overflow_at": (1,)}, {"size": {"depth": 3}}, {"batch": 0}, {"model": "mlp", "ranks": 16, "stages": 8},
])
def test_a_job_that_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match="lab job"):
        Training(**wrong)


def test_a_job_travels_as_json() -> None:
    job = Training(stages=2, overflow_at=(2,), loss_scale=8.0, softroce={"protocol": "LL"})
    assert Training.from_dict(json.loads(json.dumps(job.to_dict()))) == job
    with pytest.raises(UserError, match="unknown field depth"):
        Training.from_dict({"depth": 1})
