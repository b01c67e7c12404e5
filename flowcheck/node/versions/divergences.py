"""Versions of a group that turned out not to be the trainer's: which may not be read, and when a job is refused.

    found = Divergences(config.replica.directory, node, group, say)
    found.begins(run, job, step, start)       a job is followed, whose first version may have this step
    found.verified(step)                      a version's own checksums matched
    found.diverged(step, why)                 they did not, of the version that was to be `step`
    found.refuse(why)                         ranks contradict each other
    found.refused(run)                        why a run is not taken any more, "": it is

    notices = Notices(directory, node)        in another process
    notices.all                               of all groups of that node, as of now

A mismatch says that something is wrong since the last match, and not since when. So all versions between are withdrawn:
the replica's slots at once (updater/replica.py:withdraw), and whoever reads other tiers learns it from a file next to
the replica, flowcheck-NODE-GROUP.diverged. It is one small file whatever the number of versions, and it is there before
anything else is done about them. Where another user has put something of that name, which this one may not remove, the
file's name goes on with eight digits that nobody could guess (`.diverged-9f3a12c4`).

A job whose chain diverges a second time in this process does something that it did not declare, and a new state of it
would be followed by wrong versions again: it is refused, by the name that its trainers say (run and epoch; a run
without a name: that start of it). The group's thread, but `refused`, which any may call.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from flowcheck.control.divergence import MOST_DIVERGENCES, Divergence
from flowcheck.control.message_fields import GROUP
from flowcheck.durable import write_atomic
from flowcheck.errors import FlowcheckError
from flowcheck.job.model import Job
from updater.reader import not_mine

__all__ = ["Divergences", "Notices", "Run"]

Run = tuple[str, int, int]  # id, epoch and ranks, as trainers say them
MOST_BYTES = 1 << 20
MOST_DIVERGED = 2  # times that a run may, less one
ASIDE = re.compile(r"-[0-9a-f]{8}", re.ASCII)  # behind the name, where somebody else's is in the way
ATTEMPTS = 3  # whoever watches the directory may be there first, and guesses nothing
TICK_NS = 50_000_000  # more than the clock of a file system takes from one time to the next


class Divergences:
    """directory: of replica files. say: events of the group. newest: step that was verified last of the run that is
    followed; -1: none was. refusing: the run that is followed has just been refused, and why."""

    def __init__(self, directory: Path, node: str, group: str, say: Callable[..., None]) -> None:
        self._plain, self._group, self._say = directory / f"flowcheck-{node}-{group}.diverged", group, say
        self._path = self._left()
        self.refusing = ""
        self._found = _read(self._path)  # and of which start each is
        self._run: tuple[Run, str] = ("", 0, 0), ""
        self._job: tuple[str, int] = "", 0
        self._start = ""
        self.newest = -1
        self._times: dict[tuple[Run, str], int] = {}
        self._refused: dict[tuple[Run, str], str] = {}

    def begins(self, run: Run, job: Job, step: int, start: str, own_id: str = "") -> None:
        """start: of its trainers, as of ReplicaOptions.start: one that is joined again, here or in a later process, is
        the same. /N: one that has no name, the Nth of this process. own_id: of a run that has no name."""
        key = run, "" if run[0] else own_id
        if key != self._run or (job.run_id, job.epoch) != self._job:
            self.newest = -1
        self._run, self._job, self.refusing = key, (job.run_id, job.epoch), ""
        if start == self._start:
            return
        self._start, self.newest = start, min(self.newest, step)
        kept = [(one if of == start and of[:1] != "/" else self._before(one, step), of) for one, of in self._found]
        if kept != self._found:
            self._found = [(one, of) for one, of in kept if one.after < one.last]
            self._write()

    def _before(self, one: Divergence, step: int) -> Divergence:
        """Another start of the run makes this step and later ones again: what is said of those is of the one before."""
        if (one.run_id, one.epoch) != self._job or one.last < step:
            return one
        return Divergence(one.run_id, one.epoch, one.shard, one.after, max(step - 1, one.after))

    def verified(self, step: int) -> None:
        self.newest = max(self.newest, step)

    def diverged(self, step: int, why: str) -> Divergence:
        """Which versions may be wrong. Says so; the second time the run is refused."""
        new = Divergence(*self._job, self._group, self.newest, max(step - 1, self.newest))
        if new.after < new.last:
            self._found = [*self._found, (new, self._start)][-MOST_DIVERGENCES:]
            self._write()
        times = self._times[self._run] = self._times.get(self._run, 0) + 1
        about = {"step": step, "verified": None if self.newest < 0 else self.newest, "times": times}
        self._say("diverged", **about, why=f"{why}; versions after the last one that was verified are withdrawn")
        if times >= MOST_DIVERGED:
            self._refuse(
                f"its versions have diverged from the trainer's {times} times, and a new state would be followed by"
                f" wrong ones again: {why}. What changes the model, or the optimizer, that the job does not declare?"
            )
        return new

    def refuse(self, why: str) -> None:
        """Ranks contradict each other: their states are not one, and no version is that of all."""
        self._refuse(f"its ranks are not of one state any more: {why}")

    def _refuse(self, why: str) -> None:
        self.refusing = self._refused[self._run] = f"{why} Another epoch is taken" if why.endswith("?") else (
            f"{why}. Another epoch is taken")

    def refused(self, run: Run, own_id: str = "") -> str:
        """own_id: of its start; one without a name is known by nothing else."""
        return self._refused.get((run, "" if run[0] else own_id), "")

    def _left(self) -> Path:
        """Where an earlier process has said it."""
        found = [path for path in self._plain.parent.glob("*.diverged-*")
                 if path.name.startswith(self._plain.name) and ASIDE.fullmatch(path.name[len(self._plain.name):])]
        return next((path for path in sorted(found) if _is_ours(path)), self._plain)

    def _write(self) -> None:
        for attempt in range(ATTEMPTS):
            try:
                self._clear_way()
                if self._found:
                    rows = [{**asdict(one), "start": of} for one, of in self._found]
                    write_atomic(self._path, json.dumps(rows).encode())
                else:
                    self._path.unlink(missing_ok=True)
                return
            except (OSError, FlowcheckError) as error:
                if attempt + 1 < ATTEMPTS and os.path.lexists(self._path) and not _is_ours(self._path):
                    continue
                what = error.message() if isinstance(error, FlowcheckError) else str(error)
                self._say("problem", why=f"which versions have diverged cannot be said beside the replica: {what}")
                return

    def _clear_way(self) -> None:
        """What lies there under this name and is not ours goes, if we may; otherwise another name is taken: nothing
        could be said to readers."""
        if not os.path.lexists(self._path) or _is_ours(self._path):
            return
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(self._path.lstat().st_mode):
                shutil.rmtree(self._path)
            else:
                self._path.unlink()
        if os.path.lexists(self._path):
            self._path = self._plain.with_name(f"{self._plain.name}-{secrets.token_hex(4)}")


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and not not_mine(found)


class Notices:
    """directory: `replica.directory` of the node of this name. Any thread."""

    def __init__(self, directory: Path, node: str) -> None:
        self._directory = directory
        self._name = re.compile(rf"flowcheck-{re.escape(node)}-{GROUP.pattern}\.diverged({ASIDE.pattern})?",
                                re.ASCII)
        self._read: dict[tuple[Path, int, int], list[tuple[Divergence, str]]] = {}  # by what changes with a file
        self._all: Sequence[Divergence] = ()
        self._changed, self._looked = -2, 0  # the directory, and when that was looked at

    @property
    def all(self) -> Sequence[Divergence]:
        try:
            changed = os.stat(self._directory).st_mtime_ns
        except OSError:
            changed = -1
        if changed != self._changed or self._looked - changed < TICK_NS:  # what came in the same tick is not seen in it
            self._changed, self._looked = changed, time.time_ns()
            self._all = self._look()
        return self._all

    def _look(self) -> Sequence[Divergence]:
        found: dict[tuple[Path, int, int], list[tuple[Divergence, str]]] = {}
        for path in self._directory.glob("*.diverged*"):
            if not self._name.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):
                status = path.lstat()
                key = path, status.st_ino, status.st_mtime_ns
                found[key] = self._read[key] if key in self._read else _read(path)
        self._read = found
        return [one for some in found.values() for one, _ in some]

    def cover(self, run_id: str, epoch: int, shard: str, step: int, status: str) -> bool:
        return Divergence.any_covers(self.all, run_id, epoch, shard, step, status)


def _read(path: Path) -> list[tuple[Divergence, str]]:
    """What a file of this user's says, and of which starts; nothing if it is somebody else's, or damaged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or not_mine(found):
        os.close(fd)
        return []
    with os.fdopen(fd, "rb") as file:
        try:
            rows = json.loads(file.read(MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return []
    read = [(Divergence.of(row), row.get("start")) for row in rows if isinstance(row, dict)] if isinstance(
        rows, list) else []
    return [(one, of if isinstance(of, str) else "") for one, of in read if one is not None][-MOST_DIVERGENCES:]
