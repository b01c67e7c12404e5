"""Who keeps the gradients of iterations: a follower hands each one over before its arena is used again.

    keeping.begin()                           versions begin again: what comes does not follow what came before
    keeping.offer(judged, record, region)     the verdict stands; `region` stays as it is until `reads` is False
    keeping.reads                             are its bytes still being copied? At the speed of memory, never of a disk

A node with a journal has one (node/versions/journal/keeper.py). Nothing waits for it but the arena, and that only as
long as its bytes are read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["Keeping", "NotKept"]


class Keeping(Protocol):
    """Of one follower, on its thread."""

    def begin(self) -> None:
        """The next version has another state before it than the one that was built last."""

    def offer(self, judged: Judged, record: StepRecord | None, region: np.ndarray) -> None:
        """An iteration whose verdict stands. record: None: the job declares none. region: uint8, the iteration's bytes,
        in which `judged.buckets` lie. Never waits, and raises nothing: what is not kept is named elsewhere."""

    @property
    def reads(self) -> bool:
        """Is the region that was offered last still read?"""


class NotKept:
    """Nobody keeps anything."""

    reads = False

    def begin(self) -> None:
        """Nothing."""

    def offer(self, judged: Judged, record: StepRecord | None, region: np.ndarray) -> None:
        """Nothing."""
