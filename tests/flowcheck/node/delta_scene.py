"""What goes from a node's journal (kept_scene.py) to a store, and steps that are made of that store alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowcheck.checkpoint.deltas import reach
from flowcheck.checkpoint.objects import Objects, open_store
from flowcheck.checkpoint.store import Lane
from flowcheck.checkpoint.stored import Entry
from flowcheck.node.store.journals import JournalUploads
from flowcheck.node.store.remaking import remake_stored
from flowcheck.node.store.turns import Turns, Wants, lane_name

from ..hand_node import until
from .kept_scene import Kept

__all__ = ["Uploads", "bases_in", "lane_of", "made_of_store", "makeable_in"]


class Uploads:
    """As the process that writes to a store has them. said: events."""

    def __init__(self, at: Kept, store: Path, objects: Objects | None = None, **wants: Any) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.store, self.at = store, at
        self.rules = {"every": 20, **wants}
        assert at.config.journals is not None
        self.uploads = JournalUploads(
            objects or open_store(str(store), {}), at.config.journals, at.config.name, Wants(**self.rules),
            lambda event, **fields: self.said.append((event, fields)), Turns(), seconds=0.0)

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for what, fields in self.said if what == event]

    def until(self, done: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.at.look()
            self.uploads.look()
            return done()

        until(looked)
        self.uploads.join(60.0)

    def sent(self) -> None:
        """All that the journal has is in the store, or said to be missing."""
        newest = self.at.next_number - 1
        self.until(lambda: any(one["last"] >= newest for one in self.events("delta")) or any(
            one["step"] > newest for one in self.events("stored")))


def lane_of(at: Kept, store: Path) -> Lane:
    return Lane(open_store(str(store), {}), lane_name(at.config.name, "", at.job.run_id))


def bases_in(lane: Lane) -> list[Entry]:
    return sorted(lane.entries()[0], key=lambda one: one.order)


def makeable_in(lane: Lane) -> dict[int, Entry]:
    """Each step that can be had, and the nearest version before it."""
    found: dict[int, Entry] = {}
    for base in bases_in(lane):
        assert base.line is not None
        last = reach(base.version.step, lane.deltas(base.line).listed().spans)
        found |= dict.fromkeys(range(base.version.step + 1, last + 1), base)
    return found


def made_of_store(store: Path, base: Entry, step: int, into: Path, **more: Any) -> Path:
    return remake_stored(open_store(str(store), {}), base.folder, step, into, 1, **more)


