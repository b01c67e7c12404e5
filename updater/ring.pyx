"""Entries of a journal on their way from an arena to a place in a file (include/ring.h): two slots, two threads of C.

`offer` never waits and the threads never take the GIL. Files, places and what is kept are flowcheck/journal's. One
thread calls, but for `reads`.
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport strerror

__all__ = ["BLOCK", "Ring", "file_system", "nbytes", "sum_of", "sum_of_block"]


cdef extern from "<sys/vfs.h>" nogil:
    struct statfs_s "statfs":
        long f_type
    int fstatfs(int fd, statfs_s *out)


cdef extern from "sums.h" nogil:
    ctypedef void fcs_blocks(const void *data, int abreast, uint64_t k, int size, uint64_t *sums)
    uint64_t fcs_begin(uint64_t n)
    uint64_t fcs_part(fcs_blocks *blocks_of, const void *data, uint64_t first, uint64_t n, int size)


cdef extern from "update.h" nogil:
    ctypedef struct fcu_kernels:
        fcs_blocks *sums
    const fcu_kernels *fcu_best


cdef extern from "ring.h" nogil:
    enum: FCJ_BLOCK, FCJ_LINE, FCJ_SLOTS, FCJ_MAPPED, FCJ_DIRECT, FCJ_DISK
    ctypedef struct fcj_entry:
        int64_t number
        uint64_t ticket
        int fd
        uint64_t at
        uint8_t *place
        const uint8_t *head
        const uint8_t *region
        uint64_t head_bytes, count
        const int64_t *spans
    ctypedef struct fcj_outcome:
        int64_t number
        uint64_t ticket, bytes
        int64_t nanoseconds
        int step, error
    ctypedef struct fcj_ring:
        pass
    uint64_t fcj_bytes(uint64_t head_bytes, const int64_t *spans, uint64_t count)
    uint64_t fcj_block_sum(fcs_blocks *blocks_of, const void *block)
    fcj_ring *fcj_start(uint64_t slot_bytes, int how, fcs_blocks *blocks_of)
    int fcj_offer(fcj_ring *ring, const fcj_entry *entry)
    int fcj_reads(const fcj_ring *ring, int64_t number)
    int fcj_taken(fcj_ring *ring, fcj_outcome *outcome)
    int64_t fcj_writing(const fcj_ring *ring, int64_t *number)
    int fcj_stop(fcj_ring *ring, int64_t nanoseconds)
    void fcj_free(fcj_ring *ring)


BLOCK = FCJ_BLOCK
cdef dict MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


def file_system(int fd):
    """"tmpfs", "ramfs" or "hugetlbfs"; "": one on a disk, or on another machine. Raises OSError."""
    cdef statfs_s found
    if fstatfs(fd, &found):
        raise OSError(errno, strerror(errno).decode())
    return MEMORY.get(found.f_type & 0xFFFFFFFF, "")


cdef int check(const int64_t[:, ::1] spans, int64_t end) except -1:
    cdef int64_t i, first, size
    if spans.shape[1] != 2:
        raise ValueError(f"spans of {spans.shape[1]} numbers")
    for i in range(spans.shape[0]):
        first, size = spans[i, 0], spans[i, 1]
        if first < 0 or size < 0 or size > end or first > end - size:
            raise ValueError(f"span {i}: {size} bytes from {first} on, of a region of {end}")
    return 0


def nbytes(uint64_t head_bytes, const int64_t[:, ::1] spans, int64_t region_bytes):
    """Bytes of a place that an entry takes: spans: (n, 2), [first byte, bytes] of each. Raises ValueError: they are not
    in a region of region_bytes."""
    cdef uint64_t count = <uint64_t>spans.shape[0]
    check(spans, region_bytes)
    return fcj_bytes(head_bytes, &spans[0, 0] if count else NULL, count)


def sum_of_block(const uint8_t[::1] block):
    """What the first word of a block of BLOCK bytes has to be."""
    if block.shape[0] != FCJ_BLOCK:
        raise ValueError(f"a block of {block.shape[0]} bytes")
    return fcj_block_sum(fcu_best.sums, &block[0])


def sum_of(const uint8_t[::1] data):
    """The checksum of bytes that are whole lines, as elements of 4 bytes."""
    cdef uint64_t found, n = <uint64_t>data.shape[0] // 4
    if data.shape[0] % FCJ_LINE:
        raise ValueError(f"{data.shape[0]} bytes are no whole lines")
    with nogil:
        found = fcs_begin(n) + fcs_part(fcu_best.sums, &data[0] if n else NULL, 0, n, 4)
    return found


cdef class Ring:
    """slot_bytes: the most that an entry takes. mapped: places are memory that the caller has mapped; else direct:
    their files are open for direct I/O, disk: fdatasync makes what was written last. files: kept as long as the threads
    may use them. Raises MemoryError."""

    cdef fcj_ring *ring
    cdef dict keep  # what is copied, by ticket
    cdef bint ended, given_up
    cdef object files

    def __cinit__(self, uint64_t slot_bytes, bint mapped=False, bint direct=False, bint disk=False, object files=None):
        cdef int how = (FCJ_MAPPED if mapped else 0) | (FCJ_DIRECT if direct else 0) | (FCJ_DISK if disk else 0)
        self.keep, self.files = {}, files
        self.ring = fcj_start(slot_bytes, how, fcu_best.sums)
        if self.ring == NULL:
            raise MemoryError(f"a journal's two slots of {slot_bytes} bytes, or its threads")

    def __dealloc__(self):
        if self.ring != NULL:
            if not self.ended:
                with nogil:
                    self.given_up = not fcj_stop(self.ring, 0)
            if not self.given_up:
                fcj_free(self.ring)

    def offer(
        self, int64_t number, uint64_t ticket, int fd, uint64_t at, uintptr_t place, const uint8_t[::1] head,
        const uint8_t[::1] region, const int64_t[:, ::1] spans,
    ):
        """False: no slot is free. The caller has made sure that it is no larger than slot_bytes. fd, at: where it goes,
        or place: the address. All three arrays are kept, and must stay as they are, while reads(number)."""
        cdef fcj_entry entry
        cdef int64_t end = region.shape[0]
        if self.ring == NULL or self.ended:
            raise ValueError("the ring is closed")
        check(spans, end)
        entry.number, entry.ticket, entry.fd, entry.at = number, ticket, fd, at
        entry.place = <uint8_t *>place
        entry.head_bytes, entry.count = <uint64_t>head.shape[0], <uint64_t>spans.shape[0]
        entry.head = &head[0] if entry.head_bytes else NULL
        entry.region = &region[0] if end else NULL
        entry.spans = &spans[0, 0] if entry.count else NULL
        if not fcj_offer(self.ring, &entry):
            return False
        self.keep[ticket] = (head, region, spans)
        return True

    def reads(self, int64_t number):
        """Is the region that was offered with this number still read?"""
        return self.ring != NULL and fcj_reads(self.ring, number) != 0

    def taken(self):
        """What is done, in the order offered: (number, ticket, bytes, seconds, step, errno), step 0: it is whole."""
        cdef fcj_outcome one
        out = []
        while self.ring != NULL and fcj_taken(self.ring, &one):
            self.keep.pop(one.ticket, None)
            out.append((one.number, one.ticket, one.bytes, 1e-9 * one.nanoseconds, one.step, one.error))
        return out

    def writing(self):
        """(number, seconds) of what is written at the moment, or None."""
        cdef int64_t number = 0, since
        if self.ring == NULL:
            return None
        since = fcj_writing(self.ring, &number)
        return None if since < 0 else (number, 1e-9 * since)

    def end(self, double seconds):
        """End both threads, behind what was offered: nothing may be offered any more. False: it was not written in so
        many seconds, and its memory and the thread are given up."""
        cdef fcj_ring *ring = self.ring
        cdef int done = 1
        if ring != NULL and not self.ended:
            with nogil:
                done = fcj_stop(ring, <int64_t>(1e9 * seconds))
            self.ended = True
            self.given_up = not done
        return not self.given_up

    def close(self):
        """Behind `end`; what is still to be said is lost. May be called twice."""
        cdef fcj_ring *ring = self.ring
        if ring != NULL and self.ended:
            self.ring = NULL
            self.keep = {}
            if not self.given_up:
                fcj_free(ring)
