"""The shared captures learnt with no manifest: what is written by hand in tests/data/jobs, or a refusal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flowcheck.errors import UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import Job
from flowcheck.learning.captures import learn
from flowcheck.learning.hints import Hints
from flowcheck.offline.replay import ReplayOptions, replay

JOBS = Path(__file__).parents[2] / "data" / "jobs"
HARDWARE = "nccl-hardware/{}.pcapng"
SGD = ("sgd", {"lr": 0.001})
WEIGHT = "1fd37e6261c2b75b30c9d856b07d2eb8e889c17ca33a872e4cd18f7a61e1eae0"
pytestmark = pytest.mark.usefixtures("eal")


def _flows(job: Job) -> list[tuple]:
    return [(f.src, f.dst, f.channel, f.src_addr, f.dst_addr, f.qpns, f.cts_qpns) for f in job.flows]


def _replay(captures: Path, out: Path, **options: object) -> tuple[dict, str]:
    report, failure = replay(ReplayOptions([captures], None, out, **options), Console(quiet=True))  # type: ignore[arg-type]
    return report.to_dict(), failure


def test_training_run_with_no_job_file_and_no_weights(capture, tmp_path: Path) -> None:
    path = capture(HARDWARE.format("iter_40000_p2p_iter10_2"))
    report, failure = _replay(path, tmp_path / "learnt", hints=Hints(optimizer=SGD))
    assert failure == "" and report["ok"] and report["totals"]["iterations_complete"] == 20
    assert report["totals"]["gradients_sha256"] == "636656c3917b472ca7d70d2ea404c39279f558cc31e7bdccb84cafcf08b85ad0"
    written = json.loads((tmp_path / "learnt" / "step-000020" / "manifest.json").read_text())
    assert written["files"]["model.safetensors"]["tensors"]["parameter.0"]["sha256"] == WEIGHT
    assert written["files"]["model.safetensors"]["tensors"]["parameter.0"]["shape"] == [1, 5000]
    assert report["learnt"]["doubts"] and set(report["learnt"]["doubts"]) < set(report["unproven"])
    assert {"flows", "protocol", "nccl_version", "calls", "check"} <= {i["what"] for i in report["learnt"]["items"]}
    assert all(i["confidence"] in ("certain", "probable", "given", "none") for i in report["learnt"]["items"])


def test_one_direction_shows_no_announcements_and_point_to_point_is_left_out(capture, tmp_path: Path) -> None:
    """What rank 0 sends, and no TCP: the job is learnt, the chunk that rank 0 never sends reduced is missing."""
    from scapy.layers.inet6 import IPv6
    from scapy.layers.l2 import Ether
    from scapy.utils import PcapNgReader, wrpcap

    with PcapNgReader(str(capture(HARDWARE.format("iter_40000_p2p_iter10_2")))) as packets:
        sent = [p for p in packets if Ether in p and IPv6 in p and p[IPv6].src == "fe80::e42:a1ff:fe9f:58f8"]
    wrpcap(str(tmp_path / "sent.pcap"), [p for p in sent if p[IPv6].nh == 17], nano=True)
    report, failure = _replay(tmp_path / "sent.pcap", tmp_path / "out", hints=Hints(optimizer=SGD))
    assert failure == "20 of 20 iterations are incomplete, the first is 0"
    buckets = [i["buckets"][0] for i in report["iterations"]]
    assert all(b["missing"] == {"not_mirrored": 5000 - b["placed_elements"]} for b in buckets)
    assert all([(p["start"], p["end"]) for p in b["placed"]] == [(0, 3072)] for b in buckets)
    assert "another communicator" in json.dumps(report["learnt"]["items"])


def test_learnt_manifest_is_the_hand_written_one(capture) -> None:
    found = learn([capture(HARDWARE.format("iter_40000_p2p_iter10_2"))], Hints(optimizer=SGD)).job
    true = load_job(JOBS / "iter_40000_p2p_iter10_2.json")
    assert sorted(_flows(found)) == sorted(_flows(true))
    assert found.communicator == true.communicator

    def sizes(job: Job, part: str) -> list:
        width = {"int8": 1, "int32": 4, "int64": 8, "float32": 4}
        return [(c.op, c.count * width[c.dtype], c.root, c.carries) for c in getattr(job.collectives, part)]

    for part in ("startup", "iteration_0", "rebuild", "steady"):
        assert sizes(found, part) == sizes(true, part)


def test_command_line_writes_a_manifest_that_replays_the_same(capture, tmp_path: Path) -> None:
    path = str(capture(HARDWARE.format("iter_40000_p2p_iter10_2")))
    command = [sys.executable, "-m", "flowcheck"]
    job = str(tmp_path / "job.json")
    said = subprocess.run(
        [*command, "learn", path, "--optimizer", "sgd:lr=0.001", "--out", job], capture_output=True, text=True,
        check=True,
    ).stdout
    assert "certain" in said and "bootstrap" in said and "not known: names" in said
    replayed = [*command, "replay", path, "--job", job, "--out", str(tmp_path / "out")]
    subprocess.run(replayed, check=True, capture_output=True)
    written = json.loads((tmp_path / "out" / "step-000020" / "manifest.json").read_text())
    assert written["files"]["model.safetensors"]["tensors"]["parameter.0"]["sha256"] == WEIGHT
    # A file confirms no more than what was learnt: as a replay without --job says it.
    assert [mark for mark in written["unproven"] if mark.startswith("the job: learnt from the traffic")]
    assert [mark for mark in written["unproven"] if mark.startswith("iterations: counted by sizes alone")]
    refused = subprocess.run(
        [*command, "learn", str(capture(HARDWARE.format("rdma32"))), "--out", str(tmp_path / "none.json")],
        capture_output=True, text=True,
    )
    assert refused.returncode == 2 and "explanations fit" in refused.stderr
    assert not (tmp_path / "none.json").exists()
    both = subprocess.run(
        [*command, "replay", path, "--job", job, "--dtype", "int32", "--out", str(tmp_path / "x")], capture_output=True,
        text=True,
    )
    assert both.returncode == 2 and "nothing is learnt" in both.stderr


def test_lossy_run_is_learnt_and_stays_incomplete(capture, tmp_path: Path) -> None:
    report, failure = _replay(capture(HARDWARE.format("iter_80000")), tmp_path, hints=Hints(optimizer=SGD))
    assert failure and not list(tmp_path.glob("step-*"))
    (parameters,) = report["parameters"]
    assert parameters["sha256"] == "b48a6f6ed2d54caa2b450dc1c9cc472ddbde426e3b3750049d1eae03e2ae9862"
    bucket = report["iterations"][0]["buckets"][0]
    assert (bucket["elements"], bucket["placed_elements"]) == (10000, 6400)


@pytest.mark.parametrize("name", ["rdma32", "allreduce+p2p"])
def test_two_channels(capture, tmp_path: Path, name: str) -> None:
    """20000 bytes in LL are 4999 or 5000 int32: asked which, and learnt when told."""
    path = capture(HARDWARE.format(name))
    with pytest.raises(UserError, match=r"AllReduce 4999 int32.*AllReduce 5000 int32"):
        learn([path], Hints(dtype="int32"))
    hints = Hints(dtype="int32", buckets=(5000,))
    found, true = learn([path], hints).job, load_job(JOBS / f"{name}.json")
    assert {*map(str, _flows(true))} <= {*map(str, _flows(found))}
    assert found.communicator.channels == true.communicator.channels
    report, failure = _replay(path, tmp_path, hints=hints)
    assert failure == ""
    average = "edee90da56fe9ad2449718f97f0979de1a5a59792888c74852c7ffde67a1646b"
    assert report["iterations"][0]["buckets"][0]["sha256"] == average


@pytest.mark.parametrize("hints", [Hints(), Hints(dtype="int32", buckets=(5000,))])
def test_modified_nccl_is_refused(capture, hints: Hints) -> None:
    with pytest.raises(UserError, match="a modified NCCL"):
        learn([capture(HARDWARE.format("allreduce_addstep"))], hints)


def test_two_soft_roce_hosts(capture, tmp_path: Path) -> None:
    """All tags are equal and all messages too: neither ranks nor sizes can be learnt, both are named."""
    path = capture("soft-roce/02_nccl_ring2.pcap")
    with pytest.raises(UserError, match="explanations fit"):
        learn([path], Hints())
    with pytest.raises(UserError, match=r"place 0 of the ring.*place 1 of the ring"):
        learn([path], Hints(dtype="float32", buckets=(131072,)))
    hints = Hints(dtype="float32", buckets=(131072,), ranks={"10.77.0.1": 0, "10.77.0.2": 1})
    found, true = learn([path], hints).job, load_job(JOBS / "02_nccl_ring2.json")
    assert sorted(_flows(found)) == sorted(_flows(true))
    assert found.communicator.buffer_bytes == true.communicator.buffer_bytes
    report, failure = _replay(path, tmp_path / "a", hints=hints)
    given = replay(ReplayOptions([path], JOBS / "02_nccl_ring2.json", tmp_path / "b"), Console(quiet=True))[0].to_dict()
    assert failure == "" and report["totals"]["gradients_sha256"] == given["totals"]["gradients_sha256"]


def test_four_soft_roce_hosts_need_their_ranks(capture) -> None:
    path = capture("soft-roce/03_nccl_ring4.pcap")
    with pytest.raises(UserError, match="explanations fit"):
        learn([path], Hints(dtype="float32", buckets=(131072,)))
    ranks = {f"10.77.0.{i + 1}": i for i in range(4)}
    found = learn([path], Hints(dtype="float32", buckets=(131072,), ranks=ranks)).job
    assert sorted(_flows(found)) == sorted(_flows(load_job(JOBS / "03_nccl_ring4.json")))


def test_capture_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        learn([tmp_path / "none.pcap"], Hints())
    with pytest.raises(UserError, match="no capture"):
        learn([], Hints())


