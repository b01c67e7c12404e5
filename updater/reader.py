"""Reading a replica in another process: recovery, persistence, a person.

    with Reader(path).pinned() as version: version.step, version.parameters, version.optimizer_state
    Reader(path).steps                     what could be pinned now; pinned(step) takes that version or none

Read-only in every sense: the file is opened and mapped so, and a pin is a lock that the kernel drops when the reader
dies. A pinned version does not change; the writer goes on in the other slots and waits only when none is left.
One Reader may be used from several threads.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from updater.errors import ReplicaError
from updater.found import OWN
from updater.remarks import read
from updater.slot import Version
from updater.store import COMPLETE, Store

__all__ = ["UNSAID", "PinnedVersion", "Reader"]

VERIFIED, UNVERIFIED = "verified", "unverified"

UNSAID = "the replica was written by a version of flowcheck that did not say what it leaves open"


class PinnedVersion(Version):
    """Tensors over the mapped file: writing to one of them is a segmentation fault."""

    def __init__(self, store: Store, index: int, step: int) -> None:
        super().__init__(store, index)
        self._header, self.step = (lambda: store.slot_header(index)), step
        #: What the version was found to be when it was published, what nothing has shown of it, and how many checksums
        #: of the trainer had matched by then.
        self.status, unproven, self.matches = _said(store, index, step)
        self.unproven = (*_unproven(store), *unproven)

    def is_there(self) -> bool:
        """May it be read? False: its writer has found that something is wrong since before it was made."""
        return self._header() == (COMPLETE, self.step)


def not_mine(found: os.stat_result, others: int = 0o022) -> str:
    """Why a file's content need not be this user's, "": it is. others: who must not be able to write to it."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        return "has another name as well"  # somebody may have linked another file of this user's to this name
    return f"may be written to by others (mode {found.st_mode & 0o777:o})" if found.st_mode & others else ""


class Reader:
    """An existing replica file. Raises ReplicaError if it is torn, foreign, or another job's. mine: also if it is
    another user's, one that others may write to, or a link: everybody may put those into /dev/shm."""

    def __init__(
        self, path: str | os.PathLike[str], *, run_id: str | None = None, epoch: int | None = None, mine: bool = False
    ) -> None:
        path = Path(path)
        self._store, self._path = Store.read(path, not_mine if mine else None), path
        self._place = path.absolute()  # a process may go to another directory
        for what, wanted in (("run_id", run_id), ("epoch", epoch)):
            if wanted is not None and self._store.layout[what] != wanted:
                self.close()
                raise ReplicaError(f"{path}: belongs to {what} {self._store.layout[what]!r}, not {wanted!r}")

    @property
    def run_id(self) -> str:
        return str(self._store.layout["run_id"])

    @property
    def epoch(self) -> int:
        return int(self._store.layout["epoch"])

    @property
    def rounding(self) -> str:
        """The order of roundings that versions are computed in, such as torch-cuda-foreach."""
        return str(self._store.layout["dialect"])

    @property
    def unproven(self) -> tuple[str, ...]:
        """Marks of what all versions rest on and nothing has shown, as their writer said."""
        return _unproven(self._store)

    @property
    def slots(self) -> int:
        return self._store.slots

    @property
    def nbytes(self) -> int:
        """Bytes of one version's arrays."""
        return sum(array.nbytes for array in (*self._store.constants, *self._store.arrays))

    @property
    def verified(self) -> int | None:
        """The newest step that was found equal to the trainer's own state; None: none was compared."""
        return self._store.verified

    @property
    def start(self) -> str:
        """Which start of the job's trainers it follows; "": unsaid."""
        return str(self._store.layout.get("start", ""))

    @property
    def heard(self) -> int | None:
        """The newest step that the trainers have said they made; None: unsaid."""
        return self._store.heard

    @property
    def times(self) -> dict[int, float | None]:
        """Step -> when it was published, in seconds since 1970, of the complete versions at this moment."""
        found = {step: self._store.time(index) for step, index in sorted(self._store.complete().items())}
        return {step: at / 1e9 if at else None for step, at in found.items()}

    @property
    def steps(self) -> list[int]:
        """Steps of the complete versions at this moment, newest last."""
        return sorted(self._store.complete())

    @property
    def statuses(self) -> dict[int, str]:
        """Step -> status of the complete versions at this moment, newest last. A pinned version's own is surer: a slot
        may be taken between two looks."""
        return {step: _said(self._store, index, step)[0] for step, index in sorted(self._store.complete().items())}

    @property
    def matches(self) -> dict[int, int]:
        """Step -> checksums of the trainer that had matched when it was published, of the complete versions at this
        moment."""
        return {step: _said(self._store, index, step)[2] for step, index in sorted(self._store.complete().items())}

    def is_there(self) -> bool:
        """Does the file still have its name? It loses it when its writer finds that it is wrong."""
        try:
            return os.path.samestat(os.fstat(self._store.fd), os.stat(self._place))
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the file; may be called twice. Pins that are held stay until their blocks are left."""
        self._store.close()

    @contextmanager
    def pinned(self, step: int | None = None) -> Iterator[PinnedVersion]:
        """The version of `step`, or the newest complete one, kept until the block is left.

        Raises ReplicaError if the version does not exist (any more).
        """
        fd, index, found = self._pin(step)
        try:
            yield PinnedVersion(self._store, index, found)
        finally:
            os.close(fd)

    def _pin(self, wanted: int | None) -> tuple[int, int, int]:
        """Between looking and locking the writer may have taken the slot: look again, at most a few times."""
        for _ in range(1000):
            versions = self._store.complete()
            step = wanted if wanted is not None else max(versions, default=None)
            index = versions.get(step) if step is not None else None
            if index is None:
                if wanted is not None:
                    have = ", ".join(map(str, sorted(versions))) or "none"
                    raise ReplicaError(f"{self._path}: no complete version {wanted}; there is {have}")
                continue  # a word is being replaced
            fd = self._store.pin(index)
            if fd is None:
                continue
            if self._store.slot_header(index) == (COMPLETE, step):
                assert step is not None
                return fd, index, step
            os.close(fd)
        raise ReplicaError(f"{self._path}: no complete version could be pinned")


def _unproven(store: Store) -> tuple[str, ...]:
    marks = store.layout.get("unproven")
    return (UNSAID,) if marks is None else tuple(map(str, marks))


def _said(store: Store, index: int, step: int) -> tuple[str, tuple[str, ...], int]:
    """Status, marks and matches of the version in a slot.

    If the file has no status for this version, it is verified only if it is the marked step. Old releases wrote
    `verified` on every version after a match: for their files the same rule holds. A verified one has matched once."""
    status, unproven, matches = read(store.remarks(index))
    matches = int(status == VERIFIED) if matches is None else matches
    if not status or (status == VERIFIED and store.layout.get("statuses") != OWN):
        status = VERIFIED if store.verified == step else UNVERIFIED
    return status, unproven, max(matches, int(status == VERIFIED))
