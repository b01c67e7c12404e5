"""A bound on how many bytes a second are read, shared by all who read.

    pace = Pace(200e6)
    pace.piece                 bytes that are read at once, at most
    pace.take(count)           after so many have come: returns when the next may

Who has read waits until its bytes would have come at that rate, after those of all others. So over any time no more
than the rate times that and a piece of each reader are read, and nothing is saved up while nobody reads. A TCP sender
is held up by what is not read. Any thread; standard library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]

PIECE_SECONDS = 0.02  # what comes at once, at the rate
LEAST, MOST = 64 << 10, 4 << 20


class Pace:
    """rate: bytes a second. now, sleep: seconds."""

    def __init__(
        self, rate: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.rate, self.piece = rate, min(max(int(rate * PIECE_SECONDS), LEAST), MOST)
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._free = 0.0  # when all that was read would have come

    def take(self, count: int) -> None:
        now = self._now()
        with self._lock:
            self._free = max(self._free, now) + count / self.rate
            wait = self._free - now
        self._sleep(wait)
