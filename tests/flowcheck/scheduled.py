"""The scheduler on scripted captures, and what it did with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flowcheck.rebuild.scheduler import Streams

from .fake_engine import FakeEngine, FakeSource, Packet


class Scheduled:
    """Streams of a scripted engine, and what came of them. full, hold: the answers, for all iterations or by iteration.
    asked: (question, iteration) in order. closed: iteration -> states of the streams when it closed."""

    def __init__(
        self, *sources: FakeSource, arenas: int = 2, full: bool | Callable[[int], bool] = True,
        hold: Callable[[int], bool] | None = None, last: int = 10**9,
    ) -> None:
        self.engine = FakeEngine(None, sources, arenas=arenas)
        self.engine.begins_here = True
        self.full, self.hold, self.last = full, hold, last
        self.asked: list[tuple[str, int]] = []
        self.closed: dict[int, list[str]] = {}
        self.skipped: list[tuple[int, int]] = []
        self.progress: list[int] = []
        more = {"hold": self._hold} if hold else {}
        self.streams = Streams(self.engine, sources, self._full, self._skipped, **more)

    def _full(self, iteration: int) -> bool:
        self.asked.append(("full", iteration))
        return self.full(iteration) if callable(self.full) else self.full

    def _hold(self, iteration: int) -> bool:
        self.asked.append(("hold", iteration))
        assert self.hold is not None
        return self.hold(iteration)

    def _skipped(self, first: int, last: int) -> None:
        self.skipped.append((first, last))

    def close(self, iteration: int) -> bool:
        assert iteration == self.engine.oldest and iteration not in self.closed
        self.closed[iteration] = [self.streams.state(i, iteration) for i in range(len(self.engine.sources))]
        return iteration < self.last

    def look(self) -> list[int]:
        """One look at the rings; the iterations that closed."""
        before = len(self.closed)
        self.streams.poll()
        self.streams.advance(self.close)
        return list(self.closed)[before:]

    def run(self) -> Scheduled:
        self.streams.run(self.close, self.progress.append)
        return self


def live(packets: list[Packet]) -> FakeSource:
    return FakeSource(packets, open=True)


def at(ns: int, *packets: Packet) -> FakeSource:
    """A capture whose packets are one nanosecond apart."""
    return FakeSource([dataclasses.replace(packet, ns=ns + i) for i, packet in enumerate(packets)])
