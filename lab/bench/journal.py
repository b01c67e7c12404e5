"""bench journal: iterations through a journal's ring (flowcheck/journal/), beside `dd` of as many bytes to as large a
file of the same file system.

    journal.WHERE.WIDTH      GB/s of gradients from the first offer until the last of ENTRIES iterations is whole,
                             against dd from /dev/zero: past the page cache where the file system has that, one
                             fdatasync at its end

WHERE: `disk` is the folder of temporary files (TMPDIR), `memory` is /dev/shm. WIDTH: of a parameter's gradient; the
bytes that the bench is given are those of fp32. All files were written once before the first round.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flowcheck.errors import EnvironmentProblem
from flowcheck.journal.format import BLOCK, entry_bytes, spans_of
from flowcheck.journal.ring import Hole, RingWriter
from lab.bench.rows import Row, alternate, here
from lab.bench.workload import aligned

__all__ = ["run"]

TARGET = 0.85
ENTRIES, PLACES = 4, 3
BUCKETS = 25  # spans of an iteration
WIDTHS = {"fp32": 4, "bf16": 2}
AT_ONCE = 16 << 20  # bytes that dd writes at a time
HEAD = b'{"iteration": 0}'


def run(rounds: int, ring_bytes: int) -> list[Row]:
    """Rows of both file systems and widths; an iteration has `ring_bytes` of fp32."""
    region = aligned(ring_bytes)
    region[:] = np.random.default_rng(1).integers(0, 256, ring_bytes, np.uint8)
    rows = []
    for where, folder in {"disk": tempfile.gettempdir(), "memory": "/dev/shm"}.items():
        for width, size in WIDTHS.items():
            rows.append(_row(f"journal.{where}.{width}", Path(folder), region[: ring_bytes * size // 4], rounds))
    return rows


def _row(name: str, folder: Path, region: np.ndarray, rounds: int) -> Row:
    spans = spans_of([region.nbytes // BUCKETS // BLOCK * BLOCK] * BUCKETS)
    moved = ENTRIES * int(spans[:, 1].sum())
    most = entry_bytes(len(HEAD), spans[:, 1].tolist())
    with tempfile.TemporaryDirectory(prefix="flowcheck-bench-", dir=folder) as made, RingWriter(
        Path(made) / "journal", PLACES * most + BLOCK, most
    ) as writer:
        contenders = {"ours": _ours(writer, region, spans), "dd": _dd(Path(made) / "dd", moved, writer.how == "direct")}
        seconds = alternate(contenders, rounds)
        setting = here(files=writer.how)
    speed = {which: [1e-9 * moved / one for one in taken] for which, taken in seconds.items()}
    return Row.of(name, "GB/s", speed["ours"], speed["dd"], TARGET, setting)


def _ours(writer: RingWriter, region: np.ndarray, spans: np.ndarray) -> Callable[[], float]:
    def measure() -> float:
        begin, given, done = time.perf_counter(), 0, 0
        while done < ENTRIES:
            if given < ENTRIES and given - done < 2:
                writer.offer(given, HEAD, region, spans)
                given += 1
                continue
            time.sleep(0.0002)
            for one in writer.taken():
                if isinstance(one, Hole):
                    raise EnvironmentProblem(one.why, where="bench journal", remedy="another folder in TMPDIR")
                done += 1
        return time.perf_counter() - begin

    return measure


def _dd(path: Path, nbytes: int, direct: bool) -> Callable[[], float]:
    """Over the same bytes of one file as often as it takes to have written so many."""
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={AT_ONCE}", f"count={nbytes}", "iflag=count_bytes",
               "conv=notrunc,fdatasync", *(["oflag=direct"] if direct else [])]

    def measure() -> float:
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise EnvironmentProblem(done.stderr.strip(), where=str(path), remedy="another folder in TMPDIR")
        return seconds

    return measure
