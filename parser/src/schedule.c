/* A connection's send schedule, walked: machine.h.
 *
 * A cursor is the next message: call, index in the call, step, number and PSN. Calls come in issue order, a call's
 * messages in closed form (lane.h), and steady iterations repeat, so nothing is listed and memory does not grow.
 * generate() moves a flow's own cursor and fills its window; fc_seek() finds a far place without touching the flow. */
#include "machine.h"

#include <string.h>

static uint64_t min64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Step to the next call of the program; 0 when the program has ended. */
static int next_call(const fc_edge *e, fc_cursor *c)
{
    c->index = 0;
    c->call++;
    if (c->call >= e->ncalls) {
        if (e->steady >= e->ncalls)
            return 0;
        c->call = e->steady;
        c->iteration++;
        return 1;
    }
    if (e->calls[c->call].phase >= 2 && c->iteration == 0)
        c->iteration = 1;
    return 1;
}

/* Which part of the message at the cursor this QP carries (5.3); one that is not below e->used carries nothing. */
static int32_t part_of(const fc_edge *e, int32_t qp, const fc_cursor *c)
{
    return fc_mod((int32_t)((qp - (int64_t)(c->number % (uint64_t)e->qps) * e->used) % e->qps), e->qps);
}

enum settled { NO_MORE, SETTLED, AT_ITERATION };

/* Move the cursor to the next message that uses this QP. AT_ITERATION (with `stop`): it has just come to the start of a
 * steady iteration and waits there. */
static enum settled settle(const fc_edge *e, int32_t qp, fc_cursor *c, int stop)
{
    for (int32_t idle = 0;;) {
        const fc_call *call = c->call < e->ncalls ? &e->calls[c->call] : NULL;
        if (call == NULL || !call->has_lane || c->index >= call->lane.messages) {
            idle++;
            if (idle > 2 * e->ncalls + 2 || !next_call(e, c))
                return NO_MORE;
            if (stop && c->call == e->steady)
                return AT_ITERATION;
            continue;
        }
        if (c->index == 0) /* 2.7: both ends round the step up at the start of a call */
            c->step = (c->step + call->lane.step_align - 1) / call->lane.step_align * call->lane.step_align;
        if (part_of(e, qp, c) < e->used)
            return SETTLED;
        c->index++;
        c->number++;
        c->step += call->lane.step_inc;
    }
}

int fc_step_on(uint32_t mtu, const fc_edge *e, int32_t qp, fc_cursor *c, fc_sent *m)
{
    if (settle(e, qp, c, 0) == NO_MORE)
        return 0;
    const fc_call *call = &e->calls[c->call];
    fc_message shape;
    fc_lane_message(&call->lane, c->index, &shape);
    if (call->lane.protocol == FC_LL && (c->step & FC_LL_CLEAN) == FC_LL_CLEAN)
        shape.wire_bytes = call->lane.slot_bytes; /* 4.1: the whole slot, zeros after the data */
    uint64_t piece = ((shape.wire_bytes + e->used - 1) / e->used + 127) / 128 * 128; /* 5.3 */
    m->psn = c->psn;
    m->step = c->step;
    m->number = c->number;
    m->total = (uint32_t)shape.wire_bytes;
    m->piece = (uint32_t)min64((uint64_t)part_of(e, qp, c) * piece, shape.wire_bytes);
    m->size = (uint32_t)min64(piece, shape.wire_bytes - m->piece);
    m->packets = m->size ? (m->size + mtu - 1) / mtu : 1;
    m->pair = shape.wire_bytes > e->ar_above;
    m->iteration = c->iteration;
    m->index = c->index;
    m->offset = call->base + shape.first * call->lane.elem_bytes;
    m->data_bytes = (int64_t)shape.data_bytes;
    m->call = call;
    m->target = call->target;
    m->content = shape.content;
    m->phase = shape.phase;
    m->opens_loop = shape.opens_loop;
    m->agreed = 0;
    c->psn += m->packets + m->pair;
    c->index++;
    c->number++;
    c->step += call->lane.step_inc;
    return 1;
}

/* Append the next message of this QP to the window; 0 when the schedule has ended. */
static int generate(fc_machine *M, fc_flow *f)
{
    if (f->finished || !fc_step_on(M->mtu, &M->edges[f->edge], f->qp, &f->cursor, &f->window[f->messages % FC_WINDOW])) {
        f->finished = 1;
        return 0;
    }
    f->messages++;
    return 1;
}

/* Where the first run of cleaning steps (4.1) begins that is not over at `step`; not after `step` if that is in it. */
static uint64_t next_clean(uint64_t step)
{
    return (step / FC_LL_LAP + 1) * FC_LL_LAP - 8;
}

/* Steady iterations repeat: once the cursor is in the same phase again (step modulo the rounding, number modulo the
 * QPs), whole periods are skipped by arithmetic. Steps that clean their LL slot (4.1) change message sizes, so a skip
 * stops short of them and they are walked. */
int fc_seek(const fc_machine *M, const fc_flow *f, int by_step, uint64_t want, fc_cursor *c, fc_sent *m)
{
    const fc_edge *e = &M->edges[f->edge];
    fc_cursor mark = {0}, period = {0};
    int marked = 0, known = 0;
    uint64_t last = 0;
    memset(c, 0, sizeof *c);
    for (uint64_t walked = 0; walked < FC_SEEK_LIMIT; walked++) {
        enum settled found = settle(e, f->qp, c, 1);
        if (found == NO_MORE)
            return 0;
        if (found == SETTLED) {
            if (!fc_step_on(M->mtu, e, f->qp, c, m))
                return 0;
            uint64_t here = by_step ? m->step : m->number;
            if (here >= want)
                return here == want;
            continue;
        }
        uint64_t here = by_step ? c->step : c->number;
        if (want < here || (marked && c->number == last))
            return 0; /* passed, or a connection that is idle in steady iterations */
        last = c->number;
        marked++;
        if (!known && ((marked & (marked - 1)) == 0 || c->step > next_clean(mark.step))) {
            mark = *c; /* a later mark each time (Brent): the first iterations need not recur */
            continue;
        }
        if (c->step % 8 != mark.step % 8 || c->number % (uint64_t)e->qps != mark.number % (uint64_t)e->qps)
            continue;
        if (!known) {
            period = (fc_cursor){.step = c->step - mark.step, .number = c->number - mark.number,
                                 .psn = c->psn - mark.psn, .iteration = c->iteration - mark.iteration};
            known = 1;
        }
        if (!period.step || !period.number || c->step >= next_clean(c->step))
            continue; /* amid steps that clean: those are walked */
        uint64_t k = (want - here) / (by_step ? period.step : period.number);
        k = min64(k, (next_clean(c->step) - c->step) / period.step);
        if (k > 1) {
            c->step += (k - 1) * period.step;
            c->number += (k - 1) * period.number;
            c->psn += (k - 1) * period.psn;
            c->iteration += (int64_t)(k - 1) * period.iteration;
        }
    }
    return 0;
}

fc_sent *fc_locate(fc_machine *M, fc_flow *f, uint64_t psn)
{
    fc_sent *m;
    if (f->messages) {
        m = &f->window[f->current % FC_WINDOW];
        if (f->current + FC_WINDOW >= f->messages && m->psn <= psn && psn < m->psn + m->packets + m->pair)
            return m;
    }
    while (psn >= f->cursor.psn)
        if (!generate(M, f))
            return NULL;
    uint64_t oldest = f->messages > FC_WINDOW ? f->messages - FC_WINDOW : 0;
    for (uint64_t i = f->messages; i > oldest;) {
        i--;
        m = &f->window[i % FC_WINDOW];
        if (psn >= m->psn) {
            f->current = i;
            return m;
        }
    }
    return NULL;
}
