# State of a traffic survey; the model and its limits are described in survey.pyx.
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from parser.roce cimport FC_DECODE_STATUS_COUNT, FC_REFUSALS, fc_roce


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
    TALLY_SLOTS = 32      # distinct values remembered per histogram; the rest is counted as `other`
    REGIONS = 64          # distinct (rkey, address) pairs remembered: 8 slots x 3 protocols fit
    HOLES_MAX = 4096      # gaps remembered per flow, then the oldest becomes final
    FLOWS_MAX = 16384     # flows remembered, then packets of new ones are only counted
    SPLIT_MAX = 16        # QPs per connection that a message may be split over
    STREAMS_MAX = 64
    CTS_LAYOUTS = 4       # index: 0 = 2.12-2.19, 1 = 2.20-2.23, 2 = 2.24-2.29, 3 = 2.30
    NAK_KINDS = 6         # sequence, invalid, access, operational, invalid RD, reserved


ctypedef struct Tally:
    uint32_t used
    uint64_t other
    uint64_t key[TALLY_SLOTS]
    uint64_t count[TALLY_SLOTS]


ctypedef struct Region:
    uint64_t address
    uint64_t size
    uint32_t rkey


ctypedef struct Hole:
    int64_t start
    int64_t end           # exclusive


# One PSN sequence: the requests of one flow, unwrapped from 24 bits.
ctypedef struct Sequence:
    uint64_t packets
    int64_t first
    int64_t next          # highest PSN seen + 1
    int64_t previous      # PSN of the packet before
    bint stepped_back     # the packet before went backwards: a restart if this one follows it
    uint64_t gaps
    uint64_t duplicates   # a PSN that was already here
    uint64_t late         # filled a gap
    uint64_t before_first # below the first PSN seen: captured late, nothing known about it
    uint64_t backward
    uint64_t restarts
    uint64_t lost_for_good
    uint32_t read_length  # length of the READ request at next - 1, else 0: it takes several PSNs
    Hole *holes
    uint32_t n_holes
    uint32_t room


# The WRITE that the next packets belong to, and the plain one an adaptive-routing immediate may follow.
ctypedef struct Writing:
    bint open
    bint whole            # every packet since its first one came in order
    bint plain            # ends without an immediate, as far as is known
    bint ended            # its last packet was seen
    uint64_t address
    uint32_t rkey
    uint64_t length
    uint64_t got
    uint32_t pieces       # one-packet writes with consecutive addresses
    uint32_t unit         # length of the pieces
    uint32_t last         # length of the last piece
    int64_t next


ctypedef struct Flow:
    uint8_t src[16]
    uint8_t dst[16]
    uint8_t ip_version
    uint32_t dest_qp
    uint64_t streams      # bit per capture
    uint64_t packets
    uint64_t bytes
    uint64_t payload_bytes
    uint64_t first_ns
    uint64_t last_ns
    uint64_t icrc_ok
    uint64_t icrc_wrong
    uint64_t congestion   # ECN says congestion experienced
    uint32_t max_payload
    uint64_t opcodes[256]
    Tally tclass
    Tally sport
    Tally vlan
    Tally mirror          # kind << 32 | session of the mirror that had wrapped it
    Tally src_qp
    Sequence seq
    # responses
    uint64_t acks
    uint64_t rnr
    uint64_t naks[NAK_KINDS]
    uint32_t msn
    bint answered
    uint32_t answer_low   # lowest and highest PSN answered, 24 bits
    uint32_t answer_high
    # messages
    Writing write
    uint64_t messages
    Tally sizes
    uint64_t empty
    uint64_t pairs
    uint64_t cut_writes
    uint64_t cut_pieces
    uint64_t sends
    uint64_t imm_little
    uint64_t imm_big
    uint64_t imm_split_little[SPLIT_MAX + 1]
    uint64_t imm_split_big[SPLIT_MAX + 1]
    uint64_t imm_unexplained
    Region regions[REGIONS]
    uint32_t n_regions
    # clear-to-send writes
    uint64_t cts
    uint64_t cts_layout[CTS_LAYOUTS]
    uint64_t cts_first
    uint64_t cts_last
    uint64_t cts_jumps
    uint64_t cts_last_va
    uint64_t cts_steps[2] # distance of two consecutive ones in the FIFO: 8 elements of 32 or 64 bytes
    uint64_t cts_steps_other
    Tally cts_sizes
    Tally cts_tags
    Region cts_regions[REGIONS]
    uint32_t n_cts_regions
    # payload of WRITE packets
    uint64_t ll
    uint64_t ll128
    uint64_t constant     # every word equal: says nothing
    uint64_t raw
    uint64_t flag_first
    uint64_t flag_last
    uint64_t flag_steps
    uint64_t flag_jumps


cdef class Survey:
    cdef Flow *flows
    cdef uint32_t n_flows, room
    cdef uint32_t *table
    cdef uint32_t table_mask
    cdef uint64_t packets, first_ns, last_ns, unlisted, cut_other, bootstrap
    cdef uint32_t longest_cut
    cdef uint64_t status[FC_DECODE_STATUS_COUNT]
    cdef uint64_t refused[FC_REFUSALS]  # encapsulated packets by reason
    cdef uint64_t noise[32]
    cdef uint64_t per_stream[STREAMS_MAX]
    cdef void see(self, const fc_packetref *ref) noexcept nogil
    cdef void count_noise(self, const uint8_t *frame, size_t length, bint inside) noexcept nogil
    cdef bint count_inside(self, uint32_t protocol, const uint8_t *at, size_t length) noexcept nogil
    cdef void look_for_bootstrap(self, const uint8_t *frame, size_t length, size_t tcp) noexcept nogil
    cdef Flow *flow_of(self, const fc_roce *p) noexcept nogil
    cdef bint grow(self) noexcept nogil
