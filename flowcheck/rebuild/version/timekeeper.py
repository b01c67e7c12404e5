"""When each iteration came and what became of it: the stamps of a follower, and what they say about keeping up.

    keeper.note("covered", iteration)        as it happens: covered, record, applied, measured
    keeper.ended(iteration, published=True)  it has closed
    for event in keeper.look(wanted): ...    at every look at the rings: Timed, Behind, OnTime
    keeper.rest()                            no more traffic: those of which the next has not come

A version that is late is `Behind` before it is `Timed`: whoever reads that the slack is negative has read that before.
The clock is that of the captures' time stamps, so that the two can be compared. One thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from flowcheck.rebuild.iteration.arena_source import ArenaSource
from flowcheck.rebuild.iteration.deadline import Times, Trend
from flowcheck.rebuild.version.events import Behind, Event, OnTime, Timed
from flowcheck.rebuild.version.overload import FULL

__all__ = ["Timekeeper"]

CALM = 8  # versions in a row that are on time, before the node counts as on time again
KEPT = 64  # iterations whose times the engine still knows: FC_TIMES of parser/include/machine.h
HALF = 0.5  # of a ring: packets are placed too slowly


class Timekeeper:
    """records: no version is made without its step record. now: nanoseconds since the epoch."""

    def __init__(
        self, arenas: ArenaSource, *, records: bool, now: Callable[[], int] = time.time_ns
    ) -> None:
        self._source, self._records, self._now = arenas, records, now
        self._stamps: dict[int, dict[str, int]] = {}
        self._ended: deque[Times] = deque(maxlen=KEPT)  # the next has not come yet
        self._consumed: deque[tuple[int, int]] = deque(maxlen=2)  # (iteration, packets by then)
        self._arenas = 0  # the most that were alive
        self._trend = Trend()
        self.behind = False
        self._in_a_row = self._calm = 0
        self._left: int | None = None  # that was said

    def note(self, what: Literal["covered", "record", "applied", "measured"], iteration: int) -> None:
        """It has happened; only the first time counts."""
        self._stamps.setdefault(iteration, {}).setdefault(what, self._now())

    def ended(self, iteration: int, *, published: bool) -> None:
        """It has closed, and all is known of it but what comes next."""
        stamps = self._stamps.pop(iteration, {})
        for older in [one for one in self._stamps if one < iteration]:  # that were skipped
            del self._stamps[older]
        first, last = self._source.times(iteration) or (None, None)
        self._ended.append(Times(
            iteration, first, last, stamps.get("covered"), stamps.get("record"), stamps.get("applied"),
            self._now() if published else None, measured=stamps.get("measured"),
        ))
        self._consumed.append((iteration, self._source.consumed))

    def begin(self) -> None:
        """Another chain of versions begins."""
        self._trend.forget()
        self.behind, self._in_a_row, self._calm, self._left = False, 0, 0, None

    def look(self, wanted: int | None) -> list[Event]:
        """wanted: the iteration that the current version waits for, if there is one."""
        begun, oldest, events = self._source.begun, self._source.oldest, list[Event]()
        self._arenas = max(self._arenas, min(begun - oldest + 1, self._source.capacity))
        while self._ended and begun > self._ended[0].iteration:
            times = self._ended.popleft()
            events += self._timed(replace(times, next=self._first_after(times.iteration)))
        if wanted is not None and (begun > wanted or self._source.fill >= HALF):
            events += self._watch(wanted)
        return events

    def rest(self) -> list[Event]:
        """No more traffic comes."""
        events: list[Event] = []
        while self._ended:
            events += self._timed(self._ended.popleft())
        return events

    def _first_after(self, iteration: int) -> int | None:
        """When the first packet of a later iteration came."""
        for later in range(iteration + 1, min(self._source.begun, iteration + KEPT) + 1):
            if times := self._source.times(later):
                return int(times[0])
        return None

    def _timed(self, times: Times) -> list[Event]:
        events: list[Event] = []
        self._trend.add(times)
        if times.slack is not None and times.slack < 0:
            self._in_a_row, self._calm = self._in_a_row + 1, 0
            if not self.behind:
                events.append(self._say(times.iteration, -times.slack, times.stage(records=self._records)))
        elif times.slack is not None:
            self._in_a_row, self._calm = 0, self._calm + 1
            if self.behind and self._calm >= CALM and self._source.fill < HALF:
                self.behind, self._left = False, None
                events.append(OnTime(times.iteration))
        events.append(Timed(times, self._source.take_highest(), (self._arenas, self._source.capacity)))
        self._arenas = 0
        return events

    def _watch(self, wanted: int) -> list[Event]:
        """Is the version that is not there yet late, or do packets wait?"""
        next_first = self._first_after(wanted)
        late = 0 if next_first is None else max(self._now() - next_first, 0)
        full = self._source.fill >= HALF
        if not late and not full:
            return []
        left = 0 if full and not late else self._trend.left(late, self._room)
        nearer = left is not None and (self._left is None or left <= self._left // 2 < self._left)
        if self.behind and not nearer:
            return []
        stamps = self._stamps.get(wanted, {})
        first, last = self._source.times(wanted) or (None, None)
        times = Times(wanted, first, last, stamps.get("covered"), stamps.get("record"), stamps.get("applied"),
                      measured=stamps.get("measured"))
        return [self._say(wanted, late, times.stage(records=self._records) if late else "rings", left)]

    @property
    def _room(self) -> float:
        """Iterations that may wait besides the one that a version is made of, in arenas and in the rings."""
        room = float(self._source.capacity - 1)
        if len(self._consumed) == 2:
            (first, before), (last, now) = self._consumed
            if last > first and now > before:
                room += FULL * self._source.room * (last - first) / (now - before)
        return room

    def _say(self, iteration: int, late: int, stage: str, left: int | None = None) -> Behind:
        self.behind, self._calm, self._left = True, 0, left
        return Behind(iteration, late, self._in_a_row, left, stage)
