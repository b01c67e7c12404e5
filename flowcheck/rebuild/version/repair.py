"""What a follower can do about an iteration that the wire has not brought whole: one object for each way.

A follower has a list of these, in this order:

    RangeRepair   range_repair.py   builds all the same; trainers send their own state of the elements that were lost
    PeerRepair    peer_repair.py    before the verdict other nodes give the bytes that they have

For an iteration they are asked in the order of the methods below. None of them waits for anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.version.building import Built
from flowcheck.rebuild.version.events import Event

__all__ = ["Repair"]


class Repair(Protocol):
    """Of one follower, on its thread."""

    def wants(self, iteration: int) -> bool:
        """An iteration may close. Must it stay open, because something for its arena is on its way?"""

    def passed(self, iteration: int) -> bool:
        """Have the trainers gone past it, so that no step record of it comes?"""

    def builds(self, iteration: int) -> bool:
        """Will its version be built although its arena lacks something?"""

    def awaits(self, iteration: int) -> tuple[bool, list[Event]]:
        """Its record and a slot are here. Must it stay open for another word of trainers; and what is to be said?"""

    def fill(self, iteration: int) -> Iterator[Event]:
        """It has closed, and is judged next: put into its arena what has come for it."""

    def may_build(self, judged: Judged) -> bool:
        """The verdict does not stand. May its version be built all the same?"""

    def after(self, judged: Judged, built: Built) -> tuple[Judged, list[Event]]:
        """Its version is built. What is known of it now, for the last verdict; and what is to be said after it."""

    def lost(self, last: int, why: str) -> Event | None:
        """The iteration that is awaited was lost, and those up to `last`: go on behind them. None: that cannot be."""

    def started(self) -> None:
        """A version is here that is all there: what was known of the one before does not count."""

    def ended(self) -> None:
        """The chain ends: nothing is built on what was patched."""
