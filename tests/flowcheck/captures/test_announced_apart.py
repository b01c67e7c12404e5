"""SIMPLE in mid-stream, replayed from two captures: the data in one, what says where it belongs in the other."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from lab.synth import Synthesis, example_job, generate
from lab.synth.writer import write_capture
from tests.flowcheck.altered import destination

FIRST = 900
HOUR = 3600 * 10**9


def captured(iterations: int, **options: object) -> tuple[Job, Synthesis]:
    job = example_job(ranks=2, channels=2, protocol="simple", startup=False, **options)  # type: ignore[arg-type]
    return job, generate(job, iterations=iterations, first_iteration=FIRST)


@pytest.fixture(scope="module")
def made() -> tuple[Job, Synthesis]:
    return captured(6, count=[300_000, 20_000], mtu=1024)


def by_way(job: Job, frame: bytes) -> bool:
    """Towards the receiver of a connection's data?"""
    return destination(frame) in {qpn for flow in job.flows for qpn in flow.qpns}


def by_host(_: Job, frame: bytes) -> bool:
    """From the host with the lesser address? A mirror port of each direction."""
    return frame[26:30] < frame[30:34]


def apart(job: Job, made: Synthesis, where: Path, split: Callable[[Job, bytes], bool], shift: int = 0) -> list[Path]:
    """shift: of the clock of the second."""
    for name, wanted, late in (("one.pcap", True, 0), ("other.pcap", False, shift)):
        write_capture(where / name, [(ns + late, frame) for ns, frame in made.packets if split(job, frame) == wanted])
    (where / "job.json").write_text(job.to_json())
    return [where / "one.pcap", where / "other.pcap"]


def check(report: dict, made: Synthesis) -> None:
    """All iterations are there. The first one may lack what came before a connection had found its place."""
    first, *others = report["iterations"]
    assert [i["iteration"] for i in report["iterations"]] == sorted({iteration for iteration, _ in made.reduced})
    for bucket in first["buckets"]:
        assert set(bucket["missing"]) <= {"unanchored", "lost"}
    for iteration in others:
        for bucket in iteration["buckets"]:
            truth = made.reduced[iteration["iteration"], bucket["index"]]
            assert bucket["sha256"] == hashlib.sha256(truth.tobytes()).hexdigest()


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("split", [by_way, by_host])
def test_what_one_capture_announces_finds_the_data_of_the_other(
    made, replayed, tmp_path: Path, split: Callable[[Job, bytes], bool], turn: int
) -> None:
    job, synthesis = made
    report, _, _ = replayed(apart(job, synthesis, tmp_path, split)[::turn], tmp_path / "job.json")
    check(report, synthesis)


@pytest.mark.parametrize("turn", [1, -1])
def test_a_capture_of_announcements_alone_is_read_no_faster_than_the_data(replayed, tmp_path: Path, turn: int) -> None:
    """Each iteration's first bucket is too small for the second channel, whose announcements must be there when its
    data comes. There are more of them than the 256 that are remembered."""
    job, synthesis = captured(100, count=[700, 18_000])
    report, _, _ = replayed(apart(job, synthesis, tmp_path, by_way)[::turn], tmp_path / "job.json")
    check(report, synthesis)


def test_captures_of_clocks_an_hour_apart_are_not_brought_together(made, replayed, tmp_path: Path) -> None:
    """Which announcement is of which data is not known then: it is said that nothing was placed."""
    job, synthesis = made
    with pytest.raises(UserError, match=r"no gradient packet of this job.*unanchored"):
        replayed(apart(job, synthesis, tmp_path, by_way, HOUR), tmp_path / "job.json")
