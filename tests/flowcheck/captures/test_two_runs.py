"""Captures of two runs of one script: the same addresses, queue pairs and packet numbers. Their times alone tell."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowcheck.job.model import Job
from flowcheck.offline.replay import ReplayOptions, replay
from lab.synth import Synthesis, example_job, generate
from lab.synth.writer import write_capture

pytestmark = pytest.mark.usefixtures("eal")

Packets = list[tuple[int, bytes]]


@pytest.fixture(scope="module")
def job() -> Job:
    return example_job(ranks=2, count=[3001, 700], protocol="ll")


def made(job: Job, seed: int, directions: str = "both", first: int = 0) -> Synthesis:
    """With seed 1 and 2 of two runs."""
    return generate(job, iterations=4, directions=directions, seed=seed, first_iteration=first)


def boundaries(packets: Packets) -> list[int]:
    """Where iterations begin: synth leaves more than this between them, and never within one."""
    return [i for i in range(1, len(packets)) if packets[i][0] - packets[i - 1][0] > 250_000]


def later(packets: Packets, seconds: float) -> Packets:
    return [(time + round(seconds * 1e9), frame) for time, frame in packets]


def go(job: Job, files: list[Packets], folder: Path) -> dict[str, Any]:
    """The report, whose files are known by their number."""
    (folder / "job.json").write_text(job.to_json())
    paths = [folder / f"{i}.pcap" for i in range(len(files))]
    for path, packets in zip(paths, files, strict=True):
        write_capture(path, packets)
    options = ReplayOptions(paths, folder / "job.json", folder / "out")
    report, failure = replay(options, Console(quiet=True))
    assert report.ok == (not failure)  # the exit status is 0 or 1 by it
    return report.to_dict()


@pytest.mark.parametrize("one_file", [False, True], ids=["files", "merged"])
@pytest.mark.parametrize(("seconds", "found"), [(0, ""), (0.9, ""), (1.1, "marked"), (-5, "marked"), (59, "marked"),
                                                (-61, "refused"), (7200, "refused")])
def test_an_iteration_is_of_one_time(job: Job, seconds: float, found: str, one_file: bool, tmp_path: Path) -> None:
    """What rank 0 sent in one run, and what it received in another one: no byte of them is there twice. Merged into one
    file, clear-to-sends and writes must have the same addresses: only the times differ."""
    out, into = made(job, 1, "out").packets, later(made(job, 1 if one_file else 2, "in").packets, seconds)
    report = go(job, [sorted(out + into)] if one_file else [out, into], tmp_path)
    assert report["ok"] == (found != "refused") and bool(report["unproven"]) == (found != "")
    clauses = {one["clause"] for i in report["iterations"] for one in i["verdict"]["failing"]}
    assert ("one_run" in clauses) == (found == "refused")
    written = sorted((tmp_path / "out").glob("step-*"))
    assert bool(written) == (found != "refused")
    if found == "marked":
        assert f"{abs(seconds):.1f} s apart" in report["unproven"][0]
        assert report["unproven"][0] in (written[0] / "manifest.json").read_text()


@pytest.mark.parametrize(("seconds", "marked"), [(0, False), (30, False), (7200, True)])
@pytest.mark.parametrize("seed", [1, 2], ids=["one", "two"])
def test_an_iteration_that_no_capture_of_the_one_before_has(
    job: Job, seconds: float, marked: bool, seed: int, tmp_path: Path
) -> None:
    """The first part of one run, the second one of another, or of the same after a very long time."""
    parts = [made(job, 1).packets, later(made(job, seed, first=4).packets, seconds)]
    report = go(job, parts, tmp_path)
    assert report["ok"] and len(report["iterations"]) == 8
    assert bool(report["unproven"]) == marked


@pytest.mark.parametrize(("pause", "marked"), [(500, False), (7200, True)])
def test_a_long_pause_in_one_capture_is_a_mark(job: Job, pause: float, marked: bool, tmp_path: Path) -> None:
    packets = made(job, 1).packets
    last = boundaries(packets)[-1]
    report = go(job, [packets[:last] + later(packets[last:], pause)], tmp_path)
    assert report["ok"] and bool(report["unproven"]) == marked


def test_weights_of_another_start_up_are_a_mark(job: Job, tmp_path: Path) -> None:
    """The start-up of a run that went no further, and a capture that begins with the first iteration of another one."""
    first, second = made(job, 1).packets, made(job, 2).packets
    report = go(job, [first[: boundaries(first)[0]], later(second[boundaries(second)[0]:], 7200)], tmp_path)
    assert report["parameters"][0]["complete"] and report["unproven"]


def test_a_second_run_in_the_same_capture_is_refused(job: Job, tmp_path: Path) -> None:
    """Its connections begin anew; what is right of the first run stays right."""
    first, second = made(job, 1), made(job, 2)
    report = go(job, [first.packets + later(second.packets, 7200)], tmp_path)
    assert not report["ok"] and len(report["iterations"]) == 4
    for iteration in report["iterations"]:
        for bucket in iteration["buckets"]:
            truth = first.reduced[iteration["iteration"], bucket["index"]]
            assert bucket["sha256"] in (None, hashlib.sha256(truth.tobytes()).hexdigest())
