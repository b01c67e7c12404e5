"""Captures that begin at different times: the order in which they are named, and who is read first, changes nothing."""

from pathlib import Path

import pytest

from flowcheck.job.model import Job
from lab.synth import Synthesis, example_job, generate
from lab.synth.writer import write_capture

OTHER = bytes(12) + b"\x88\xb5" + bytes(46)  # an experimental EtherType: nothing of ours


@pytest.fixture(scope="module")
def made() -> tuple[Job, Synthesis]:
    job = example_job(ranks=2, count=3000, protocol="ll", version="2.19.4")
    return job, generate(job, iterations=8)


def halves(job: Job, made: Synthesis, where: Path, *, shift: int = 0) -> list[Path]:
    """The same port in two files: the first is long, the second begins in mid-stream. shift: of the second's clock."""
    frames = made.packets
    begin = frames[0][0]
    cut = len(frames) * 3 // 4
    noise = [(begin - 10_000 + i, OTHER) for i in range(5000)]  # more than is read at a time
    write_capture(where / "early.pcap", noise + frames[:cut])
    write_capture(where / "late.pcap", [(time + shift, data) for time, data in frames[cut:]])
    (where / "job.json").write_text(job.to_json())
    return [where / "early.pcap", where / "late.pcap"]


@pytest.mark.parametrize("turn", [1, -1])
def test_a_capture_that_begins_later_hides_no_iteration(made, replayed, tmp_path: Path, turn: int) -> None:
    job, synthesis = made
    report, failure, out = replayed(halves(job, synthesis, tmp_path)[::turn], tmp_path / "job.json")
    assert failure == "" and report["ok"]
    assert [i["iteration"] for i in report["iterations"]] == list(range(8))
    truth = synthesis.truth["iterations"]
    assert [i["buckets"][0]["sha256"] for i in report["iterations"]] == [i["buckets"][0]["sha256"] for i in truth]
    assert (out / "step-000008").is_dir()


def test_clocks_that_differ_are_named(made, replayed, tmp_path: Path) -> None:
    """The capture that began last says that it began first: what the other one brings is not dropped in silence."""
    job, synthesis = made
    paths = halves(job, synthesis, tmp_path, shift=-3600 * 10**9)
    report, failure, out = replayed(paths, tmp_path / "job.json")
    assert "iterations from 0 on" in failure and "clocks" in failure
    assert not report["ok"] and not list(out.glob("step-*"))


@pytest.mark.parametrize("protocol", ["ll", "simple"])
def test_the_first_packets_come_backwards(replayed, tmp_path: Path, protocol: str) -> None:
    """A mirror that exchanges packets may do so with a connection's very first: nothing of it is lost for that."""
    job = example_job(ranks=2, count=9000, protocol=protocol, mtu=1024)
    job.collectives.startup = job.collectives.startup[2:]  # the parameters first
    synthesis = generate(job, iterations=2)
    frames = synthesis.packets
    times = [time for time, _ in frames]
    backwards = [data for _, data in frames[:30][::-1] + frames[30:]]
    write_capture(tmp_path / "swapped.pcap", zip(times, backwards, strict=True))
    (tmp_path / "job.json").write_text(job.to_json())
    report, failure, out = replayed(tmp_path / "swapped.pcap", tmp_path / "job.json")
    assert failure == "" and report["parameters"][0]["complete"] and (out / "step-000002").is_dir()
    truth = synthesis.truth["iterations"]
    assert [i["buckets"][0]["sha256"] for i in report["iterations"]] == [i["buckets"][0]["sha256"] for i in truth]
