"""A follower whose engine and replica are made up, one signal at a time.

    at = Followed(patch, Policy.live(10.0), port(2, 3))
    at.start(2); at.record(2); at.look()                what is said in one poll: ["closed 2"]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowcheck.rebuild.iteration.wire_arenas
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.chain import VersionChain
from flowcheck.rebuild.version.events import Closed, Event, Lost, Skipped, Waiting
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.records import StepRecord
from lab.synth import example_job
from updater.errors import ReplicaError

from ..fake_engine import FakeEngine, FakeSource, whole

PARTLY = (0, 4)  # cells of an iteration that is not complete


class FakeReplica:
    """weights: step of the first ones; None: there are none. differs: what a comparison finds; None: not done yet.
    broken: iterations that cannot be applied. marks: of each version that was published, was it marked verified?"""

    def __init__(self, weights: int | None = 0) -> None:
        self.step, self.first_step = weights or 0, weights or 0
        self.ready, self._weights = False, weights
        self.differs: str | None = ""
        self.broken: set[int] = set()
        self.calls: list[str] = []
        self.marks: list[bool] = []
        self.said: list[str] = []
        self.unproven: list[tuple[str, ...]] = []
        self.matches: list[int] = []
        self.heard_of = 0

    def learn(self, first_weights: Any) -> None:
        self.ready = self._weights is not None

    def heard(self, step: int) -> None:
        self.heard_of = step

    def begin(self, iteration: int, values: Any) -> None:
        if iteration in self.broken:
            raise ReplicaError("no")
        self.calls.append(f"begin {iteration}")

    def apply(self, bucket: int, elements: Any) -> None:
        self.calls.append(f"bucket {bucket}")

    def finish(self, buffers: Any) -> None:
        self.calls.append("finish")

    def written(self, seconds: float) -> bool:
        return True

    def compare(self, sums: dict[str, int]) -> FakeReplica:
        return self

    whole = True

    def differing(self, seconds: float) -> str | None:
        return "layer0.weight" if self.differs is None and seconds < 0 else self.differs

    serves = True
    sound = False  # is a verified version left when the others are withdrawn?

    def withdraw(self) -> None:
        self.calls.append("withdraw")
        self.serves = self.serves and self.sound

    def publish(self, verified: bool, status: str, unproven: tuple[str, ...], matches: int) -> None:
        self.step += 1
        self.marks.append(verified)
        self.said.append(status)
        self.unproven.append(unproven)
        self.matches.append(matches)

    def discard(self) -> None:
        self.calls.append("discard")

    def close(self) -> None:
        self.calls.append("close")


class Followed:
    """A follower, and its events in order as `said`: "closed 2", "not 3", "lost", "skipped 4-9", "waiting 2". now:
    seconds of its clock. ns: that of the sources' time stamps. when: called with each event."""

    def __init__(
        self, patch: pytest.MonkeyPatch, policy: Policy, *sources: FakeSource, job: Job | None = None, arenas: int = 2,
        replica: FakeReplica | None = None, first: int = 0,
    ) -> None:
        self.job, self.now, self.ns = job or example_job(count=[24, 9], startup=False), 1000.0, 0
        if job is None and policy.trainers:
            self.job.step_values = ["lr"]
        plan = plan_job(self.job, streams=len(sources), arenas=arenas)
        self.engine = FakeEngine(plan.engine, sources)
        self.engine.begins_here = not policy.trainers
        patch.setattr(flowcheck.rebuild.iteration.wire_arenas, "Engine", lambda config: self.engine)
        self.replica = replica
        names = [f"source {i}" for i in range(len(sources))]
        self.arenas = WireArenas(plan, sources, names, sources_wait=policy.sources_wait)
        self.follower = Follower(
            plan, self.arenas, policy, replica, Clock(first), lambda: self.now, stamp=lambda: self.ns)  # type: ignore[arg-type]
        self.said: list[str] = []
        self.events: list[Event] = []
        self.when: Callable[[Event], object] = lambda event: None

    @property
    def chain(self) -> VersionChain:
        return self.follower.chain

    def take(self, events: Any) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Closed():
                    self.said.append(f"{'closed' if event.published else 'not'} {event.iteration}")
                case Lost():
                    self.said.append("lost")
                case Skipped(one, other, _):
                    self.said.append(f"skipped {one}-{other}")
                case Waiting(iteration, _):
                    self.said.append(f"waiting {iteration}")
            self.when(event)

    def look(self) -> list[str]:
        """What is said in one poll."""
        self.said.clear()
        self.take(self.follower.poll())
        return list(self.said)

    def start(self, iteration: int) -> FakeReplica:
        fresh = FakeReplica(self.follower.clock.before(iteration))
        fresh.ready = True
        self.follower.start(fresh, iteration)
        return fresh

    def record(self, *iterations: int, **fields: Any) -> None:
        for iteration in iterations:
            self.take(self.follower.keep_record(iteration, StepRecord(**fields), 0))


def port(*iterations: int) -> FakeSource:
    return FakeSource(whole(*iterations), open=True)
