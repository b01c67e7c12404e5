"""The second half of a rehearsal: jobs followed as a node follows them, without trainers and without a replica.

    followed = Followed(plan)
    follow(config, planned, sources, [followed, ...], seconds, look)

The packets take a node's own way: placing threads for all jobs, engine, arenas, evidence, verdict (groups/session.py).
What a verdict says of the gradients is what is kept; step records do not come, and are not missed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from dataplane.live import LiveSource
from flowcheck.errors import EnvironmentProblem
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.groups.session import LiveSession
from flowcheck.node.ports.captures import PlannedCapture
from flowcheck.node.ports.port import Port
from flowcheck.rebuild.iteration.evidence import edges_with
from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS
from flowcheck.rebuild.iteration.verdict import ABOUT_GRADIENTS
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Closed, Event, GivenUp, Timed

__all__ = ["Followed", "follow"]

MOST_REASONS = 64
GRADIENTS = frozenset(clause.value for clause in ABOUT_GRADIENTS)


@dataclass
class Followed:
    """What became of a job's iterations. Of each that has closed: is it complete? The one that was joined in its middle
    is not among them. why: reasons of those that are not, with their number. left: from an iteration's last element to
    the first packet of the next, nanoseconds. periods: from its first packet to that. ring: the most packets that
    waited, and how many a ring holds. arenas: likewise. seen, placed: connections of which packets came, and of which
    some found a place."""

    plan: JobPlan
    complete: list[bool] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    left: list[int] = field(default_factory=list)
    periods: list[int] = field(default_factory=list)
    ring: tuple[int, int] = (0, 1)
    arenas: tuple[int, int] = (0, 0)
    given_up: int = 0
    seen: list[int] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    _joined: int | None = None

    def take(self, event: Event) -> None:
        match event:
            case Closed():
                self._closed(event)
            case Timed(times, rings, arenas):
                if rings[0] * self.ring[1] > self.ring[0] * rings[1]:
                    self.ring = rings
                self.arenas = max(self.arenas, arenas)
                if times.next is not None and times.first is not None and times.iteration != self._joined:
                    self.periods.append(times.next - times.first)
                    if times.covered is not None:
                        self.left.append(times.next - times.covered)
            case GivenUp():
                self.given_up += 1

    def _closed(self, closed: Closed) -> None:
        if self._joined is None:
            self._joined = closed.iteration
            return
        failing = [(clause, reason) for clause, reason in closed.why if clause in GRADIENTS]
        self.complete.append(not failing)
        self.missing.update(closed.missing)
        for _, reason in failing[:1]:
            if reason in self.why or len(self.why) < MOST_REASONS:
                self.why[reason] += 1


def follow(
    config: NodeConfig, planned: Sequence[PlannedCapture], sources: Sequence[LiveSource], followed: Iterable[Followed],
    seconds: float, look: Callable[[], None],
) -> None:
    port = Port(planned, sources)
    with ExitStack() as undo:
        undo.callback(port.placers.stop)
        sessions: list[tuple[LiveSession, Followed]] = []
        for one in followed:
            session = LiveSession(
                one.plan, port.queues, slots=config.replica.slots, threads=0, record_seconds=config.record_seconds,
                port=port,
            )
            undo.callback(session.close)
            sessions.append((session, one))
        try:
            port.placers.start()
        except OSError as error:
            raise EnvironmentProblem(
                f"a placing thread cannot be pinned: {error.strerror}", where="capture.place_cores",
                remedy="cores that this process may use, or none",
            ) from None
        for session, _ in sessions:
            session.place_in_threads(port.placers)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            moved = False
            for session, one in sessions:
                for event in session.poll():
                    one.take(event)
                moved |= session.moved
            look()
            if not moved:
                time.sleep(IDLE_SECONDS)
        for session, one in sessions:
            session.leave_threads()
            one.seen, one.placed = (edges_with(one.plan, session.engine, what) for what in ("seen", "packets"))
