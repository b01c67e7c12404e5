"""Which place of a ring is written next: what is of least use in it goes first.

Within one thread. A place whose writing failed is tried again next, because what was in it is gone, and after some
failures in a row not before all others: one bad place costs little, and a disk that is full few entries.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Places"]

RETRIES = 2
_NONE = -1


class Places:
    """count places, all empty."""

    def __init__(self, count: int) -> None:
        self._numbers = np.full(count, _NONE)
        self._tickets = np.full(count, 0)  # of what was written there, or failed too often
        self._failed = np.full(count, 0)  # times in a row
        self._busy = np.zeros(count, bool)

    @property
    def entries(self) -> list[int]:
        """Numbers of whole entries, in order."""
        return sorted(int(number) for number in self._numbers if number != _NONE)

    @property
    def last(self) -> int:
        """The highest ticket."""
        return int(self._tickets.max(initial=0))

    def holds(self, place: int, number: int, ticket: int) -> None:
        """It has a whole entry. What is elsewhere with this number is of no use."""
        self._numbers[self._numbers == number] = _NONE
        self._numbers[place], self._tickets[place] = number, ticket
        self._failed[place], self._busy[place] = 0, False

    def failed(self, place: int, ticket: int) -> None:
        self._failed[place] += 1
        if self._failed[place] > RETRIES:
            self._failed[place], self._tickets[place] = 0, ticket
        self._busy[place] = False

    def take(self, number: int, oldest: int) -> int | None:
        """The place that `number` goes to, which is empty from now on: where an older one of the same number is, else
        an empty one, else the first that was written of those before `oldest`, else of all. None: all are being
        written."""
        free, there = ~self._busy, self._numbers != _NONE
        for these in (self._numbers == number, self._failed > 0, self._tickets == 0, there & (self._numbers < oldest),
                      np.ones(len(free), bool)):
            if (found := np.flatnonzero(these & free)).size:
                place = int(found[np.argmin(self._tickets[found])])
                self._numbers[place], self._busy[place] = _NONE, True
                return place
        return None
