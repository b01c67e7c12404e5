"""A receiving thread without a port, for benches of a whole node (include/feeder.h)."""

import zlib

import numpy as np

from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from parser.packetref cimport fc_packetref, fc_ring, fc_ring_init

PSN_AT = 51
MASKED = 42  # an ICRC covers nothing before the IP header, and all from the BTH on


cdef extern from "feeder.h" nogil:
    ctypedef uint32_t fcb_patch[3][256]
    ctypedef struct fcb_feeder:
        const fc_packetref *window
        uint64_t packets, flows
        const fcb_patch *patches
        uint8_t *slots
        uint64_t slot
        uint32_t stop
        fc_ring ring
    uint64_t fcb_feed(fcb_feeder *F, uint64_t first, uint64_t count)


def patches(int length):
    """What a packet's ICRC changes by, by byte of its PSN and the bits that change in it: (3, 256) uint32."""
    covered = bytearray(length - MASKED - 4)
    nothing = zlib.crc32(covered)
    table = np.zeros((3, 256), np.uint32)
    for byte in range(3):
        for value in range(256):
            covered[PSN_AT - MASKED + byte] = value
            table[byte, value] = zlib.crc32(covered) ^ nothing
        covered[PSN_AT - MASKED + byte] = 0
    return table


cdef class Feeder:
    """Packets of a window into a ring of its own. addresses, lengths: of the window's packets, in order; flows: how many
    take turns; entries: of the ring, a power of two. The caller keeps the window alive. `address` is what Engine.run
    takes. feed() belongs to one thread, stop() to any."""

    cdef fcb_feeder feeder
    cdef fc_packetref *window
    cdef fc_packetref *refs
    cdef object slots, tables

    def __cinit__(
        self, const uint64_t[::1] addresses, const uint32_t[::1] lengths, uint64_t flows, uint64_t entries,
    ):
        cdef uint64_t i, n = addresses.shape[0]
        cdef uint64_t slot = (max(lengths) + 63) // 64 * 64
        if entries & (entries - 1) or n % flows or <uint64_t>lengths.shape[0] != n:
            raise ValueError(f"{n} packets, {lengths.shape[0]} lengths, {flows} flows, {entries} entries")
        if min(lengths) < 4 * 64 or any(address % 64 for address in addresses):
            raise ValueError("packets have four cache lines or more, and begin on one")
        known = sorted(set(lengths))
        self.tables = np.stack([patches(length) for length in known])
        self.slots = np.zeros(entries * slot + 64, np.uint8)
        self.window = <fc_packetref *>calloc(n, sizeof(fc_packetref))
        self.refs = <fc_packetref *>calloc(entries, sizeof(fc_packetref))
        if self.window == NULL or self.refs == NULL:
            raise MemoryError("packet references")
        for i in range(n):
            self.window[i].data = <const uint8_t *><uintptr_t>addresses[i]
            self.window[i].length = lengths[i]
            self.window[i].stream = known.index(lengths[i])
        self.feeder.window, self.feeder.packets, self.feeder.flows = self.window, n, flows
        self.feeder.patches = <const fcb_patch *><uintptr_t>self.tables.ctypes.data
        self.feeder.slot = slot
        self.feeder.slots = <uint8_t *><uintptr_t>(self.slots.ctypes.data + -self.slots.ctypes.data % 64)
        self.slots[:] = 0  # touched, before anything is timed
        fc_ring_init(&self.feeder.ring, self.refs, entries)

    def __dealloc__(self):
        free(self.window)
        free(self.refs)

    @property
    def address(self):
        return <uintptr_t>&self.feeder.ring

    @property
    def waiting(self):
        """Packets that nobody has taken yet."""
        return self.feeder.ring.head - self.feeder.ring.tail

    def feed(self, uint64_t first, uint64_t count):
        """Put packets number `first` and following into the ring, `count` of them; waits while it is full. Returns how
        many it were: fewer after stop()."""
        cdef uint64_t done
        with nogil:
            done = fcb_feed(&self.feeder, first, count)
        return done

    def stop(self):
        """Let feed() return, for good."""
        self.feeder.stop = 1
