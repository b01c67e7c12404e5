"""Memory of this process alone, in huge pages where the kernel gives some: what is read or written in one go is faster.

    memory = anonymous(nbytes)
"""

from __future__ import annotations

import contextlib
import mmap

__all__ = ["anonymous"]


def anonymous(nbytes: int) -> mmap.mmap:
    """Of zeros. Raises OSError: so much cannot be had."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
