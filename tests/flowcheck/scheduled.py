"""The scheduler on scripted captures, and what it did with them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from flowcheck.rebuild.iteration.scheduler import IDLE_SECONDS, ArenaScheduler

from .fake_engine import FakeEngine, FakeSource, Packet


class _Engine(FakeEngine):
    """An engine whose iterations have one cell, and a test says whether that is there."""

    def __init__(self, sources: Sequence[FakeSource], arenas: int, complete: Callable[[int], bool]) -> None:
        super().__init__(None, sources, arenas=arenas)
        self._said = complete

    def complete(self, iteration: int, cells: int) -> bool:
        return self._said(iteration)


class Scheduled:
    """The scheduler of a scripted engine, and what came of it.

    complete, hold: the answers, for all iterations or by iteration. when_closed: called then. asked: (question,
    iteration) in order. closed: iteration -> states of the streams when it closed. consumed: packets, after each look
    of a run.
    """

    def __init__(
        self, *sources: FakeSource, arenas: int = 2, complete: bool | Callable[[int], bool] = True,
        hold: Callable[[int], bool] | None = None, last: int = 10**9,
    ) -> None:
        self.engine = _Engine(sources, arenas, self._complete)
        self.engine.begins_here = True
        self.complete, self.hold, self.last = complete, hold, last
        self.asked: list[tuple[str, int]] = []
        self.closed: dict[int, list[str]] = {}
        self.skipped: list[tuple[int, int]] = []
        self.consumed: list[int] = []
        self.when_closed: Callable[[int], object] = lambda iteration: None
        self.scheduler = ArenaScheduler(self.engine, sources, (1, 1))

    def _complete(self, iteration: int) -> bool:
        self.asked.append(("complete", iteration))
        return self.complete(iteration) if callable(self.complete) else self.complete

    def _holds(self, iteration: int) -> bool:
        if self.hold is None:
            return False
        self.asked.append(("hold", iteration))
        return self.hold(iteration)

    def advance(self) -> bool:
        """Close what may close. False: the last one that was asked for has closed."""
        while (due := self.scheduler.due()) and not self._holds(due[0]):
            if len(due) > 1:
                self.skipped.append((due[0], due[-1]))
            else:
                self.close(due[0])
            self.scheduler.close(due)
            self.scheduler.retire(due)
            if self.closed and max(self.closed) >= self.last:
                return False
        return True

    def close(self, iteration: int) -> None:
        assert iteration == self.engine.oldest and iteration not in self.closed
        self.closed[iteration] = [self.scheduler.state(i, iteration) for i in range(len(self.engine.sources))]
        self.when_closed(iteration)

    def look(self) -> list[int]:
        """One look at the rings; the iterations that closed."""
        before = len(self.closed)
        self.scheduler.poll()
        self.advance()
        return list(self.closed)[before:]

    def run(self) -> Scheduled:
        """As captures: to the end of all, or until the last iteration that was asked for has closed."""
        self.scheduler = ArenaScheduler(self.engine, self.engine.sources, (1, 1), in_order=True)
        while not self.scheduler.ended:
            moved = self.scheduler.poll()
            self.consumed.append(self.scheduler.consumed)
            if not self.advance():
                return self
            if not moved:
                time.sleep(IDLE_SECONDS)
        self.engine.finish()
        for iteration in self.scheduler.open:
            self.close(iteration)
            self.scheduler.close(range(iteration, iteration + 1))
            self.scheduler.retire(range(iteration, iteration + 1))
            if iteration >= self.last:
                break
        return self


def live(packets: list[Packet]) -> FakeSource:
    return FakeSource(packets, open=True)


def at(ns: int, *packets: Packet) -> FakeSource:
    """A capture whose packets are one nanosecond apart."""
    return FakeSource([dataclasses.replace(packet, ns=ns + i) for i, packet in enumerate(packets)])
