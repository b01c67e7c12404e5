"""Does the mirror bring what the job sends? Said within seconds, by port; not when 256 iterations have passed.

The clock is the trainers': a record says that an iteration is over, so its gradients have been on the wire. If no
packet of it, or of a later one, has come SECONDS after that, the mirror is silent, and this says which of two it is:
nothing arrives at the port, or what arrives is not of the job. A job that pauses has no records and is not suspected;
a node that is still busy with earlier iterations is not silent, either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parser.machine import Engine

from flowcheck.diagnose.remedies import remedy_of
from flowcheck.job.clock import Clock
from flowcheck.node.ports.counts import grown
from flowcheck.rebuild.iteration.evidence import edges_with, packets_by_outcome
from flowcheck.rebuild.iteration.scheduler import Source
from flowcheck.rebuild.iteration.wording import flow_name
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Event

__all__ = ["SECONDS", "Arrivals", "Silence", "Silent"]

SECONDS = 3.0  # between a record and packets of its iteration, which a mirror delivers within microseconds
LOOK_SECONDS = 0.1  # between two looks at the counters
NAMED = 4  # connections that one sentence names


@dataclass(frozen=True)
class Silent(Event):
    """The mirror brings nothing of the job; "": it does again."""

    why: str


class Arrivals:
    """What is known of a node's ports. name: as the settings call the devices. arrived: packets so far. drops: those
    that the node itself has lost, by cause (drops.py), without causes that did not occur. queues, placers: what groups
    read, and who places it, of one that brings anything (port.py). This one has none."""

    name = ""
    queues: Sequence[Source] = ()
    placers: Any = None

    @property
    def arrived(self) -> int:
        return 0

    @property
    def drops(self) -> dict[str, int]:
        return {}

    @property
    def unclaimed(self) -> dict[str, int]:
        """Packets of no job that the node follows, by outcome."""
        return {}

    def claimed(self, capture: int) -> int:
        """Packets of a capture that are of jobs that are followed, or were."""
        return 0

    def empty(self) -> list[int | None]:
        """Of each queue how often nothing was left in it; None: nobody takes anything from it any more."""
        return []

    def emptied(self, before: Sequence[int | None]) -> bool:
        """Is all that had arrived when `empty` said this in the rings? Twice: the first look may have begun earlier."""
        return all(was is None or now is None or now >= was + 2 for was, now in zip(before, self.empty(), strict=True))

    def stream_names(self, streams: int) -> list[str]:
        """What people call the streams that come from here."""
        return [f"queue {i}" for i in range(streams)]

    def explain(self, drops: Mapping[str, int]) -> str:
        """In words."""
        return ", ".join(f"{cause} {count}" for cause, count in drops.items())


class Silence:
    """clock: the trainer's. now: seconds of a clock that never goes back."""

    def __init__(
        self, plan: JobPlan, engine: Engine, port: Arrivals, clock: Clock, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan, self._engine, self._port, self._clock, self._now = plan, engine, port, clock, now
        self._over = -1  # the newest iteration that a record says is over
        self._last_seen = engine.begun  # the newest iteration of which a packet has come
        self._since = 0.0  # when a record was first ahead of the packets
        self._base = (0, dict[str, int]())  # what had arrived by then, and what had become of it
        self._ahead = self._said = False
        self._looked = 0.0

    def over(self, iteration: int) -> None:
        """A record says that an iteration is over."""
        self._over = max(self._over, iteration)
        if not self._ahead and self._over > self._engine.begun:
            self._ahead, self._last_seen = True, self._engine.begun
            self._since, self._base = self._now(), self._counts()

    def look(self, busy: bool) -> list[Event]:
        """Is there anything to say? busy: iterations that have come wait for something else than packets."""
        if not self._ahead or (now := self._now()) - self._looked < LOOK_SECONDS:
            return []
        self._looked, last_seen, said = now, self._engine.begun, self._said
        if last_seen >= self._over or last_seen > self._last_seen or "placed" in self._came()[1] or busy:
            self._ahead, self._last_seen, self._said = False, last_seen, False
            self.over(self._over)  # further ahead than what has come: from now on
            return [Silent("")] if said else []
        if said or now - self._since < SECONDS:
            return []
        self._said = True
        return [Silent(self._why(now - self._since))]

    def _counts(self) -> tuple[int, dict[str, int]]:
        became = packets_by_outcome(self._plan, self._engine)
        for outcome, packets in self._port.unclaimed.items():
            became[outcome] = became.get(outcome, 0) + packets
        return self._port.arrived, became

    def _came(self) -> tuple[int, dict[str, int]]:
        """What has arrived since a record was ahead, and what became of it."""
        (arrived, became), (before, already) = self._counts(), self._base
        return arrived - before, grown(already, became)

    def _why(self, seconds: float) -> str:
        arrived, came = self._came()
        over = f"iteration {self._clock.number(self._over)} is over"
        if not arrived and not came:
            return (
                f"no packet has come to {self._port.name or 'the port'} for {seconds:.0f} s, and {over}: is the mirror"
                " session on, and does it end at this port? (flowcheck switch verify)"
            )
        said = ", ".join(f"{cause} {count}" for cause, count in sorted(came.items()))
        text = f"nothing that {self._port.name or 'the port'} brings is of iterations that are over, and {over};"
        text += f" {max(arrived, sum(came.values()))} packets in {seconds:.0f} s{f': {said}' if said else ''}"
        heard, job = edges_with(self._plan, self._engine, "seen"), self._plan.job
        silent = [flow_name(job, edge) for edge in range(len(job.flows)) if edge not in heard]
        if silent:
            text += f"; no packet ever of {'; '.join(silent[:NAMED])}"
            text += f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
        remedy = remedy_of(came) or self._entry(came)
        return f"{text}. {remedy}" if remedy else text

    def _entry(self, came: Mapping[str, int]) -> str:
        """What a connection that found no place in the job's traffic may lack."""
        if "unanchored" not in came or self._plan.job.communicator.protocol != "simple":
            return ""
        return (
            "SIMPLE finds its place by clear-to-sends, which go the other way (unanchored: packets that have none):"
            " mirror both directions of each port"
        )
