"""Has the mirror moved? Then what it brought before never comes again, and waiting for it has no end.

    movement = Movement(flows, engine, scheduler, sources, names)
    movement.closed(event)                   each iteration that has closed
    for event in movement.look(): ...        again and again: Moved

A connection that has brought packets may bring more, so iterations wait for it. That is right for a port that is down
for a while. It is wrong where the mirror was configured again, and all comes from other connections, by another
interface or into another queue. Two signs tell that from a loss:

    late        LATE iterations in a row lacked nothing, and closed only because their arenas were needed
    standing    for SECONDS nothing could close: one stream waits for an arena, or would but for iterations that are
                given up meanwhile (rebuild/version/overload.py), and another one's ring is empty

Ranks of a job are never that far apart, and a thread that is slow has packets in its ring. Whoever hears Moved joins
the job again, so that nothing waits for the old place any more. Somebody has to find the cable: so it says which
connections have stopped, and which host is an end of all of them. The group's thread.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from parser.machine import Engine

from flowcheck.rebuild.iteration.scheduler import ArenaScheduler, Source
from flowcheck.rebuild.version.events import Closed, Event
from parser.engine_config import FlowSpec

__all__ = ["LATE", "SECONDS", "Moved", "Movement"]

LATE = 8
SECONDS = 5.0
NAMED = 4  # connections that are said
LOOK_SECONDS = 0.1  # between two looks at where streams stand


@dataclass(frozen=True)
class Moved(Event):
    """The job has to be joined again."""

    why: str


class Movement:
    """flows: those of the engine. names: of the streams, for people. now: seconds of a clock that never goes back."""

    def __init__(
        self, flows: Sequence[FlowSpec], engine: Engine, scheduler: ArenaScheduler, sources: Sequence[Source],
        names: Sequence[str], now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flows, self._brought = flows, np.zeros(0, np.int64)
        self._engine, self._scheduler, self._sources, self._names = engine, scheduler, sources, names
        self._now, self._looked = now, 0.0
        self._late = 0  # in a row
        self._stands = (-1, list[str](), 0.0)  # the oldest iteration, who holds it up, and since when

    def closed(self, event: Closed) -> None:
        states = {stream.state for stream in event.judged.evidence.streams} if event.judged is not None else set()
        self._late = self._late + 1 if "lost" in states and not event.missing else 0
        if self._late == 1:
            self._brought = self._packets()

    def look(self) -> Iterator[Event]:
        if (now := self._now()) - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self._late >= LATE:
            self._late = 0
            yield Moved(f"{LATE} iterations in a row lacked nothing, and waited for connections that have brought"
                        f" packets before and bring none any more{self._stopped()}")
        oldest, behind = self._engine.oldest, self._behind()
        if not behind or self._stands[:2] != (oldest, behind):
            self._stands = oldest, behind, now
        elif now - self._stands[2] >= SECONDS:
            self._stands = oldest, behind, now
            yield Moved(f"nothing has come from {' and '.join(behind)} for {SECONDS:g} s, and all else waits for it")

    def _packets(self) -> np.ndarray:
        """Of each flow, so far."""
        return self._engine.flows()["packets"].sum(axis=0)

    def _stopped(self) -> str:
        """Who brings nothing any more."""
        still = np.flatnonzero((self._brought > 0) & (self._packets() == self._brought)).tolist()
        ends = list(dict.fromkeys((self._flows[i].src_addr, self._flows[i].dst_addr) for i in still))
        if not ends:
            return ""
        said = ", ".join(f"{_text(src)} to {_text(dst)}" for src, dst in ends[:NAMED])
        more = f" and {len(ends) - NAMED} more" if len(ends) > NAMED else ""
        common = set.intersection(*map(set, ends))
        port = f"; {_text(common.pop())} is an end of each: its port?" if len(common) == 1 else ""
        return f" ({said}{more}{port})"

    def _behind(self) -> list[str]:
        """Streams that hold up all others, and have nothing to read."""
        scheduler, oldest = self._scheduler, self._engine.oldest
        if not scheduler.waits or scheduler.due():
            return []
        found = [i for i in range(len(self._names)) if scheduler.state(i, oldest) == "behind"]
        if any(self._engine.waiting(self._sources[i].ring_address)[0] for i in found):
            return []  # its packets are here: the thread that places them is late
        return [self._names[i] for i in found]


def _text(address: bytes) -> str:
    return str(ipaddress.ip_address(address))
