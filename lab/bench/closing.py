"""bench closing: what an iteration costs when it closes, on the thread that drains the rings.

    closing.complete       EvidenceCollector.collect of an iteration of 1 GB of gradients of which everything is there
    closing.lost           ... of which one packet was lost

Milliseconds per GB (10^9 bytes) of gradients; the limit is a constant, the 5 ms that are allowed. Each look is at an
iteration that has just been placed and that nobody has looked at before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from parser.machine import Engine

from flowcheck.rebuild.iteration.collector import EvidenceCollector
from flowcheck.rebuild.iteration.verdict import StreamEvidence
from lab.bench.feed import MTU, Feed, Window, drain, flows_for
from lab.bench.rows import Row, alternate

__all__ = ["run"]

LAPS = 16  # of 64 MB
ALLOWED_MS = 5.0
STREAMS = (StreamEvidence("bench", "past"),)


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Less than 256 MB of `ring_bytes` makes the model smaller."""
    closing = _Closing(Window(flows_for(ring_bytes)))
    seconds = alternate({"complete": closing.of(lost=False), "lost": closing.of(lost=True)}, rounds)
    gigabytes = 1e-9 * closing.plan.engine.gradient_bytes
    return [
        Row.of(
            f"closing.{name}", "ms/GB", [1e3 * s / gigabytes for s in taken], [ALLOWED_MS] * rounds,
            1.0 if name == "complete" else None,
        )
        for name, taken in seconds.items()
    ]


class _Closing:
    def __init__(self, window: Window) -> None:
        self.plan = window.plan(LAPS)
        self._window, self._feed, self._engine = window, Feed(window), Engine(self.plan.engine)
        self._collector = EvidenceCollector(self.plan, self._engine)

    def of(self, lost: bool) -> Callable[[], float]:
        """A contender: places the next iteration and looks at it."""
        missing = {"lost": MTU // 4} if lost else {}

        def measure() -> float:
            engine = self._engine
            for lap in range(LAPS):
                self._feed.fill([self._window.packets // 2 + 5] if lost and lap == LAPS // 2 else [])
                drain(self._feed, self._take)
            begin = time.perf_counter()
            judged = self._collector.collect(engine.oldest, STREAMS, record=False, follows=True, final="passed")
            seconds = time.perf_counter() - begin
            assert judged.verdict.complete is not lost, judged.verdict
            found: dict[str, int] = {}
            for bucket in judged.buckets:
                for cause, elements in bucket.missing.items():
                    found[cause] = found.get(cause, 0) + elements
            assert found == missing, found
            engine.retire()
            engine.forget()
            return seconds

        return measure

    def _take(self) -> bool:
        done, blocked = self._engine.run(0, self._feed.ring_address, self._feed.waiting)
        assert not blocked
        return done > 0
