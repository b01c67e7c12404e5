"""Steps that can be made of a store: of each version with deltas those after it, by a process of its own (remaking.py).

    steps = StoredSteps(place, root, cores)      root: where what was made lies
    steps.look(objects, entries)                 what can be made; asks the store, so it may hang
    steps.made                                   what was made before, as any version on disk
    steps.makeable(step, there)                  that can be made of this step, and is not there
    steps.begin(holding, ...)                    makes it

What the store lists is not believed: whether a step can be made shows when it is. `look` may be called by another
thread than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowcheck.ask.offer import STORE, Offer
from flowcheck.checkpoint.deltas import Deltas, Listed, reach
from flowcheck.checkpoint.objects import Objects
from flowcheck.checkpoint.stored import Entry
from flowcheck.durable import remove_tree
from flowcheck.job.version_status import VersionStatus
from flowcheck.node.config.store import Store
from flowcheck.node.process.child import start
from flowcheck.node.store.border import REMAKE, StoredRemakeSettings
from flowcheck.node.versions.held import Holding, inode_of
from flowcheck.node.versions.holdings import id_of, offered
from flowcheck.node.versions.journal.making import Making

__all__ = ["StoredSteps", "offer_of"]

READS = 2e8  # bytes a second of a store, before any was measured
Run = tuple[str, int, str]


@dataclass(frozen=True)
class _Reach:
    """last: the newest step that can be made of this version."""

    base: Entry
    last: int

    @property
    def run(self) -> Run:
        one = self.base.version
        return one.run_id, one.epoch, one.shard


class StoredSteps:
    """place: of the store. root: a directory of this node alone. cores: that making one may use."""

    def __init__(self, place: Store, root: Path, cores: Sequence[int]) -> None:
        self._place, self._root, self._cores = place, root, tuple(cores)
        self._reaches: list[_Reach] = []  # of a run the nearest to any step last
        self._wanted: dict[str, tuple[Holding, Entry]] = {}
        self._step_seconds = 0.0

    def look(self, objects: Objects, entries: Collection[Entry]) -> None:
        listed: dict[str, Listed] = {}
        found = []
        for one in sorted(entries, key=lambda entry: entry.order):
            if one.line is None or VersionStatus.of(one.version.status).diverged:
                continue
            if one.deltas not in listed:
                listed[one.deltas] = Deltas(objects, one.deltas).listed()
            lies, step = listed[one.deltas], one.version.step
            last = reach(step, lies.spans)
            found.append(_Reach(one, last if lies.ends is None else min(last, lies.ends)))
        self._reaches = [one for one in found if one.last > one.base.version.step]

    @property
    def made(self) -> list[Holding]:
        found = []
        for path in self._root.glob("*/step-*"):
            inode = inode_of(path)
            if inode and (said := offered(path, inode, STORE)) is not None:
                found.append(Holding(said[0], path, inode, said[1]))
        return found

    @property
    def wanted(self) -> list[Holding]:
        """That may be asked for, because they were said to be makeable."""
        return [holding for holding, _ in self._wanted.values()]

    def makeable(self, step: int, there: Collection[Run]) -> list[Holding]:
        """there: whose such a step is there already."""
        nearest = {one.run: one for one in self._reaches if one.base.version.step < step <= one.last}
        found = []
        for run, one in nearest.items():
            if run not in there:
                holding = _holding(self._place.url, one.base, step)
                self._wanted[holding.offer.id] = holding, one.base
                found.append(holding)
        return found

    def is_wanted(self, holding: Holding) -> bool:
        return holding.offer.id in self._wanted

    def begin(self, holding: Holding, now: Callable[[], float], reading: Collection[Path]) -> Making:
        """What was made before goes, unless it is among what is being read. Raises Gone."""
        base, step = self._wanted[holding.offer.id][1], holding.offer.step
        for old in self.made:
            if old.path not in reading:
                remove_tree(old.path)
        settings = StoredRemakeSettings(
            cores=self._cores, url=self._place.url, options=self._place.options, seconds=self._place.seconds,
            base=base.folder, step=step, into=self._root / base.chain.line, threads=len(self._cores) or 1)
        return Making(holding, lambda: start(REMAKE, settings, blocking=True), base.version.step, now, self._note,
                      brought=step - base.version.step)

    def _note(self, seconds: float) -> None:
        self._step_seconds = seconds

    def ranges(self) -> list[dict[str, Any]]:
        """By run and group, as JournalShelf.ranges: docs/use/rewind.md."""
        runs: dict[Run, list[_Reach]] = {}
        for one in self._reaches:
            runs.setdefault(one.run, []).append(one)
        return [{"run_id": run_id, "epoch": epoch, "shard": shard, "steps": [*map(self._span, found)], "holes": [],
                 "entry_bytes": 0, "entries": sum(one.last - one.base.version.step for one in found)}
                for (run_id, epoch, shard), found in runs.items()]

    def _span(self, one: _Reach) -> dict[str, Any]:
        state, steps = one.base.version.nbytes, one.last - one.base.version.step
        seconds = steps * self._step_seconds or state * (1 + steps / 2) / READS
        return {"first": one.base.version.step + 1, "last": one.last, "kind": "makeable", "bytes": state,
                "seconds": round(seconds, 3)}


def offer_of(url: str, entry: Entry, step: int, status: str, users: tuple[tuple[int, int], ...] = ()) -> Offer:
    """Of a version in a store, or of a step that can be made of it."""
    one = entry.version
    return Offer(id_of(STORE, Path(f"{url}/{entry.folder}"), 0, step), STORE, one.run_id, one.epoch, step, one.shard,
                 status, one.nbytes, users, matches=one.matches, start=one.start)


def _holding(url: str, base: Entry, step: int) -> Holding:
    status = VersionStatus.of(base.version.status)
    after = VersionStatus.follows(base.version.step) if status.verified else status  # at least that
    return Holding(offer_of(url, base, step, str(after)), Path(base.folder), 0, base.version.attached)
