"""Which steps have checksums of the whole state: as the script says, or as often as their cost allows.

    cadence = Cadence(every, say)               every: a number is obeyed, 0: never; None: by cost
    cadence.due(step)                           has this one?
    cadence.over(now)                           a boundary is over, which began and ended without them; or with:
    cadence.over(now, seconds)                  so much of it was theirs
    cadence.every                               as it is now

By cost: every USUAL steps, if the checksums of one are at most SHARE of the time of these steps; otherwise that number
is doubled until they are. So what one rank sends at its longer interval all ranks send, whatever each has measured. The
training thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

__all__ = ["SHARE", "USUAL", "Cadence"]

USUAL = 100
SHARE = 0.005  # of a job's time, at most
MOST = USUAL << 16
STEPS = 32  # whose time is remembered


class Cadence:
    """every: steps from one with checksums to the next; 0: none has any."""

    def __init__(self, every: int | None, say: Callable[[str], None]) -> None:
        self.every = USUAL if every is None else every
        self._by_cost, self._say = every is None, say
        self._before: float | None = None  # when the last boundary was over
        self._steps: deque[float] = deque(maxlen=STEPS)  # seconds, of those without checksums
        self._cost: float | None = None  # the least that was measured

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def over(self, now: float, seconds: float | None = None) -> None:
        """now: seconds of a clock that never goes back."""
        before, self._before = self._before, now
        if seconds is None:
            self._steps += [now - before] if before is not None else []
        elif self._by_cost and self._steps:
            self._cost = seconds if self._cost is None else min(self._cost, seconds)
            self._fit(self._cost, median(self._steps))

    def _fit(self, cost: float, step: float) -> None:
        every = USUAL
        while cost > SHARE * step * every and every < MOST:
            every *= 2
        if every != self.every:
            self.every = every
            self._say(f"checksums every {every} steps: one that has them takes {cost * 1e3:.3g} ms longer, and a step"
                      f" {step * 1e3:.3g} ms (checksum_every=K: every K steps, whatever it costs)")
