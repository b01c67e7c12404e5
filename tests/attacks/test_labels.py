"""Manifests that agree with every size on the wire and are wrong all the same: exchanged ranks, exchanged
channels, calls of other kinds. Found by a person who tried; none may give a silently wrong checkpoint."""

import copy
import json
from pathlib import Path

import pytest
from rich.console import Console

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.offline.replay import ReplayOptions, replay
from lab.synth import example_job, generate
from lab.synth.contents import save_parameters
from lab.synth.writer import write_capture

pytestmark = pytest.mark.usefixtures("eal")


def run(
    tmp_path: Path, job: Job, manifest: dict, *, iterations: int = 1, **options: object
) -> tuple[dict, str, list[str]]:
    made = generate(job, iterations=iterations, ports=[0])
    made.write(tmp_path / "all.pcap")
    save_parameters(job, made.parameters, tmp_path / "init.safetensors")
    (tmp_path / "job.json").write_text(json.dumps(manifest))
    options = {"init": tmp_path / "init.safetensors", **options}
    report, failure = replay(
        ReplayOptions([tmp_path / "all.pcap"], tmp_path / "job.json", tmp_path / "out", **options),  # type: ignore[arg-type]
        Console(quiet=True),
    )
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    return report.to_dict(), failure, left


def turned(job: Job, by: int) -> dict:
    """The same connections under rank numbers turned by `by` places round the ring."""
    manifest = copy.deepcopy(job.to_dict())
    for flow in manifest["flows"]:
        flow["src"] = (flow["src"] + by) % job.communicator.ranks
        flow["dst"] = (flow["dst"] + by) % job.communicator.ranks
    return manifest


@pytest.mark.parametrize("ranks,protocol,by", [(2, "simple", 1), (2, "ll", 1), (4, "simple", 1), (4, "simple", 3)])
def test_exchanged_ranks_are_refused(tmp_path: Path, ranks: int, protocol: str, by: int) -> None:
    job = example_job(ranks=ranks, count=4096 * ranks, protocol=protocol, startup=False)
    report, failure, left = run(tmp_path, job, turned(job, by))
    assert "calls its sender rank" in failure and not report["ok"]
    assert left == ["report.json"]


def test_a_split_communicator_says_its_parent_ranks(tmp_path: Path) -> None:
    """Tags are in the numbering of the communicator that was split: right with parent_ranks, refused without."""
    job = example_job(ranks=2, count=8192, protocol="simple", startup=False)
    manifest = job.to_dict()
    manifest["communicator"]["parent_ranks"] = [1, 0]
    assert "calls its sender rank" in run(tmp_path, job, manifest)[1]
    manifest["communicator"]["parent_ranks"] = [0, 1]
    assert run(tmp_path, job, manifest)[1] == ""


def test_without_tags_the_ranks_rest_on_trust(capture, replayed) -> None:
    report, failure, _ = replayed(capture("soft-roce/02_nccl_ring2.pcap"), "02_nccl_ring2")
    assert failure == "" and any("ranks of the flows" in mark for mark in report["unproven"])
    report, _, _ = replayed(capture("nccl-hardware/iter_40000_p2p_iter10_2.pcapng"), "iter_40000_p2p_iter10_2")
    doubts = [mark for mark in report["unproven"] if "rounding mode" not in mark]  # of the optimizer, not of the ranks
    assert doubts == []


def test_a_tree_without_tags_rests_on_trust(tmp_path: Path, replayed) -> None:
    """Edges up and down carry the same sizes, so a tree needs a receiver that names its sender."""
    job = example_job(ranks=4, count=[3000, 500], algorithm="tree", protocol="ll")
    control = {qpn for flow in job.flows for qpn in flow.cts_qpns}
    frames = generate(job, iterations=2).packets
    silent = [(time, frame) for time, frame in frames if int.from_bytes(frame[47:50], "big") not in control]
    assert 0 < len(silent) < len(frames)
    (tmp_path / "job.json").write_text(job.to_json())
    mark = "ranks of the flows: as the manifest says, nothing in the captures confirms them"
    for name, packets, trust in (("tagged", frames, []), ("silent", silent, [mark])):
        write_capture(tmp_path / f"{name}.pcap", packets)
        report, failure, out = replayed(tmp_path / f"{name}.pcap", tmp_path / "job.json")
        assert failure == "" and [entry for entry in report["unproven"] if "ranks" in entry] == trust
        checkpoint = json.loads((out / "step-000002" / "manifest.json").read_text())
        assert checkpoint["unproven"] == report["unproven"]


def test_channels_that_look_alike_rest_on_trust(tmp_path: Path) -> None:
    job = example_job(ranks=2, channels=2, count=1048576, protocol="simple", startup=False)
    report, failure, _ = run(tmp_path, job, job.to_dict())
    assert failure == "" and any(mark.startswith("channels 0 and 1") for mark in report["unproven"])
    checkpoint = json.loads((tmp_path / "out" / "step-000001" / "manifest.json").read_text())
    assert checkpoint["unproven"] == report["unproven"]


@pytest.mark.parametrize("every", [0, 1])
def test_a_manifest_refuted_at_once_offers_nothing_from_before(tmp_path: Path, every: int) -> None:
    """Iteration 0 agreed, iteration 1 does not: iteration 0 may have agreed by chance."""
    job = example_job(ranks=2, count=8192, protocol="simple", startup=False)
    manifest = job.to_dict()
    manifest["collectives"]["rebuild"][0]["count"] += 9
    _, failure, left = run(tmp_path, job, manifest, iterations=3, every=every)
    assert failure and left == ["report.json"]


@pytest.mark.parametrize("steady", [
    [{"op": "ReduceScatter", "count": 4096}],
    [{"op": "AllReduce", "count": 2, "carries": "other"}, {"op": "AllReduce", "count": 8192, "bucket": 0}],
])
def test_steady_calls_that_are_not_what_the_manifest_says(tmp_path: Path, steady: list[dict]) -> None:
    """All but the first iteration vanish from the count: that is not success."""
    job = example_job(ranks=2, count=8192, protocol="simple")
    manifest = job.to_dict()
    manifest["collectives"]["steady"] = steady
    try:
        _, failure, left = run(tmp_path, job, manifest, iterations=4)
    except UserError:
        return
    assert failure and left == ["report.json"]


def test_another_runs_directory_is_refused(tmp_path: Path) -> None:
    job = example_job(ranks=2, count=3000, protocol="ll")
    assert run(tmp_path, job, job.to_dict())[1] == ""
    other = job.to_dict()
    other["run_id"] = "another"
    with pytest.raises(UserError, match=r"holds step-000001 of run 'synth-0'"):
        run(tmp_path, job, other)
