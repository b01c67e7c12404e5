"""A follower that goes on from what was lost, whose engine and replica are made up (followed.py)."""

from __future__ import annotations

from typing import Any

import pytest

from flowcheck.job.model import ModelEntry
from flowcheck.rebuild.version.joining import Joining
from flowcheck.rebuild.version.peer_repair import PeerRepair
from flowcheck.rebuild.version.policy import Policy
from flowcheck.rebuild.version.range_repair import RangeRepair
from lab.synth import example_job
from updater.errors import ReplicaError

from ..fake_engine import FakeSource
from .followed import FakeReplica, Followed

OPTIMIZED, OTHERS = 33, 5  # elements: of the optimizer's entries, of a constant and a buffer


class LeapingReplica(FakeReplica):
    """pinned: readers hold every slot."""

    def __init__(self, weights: int | None = 0) -> None:
        super().__init__(weights)
        self.ready, self.building, self.pinned = True, False, False

    def leap(self, step: int) -> None:
        if self.pinned:
            raise ReplicaError("no slot is free")
        self.calls.append(f"leap {step}")
        self.step = step

    def abandon(self) -> None:
        self.calls.append("abandon")

    def receive(self, step: int) -> str:
        self.calls.append(f"receive {step}")
        self.building = True
        return "a slot"

    def received(self, optimizer: Any, apart: Any, source: str) -> None:
        self.calls.append(f"received {source}")
        self.building = False

    def discard(self) -> None:
        super().discard()
        self.building = False

    def hold(self) -> None:
        self.step += 1
        self.calls.append("hold")


class Going(Followed):
    """patched: may versions be built with holes?"""

    def __init__(self, patch: pytest.MonkeyPatch, *sources: FakeSource, patched: bool = True, **options: Any) -> None:
        job = example_job(count=[24, 9], startup=False)
        job.step_values = ["lr"]
        job.model += [ModelEntry("fixed", [2], kind="constant"), ModelEntry("mean", [3], kind="buffer")]
        super().__init__(patch, Policy.live(10.0), *sources, job=job, **options)
        peers = PeerRepair(self.follower, self.arenas, None)
        self.ranges = RangeRepair(self.follower)
        self.joining = Joining(self.follower, self.ranges, peers)
        self.follower.repairs += [self.ranges, peers]
        if not patched:
            self.take(self.ranges.give_up("by state"))

    @property
    def next(self) -> int | None:
        return self.chain.next

    @property
    def elements(self) -> int:
        """That are stale."""
        return self.ranges.partial.elements

    def begin(self, step: int, *, serves: bool = True, **options: Any) -> tuple[LeapingReplica, list[Any]]:
        replica: Any = LeapingReplica(step)
        replica.serves = serves
        return replica, self.joining.begin_from(replica, **options)

    def record(self, *iterations: int, **fields: Any) -> None:
        for iteration in iterations:
            self.take(self.joining.record(iteration, 0))
            super().record(iteration, **fields)

    def state(self, iteration: int) -> LeapingReplica:
        replica = LeapingReplica(self.follower.clock.before(iteration))
        self.follower.start(replica, iteration)  # type: ignore[arg-type]
        return replica

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
