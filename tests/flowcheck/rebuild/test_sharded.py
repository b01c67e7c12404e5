"""Parameters by AllGather (FSDP, ZeRO, distributed optimizer): a parameter checkpoint, never a full one."""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser.machine import Engine

from flowcheck.checkpoint.directory import load_init, load_parameters, load_step
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Collective, Job, Optimizer, ParameterGroup, dtype_size
from flowcheck.rebuild.plan import plan_job
from lab.synth import generate, sharded_job
from tests.flowcheck.gathered import expected
from tests.flowcheck.replayed import mask_of, replayed
from tests.nccl_versions import VERSIONS

pytestmark = pytest.mark.usefixtures("eal")
REPLAY = settings(
    max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

jobs = st.builds(
    sharded_job,
    ranks=st.integers(2, 6),
    channels=st.integers(1, 3),
    count=st.lists(st.integers(1, 9_000), min_size=1, max_size=3),
    protocol=st.sampled_from(["ll", "ll128", "simple"]),
    version=st.sampled_from(VERSIONS),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    again=st.booleans(),
    after_update=st.booleans(),
    per_parameter=st.booleans(),
    seed=st.integers(0, 1000),
)


@REPLAY
@given(jobs, st.integers(1, 3), st.data())
def test_both_directions_of_one_rank_are_all_parameters(job: Job, iterations: int, data: st.DataObject) -> None:
    made = generate(job, iterations=iterations, ports=[data.draw(st.integers(0, job.communicator.ranks - 1))])
    with tempfile.TemporaryDirectory() as folder:
        report, failure = replayed(job, made, Path(folder))
        assert failure == "" and report["ok"]
        for iteration in report["iterations"]:
            assert iteration["buckets"] == []
            for group in iteration["gathered"]:
                truth = made.gathered[iteration["iteration"], group["index"]]
                assert group["sha256"] == hashlib.sha256(truth.tobytes()).hexdigest()
        call = job.collectives.steady[-1] if job.parameter_calls(1)[0][1].after_update else None
        step = iterations - 1 + (call is not None)
        assert [p.name for p in (Path(folder) / "out").iterdir() if p.is_dir()] == [f"parameters-{step:06d}"]
        assert report["checkpoint"] is None and report["parameter_checkpoint"]["step"] == step
        loaded = load_parameters(Path(report["parameter_checkpoint"]["path"]))
    truth = expected(job, made, iterations - 1)
    dtype = getattr(torch, job.parameter_calls(0)[0][1].dtype)
    assert list(loaded.parameters) == [entry.name for entry in job.model] and not loaded.optimizer_state
    for name, tensor in loaded.parameters.items():
        assert tensor.dtype == dtype and tensor.view(torch.uint8).numpy().tobytes() == truth[name]
    assert loaded.manifest["kind"] == "parameters" and loaded.manifest["step"] == step
    assert loaded.manifest["dtype"] == str(dtype).removeprefix("torch.") and loaded.manifest["absent"] == []


@REPLAY
@given(jobs, st.sampled_from(["in", "out", "both"]), st.sampled_from([0.0, 0.03]), st.integers(0, 10**6))
def test_what_is_missing_is_named(job: Job, direction: str, loss: float, seed: int) -> None:
    """One direction lacks the block of the next rank, or its own; what is lost is lost."""
    made = generate(job, iterations=2, directions=direction, loss=loss, seed=seed)
    groups = [(i["iteration"], g) for i in made.truth["iterations"] for g in i["gathered"]]
    if not any(g["present"] for _, g in groups):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            report, failure = replayed(job, made, Path(folder))
        except UserError:
            return  # what little came has no witness: nothing is reported at all
        directories = [p.name for p in (Path(folder) / "out").iterdir() if p.is_dir()]
    reported = {i["iteration"]: i for i in report["iterations"]}
    for iteration, group in groups:
        if iteration not in reported:
            continue
        found = reported[iteration]["gathered"][group["group"]]
        truth = made.gathered[iteration, group["group"]].tobytes()
        size = dtype_size(group["dtype"])
        placed = mask_of(group["elements"], [[p["start"], p["end"]] for p in found["placed"]])
        present, carried = (mask_of(group["elements"], group[name]) for name in ("present", "carried"))
        for part in found["placed"]:
            assert part["sha256"] == hashlib.sha256(truth[part["start"] * size : part["end"] * size]).hexdigest()
        assert not (placed & ~present).any()
        assert sum(found["missing"].values()) == (~placed).sum()
        if not loss:
            assert (placed == carried).all()
            assert found["missing"].get("not_mirrored", 0) == (~carried).sum()
        if found["missing"]:
            assert not reported[iteration]["verdict"]["complete"]
    complete = [i for i in report["iterations"] if i["verdict"]["complete"]]
    assert len(directories) == bool(complete)
    assert bool(failure) == (len(complete) < len(report["iterations"]))


def test_every_second_step_is_written_and_no_loader_takes_it_for_a_checkpoint(tmp_path: Path) -> None:
    job = sharded_job(ranks=3, count=[1001], after_update=True)
    made = generate(job, iterations=5)
    _, failure = replayed(job, made, tmp_path, every=2)
    assert failure == ""
    names = sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir())
    assert names == ["parameters-000002", "parameters-000004", "parameters-000005"]
    path = tmp_path / "out" / "parameters-000005"
    for read in (load_step, lambda p: load_init(p, job.model)):
        with pytest.raises(UserError, match="gathered parameters alone"):
            read(path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["schema"] == "flowcheck/parameters/1" and "optimizer" not in manifest
    damaged = bytearray((path / "parameters.safetensors").read_bytes())
    damaged[-1] ^= 1
    (path / "parameters.safetensors").write_bytes(damaged)
    with pytest.raises(UserError, match="SHA-256"):
        load_parameters(path)


def test_second_gather_heals_the_first(tmp_path: Path) -> None:
    """Forward and backward gather the same values: a packet lost once is in the other one."""
    job = sharded_job(ranks=3, count=[6000], protocol="ll", again=True)
    made = generate(job, iterations=1)
    packets, psns = made.ports[0], set()
    lost = [p for p in packets if len(p[1]) > 2000 and not (p[1][46:54] in psns or psns.add(p[1][46:54]))]
    made.ports[0] = [p for p in packets if p is not lost[1]]
    report, failure = replayed(job, made, tmp_path)
    assert failure == "" and sum(f["missing"] for f in report["flows"]) == 1


def test_entries_without_layout_are_hashed_and_absent_ones_named(tmp_path: Path) -> None:
    job = sharded_job(ranks=2, count=[300, 200])
    bare = dataclasses.replace(job.collectives.steady[0], layout=[])
    calls = [bare if c.bucket == 0 and c.op == "AllGather" else c for c in job.collectives.steady]
    job.collectives.iteration_0 = job.collectives.steady = calls
    made = generate(job, iterations=1)
    report, failure = replayed(job, made, tmp_path)
    assert failure == "" and all(g["sha256"] for g in report["iterations"][0]["gathered"])
    loaded = load_parameters(tmp_path / "out" / "parameters-000000")
    assert loaded.manifest["absent"] == ["group0.weight", "group0.bias"]
    assert list(loaded.parameters) == ["group1.weight", "group1.bias"]


def _refused(job: Job, match: str) -> UserError:
    with pytest.raises(UserError, match=match) as refused:
        job_from_dict(job.to_dict())
    return refused.value


def test_manifest_refusals() -> None:
    def job() -> Job:
        return sharded_job(ranks=2, count=[301, 200])

    wrong = job()
    wrong.collectives.steady[-1] = Collective("ReduceScatter", 10, carries="gradient")
    error = _refused(wrong, "adds the last contribution in local memory")
    assert "AllGather" in error.remedy
    wrong = job()
    wrong.optimizer = Optimizer("sgd", [ParameterGroup([e.name for e in wrong.model], {"lr": 0.1})])
    assert "parameter checkpoint" in _refused(wrong, "nothing would feed an optimizer").remedy
    wrong = job()
    wrong.collectives.steady[0].layout[0].length -= 1
    _refused(wrong, "differ in count, dtype or layout|not gathered whole")
    wrong = job()
    wrong.collectives.steady[0].after_update = True
    _refused(wrong, "before the iteration's update and some after")
    wrong = job()
    wrong.collectives.startup.append(wrong.collectives.steady[0])
    _refused(wrong, "belongs to iteration_0 or steady")
    wrong = job()
    wrong.collectives.iteration_0 = []
    _refused(wrong, "the first iteration gathers none")
    wrong = job()
    for call in wrong.collectives.steady + wrong.collectives.iteration_0:
        if call.layout:
            call.layout[0].offset += 10
    _refused(wrong, "overlaps another slice")
    wrong = job()
    wrong.collectives.steady[0].tensors = ["group0.bias"]
    _refused(wrong, "not both")
    wrong = job()
    wrong.collectives.steady[-1].after_update = True
    _refused(wrong, "only an AllGather")


def test_engine_refuses_a_region_too_small_for_the_last_block() -> None:
    """A lane's segments are of one rank's block; the region has to hold all of them."""
    plan = plan_job(sharded_job(ranks=4, count=[4001]))
    Engine(plan.engine)
    with pytest.raises(ValueError, match="of a region of"):
        Engine(dataclasses.replace(plan.engine, gradient_bytes=plan.engine.gradient_bytes - 64))
