"""The packet-counting state machine: from packets of a job's flows to bytes in the gradient arena.

Model (design section 5). Each (stream, flow) has a cursor that walks the edge's schedule: calls in
issue order, messages of a call in closed form (lane.h), packets of a message by PSN arithmetic. PSNs
start at 0 with the connection, so the packet count says where a packet belongs. Nothing is placed on
the count alone: a packet needs a second witness that agrees with it - its RETH address and length, its
LL or LL128 flags, the CTS that announced its message - or belongs to a message whose first packet
had one. Others (a SIMPLE MIDDLE behind a loss) are kept aside until an anchor after them agrees too.
Any witness that disagrees ends the flow (state LOST): the manifest and the traffic then differ, and
counting on would be guessing.

schedule.pxi walks the schedule, placing.pxi puts bytes into the arena, position.pxi finds a flow's place again; they
are included below.

Call order: Engine(config); run() per stream until drained; past() / retire() between runs as
iterations close; finish() once at the end; read results with the accessors. close() or garbage
collection frees the memory.
Thread rule: one thread at a time calls an engine. run() releases the GIL.

Per packet nothing is allocated. Per-message work is O(1); memory does not depend on how many messages
or iterations pass.
"""

import numpy as np

from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memset

from parser.lane cimport (
    FC_FINAL, FC_LL, FC_LL128, FC_RING_ALLGATHER, FC_RING_ALLREDUCE, FC_RING_REDUCESCATTER, FC_SIMPLE, fc_lane_message,
    lane_fill,
)
from parser.roce cimport (
    FC_ENCAPSULATED, FC_FRAGMENT, FC_HAS_IMM, FC_HAS_RETH, FC_NOT_ROCE, FC_RC_ACK, FC_RC_WRITE_FIRST,
    FC_RC_WRITE_LAST, FC_RC_WRITE_LAST_IMM, FC_RC_WRITE_MIDDLE, FC_RC_WRITE_ONLY, FC_RC_WRITE_ONLY_IMM, FC_ROCE,
    FC_REFUSALS, FC_TRUNCATED, fc_icrc, fc_icrc_all, fc_icrc_choose, fc_icrc_ok, fc_roce, fc_roce_decode,
)

from parser.roce import REFUSAL_NAMES


cdef extern from "cover.h" nogil:
    int fc_cover_any(const uint64_t *cover, uint64_t first, uint64_t end)
    void fc_cover_set(uint64_t *cover, uint64_t first, uint64_t end)
    int fc_cover_bit(const uint64_t *cover, uint64_t cell)
    uint64_t fc_cover_gaps(const uint64_t *cover, uint64_t *first, uint64_t end, int64_t (*out)[2], uint64_t room)


cdef extern from "place.h" nogil:
    int64_t fc_ll_bad_line(const uint8_t *wire, uint64_t lines, uint32_t flag)
    void fc_ll_unpack(uint8_t *dst, const uint8_t *wire, uint64_t nbytes)
    int64_t fc_ll128_bad_line(const uint8_t *wire, uint64_t lines, uint64_t flag)
    uint32_t fc_ll128_offset(uint32_t line, uint32_t word)
    int64_t fc_ll_place(uint8_t *dst, const uint8_t *wire, uint64_t nbytes, uint32_t flag, const uint8_t *next)
    int64_t fc_ll128_place(
        uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t nbytes, uint64_t flag, const uint8_t *next)
    void fc_copy_place(uint8_t *dst, const uint8_t *src, uint64_t nbytes, const uint8_t *next)
    void fc_place_fence()
    void fc_place_fetch(int protocol, const uint8_t *next, uint64_t nbytes)
    uint64_t fc_place_ahead(int protocol, uint64_t mtu, uint64_t most)
    void fc_place_choose(int protocol, int way, uint32_t ahead)
    enum:
        FC_WAYS
    ctypedef struct fc_place_kernels:
        const char *name
    ctypedef struct fc_place_choice:
        const fc_place_kernels *kernels
        int way[3]
        uint32_t ahead[3]
    const char *fc_way_names[FC_WAYS]
    fc_place_choice fc_placing


cdef extern from "middle.h" nogil:
    ctypedef struct fc_middle:
        const uint8_t *ip
        const uint8_t *bth
        const uint8_t *ends
        uint32_t version, dest_qp, psn
    int fc_middle_icrc_ok(const fc_middle *p, uint32_t mtu)
    int fc_middle_decode(const uint8_t *frame, size_t length, uint32_t mtu, fc_middle *out)
    const uint8_t *fc_probable_bth(const uint8_t *frame, size_t length)


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)


cdef extern from "prefetch.h" nogil:
    void fc_prefetch(const void *at)


cdef extern from *:
    """
    #define likely_so(x) __builtin_expect(!!(x), 1)
    /* What is marked inline below is meant: GCC finds process() too large, and every packet would pay for calls. */
    #undef CYTHON_INLINE
    #define CYTHON_INLINE inline __attribute__((always_inline))
    """
    bint likely_so(bint x) nogil
    int popcount "__builtin_popcountll"(uint64_t x) nogil


PHASES = ("SYNCING", "NON_ALLREDUCE", "REDUCE_SCATTER", "ALLGATHER", "LOST")
OUTCOME_NAMES = (
    "placed", "compared", "released", "repeated", "control", "other_roce", "not_roce", "truncated", "malformed",
    "fragment", "icrc", "late", "stale", "unanchored", "not_synced", "beyond", "disagreed", "aside",
    "encapsulated",
)
DISAGREEMENT_NAMES = (
    "", "payload length", "opcode", "RETH length", "RETH address", "immediate", "flag", "CTS address",
    "extra message", "repeated chunk", "made anew",
)
cdef uint64_t LL_CLEAN = 0x7ffffff8  # 4.1: steps of these low bits clean their slot
cdef uint64_t LL_LAP = 1 << 31        # ... once in so many steps
cdef uint64_t HISTORY = 64 * SEEN_WORDS
cdef uint64_t NEVER = <uint64_t>1 << 40  # steps and messages no connection reaches: a larger claim is not followed
cdef int64_t WORTH_STREAMING = 256   # shorter pieces are few whole cache lines, or none


# -- state ----------------------------------------------------------------------------------------


cdef inline void set_state(FlowState *f, uint8_t state) noexcept nogil:
    """The only place that changes a flow's state, but for recover(), which alone leaves LOST."""
    if f.state != LOST:
        f.state = state


cdef void log_disagreement(
    Machine *M, uint32_t stream, FlowState *f, int kind, const Message *m, uint64_t psn, uint64_t expected, uint64_t found
) noexcept nogil:
    cdef LogEntry *entry
    cdef int64_t iteration = m.iteration if m != NULL else f.cursor.iteration
    if M.kept < LOG_ENTRIES:
        entry = &M.log[M.kept]
        M.kept += 1
        entry.kind = kind
        entry.stream = stream
        entry.flow = <int32_t>((f - M.states) - <int64_t>stream * M.flows)
        entry.iteration = iteration
        entry.number = m.number if m != NULL else f.cursor.number
        entry.psn = psn
        entry.expected = expected
        entry.found = found
    else:
        M.unlogged_first = min(M.unlogged_first, iteration)
        M.unlogged_last = max(M.unlogged_last, iteration)
    M.logged += 1
    f.disagreements += 1
    f.express = 0
    f.lost_iteration = iteration
    f.trial = 0
    if kind == EXTRA_MESSAGE or kind == REPEATED_CHUNK or kind == MADE_ANEW:
        f.recoverable = 1  # not the NCCL, or not the connection, that the schedule describes
    set_state(f, LOST)


cdef void note_loss(Machine *M, int cause, const Message *m, int64_t offset, int64_t nbytes) noexcept nogil:
    cdef Loss *loss
    if m.target == NOTHING or m.content != FC_FINAL or nbytes <= 0:
        return
    if M.lost < LOSS_ENTRIES:
        loss = &M.losses[M.lost]
        loss.cause = cause
        loss.target = m.target
        loss.iteration = m.iteration
        loss.offset = offset
        loss.bytes = nbytes
    M.lost += 1


include "schedule.pxi"
include "placing.pxi"


# -- one packet -----------------------------------------------------------------------------------


cdef inline uint32_t key_hash(uint64_t first, uint32_t qpn) noexcept nogil:
    """first: the first eight bytes of the addresses as they lie in the header."""
    return <uint32_t>((first ^ (<uint64_t>qpn << 20)) * <uint64_t>0x9e3779b97f4a7c15u >> 32)


cdef inline const FlowKey *find_flow(const Machine *M, const uint8_t *addresses, uint32_t version, uint32_t qpn) noexcept nogil:
    """addresses: source and destination, one behind the other as in both IP headers."""
    cdef uint64_t first, number = qpn | <uint64_t>version << 32
    cdef uint32_t i
    cdef const FlowKey *key
    memcpy(&first, addresses, 8)
    i = key_hash(first, qpn) & M.table_mask
    while True:
        key = &M.table[i]
        if key.ends[0] == first and key.number == number and (version == 4 or memcmp(key.ends, addresses, 32) == 0):
            return key
        if key.number == 0:
            return NULL
        i = (i + 1) & M.table_mask


cdef uint64_t unseen(const FlowState *f) noexcept nogil:
    """PSNs of the history that never came."""
    cdef uint64_t p = max(f.start_psn, f.next_psn - HISTORY if f.next_psn > HISTORY else 0), n = 0, here, word
    while p < f.next_psn:
        here = min(64 - p % 64, f.next_psn - p)
        word = ~f.seen[p // 64 % SEEN_WORDS] >> (p % 64)
        n += popcount(word if here == 64 else word & ((<uint64_t>1 << here) - 1))
        p += here
    return n


cdef int note_psn(FlowState *f, uint64_t psn) noexcept nogil:
    """Count a PSN: loss, duplicates, retransmission. 1 if it was seen before."""
    cdef uint64_t p, bit = psn % HISTORY
    if psn >= f.next_psn:
        # PSNs that leave the history unseen are missing for good; finish() counts the rest
        if psn - f.next_psn >= HISTORY:
            f.missing += unseen(f) + psn + 1 - HISTORY - f.next_psn
            memset(f.seen, 0, sizeof(f.seen))
        else:
            for p in range(f.next_psn, psn + 1):
                if p >= HISTORY + f.start_psn and not (f.seen[p // 64 % SEEN_WORDS] >> (p % 64)) & 1:
                    f.missing += 1
                f.seen[p // 64 % SEEN_WORDS] &= ~(<uint64_t>1 << (p % 64))
        f.next_psn = psn + 1
        f.restarting = 0
    elif psn + HISTORY < f.next_psn:
        f.retransmissions += 1  # older than the history
        return 1
    elif (f.seen[bit // 64] >> (bit % 64)) & 1:
        # a mirror's second copy follows closely; a sender that went back repeats a run of packets
        if f.next_psn - psn > 4:
            f.restarting = 1
        if f.restarting:
            f.retransmissions += 1
        else:
            f.duplicates += 1
        return 1
    else:
        f.out_of_order += 1
    f.seen[bit // 64] |= <uint64_t>1 << (bit % 64)
    return 0


cdef inline uint32_t length_of(const Machine *M, const Message *m, uint32_t index) noexcept nogil:
    """Payload bytes of packet `index` of a message."""
    return min(m.size - index * M.mtu, M.mtu) if m.size and index < m.packets else 0


cdef int right_opcode(const Message *m, uint32_t index, uint8_t opcode) noexcept nogil:
    cdef int last = index + 1 == m.packets
    if index == m.packets:
        return opcode == FC_RC_WRITE_ONLY_IMM
    if opcode == FC_RC_WRITE_FIRST:  # index > 0: a restart under a fresh RETH
        return not last
    if opcode == FC_RC_WRITE_MIDDLE:
        return index > 0 and not last
    if opcode == FC_RC_WRITE_LAST:
        return last and m.pair and index > 0
    if opcode == FC_RC_WRITE_LAST_IMM:
        return last and not m.pair and index > 0
    if opcode == FC_RC_WRITE_ONLY:  # a plain write, whole or cut by the NIC into one-packet writes
        return m.pair
    return last and not m.pair


cdef inline uint32_t swapped(uint32_t x) noexcept nogil:
    return (x >> 24) | ((x >> 8) & 0xff00) | ((x << 8) & 0xff0000) | (x << 24)


cdef int check_witnesses(Machine *M, uint32_t stream, FlowState *f, Message *m, uint32_t index, const fc_roce *p, uint64_t psn) noexcept nogil:
    """Everything the headers say, against the count. 0 and logged on disagreement; 1 if nothing
    witnessed; 2 if a witness agreed."""
    cdef uint32_t want, rest, imm
    cdef uint64_t address
    cdef uint64_t *base
    cdef CtsTable *cts
    cdef int agreed = 0
    want = length_of(M, m, index)
    rest = m.size - index * M.mtu if m.size and index < m.packets else 0
    if p.payload_len != want:
        log_disagreement(M, stream, f, WRONG_LENGTH, m, psn, want, p.payload_len)
        return 0
    if not right_opcode(m, index, p.opcode):
        log_disagreement(M, stream, f, WRONG_OPCODE, m, psn, index, p.opcode)
        return 0
    if p.headers & FC_HAS_IMM:
        imm = p.imm if M.edges[f.edge].imm_big_endian else swapped(p.imm)
        if imm != m.total:
            log_disagreement(M, stream, f, WRONG_IMMEDIATE, m, psn, m.total, imm)
            return 0
        agreed = 1
    if p.headers & FC_HAS_RETH:
        if p.dma_len != rest and not (p.opcode == FC_RC_WRITE_ONLY and p.dma_len == p.payload_len):
            log_disagreement(M, stream, f, WRONG_SIZE, m, psn, rest, p.dma_len)
            return 0
        if index < m.packets and (m.size or M.edges[f.edge].used == 1):
            address = p.va - m.piece - <uint64_t>index * M.mtu
            base = &f.base[m.call.lane.protocol]
            if base[0] == 0:
                base[0] = address - m.step % 8 * m.call.lane.slot_bytes
            elif address != base[0] + m.step % 8 * m.call.lane.slot_bytes:
                log_disagreement(M, stream, f, WRONG_ADDRESS, m, psn, base[0] + m.step % 8 * m.call.lane.slot_bytes, address)
                return 0
            if f.cts >= 0:
                cts = &M.cts[stream * M.cts_tables + f.cts]
                if cts.index[m.number % CTS_SLOTS] == m.number + 1:
                    if cts.address[m.number % CTS_SLOTS] != address:
                        log_disagreement(M, stream, f, WRONG_CTS, m, psn, cts.address[m.number % CTS_SLOTS], address)
                        return 0
            if index == 0:
                m.agreed = 1
        agreed = 1
    if agreed:
        agree(M, stream, f, psn)
        return 2
    return 1


cdef inline uint64_t flagged_lines(const Message *m, uint64_t at, uint32_t length) noexcept nogil:
    """How many lines of `length` wire bytes from byte `at` of a message carry its flag."""
    cdef int64_t carried
    if m.call.lane.protocol != FC_LL:
        return length // 128
    if (m.step & LL_CLEAN) != LL_CLEAN:
        return length // 16
    carried = (m.data_bytes - <int64_t>(at // 2) + 7) // 8  # 4.1: only the lines with data
    return min(length // 16, <uint64_t>max(carried, 0))


cdef void wrong_flag(Machine *M, uint32_t stream, FlowState *f, const Message *m, const uint8_t *wire, uint64_t psn, int64_t line) noexcept nogil:
    cdef uint32_t low
    cdef uint64_t found = 0
    if m.call.lane.protocol == FC_LL:
        memcpy(&low, wire + 16 * line + 4, 4)
        if low == <uint32_t>(m.step + 1):
            memcpy(&low, wire + 16 * line + 12, 4)
        found = low
    else:
        memcpy(&found, wire + 128 * line + 120, 8)
    log_disagreement(M, stream, f, WRONG_FLAG, m, psn, m.step + 1, found)


cdef int check_flags(Machine *M, uint32_t stream, FlowState *f, Message *m, uint32_t index, const uint8_t *wire, uint32_t length, uint64_t psn) noexcept nogil:
    """LL and LL128: every line's flag says the step. 0 and logged on disagreement, 1 if there is no
    line of data, 2 if all agreed."""
    cdef int64_t bad
    cdef uint64_t lines = flagged_lines(m, m.piece + <uint64_t>index * M.mtu, length)
    if lines == 0:
        return 1
    if m.call.lane.protocol == FC_LL:
        bad = fc_ll_bad_line(wire, lines, <uint32_t>(m.step + 1))
    else:
        bad = fc_ll128_bad_line(wire, lines, m.step + 1)
    if bad >= 0:
        wrong_flag(M, stream, f, m, wire, psn, bad)
        return 0
    agree(M, stream, f, psn)
    return 2


cdef int place_flagged(Machine *M, uint32_t stream, FlowState *f, Message *m, uint32_t index, const uint8_t *wire, uint32_t length, uint64_t psn) noexcept nogil:
    """check_flags() and place() in one pass over the bytes, where nothing of the packet is there yet.

    A wrong flag leaves bytes of no meaning in cells that stay uncovered.
    """
    cdef uint64_t at = m.piece + <uint64_t>index * M.mtu, lines = flagged_lines(m, at, length), first, end
    cdef int64_t offset, n, bad
    cdef int is_ll = m.call.lane.protocol == FC_LL
    cdef Slot *slot = slot_of(M, m)
    offset = <int64_t>(at // 2 if is_ll else at // 1024 * 960)
    n = min(<int64_t>(length // 2 if is_ll else length // 1024 * 960), m.data_bytes - offset)
    first = <uint64_t>(m.offset + offset) // 8
    end = <uint64_t>(m.offset + offset + n + 7) // 8
    if (slot == NULL or n <= 0 or (at | length) % (16 if is_ll else 1024) or (is_ll and lines != end - first)
            or fc_cover_any(slot.cover, first, end)):
        if not check_flags(M, stream, f, m, index, wire, length, psn):
            return DISAGREED
        return place(M, m, index, wire, length)
    if is_ll:
        bad = fc_ll_place(slot.data + m.offset + offset, wire, n, <uint32_t>(m.step + 1), take_next(M, wire))
    else:
        bad = fc_ll128_place(slot.data + m.offset + offset, wire, lines // 8, n, m.step + 1, take_next(M, wire))
    if bad >= 0:
        wrong_flag(M, stream, f, m, wire, psn, bad)
        return DISAGREED
    cover(slot, first, end)
    agree(M, stream, f, psn)
    return PLACED


cdef void lay_track(Machine *M, FlowState *f, const Message *m) noexcept nogil:
    """Where the full packets of message `m` go, computed once for all of them: place_on_track(). What is special -
    bytes behind the last element, pieces that are not whole lines or cells, a closed iteration - is left to place()."""
    cdef Slot *slot = slot_of(M, m)
    cdef int protocol = m.call.lane.protocol
    cdef uint64_t unit = 16 if protocol == FC_LL else 1024 if protocol == FC_LL128 else 8, from_byte = m.piece
    f.track_end = 0
    if slot == NULL or M.mtu % unit or m.piece % unit or m.offset % 8:
        return
    if protocol == FC_LL:
        f.track_bytes, from_byte = M.mtu // 2, from_byte // 2
    elif protocol == FC_LL128:
        f.track_bytes, from_byte = M.mtu // 1024 * 960, from_byte // 1024 * 960
    else:
        f.track_bytes = M.mtu
    if m.data_bytes <= <int64_t>from_byte:
        return
    f.track_psn = m.psn
    f.track_end = m.psn + (<uint64_t>m.data_bytes - from_byte) // f.track_bytes
    f.track_to = slot.data + m.offset + from_byte
    f.track_cell = (<uint64_t>m.offset + from_byte) // 8
    f.track_slot = slot
    f.track_flag = m.step + 1
    f.track_protocol = M.placing = <uint8_t>protocol


cdef int place_ahead(Machine *M, uint32_t stream, FlowState *f, const uint8_t *wire, uint64_t psn) noexcept nogil:
    """A full packet of message `ahead`, the long way: for what is not on its track, or partly there already."""
    cdef Message *m = f.ahead
    cdef uint32_t index = <uint32_t>(psn - m.psn)
    if m.call.lane.protocol == FC_SIMPLE:
        return place(M, m, index, wire, M.mtu)
    return place_flagged(M, stream, f, m, index, wire, M.mtu, psn)


cdef int place_on_track(Machine *M, uint32_t stream, FlowState *f, const uint8_t *wire, uint64_t psn) noexcept nogil:
    """A full packet of message `ahead`: what place_flagged() and place() do, with nothing left to work out.
    A wrong flag leaves bytes of no meaning in cells that stay uncovered. Called through M.on_track, as examine() is:
    inlined, its registers would burden the packets that are only counted."""
    cdef Message *m = f.ahead
    cdef uint64_t index = psn - f.track_psn, nbytes = f.track_bytes, first = f.track_cell + index * (nbytes // 8)
    cdef uint64_t end = first + nbytes // 8
    cdef uint8_t *to = f.track_to + index * nbytes
    cdef Slot *slot = f.track_slot
    cdef int64_t bad = -1
    if fc_cover_any(slot.cover, first, end):
        return place_ahead(M, stream, f, wire, psn)
    if f.track_protocol == FC_LL:
        bad = fc_ll_place(to, wire, nbytes, <uint32_t>f.track_flag, take_next(M, wire))
    elif f.track_protocol == FC_LL128:
        bad = fc_ll128_place(to, wire, M.mtu // 1024, nbytes, f.track_flag, take_next(M, wire))
    else:
        fc_copy_place(to, wire, nbytes, take_next(M, wire))
    if bad >= 0:
        wrong_flag(M, stream, f, m, wire, psn, bad)
        return DISAGREED
    cover(slot, first, end)
    if f.track_protocol != FC_SIMPLE:
        agree(M, stream, f, psn)
    return PLACED


include "position.pxi"


cdef void refuse_icrc(Machine *M, FlowState *f, const Message *m, uint32_t index, uint32_t length) noexcept nogil:
    cdef int64_t offset, nbytes
    f.bad_icrc += 1
    data_range(M, m, index, length, &offset, &nbytes)
    note_loss(M, BAD_ICRC, m, offset, nbytes)


cdef inline int express(Machine *M, uint32_t stream, FlowState *f, const fc_middle *p, uint64_t now_ns) noexcept nogil:
    """A full MIDDLE packet with the expected PSN, behind a packet of the same message that data_packet() accepted:
    whatever that would look at is known already, but ICRC and flags. Returns the Outcome."""
    cdef uint64_t psn = f.next_psn, bit = <uint64_t>1 << (psn % 64)
    cdef uint64_t *seen = &f.seen[psn // 64 % SEEN_WORDS]
    if f.keeps and M.check_icrc and not fc_middle_icrc_ok(p, M.mtu):
        refuse_icrc(M, f, f.ahead, <uint32_t>(psn - f.ahead.psn), M.mtu)
        return BAD_ICRC
    f.last_ns = now_ns
    f.packets += 1
    f.payload_bytes += M.mtu
    f.next_psn = psn + 1
    if not seen[0] & bit:  # set: seen a lap of the history ago
        if psn >= HISTORY + f.start_psn:
            f.missing += 1
        seen[0] |= bit
    if not f.keeps:
        return RELEASED
    if likely_so(psn < f.track_end):
        return M.on_track(M, stream, f, p.bth + 12, psn)
    return place_ahead(M, stream, f, p.bth + 12, psn)


cdef int data_packet(Machine *M, uint32_t stream, FlowState *f, const fc_roce *p, uint64_t now_ns) noexcept nogil:
    """A data packet of one of the job's flows. Returns its Outcome, or -1: its iteration has no arena
    yet, come back with the same packet."""
    cdef int64_t delta = <int64_t>((p.psn - f.next_psn) & 0xffffff)
    cdef uint64_t psn
    cdef uint32_t index
    cdef Message *m
    cdef int repeated, checked = 0, witness, final, is_flagged
    f.express = 0
    if delta >= 0x800000:
        delta -= 0x1000000
    if delta != 0 and f.last_ns and now_ns > f.last_ns + M.outage_ns:
        # 2^23 packets could have passed unseen: which lap of the PSN is this? A repeat after a timeout looks no
        # different; it has nothing to place, and if nothing absolute follows, neither has what comes after it.
        if p.psn == 0 and f.counted and made_anew(M, f, p):
            return end_of_run(M, stream, f)
        f.counted = 0
    if not f.counted:
        # PSNs start at 0 with the connection, so a flow seen from its beginning is counted from there. The
        # connections of a communicator are born together: where one was seen at 0, others are young too.
        if f.packets == 0 and not f.old and (p.psn == 0 or (M.from_start and p.psn < YOUNG)):
            f.counted = 1
        elif not find_position(M, stream, f, p):
            if p.psn >= YOUNG and (not M.check_icrc or fc_icrc_ok(p)):
                f.old = 1
            return UNANCHORED
        delta = <int64_t>((p.psn - f.next_psn) & 0xffffff)
        if delta >= 0x800000:
            delta -= 0x1000000
    if delta < 0 and (<uint64_t>(-delta) > f.next_psn or f.next_psn + delta < f.start_psn):
        return UNANCHORED  # from before this flow's history
    psn = f.next_psn + delta
    # A PSN out of order moves the cursor: trust it only with a right ICRC.
    if delta != 0 and M.check_icrc:
        if not fc_icrc_ok(p):
            f.bad_icrc += 1
            return BAD_ICRC
        checked = 1
    if f.state == LOST and not recover(M, stream, f, p, psn):
        f.packets += 1
        note_psn(f, psn)
        return NOT_SYNCED
    if psn == 0 and made_anew(M, f, p):
        return end_of_run(M, stream, f)
    m = locate(M, f, psn)
    if m == NULL:
        if psn < f.cursor.psn:
            f.packets += 1
            note_psn(f, psn)
            return STALE
        if M.check_icrc and not checked and not fc_icrc_ok(p):
            f.bad_icrc += 1
            return BAD_ICRC
        f.packets += 1
        note_psn(f, psn)
        log_disagreement(M, stream, f, EXTRA_MESSAGE, NULL, psn, f.cursor.psn, psn)
        return BEYOND
    if m.target == GRADIENT and m.iteration > M.base_iteration:
        if M.begun < 0 and not M.from_start:
            M.base_iteration = M.opened = m.iteration  # the capture began in mid-stream: this is its first iteration
            M.opener = stream
        elif m.iteration >= M.base_iteration + M.arenas:
            M.wanted[stream] = m.iteration
            return -1
    elif m.target == GRADIENT and m.iteration < M.opened and stream != M.opener:
        reopen(M, m.iteration)
    index = <uint32_t>(psn - m.psn)
    final = m.target != NOTHING and m.content == FC_FINAL and index < m.packets
    # What ends a flow must be right too: a receiver drops a damaged packet, and the flow goes on.
    if M.check_icrc and not checked and (
        final or p.headers & (FC_HAS_RETH | FC_HAS_IMM) or p.payload_len != length_of(M, m, index)
        or not right_opcode(m, index, p.opcode)
    ):
        if not fc_icrc_ok(p):
            refuse_icrc(M, f, m, index, p.payload_len)
            return BAD_ICRC
    if f.packets == 0:
        f.first_psn = psn
    if psn == 0:
        M.from_start = 1
    f.last_ns = now_ns
    f.packets += 1
    f.payload_bytes += p.payload_len
    repeated = note_psn(f, psn)
    if m.target == GRADIENT and m.iteration > M.begun:
        M.begun = m.iteration
    witness = check_witnesses(M, stream, f, m, index, p, psn)
    if witness == 0:
        return DISAGREED
    set_state(f, NON_ALLREDUCE if m.target != GRADIENT else ALLGATHER if m.content == FC_FINAL else REDUCE_SCATTER)
    is_flagged = m.call.lane.protocol != FC_SIMPLE and index < m.packets
    if is_flagged and not final and index == 0:
        # of bytes that nobody keeps only the step matters: look at flags that came along with the headers
        if not check_flags(M, stream, f, m, index, p.payload, min(p.payload_len, <uint32_t>128), psn):
            return DISAGREED
    if m.opens_loop and index == 0 and not repeated and repeats_previous(M, f, m, p.payload, p.payload_len):
        log_disagreement(M, stream, f, REPEATED_CHUNK, m, psn, 0, 0)
        return DISAGREED
    if psn + 1 == f.next_psn and (not final or is_flagged or m.agreed):
        f.express, f.ahead = m.psn + m.packets - 1, m
        if final:
            lay_track(M, f, m)
        if f.keeps != final:
            f.keeps = final
            M.keepers += 2 * final - 1
            M.keeping[p.dest_qp % HINTS] = final
    if not final:
        return REPEATED if repeated else RELEASED
    if is_flagged:
        return place_flagged(M, stream, f, m, index, p.payload, p.payload_len, psn)
    if m.agreed or witness == 2:
        return place(M, m, index, p.payload, p.payload_len)
    if repeated:
        return REPEATED  # its first copy is aside
    return keep_aside(M, f, f.current, index, p.payload, p.payload_len)


cdef int control_packet(Machine *M, uint32_t stream, FlowState *f, const fc_roce *p) noexcept nogil:
    """CTS writes (5.4) and ACKs towards the sender of an edge's data."""
    cdef CtsTable *cts
    cdef uint64_t index, address
    cdef uint32_t tag
    cdef int64_t delta
    if p.opcode == FC_RC_ACK:
        return CONTROL
    if p.opcode != FC_RC_WRITE_ONLY or (p.payload_len != 32 and p.payload_len != 64) or f.cts < 0:
        return OTHER_ROCE
    if M.check_icrc and not fc_icrc_ok(p):
        f.bad_icrc += 1
        return BAD_ICRC
    f.packets += 1
    delta = <int64_t>((p.psn - f.next_psn) & 0xffffff)
    if delta >= 0x800000:
        delta -= 0x1000000
    if delta >= 0 or <uint64_t>(-delta) <= f.next_psn:
        note_psn(f, f.next_psn + delta)
    memcpy(&address, p.payload, 8)
    M.cts_forms[p.payload_len == 64] += 1
    # idx is where the layout of the version puts it; the longest layout has zeros before
    index = 0
    if p.payload_len == 32:
        memcpy(&index, p.payload + 24, 8)
        memcpy(&tag, p.payload + 20, 4)
    else:
        memcpy(&index, p.payload + M.cts_index_at, 8)
        memcpy(&tag, p.payload + M.cts_tag_at, 4)
    if index == 0 or index >= NEVER:
        return CONTROL
    cts = &M.cts[stream * M.cts_tables + f.cts]
    cts.tagged = 1 if not cts.tagged or (cts.tagged == 1 and cts.tag == tag) else 2
    cts.tag = tag
    cts.index[(index - 1) % CTS_SLOTS] = index
    cts.address[(index - 1) % CTS_SLOTS] = address
    return CONTROL


cdef int examine(Machine *M, uint32_t stream, const fc_packetref *ref) noexcept nogil:
    """process() for the packets that express() is not for. Called through M.examine: inlined, its stack frame would
    burden the others."""
    cdef fc_roce p
    cdef const FlowKey *key
    cdef FlowState *f
    cdef int outcome, status = fc_roce_decode(ref.data, ref.length, &p)
    if status != FC_ROCE:
        outcome = (NOT_ROCE if status == FC_NOT_ROCE else TRUNCATED if status == FC_TRUNCATED
                   else FRAGMENT if status == FC_FRAGMENT else ENCAPSULATED if status == FC_ENCAPSULATED
                   else MALFORMED)
        if status == FC_ENCAPSULATED:
            M.refused[p.refusal] += 1
    else:
        key = find_flow(M, p.src, p.ip_version, p.dest_qp)
        if key == NULL:
            outcome = OTHER_ROCE
        else:
            f = &M.states[stream * M.flows + key.flow]
            f.active = 1
            if not key.data:
                outcome = control_packet(M, stream, f, &p)
            elif FC_RC_WRITE_FIRST <= p.opcode <= FC_RC_WRITE_ONLY_IMM:
                outcome = data_packet(M, stream, f, &p, ref.timestamp_ns)
                if outcome < 0:
                    return 0
            else:
                outcome = CONTROL if p.opcode == FC_RC_ACK else OTHER_ROCE
    M.counts[stream * OUTCOMES + outcome].packets += 1
    M.counts[stream * OUTCOMES + outcome].bytes += p.payload_len if status == FC_ROCE else ref.length
    return 1


cdef inline int process(Machine *M, uint32_t stream, const fc_packetref *ref) noexcept nogil:
    """One packet. 1: consumed; 0: blocked, nothing was counted."""
    cdef fc_middle p
    cdef const FlowKey *key
    cdef FlowState *f
    cdef Count *count
    if likely_so(fc_middle_decode(ref.data, ref.length, M.mtu, &p)):
        key = find_flow(M, p.ends, p.version, p.dest_qp)
        if likely_so(key != NULL):
            f = &M.states[stream * M.flows + key.flow]
            if likely_so(f.next_psn < f.express and not (p.psn ^ f.next_psn) & 0xffffff):
                count = &M.counts[stream * OUTCOMES + express(M, stream, f, &p, ref.timestamp_ns)]
                count.packets += 1
                count.bytes += M.mtu
                return 1
    return M.examine(M, stream, ref)


cdef inline const uint8_t *worth_fetching(const Machine *M, const fc_packetref *ref) noexcept nogil:
    """The packet if it will be placed, else NULL. A guess: the price is a useless load or a late one."""
    cdef const uint8_t *bth = fc_probable_bth(ref.data, ref.length)
    cdef uint32_t qpn
    if bth == NULL:
        return NULL
    memcpy(&qpn, bth + 4, 4)
    return bth if M.keeping[swapped(qpn) % HINTS] else NULL


cdef int64_t drive(Machine *M, uint32_t stream, fc_ring *ring, int64_t limit, int *blocked) noexcept nogil:
    """Packets of the ring until `limit`, its end or a packet that is blocked. Returns how many were consumed."""
    cdef int64_t done = 0
    cdef const fc_packetref *refs
    cdef uint64_t i, n, seen
    cdef uint64_t ahead  # payloads under way
    cdef int wide_headers = M.header_lines > 1
    while done < limit and not blocked[0]:
        ahead = fc_place_ahead(M.placing, M.mtu, HEADERS_AHEAD - 1)
        # up to where the ring begins again: references one behind the other are cheap to walk
        refs = fc_ring_at(ring, 0)
        seen = min(fc_ring_peek(ring, BURST + HEADERS_AHEAD), ring.mask + 1 - (ring.tail & ring.mask))
        n = min(min(seen, BURST), <uint64_t>(limit - done))
        if n == 0:
            break
        for i in range(n):
            if i + HEADERS_AHEAD < seen:
                fc_prefetch(&refs[i + 2 * HEADERS_AHEAD])  # may lie behind the last: a prefetch of anything is harmless
                fc_prefetch(refs[i + HEADERS_AHEAD].data)
                if wide_headers:
                    fc_prefetch(refs[i + HEADERS_AHEAD].data + 64)
            M.next = worth_fetching(M, &refs[i + ahead]) if M.keepers and i + ahead < seen else NULL
            if not process(M, stream, &refs[i]):
                blocked[0] = 1
                n = i
                break
            if M.next != NULL:  # nobody placed anything meanwhile
                fc_place_fetch(M.placing, M.next, M.mtu)
        fc_place_fence()  # before anybody may read what this burst placed
        fc_ring_release(ring, n)
        done += n
    return done


# -- the Python side ------------------------------------------------------------------------------


def placing():
    """(instructions, [(way, payload bytes fetched ahead) of LL, LL128 and SIMPLE]): how every engine places."""
    return fc_placing.kernels.name.decode(), [
        (fc_way_names[fc_placing.way[i]].decode(), fc_placing.ahead[i]) for i in range(3)
    ]


def icrc_kernels():
    """The ways to compute an ICRC that this processor has; the first is used, unless FLOWCHECK_SIMD takes a lesser one."""
    out = []
    cdef int i = 0
    while fc_icrc_all[i] != NULL:
        out.append(fc_icrc_all[i].decode())
        i += 1
    return out


def choose_icrc(str name):
    """From now on every engine computes ICRCs so. Before engines run; benchmarks and tests."""
    if not fc_icrc_choose(name.encode()):
        raise ValueError(f"{name!r} is no ICRC of this processor: {', '.join(icrc_kernels())}")


def choose_placing(int protocol, str way, uint32_t ahead):
    """From now on every engine places packets of a protocol (parser.wire.Protocol) in this way, all of which give the same
    bytes. Before engines run. See flowcheck.rebuild.calibration."""
    names = [fc_way_names[i].decode() for i in range(FC_WAYS)]
    if way not in names or not 0 <= protocol <= 2:
        raise ValueError(f"protocol {protocol}, way {way!r}: 0 to 2 and {', '.join(names)} are possible")
    fc_place_choose(protocol, names.index(way), ahead)


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


def _aligned(size_t nbytes):
    """A zeroed uint8 array of nbytes beginning on a cache line."""
    raw = np.zeros(nbytes + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip:skip + nbytes]


cdef class Engine:
    """One job's state machine over `config.streams` captures. See the module docstring for call order.

    config: parser.plan.EngineConfig. Raises ValueError for a config that contradicts itself.
    """

    cdef Machine *M
    cdef list arrays      # keeps the regions and bitmaps alive
    cdef list orders      # ring orders that lanes point to
    cdef readonly object config

    def __cinit__(self, config):
        cdef uint32_t i
        self.config = config
        self.arrays, self.orders = [], []
        self.M = <Machine *>zeroed(1, sizeof(Machine))
        M = self.M
        M.mtu, M.streams, M.flows, M.arenas = config.mtu, config.streams, len(config.flows), config.arenas
        M.check_icrc = config.check_icrc
        M.cts_index_at, M.cts_tag_at = config.cts_index_at, config.cts_tag_at
        M.begun = M.unlogged_last = M.unopened = -1
        M.unlogged_first = INT64_MAX
        M.outage_ns = config.outage_ns
        if not 1 <= M.streams <= 64 or M.arenas < 2:
            raise ValueError(f"{M.streams} streams and {M.arenas} arenas: 1..64 and at least 2 are possible")
        if not 256 <= M.mtu <= SIDE_BYTES:
            raise ValueError(f"MTU {M.mtu} is not between 256 and {SIDE_BYTES}")
        M.region_bytes[GRADIENT] = config.gradient_bytes
        M.region_bytes[PARAMETERS] = config.parameter_bytes
        for target in (GRADIENT, PARAMETERS):
            M.words[target] = (<uint64_t>M.region_bytes[target] + 511) // 512 + 1
        M.slots = <Slot *>zeroed(M.arenas + 1, sizeof(Slot))
        for i in range(M.arenas + 1):
            target = GRADIENT if i < M.arenas else PARAMETERS
            data = _aligned(M.region_bytes[target])
            cover = np.zeros(M.words[target], dtype=np.uint64)
            self.arrays += [(data, cover)]
            M.slots[i].data = <uint8_t *><uintptr_t>data.ctypes.data
            M.slots[i].cover = <uint64_t *><uintptr_t>cover.ctypes.data
            M.slots[i].iteration = -1
        self._build_edges()
        self._build_flows()
        M.side = <SidePacket *>zeroed(SIDE_PACKETS, sizeof(SidePacket))
        for i in range(SIDE_PACKETS):
            M.side[i].next = <int32_t>i + 1 if i + 1 < SIDE_PACKETS else -1
        M.counts = <Count *>zeroed(M.streams * OUTCOMES, sizeof(Count))
        M.examine, M.on_track = examine, place_on_track

    def _build_edges(self):
        cdef Edge *e
        cdef Call *call
        cdef size_t i, c
        cdef uintptr_t order
        M = self.M
        M.cts_tables = len(self.config.edges)  # one table per edge
        M.edges = <Edge *>zeroed(M.cts_tables, sizeof(Edge))
        known = {}
        for i, spec in enumerate(self.config.edges):
            e = &M.edges[i]
            if not 1 <= spec.used <= spec.qps:
                raise ValueError(f"edge {i}: messages over {spec.used} of {spec.qps} QPs")
            e.qps, e.used = spec.qps, spec.used
            e.ar_above = UINT32_MAX if spec.ar_above is None else spec.ar_above
            e.imm_big_endian = spec.imm_big_endian
            e.ncalls = len(spec.calls)
            e.steady = e.ncalls
            e.calls = <Call *>zeroed(e.ncalls, sizeof(Call))
            for c, item in enumerate(spec.calls):
                call = &e.calls[c]
                call.phase, call.target, call.base = int(item.phase), int(item.target), item.base
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
        if item.target == NOTHING:
            return
        if item.base % 8:
            raise ValueError(f"a call's tensor begins at byte {item.base}, not on a cell of 8 bytes")
        end = max(segment.limit for segment in item.lane.segments) * item.lane.elem_bytes
        if item.lane.kind in (FC_RING_ALLGATHER, FC_RING_REDUCESCATTER):  # segments are of one rank's block
            end += (item.lane.ranks - 1) * item.lane.block * item.lane.elem_bytes
        if item.base < 0 or item.base + end > self.M.region_bytes[<int>item.target]:
            raise ValueError(f"a call ends at byte {item.base + end} of a region of {self.M.region_bytes[<int>item.target]}")

    def _build_flows(self):
        cdef FlowState *f
        cdef FlowKey *key
        cdef uint32_t s, i, size = 16
        cdef uint64_t ends[4]
        cdef uint32_t version
        M = self.M
        while size < 4 * len(self.config.flows):
            size *= 2
        M.table_mask = size - 1
        M.table = <FlowKey *>zeroed(size, sizeof(FlowKey))
        if sizeof(FlowState) % 64:
            raise SystemError(f"a FlowState has {sizeof(FlowState)} bytes, not whole cache lines: mend unused_tail")
        M.states = <FlowState *>zeroed(<size_t>M.streams * M.flows, sizeof(FlowState))
        M.cts = <CtsTable *>zeroed(<size_t>M.streams * M.cts_tables, sizeof(CtsTable))
        for number, spec in enumerate(self.config.flows):
            if len(spec.src_addr) != len(spec.dst_addr) or len(spec.src_addr) not in (4, 16):
                raise ValueError(f"flow {number}: addresses of {len(spec.src_addr)} and {len(spec.dst_addr)} bytes")
            addresses = spec.src_addr + spec.dst_addr
            version = 4 if len(addresses) == 8 else 6
            memset(ends, 0, sizeof(ends))
            memcpy(ends, <const uint8_t *>addresses, len(addresses))
            i = key_hash(ends[0], spec.qpn) & M.table_mask
            while M.table[i].number:
                i = (i + 1) & M.table_mask
            key = &M.table[i]
            memcpy(key.ends, ends, sizeof(ends))
            key.number = <uint64_t>spec.qpn | <uint64_t>version << 32
            M.header_lines = max(M.header_lines, 1 if version == 4 else 2)
            key.data, key.flow = spec.data, number
            for s in range(M.streams):
                f = &M.states[s * M.flows + number]
                f.edge, f.qp, f.cts = spec.edge, spec.qp, spec.edge
                f.side_head = f.side_tail = -1

    def __dealloc__(self):
        cdef uint32_t i
        M = self.M
        if M == NULL:
            return
        if M.edges != NULL:
            for i in range(M.cts_tables):
                free(M.edges[i].calls)
        for memory in (<uintptr_t>M.edges, <uintptr_t>M.table, <uintptr_t>M.states, <uintptr_t>M.cts,
                       <uintptr_t>M.slots, <uintptr_t>M.side, <uintptr_t>M.counts):
            free(<void *><uintptr_t>memory)
        free(M)

    # -- packets --

    def run(self, uint32_t stream, uintptr_t ring_address, int64_t limit):
        """Take at most `limit` packets from an fc_ring. Returns (packets consumed, blocked).

        blocked: the next packet belongs to an iteration that has no arena yet; retire() first.
        """
        cdef int64_t done
        cdef int blocked = 0
        self._stream(stream)
        with nogil:
            done = drive(self.M, stream, <fc_ring *>ring_address, limit, &blocked)
        return done, bool(blocked)

    def feed(self, uint32_t stream, const uint8_t[::1] frame):
        """One frame from memory: the same function that run() calls. False: blocked, not consumed."""
        cdef fc_packetref ref
        cdef int consumed
        self._stream(stream)
        ref.data = &frame[0] if frame.shape[0] else NULL
        ref.length = <uint32_t>frame.shape[0]
        ref.stream = <uint16_t>stream
        ref.timestamp_ns = ref.flags = 0
        consumed = process(self.M, stream, &ref)
        fc_place_fence()
        return bool(consumed)

    def look_ahead(self, uintptr_t ring_address, uint64_t count=4096):
        """Does one of the job's connections begin within the next `count` packets of a ring? Then every connection whose
        first packet is young counts from PSN 0, also where packets come in another order than they were sent. Nothing is
        consumed. None: so many are not there yet."""
        cdef fc_ring *ring = <fc_ring *>ring_address
        cdef int closed = fc_ring_closed(ring)
        cdef uint64_t i, n = fc_ring_peek(ring, count)
        cdef fc_roce p
        cdef const FlowKey *key
        cdef set begun = set(), old = set()  # flows that have PSN 0 here; one that is no young one
        if n < min(count, ring.mask + 1) and not closed:
            return None
        for i in range(n):
            key = self._write_at(ring, i, &p)
            if key == NULL or 0 < p.psn < YOUNG or (self.M.check_icrc and not fc_icrc_ok(&p)):
                continue
            (old if p.psn else begun).add(<uintptr_t>key)
        if not begun - old:  # beside large ones PSN 0 is no beginning, but a wrap
            return False
        self.M.from_start = 1
        return True

    cdef const FlowKey *_write_at(self, fc_ring *ring, uint64_t ahead, fc_roce *p) noexcept:
        """The data flow of a WRITE that lies ahead in a ring; NULL: something else."""
        cdef const fc_packetref *ref = fc_ring_at(ring, ahead)
        cdef const FlowKey *key
        if fc_roce_decode(ref.data, ref.length, p) != FC_ROCE or not FC_RC_WRITE_FIRST <= p.opcode <= FC_RC_WRITE_ONLY_IMM:
            return NULL
        key = find_flow(self.M, p.src, p.ip_version, p.dest_qp)
        return key if key != NULL and key.data else NULL

    def next_ns(self, uintptr_t ring_address):
        """When the next packet of a ring was captured, nanoseconds; None: none is there (yet)."""
        cdef fc_ring *ring = <fc_ring *>ring_address
        return fc_ring_at(ring, 0).timestamp_ns if fc_ring_peek(ring, 1) else None

    def drained(self, uintptr_t ring_address):
        return bool(fc_ring_drained(<fc_ring *>ring_address))

    # -- iterations --

    @property
    def disagreed(self):
        """How many disagreements there were."""
        return self.M.logged

    @property
    def oldest(self):
        """The oldest iteration still open."""
        return self.M.base_iteration

    @property
    def unopened(self):
        """The oldest iteration that one stream brought after another, read first, had begun behind it; -1: none."""
        return self.M.unopened

    @property
    def begun(self):
        """Highest iteration of which a gradient packet was seen; -1: none."""
        return self.M.begun

    def past(self, uint32_t stream):
        """The iteration the slowest active flow of a stream works on: all before it are behind it.

        A flow that is LOST or whose schedule has ended holds nothing up. -1: no flow seen yet.
        """
        cdef FlowState *f
        cdef Message *m
        cdef int64_t slowest = INT64_MAX, n = 0
        cdef uint32_t i
        self._stream(stream)
        for i in range(self.M.flows):
            f = &self.M.states[stream * self.M.flows + i]
            if not f.active or not self.config.flows[i].data:
                continue
            n += 1
            if f.state == LOST:
                continue
            m = locate(self.M, f, f.next_psn)
            if m != NULL and m.iteration < slowest:
                slowest = m.iteration
        return slowest if n else -1

    def wanted(self, uint32_t stream):
        """The iteration that a blocked stream's next packet belongs to."""
        self._stream(stream)
        return self.M.wanted[stream]

    def retire(self, int64_t count=1):
        """Close the oldest iterations: their arenas are free for later ones, packets for them are late."""
        cdef uint32_t i
        self.M.base_iteration += count
        for i in range(self.M.streams * self.M.flows):
            self.M.states[i].track_end = 0  # their arenas are somebody else's soon

    def forget(self):
        """Drop what is logged of closed iterations: a live engine has no last one at which all would be read."""
        cdef uint64_t i, kept = 0
        M = self.M
        for i in range(M.kept):
            if M.log[i].iteration >= M.base_iteration:
                M.log[kept] = M.log[i]
                kept += 1
        M.kept, kept = kept, 0
        for i in range(min(M.lost, <uint64_t>LOSS_ENTRIES)):
            if M.losses[i].target == GRADIENT and M.losses[i].iteration >= M.base_iteration:
                M.losses[kept] = M.losses[i]
                kept += 1
        M.lost = kept
        if M.unlogged_last < M.base_iteration:
            M.unlogged_first, M.unlogged_last = INT64_MAX, -1

    @property
    def unlogged(self):
        """range of iterations with disagreements that found no room in the log."""
        if self.M.unlogged_last < 0:
            return range(0)
        return range(self.M.unlogged_first, self.M.unlogged_last + 1)

    def gaps(self, uint32_t stream):
        """PSNs of data that were skipped and have not come (so far), all flows of a stream together."""
        cdef FlowState *f
        cdef uint64_t n = 0
        cdef uint32_t i
        self._stream(stream)
        for i in range(self.M.flows):
            f = &self.M.states[stream * self.M.flows + i]
            if f.packets and self.config.flows[i].data:
                n += f.missing + unseen(f)
        return n

    def consider_recovery(self):
        """Decide for flows that became LOST since whether they may ever be trusted again: see recover().

        True is possible if the sizes of one steady iteration's messages, as a circle, are unlike every
        rotation of themselves. Call between runs; costs one walk over an iteration's messages per flow.
        """
        cdef uint32_t s, i
        cdef FlowState *f
        for s in range(self.M.streams):
            for i in range(self.M.flows):
                f = &self.M.states[s * self.M.flows + i]
                if f.state == LOST and f.recoverable == 0:
                    f.recoverable = 2 if _unlike_rotations(self._steady_sizes(i)) else 1

    def _steady_sizes(self, uint32_t flow):
        """Sizes of the messages of one steady iteration on a flow, as bytes objects would be compared."""
        cdef FlowState *f = &self.M.states[flow]
        cdef const Edge *e = &self.M.edges[f.edge]
        cdef Cursor c
        cdef Message m
        memset(&c, 0, sizeof(Cursor))
        c.call, c.iteration = e.steady, 1
        sizes = []
        while e.steady < e.ncalls and step_on(self.M, e, f.qp, &c, &m) and m.iteration == 1:
            sizes.append((m.size, m.total))
        return sizes

    def finish(self):
        """No more packets: give up what is aside, count the PSNs that never came."""
        cdef uint32_t s, i
        cdef FlowState *f
        for s in range(self.M.streams):
            for i in range(self.M.flows):
                f = &self.M.states[s * self.M.flows + i]
                settle_aside(self.M, s, f, 0, 0)
                if f.active:
                    f.missing += unseen(f)
                    memset(f.seen, 0xff, sizeof(f.seen))

    # -- results --

    def region(self, iteration=None):
        """uint8 array of an iteration's gradient region (None: of the parameters), not a copy."""
        return self.arrays[self._slot(iteration)][0]

    def covered(self, iteration=None):
        """How many cells of 8 bytes of an iteration (None: of the parameters) are there. Counted as they come: O(1)."""
        cdef int64_t i = self._slot(iteration)
        return self.M.slots[i].covered if self._holds(i, iteration) else 0

    def missing(self, iteration, int64_t first, int64_t end):
        """int64 array (n, 2): the runs [start, end) of cells within [first, end) that are not there, in order.

        Reads the bitmap by words: a region that is complete costs 16 MB of reading for each GB of it."""
        cdef int64_t i = self._slot(iteration)
        cdef int64_t room = 256
        cdef int64_t[:, ::1] out
        cdef uint64_t at = first, n
        if not 0 <= first <= end <= <int64_t>self.M.words[PARAMETERS if iteration is None else GRADIENT] * 64:
            raise IndexError(f"cells {first} to {end} are not all in the region")
        if not self._holds(i, iteration):
            return np.array([(first, end)] if first < end else [], dtype=np.int64).reshape(-1, 2)
        parts = []
        while at < <uint64_t>end or not parts:
            found = np.empty((room, 2), dtype=np.int64)
            out = found
            with nogil:
                n = fc_cover_gaps(self.M.slots[i].cover, &at, end, <int64_t (*)[2]>&out[0, 0], room)
            parts.append(found[:n])
            room = min(4 * room, 1 << 20)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def cells(self, iteration=None):
        """bool array, one per cell of the region: is it there? For tests and tools: a byte for every 8 of the region."""
        cdef int64_t i = self._slot(iteration)
        size = (self.M.region_bytes[PARAMETERS if iteration is None else GRADIENT] + 7) // 8
        if not self._holds(i, iteration):
            return np.zeros(size, dtype=bool)
        return np.unpackbits(self.arrays[i][1].view(np.uint8), bitorder="little", count=size).astype(bool)

    def copies(self, iteration=None):
        """(cells whose copies differed, region byte of the first such, bytes compared)."""
        cdef int64_t i = self._slot(iteration)
        if not self._holds(i, iteration):
            return 0, 0, 0
        return self.M.slots[i].copies_differ, self.M.slots[i].differ_offset, self.M.slots[i].compared_bytes

    def outcomes(self, uint32_t stream):
        """{outcome name: (packets, bytes)}; the packets add up to what run() consumed."""
        self._stream(stream)
        return {name: (self.M.counts[stream * OUTCOMES + i].packets, self.M.counts[stream * OUTCOMES + i].bytes)
                for i, name in enumerate(OUTCOME_NAMES)}

    def encapsulated(self):
        """{what: packets} of outcome "encapsulated", all streams together: tunnels that are not unpacked."""
        return {REFUSAL_NAMES[i]: self.M.refused[i] for i in range(1, FC_REFUSALS) if self.M.refused[i]}

    def flow_counters(self, uint32_t stream):
        """One dict per flow of the config, in order."""
        cdef uint32_t i
        cdef FlowState *f
        self._stream(stream)
        out = []
        for i in range(self.M.flows):
            f = &self.M.states[stream * self.M.flows + i]
            out.append({
                "seen": bool(f.active), "state": PHASES[f.state], "anchored": bool(f.anchored),
                "ignored": self._ignored(f),
                "adrift": f.packets > 0 and not f.counted,  # lost in an outage, and not found again
                "packets": f.packets, "payload_bytes": f.payload_bytes, "missing": f.missing,
                "duplicates": f.duplicates, "retransmissions": f.retransmissions, "out_of_order": f.out_of_order,
                "icrc_wrong": f.bad_icrc, "agreements": f.agreements, "disagreements": f.disagreements,
                "first_psn": f.first_psn, "next_psn": f.next_psn,
            })
        return out

    def cts_tags(self):
        """{edge: the rank its receiver names as sender, in the numbering of NCCL's top communicator}, for
        edges whose CTS were seen and always said the same."""
        cdef uint32_t s, e
        out = {}
        for s in range(self.M.streams):
            for e in range(self.M.cts_tables):
                if self.M.cts[s * self.M.cts_tables + e].tagged == 1:
                    out[e] = self.M.cts[s * self.M.cts_tables + e].tag
        return out

    def cts_forms(self):
        """{bytes of the element: clear-to-send writes seen}."""
        return {32: self.M.cts_forms[0], 64: self.M.cts_forms[1]}

    cdef object _ignored(self, FlowState *f):
        """range of iterations that the flow, LOST, brought nothing to."""
        if f.disagreements == 0:
            return range(0)
        return range(f.lost_iteration, <int64_t>1 << 62 if f.state == LOST else f.back_iteration)

    def disagreements(self):
        """The logged disagreements: dicts of kind, stream, flow, iteration, message, psn, expected, found."""
        cdef uint64_t i
        out = []
        for i in range(self.M.kept):
            entry = self.M.log[i]
            out.append({
                "kind": DISAGREEMENT_NAMES[entry.kind], "stream": entry.stream, "flow": entry.flow,
                "iteration": entry.iteration, "message": entry.number, "psn": entry.psn,
                "expected": entry.expected, "found": entry.found,
            })
        return out

    def losses(self):
        """Places known to be missing: dicts of cause, target, iteration, offset, bytes (region bytes)."""
        cdef uint64_t i
        return [
            {"cause": OUTCOME_NAMES[self.M.losses[i].cause], "target": self.M.losses[i].target,
             "iteration": self.M.losses[i].iteration, "offset": self.M.losses[i].offset, "bytes": self.M.losses[i].bytes}
            for i in range(min(self.M.lost, <uint64_t>LOSS_ENTRIES))
        ]

    cdef int64_t _slot(self, iteration) except -1:
        return self.M.arenas if iteration is None else <int64_t>iteration % self.M.arenas

    cdef bint _holds(self, int64_t slot, iteration) noexcept:
        """Has anything of the iteration come? Before that its slot is still an older one's."""
        return iteration is None or self.M.slots[slot].iteration == iteration

    cdef int _stream(self, uint32_t stream) except -1:
        if stream >= self.M.streams:
            raise IndexError(f"stream {stream} of {self.M.streams}")
        return 0
