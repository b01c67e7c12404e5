# The packet-counting state machine: table of contents. The model is described in machine.pyx.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from parser.lane cimport fc_lane, fc_message
from parser.roce cimport FC_REFUSALS


cdef extern from "packetref.h" nogil:
    ctypedef struct fc_packetref:
        const uint8_t *data
        uint64_t timestamp_ns
        uint32_t length
        uint16_t stream, flags
    ctypedef struct fc_ring:
        uint64_t tail, mask
    uint64_t fc_ring_peek(fc_ring *ring, uint64_t want)
    const fc_packetref *fc_ring_at(const fc_ring *ring, uint64_t ahead)
    void fc_ring_release(fc_ring *ring, uint64_t n)
    int fc_ring_closed(const fc_ring *ring)
    int fc_ring_drained(fc_ring *ring)


cdef enum:
    WINDOW = 64          # messages a cursor remembers: bounds how late a packet may come (NCCL has 8 in flight)
    BURST = 64           # packets between two fences
    HEADERS_AHEAD = 24   # packets whose headers are on their way to the cache
    HINTS = 1024         # a power of two
    SEEN_WORDS = 256     # 16,384 PSNs of history for duplicates and exact loss counts
    CTS_SLOTS = 256      # NCCL's FIFO depth
    SIDE_PACKETS = 4096  # provisional packets kept aside, all flows together
    SIDE_BYTES = 4096    # largest path MTU
    LOG_ENTRIES = 256    # disagreements kept with their values; more are only counted
    LOSS_ENTRIES = 8192  # places known to be missing, with their cause
    SEEK_LIMIT = 1 << 22 # messages walked at most to find one place in the schedule
    SEEK_TRIES = 64      # absolute witnesses a flow may offer in vain
    REACH = 1 << 20      # a write lies within so many bytes of the address that its CTS announced
    YOUNG = 1 << 16      # first PSN of a flow that can still be counted from 0


# Flow states (design section 5). Changed only by set_state().
cdef enum:  # FlowPhase
    SYNCING = 0          # nothing agreed yet
    NON_ALLREDUCE = 1    # a call that is not a gradient allreduce: stepped over, or parameters
    REDUCE_SCATTER = 2   # partial sums
    ALLGATHER = 3        # reduced pieces
    LOST = 4             # a witness disagreed: nothing is placed from this flow any more


# What became of a packet: every packet ends in exactly one of these, so the counts add up.
cdef enum:  # Outcome
    PLACED = 0           # carried final bytes, at least one cell was new
    COMPARED = 1         # carried final bytes that were all there already, and they were compared
    RELEASED = 2         # the job's, but carries nothing to keep (partial sums, stepped-over calls)
    REPEATED = 3         # the job's, seen before on this flow, nothing to keep
    CONTROL = 4          # CTS writes and acknowledgements of the job's connections
    OTHER_ROCE = 5       # RoCE of somebody else: other QPs, probes, other opcodes
    NOT_ROCE = 6
    TRUNCATED = 7
    MALFORMED = 8
    FRAGMENT = 9
    BAD_ICRC = 10
    LATE = 11            # for an iteration already closed
    STALE = 12           # older than the window of messages
    UNANCHORED = 13      # no agreeing anchor before and after it
    NOT_SYNCED = 14      # its flow is LOST
    BEYOND = 15          # after the last call the manifest describes
    DISAGREED = 16       # the witness that ended its flow
    ASIDE = 17           # provisional at the moment; becomes PLACED, COMPARED, LATE or UNANCHORED
    ENCAPSULATED = 18    # may carry RoCE inside a tunnel that is not unpacked
    OUTCOMES = 19


cdef enum:  # Disagreement
    WRONG_LENGTH = 1     # payload length against message size and MTU
    WRONG_OPCODE = 2     # FIRST/MIDDLE/LAST against the position in the message
    WRONG_SIZE = 3       # RETH length
    WRONG_ADDRESS = 4    # RETH address against the slot
    WRONG_IMMEDIATE = 5
    WRONG_FLAG = 6       # LL or LL128 flag against the step
    WRONG_CTS = 7        # RETH address against the CTS with this message's index
    EXTRA_MESSAGE = 8    # a message after the last call
    REPEATED_CHUNK = 9   # first message of a loop repeats the previous loop's last chunk: one send too many
    MADE_ANEW = 10       # a first packet of other contents: another connection on the same queue pair


cdef enum:  # Target
    NOTHING = 0
    GRADIENT = 1
    PARAMETERS = 2


cdef struct Call:        # one collective call as one edge sees it
    fc_lane lane
    uint8_t has_lane, target
    int32_t phase        # 0 startup, 1 iteration 0, 2 rebuild, 3 steady
    int64_t base         # byte offset of the call's tensor in its region


cdef struct Edge:        # one connection: (channel, source rank, destination rank)
    Call *calls
    int32_t ncalls, steady
    int32_t qps, used    # QPs of the connection, QPs a message is spread over
    uint32_t ar_above    # messages larger than this leave as an AR pair
    uint8_t imm_big_endian


cdef struct FlowKey:     # one direction of one QP; 64 bytes
    uint64_t number      # QP number, from bit 32 on the IP version; 0 marks an empty place of the hash table
    uint8_t data         # 1: receives the data; 0: receives CTS and ACKs
    int32_t flow
    uint64_t ends[4]     # source and destination address as on the wire; IPv4: both in the first word
    uint8_t unused[16]


cdef struct Message:     # one message on one QP
    uint64_t psn         # of its first packet, unwrapped
    uint64_t step, number
    uint32_t packets, pair  # data packets; 1 if an empty WRITE_WITH_IMM follows
    uint32_t size, total, piece  # bytes on this QP, of the whole message, where this QP's piece begins
    int64_t iteration, index
    int64_t offset, data_bytes   # byte place in the region, bytes that carry elements (whole message)
    const Call *call
    uint8_t target, content, phase, opens_loop, agreed


cdef struct CtsTable:
    uint64_t index[CTS_SLOTS]
    uint64_t address[CTS_SLOTS]
    uint32_t tag         # who the receiver says the sender is
    uint8_t tagged       # 1: every CTS so far had that tag; 2: they differed


cdef struct Cursor:      # a place in an edge's schedule: the next message
    int32_t call
    int64_t iteration, index
    uint64_t step, number, psn


cdef struct Slot:        # one live buffer: an iteration's gradients, or the parameters
    int64_t iteration
    uint8_t *data
    uint64_t *cover      # which cells are there, whichever stream brought them: cover.h
    uint64_t covered     # how many
    uint64_t copies_differ, differ_offset, compared_bytes


cdef struct FlowState:   # one flow as one stream sees it
    # the cache line that every packet needs
    uint64_t next_psn    # one past the highest seen
    uint64_t express     # MIDDLE packets of message `ahead` are expected up to this PSN: see express(); 0: none
    Message *ahead
    uint64_t packets, payload_bytes
    uint64_t last_ns     # capture time of the newest packet
    uint64_t start_psn   # where this flow's history begins
    uint8_t keeps        # `ahead` carries final bytes
    uint8_t unused[7]
    # the line that packets to be placed need as well: where those of `ahead` go, see lay_track()
    uint64_t track_end   # first PSN that is not so plain; 0: none is
    uint64_t track_psn   # its first packet goes to
    uint8_t *track_to    # ... these bytes,
    uint64_t track_cell  # which are these cells of
    Slot *track_slot     # ... this slot
    uint64_t track_flag
    uint32_t track_bytes # data bytes of a packet; whole cells
    uint8_t track_protocol, unused_too[3]
    # counted: the PSN's origin is known. anchored: a witness has agreed with the count since.
    uint64_t messages    # generated so far; the window holds the last WINDOW of them
    uint64_t current     # number (in `messages` counting) of the message last hit
    uint8_t state, counted, anchored, active, finished, restarting
    uint8_t old          # seen in mid-stream before anything was counted: PSN 0 is a wrap, not the beginning
    int32_t edge, qp, cts  # cts: index into cts tables, -1 unknown
    Cursor cursor        # the next message to generate
    uint8_t recoverable  # 0 not considered, 1 no, 2 yes: see recover()
    uint8_t trial
    uint32_t seeks       # absolute witnesses that led nowhere
    int64_t lost_iteration, trial_iteration, back_iteration  # LOST in, on trial since, trusted again from
    uint64_t trial_messages
    uint64_t base[3]     # address of step 0's slot by protocol, 0 while unknown
    int32_t side_head, side_tail  # packets kept aside, oldest first
    # counters
    uint64_t missing, duplicates, retransmissions, out_of_order, bad_icrc, first_psn
    uint64_t agreements, disagreements
    uint64_t seen[SEEN_WORDS]
    Message window[WINDOW]
    uint32_t first_icrc  # of PSN 0; 0: it was not seen
    uint8_t unused_tail[36]  # whole cache lines, so that every flow's first two are its own: checked in _build_flows()


cdef struct SidePacket:
    int32_t next
    uint32_t length, index
    uint64_t message
    uint8_t bytes[SIDE_BYTES]


cdef struct LogEntry:
    int32_t kind, stream, flow
    int64_t iteration
    uint64_t number, psn, expected, found


cdef struct Loss:
    int32_t cause, target
    int64_t iteration, offset, bytes


cdef struct Count:       # of packets with one outcome
    uint64_t packets, bytes


cdef struct Machine:
    uint32_t mtu, streams, flows, arenas, table_mask
    uint8_t check_icrc, from_start  # from_start: a connection's first packet was seen
    uint8_t placing                 # protocol of the message that was begun last: how to fetch what comes
    uint32_t cts_index_at, cts_tag_at  # bytes of idx and tag in a 64-byte CTS element (5.4)
    int64_t base_iteration, begun   # oldest open iteration; highest with a gradient packet seen
    int64_t wanted[64]              # by stream: iteration that its blocked packet belongs to
    uint64_t outage_ns              # silence in which half of the PSN space could have passed
    int64_t region_bytes[3]         # by Target
    uint64_t words[3]
    Count *counts                   # [stream * OUTCOMES + outcome]
    const uint8_t *next             # headers and payload of a packet soon to be placed, or NULL: see drive()
    uint32_t keepers                # flows that keep what they carry at the moment
    int (*examine)(Machine *M, uint32_t stream, const fc_packetref *ref) noexcept nogil
    int (*on_track)(Machine *M, uint32_t stream, FlowState *f, const uint8_t *wire, uint64_t psn) noexcept nogil
    uint32_t header_lines           # cache lines in which the headers of MIDDLE packets end: IPv6 needs two
    uint8_t keeping[HINTS]          # by QP number: does its flow keep what it carries at the moment? A guess
    FlowKey *table
    Edge *edges
    FlowState *states               # [stream * flows + flow]
    CtsTable *cts                   # [stream * cts_tables + table]
    uint32_t cts_tables
    Slot *slots                     # arenas of gradients, then one of parameters
    SidePacket *side
    int32_t side_free
    LogEntry log[LOG_ENTRIES]
    uint64_t logged, kept           # disagreements so far; how many of them are in the log
    int64_t unlogged_first, unlogged_last  # iterations of those that found no room
    Loss losses[LOSS_ENTRIES]
    uint64_t lost
    uint64_t refused[FC_REFUSALS]   # encapsulated packets by fc_refusal
    # What few packets need stays behind here: the lines above are those of every packet.
    uint64_t cts_forms[2]           # CTS elements seen of 32 and of 64 bytes
    int64_t opened, unopened        # base_iteration of captures that begin in mid-stream; the oldest missed by that, or -1
    uint32_t opener                 # the stream that decided it
