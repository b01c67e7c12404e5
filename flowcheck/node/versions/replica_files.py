"""Replica files of a group: which one is served, what earlier runs left, what may go and when.

Names are flowcheck-NODE-GROUP-NUMBER.replica. A new state gets a file of its own; once it holds a complete version
(`stands`) its predecessors of the same run go, at no instant is there none. Files of other runs (a process that was
killed, a job that was started again) stay readable (updater/reader.py): the good ones until this run has a version of
its own that is verified, and on disk if the settings ask for that (`settle`). Good is what was verified; where
nothing was, the newest file and the one that is furthest. So a job that dies over and over before its first
verification takes the memory of three replicas and not of one per start, and of one more in shadow mode (shadow.py),
where the newest file of which versions are offered is good, too. What ranks gave of themselves lies next to a
replica (user_states.py), and goes with it. It may be there before its replica has a file: a name is not given out again
where only that is left of it, or versions of a new start would have what ranks gave in the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flowcheck.control.message_fields import GROUP
from flowcheck.durable import remove_tree, reporting
from flowcheck.errors import EnvironmentProblem
from updater.errors import UpdaterError
from updater.reader import Reader, not_mine

__all__ = ["LeftoverReplica", "NameLock", "ReplicaFiles"]

DIGITS = 12  # of a number: more is nobody's count, and no name has room for all
MOST_TAKEN = 1000  # names in a row that somebody else may have taken


class NameLock:
    """A node's name in a directory of replicas or journals, for as long as this process has it: two processes of one
    name take each other's files for those of jobs that have ended, and remove them. After a kill the kernel lets go of
    it, and the file that is left stops nobody. Raises EnvironmentProblem: another process has it, or the file cannot be
    made."""

    def __init__(self, directory: Path, node: str) -> None:
        self._path = directory / f"flowcheck-{node}.lock"
        with reporting(self._path, "a `name` of its own for each node"):
            self._file = self._locked()
            while not self._named():  # its owner has just ended, and has removed it
                os.close(self._file)
                self._file = self._locked()

    def _locked(self) -> int:
        """A descriptor of the file at this name, locked."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise EnvironmentProblem(
                "another node of this name runs here, and each would remove the other one's versions",
                where=str(self._path), remedy="end it; or give each node a `name` of its own",
            ) from None
        return file

    def _named(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path.lstat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Once."""
        with contextlib.suppress(OSError):  # what stays is unlocked
            self._path.unlink()
        os.close(self._file)


@dataclass(frozen=True)
class LeftoverReplica:
    """What a file holds. step: of its newest version. verified: of the newest that was compared with the trainer's.
    start: of the job that it followed, "": unsaid. matches: checksums that had matched by its newest version."""

    path: Path
    run_id: str
    step: int
    epoch: int = 0
    verified: int | None = None
    start: str = ""
    matches: int = 0


class ReplicaFiles:
    """needs: checksums that must have matched before a version is offered."""

    def __init__(self, directory: Path, node: str, group: str, needs: int = 0) -> None:
        self._directory, self._prefix, self._needs = directory, f"flowcheck-{node}-{group}-", needs
        there = [path for path in directory.glob(f"{self._prefix}*.*") if path.suffix in (".replica", ".user")]
        others = rf"(?!{re.escape(group)}-){GROUP.pattern}"
        self._other = re.compile(rf"flowcheck-{re.escape(node)}-{others}-[0-9]+\.replica")
        self._number = max([0, *map(self._number_of, there)])
        #: Of other users, by our name: nothing of it is read or removed.
        self.foreign = {path: why for path in there if self._number_of(path) >= 0 and (why := _not_mine(path))}
        self._named: Path | None = None  # given out; whether it holds a version is not known yet
        self._made: set[Path] = set()  # given out or gone on with, by this process
        self._served: Path | None = None

    def _files(self) -> list[Path]:
        """This user's, oldest first."""
        found = (path for path in self._directory.glob(f"{self._prefix}*.replica") if self._number_of(path) >= 0)
        return sorted((path for path in found if not _not_mine(path)), key=self._number_of)

    def _number_of(self, path: Path) -> int:
        """-1: it has none, and is somebody else's."""
        number = path.stem.removeprefix(self._prefix)
        return int(number) if number.isascii() and number.isdecimal() and len(number) <= DIGITS else -1

    def found(self) -> list[LeftoverReplica]:
        """What is there and whole, oldest first."""
        out = []
        for path in self._files():
            try:
                with closing(Reader(path, mine=True)) as reader, reader.pinned() as version:
                    out.append(LeftoverReplica(
                        path, reader.run_id, version.step, reader.epoch, reader.verified, reader.start,
                        version.matches,
                    ))
            except UpdaterError:
                continue  # torn, or of another format: it holds nothing that could be used
        return out

    def of_others(self) -> list[Path]:
        """Those of other groups of this node, followed or not: a group whose job has ended leaves its own."""
        return sorted(path for path in self._directory.glob("*.replica") if self._other.fullmatch(path.name))

    def path(self) -> Path:
        """A name for a new replica. The folder of what ranks give of themselves is made with it: otherwise anybody
        could make it, and say what they gave. Where it cannot be made, who writes into it finds out."""
        for _ in range(MOST_TAKEN):
            self._number += 1
            self._named = self._directory / f"{self._prefix}{self._number}.replica"
            try:
                os.mkdir(self._named.with_suffix(".user"), 0o700)
                break
            except FileExistsError:
                continue  # somebody was quicker
            except OSError:
                break
        assert self._named is not None
        self._made.add(self._named)
        return self._named

    def left(self, start: str) -> LeftoverReplica | None:
        """The newest file that says it is of this start of a job."""
        found = [one for one in self.found() if start and one.start == start]
        return found[-1] if found else None

    def resume(self, path: Path) -> None:
        """What an earlier process left is the group's own again, as if its name had been given out last."""
        self._named = path
        self._made.add(path)

    def restarted(self) -> None:
        """A newer start of the job: the name that was given out last is of the one before, and nothing more goes there.
        """
        self._named = None

    def abandon(self, before: Path | None = None) -> None:
        """The name that was given out last, if it holds no version: it is not gone on with. before: what is, in its
        place."""
        named, self._named = self._named, before
        if named is not None and named != self._served:
            _unlink(named)

    @property
    def named(self) -> Path | None:
        """The name that was given out last, of this start of the job."""
        return self._named

    def stands(self, run_id: str, epoch: int, step: int) -> list[LeftoverReplica]:
        """The file named last holds a version of this run, `step`. Removes what this run has no more use for, and of
        other runs what is not good; returns what went of those."""
        self._served = self._named
        found = [kept for kept in self.found() if kept.path != self._served]
        mine = {kept.path for kept in found if (kept.run_id, kept.epoch) == (run_id, epoch) and kept.step <= step}
        others = [kept for kept in found if kept.path not in mine]
        good = _good(others) | _offered(others, self._needs)
        self._remove(path for path in self._files() if path not in good)
        self._remove_orphans()
        return [kept for kept in others if kept.path not in good]

    def _remove_orphans(self) -> None:
        """What ranks gave with a replica that never had a version."""
        for folder in self._directory.glob(f"{self._prefix}*.user"):
            of = folder.with_suffix(".replica")
            if self._number_of(folder) >= 0 and of != self._named and not of.exists() and not _not_mine(folder):
                remove_tree(folder)

    def settle(self) -> list[LeftoverReplica]:
        """This run has a version that may be relied on: all other files go. Returns what they held."""
        gone = [kept for kept in self.found() if kept.path != self._served]
        self._remove(self._files())
        return gone

    def end(self, keep: bool) -> None:
        """The group ends. Without `keep` all goes that this process has made, and else what holds no version. What an
        earlier process left stays until there is something better."""
        stay = {self._served, *(kept.path for kept in self.found())} if keep else set[Path | None]()
        for path in self._made - stay:
            _unlink(path)
        self._named = self._served = None
        self._remove_orphans()

    def discard(self) -> None:
        """The file that is served must not be any more. Those of other runs stay."""
        served, self._served = self._served, None
        if served is not None:
            _unlink(served)

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path != self._served:
                _unlink(path)


def _not_mine(path: Path) -> str:
    try:
        found = path.lstat()
    except OSError:
        return ""  # it has gone
    return "is a link" if stat.S_ISLNK(found.st_mode) else not_mine(found)


def _unlink(replica: Path) -> None:
    with contextlib.suppress(OSError):  # a file that stays takes memory; versions go on
        replica.unlink(missing_ok=True)
    remove_tree(replica.with_suffix(".user"))


def _offered(kept: list[LeftoverReplica], needs: int) -> set[Path]:
    """The newest file that recovery may have anything from."""
    return {one.path for one in [one for one in kept if needs and one.matches >= needs][-1:]}


def _good(kept: list[LeftoverReplica]) -> set[Path]:
    """Files that stay until there is something better."""
    sound = [one for one in kept if one.verified is not None] or kept
    return {sound[-1].path, max(sound, key=lambda one: one.step).path} if sound else set()
