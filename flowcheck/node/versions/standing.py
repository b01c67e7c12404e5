"""The replica file that a group stands on: when it has its first version, which others go, and what is said of them.

    standing.new()                  a name for a replica that has no version yet
    standing.first(job, step)       a version was published: if it is the first one of that replica, its file stands
    standing.has(job, step)         the file named last holds a version already
    standing.left(start)            the file that an earlier process left of this start of a job
    standing.resumed(path, ...)     that is the group's own again
    standing.settle(job)            this run has a version that may be relied on
    standing.no_room(error)         the same error with what could be removed for it

The group's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.node.versions.replica_files import LeftoverReplica, ReplicaFiles
from flowcheck.rebuild.version.replica import NoRoomForReplica

__all__ = ["Standing"]


class Standing:
    """say: events."""

    def __init__(self, files: ReplicaFiles, say: Callable[..., None]) -> None:
        self._files, self._say = files, say
        self._awaited = False  # the file named last has no version yet

    def new(self) -> Path:
        self._awaited = True
        return self._files.path()

    def left(self, start: str) -> LeftoverReplica | None:
        return self._files.left(start)

    def resumed(self, path: Path, job: Job, step: int) -> None:
        self._files.resume(path)
        self.has(job, step)
        self._say("resumed", run_id=job.run_id, epoch=job.epoch, step=step, path=str(path))

    def first(self, job: Job, step: int) -> None:
        if self._awaited:
            self.has(job, step)

    def has(self, job: Job, step: int) -> None:
        self._awaited = False
        for kept in self._files.stands(job.run_id, job.epoch, step):
            self._removed(kept, "it was never verified, and a better or newer one is kept")

    def settle(self, job: Job) -> None:
        for kept in self._files.settle():
            self._removed(kept, f"run {job.run_id} has a verified version of its own")

    def no_room(self, error: UserError) -> UserError:
        if not isinstance(error, NoRoomForReplica):
            return error
        held = ", ".join(f"{kept.path} (run {kept.run_id}, step {kept.step})" for kept in self._files.found())
        others = ", ".join(map(str, self._files.of_others()))
        why = [f"kept there until this run is verified: {held}"] if held else []
        why += [f"of other groups of this node, to remove by hand where their job is over: {others}"] if others else []
        remedy = f"more room on tmpfs, or fewer slots; {'; '.join(why)}" if why else error.remedy
        return UserError(error.what, where=error.where, remedy=remedy)

    def _removed(self, kept: LeftoverReplica, why: str) -> None:
        self._say("removed", run_id=kept.run_id, step=kept.step, path=str(kept.path), why=why)
