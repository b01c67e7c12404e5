"""A replay that is refused leaves what an earlier one has offered in its directory: docs/reference/report.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from flowcheck.errors import UserError
from flowcheck.offline.replay import ReplayOptions, replay, run
from lab.synth import example_job, generate

pytestmark = pytest.mark.usefixtures("eal")


def test_a_refused_replay_leaves_the_earlier_report(tmp_path: Path) -> None:
    job = example_job(count=[60])
    generate(job, iterations=2).write(tmp_path / "all.pcap")
    (tmp_path / "job.json").write_text(job.to_json())
    out, console = tmp_path / "out", Console(quiet=True)
    good = ReplayOptions([tmp_path / "all.pcap"], tmp_path / "job.json", out)
    assert run(good, console) == 0
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    assert json.loads(before[out / "report.json"])["ok"]

    for flow in job.flows:
        flow.qpns = [qpn + 4096 for qpn in flow.qpns]
    (tmp_path / "other.json").write_text(job.to_json())
    (tmp_path / "noise.pcap").write_bytes(b"no capture")
    for refused in (
        ReplayOptions([tmp_path / "noise.pcap"], tmp_path / "job.json", out),
        ReplayOptions([tmp_path / "all.pcap"], tmp_path / "other.json", out),  # nothing of this job is in it
        ReplayOptions([tmp_path / "all.pcap"], tmp_path / "job.json", out, init=tmp_path / "noise.pcap"),
    ):
        with pytest.raises(UserError):
            replay(refused, console)
        assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before
