"""On time or not: when an iteration came and what became of it, and for how long a node that is too slow can go on.

    times = Times(7, first=..., last=..., published=..., next=...)
    times.slack                          from its version to the first byte of the iteration after it
    times.stage(records=True)            what took longest after its last byte
    trend = Trend();  trend.add(times)
    trend.left(late, iterations)         how many more iterations until another finds no room

An iteration is late when its version is published after the next iteration's first byte has come. One that is late
costs nothing: iterations wait in arenas, and then packets in rings. If each is later than the one before, both are full
after a while, and then iterations are lost.

Pure. Times are nanoseconds of one clock, spans are nanoseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

__all__ = ["Times", "Trend", "iterations_left"]

SAMPLES = 8  # iterations that a trend is made of
MOST = 1_000_000  # iterations ahead; further away is never


@dataclass(frozen=True)
class Times:
    """Of one iteration; None: it has not happened, or nobody saw it.

    first, last: its packets were captured. measured: the pass over the gradients of the iteration before had ended
    (telemetry). covered: all of it was there. record: its step record had come. applied: its version was written.
    published: it could be read. next: the first packet of a later iteration was captured."""

    iteration: int
    first: int | None = None
    last: int | None = None
    covered: int | None = None
    record: int | None = None
    applied: int | None = None
    published: int | None = None
    next: int | None = None
    measured: int | None = None

    @property
    def slack(self) -> int | None:
        """Negative: its version was late."""
        return None if self.published is None or self.next is None else self.next - self.published

    def stage(self, *, records: bool) -> str:
        """What took longest between its last byte and its version, or what it waits for if it has none:
        "telemetry", "placing", "record", "update" or "checksums". records: it has no version without its step
        record."""
        longest, stage, begin = -1, "placing", self.last or 0
        for name, end in (("telemetry", self.measured), ("placing", self.covered), ("record", self.record),
                          ("update", self.applied), ("checksums", self.published)):
            if end is None and name != "telemetry" and (name != "record" or records):
                return name
            if end is not None and end - begin > longest:
                longest, stage = end - begin, name
            begin = max(begin, end or 0)
        return stage


def iterations_left(late: float, growth: float, period: float, iterations: float) -> int | None:
    """After how many more another one finds no room: each comes `period` after the one before, and its version
    is later by `growth` than that of the one before, which was late by `late`. There is room for `iterations` that are
    not finished, besides the one that the version is made of. None: never, as it looks now."""
    if growth <= 0 or period <= 0:
        return None
    left = (iterations * period - late) / growth
    return ceil(max(left, 0)) if left <= MOST else None


class Trend:
    """Of the last SAMPLES iterations with a version. One that follows another after a pause of the job counts as well:
    the trend is then what it was on average."""

    def __init__(self) -> None:
        self._late: deque[tuple[int, int, int]] = deque(maxlen=SAMPLES)  # (iteration, first byte, how late)

    def add(self, times: Times) -> None:
        if times.slack is not None and times.first is not None:
            self._late.append((times.iteration, times.first, -times.slack))

    def forget(self) -> None:
        """Another chain of versions begins."""
        self._late.clear()

    @property
    def period(self) -> float:
        """From an iteration to the next; 0: not known."""
        return self._each(1)

    @property
    def growth(self) -> float:
        """By how much an iteration is later than the one before; 0: not known."""
        return self._each(2)

    def left(self, late: float, iterations: float) -> int | None:
        """See `iterations_left`."""
        return iterations_left(late, self.growth, self.period, iterations)

    def _each(self, what: int) -> float:
        if len(self._late) < 2:
            return 0.0
        first, last = self._late[0], self._late[-1]
        return (last[what] - first[what]) / (last[0] - first[0])
