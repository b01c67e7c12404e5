"""Drop counters as other processes see them: one file per capture, in shared memory, gone when it closes.

    /dev/shm/flowcheck-PID-LABEL        (mode 0644: numbers only)

    0     8 bytes   "fccount1"
    8     u32 x 4   process id, queues, counters per queue, bytes from one queue's counters to the next
    24    u64       start time of the process in clock ticks (/proc/PID/stat): tells a reused process id
    32    text      label, then the counters' names, each ended by a zero byte
    4096  u64 ...   queue 0, in the order of the names; queue 1 a stride further

The rx threads write their counters straight into the file, so reading costs them nothing; od -t u8 reads it
too. `python -m dataplane.counters` prints what runs on this machine. A process that was killed leaves its
file behind: readers pass over it, and the next capture removes it. Standard library only.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "FOLDER", "HEADER", "MAGIC", "PF_EXITING", "PREFIX", "Snapshot", "alive", "read_counters", "start_ticks", "sweep",
]

FOLDER = Path("/dev/shm")
PREFIX = "flowcheck-"
MAGIC = b"fccount1"
FIXED = struct.Struct("<8sIIIIQ")
HEADER = 4096
PF_EXITING = 0x4  # include/linux/sched.h


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One capture at one moment. queues: a mapping name -> value for each rx queue."""

    path: str
    pid: int
    label: str
    queues: list[dict[str, int]]


def start_ticks(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 if it does not exist, is ending or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return 0
    fields = text.rpartition(")")[2].split()  # proc_pid_stat(5), from the state on
    return 0 if fields[0] in "ZX" or int(fields[6]) & PF_EXITING else int(fields[19])


def alive(pid: int, ticks: int) -> bool:
    """Does the process that wrote the file still run?"""
    return ticks != 0 and start_ticks(pid) == ticks


def _header(data: bytes) -> tuple[int, int, int, int, int, list[str]]:
    """pid, queues, stride, counters, ticks, [label, names...]. ValueError if it is not a counter file."""
    if len(data) < HEADER or not data.startswith(MAGIC):
        raise ValueError("not a counter file")
    _magic, pid, queues, counters, stride, ticks = FIXED.unpack_from(data)
    if counters > 256 or stride < 8 * counters or len(data) < HEADER + queues * stride:
        raise ValueError("a counter file that is cut")
    texts = data[FIXED.size : HEADER].split(b"\0")[: counters + 1]
    if len(texts) != counters + 1:
        raise ValueError("a counter file without names")
    return pid, queues, stride, counters, ticks, [text.decode(errors="replace") for text in texts]


def _files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Regular files of our name with their bytes; whatever else lies there is passed over."""
    for path in sorted(folder.glob(PREFIX + "*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                yield path, os.pread(fd, 1 << 20, 0)
        except OSError:
            continue
        finally:
            os.close(fd)


def read_counters(folder: Path = FOLDER) -> list[Snapshot]:
    """Every capture that runs on this machine. Files of dead processes and foreign files are passed over."""
    found = []
    for path, data in _files(folder):
        try:
            pid, queues, stride, counters, ticks, texts = _header(data)
        except ValueError:
            continue
        if not alive(pid, ticks):
            continue
        values = [struct.unpack_from(f"<{counters}Q", data, HEADER + q * stride) for q in range(queues)]
        found.append(Snapshot(str(path), pid, texts[0], [dict(zip(texts[1:], row, strict=True)) for row in values]))
    return found


def sweep(folder: Path = FOLDER) -> None:
    """Remove counter files of processes that were killed."""
    for path, data in _files(folder):
        try:
            pid, _queues, _stride, _counters, ticks, _texts = _header(data)
        except ValueError:
            continue
        if not alive(pid, ticks):
            path.unlink(missing_ok=True)
    for path in folder.glob(f".{PREFIX}*-*"):  # killed while writing it: its name alone says whose it was
        writer = path.name.split("-")[1]
        if writer.isdecimal() and not start_ticks(int(writer)):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    json.dump([asdict(snapshot) for snapshot in read_counters()], sys.stdout, indent=1)
    print()
