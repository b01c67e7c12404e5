"""Why a group does not follow its job yet: in words that all of its ranks hear, and the log.

    unfollowed.restarted()                 another start of the job
    unfollowed.placed([4, 5])              where the group's ranks are in the whole job
    unfollowed.refused(why)                the job cannot be followed; followed(): it is
    unfollowed.missing([1]) -> text        what is waited for
    unfollowed.watches(rank, why)          a trainer does not know its job: said, each reason once in AGAIN seconds

The group's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

__all__ = ["Unfollowed"]

NAMED = 8  # ranks that a text names
AGAIN = 300.0
REASONS = 16  # that are remembered


class Unfollowed:
    """why: the job was refused, "": it was not. group: its name. say: events. clock: seconds."""

    def __init__(self, group: str, say: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._group, self._say, self._clock = group, say, clock
        self.why = ""
        self._places: list[int] = []
        self._said: dict[str, float] = {}

    def restarted(self) -> None:
        self.why, self._places, self._said = "", [], {}

    def placed(self, places: Sequence[int]) -> None:
        self._places = list(places)

    def refused(self, why: str) -> None:
        self.why = "; ".join(line.strip() for line in why.splitlines())

    def followed(self) -> None:
        self.why, self._said = "", {}

    def ranks(self, numbers: Sequence[int]) -> str:
        """Such as "rank 1 of group 'shard0' (2 of the job)"; the first of them."""
        shown = numbers[:NAMED]
        text = f"rank {', '.join(map(str, shown))}" + (f" of group {self._group!r}" if self._group else "")
        there = [self._places[one] for one in shown if one < len(self._places)]
        return text + (f" ({', '.join(map(str, there))} of the job)" if there and there != list(shown) else "")

    def missing(self, numbers: Sequence[int]) -> str:
        text = f"connections of {self.ranks(numbers)} are not here"
        return f"the job was refused: {self.why}; tried again when {text.replace('not here', 'here')}" if (
            self.why) else text

    def watches(self, rank: int, why: str) -> None:
        """why: "": it knows it now."""
        now = self._clock()
        if why and now - self._said.get(why, now - AGAIN) >= AGAIN and (why in self._said or len(self._said) < REASONS):
            self._said[why] = now
            self._say("watching", rank=rank, why=f"{self.ranks([rank])} does not know its job yet: {why}")
