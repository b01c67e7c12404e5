"""Reading a replica in another process: recovery, persistence, a person.

    with Reader(path).pinned() as version: version.step, version.parameters, version.optimizer_state
    Reader(path).steps                     what could be pinned now; pinned(step) takes that version or none

Read-only in every sense: the file is opened and mapped so, and a pin is a lock that the kernel drops when the reader
dies. A pinned version does not change; the writer goes on in the other slots and waits only when none is left.
One Reader may be used from several threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from updater.errors import ReplicaError
from updater.slot import Version
from updater.store import COMPLETE, Store

__all__ = ["PinnedVersion", "Reader"]


class PinnedVersion(Version):
    """Tensors over the mapped file: writing to one of them is a segmentation fault."""

    def __init__(self, store: Store, index: int, step: int) -> None:
        super().__init__(store, index)
        self.step = step


class Reader:
    """An existing replica file. Raises ReplicaError if it is torn, foreign, or another job's."""

    def __init__(self, path: str | os.PathLike[str], *, run_id: str | None = None, epoch: int | None = None) -> None:
        path = Path(path)
        self._store, self._path = Store.read(path), path
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
    def verified(self) -> int | None:
        """The newest step that was found equal to the trainer's own state; None: none was compared."""
        return self._store.verified

    @property
    def steps(self) -> list[int]:
        """Steps of the complete versions at this moment, newest last."""
        return sorted(self._store.complete())

    def close(self) -> None:
        """Let go of the file; may be called twice. Pins that are held stay until their blocks are left."""
        self._store.close()

    @contextmanager
    def pinned(self, step: int | None = None) -> Iterator[PinnedVersion]:
        """The version of `step`, or the newest complete one, kept until the block is left.

        Raises ReplicaError if there is no such version (any more).
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
