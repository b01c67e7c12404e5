"""The memory traffic of an optimizer step without its arithmetic (src/roof.c), and of a checksum: limits of benches.

Addresses are plain integers; the caller keeps the memory alive and large enough. No thread of its own, no GIL.
"""

from libc.stdint cimport uint64_t, uintptr_t


cdef extern from "roof.h" nogil:
    void fcb_roof(const void *g, int narrow, float **t, float **t1, uint64_t n)
    uint64_t fcb_read(const void *data, uint64_t nbytes)


def adam(uintptr_t g, bint narrow, tuple t, tuple t1, uint64_t n):
    """Read a gradient (2 bytes each if narrow, else 4) and three arrays, write three; n a multiple of 16, all aligned."""
    cdef float *src[3]
    cdef float *dst[3]
    cdef int i
    for i in range(3):
        src[i], dst[i] = <float *><uintptr_t>t[i], <float *><uintptr_t>t1[i]
    if n % 16 or any(a % 64 for a in (g, *t, *t1)):
        raise ValueError("the roof needs whole cache lines")
    with nogil:
        fcb_roof(<const void *>g, narrow, src, dst, n)


def read(uintptr_t data, uint64_t nbytes):
    """Read so many bytes; a multiple of 256, on a cache line."""
    cdef uint64_t found
    if nbytes % 256 or data % 64:
        raise ValueError("the read limit needs whole cache lines")
    with nogil:
        found = fcb_read(<const void *>data, nbytes)
    return found
