"""What those share who write to a store: what is wanted, where a run lies, and whose turn it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flowcheck.checkpoint.store import UNNAMED, Rules
from flowcheck.node.config.store import Store
from flowcheck.node.versions.runs import run_folder

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "Turns", "Wants", "lane_name"]

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds after an attempt that failed
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Wants:
    """What is to be written, and what stays: as config/store.py's Store. seconds: that a store may be silent."""

    every: int = 0
    minutes: float = 0.0
    rules: Rules = field(default_factory=Rules)
    seconds: float = 60.0

    @classmethod
    def of(cls, store: Store) -> Wants:
        return cls(store.every, store.minutes, Rules(store.keep, store.keep_hours * 3600, store.keep_every),
                   store.seconds)


def lane_name(node: str, shard: str, run_id: str) -> str:
    """Where a run of a group lies in the store."""
    parts = (f"%2E{part[1:]}" if part.startswith(".") else part for part in (node, shard or UNNAMED))
    return "/".join((*parts, run_folder(run_id, 0).parent.name))


class Turns:
    """One at a time writes to a run's folder, and removes from it."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}

    @contextmanager
    def of(self, name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """waiting: called while another one has the turn."""
        lock = self._locks.setdefault(name, threading.Lock())
        while not lock.acquire(timeout=LOOK_SECONDS):
            waiting()
        try:
            yield
        finally:
            lock.release()
