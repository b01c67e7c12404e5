"""What a process keeps of memory that it has freed: the C library's limits, held where they begin.

    keep_little()          the first thing in a node's process, and in those that it starts
    give_back()            now and then, in one that answers: what garbage there is, and what lies free between blocks

A job that goes frees some blocks of megabytes and many small ones; the next start of it takes the same again. glibc
maps a large block by itself, and gives it back when it is freed. But then it takes blocks of up to that size for small
ones from now on (mallopt(3), M_MMAP_THRESHOLD; 32 MiB at most), and keeps twice as much at the end of a heap. So
the next job's blocks lie in heaps, of which a thread has one of its own, up to eight for each processor, and what one
keeps no other can use. A node's memory then grows with starts of jobs, in steps that end, and nobody can tell that
from a leak. Limits that are set do not move; and one heap is enough where Python's lock lets one thread at a time
allocate. Threads in C take nothing while they place packets. The cost: a block of 128 KiB or more is mapped each time,
some microseconds.
"""

from __future__ import annotations

import ctypes
import gc

__all__ = ["LARGE", "give_back", "keep_little"]

LARGE = 128 << 10  # bytes: where both limits begin
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h


def keep_little() -> bool:
    """False: this C library has no such limits."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_MMAP_THRESHOLD, LARGE), mallopt(_TRIM_THRESHOLD, LARGE), mallopt(_ARENA_MAX, 1)])


def give_back() -> None:
    """Milliseconds, if what the process was started with is frozen (gc.freeze). Python itself looks for all garbage
    only when a quarter as much as it has in all has come; what has outlived a look, but no more, waits for that."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
