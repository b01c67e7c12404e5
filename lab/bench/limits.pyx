"""The limits that benchmarks compare with (src/baseline.c), and packets in memory behind an fc_ring.

Addresses are plain integers: the caller keeps the memory alive and large enough. Functions that are timed release
nothing and allocate nothing. One thread.
"""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from parser.packetref cimport fc_packetref, fc_ring, fc_ring_close, fc_ring_init


cdef extern from "decode.h" nogil:
    uint32_t fcb_hash(const uint8_t *src, const uint8_t *dst, uint32_t width, uint32_t qpn)

cdef extern from "baseline.h" nogil:
    ctypedef struct fcb_flow:
        uint8_t src[16]
        uint8_t dst[16]
        uint32_t qpn, version, next_psn
        uint64_t packets, bytes, gaps, address
    void fcb_copy(uint8_t *dst, const uint8_t *src, size_t n)
    uint64_t fcb_parse(const fc_packetref *refs, uint64_t n, fcb_flow *table, uint32_t mask, uint64_t ahead)
    void fcb_traffic(
        const uint64_t *to, const uint64_t *payloads, uint64_t n, uint32_t length, uint32_t nbytes, uint64_t ahead)
    uint32_t fcb_crc_hot(const uint8_t *at, uint64_t nbytes, uint64_t times)


def copy(uintptr_t dst, uintptr_t src, size_t nbytes):
    """Non-temporal copy. dst on a cache line, nbytes a multiple of 256; ValueError otherwise."""
    if dst % 64 or nbytes % 256:
        raise ValueError("the copy needs whole cache lines, four at a time")
    with nogil:
        fcb_copy(<uint8_t *>dst, <const uint8_t *>src, nbytes)


cdef class PacketRing:
    """References to packets, as an rx thread would have published them. `address` is what Engine.run takes.

    closed: nothing follows them, as after a file; otherwise show() may bring more, as on a live queue. A consumer on
    another thread is none of its business: all of it happens between runs."""

    cdef fc_packetref *packet_refs  # every packet, in the order in which they were given
    cdef fc_packetref *refs         # what the ring shows
    cdef fc_ring ring
    cdef readonly uint64_t packets

    def __cinit__(self, const uint64_t[::1] addresses, const uint32_t[::1] lengths, bint closed=True):
        cdef uint64_t i, size = 1
        self.packets = addresses.shape[0]
        if lengths.shape[0] != addresses.shape[0]:
            raise ValueError(f"{addresses.shape[0]} addresses, {lengths.shape[0]} lengths")
        while size < 2 * self.packets:  # a live session gives iterations up when a ring is nearly full
            size *= 2
        self.packet_refs = <fc_packetref *>calloc(size, sizeof(fc_packetref))
        self.refs = <fc_packetref *>calloc(size, sizeof(fc_packetref))
        if self.packet_refs == NULL or self.refs == NULL:
            raise MemoryError("packet references")
        for i in range(self.packets):
            self.packet_refs[i].data = <const uint8_t *><uintptr_t>addresses[i]
            self.packet_refs[i].length = lengths[i]
        memcpy(self.refs, self.packet_refs, self.packets * sizeof(fc_packetref))
        fc_ring_init(&self.ring, self.refs, size)
        self.rewind()
        if closed:
            fc_ring_close(&self.ring)

    def __dealloc__(self):
        free(self.packet_refs)
        free(self.refs)

    @property
    def address(self):
        return <uintptr_t>&self.ring

    @property
    def waiting(self):
        """Packets that nobody has taken yet."""
        return self.ring.head - self.ring.tail

    def rewind(self):
        """What is shown is there again, all of it."""
        self.ring.tail = 0
        self.ring.head = self.packets

    def show(self, const uint32_t[::1] which):
        """These packets are there, in this order, in place of what was."""
        cdef uint64_t i, n = which.shape[0]
        if n > self.packets or (n and np.max(which) >= self.packets):
            raise ValueError(f"{n} packets of {self.packets}")
        for i in range(n):
            self.refs[i] = self.packet_refs[which[i]]
        self.ring.tail = 0
        self.ring.head = n


cdef class MinimalParser:
    """The flow table of fcb_parse. flows: (source address, destination address, QP number) each."""

    cdef fcb_flow *table
    cdef uint32_t mask

    def __cinit__(self, flows):
        cdef uint32_t at, size = 16
        cdef const uint8_t *src
        cdef const uint8_t *dst
        cdef fcb_flow *flow
        while size < 4 * len(flows):
            size *= 2
        self.mask = size - 1
        self.table = <fcb_flow *>calloc(size, sizeof(fcb_flow))
        if self.table == NULL:
            raise MemoryError("flow table")
        for source, destination, qpn in flows:
            src, dst = source, destination
            at = fcb_hash(src, dst, len(source), qpn) & self.mask
            while self.table[at].version:
                at = (at + 1) & self.mask
            flow = &self.table[at]
            memcpy(flow.src, src, len(source))
            memcpy(flow.dst, dst, len(source))
            flow.qpn, flow.version = qpn, 4 if len(source) == 4 else 6

    def __dealloc__(self):
        free(self.table)

    def reset(self):
        """Forget what was counted, keep the flows."""
        cdef uint32_t i
        for i in range(self.mask + 1):
            self.table[i].next_psn = 0
            self.table[i].packets = self.table[i].bytes = self.table[i].gaps = 0

    def run(self, PacketRing ring, uint64_t packets, uint64_t ahead):
        """Take that many packets from the ring. (Those of known flows, PSNs that were not the expected one so far)."""
        cdef uint64_t known, gaps = 0
        cdef uint32_t i
        if packets > ring.ring.head - ring.ring.tail:
            raise ValueError(f"{packets} packets asked, {ring.ring.head - ring.ring.tail} in the ring")
        with nogil:
            known = fcb_parse(ring.refs + ring.ring.tail, packets, self.table, self.mask, ahead)
        ring.ring.tail += packets
        for i in range(self.mask + 1):
            gaps += self.table[i].gaps
        return known, gaps


def traffic(
    const uint64_t[::1] to, const uint64_t[::1] payloads, uint32_t length, uint32_t nbytes, uint64_t ahead,
):
    """The memory traffic of placing without its work: every line of the payloads (`length` bytes each) is loaded, `nbytes`
    are stored at each address, in that order. Prefetches `ahead` packets, 0: nothing. Every address on a cache line: that is
    the caller's promise, as looking would take time that is measured."""
    cdef uint64_t n = to.shape[0]
    if n == 0 or <uint64_t>payloads.shape[0] != n or nbytes % 64 or to[0] % 64:
        raise ValueError("one payload for every place, and whole cache lines")
    if not 64 <= nbytes <= length:
        raise ValueError(f"{nbytes} bytes stored of {length}: at least a line, and not more than came")
    with nogil:
        fcb_traffic(&to[0], &payloads[0], n, length, nbytes, ahead)


def crc_hot(const uint8_t[::1] data, uint64_t times):
    """isa-l's CRC-32 over the same bytes, again and again."""
    cdef uint32_t out
    if data.shape[0] == 0:
        raise ValueError("a sum of nothing")
    with nogil:
        out = fcb_crc_hot(&data[0], data.shape[0], times)
    return out
