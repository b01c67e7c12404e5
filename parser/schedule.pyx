"""An EngineConfig as C structures: calls of each connection, and the table of flows. Written once, then only read.

Schedule(config) raises ValueError for a config that contradicts itself: everything that would place bytes outside a
region is found here and never looked for again. Any thread may read it.
"""

import numpy as np

from libc.stdint cimport UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from parser.lane cimport FC_RING_ALLGATHER, FC_RING_REDUCESCATTER, lane_fill
from parser.machine cimport (
    FC_GRADIENT, FC_NOTHING, FC_PARAMETERS, fc_call, fc_cursor, fc_edge, fc_enter_flow, fc_flow_key, fc_sent, fc_step_on,
)


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)


cdef void *zeroed(size_t count, size_t size) except NULL:
    """Zeroed memory on a cache line."""
    cdef void *memory = NULL
    cdef size_t nbytes = max(<size_t>1, count) * size
    if posix_memalign(&memory, 64, nbytes) != 0:
        raise MemoryError(f"{count} x {size} bytes for the state machine")
    memset(memory, 0, nbytes)
    return memory


def _unlike_rotations(list items):
    """Is the sequence, read as a circle, different from every rotation of itself? (KMP: smallest period.)"""
    if not items:
        return False
    border = [0] * len(items)
    k = 0
    for i in range(1, len(items)):
        while k and items[i] != items[k]:
            k = border[k - 1]
        if items[i] == items[k]:
            k += 1
        border[i] = k
    period = len(items) - border[len(items) - 1]
    return len(items) % period != 0 or period == len(items)


cdef class Schedule:
    """config: parser.engine_config.EngineConfig."""

    def __cinit__(self, config):
        self.region_bytes[FC_GRADIENT] = config.gradient_bytes
        self.region_bytes[FC_PARAMETERS] = config.parameter_bytes
        self.header_lines, self.places, self.mtu = 1, 1, config.mtu
        self._build_edges(config.edges)
        self._build_table(config.flows)

    def _build_edges(self, specs):
        cdef fc_edge *e
        cdef fc_call *call
        cdef size_t i, c
        cdef uintptr_t order
        self.n_edges = len(specs)
        self.edges = <fc_edge *>zeroed(self.n_edges, sizeof(fc_edge))
        known = {}
        for i, spec in enumerate(specs):
            e = &self.edges[i]
            if not 1 <= spec.used <= spec.qps:
                raise ValueError(f"edge {i}: messages over {spec.used} of {spec.qps} QPs")
            e.qps, e.used = spec.qps, spec.used
            e.ar_above = UINT32_MAX if spec.ar_above is None else spec.ar_above
            e.imm_big_endian = spec.imm_big_endian
            e.ncalls = len(spec.calls)
            e.steady = e.ncalls
            e.calls = <fc_call *>zeroed(e.ncalls, sizeof(fc_call))
            for c, item in enumerate(spec.calls):
                call = &e.calls[c]
                call.phase, call.target, call.base = int(item.phase), int(item.target), item.base
                call.place = item.place
                self.places = max(self.places, call.place + 1)
                if call.phase == 3 and e.steady == e.ncalls:
                    e.steady = c
                if item.lane is None or item.lane.messages == 0:
                    continue
                if item.lane.order not in known:
                    known[item.lane.order] = np.array(item.lane.order, dtype=np.int32)
                order = known[item.lane.order].ctypes.data
                lane_fill(&call.lane, item.lane, <const int32_t *>order)
                call.has_lane = 1
                self._check_region(item)
        self.orders = list(known.values())

    def _check_region(self, item):
        """Every final byte of a call must lie inside its region: checked here once, not per packet."""
        if item.target == FC_NOTHING:
            return
        if item.base % 8:
            raise ValueError(f"a call's tensor begins at byte {item.base}, not on a cell of 8 bytes")
        end = max(segment.limit for segment in item.lane.segments) * item.lane.elem_bytes
        if item.lane.kind in (FC_RING_ALLGATHER, FC_RING_REDUCESCATTER):  # segments are of one rank's block
            end += (item.lane.ranks - 1) * item.lane.block * item.lane.elem_bytes
        if item.base < 0 or item.base + end > self.region_bytes[<int>item.target]:
            raise ValueError(f"a call ends at byte {item.base + end} of a region of {self.region_bytes[<int>item.target]}")

    def _build_table(self, specs):
        cdef fc_flow_key key
        cdef uint32_t version, size = 16
        while size < 4 * len(specs):
            size *= 2
        self.table_mask = size - 1
        self.table = <fc_flow_key *>zeroed(size, sizeof(fc_flow_key))
        for number, spec in enumerate(specs):
            if len(spec.src_addr) != len(spec.dst_addr) or len(spec.src_addr) not in (4, 16):
                raise ValueError(f"flow {number}: addresses of {len(spec.src_addr)} and {len(spec.dst_addr)} bytes")
            addresses = spec.src_addr + spec.dst_addr
            version = 4 if len(addresses) == 8 else 6
            memset(&key, 0, sizeof(key))
            memcpy(key.ends, <const uint8_t *>addresses, len(addresses))
            key.number = <uint64_t>spec.qpn | <uint64_t>version << 32
            key.data, key.flow = spec.data, number
            fc_enter_flow(self.table, self.table_mask, &key)
            self.header_lines = max(self.header_lines, 1 if version == 4 else 2)

    cdef int64_t messages_before(self, int32_t edge, int64_t iteration):
        """Messages of a connection, on all its QPs, before those of an iteration."""
        cdef const fc_edge *e = &self.edges[edge]
        cdef int64_t once = 0, each = 0
        cdef int32_t c
        if iteration == 0:
            return 0
        for c in range(e.ncalls):
            if e.calls[c].has_lane:
                if c < e.steady:
                    once += e.calls[c].lane.messages
                else:
                    each += e.calls[c].lane.messages
        return once + (iteration - 1) * each

    cdef bint unlike_rotations(self, int32_t edge, int32_t qp) except -1:
        """Are the sizes of one steady iteration's messages on a QP, as a circle, unlike every rotation of themselves?"""
        cdef const fc_edge *e = &self.edges[edge]
        cdef fc_cursor c
        cdef fc_sent m
        memset(&c, 0, sizeof(fc_cursor))
        c.call, c.iteration = e.steady, 1
        sizes = []
        while e.steady < e.ncalls and fc_step_on(self.mtu, e, qp, &c, &m) and m.iteration == 1:
            sizes.append((m.size, m.total))
        return _unlike_rotations(sizes)

    def __dealloc__(self):
        cdef uint32_t i
        if self.edges != NULL:
            for i in range(self.n_edges):
                free(self.edges[i].calls)
        free(self.edges)
        free(self.table)
