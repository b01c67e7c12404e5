"""A replay session whose iterations a test closes by hand: a fake engine; replica, files and report are real.

    replayed = begin(every=1)                        the fixture `begin`; options as of ReplayOptions
    replayed.close(0, 1, 2, without=(1,))            iteration 1 has no cell
    report, failure = replayed.finish()
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataplane.pcapfile import PcapInfo
from flowcheck.job.model import Job
from flowcheck.offline.session import ReplayOptions, ReplaySession
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.events import Event
from flowcheck.rebuild.version.replica import JobReplica
from lab.synth import example_job
from tests.flowcheck.fake_engine import FakeEngine


def info(path: str, packets: int = 10) -> PcapInfo:
    return PcapInfo(path, "pcapng", 1, True, 0, packets, 4170, 0, 900, 1000, 5)


@dataclass
class Replayed:
    """A session whose iterations a test closes by hand."""

    session: ReplaySession
    engine: FakeEngine
    out: Path

    def close(self, *iterations: int, without: tuple[int, ...] = ()) -> bool:
        """Close iterations with all cells there, but for those named. Returns whether to go on after the last."""
        for iteration in iterations:
            self.engine.cells(iteration)[:] = iteration not in without
            go_on = self.take(self.session.follower.judge(iteration))
        return go_on

    def take(self, events: Iterable[Event]) -> bool:
        return all(self.session.take(event) for event in events)

    def skip(self, first: int, last: int) -> None:
        """No packet of these came, and they are too many to be judged."""
        self.take(self.session.follower._skip(first, last))

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.out.glob("step-*"))

    def aside(self) -> list[str]:
        return sorted(path.name for path in (self.out / ".unconfirmed").glob("*"))

    def clauses(self) -> list[list[str]]:
        """Of each iteration: those that fail."""
        return [[clause.value for clause, _ in each.verdict.failing] for each in self.session.report.iterations]

    def finish(self) -> tuple[dict[str, Any], str]:
        report, failure = self.session.finish()
        assert json.loads((self.out / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
        assert report.failure == failure
        return report.to_dict(), failure


def begin_session(
    monkeypatch: pytest.MonkeyPatch, folder: Path, job: Job | None = None, *, weights: bool = True, streams: int = 1,
    into: str = "out", **options: Any,
) -> Replayed:
    """weights: were they broadcast? streams: captures. into: folder of the checkpoints."""
    job = job or example_job(count=[20, 9])
    plan = plan_job(job, streams=streams, check_icrc=options.get("icrc", True))
    engine = FakeEngine(plan.engine)
    if weights and plan.parameters:
        engine.cells(None)[:] = True
    monkeypatch.setattr("flowcheck.rebuild.iteration.wire_arenas.Engine", lambda config: engine)
    chosen = ReplayOptions([], folder / "job.json", folder / into, **options)
    infos = [info(f"{name}.pcapng") for name in "abcd"[:streams]]
    session = ReplaySession(plan, JobReplica(plan, chosen.init), chosen, infos)
    session.begin([])
    monkeypatch.setattr(session.arenas.scheduler, "state", lambda stream, iteration: "past")
    monkeypatch.setattr(session.arenas.scheduler, "final", lambda iteration: "arena_needed")
    return Replayed(session, engine, chosen.out)
