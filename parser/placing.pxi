# Bytes into the gradient arena, as machine.pyx does it (included there: one unit for the compiler, so that it inlines).
#
# A cell is 8 bytes. A slot has one coverage bitmap (cover.h), whatever the number of streams: one thread places. The
# first copy of a cell is placed, later ones are compared, whichever stream they come over. Flags were checked before anything here is called. Packets that nothing vouches for yet are kept
# aside until an anchor behind them agrees. Data is stored past the cache: drive() fences once per burst.


cdef Slot *slot_of(Machine *M, const Message *m) noexcept nogil:
    """The live buffer of a message, taken over from an older iteration on first use. NULL: closed."""
    cdef Slot *slot
    if m.target == PARAMETERS:
        return &M.slots[M.arenas]
    if m.iteration < M.base_iteration:
        return NULL
    slot = &M.slots[m.iteration % M.arenas]
    if slot.iteration != m.iteration:
        slot.iteration = m.iteration
        slot.copies_differ = 0
        slot.compared_bytes = 0
        slot.covered = 0
        memset(slot.cover, 0, M.words[GRADIENT] * sizeof(uint64_t))
    return slot


cdef inline void cover(Slot *slot, uint64_t first, uint64_t end) noexcept nogil:
    """Cells of which none was there."""
    fc_cover_set(slot.cover, first, end)
    slot.covered += end - first
    fc_prefetch(slot.cover + end // 64 + 8)  # the line that the packets to come will set


cdef inline const uint8_t *take_next(Machine *M, const uint8_t *none) noexcept nogil:
    """What to fetch while placing: once."""
    cdef const uint8_t *next = M.next
    M.next = NULL
    return next if next != NULL else none


cdef int put(Machine *M, Slot *slot, int64_t offset, const uint8_t *data, int64_t nbytes) noexcept nogil:
    """Place contiguous bytes; cells already there are compared instead. 1 if any cell was new.

    offset is a multiple of a cell; only the end of a tensor is not, and nothing else lives in that cell.
    """
    cdef uint64_t first = <uint64_t>offset // 8, end = <uint64_t>(offset + nbytes + 7) // 8, cell
    cdef int64_t here, n
    cdef int new = 0
    if not fc_cover_any(slot.cover, first, end):
        if nbytes >= WORTH_STREAMING:
            fc_copy_place(slot.data + offset, data, nbytes, take_next(M, data))
        else:
            memcpy(slot.data + offset, data, nbytes)
        cover(slot, first, end)
        return 1
    for cell in range(first, end):
        here = <int64_t>(cell - first) * 8
        n = min(8, nbytes - here)
        if fc_cover_bit(slot.cover, cell):
            slot.compared_bytes += n
            if memcmp(slot.data + offset + here, data + here, n) != 0:
                if slot.copies_differ == 0:
                    slot.differ_offset = <uint64_t>(offset + here)
                slot.copies_differ += 1
        else:
            memcpy(slot.data + offset + here, data + here, n)
            fc_cover_set(slot.cover, cell, cell + 1)
            slot.covered += 1
            new = 1
    return new


cdef int put_ll128(Machine *M, Slot *slot, const Message *m, uint64_t at, const uint8_t *wire, uint32_t length) noexcept nogil:
    """Lines of a LL128 message beginning at wire byte `at` of the message (a multiple of 128). 1 if any cell
    was new, 0 if none, -1 if there are only lines behind the last element."""
    cdef uint32_t line, word, i
    cdef int64_t half, offset, n
    cdef int new = -1
    for i in range(length // 128):
        half = <int64_t>((at + 128 * i) // 1024) * 960
        line = <uint32_t>((at + 128 * i) // 128 % 8)
        # words 0..13 lie together; word 14 follows them only in lines 0..3
        offset = half + fc_ll128_offset(line, 0)
        n = min(<int64_t>(120 if line < 4 else 112), m.data_bytes - offset)
        if n > 0:
            new = max(new, put(M, slot, m.offset + offset, wire + 128 * i, n))
        if line >= 4:
            offset = half + fc_ll128_offset(line, 14)
            n = min(<int64_t>8, m.data_bytes - offset)
            if n > 0:
                new = max(new, put(M, slot, m.offset + offset, wire + 128 * i + 112, n))
    return new


cdef int place(Machine *M, const Message *m, uint32_t index, const uint8_t *wire, uint32_t length) noexcept nogil:
    """Final bytes of packet `index` of a message into its region. Flags were checked by the caller."""
    cdef Slot *slot = slot_of(M, m)
    cdef uint64_t at = m.piece + <uint64_t>index * M.mtu
    cdef int64_t offset, n
    cdef uint64_t first, end
    cdef uint8_t unpacked[SIDE_BYTES]
    cdef int new
    if slot == NULL:
        return LATE
    if m.call.lane.protocol == FC_LL128:
        new = put_ll128(M, slot, m, at, wire, length)
        return PLACED if new > 0 else COMPARED if new == 0 else RELEASED
    if m.call.lane.protocol == FC_LL:
        offset = <int64_t>(at // 2)
        n = min(<int64_t>(length // 2), m.data_bytes - offset)
        if n <= 0:
            return RELEASED
        first = <uint64_t>(m.offset + offset) // 8
        end = <uint64_t>(m.offset + offset + n + 7) // 8
        if not fc_cover_any(slot.cover, first, end):
            fc_ll_unpack(slot.data + m.offset + offset, wire, n)
            cover(slot, first, end)
            return PLACED
        fc_ll_unpack(unpacked, wire, n)
        wire = unpacked
    else:
        offset = <int64_t>at
        n = min(<int64_t>length, m.data_bytes - offset)
        if n <= 0:
            return RELEASED
    new = put(M, slot, m.offset + offset, wire, n)
    return PLACED if new else COMPARED


cdef void data_range(Machine *M, const Message *m, uint32_t index, uint32_t length, int64_t *offset, int64_t *nbytes) noexcept nogil:
    """Region bytes that packet `index` stands for, for loss reports (LL128: of its slices, rounded)."""
    cdef int64_t at = m.piece + <int64_t>index * M.mtu, n = length
    if m.call.lane.protocol == FC_LL:
        at, n = at // 2, n // 2
    elif m.call.lane.protocol == FC_LL128:
        at, n = at // 1024 * 960, (n + 1023) // 1024 * 960
    if n > m.data_bytes - at:
        n = m.data_bytes - at
    offset[0] = m.offset + at
    nbytes[0] = n


# -- packets kept aside ---------------------------------------------------------------------------


cdef int keep_aside(Machine *M, FlowState *f, uint64_t message, uint32_t index, const uint8_t *wire, uint32_t length) noexcept nogil:
    cdef int32_t i = M.side_free
    if i < 0 or length > SIDE_BYTES:
        return UNANCHORED
    M.side_free = M.side[i].next
    M.side[i].next = -1
    M.side[i].message = message
    M.side[i].index = index
    M.side[i].length = length
    memcpy(M.side[i].bytes, wire, length)
    if f.side_tail < 0:
        f.side_head = i
    else:
        M.side[f.side_tail].next = i
    f.side_tail = i
    return ASIDE


cdef void settle_aside(Machine *M, uint32_t stream, FlowState *f, uint64_t before_psn, int trusted) noexcept nogil:
    """An anchor agreed: packets aside before it are placed if an anchor before them agreed as well (or
    the first packet of their message has come since). trusted: this was not the flow's first anchor.
    before_psn 0: give up on all of them."""
    cdef int32_t i = f.side_head, following
    cdef SidePacket *packet
    cdef Message *m
    cdef int outcome
    cdef int64_t offset, nbytes
    cdef int32_t kept_head = -1, kept_tail = -1
    while i >= 0:
        packet = &M.side[i]
        following = packet.next
        m = &f.window[packet.message % WINDOW]
        if packet.message + WINDOW < f.messages:
            outcome = UNANCHORED
            m = NULL
        elif before_psn == 0:
            outcome = UNANCHORED
        elif m.agreed:
            outcome = place(M, m, packet.index, packet.bytes, packet.length)
        elif trusted and m.psn + packet.index < before_psn:
            outcome = place(M, m, packet.index, packet.bytes, packet.length)
        else:
            if kept_tail < 0:
                kept_head = i
            else:
                M.side[kept_tail].next = i
            kept_tail = i
            packet.next = -1
            i = following
            continue
        if outcome == UNANCHORED and m != NULL:
            data_range(M, m, packet.index, packet.length, &offset, &nbytes)
            note_loss(M, UNANCHORED, m, offset, nbytes)
        M.counts[stream * OUTCOMES + ASIDE].packets -= 1
        M.counts[stream * OUTCOMES + outcome].packets += 1
        M.counts[stream * OUTCOMES + ASIDE].bytes -= packet.length
        M.counts[stream * OUTCOMES + outcome].bytes += packet.length
        packet.next = M.side_free
        M.side_free = i
        i = following
    f.side_head, f.side_tail = kept_head, kept_tail


cdef inline void agree(Machine *M, uint32_t stream, FlowState *f, uint64_t psn) noexcept nogil:
    """A witness agreed with the packet count at `psn`."""
    cdef int trusted = f.anchored
    f.agreements += 1
    f.anchored = 1
    if f.side_head >= 0:
        settle_aside(M, stream, f, psn + 1, trusted)


# -- one send too many ----------------------------------------------------------------------------


cdef int nontrivial(const uint8_t *data, int64_t nbytes) noexcept nogil:
    """At least three different 4-byte words: equality of such bytes is no accident."""
    cdef int64_t i
    cdef uint32_t word, a, b
    if nbytes < 16:
        return 0
    memcpy(&a, data, 4)
    b = a
    for i in range(4, nbytes - 3, 4):
        memcpy(&word, data + i, 4)
        if word != a and b == a:
            b = word
        elif word != a and word != b:
            return 1
    return 0


cdef int repeats_previous(Machine *M, const FlowState *f, const Message *m, const uint8_t *wire, uint32_t length) noexcept nogil:
    """Does the first packet of a ring allreduce's loop repeat what rank r received last in the loop before?

    A loop's first send is rank r's own contribution to chunk r-1. An NCCL changed to send 2n-1 times per
    loop (reference nccl-wire.md section 10) sends the reduced chunk r+1 there, and for n = 2 or equal chunks
    size, slot and flag all agree with the unchanged schedule: only the bytes tell. Comparing them with
    the arena keeps such traffic from being read one message off. Equal by honest means only when the
    data is trivial, which is not taken as evidence.
    """
    cdef const Edge *e = &M.edges[f.edge]
    cdef const Call *call = m.call
    cdef const fc_lane *lane = &call.lane
    cdef int64_t loop = m.index // (2 * (lane.ranks - 1) * lane.slices), iteration = m.iteration, offset, n, i
    cdef int32_t c, hops = 0
    cdef fc_message shape
    cdef Slot *slot
    cdef uint8_t data[256]
    if lane.kind != FC_RING_ALLREDUCE or m.target != GRADIENT:
        return 0
    if loop > 0:
        loop -= 1
    else:
        c = <int32_t>(call - e.calls)
        while True:
            c -= 1
            hops += 1
            if c < e.steady and iteration > 1:
                c = e.ncalls - 1
                iteration -= 1
            if c < 0 or hops > e.ncalls + 1:
                return 0
            if e.calls[c].has_lane:
                break
        call = &e.calls[c]
        lane = &call.lane
        if call.target != GRADIENT or lane.kind != FC_RING_ALLREDUCE:
            return 0
        if call.phase <= 1:
            iteration = 0
        loop = lane.messages // (2 * (lane.ranks - 1) * lane.slices) - 1
    slot = &M.slots[iteration % M.arenas]
    if slot.iteration != iteration:
        return 0
    # the last chunk that r-1 sends to r is chunk r+1: rank (r-1)'s message of k = 2n-3
    cdef fc_lane received = lane[0]
    received.index = (lane.index + lane.ranks - 1) % lane.ranks
    received.slices = 1
    fc_lane_message(&received, (loop + 1) * 2 * (lane.ranks - 1) - 1, &shape)
    offset = call.base + shape.first * lane.elem_bytes
    n = min(<int64_t>256, <int64_t>shape.data_bytes)
    if m.call.lane.protocol == FC_LL:
        n = min(n, <int64_t>(length // 2))
        fc_ll_unpack(data, wire, n)
    else:
        # LL128: the first 120 bytes of a half-slice lie in order
        n = min(n, <int64_t>(112 if m.call.lane.protocol == FC_LL128 else 256))
        n = min(n, <int64_t>length)
        memcpy(data, wire, n)
    for i in range(offset // 8, (offset + n) // 8):
        if not fc_cover_bit(slot.cover, <uint64_t>i):
            return 0
    return nontrivial(data, n) and memcmp(data, slot.data + offset, n) == 0
