# State of an observer; the model and its limits are described in observer.pyx.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from parser.cts cimport FC_CTS_ELEMENTS_MAX, fc_cts_element
from parser.packetref cimport fc_packetref
from parser.roce cimport FC_DECODE_STATUS_COUNT, FC_REFUSALS, fc_roce


cdef extern from "psn.h" nogil:
    int64_t fc_psn_distance(uint32_t psn, int64_t start)


cdef extern from "othertraffic.h" nogil:
    enum:
        FC_OTHER_LLC
        FC_OTHER_UDP
        FC_OTHER_IP4
        FC_OTHER_IP6
        FC_OTHER_ETHERTYPE
        FC_OTHER_KINDS
    ctypedef struct fc_tcp_part:
        const uint8_t *src
        const uint8_t *dst
        const uint8_t *payload
        uint32_t length
        uint32_t ports
        uint32_t seq
        uint8_t ip_version
        uint8_t flags
    ctypedef struct fc_other:
        uint32_t number
        uint32_t handshake
    int fc_other_sort(const uint8_t *frame, size_t length, fc_other *out)
    int fc_tcp_segment(const uint8_t *frame, size_t length, fc_tcp_part *out, int *encrypted)


cdef extern from "sequence.h" nogil:
    ctypedef struct fc_hole:
        int64_t start
        int64_t end
    ctypedef struct fc_sequence:
        uint64_t packets, gaps, duplicates, late, before_first, backward, restarts, lost_for_good
        int64_t first, next
        fc_hole *holes
        uint32_t n_holes


cdef extern from "counts.h" nogil:
    enum:
        FC_SPLIT_MAX
        FC_STREAMS_MAX
        FC_NAK_KINDS
    ctypedef struct fc_tally:
        uint32_t used
        uint64_t other
        uint64_t *key
        uint64_t *count
    void fc_tally_add(fc_tally *t, uint64_t key)
    ctypedef struct fc_region:
        uint64_t address, size
        uint32_t rkey
    ctypedef struct fc_regions:
        uint32_t used
        fc_region *region
    ctypedef struct fc_writing:
        int open, plain
        uint32_t pieces, unit, last
        uint64_t length
    ctypedef struct fc_counts:
        uint64_t streams, packets, bytes, payload_bytes, first_ns, last_ns, icrc_ok, icrc_wrong, congestion
        uint32_t max_payload
        uint64_t *opcodes
        fc_tally tclass, sport, vlan, src_qp, mirror
        fc_sequence sequence
        uint64_t acks, rnr
        uint64_t *naks
        uint32_t msn, answer_low, answer_high
        int answered
        fc_writing write
        uint64_t messages, sends, empty, pairs, cut_writes, cut_pieces
        fc_tally sizes
        uint64_t imm_little, imm_big, imm_unexplained
        uint64_t *imm_split_little
        uint64_t *imm_split_big
        fc_regions regions
        uint64_t cts, cts_first, cts_last, cts_jumps, cts_steps_other
        uint64_t *cts_element
        uint64_t *cts_steps
        fc_tally cts_sizes, cts_tags
        fc_regions cts_regions
        uint64_t ll, ll128, raw, constant, flag_first, flag_last, flag_steps, flag_jumps
    void fc_count_packet(
        fc_counts *f, const fc_packetref *ref, const fc_roce *p, const fc_cts_element *elements, uint32_t n)


cdef enum:
    FLOWS_MAX = 65536               # flows remembered, then packets of new ones are only counted
    COUNTED_MAX = 16384             # ... where each has its counts (10 KB)
    STARTS_MAX = 1 << 19            # all flows together, 88 MiB
    STARTS_PER_FLOW = 1 << 18
    PIECES_MAX = 1 << 20
    TCP_FLOW_BYTES = 1 << 20        # of one direction; a bootstrap connection has a few KB
    POOL_MAX = 128 << 20
    REQUESTS_MAX = 4096             # ranges of payload that may be asked for
    HEAD_BYTES = 128                # kept of every message start: a whole CTS element, eight LL lines, one of LL128


# One RoCE flow, or one TCP direction where messages are kept.
ctypedef struct Flow:
    uint8_t src[16]
    uint8_t dst[16]
    uint32_t id            # RoCE: destination QP; TCP: source port << 16 | destination port
    uint8_t tcp
    uint8_t ip_version
    uint8_t seen           # RoCE: `next` is valid
    uint16_t sport         # RoCE: UDP source port of the first packet
    uint32_t max_payload
    int64_t next           # RoCE: highest request PSN + 1, unwrapped
    uint64_t packets
    uint64_t starts        # kept
    uint64_t dropped       # not kept for want of room
    uint64_t bytes         # TCP payload kept
    fc_counts *counts      # NULL where messages are kept


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


# Payload in the pool: of a TCP segment (`at`: sequence number), or of a packet that was asked for (`at`: PSN).
ctypedef struct Piece:
    int64_t at
    uint64_t offset
    uint32_t flow
    uint32_t length
    uint32_t tcp_flags


# PSNs [low, high) of a flow whose payload is wanted.
ctypedef struct PayloadRequest:
    uint8_t src[16]
    uint8_t dst[16]
    uint32_t dest_qp
    int64_t low
    int64_t high


# An array that grows by doubling to a limit.
ctypedef struct Array:
    void *items
    uint64_t used
    uint64_t room


cdef class Observer:
    cdef bint messages
    cdef Array flows, starts, pieces, pool
    cdef uint32_t *table
    cdef uint32_t table_mask
    cdef PayloadRequest *requests
    cdef uint32_t n_requests, n_elements
    cdef fc_cts_element elements[FC_CTS_ELEMENTS_MAX]
    cdef uint64_t packets, first_ns, last_ns, unlisted, cut, cut_other, bootstrap, encrypted, wrong_icrc
    cdef uint32_t longest_cut
    cdef uint64_t status[FC_DECODE_STATUS_COUNT]
    cdef uint64_t refused[FC_REFUSALS]  # encapsulated packets by reason
    cdef uint64_t other[FC_OTHER_KINDS]
    cdef fc_tally unknown, hidden  # kind << 32 | number of other traffic that has no name; with RoCEv2 inside
    cdef uint64_t per_stream[FC_STREAMS_MAX]
    cdef void see(self, const fc_packetref *ref) noexcept nogil
    cdef bint sort(self, const fc_packetref *ref) noexcept nogil
    cdef void count(self, const fc_packetref *ref, const fc_roce *p, int status) noexcept nogil
    cdef void collect(self, const fc_packetref *ref, const fc_roce *p) noexcept nogil
    cdef void keep_start(self, Flow *f, const fc_packetref *ref, const fc_roce *p, int64_t psn) noexcept nogil
    cdef void keep_segment(self, const fc_packetref *ref) noexcept nogil
    cdef bint keep_piece(self, Flow *f, int64_t at, const uint8_t *data, uint32_t length, uint32_t flags) noexcept nogil
    cdef bint wants(self, const fc_roce *p, int64_t psn) noexcept nogil
    cdef Flow *flow_of(self, const uint8_t *src, const uint8_t *dst, int version, uint32_t id, int tcp) noexcept nogil
