"""A live session, one signal at a time: the engine and its rings are made up (tests/flowcheck/fake_engine.py), the
replica is the real one.

Every parameter begins as 1.0, every gradient is 1.0 and the learning rate is 0.5, so a version is 0.5 less than the one
before it. Later iterations have two buckets: FIRST and SECOND are their cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowcheck.rebuild.iteration.wire_arenas
from flowcheck.control.checksum import checksums
from flowcheck.control.protocol import Record
from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job, ModelEntry
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.config.telemetry import Telemetry
from flowcheck.node.groups.members import RankSession
from flowcheck.node.groups.ranges import Resync
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.peers.catch_up import CatchUp
from flowcheck.node.ports.silence import Silent
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.chain import VersionChain
from flowcheck.rebuild.version.events import (
    Asked,
    Begun,
    CaughtUp,
    Closed,
    Event,
    FromPeers,
    Held,
    Lost,
    NotCaughtUp,
    Patched,
    Resumed,
    Waiting,
)
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.joining import Joining
from flowcheck.rebuild.version.peer_repair import Peers
from lab.synth import example_job

from ..fake_engine import FakeEngine, FakeSource, Packet, whole
from .group_scene import FakePort

NAMES = ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]


FIRST, SECOND = (0, 20), (24, 34)


def alike(value: float) -> dict[str, set[float]]:
    return {name: {value} for name in NAMES}


def small_job(*, buffers: bool = False, records: bool = True, **options: Any) -> Job:
    job = example_job(**{"count": [40, 20], "startup": False, "rebuild": False, "options": {"lr": 0.5}, **options})
    assert job.optimizer is not None
    job.optimizer.rounding = "torch-cuda-foreach"  # needs no look at this machine's processor; all values are exact
    job.step_values = ["lr"] if records else []
    if buffers:
        job.model.append(ModelEntry("mean", [3], kind="buffer"))
    return job


class Live:
    """A session, and the events that it returned. now: the time of its clock. folder: for its replicas. members: who is
    asked for ranges."""

    def __init__(self, patch: pytest.MonkeyPatch, job: Job | None = None, *, first: int = 0, streams: int = 1,
                 record_seconds: float = 10.0, folder: Path | None = None, slots: int = 2, threads: int = 0,
                 arenas: int = 4, patched: bool = False, members: Mapping[int, RankSession] | None = None,
                 peers: Peers | None = None, resync_mb: int = 32, job_start: str = "",
                 catching: CatchUp | None = None, telemetry: Telemetry | None = None) -> None:
        self.job, self.now = job or small_job(), 1000.0
        plan = plan_job(self.job, streams=streams, arenas=arenas)
        self.sources = [FakeSource(open=True) for _ in range(streams)]
        self.engine = FakeEngine(plan.engine, self.sources)
        patch.setattr(flowcheck.rebuild.iteration.wire_arenas, "Engine", lambda config: self.engine)
        self.closed: list[Closed] = []
        self.lost: list[str] = []
        self.waiting: list[tuple[int, str]] = []
        self.silent: list[str] = []
        self.withdrawn: list[bool] = []  # of each loss
        self.said: list[Begun | Held | Asked | Patched | Resumed | CaughtUp | NotCaughtUp] = []
        self.from_peers: list[FromPeers] = []
        self.files = 0
        self.port = FakePort()
        self.folder = folder
        settings = ReplicaSettings(resync="ranges", resync_mb=resync_mb)
        self.resync = None if members is None else Resync(settings, plan, lambda: members)
        self.session = LiveSession(
            plan, self.sources, Clock(first), slots=slots, threads=threads, record_seconds=record_seconds,
            port=self.port, now=lambda: self.now, patched=patched,
            resync=self.resync, peers=peers, job_start=job_start, catching=catching,
            telemetry=telemetry,
        )

    @property
    def follower(self) -> Follower:
        return self.session.follower

    @property
    def chain(self) -> VersionChain:
        return self.follower.chain

    @property
    def joining(self) -> Joining:
        """Of a session whose versions may have holes."""
        assert self.session.joining is not None
        return self.session.joining

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Closed():
                    self.closed.append(event)
                case Lost(why, withdrawn):
                    self.lost.append(why)
                    self.withdrawn.append(withdrawn)
                case Waiting(iteration, why):
                    self.waiting.append((iteration, why))
                case Silent(why):
                    self.silent.append(why)
                case FromPeers():
                    self.from_peers.append(event)
                case Begun() | Held() | Asked() | Patched() | Resumed() | CaughtUp() | NotCaughtUp():
                    self.said.append(event)

    def look(self) -> bool:
        """One poll; did it find anything to do?"""
        self.take(self.session.poll())
        return self.session.moved

    def finish(self) -> None:
        self.take(self.session.finish())

    def tensors(self, value: float) -> dict[str, torch.Tensor]:
        return {entry.name: torch.full(entry.shape, value) for entry in self.job.model}

    def sums(self, value: float) -> dict[str, str]:
        """What a trainer whose parameters all have this value says."""
        return {name: f"{found:016x}" for name, found in checksums(self.tensors(value)).items()}

    def state(self, iteration: int, value: float = 1.0, **more: Any) -> None:
        path = self.folder / f"{iteration}.replica" if self.folder else None
        self.take(self.session.state(iteration, self.tensors(value), more.get("state", {}), path=path))

    def begin(self, left: Path | None = None) -> None:
        """Without a state, by ranges. left: what an earlier process left."""
        self.take(self.session.begin(self.new_file, left))

    def new_file(self) -> Path | None:
        self.files += 1
        return self.folder / f"{self.files}.replica" if self.folder else None

    def traffic(self, *iterations: int) -> None:
        for t in iterations:
            self.engine.region(t).view(np.float32)[:] = 1.0
        for source in self.sources:
            source.packets += whole(*iterations)

    def part(self, iteration: int, cells: tuple[int, int], *, past: bool = False) -> None:
        """Some of an iteration has come, and was looked at."""
        self.engine.region(iteration).view(np.float32)[:] = 1.0
        self.sources[0].packets.append(Packet(iteration, iteration + past, cells))
        self.look()

    def record(self, iteration: int, rank: int = 0, buffers: Any = None, **fields: Any) -> str:
        """Why it is refused, or ""."""
        try:
            self.take(self.session.record(Record(iteration, **fields), buffers or {}, rank))
        except UserError as error:
            assert error.where == f"rank {rank}"
            return error.what
        return ""

    def poll(self) -> None:
        while self.look():
            pass

    def step(self, iteration: int, **fields: Any) -> Closed:
        """Traffic and record of an iteration, and what became of it."""
        self.traffic(iteration)
        assert self.record(iteration, **fields) == ""
        self.poll()
        assert self.closed[-1].iteration == iteration
        return self.closed[-1]

    def values(self) -> dict[str, set[float]]:
        assert self.session.replica is not None
        with self.session.replica.pinned() as version:
            return {name: set(tensor.flatten().tolist()) for name, tensor in version.parameters.items()}

    @property
    def ended(self) -> list[tuple[int, bool, list[str]]]:
        return [(one.iteration, one.published, [clause for clause, _ in one.why]) for one in self.closed]
