"""A live session whose updates take as long as a test says: packets come by a clock, into a ring of a few of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowcheck.rebuild.iteration.wire_arenas
from flowcheck.job.clock import Clock
from flowcheck.node.groups.session import LiveSession
from flowcheck.rebuild.plan import plan_job
from flowcheck.rebuild.version.events import Behind, Closed, Event, GivenUp, Lost, OnTime, TakenUp, Timed
from flowcheck.rebuild.version.records import StepRecord
from lab.synth import example_job

from ..fake_engine import FakeEngine, FakeSource, Packet

TICK = 1_000_000  # nanoseconds
PACKETS = 8  # of an iteration


class SlowReplica:
    """work(): nanoseconds that a version takes from its begin on. waits: for workers, at a version that is not done."""

    def __init__(self, step: int, now: Callable[[], int], work: Callable[[], int]) -> None:
        self.step = self.first_step = step
        self.ready = True
        self._now, self._work, self._done = now, work, 0

    def heard(self, step: int) -> None: ...

    def begin(self, iteration: int, values: Any) -> None:
        self._done = self._now() + self._work()

    def apply(self, bucket: int, elements: Any) -> None: ...

    def finish(self, buffers: Any) -> None: ...

    def written(self, seconds: float) -> bool:
        return self._now() >= self._done or seconds < 0

    serves = True

    def publish(self, verified: bool, status: str, unproven: tuple[str, ...], matches: int) -> None:
        self.step += 1

    def discard(self) -> None: ...

    def close(self) -> None: ...


class Loaded:
    """work: ticks that an update takes. dropped: packets that found no room in the ring. events: all that was said;
    None where versions began anew."""

    def __init__(self, patch: pytest.MonkeyPatch, *, arenas: int = 3, room: int = 64, work: int = 0) -> None:
        job = example_job(count=[24, 9], startup=False)
        job.step_values = ["lr"]
        plan = plan_job(job, arenas=arenas)
        self.source = FakeSource(open=True)
        self.source.room, self.room = room, room
        self.engine = FakeEngine(plan.engine, [self.source])
        self.engine.begins_here = True
        patch.setattr(flowcheck.rebuild.iteration.wire_arenas, "Engine", lambda config: self.engine)
        self.now, self.work, self.dropped = 10**18, work, 0
        self.session = LiveSession(
            plan, [self.source], Clock(0), slots=3, threads=0, record_seconds=10.0, now=lambda: self.now / 1e9,
            stamp=lambda: self.now,
        )
        self.iteration = 0  # that comes next
        self.events: list[Event | None] = []
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """A state before this iteration is here."""
        fresh = SlowReplica(iteration, lambda: self.now, lambda: self.work * TICK)
        self.session.follower.start(fresh, iteration)  # type: ignore[arg-type]
        self.events.append(None)

    def tick(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.now += TICK
            self.events += self.session.poll()

    def come(self, iterations: int, period: int) -> None:
        """They come one after the other, each in `period` ticks, and its record with its last packet."""
        for _ in range(iterations):
            t, cells, sent = self.iteration, len(self.engine.cells(self.iteration)), 0
            for turn in range(1, period + 1):
                while sent < PACKETS * turn // period:
                    place = cells * sent // PACKETS, cells * (sent + 1) // PACKETS
                    sent += 1
                    if len(self.source.packets) >= self.room:
                        self.dropped += 1
                    else:
                        past = t + (sent == PACKETS)
                        self.source.packets.append(Packet(t, past, place, self.now))
                if turn == period:
                    self.events += self.session.follower.keep_record(t, StepRecord(), 0)
                self.tick()
            self.iteration += 1

    def said(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    def order(self) -> list[str]:
        """Events but for Timed, in order; iterations that closed as "+3" or "-3"."""
        out = []
        for event in self.events:
            match event:
                case Closed():
                    out.append(f"{'+' if event.published else '-'}{event.iteration}")
                case Behind() | OnTime() | GivenUp() | TakenUp() | Lost():
                    out.append(type(event).__name__)
        return out

    def check(self) -> None:
        """What holds whatever happens: nobody is late or gives up who has not said so before; iterations are lost as a
        whole or not at all; each one that has closed is timed once, in order."""
        behind = False
        for event in self.events:
            match event:
                case None:
                    behind = False
                case Behind():
                    behind = True
                case OnTime():
                    behind = False
                case Timed(times=times) if times.slack is not None and times.slack < 0:
                    assert behind, f"iteration {times.iteration} was late by {-times.slack} ns and nobody was told"
        whole = sum(place.elements for place in self.session.plan.iteration_buckets(1))
        for closed in self.said(Closed):
            elements = whole if closed.iteration else sum(
                place.elements for place in self.session.plan.iteration_buckets(0))
            assert closed.missing in ({}, {"overload": elements}), closed
        timed = [event.times.iteration for event in self.said(Timed)]
        assert timed == list(range(len(timed)))
