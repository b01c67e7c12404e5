"""Coverage bitmaps: the Python door to parser/include/cover.h.

A bitmap is a uint64 array; bit c says that cell c is there. IndexError for cells outside of it.
"""

import numpy as np

from libc.stdint cimport int64_t, uint64_t


cdef extern from "cover.h" nogil:
    int fc_cover_any(const uint64_t *map, uint64_t first, uint64_t end)
    void fc_cover_set(uint64_t *map, uint64_t first, uint64_t end)
    uint64_t fc_cover_count(const uint64_t *map, uint64_t words)
    uint64_t fc_cover_gaps(const uint64_t *map, uint64_t *first, uint64_t end, int64_t (*out)[2], uint64_t room)


cdef int inside(const uint64_t[::1] bitmap, uint64_t first, uint64_t end) except -1:
    if not first <= end <= 64 * <uint64_t>bitmap.shape[0]:
        raise IndexError(f"cells {first} to {end} of {64 * bitmap.shape[0]}")
    return 0


def any_in(const uint64_t[::1] bitmap, uint64_t first, uint64_t end):
    """fc_cover_any on cells [first, end)."""
    inside(bitmap, first, end)
    return bool(fc_cover_any(&bitmap[0], first, end))


def put(uint64_t[::1] bitmap, uint64_t first, uint64_t end):
    """fc_cover_set on cells [first, end)."""
    inside(bitmap, first, end)
    fc_cover_set(&bitmap[0], first, end)


def gaps(const uint64_t[::1] bitmap, uint64_t first, uint64_t end, uint64_t room):
    """fc_cover_gaps: (the first `room` gaps of [first, end) as a list of (start, end), where to go on)."""
    cdef int64_t[:, ::1] out = np.empty((room + 1, 2), dtype=np.int64)
    cdef uint64_t n
    inside(bitmap, first, end)
    n = fc_cover_gaps(&bitmap[0], &first, end, <int64_t (*)[2]>&out[0, 0], room)
    return [(out[i, 0], out[i, 1]) for i in range(n)], first


def missing(const uint64_t[::1] bitmap, uint64_t first, uint64_t end):
    """int64 array (n, 2): all runs [start, end) of cells within [first, end) without a bit, in order."""
    cdef uint64_t n
    cdef int64_t room = 256
    cdef int64_t[:, ::1] out
    inside(bitmap, first, end)
    parts = []
    while first < end or not parts:
        found = np.empty((room, 2), dtype=np.int64)
        out = found
        with nogil:
            n = fc_cover_gaps(&bitmap[0], &first, end, <int64_t (*)[2]>&out[0, 0], <uint64_t>room)
        parts.append(found[:n])
        room = min(4 * room, 1 << 20)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def count(const uint64_t[::1] bitmap):
    """How many bits are set."""
    cdef uint64_t n
    with nogil:
        n = fc_cover_count(&bitmap[0], bitmap.shape[0])
    return int(n)
