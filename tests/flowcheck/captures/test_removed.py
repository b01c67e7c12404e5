"""5 % of the packets taken out of any capture, by seed: what is placed is right, what is missing is named.

The bytes of a complete replay come from the engine in this process, fed from memory; the captures with holes go the
whole way: file, DPDK, verdict, checkpoint, report.
"""

import functools
import hashlib
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from parser.machine import Engine
from rich.console import Console
from scapy.utils import RawPcapNgReader, RawPcapReader

from flowcheck.errors import UserError
from flowcheck.job.manifest import load_job
from flowcheck.job.model import dtype_size
from flowcheck.offline.replay import ReplayOptions, replay
from flowcheck.rebuild.iteration.evidence import bucket_coverage
from flowcheck.rebuild.plan import plan_job
from lab.synth.writer import write_capture

pytestmark = pytest.mark.usefixtures("eal")

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = ROOT.parent / "shared" / "captures"
JOBS = {
    **{path.stem: path for path in (ROOT / "tests" / "data" / "jobs").glob("*.json")},
    **{path.name.removesuffix(".job.json"): path for path in (ROOT / "pcaps").glob("*.job.json")},
}
SOFT = [f"{name}_nccl_ring4{how}" for name, how in (
    ("03", ""), ("05", "_ar_qps4"), ("07", "_mtu1024"), ("20", "_loss1"), ("24", "_reorder_dup"),
)]
CASES = [(name, "") for name in sorted(JOBS)] + [(name, "rank 1") for name in SOFT]  # all edges heal nearly everything
SEEDS = range(3)
REMOVED = 0.05

Packet = tuple[int, bytes]


def captured(name: str) -> Path:
    found = [p for folder in (ROOT / "pcaps", CAPTURES / "soft-roce", CAPTURES / "nccl-hardware")
             for p in folder.glob(f"{name}.pcap*")]
    if not found:
        pytest.skip(f"shared capture {name} is not beside this checkout")
    return found[0]


@functools.cache
def packets(name: str) -> list[Packet]:
    """(nanoseconds, frame) of a capture, by scapy: none of our readers."""
    path = captured(name)
    if path.suffix == ".pcapng":
        with RawPcapNgReader(str(path)) as reader:
            return [(((m.tshigh << 32) + m.tslow) * 10**9 // m.tsresol, bytes(data)) for data, m in reader]
    with RawPcapReader(str(path)) as reader:
        unit = 1 if reader.nano else 1000
        return [(m.sec * 10**9 + m.usec * unit, bytes(data)) for data, m in reader]


@dataclass
class Whole:
    """A complete replay's bytes: {(iteration, bucket): (elements' bytes, element mask, missing by cause)}."""

    buckets: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, dict[str, int]]]
    weights: dict[int, dict[str, str]]  # step -> SHA-256 by tensor


def manifest(name: str, seen: str, folder: Path) -> Path:
    """The job, or what of it passes one rank's port."""
    if not seen:
        return JOBS[name]
    job = json.loads(JOBS[name].read_text())
    job["flows"] = [flow for flow in job["flows"] if 1 in (flow["src"], flow["dst"])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


@functools.cache
def whole(name: str, seen: str, out: Path) -> Whole:
    job = manifest(name, seen, out)
    plan = plan_job(load_job(job))
    engine, buckets = Engine(plan.engine), {}

    def close() -> None:
        for found in bucket_coverage(plan, engine, engine.oldest):
            mask = np.zeros(found.place.elements, bool)
            for start, end in found.placed:
                mask[start:end] = True
            data = found.data[: found.place.nbytes].reshape(found.place.elements, -1).copy()
            buckets[engine.oldest, found.place.index] = data, mask, found.missing
        engine.retire()

    for _, frame in packets(name):
        while not engine.feed(0, frame):
            close()
    engine.finish()
    while engine.oldest <= engine.begun:
        close()
    replay(ReplayOptions([captured(name)], job, out, every=1), Console(quiet=True))
    return Whole(buckets, {step_of(path): weights_in(path) for path in out.glob("step-*")})


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def weights_in(path: Path) -> dict[str, str]:
    files = json.loads((path / "manifest.json").read_text())["files"]
    return {f"{file}/{name}": entry["sha256"] for file, body in files.items()
            for name, entry in body["tensors"].items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "seen"), CASES, ids=" ".join)
def test_five_percent_removed(name: str, seen: str, seed: int, folder: Path, tmp_path: Path) -> None:
    known = whole(name, seen, folder / f"{name} {seen}")
    rng = random.Random(f"{name}/{seed}")
    left = [packet for packet in packets(name) if rng.random() >= REMOVED]
    write_capture(tmp_path / "holes.pcap", left)
    job, out = manifest(name, seen, tmp_path), tmp_path / "out"
    try:
        report, failure = replay(ReplayOptions([tmp_path / "holes.pcap"], job, out), Console(quiet=True))
    except UserError as error:  # what is left has no iteration in it, and that is said
        assert error.remedy and not any(mask.any() for _, mask, _ in known.buckets.values())
        return
    said = report.to_dict()
    complete = 0
    for iteration in said["iterations"]:
        for bucket in iteration["buckets"]:
            check_bucket(bucket, known.buckets[iteration["iteration"], bucket["index"]])
        gaps = any(b["placed_elements"] < b["elements"] for b in iteration["buckets"])
        assert iteration["verdict"]["complete"] <= (not gaps)
        complete += complete == iteration["iteration"] and iteration["verdict"]["complete"]
    assert len(said["iterations"]) <= len({i for i, _ in known.buckets})
    if any(b["placed_elements"] < b["elements"] for i in said["iterations"] for b in i["buckets"]):
        assert failure and not said["ok"]
    steps = {step_of(path): path for path in out.glob("step-*")}
    assert all(step <= complete for step in steps)
    for step, path in steps.items():
        assert weights_in(path) == known.weights[step]


def check_bucket(bucket: dict, known: tuple[np.ndarray, np.ndarray, dict[str, int]]) -> None:
    data, mask, missing = known
    assert len(data) == bucket["elements"] and data.shape[1] == dtype_size(bucket["dtype"])
    placed = np.zeros(len(data), bool)
    for part in bucket["placed"]:
        placed[part["start"] : part["end"]] = True
        assert mask[part["start"] : part["end"]].all(), "placed what the complete capture does not hold"
        assert part["sha256"] == hashlib.sha256(data[part["start"] : part["end"]].tobytes()).hexdigest()
    assert placed.sum() == bucket["placed_elements"]
    assert set(bucket["missing"]) <= {"not_mirrored", "icrc", "unanchored", "disagreement", "lost"}
    assert sum(bucket["missing"].values()) == bucket["elements"] - bucket["placed_elements"]
    assert bucket["missing"].get("not_mirrored", 0) == missing.get("not_mirrored", 0)


@pytest.mark.captures
def test_receiver_not_ready_is_no_nccl() -> None:
    """A sender that waits and repeats: counted, and nothing of it is called NCCL, lost or damaged."""
    program = "from flowcheck.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "inspect", str(captured("26_rnr_nak"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if "NCCL" in line] == ["info: no mark of NCCL was seen"]
    assert "ICRC right 628, wrong 0" in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if "A>B" in line)
    assert row[-6:] == ["1024", "516", "112", "0", "396", "52"]
