"""What a node looks at besides what its mirror brings: is it silent, has it moved, is there too much of it?

    mirror = Mirror(arenas, sources, port, clock, names)
    mirror.over(iteration)              a record says that an iteration is over
    mirror.closed(event)                an iteration has closed
    for event in mirror.look(busy): ...     at every look at the rings

Of one session, on its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from flowcheck.job.clock import Clock
from flowcheck.node.groups.move_detector import Movement
from flowcheck.node.ports.silence import Arrivals, Silence
from flowcheck.rebuild.iteration.scheduler import Source
from flowcheck.rebuild.iteration.wire_arenas import WireArenas
from flowcheck.rebuild.version.events import Closed, Event
from flowcheck.rebuild.version.overload import Overload

__all__ = ["Mirror"]


class Mirror:
    """arenas: which the mirror fills, from `sources`, the streams of `port` that people call `names`. clock: the
    trainer's. now: seconds of a clock that never goes back."""

    def __init__(
        self, arenas: WireArenas, sources: Sequence[Source], port: Arrivals, clock: Clock, names: Sequence[str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arenas = arenas
        plan, engine, scheduler = arenas.plan, arenas.engine, arenas.scheduler
        self._silence = Silence(plan, engine, port, clock, now)
        self.overload = Overload(engine, scheduler)
        self._movement = Movement(plan.engine.flows, engine, scheduler, sources, names, now)
        for arena in range(plan.engine.arenas):  # now, and not while packets wait: the first touch takes long
            engine.region(arena)[:] = 0

    def over(self, iteration: int) -> None:
        self._silence.over(iteration)

    def closed(self, event: Closed) -> None:
        self._movement.closed(event)

    def look(self, busy: bool) -> Iterator[Event]:
        """busy: a version is being made."""
        yield from self.overload.look(busy=busy)
        yield from self._movement.look()
        yield from self._silence.look(self.arenas.blocked)
