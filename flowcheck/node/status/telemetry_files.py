"""Telemetry on disk: CSV files, a row for each tensor of each iteration that was measured.

    files = Files(settings, say)
    files.put(group, folder, count, rows)       on any thread; never waits: what finds no room is dropped and counted
    files.counts()                              by group: rows that were written, rows that were dropped

They lie in DIRECTORY/GROUP/RUN/epoch-E/: `gradients.csv` is written, `gradients-000001.csv` and so on are full, the
oldest of these are removed. Each begins with the names of the columns. A row is written whole or not at all, but for a
kill or a full disk.
"""

from __future__ import annotations

import csv
import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from flowcheck.durable import make_directory, private, reporting
from flowcheck.errors import EnvironmentProblem

__all__ = ["COLUMNS", "Files", "Row", "Settings"]

COLUMNS = ("time", "iteration", "tensor", "elements", "norm", "largest", "zeros", "nan", "infinity", "first_nan",
           "first_infinity", "update_ratio")
Row = tuple[float | int | str, ...]
MOST = 8  # iterations whose rows wait
END_SECONDS = 5.0
FULL = "gradients-{:06}.csv"


class Settings(Protocol):
    """[telemetry], as far as it is needed here (config/telemetry.py)."""

    @property
    def directory(self) -> Path | None: ...
    @property
    def series(self) -> int: ...
    @property
    def file_mb(self) -> int: ...
    @property
    def files(self) -> int: ...


class Files:
    """One thread writes, and alone waits for the disk."""

    def __init__(self, settings: Settings, say: Callable[..., None]) -> None:
        assert settings.directory is not None
        self._directory, self._most, self._kept = settings.directory, settings.file_mb << 20, settings.files
        self._say = say
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Path, int, Iterable[Row]]] = deque()
        self._counts: dict[str, dict[str, int]] = {}
        self._closed = self._broken = False
        self._thread = threading.Thread(target=self._main, name="flowcheck telemetry", daemon=True)
        self._thread.start()

    def put(self, group: str, folder: Path, count: int, rows: Iterable[Row]) -> None:
        """folder: of the run, below the group's. rows: so many; they are made when they are written."""
        with self._changed:
            if self._closed or len(self._waiting) >= MOST:
                self._count(group, "dropped", count)
                return
            self._waiting.append((group, self._directory / group / folder / "gradients.csv", count, rows))
            self._changed.notify()

    def counts(self) -> dict[str, dict[str, int]]:
        with self._changed:
            return {group: dict(of) for group, of in self._counts.items()}

    def _count(self, group: str, what: str, rows: int) -> None:
        self._counts.setdefault(group, {"written": 0, "dropped": 0})[what] += rows

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                group, path, count, rows = self._waiting[0]  # it has its place until it is written
            why = ""
            try:
                self._write(path, rows)
            except EnvironmentProblem as error:
                why = error.message()
            with self._changed:
                self._waiting.popleft()
                self._count(group, "dropped" if why else "written", count)
            if why and not self._broken:
                self._say("problem", why=why, about="telemetry")
            elif self._broken and not why:
                self._say("solved", about="telemetry")
            self._broken = bool(why)

    def _write(self, path: Path, rows: Iterable[Row]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        with reporting(path, "free space on that file system, or another telemetry.directory"):
            make_directory(path.parent)
            if path.exists() and path.stat().st_size >= self._most:
                self._turn(path)
            if not path.exists():
                writer.writerow(COLUMNS)
            writer.writerows(rows)
            with open(path, "ab", opener=private) as file:
                file.write(text.getvalue().encode(errors="backslashreplace"))

    def _turn(self, path: Path) -> None:
        """This file is full."""
        full = sorted(path.parent.glob("gradients-*.csv"))
        last = int(full[-1].stem.partition("-")[2]) if full else 0
        os.rename(path, path.parent / FULL.format(last + 1))
        for old in full[: max(len(full) + 2 - self._kept, 0)]:
            old.unlink()

    def close(self) -> None:
        """What is not written after END_SECONDS never is."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(END_SECONDS)
