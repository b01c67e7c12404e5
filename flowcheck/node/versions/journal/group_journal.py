"""The journals of a group: of the job that it follows, with bases, and what stays of the run before.

    journal = GroupJournal(config, group, say)
    keeping = journal.begin(body, plan, run, clock, start)   of another job, or another start; None: no journal is kept
    journal.published(step, write)                       a version: is a base due?
    journal.closed(number, ...), .missed(...)            an iteration has closed, or passed
    journal.diverged(after)                              versions after this step may be wrong
    journal.look()                                       again and again
    journal.end(), .close()                              the session has ended; the group has

What may be wrong after a mismatch: the gradients are proven by their verdicts and stay; versions that were made of them
are not the trainer's. So bases after the last step that was verified go, and no later step of that line is made again.
The group's thread; what touches the disk has threads of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flowcheck.control.start import line_of
from flowcheck.errors import said_of
from flowcheck.job.clock import Clock
from flowcheck.job.model import LOG
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.versions.journal.folders import Folder, folder_of
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.node.versions.journal.keeper import Keeper
from flowcheck.node.versions.journal.room import BASES, LEAST, room_of, sizes_of, too_little, wants
from flowcheck.rebuild.plan import JobPlan, digest_of

__all__ = ["GroupJournal"]

CLOSE_SECONDS = 6.0


class GroupJournal:
    """say: events of the group. keeper: of the job that is followed."""

    def __init__(self, config: NodeConfig, group: str, say: Callable[..., None]) -> None:
        self._settings, self._root, self._group, self._say = config.journal, config.journals, group, say
        self.keeper: Keeper | None = None
        self._ending: list[threading.Thread] = []
        self._whole: tuple[str, int] = "", -1  # line and step of the newest base
        self._tried: tuple[str, int] = "", -1  # and of the one that was begun last

    def begin(
        self, body: Mapping[str, Any], plan: JobPlan, run: tuple[str, int, int], clock: Clock, start: str
    ) -> Keeper | None:
        """body: the manifest with all connections. run: id, epoch and ranks as trainers say hello. start: of the job,
        as of runs.start_of."""
        self.end()
        job = plan.job
        if self._settings is None or self._root is None or (job.optimizer is None and job.kind != LOG):
            return None
        here = job.run_id, job.epoch, run[2]
        # What is redone of a log has no lines (folders.py): another start's entries are another job's.
        digest = digest_of({**body, "start": start} if job.kind == LOG else body, plan, run, clock)
        entry, state = sizes_of(plan)
        room = room_of(self._settings, entry, state)
        if why := too_little(self._settings, entry, state):
            self._say("problem", about="journal", why=f"journal.megabytes: {why}; set it to"
                      f" {wants(self._settings, entry, state)} or more")
            if room.entries < LEAST:
                return None
        folder = folder_of(self._root, self._group, job.run_id, job.epoch)
        said = JobText(dict(body), here, clock.first, digest)
        self._whole = self._tried = "", -1
        self.keeper = Keeper(folder, room, said, plan, clock, self._say,
                             self._ending[-1] if self._ending else None, line_of(start) if job.kind == LOG else "")
        return self.keeper

    def published(self, step: int, matches: int, write: Callable[[Path, Callable[[], None], bool], bool]) -> None:
        """step: of the current version. matches: checksums that have matched by now. write(folder, done, base): begins
        to write that version there; False: not now."""
        keeper = self.keeper
        if keeper is None:
            return
        keeper.matches = matches
        if not keeper.opened:
            return  # what came before the ring is there is a hole: a base would be of no use
        newest, tried = (step if line == keeper.line else -1 for line, step in (self._whole, self._tried))
        every, pause = keeper.room.every, max(1, keeper.room.every // 8)
        broken = Clock().after(keeper.hole) > newest
        if newest >= 0 and step - newest < (pause if broken else every):
            return
        if 0 <= step - tried < pause and tried >= 0:
            return  # one is being written, or could not be
        done = partial(self._written, keeper, keeper.line, step)
        if write(keeper.folder.base_of(keeper.line), done, True):
            self._tried = keeper.line, step

    def _written(self, keeper: Keeper, line: str, step: int) -> None:
        """On the thread that has written it."""
        if keeper is not self.keeper:
            return
        self._whole = line, step
        keeper.folder.tidy(BASES)
        if bases := keeper.folder.bases:
            keeper.keep(min(one.step for one in bases))
        keeper.folder.end_others()

    def missed(self, first: int, last: int, why: str) -> None:
        """Iterations, by the trainer's numbers, that closed without a version, or passed. Those that it was given all
        the same are in it."""
        if self.keeper is not None:
            self.keeper.missed(first, last, why)

    def diverged(self, after: int) -> None:
        """after: the step that was verified last, -1: none was."""
        keeper = self.keeper
        if keeper is None:
            return
        line = keeper.line
        keeper.begin()

        def end(folder: Folder) -> None:
            try:
                folder.end(line, after)
            except Exception as error:  # it must be said: what is left there may be wrong
                self._say("problem", why=f"{folder.path}: steps after {after} are not marked: {said_of(error)}")

        thread = threading.Thread(target=end, args=(keeper.folder,), daemon=True, name="flowcheck journal diverged")
        thread.start()
        self._ending.append(thread)

    def look(self) -> None:
        if self.keeper is not None:
            self.keeper.look()

    def end(self) -> None:
        """The job is not followed any more."""
        if self.keeper is not None:
            self.keeper.look()
            self._ending = [one for one in self._ending if one.is_alive()]
            self._ending.append(self.keeper.close())
        self.keeper = None

    def close(self) -> None:
        """A disk that hangs is not waited for for long."""
        self.end()
        for thread in self._ending:
            thread.join(CLOSE_SECONDS)
