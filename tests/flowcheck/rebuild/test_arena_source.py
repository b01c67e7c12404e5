"""A follower needs of its arenas what ArenaSource says, and nothing of a wire: here they come whole, as from memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flowcheck.job.clock import Clock
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.iteration.verdict import BucketEvidence, Evidence, StreamEvidence, judge
from flowcheck.rebuild.plan import JobPlan, plan_job
from flowcheck.rebuild.version.events import Closed, Event, Lost
from flowcheck.rebuild.version.follower import Follower
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica
from lab.synth import example_job

COUNTS = {"packets": 0, "placed": 0, "gaps": 0, "duplicates": 0}
CLEAN: dict[str, Any] = {
    "final": "", "unanchored": (), "disagreements": (), "recovered": (), "icrc_checked": True, "differences": (),
    "copies_disagreed": 0, "copies_first": "", "checksum": None, "refused": "", "another_run": "", "times": (),
    "stale": None, "from_peers": "",
}


class Memory:
    """Whole iterations, of one value each, as they are given. released: in order."""

    given_up, capacity, fills_itself, ended, blocked, consumed, fill, room = range(0), 2, False, False, False, 0, 0.0, 0

    def __init__(self, plan: JobPlan) -> None:
        self._plan, self._held = plan, dict[int, np.ndarray]()
        self.oldest, self.begun, self.released = 0, -1, list[int]()

    def give(self, iteration: int, value: float) -> None:
        self._held[iteration] = np.full(self._plan.engine.gradient_bytes // 4, value, np.float32).view(np.uint8)
        self.begun = iteration

    @property
    def open(self) -> range:
        return range(self.oldest, self.begun + 1)

    def poll(self) -> bool:
        return self.begun >= self.oldest

    def due(self) -> range:
        return self.open[:1]

    def is_whole(self, iteration: int) -> bool:
        return True

    complete = is_whole

    def close(self, due: range) -> None: ...

    def judge(self, iteration: int, *, record: bool, follows: bool) -> Judged:
        buckets = [
            BucketCoverage(place, self.region(iteration)[place.offset : place.offset + place.nbytes], place.elements,
                           ((0, place.elements),), {})
            for place in self._plan.iteration_buckets(iteration)
        ]
        evidence = Evidence(
            iteration=iteration, streams=(StreamEvidence("rank 0", "past"),), step_record_declared=True,
            step_record_present=record, previous_published=follows,
            buckets=tuple(BucketEvidence(one.place.index, one.covered, one.covered, {}) for one in buckets), **CLEAN,
        )
        return Judged(evidence, judge(evidence), buckets, [], counts=COUNTS)

    def refused(self) -> str:
        return ""

    def covered_places(self, iteration: int) -> np.ndarray:
        places = self._plan.iteration_buckets(iteration)
        there = iteration in self._held
        return np.array([there * (place.cells.stop - place.cells.start) for place in places], np.int64)

    def missing(self, iteration: int, first: int, end: int) -> np.ndarray:
        return np.empty((0, 2), np.int64)

    def region(self, iteration: int) -> np.ndarray:
        return self._held[iteration]

    def first_weights(self) -> Mapping[str, torch.Tensor] | str:
        return "nobody gives any"

    def release(self, due: range) -> None:
        self.released += due
        self.oldest = due.stop
        del self._held[due[0]]

    def forget(self) -> None: ...

    def finish(self) -> None: ...

    def stop(self) -> None: ...

    def take_highest(self) -> tuple[int, int]:
        return 0, 1

    def times(self, iteration: int) -> tuple[int, int] | None:
        return None


def test_versions_are_made_of_whatever_fills_the_arenas() -> None:
    """Each gradient is the number of its iteration, and the learning rate 0.5."""
    job = example_job(count=[40, 20], startup=False, rebuild=False, options={"lr": 0.5})
    assert job.optimizer is not None
    job.optimizer.rounding, job.step_values = "torch-cuda-foreach", ["lr"]
    plan = plan_job(job, arenas=2)
    source, events = Memory(plan), list[Event]()
    follower = Follower(plan, source, Policy.live(10.0), clock=Clock(0))
    replica = JobReplica(plan, None)
    replica.start({entry.name: torch.zeros(entry.shape) for entry in job.model}, {}, 0)
    follower.start(replica, 0)
    for t in range(4):
        source.give(t, float(t))
        events += follower.poll()
        assert source.released == list(range(t)), "it waits for its record"
        events += follower.keep_record(t, StepRecord(), 0)
        events += [*follower.poll(), *follower.settle()]
        with replica.pinned() as version:
            assert version.step == t + 1
            assert {value for one in version.parameters.values() for value in one.flatten().tolist()} == {
                -0.5 * sum(range(t + 1))}
    closed = [(one.iteration, one.published) for one in events if isinstance(one, Closed)]
    assert closed == [(t, True) for t in range(4)]
    assert source.released == [0, 1, 2, 3] and not any(isinstance(one, Lost) for one in events)
    follower.close()
