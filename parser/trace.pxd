# State of a trace; the model and its limits are described in trace.pyx.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from parser.roce cimport FC_REFUSALS


cdef extern from "packetref.h" nogil:
    int FC_REF_TRUNCATED
    ctypedef struct fc_packetref:
        const uint8_t *data
        uint64_t timestamp_ns
        uint32_t length
        uint16_t stream
        uint16_t flags
    ctypedef struct fc_ring:
        pass
    uint64_t fc_ring_peek(fc_ring *r, uint64_t want)
    const fc_packetref *fc_ring_at(const fc_ring *r, uint64_t ahead)
    void fc_ring_release(fc_ring *r, uint64_t n)
    int fc_ring_drained(fc_ring *r)


cdef enum:
    HEAD_BYTES = 128       # payload kept of every message start: a whole CTS element, eight LL lines, one of LL128


# One TCP direction or one RoCE flow, in one table.
ctypedef struct Lane:
    uint8_t src[16]
    uint8_t dst[16]
    uint32_t id            # RoCE: destination QP; TCP: source port << 16 | destination port
    uint8_t tcp
    uint8_t ip_version
    uint8_t begun
    uint16_t sport         # RoCE: UDP source port of the first packet
    uint32_t max_payload
    int64_t next           # RoCE: highest request PSN + 1, unwrapped
    uint64_t packets
    uint64_t requests
    uint64_t records       # kept
    uint64_t dropped       # not kept for want of room
    uint64_t bytes         # TCP payload kept


# The start of a message, or the packet that carries its immediate.
ctypedef struct Start:
    int64_t psn
    uint64_t va
    uint64_t timestamp_ns
    uint32_t flow
    uint32_t rkey
    uint32_t length        # DMA length of the RETH
    uint32_t imm
    uint32_t payload
    uint8_t opcode         # low five bits: 6 FIRST, 9 LAST with immediate, 10 ONLY, 11 ONLY with immediate
    uint8_t pad[3]
    uint8_t head[HEAD_BYTES]


ctypedef struct Segment:
    uint64_t offset        # into the pool
    uint32_t flow
    uint32_t seq
    uint32_t length
    uint32_t flags


ctypedef struct Piece:
    int64_t psn
    uint64_t offset
    uint32_t flow
    uint32_t length


# PSNs [low, high) of a flow whose payload is wanted.
ctypedef struct Wish:
    uint8_t src[16]
    uint8_t dst[16]
    uint32_t dest_qp
    int64_t low
    int64_t high


cdef class Trace:
    cdef Lane *flows
    cdef uint32_t n_flows, flow_room, table_mask
    cdef uint32_t *table
    cdef Start *starts
    cdef uint64_t n_starts, start_room
    cdef Segment *segments
    cdef uint64_t n_segments, segment_room
    cdef Piece *pieces
    cdef uint64_t n_pieces, piece_room
    cdef uint8_t *pool
    cdef uint64_t pool_used, pool_room
    cdef Wish *wishes
    cdef uint32_t n_wishes
    cdef uint64_t packets, unlisted, wrong_icrc, cut, cut_roce, encrypted
    cdef uint64_t refused[FC_REFUSALS]
    cdef void see(self, const fc_packetref *ref) noexcept nogil
    cdef Lane *flow_of(self, const uint8_t *src, const uint8_t *dst, int version, uint32_t id, int tcp) noexcept nogil
    cdef void tcp_segment(self, const uint8_t *frame, size_t length) noexcept nogil
    cdef int64_t keep(self, const uint8_t *data, uint32_t length) noexcept nogil
