# The schedule of one edge, as machine.pyx walks it (included there: one unit for the compiler, so that it inlines).
#
# A Cursor is the next message: call, index in the call, step, number and PSN. Calls come in issue order, a call's
# messages in closed form (lane.h), and steady iterations repeat, so nothing is listed and memory does not grow.
# generate() moves a flow's own cursor and fills its window; seek() finds a far place without touching the flow.


cdef int next_call(const Edge *e, Cursor *c) noexcept nogil:
    """Step to the next call of the program; 0 when the program has ended."""
    c.index = 0
    c.call += 1
    if c.call >= e.ncalls:
        if e.steady >= e.ncalls:
            return 0
        c.call = e.steady
        c.iteration += 1
        return 1
    if e.calls[c.call].phase >= 2 and c.iteration == 0:
        c.iteration = 1
    return 1


cdef int settle(const Edge *e, int32_t qp, Cursor *c, int stop) noexcept nogil:
    """Move the cursor to the next message that uses this QP. 0: there is none; 1: it is there; 2 (with
    `stop`): it has just come to the start of a steady iteration and waits there."""
    cdef const Call *call
    cdef int32_t part, idle = 0
    while True:
        call = &e.calls[c.call] if c.call < e.ncalls else NULL
        if call == NULL or not call.has_lane or c.index >= call.lane.messages:
            idle += 1
            if idle > 2 * e.ncalls + 2 or not next_call(e, c):
                return 0
            if stop and c.call == e.steady:
                return 2
            continue
        if c.index == 0:  # 2.7: both ends round the step up at the start of a call
            c.step = (c.step + call.lane.step_align - 1) // call.lane.step_align * call.lane.step_align
        part = <int32_t>((qp - <int64_t>(c.number % <uint64_t>e.qps) * e.used) % e.qps)
        if (part if part >= 0 else part + e.qps) < e.used:
            return 1
        c.index += 1
        c.number += 1
        c.step += call.lane.step_inc


cdef int step_on(Machine *M, const Edge *e, int32_t qp, Cursor *c, Message *m) noexcept nogil:
    """The message at the cursor or the first after it on this QP, the cursor moved behind it. 0: none."""
    cdef const Call *call
    cdef fc_message shape
    cdef uint64_t piece
    cdef int32_t part
    if not settle(e, qp, c, 0):
        return 0
    call = &e.calls[c.call]
    part = <int32_t>((qp - <int64_t>(c.number % <uint64_t>e.qps) * e.used) % e.qps)
    if part < 0:
        part += e.qps
    fc_lane_message(&call.lane, c.index, &shape)
    if call.lane.protocol == FC_LL and (c.step & LL_CLEAN) == LL_CLEAN:
        shape.wire_bytes = call.lane.slot_bytes  # 4.1: the whole slot, zeros behind the data
    m.psn = c.psn
    m.step = c.step
    m.number = c.number
    m.total = <uint32_t>shape.wire_bytes
    piece = ((shape.wire_bytes + e.used - 1) // e.used + 127) // 128 * 128
    m.piece = <uint32_t>min(<uint64_t>part * piece, shape.wire_bytes)
    m.size = <uint32_t>min(piece, shape.wire_bytes - m.piece)
    m.packets = (m.size + M.mtu - 1) // M.mtu if m.size else 1
    m.pair = shape.wire_bytes > e.ar_above
    m.iteration = c.iteration
    m.index = c.index
    m.offset = call.base + shape.first * call.lane.elem_bytes
    m.data_bytes = <int64_t>shape.data_bytes
    m.call = call
    m.target = call.target
    m.content = shape.content
    m.phase = shape.phase
    m.opens_loop = shape.opens_loop
    m.agreed = 0
    c.psn += m.packets + m.pair
    c.index += 1
    c.number += 1
    c.step += call.lane.step_inc
    return 1


cdef int generate(Machine *M, FlowState *f) noexcept nogil:
    """Append the next message of this QP to the window; 0 when the schedule has ended."""
    if f.finished or not step_on(M, &M.edges[f.edge], f.qp, &f.cursor, &f.window[f.messages % WINDOW]):
        f.finished = 1
        return 0
    f.messages += 1
    return 1


cdef inline uint64_t next_clean(uint64_t step) noexcept nogil:
    """Where the first run of cleaning steps (4.1) begins that is not over at `step`; not behind `step` if that is in it."""
    return (step // LL_LAP + 1) * LL_LAP - 8


cdef int seek(Machine *M, const FlowState *f, int by_step, uint64_t want, Cursor *c, Message *m) noexcept nogil:
    """Find the message with step `want` (or number `want`) from the start of the schedule. 1: in m, with
    the cursor behind it.

    Steady iterations repeat: once the cursor is in the same phase again (step modulo the rounding, number
    modulo the QPs), whole periods are skipped by arithmetic. Steps that clean their LL slot (4.1) change
    message sizes, so a skip stops short of them and they are walked.
    """
    cdef const Edge *e = &M.edges[f.edge]
    cdef Cursor mark
    cdef int marked = 0, known = 0, found
    cdef uint64_t dstep = 0, dnumber = 0, dpsn = 0, walked = 0, last = 0, here, k
    cdef int64_t diteration = 0
    memset(c, 0, sizeof(Cursor))
    memset(&mark, 0, sizeof(Cursor))
    while walked < SEEK_LIMIT:
        walked += 1
        found = settle(e, f.qp, c, 1)
        if found == 0:
            return 0
        if found == 2:
            here = c.step if by_step else c.number
            if want < here or (marked and c.number == last):
                return 0  # passed, or a connection that is idle in steady iterations
            last = c.number
            marked += 1
            if not known and (marked & (marked - 1) == 0 or c.step > next_clean(mark.step)):
                mark = c[0]  # a later mark each time (Brent): the first iterations need not recur
            elif c.step % 8 == mark.step % 8 and c.number % <uint64_t>e.qps == mark.number % <uint64_t>e.qps:
                if not known:
                    dstep, dnumber, dpsn = c.step - mark.step, c.number - mark.number, c.psn - mark.psn
                    diteration = c.iteration - mark.iteration
                    known = 1
                if dstep and dnumber and c.step < next_clean(c.step):  # not amid steps that clean: those are walked
                    k = (want - here) // (dstep if by_step else dnumber)
                    k = min(k, (next_clean(c.step) - c.step) // dstep)
                    if k > 1:
                        c.step += (k - 1) * dstep
                        c.number += (k - 1) * dnumber
                        c.psn += (k - 1) * dpsn
                        c.iteration += <int64_t>(k - 1) * diteration
            continue
        if not step_on(M, e, f.qp, c, m):
            return 0
        here = m.step if by_step else m.number
        if here >= want:
            return here == want
    return 0


cdef Message *locate(Machine *M, FlowState *f, uint64_t psn) noexcept nogil:
    """The message that owns a PSN, or NULL: before the window, or after the end of the schedule."""
    cdef Message *m
    cdef uint64_t oldest, i
    if f.messages:
        m = &f.window[f.current % WINDOW]
        if f.current + WINDOW >= f.messages and m.psn <= psn < m.psn + m.packets + m.pair:
            return m
    while psn >= f.cursor.psn:
        if not generate(M, f):
            return NULL
    oldest = f.messages - WINDOW if f.messages > WINDOW else 0
    i = f.messages
    while i > oldest:
        i -= 1
        m = &f.window[i % WINDOW]
        if psn >= m.psn:
            f.current = i
            return m
    return NULL
