"""Replica files of a group: which one is served, what an earlier process left, what may go.

Names are flowcheck-NODE-GROUP-NUMBER.replica. A new state gets a file of its own, and its predecessor goes when the new
one holds a complete version: at no instant is there none. Files that an earlier process left (kill -9) stay
readable (updater/reader.py) and are removed when a new state is here.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flowcheck.replica import JobReplica
from updater.errors import UpdaterError
from updater.reader import Reader

__all__ = ["Kept", "Served"]


@dataclass(frozen=True)
class Kept:
    """What a file of an earlier process holds."""

    path: Path
    run_id: str
    step: int


class Served:
    def __init__(self, directory: Path, node: str, group: str) -> None:
        self._directory, self._prefix = directory, f"flowcheck-{node}-{group}-"
        taken = [int(p.name.removeprefix(self._prefix).split(".")[0]) for p in self._files()]
        self._number = max(taken, default=0)
        self._newest: Path | None = None

    def _files(self) -> list[Path]:
        rest = lambda path: path.name.removeprefix(self._prefix).removesuffix(".replica")  # noqa: E731
        return sorted(p for p in self._directory.glob(f"{self._prefix}*.replica") if rest(p).isdigit())

    def found(self) -> list[Kept]:
        """What earlier processes left and is whole."""
        out = []
        for path in self._files():
            try:
                with closing(Reader(path)) as reader, reader.pinned() as version:
                    out.append(Kept(path, reader.run_id, version.step))
            except UpdaterError:
                continue  # torn while it was made: it never had a complete version
        return out

    def path(self, iteration: int) -> Path:
        """A name for a new replica."""
        self._number += 1
        self._newest = self._directory / f"{self._prefix}{self._number}.replica"
        return self._newest

    def keep_only(self, replica: JobReplica | None) -> None:
        """The newest file holds `replica`; all older ones may go."""
        for path in self._files():
            if path != self._newest or replica is None:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        self.keep_only(None)
