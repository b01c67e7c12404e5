"""A whole replay from start to end, of captures in memory: what it opens, how it places, what it shows meanwhile.

Nothing here needs DPDK.
"""

import contextlib
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parser.machine import Engine, choose_placing, placing
from rich.console import Console

from dataplane.pcapfile import PcapInfo
from flowcheck.job.model import Job
from flowcheck.offline.session import ReplayOptions, ReplaySession
from flowcheck.rebuild import calibration
from flowcheck.rebuild.calibration import DEFAULT, question
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.replica import JobReplica
from lab.synth import Synthesis, example_job, generate
from parser.chunk_layout import Protocol
from tests.flowcheck.by_hand import info
from tests.flowcheck.memory_ring import MemoryRing
from updater.choosing import cache_file, key


class FileInMemory(MemoryRing):
    """What PcapSource is to a session."""

    captures: dict[str, list[tuple[int, bytes]]] = {}
    made: list["FileInMemory"] = []
    started: list[object] = []
    oversize = 0

    def __init__(self, eal: object, path: str, *, stream: int, info: PcapInfo) -> None:
        super().__init__()
        assert info.path == path
        self.eal, self.path, self.stream, self.state = eal, path, stream, "new"
        self.made.append(self)

    def __enter__(self) -> "FileInMemory":
        return self

    def __exit__(self, *error: object) -> None:
        self.state += ", closed"

    def start(self) -> None:
        self.state += ", started"
        self.put(self.captures[self.path], self.stream)
        self.end()

    def stop(self) -> None:
        self.state += ", stopped"

    def counters(self) -> dict[str, int]:
        return {"oversize": self.oversize if self.stream else 0}

    def summary(self) -> str:
        return f"{self.path}: a summary"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[int]]:
    """No DPDK; huge: were there huge pages. Returns the megabytes asked for."""

    def use(huge: bool) -> list[int]:
        asked: list[int] = []

        def start(memory_mb: int) -> contextlib.AbstractContextManager:
            asked.append(memory_mb)
            eal = SimpleNamespace(huge=huge, describe=lambda: "ordinary pages")
            FileInMemory.started.append(eal)
            return contextlib.nullcontext(eal)

        monkeypatch.setattr("flowcheck.offline.session.Eal", SimpleNamespace(start=start))
        monkeypatch.setattr("flowcheck.offline.session.PcapSource", FileInMemory)
        FileInMemory.made, FileInMemory.started = [], []
        return asked

    return use


def drive(job: Job, made: Synthesis, out: Path, console: Console | None = None, **options: Any) -> ReplaySession:
    FileInMemory.captures = {f"port{rank}": packets for rank, packets in made.ports.items()}
    plan = plan_job(job, streams=len(made.ports))
    infos = [info(path, len(packets)) for path, packets in FileInMemory.captures.items()]
    session = ReplaySession(plan, JobReplica(plan, None), ReplayOptions([], None, out, **options), infos)
    session.drive(console or Console(quiet=True))
    assert isinstance(session.engine, Engine)
    return session


@pytest.mark.parametrize("huge", [True, False])
def test_a_replay_from_start_to_end(memory, huge: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = memory(huge)
    monkeypatch.setattr(FileInMemory, "oversize", 3)
    job = example_job(ranks=3, count=[900, 700], seed=3)
    made = generate(job, iterations=4, ports=[0, 1], seed=3)
    begin = time.monotonic()
    session = drive(job, made, tmp_path / "out", every=2)
    took = time.monotonic() - begin
    report, failure = session.finish()
    assert failure == "" and [i.iteration for i in report.complete] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == ["step-000002", "step-000004"]
    assert report.notes == ([] if huge else ["ordinary pages"]) + ["port1: a summary"]
    assert asked[0] > 0 and len(asked) == 1
    assert [(s.path, s.stream, s.state) for s in FileInMemory.made] == [
        ("port0", 0, "new, started, stopped, closed"), ("port1", 1, "new, started, stopped, closed"),
    ]
    assert [s.eal for s in FileInMemory.made] == 2 * FileInMemory.started
    assert set(report.stages) == {"start", "receive and place", "verdict, update, write"}
    assert all(seconds > 0 for seconds in report.stages.values())
    assert sum(report.stages.values()) <= took
    assert report.stages["receive and place"] + report.stages["verdict, update, write"] == pytest.approx(report.seconds)


@pytest.mark.parametrize("huge", [True, False])
def test_a_replay_places_as_is_known_of_the_pages_that_it_has(
    memory, huge: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is known of other pages is not taken, and where it is told to measure no answer for these is kept."""
    memory(huge)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOWCHECK_PLACING")
    job = example_job(count=900, seed=3)
    made, mtu = generate(job, iterations=1, seed=3), job.communicator.mtu
    known = {True: "nta@1024", False: "none"}
    for pages, way in known.items():
        asked = question(mtu, pages)
        cache_file(asked).parent.mkdir(parents=True, exist_ok=True)
        cache_file(asked).write_text(json.dumps({**key(asked), "ways": dict.fromkeys(asked.parts, way)}))
    try:
        drive(job, made, tmp_path / "out")
        assert {name for name, _ in placing()[1]} == {known[huge].partition("@")[0]}
        for pages in known:
            cache_file(question(mtu, pages)).unlink()
        monkeypatch.setenv("FLOWCHECK_PLACING", "measure")
        drive(job, made, tmp_path / "again")
        kept = [path.name for path in (tmp_path / "cache" / "flowcheck").glob("placing-*")]
        none_free = huge and not kept  # measured on other pages, which is no answer either
        assert none_free or kept == [f"placing-{mtu}-{'huge' if huge else 'normal'}.json"]
    finally:
        for protocol in Protocol:
            choose_placing(protocol, DEFAULT.name, DEFAULT.ahead)


def test_a_replay_does_not_pay_for_a_measurement(memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory(True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOWCHECK_PLACING")
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("it measured"))
    job = example_job(count=900, seed=3)
    drive(job, generate(job, iterations=1, seed=3), tmp_path / "out")
    assert {name for name, _ in placing()[1]} == {DEFAULT.name}


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_it_is_is_shown_on_a_terminal_and_goes_away(memory, tmp_path: Path, terminal: bool) -> None:
    memory(True)
    job, shown = example_job(count=900, seed=3), io.StringIO()
    made = generate(job, iterations=2, ports=[0, 1], seed=3)
    drive(job, made, tmp_path / "out", Console(file=shown, force_terminal=terminal, width=100, color_system=None))
    if not terminal:
        assert shown.getvalue() == ""
        return
    packets = sum(map(len, made.ports.values()))
    first, *_, last = re.findall(r"\x1b\[2Kpackets [━ ]+ (\d+/\d+) ", shown.getvalue())
    assert (first, last) == (f"0/{packets}", f"{packets}/{packets}")
    assert shown.getvalue().endswith("\x1b[2K"), "the line is taken back"


def test_a_replay_of_the_iterations_asked_for(memory, tmp_path: Path) -> None:
    memory(True)
    job = example_job(count=900, seed=3)
    session = drive(job, generate(job, iterations=6, seed=3), tmp_path / "out", iterations=2)
    report, failure = session.finish()
    assert failure == "" and [i.iteration for i in report.iterations] == [0, 1]


def test_a_very_long_outage_is_skipped(memory, tmp_path: Path) -> None:
    memory(True)
    job = example_job(count=900, seed=3)
    before, after = generate(job, iterations=2, seed=3), generate(job, iterations=2, first_iteration=3000, seed=3)
    before.ports[0] += [(time + 10**10, frame) for time, frame in after.ports[0]]
    report, failure = drive(job, before, tmp_path / "out").finish()
    assert [note for note in report.notes if "passed while the mirror was down" in note] == [
        "iterations 2 to 2995 passed while the mirror was down: no packet of them is in the captures"
    ]
    assert [i.iteration for i in report.complete] == [0, 1, 3000, 3001] and failure
    assert [path.name for path in (tmp_path / "out").glob("step-*")] == ["step-000002"]
