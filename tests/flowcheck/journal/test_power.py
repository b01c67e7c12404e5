"""A power cut leaves what was synced, and of what was written behind it any sectors or none. What a reader finds then
is whole, and what the writer had called written is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowcheck.journal.reader import RingReader
from tests.flowcheck.journal.journal_room import place_bytes, wanted
from tests.flowcheck.journal.power import ENTRIES

ROOT = Path(__file__).resolve().parents[3]
SECTOR = 512
CUTS = 12  # at each point, with other sectors


class Disk:
    """synced: what is there for certain. unsynced: writes behind it, by sectors: first byte and bytes."""

    def __init__(self, size: int) -> None:
        self.synced = np.zeros(size, np.uint8)
        self.unsynced: list[tuple[int, bytes]] = []

    def write(self, at: int, data: bytes) -> None:
        self.unsynced += [(at + first, data[first : first + SECTOR]) for first in range(0, len(data), SECTOR)]

    def sync(self) -> None:
        self.synced = self.after_a_cut(np.ones(len(self.unsynced), bool))
        self.unsynced = []

    def after_a_cut(self, landed: np.ndarray) -> np.ndarray:
        found = self.synced.copy()
        for (at, data), there in zip(self.unsynced, landed, strict=True):
            if there:
                found[at : at + len(data)] = np.frombuffer(data, np.uint8)
        return found


def points(log: bytes, disk: Disk) -> Iterator[int]:
    """Plays the log; at each point how many iterations the writer has called written."""
    at, written = 0, 0
    while at < len(log):
        kind, at = log[at : at + 1], at + 1
        if kind == b"P":
            first, size = (int.from_bytes(log[at + 8 * i : at + 8 * i + 8], "little") for i in (0, 1))
            disk.write(first, log[at + 16 : at + 16 + size])
            at += 16 + size
        elif kind == b"S":
            disk.sync()
        else:
            written, at = int.from_bytes(log[at : at + 8], "little") + 1, at + 8
        yield written


def test_a_power_cut_at_any_point(slow_files: Path, tmp_path: Path) -> None:
    directory, log, seen = tmp_path / "disk", tmp_path / "log", tmp_path / "seen" / "ring-00000"
    subprocess.run(
        [sys.executable, "-m", "tests.flowcheck.journal.power", str(directory), str(log)], check=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(slow_files), "SLOW_UNDER": str(directory),
             "SLOW_LOG": str(log)},
    )
    path = directory / "ring-00000"
    disk = Disk(path.stat().st_size)
    disk.synced[:4096] = np.frombuffer(path.read_bytes()[:4096], np.uint8)
    seen.parent.mkdir()
    rng, most = np.random.default_rng(1), 0
    for written in points(log.read_bytes(), disk):
        for cut in range(CUTS if disk.unsynced else 1):
            landed = rng.random(len(disk.unsynced)) < cut / (CUTS - 1)
            disk.after_a_cut(landed).tofile(seen)
            reader = RingReader(seen.parent)
            assert reader.damaged == []
            numbers = [entry.number for entry in reader.entries]
            for number in numbers:
                head, spans = reader.read(number)
                assert (head, [span.tobytes() for span in spans]) == wanted(number)
            assert written == 0 or written - 1 in numbers, "what was written last is there"
        most = max(most, written)
    assert most == ENTRIES
    assert path.stat().st_size == 2 * place_bytes() + 4096
