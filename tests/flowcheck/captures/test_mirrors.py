"""What a switch does to its copies: encapsulates, cuts, rewrites. Replay places them, or says why not."""

import struct
from pathlib import Path

import pytest
from rich.console import Console

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.offline.replay import ReplayOptions, replay
from lab.synth import Mirror, Synthesis, example_job, generate
from lab.synth.mirror import WRAPS
from lab.synth.writer import write_capture
from tests.flowcheck.replayed import check_buckets, replayed

pytestmark = pytest.mark.usefixtures("eal")


def _job(**options: object) -> Job:
    return example_job(ranks=3, channels=2, count=[3001, 700], protocol="ll", **options)  # type: ignore[arg-type]


def _complete(made: Synthesis, report: dict, failure: str) -> None:
    assert failure == ""
    check_buckets(made, report)


@pytest.mark.parametrize("ipv6", [False, True], ids=["v4", "v6"])
@pytest.mark.parametrize("wrap", WRAPS[1:])
def test_encapsulated_mirror(wrap: str, ipv6: bool, tmp_path: Path) -> None:
    job = _job(ipv6=not ipv6)
    made = generate(job, iterations=2, mirror=Mirror(wrap, ipv6, session=9, tag=12 if ipv6 else None))
    report, failure = replayed(job, made, tmp_path)
    _complete(made, report, failure)
    assert not any(name in report["drops"] for name in ("truncated", "malformed", "not_roce"))


@pytest.mark.parametrize("wrap", ["", "erspan3"])
@pytest.mark.parametrize("ipv6", [False, True], ids=["v4", "v6"])
def test_rewritten_vlan_ttl_and_ecn_disturb_nothing(ipv6: bool, wrap: str, tmp_path: Path) -> None:
    job = _job(ipv6=ipv6)
    made = generate(job, iterations=2, ports=[0, 1], mirror=Mirror(wrap, rewrite=True))
    report, failure = replayed(job, made, tmp_path)
    _complete(made, report, failure)
    assert sum(flow["icrc_wrong"] for flow in report["flows"]) == 0


@pytest.mark.parametrize("wrap", WRAPS[1:])
def test_truncating_mirror_is_counted_and_nothing_is_placed(wrap: str, tmp_path: Path) -> None:
    """Outer lengths agree with what is there; only the inner IP length, or ERSPAN's T bit, tells."""
    job = _job(mtu=1024)
    made = generate(job, iterations=1, mirror=Mirror(wrap, truncate=200))
    cut = sum(len(frame) > 200 for _, frame in generate(job, iterations=1).packets)
    with pytest.raises(UserError, match=rf"truncated {cut}\b") as refused:
        replayed(job, made, tmp_path)
    assert "no gradient packet" in str(refused.value) and not (tmp_path / "out").exists()


def test_what_is_not_unpacked_is_refused_by_name(tmp_path: Path) -> None:
    job = _job()
    made = generate(job, iterations=1)
    frames = []
    for time, frame in made.packets:
        outer = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 24 + len(frame) - 14, 0, 0, 9, 47, 0, bytes(4), bytes(4))
        frames.append((time, frame[:14] + outer + b"\0\0\x80\xff" + frame[14:]))  # GRE carrying nobody knows what
    write_capture(tmp_path / "routed.pcap", frames)
    (tmp_path / "job.json").write_text(job.to_json())
    options = ReplayOptions([tmp_path / "routed.pcap"], tmp_path / "job.json", tmp_path / "out")
    with pytest.raises(UserError, match="encapsulated: GRE carrying another protocol") as refused:
        replay(options, Console(quiet=True))
    assert str(len(frames)) in str(refused.value) and "ERSPAN" in refused.value.remedy
    assert not (tmp_path / "out").exists()
