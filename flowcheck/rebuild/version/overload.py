"""When iterations have to be lost, whole ones are: from a boundary on packets are counted and not placed.

    overload = Overload(engine, scheduler)
    overload.pressed                         room is running out: the caller says that the node is behind
    for event in overload.look(): ...        at every look at the rings: GivenUp, TakenUp

A node that is too slow for its traffic has all its arenas taken, and then its rings fill. Packets that are dropped
there would be of whatever iteration comes by. So shortly before that the iterations of which nothing has come yet are
given up (parser.machine.Engine.give_up); those that have begun stay whole. When all of them have closed and the rings
are empty again, placing begins again with the next boundary. What was given up is not published, cause `overload`; a
state is asked for then, as after any loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from parser.machine import Engine

from flowcheck.rebuild.iteration.scheduler import ArenaScheduler
from flowcheck.rebuild.version.events import Event, GivenUp, TakenUp

__all__ = ["EMPTY", "FULL", "LAST", "Overload", "is_over", "must_give_up"]

FULL = 3 / 4  # of a ring, while its packets wait for an arena
LAST = 15 / 16  # of a ring from which packets are taken: a thread that was away for a moment may empty it again
EMPTY = 1 / 8


def must_give_up(fill: float, waits: bool) -> bool:
    """fill: part of the fullest ring. waits: for an arena."""
    return fill >= (FULL if waits else LAST)


def is_over(fill: float, backlog: int) -> bool:
    """backlog: iterations that are not done, besides the one that is arriving."""
    return fill <= EMPTY and backlog <= 0


class Overload:
    """packets: that were counted and not placed, so far. One thread."""

    def __init__(self, engine: Engine, scheduler: ArenaScheduler) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._first = -1  # of those given up now; -1: none is
        self._before = 0  # packets, when they were

    @property
    def packets(self) -> int:
        return sum(self._engine.outcomes(stream)["overload"][0] for stream in range(self._engine.config.streams))

    @property
    def pressed(self) -> bool:
        """Will iterations be given up at the next look? Not before those given up last have closed."""
        engine, scheduler = self._engine, self._scheduler
        return bool(
            self._first < 0 and engine.begun >= 0 and engine.oldest >= engine.given_up.stop
            and must_give_up(scheduler.fill, scheduler.blocked)
        )

    def look(self, busy: bool = False) -> Iterator[Event]:
        """busy: a version is being made."""
        engine, scheduler = self._engine, self._scheduler
        if self.pressed:
            self._before, waits = self.packets, scheduler.blocked
            self._first = engine.give_up()
            yield GivenUp(self._first, scheduler.fullest, waits)
        elif self._first >= 0 and is_over(scheduler.fill, engine.begun - engine.oldest + busy):
            first, self._first = self._first, -1
            yield TakenUp(first, engine.take_up() - 1, self.packets - self._before)
