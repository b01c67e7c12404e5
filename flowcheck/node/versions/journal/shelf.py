"""What a node's journals have to recover from: bases, steps that were made again, and those that can be.

    shelf = JournalShelf(root, cores)
    shelf.look()                            bases, and what was made; as any version on disk
    shelf.having(step)                      the same, and what can be made of this step; the first question for one
                                            makes it
    shelf.ranges()                          all that can be had, for people: GET /v1/rewind

One step is made at a time, by a process of its own (worker.py), which is asked for when its manifest is. Until it is
there, the answer says how far it is. The one that was made before goes, unless somebody reads it. A shelf belongs to
one thread; what follows that process has its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowcheck.ask.offer import JOURNAL, Offer
from flowcheck.durable import remove_tree
from flowcheck.job.version_status import VersionStatus
from flowcheck.node.process.child import start
from flowcheck.node.versions.held import Held, Holding, OnDisk, inode_of
from flowcheck.node.versions.holdings import Pressed, Shelf, id_of, in_order, offered
from flowcheck.node.versions.journal.border import MODULE, RemakeSettings
from flowcheck.node.versions.journal.folders import Folder, Place, folders_in
from flowcheck.node.versions.journal.making import Making
from flowcheck.node.versions.journal.reach import Reach, reach_of

__all__ = ["JournalShelf"]

FRESH_SECONDS = 1.0  # that what a ring has is not read again
READS, UPDATES = 1e9, 4e9  # bytes a second of a base and a checkpoint, of gradients and state: before any was measured


class JournalShelf(Shelf):
    """root: of the node's journals. cores: that making one may use."""

    def __init__(
        self, root: Path, cores: Sequence[int], now: Callable[[], float] = time.monotonic, needs: int = 0
    ) -> None:
        super().__init__(now, needs)
        self._root, self.cores = root, tuple(cores)
        self._steps: dict[tuple[Path, int], tuple[Offer, str] | None] = {}  # by directory and inode
        self._wanted: dict[str, tuple[Holding, Folder, Place]] = {}  # that may be asked for
        self._reaches: tuple[float, list[Reach]] = -1.0, []
        self.step_seconds = 0.0  # of the last one that was made, for each step; 0: none was

    def look(self) -> list[Holding]:
        found, steps = [], dict[tuple[Path, int], tuple[Offer, str] | None]()
        for folder in folders_in(self._root):
            for one in (*folder.bases, *folder.made):
                key = one.path, inode_of(one.path)
                ends = folder.ends(one.line)
                if not key[1] or (ends is not None and one.step > ends):
                    continue
                steps[key] = self._steps[key] if key in self._steps else offered(*key, JOURNAL)
                if (said := steps[key]) is not None:
                    found.append(Holding(said[0], *key, said[1]))
        self._steps = steps
        return in_order(found)

    def known(self) -> list[Holding]:
        return [*self.look(), *(holding for holding, _, _ in self._wanted.values())]

    def having(self, step: int | None) -> list[Holding]:
        """All that is there, and what can be made of this step; None: of none."""
        found = self.look()
        return found if step is None else [*found, *self._makeable(step, found)]

    def _makeable(self, step: int, looked: list[Holding]) -> list[Holding]:
        """Of this step, that is not there yet: `hold` takes them for some time."""
        there = {(one.offer.run_id, one.offer.epoch, one.offer.shard) for one in looked if one.offer.step == step}
        found = []
        for reach in self._reach():
            base = reach.base_for(step)
            said = self._said(base) if base is not None else None
            if base is None or said is None or (said[0].run_id, said[0].epoch, said[0].shard) in there:
                continue
            inode, one = inode_of(base.path), said[0]
            status = VersionStatus.of(one.status)
            after = VersionStatus.follows(base.step) if status.verified else status  # at least that
            offer = Offer(id_of(JOURNAL, base.path, inode, step), JOURNAL, one.run_id, one.epoch, step, one.shard,
                          str(after), one.nbytes, matches=one.matches, start=one.start)
            holding = Holding(offer, base.path, inode, said[1])
            self._wanted[offer.id] = holding, reach.folder, base
            found.append(holding)
        return found

    def ranges(self) -> list[dict[str, Any]]:
        """By run and group: docs/use/rewind.md."""
        return [one for reach in self._reach() if (one := self._range(reach)) is not None]

    def _range(self, reach: Reach) -> dict[str, Any] | None:
        steps, of = [], None
        for span in reach.spans:
            said = self._said(span.base)
            if said is None:
                continue
            of, state = said[0], said[0].nbytes
            each = self.step_seconds or (reach.entry + 2 * state) / UPDATES
            steps.append({"first": span.base.step, "last": span.base.step, "kind": "base", "bytes": state,
                          "seconds": 0.0})
            if span.last > span.base.step:
                steps.append({"first": span.base.step + 1, "last": span.last, "kind": "makeable", "bytes": state,
                              "seconds": round((span.last - span.base.step) * each + 2 * state / READS, 3)})
        if of is None:
            return None
        return {"run_id": of.run_id, "epoch": of.epoch, "shard": of.shard, "steps": steps,
                "holes": [list(one) for one in reach.holes], "entry_bytes": reach.entry, "entries": len(reach.lines)}

    def _said(self, base: Place) -> tuple[Offer, str] | None:
        key = base.path, inode_of(base.path)
        return self._steps[key] if key in self._steps else offered(*key, JOURNAL)

    def _reach(self) -> list[Reach]:
        at, found = self._reaches
        if at < 0 or self._now() - at > FRESH_SECONDS:
            found = [one for folder in folders_in(self._root) if (one := reach_of(folder)) is not None]
            self._reaches = self._now(), found
        return found

    def _pin(self, holding: Holding) -> Held:
        wanted = self._wanted.get(holding.offer.id)
        if wanted is None:
            return OnDisk(holding, self._now())
        if any(isinstance(one, Making) and one.busy for one in self._held.values()):
            raise Pressed("another step is being made again: one at a time", where=f"step {holding.offer.step}")
        _, folder, base = wanted
        reading = {one.path for one in self._held.values()}
        for old in folder.made:
            if old.path not in reading:
                remove_tree(old.path)
        settings = RemakeSettings(
            cores=self.cores, folder=folder.path, line=base.line, base=base.step, path=base.path,
            step=holding.offer.step, threads=len(self.cores) or 1)
        return Making(holding, lambda: start(MODULE, settings, blocking=True), base.step, self._now, self._note)

    def _note(self, seconds: float) -> None:
        self.step_seconds = seconds
