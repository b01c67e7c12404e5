"""Two mirrors of the same ports whose copies differ: the replay says where, and nothing is published from there on.

Captures with one payload byte changed and the ICRC made right again, replayed as a user would. What the engine does
with every byte and on both of its ways is tested without DPDK in tests/parser/test_copies.py.
"""

import functools
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from flowcheck.job.model import Job
from lab.synth import Synthesis, example_job, generate
from lab.synth.writer import write_capture
from tests.flowcheck.altered import MIDDLE, Packet, altered, messages, opcode, sealed, spots

COUNTS, BASE = [3001, 9000], 12032  # bucket 1 begins on the next 64 bytes after 3001 fp32 elements
TIME = 2  # the iteration in which copies differ
PROTOCOLS = ["ll", "ll128", "simple"]


@functools.cache
def traffic(protocol: str) -> tuple[Job, Synthesis]:
    job = example_job(count=COUNTS, protocol=protocol, mtu=1024, seed=7)
    return job, generate(job, iterations=4, seed=7)


def changed(protocol: str, packet: int, byte: int, flip: int = 1) -> tuple[list[Packet], int]:
    """The traffic with one byte of bucket 1 changed in iteration TIME, and where its cell lies in the region."""
    job, made = traffic(protocol)
    spot = spots(made, protocol, job.flows[0].qpns[0], TIME, bucket=1)[0]
    assert (opcode(made.packets[spot.packets[packet]][1]) == MIDDLE) == (packet > 0)
    packets, offset = altered(made.packets, spot, packet, byte, flip=flip)
    return packets, BASE + offset


def write(folder: Path, protocol: str, *captures: list[Packet]) -> list[Path]:
    (folder / "job.json").write_text(traffic(protocol)[0].to_json())
    paths = [folder / f"{name}.pcap" for name, _ in zip("ab", captures, strict=True)]
    for path, packets in zip(paths, captures, strict=True):
        write_capture(path, packets)
    return paths


def check_refused(report: dict, failure: str, out: Path, offset: int) -> None:
    """Iteration TIME lacks what differs and nothing else; those before stand, those after have nothing to build on."""
    verdicts = [iteration["verdict"] for iteration in report["iterations"]]
    assert [verdict["complete"] for verdict in verdicts] == [True, True, False, True]
    assert [verdict["publishable"] for verdict in verdicts] == [True, True, False, False]
    assert [entry["clause"] for entry in verdicts[2]["failing"]] == ["covered"]
    reason = verdicts[2]["failing"][0]["reason"]
    assert reason.startswith(
        "bucket 1: 8998 of 9000 elements, missing by cause: disagreed 2; "
        f"8 bytes at byte {offset} of the iteration's region: PSN "
    )
    assert reason.count("PSN") == reason.count("(QP 0x") == 2 and "a.pcap" in reason and "b.pcap" in reason
    assert [entry["clause"] for entry in verdicts[3]["failing"]] == ["previous"]
    incomplete = {
        (number, index): bucket["missing"] for number, iteration in enumerate(report["iterations"])
        for index, bucket in enumerate(iteration["buckets"]) if not bucket["complete"]
    }
    assert incomplete == {(TIME, 1): {"disagreed": 2}}
    first = (offset - BASE) // 4
    placed = [(part["start"], part["end"]) for part in report["iterations"][TIME]["buckets"][1]["placed"]]
    assert placed == [(0, first), (first + 2, 9000)]
    assert failure == "1 of 4 iterations are incomplete, the first is 2"
    assert not report["ok"]
    assert report["checkpoint"]["step"] == 2
    assert sorted(path.name for path in out.glob("step-*")) == ["step-000001", "step-000002"]
    assert json.loads((out / "report.json").read_text())["checkpoint"]["step"] == 2


@pytest.mark.parametrize("byte", [0, 4, 7])
@pytest.mark.parametrize("packet", [0, 2], ids=["first", "middle"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_copies_that_differ_are_not_published(protocol: str, packet: int, byte: int, replayed, tmp_path: Path) -> None:
    """One mirror has another byte. Which one, and in which order the captures are named, changes nothing."""
    _, made = traffic(protocol)
    other, offset = changed(protocol, packet, byte)
    mirrors = [made.packets, other] if byte else [other, made.packets]
    for number, turn in enumerate((1, -1)):
        where = tmp_path / str(number)
        where.mkdir()
        paths = write(where, protocol, *mirrors)
        report, failure, out = replayed(paths[::turn], where / "job.json", every=1)
        check_refused(report, failure, out, offset)
        shutil.rmtree(out)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_mirrors_are_wrong_each_in_its_own_way(protocol: str, replayed, tmp_path: Path) -> None:
    one, offset = changed(protocol, 1, 4, flip=1)
    two, _ = changed(protocol, 1, 4, flip=2)
    report, failure, out = replayed(write(tmp_path, protocol, one, two), tmp_path / "job.json", every=1)
    check_refused(report, failure, out, offset)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_mirrors_are_wrong_alike(protocol: str, replayed, tmp_path: Path) -> None:
    """Copies that agree: only a checksum of the trainer could tell, and the checkpoint says that none did."""
    _, made = traffic(protocol)
    both, _ = changed(protocol, 1, 4)
    report, failure, out = replayed(write(tmp_path, protocol, both, both), tmp_path / "job.json", every=1)
    assert failure == "" and report["checkpoint"]["status"] == "unverified"
    assert [iteration["verdict"]["failing"] for iteration in report["iterations"]] == [[]] * 4
    right = hashlib.sha256(made.reduced[TIME, 1].tobytes()).hexdigest()
    assert report["iterations"][TIME]["buckets"][1]["sha256"] not in (None, right)
    assert len(list(out.glob("step-*"))) == 4


def test_copies_that_differ_in_the_first_iterations_leave_no_checkpoint(replayed, tmp_path: Path) -> None:
    """Iteration 0 has one bucket, and nothing can be built without it."""
    job, made = traffic("ll")
    spot = spots(made, "ll", job.flows[0].qpns[0], 0)[0]
    other, offset = altered(made.packets, spot, packet=1, byte=7)
    report, failure, out = replayed(write(tmp_path, "ll", made.packets, other), tmp_path / "job.json", every=1)
    assert [iteration["verdict"]["complete"] for iteration in report["iterations"]] == [False, True, True, True]
    assert [iteration["verdict"]["publishable"] for iteration in report["iterations"]] == [False] * 4
    failing = report["iterations"][0]["verdict"]["failing"]
    assert [entry["clause"] for entry in failing] == ["covered"] and f"byte {offset} " in failing[0]["reason"]
    assert failure == "1 of 4 iterations are incomplete, the first is 0"
    assert report["checkpoint"] is None and not list(out.glob("step-*")) and not (out / ".unconfirmed").exists()


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_copies_of_the_weights_that_differ_are_no_weights(protocol: str, turn: int, replayed, tmp_path: Path) -> None:
    """The broadcast of all parameters: which mirror is right nobody knows. The gradients are whole all the same."""
    job, made = traffic(protocol)
    broadcast = messages(made.packets, job.flows[0].qpns[0])[2]
    time, frame = made.packets[broadcast[1]]
    assert opcode(frame) == MIDDLE
    wrong = sealed(frame[:62] + bytes([frame[62] ^ 1]) + frame[63:])  # byte 8: data in every protocol
    other = [*made.packets[: broadcast[1]], (time, wrong), *made.packets[broadcast[1] + 1 :]]
    report, failure, out = replayed(write(tmp_path, protocol, made.packets, other)[::turn], tmp_path / "job.json")
    first = {"ll": 512, "ll128": 968, "simple": 1032}[protocol]
    assert failure == (
        "no checkpoint: no initial weights: no --init, and copies of the broadcast parameters differ, first at byte"
        f" {first}"
    )
    assert [iteration["verdict"]["complete"] for iteration in report["iterations"]] == [True] * 4
    assert report["checkpoint"] is None and not list(out.glob("step-*"))
