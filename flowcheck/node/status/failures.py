"""What failures of a job cost, as far as a node can know: when one was noticed, when it was over, what was repeated.

    ledger = Ledger(say)
    ledger.over(number)                a rank says that an iteration is over
    ledger.left(rank)                  a connection ended; ledger.back(rank): the same process has come again
    ledger.bye(rank)                   it closes its attachment; after rank 0's nothing that comes is a failure
    ledger.restarted(run_id)           a rank came as another process: the job was started again
    ledger.attached(first)             that start has said its job, and with which iteration it begins

A connection that breaks and comes back is a fault of the network, and no failure of the job. A job is taken to have
failed when it is started again although it was not closed. It was noticed when the first rank went. Versions are
fetched before a trainer attaches, so the state was back when the new start was attached; the job went on when its first
iteration was over. What it repeats are the iterations from the one it begins with to the last that was over before.
What was lost before a trainer's process ended, say while a collective waited for a rank that was gone, no node can see.

The group's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Ledger"]


@dataclass
class _Failure:
    """detected, restored: seconds since 1970. last: iteration that was over before it. first: that it goes on with."""

    detected: float
    last: int
    restored: float = 0.0
    first: int = 0


class Ledger:
    """say: events. clock: seconds since 1970."""

    def __init__(self, say: Callable[..., None], clock: Callable[[], float] = time.time) -> None:
        self._say, self._clock = say, clock
        self._run: str | None = None
        self._last: int | None = None  # newest iteration of this start that is over
        self._gone: dict[int, float] = {}  # ranks without a connection, and since when
        self._byes: set[int] = set()
        self._failure: _Failure | None = None

    def over(self, number: int) -> None:
        failure = self._failure
        if failure is not None and failure.restored:
            self._failure = None
            now = self._clock()
            self._say(
                "job_recovered", iteration=number, detected=round(failure.detected, 3),
                restored=round(failure.restored, 3), resumed=round(now, 3),
                seconds=round(max(now - failure.detected, 0.0), 3),
                repeated=max(failure.last + 1 - failure.first, 0),
            )
        self._last = number if self._last is None else max(self._last, number)

    def left(self, rank: int) -> None:
        if rank in self._byes:
            return
        self._gone.setdefault(rank, self._clock())
        if self._last is not None:
            self._say("left", rank=rank, iteration=self._last)

    def back(self, rank: int) -> None:
        self._gone.pop(rank, None)

    def bye(self, rank: int) -> None:
        self._byes.add(rank)

    def restarted(self, run_id: str) -> None:
        """Another run is not this one again. One that fails before it has done anything is the same failure still."""
        if run_id != self._run:
            self._failure = None
        elif self._failure is not None:
            self._failure.restored = 0.0
        if run_id == self._run and self._last is not None and 0 not in self._byes:
            detected, last = min([self._clock(), *self._gone.values()]), self._last
            if self._failure is None:
                self._failure = _Failure(detected, last)
        self._run, self._last = run_id, None
        self._gone, self._byes = {}, set()

    def attached(self, first: int) -> None:
        if self._failure is not None and not self._failure.restored:
            self._failure.restored, self._failure.first = self._clock(), first
