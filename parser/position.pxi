# Where a flow is in its schedule, when the count cannot say: after a start in mid-stream, a restart, or an end (LOST).
# Included in machine.pyx.
#
# A place needs two witnesses that never restart with the traffic: an absolute one (the step of an LL or LL128 flag,
# the index of a CTS) names a message, and that message must lie at this packet's PSN and have its length. A flow that
# was given up comes back only behind a whole iteration that agreed in everything (recover()). A first packet that
# comes again with other contents is another connection's (made_anew()).


cdef int try_position(
    Machine *M, uint32_t stream, FlowState *f, const fc_roce *p, int by_step, uint64_t want, int protocol, uint64_t shift
) noexcept nogil:
    """An absolute witness says step (or message number) `want`. If the schedule has that message, and at
    this packet's PSN modulo 2^24, the flow goes on from there: two witnesses that never restart agree.
    shift: for a CTS, how far into the announced buffer this packet's address points."""
    cdef Cursor c
    cdef Message m
    cdef uint32_t index
    if not seek(M, f, by_step, want, &c, &m):
        return 0
    index = <uint32_t>((p.psn - m.psn) & 0xffffff)
    if index >= m.packets or (protocol >= 0 and m.call.lane.protocol != protocol):
        return 0
    if protocol < 0 and m.piece + <uint64_t>index * M.mtu != shift:
        return 0
    if p.payload_len != (min(M.mtu, m.size - index * M.mtu) if m.size else 0):
        return 0
    if f.packets and f.cursor.psn > m.psn and f.next_psn >= m.psn + index and f.next_psn - m.psn - index < 0x800000:
        f.counted = 1  # where the count is already (or just behind it): nothing to move
        f.seeks = 0
        return 1
    settle_aside(M, stream, f, 0, 0)
    if f.packets:
        f.missing += unseen(f)
        if m.psn + index > f.next_psn:
            f.missing += m.psn + index - f.next_psn
    memset(f.seen, 0, sizeof(f.seen))
    f.window[0] = m
    f.messages, f.current = 1, 0
    f.cursor = c
    f.finished = 0
    f.next_psn = f.start_psn = m.psn + index
    f.counted = f.anchored = 1
    f.seeks = 0
    return 1


cdef uint64_t whole_step(Machine *M, uint32_t stream, FlowState *f, uint32_t low) noexcept nogil:
    """A step from its low 32 bits: the one nearest to the newest CTS, whose index has 64, if there is one;
    else nearest to where the flow was. (After 2^32 steps the PSN can repeat as well and tells nothing.)"""
    cdef uint64_t near = f.cursor.step, newest = 0, i, step
    cdef CtsTable *cts
    cdef Cursor c
    cdef Message m
    if f.cts >= 0:
        cts = &M.cts[stream * M.cts_tables + f.cts]
        for i in range(CTS_SLOTS):
            newest = max(newest, cts.index[i])
        if newest and (seek(M, f, 0, newest - 1, &c, &m) or c.step):
            near = c.step
    step = (near & ~<uint64_t>0xffffffff) | low
    if step > near + 0x7fffffff and step >> 32:
        return step - (<uint64_t>1 << 32)
    if step + 0x7fffffff < near:
        return step + (<uint64_t>1 << 32)
    return step


cdef int find_position(Machine *M, uint32_t stream, FlowState *f, const fc_roce *p) noexcept nogil:
    """Where is a flow whose origin is not known? Flags and CTS indices never restart, so they can say."""
    cdef uint32_t low
    cdef uint64_t flag, want, tried = 0, i, best, address = 0
    cdef CtsTable *cts
    if f.seeks >= SEEK_TRIES or (M.check_icrc and not fc_icrc_ok(p)):
        return 0
    if p.payload_len >= 16 and p.payload_len % 16 == 0:
        memcpy(&low, p.payload + 4, 4)
        if low and fc_ll_bad_line(p.payload, p.payload_len // 16, low) < 0:
            want = whole_step(M, stream, f, low - 1)
            if try_position(M, stream, f, p, 1, want, FC_LL, 0):
                return 1
            f.seeks += 1
    if p.payload_len >= 128 and p.payload_len % 128 == 0:
        memcpy(&flag, p.payload + 120, 8)
        if flag and flag < NEVER and fc_ll128_bad_line(p.payload, p.payload_len // 128, flag) < 0:
            if try_position(M, stream, f, p, 1, flag - 1, FC_LL128, 0):
                return 1
            f.seeks += 1
    if p.headers & FC_HAS_RETH and p.va and f.cts >= 0:
        cts = &M.cts[stream * M.cts_tables + f.cts]
        want = ~<uint64_t>0
        while tried < 4:  # the newest announcements of this address first
            best = 0
            for i in range(CTS_SLOTS):
                if cts.address[i] <= p.va < cts.address[i] + REACH and best < cts.index[i] <= want:
                    best = cts.index[i]
                    address = cts.address[i]
            if best == 0:
                return 0
            if try_position(M, stream, f, p, 0, best - 1, -1, p.va - address):
                return 1
            want = best - 1
            tried += 1
        f.seeks += 1
    return 0


cdef int agrees_quietly(Machine *M, FlowState *f, const Message *m, const fc_roce *p) noexcept nogil:
    """Does the first packet of a message agree in all its witnesses? For flows that are LOST: no log."""
    cdef uint32_t imm
    cdef uint64_t lines
    if p.payload_len != min(m.size, M.mtu) or not right_opcode(m, 0, p.opcode) or not p.headers & FC_HAS_RETH:
        return 0
    if p.dma_len != m.size and not (p.opcode == FC_RC_WRITE_ONLY and p.dma_len == p.payload_len):
        return 0
    if m.size and p.va - m.piece != f.base[m.call.lane.protocol] + m.step % 8 * m.call.lane.slot_bytes:
        return 0
    if p.headers & FC_HAS_IMM:
        imm = p.imm if M.edges[f.edge].imm_big_endian else swapped(p.imm)
        if imm != m.total:
            return 0
    if m.call.lane.protocol == FC_LL and (m.step & LL_CLEAN) != LL_CLEAN:
        return fc_ll_bad_line(p.payload, p.payload_len // 16, <uint32_t>(m.step + 1)) < 0
    if m.call.lane.protocol == FC_LL128:
        return fc_ll128_bad_line(p.payload, p.payload_len // 128, m.step + 1) < 0
    return 1


cdef int recover(Machine *M, uint32_t stream, FlowState *f, const fc_roce *p, uint64_t psn) noexcept nogil:
    """May a LOST flow be trusted again with the count it had? 1: yes, from this packet on.

    Only after one whole iteration, later than the one that was lost, in which every message's first packet
    agreed in size, address, flag and immediate - and only where the iteration's sizes cannot be mistaken
    for themselves shifted (Engine.consider_recovery): else traffic that is off by a call, such as an
    AllReduce the manifest does not list, could pass.
    """
    cdef Message *m
    cdef Message *before
    if f.recoverable != 2:
        return 0
    m = locate(M, f, psn)
    if m == NULL or psn != m.psn:
        return 0
    if not agrees_quietly(M, f, m, p):
        f.trial = 0
        return 0
    if f.trial and f.current < f.trial_messages:
        return 0  # seen before
    if f.trial and f.current > f.trial_messages:
        f.trial = 0  # the first packet of a message in between is missing
    if f.trial:
        if m.iteration > f.trial_iteration:
            f.trial = 0
            f.state = SYNCING
            f.back_iteration = m.iteration
            return 1
    elif f.current > 0 and f.current + WINDOW > f.messages:
        before = &f.window[(f.current - 1) % WINDOW]
        if before.iteration == m.iteration or m.iteration <= f.lost_iteration:
            return 0
        f.trial = 1
        f.trial_iteration = m.iteration
    else:
        return 0
    f.trial_messages = f.current + 1
    return 0


cdef int made_anew(Machine *M, FlowState *f, const fc_roce *p) noexcept nogil:
    """PSN 0: is it the first packet of another connection, on the same queue pair? A mirror's copy has the same ICRC, which
    covers all but what switches rewrite; and NCCL fills a slot again, 8 messages later, only when its write was
    acknowledged, so behind those no retransmission of the first one comes."""
    cdef uint32_t icrc
    if not M.check_icrc or not fc_icrc_ok(p):
        return 0
    icrc = fc_icrc(p)
    if f.packets == 0:
        f.first_icrc = icrc
        return 0
    return f.first_icrc != 0 and icrc != f.first_icrc and f.cursor.number > <uint64_t>(8 + M.edges[f.edge].qps)


cdef int end_of_run(Machine *M, uint32_t stream, FlowState *f) noexcept nogil:
    log_disagreement(M, stream, f, MADE_ANEW, &f.window[f.current % WINDOW], 0, 0, 0)
    return DISAGREED


cdef void reopen(Machine *M, int64_t iteration) noexcept nogil:
    """Another capture begins earlier than the one that was read first: go back there, while nothing is closed."""
    if M.base_iteration == M.opened and M.begun < iteration + M.arenas:
        M.base_iteration = M.opened = iteration
    elif M.unopened < 0 or iteration < M.unopened:
        M.unopened = iteration
