"""The minimal loop of `bench ingest` (include/minimal.h), and what it needs in memory."""

import numpy as np

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy


cdef extern from "decode.h" nogil:
    ctypedef struct fcb_flow:
        uint8_t src[16]
        uint8_t dst[16]
        uint32_t qpn, version, next_psn, messages
        uint64_t packets, bytes, gaps, address
    uint32_t fcb_hash(const uint8_t *src, const uint8_t *dst, uint32_t width, uint32_t qpn)

cdef extern from "minimal.h" nogil:
    ctypedef struct fcb_loop:
        fcb_flow *table
        uint32_t mask
        int protocol
        uint32_t mtu, piece, ahead
        uint64_t part, per_lap, left, laps, lap
        uint8_t **arenas
        uint64_t **covers
        uint64_t placed, repeated, wrong, strange
    void fcb_loop_take(void *loop, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n)


def _aligned(size_t nbytes):
    """As the engine gets its regions, so that the same pages lie under both."""
    raw = np.zeros(nbytes + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip:skip + nbytes]


cdef class MinimalLoop:
    """flows: (source address, destination address, QP number) each, with equal parts of a region of `region` bytes, one
    behind the other. A lap has `per_lap` packets and begins at PSN 0; each of `laps` has a region of its own.

    take, address: a fc_rx_taker and its argument, as integers."""

    cdef fcb_loop loop
    cdef readonly list arenas
    cdef list covers

    def __cinit__(self, flows, int protocol, uint32_t mtu, uint64_t region, uint64_t per_lap, uint64_t laps):
        cdef uint32_t at, size = 16
        cdef uint64_t i
        cdef const uint8_t *src
        cdef const uint8_t *dst
        cdef fcb_flow *flow
        while size < 4 * len(flows):
            size *= 2
        self.loop.mask = size - 1
        self.loop.table = <fcb_flow *>calloc(size, sizeof(fcb_flow))
        self.loop.arenas = <uint8_t **>calloc(laps, sizeof(uint8_t *))
        self.loop.covers = <uint64_t **>calloc(laps, sizeof(uint64_t *))
        if self.loop.table == NULL or self.loop.arenas == NULL or self.loop.covers == NULL:
            raise MemoryError("the minimal loop")
        self.loop.protocol, self.loop.mtu = protocol, mtu
        self.loop.piece = mtu // 2 if protocol == 0 else mtu // 1024 * 960 if protocol == 1 else mtu
        self.loop.part, self.loop.per_lap, self.loop.laps = region // len(flows), per_lap, laps
        if mtu % 1024 or region % (len(flows) * self.loop.piece):
            raise ValueError(f"{len(flows)} flows of whole packets of {mtu} bytes do not make {region} bytes")
        for number, (source, destination, qpn) in enumerate(flows):
            src, dst = source, destination
            at = fcb_hash(src, dst, len(source), qpn) & self.loop.mask
            while self.loop.table[at].version:
                at = (at + 1) & self.loop.mask
            flow = &self.loop.table[at]
            memcpy(flow.src, src, len(source))
            memcpy(flow.dst, dst, len(source))
            flow.qpn, flow.version = qpn, 4 if len(source) == 4 else 6
            flow.address = number * self.loop.part
        self.arenas = [_aligned(region) for _ in range(laps)]
        self.covers = [np.zeros(region // 512 + 1, dtype=np.uint64) for _ in range(laps)]
        for i in range(laps):
            self.loop.arenas[i] = <uint8_t *><uintptr_t>self.arenas[i].ctypes.data
            self.loop.covers[i] = <uint64_t *><uintptr_t>self.covers[i].ctypes.data

    def __dealloc__(self):
        free(self.loop.table)
        free(self.loop.arenas)
        free(self.loop.covers)

    @property
    def take(self):
        return <uintptr_t>&fcb_loop_take

    @property
    def address(self):
        return <uintptr_t>&self.loop

    def reset(self, uint32_t ahead):
        """From the first lap again, nothing covered; fetch the payload of `ahead` packets ahead. Touches the arenas."""
        cdef uint32_t i
        self.loop.lap, self.loop.left, self.loop.ahead = 0, self.loop.per_lap, ahead
        self.loop.placed = self.loop.repeated = self.loop.wrong = self.loop.strange = 0
        for i in range(self.loop.mask + 1):
            self.loop.table[i].next_psn = self.loop.table[i].messages = 0
            self.loop.table[i].packets = self.loop.table[i].bytes = self.loop.table[i].gaps = 0
        for arena, cover in zip(self.arenas, self.covers):
            arena[:] = 0
            cover[:] = 0

    def feed(self, frames):
        """A burst of frames from memory, as a port would give it."""
        cdef const uint8_t *packets[256]
        cdef uint32_t lengths[256]
        cdef uint16_t n = 0
        cdef const uint8_t[::1] frame
        for frame in frames:
            packets[n], lengths[n] = &frame[0], <uint32_t>frame.shape[0]
            n += 1
        fcb_loop_take(&self.loop, packets, lengths, n)

    @property
    def counts(self):
        """Packets placed, repeated, with a wrong flag, strange; PSNs that were not the expected one."""
        cdef uint64_t gaps = 0
        cdef uint32_t i
        for i in range(self.loop.mask + 1):
            gaps += self.loop.table[i].gaps
        return {"placed": self.loop.placed, "repeated": self.loop.repeated, "wrong": self.loop.wrong,
                "strange": self.loop.strange, "gaps": gaps}
