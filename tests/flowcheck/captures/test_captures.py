"""The captures of real NCCL come out exactly as their README says."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowcheck.errors import UserError

HARDWARE = "nccl-hardware/{}.pcapng"
AVERAGE = "edee90da56fe9ad2449718f97f0979de1a5a59792888c74852c7ffde67a1646b"


def _bucket(report: dict, iteration: int = 0) -> dict:
    return report["iterations"][iteration]["buckets"][0]


def test_training_run_on_connectx(capture, replayed) -> None:
    report, failure, out = replayed(capture(HARDWARE.format("iter_40000_p2p_iter10_2")), "iter_40000_p2p_iter10_2")
    assert failure == ""
    assert report["ok"] and report["totals"]["iterations_complete"] == 20
    assert report["totals"]["placed_elements"] == 100_000
    assert report["totals"]["gradients_sha256"] == "636656c3917b472ca7d70d2ea404c39279f558cc31e7bdccb84cafcf08b85ad0"
    assert [_bucket(report, i)["sha256"] for i in (0, 1, 2, 19)] == [
        "85fd42e8db0711aaeb53572367d3de4488d4da29c8dd92bb4740519c50299680",
        "b107eae2f1cb7543b37dcb8b14758191f5195199f0a46c40dfd35c4c9569def8",
        "75e4ac541d481c548632c63f71622d19fe3246f5c63500d6fb4232bd226fedbb",
        "623d231ca125cfe42f5cc376b751bfd69b7770d58a32212d332ff8b96aefe59d",
    ]
    (parameters,) = report["parameters"]
    assert parameters["sha256"] == "0410ab2762e14def2842f46f0fb92d4fe91a1bb0e6015dc9e6b0c12d8b2c34ad"
    manifest = json.loads((out / "step-000020" / "manifest.json").read_text())
    weight = manifest["files"]["model.safetensors"]["tensors"]["weight"]
    assert weight["sha256"] == "1fd37e6261c2b75b30c9d856b07d2eb8e889c17ca33a872e4cd18f7a61e1eae0"


def test_version_that_the_clear_to_send_form_refutes(capture, replayed, tmp_path: Path) -> None:
    """One channel, one loop: 2.20 lays these calls out as 2.19 does, but announces in 64 bytes, not 32."""
    job = json.loads((Path(__file__).parents[2] / "data" / "jobs" / "iter_40000_p2p_iter10_2.json").read_text())
    job["communicator"]["nccl_version"] = "2.20.5"
    (tmp_path / "job.json").write_text(json.dumps(job))
    report, failure, out = replayed(capture(HARDWARE.format("iter_40000_p2p_iter10_2")), tmp_path / "job.json")
    assert "of 32 bytes, as of NCCL 2.12-2.19; the manifest says 2.20.5" in failure
    assert report["totals"]["iterations_complete"] == 0 and not list(out.glob("step-*"))


def test_given_weights_must_be_the_trainers(capture, replayed, tmp_path: Path) -> None:
    """--init with the job's own weights changes nothing; one other bit and it is refused."""
    path = capture(HARDWARE.format("iter_40000_p2p_iter10_2"))
    torch.manual_seed(2024)
    weight = torch.nn.Linear(5000, 1, bias=False).weight.detach()
    save_file({"weight": weight}, tmp_path / "right.safetensors")
    _, failure, out = replayed(path, "iter_40000_p2p_iter10_2", init=tmp_path / "right.safetensors")
    assert failure == ""
    manifest = json.loads((out / "step-000020" / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"]["tensors"]["weight"]["sha256"].startswith("1fd37e6261c2b75b")
    weight.view(torch.int32)[0, 4999] ^= 1
    save_file({"weight": weight}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="differs from the parameters that rank 0 broadcast"):
        replayed(path, "iter_40000_p2p_iter10_2", init=tmp_path / "other.safetensors")


def test_two_channels_and_writes_cut_by_the_nic(capture, replayed) -> None:
    report, failure, out = replayed(capture(HARDWARE.format("rdma32")), "rdma32")
    assert failure == ""
    assert _bucket(report)["sha256"] == AVERAGE
    assert not list(out.glob("step-*"))


def test_one_direction_is_the_right_incomplete_set(capture, replayed, tmp_path: Path) -> None:
    job = json.loads((Path(__file__).parents[2] / "data" / "jobs" / "rdma32.json").read_text())
    job["flows"] = [flow for flow in job["flows"] if flow["src"] == 0]
    (tmp_path / "outbound.json").write_text(json.dumps(job))
    report, failure, _ = replayed(capture(HARDWARE.format("rdma32")), tmp_path / "outbound.json")
    assert failure
    bucket = _bucket(report)
    assert bucket["placed_elements"] == 4096 and bucket["missing"] == {"not_mirrored": 904}


def test_point_to_point_is_not_a_gradient(capture, replayed) -> None:
    report, failure, _ = replayed(capture(HARDWARE.format("allreduce+p2p")), "allreduce+p2p")
    assert failure == ""
    assert _bucket(report)["sha256"] == AVERAGE
    assert report["drops"]["other_roce"] == 39


def test_lossy_capture_is_incomplete_and_right_where_placed(capture, replayed) -> None:
    report, failure, out = replayed(capture(HARDWARE.format("iter_80000")), "iter_80000")
    assert failure and not report["ok"]
    assert not list(out.glob("step-*"))
    assert report["parameters"][0]["sha256"] == "b48a6f6ed2d54caa2b450dc1c9cc472ddbde426e3b3750049d1eae03e2ae9862"
    bucket = _bucket(report)
    assert bucket["placed_elements"] == 6400 and bucket["sha256"] is None
    assert bucket["missing"] == {"lost": 3600}
    assert [(p["start"], p["end"], p["sha256"]) for p in bucket["placed"]] == [
        (0, 3584, "2f94c4e83041c8e65dabf5d86c5da49e475021522a4f915638dd4f0d9c2eb7d1"),
        (5120, 7808, "df88e5010d08d198d1aa6c8eb7b5b851c21433a8817aafd12a0dc5fb4527065e"),
        (9728, 9856, "a5ebe68e3e75695a076f0429dfcaada66f341ce75d6282df79575ff2ff2cd890"),
    ]


@pytest.mark.parametrize("steady", [False, True])
def test_modified_nccl_is_refused(capture, replayed, tmp_path: Path, steady: bool) -> None:
    """Also where the extra message could pass for the next iteration's first."""
    job = json.loads((Path(__file__).parents[2] / "data" / "jobs" / "allreduce_addstep.json").read_text())
    if steady:
        job["collectives"]["steady"] = job["collectives"]["iteration_0"]
    (tmp_path / "job.json").write_text(json.dumps(job))
    report, failure, out = replayed(capture(HARDWARE.format("allreduce_addstep")), tmp_path / "job.json")
    assert "one message too many" in failure
    assert not list(out.glob("step-*"))
    placed = [_bucket(report, i) for i in range(len(report["iterations"]))]
    assert placed[0]["sha256"] in (AVERAGE, None)  # what is placed is right
    assert all(b["placed_elements"] == 0 for b in placed[1:])


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest):
    path = request.getfixturevalue("capture")("soft-roce/expected.py")
    spec = importlib.util.spec_from_file_location("soft_roce_expected", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOFT = {  # capture: (ranks, count, seed, iterations)
    "02_nccl_ring2": (2, 131072, 102, 2),
    "03_nccl_ring4": (4, 131072, 103, 1),
    "05_nccl_ring4_ar_qps4": (4, 100003, 105, 1),
    "07_nccl_ring4_mtu1024": (4, 100003, 107, 1),
    "20_nccl_ring4_loss1": (4, 100003, 120, 1),
    "24_nccl_ring4_reorder_dup": (4, 65536, 124, 1),
}


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("mirrored", ["all", 0, 1])
def test_soft_roce(capture, replayed, expected, tmp_path: Path, name: str, mirrored: str | int) -> None:
    """All flows, or both directions of one rank: complete, and equal to the recomputed result."""
    ranks, count, seed, iterations = SOFT[name]
    job = json.loads((Path(__file__).parents[2] / "data" / "jobs" / f"{name}.json").read_text())
    if mirrored != "all":
        job["flows"] = [flow for flow in job["flows"] if mirrored in (flow["src"], flow["dst"])]
    (tmp_path / "job.json").write_text(json.dumps(job))
    report, failure, _ = replayed(capture(f"soft-roce/{name}.pcap"), tmp_path / "job.json")
    assert failure == ""
    for iteration in range(iterations):
        out = expected.Ring(ranks, count, 262144, seed + iteration, 1).out
        assert _bucket(report, iteration)["sha256"] == hashlib.sha256(out.tobytes()).hexdigest()


@pytest.mark.parametrize("name", ["02_nccl_ring2", "03_nccl_ring4", "07_nccl_ring4_mtu1024"])
def test_one_direction_of_soft_roce_places_the_recomputed_ranges(
    capture, replayed, expected, tmp_path: Path, name: str
) -> None:
    ranks, count, seed, _ = SOFT[name]
    job = json.loads((Path(__file__).parents[2] / "data" / "jobs" / f"{name}.json").read_text())
    job["flows"] = [flow for flow in job["flows"] if flow["src"] == 1]
    (tmp_path / "job.json").write_text(json.dumps(job))
    report, failure, _ = replayed(capture(f"soft-roce/{name}.pcap"), tmp_path / "job.json")
    assert failure
    out = expected.Ring(ranks, count, 262144, seed, 1).out
    bucket = _bucket(report)
    assert 0 < bucket["placed_elements"] < count
    assert bucket["missing"] == {"not_mirrored": count - bucket["placed_elements"]}
    for part in bucket["placed"]:
        assert part["sha256"] == hashlib.sha256(out[part["start"] : part["end"]].tobytes()).hexdigest()
