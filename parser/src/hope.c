/* Will a packet that is missing still come? machine.h.
 *
 * The training link repeats what its receiver lacks, and the mirror repeats nothing. So a packet that the mirror lost is
 * lost for good, and one that the link lost comes again; which of the two it was is seen by what follows it:
 *
 *     ACKNOWLEDGED   an ACK of the connection is past it: the receiver has it
 *     PASSED         it is not, and so many packets of the connection have followed that a repeat would have come
 *
 * How many: the packets of one step of the ring, or what a setting says. A connection whose ACKs are seen is waited for
 * longer, as its ACK decides: until NCCL fills the same step slot again, which it does only when the write before was
 * acknowledged.
 *
 * Only a flow's newest missing packet of an iteration is looked at: with it all before it are decided. */
#include "machine.h"

#include "psn.h"

enum { STEP_SLOTS = 8 }; /* NCCL_STEPS */

int fc_acknowledge(fc_machine *M, uint32_t stream, const fc_flow *back, const fc_roce *p)
{
    if (back->partner < 0 || p->syndrome >> 5 & 3) /* a NAK */
        return FC_CONTROL;
    fc_flow *f = &M->states[stream * M->flows + (uint32_t)back->partner];
    int64_t delta = fc_psn_distance(p->psn, (int64_t)f->next_psn);
    /* of what was not sent it proves nothing, also later */
    if (f->position != FC_COUNTED || delta >= 0 || (uint64_t)-delta > f->next_psn - f->start_psn)
        return FC_CONTROL;
    uint64_t psn = f->next_psn + (uint64_t)delta;
    if (psn >= f->acked && (!M->check_icrc || fc_icrc_ok(p)))
        f->acked = psn + 1;
    return FC_CONTROL;
}

int64_t fc_past(fc_machine *M, uint32_t stream)
{
    int64_t slowest = INT64_MAX;
    int any = 0;
    for (uint32_t i = 0; i < M->flows; i++) {
        fc_flow *f = &M->states[(uint64_t)stream * M->flows + i];
        if (!f->active || !f->data)
            continue;
        any = 1;
        if (f->trust != FC_TRUSTED)
            continue; /* it holds nothing up, nor does one whose schedule has ended */
        const fc_sent *m = fc_locate(M, f, f->next_psn);
        if (m != NULL && m->iteration < slowest)
            slowest = m->iteration;
    }
    return any ? slowest : FC_NOTHING_SEEN;
}

static void tell(fc_machine *M)
{
    for (uint32_t i = 0; i < M->streams; i++)
        __atomic_store_n(&M->stands[i], fc_past(M, i), __ATOMIC_RELEASE);
}

int64_t fc_ask_past(fc_machine *M, uint32_t stream)
{
    int64_t told = __atomic_load_n(&M->stands[stream], __ATOMIC_ACQUIRE);
    if (told == FC_NOTHING_SEEN) /* a stream without data holds nothing up: that must be true now */
        fc_take(&M->lock);
    if (told == FC_NOTHING_SEEN || fc_try(&M->lock)) {
        __atomic_store_n(&M->stands[stream], fc_past(M, stream), __ATOMIC_RELEASE);
        fc_give(&M->lock);
    } else {
        __atomic_store_n(&M->asked, 1, __ATOMIC_RELEASE);
    }
    return __atomic_load_n(&M->stands[stream], __ATOMIC_ACQUIRE);
}

void fc_leave(fc_machine *M)
{
    fc_end_burst(M); /* before anybody may read what it placed */
    if (__atomic_load_n(&M->asked, __ATOMIC_RELAXED)) {
        __atomic_store_n(&M->asked, 0, __ATOMIC_RELAXED);
        tell(M);
    }
    fc_give(&M->lock);
}

/* One past the newest PSN of a message that has not come; 0: all have, of those that the history knows. */
static uint64_t newest_missing(const fc_flow *f, const fc_sent *m)
{
    uint64_t first = m->psn, end = m->psn + m->packets, from;
    first = first < f->start_psn ? f->start_psn : first;
    first = first + FC_HISTORY < f->next_psn ? f->next_psn - FC_HISTORY : first;
    for (end = end < f->next_psn ? end : f->next_psn; first < end; end = from) {
        from = (end - 1) & ~63ull;
        from = from < first ? first : from;
        uint64_t upto = end % 64 ? (1ull << end % 64) - 1 : ~0ull;
        uint64_t missing = ~f->seen[from / 64 % FC_SEEN_WORDS] & upto & ~0ull << from % 64;
        if (missing)
            return (from & ~63ull) + 64 - (uint64_t)__builtin_clzll(missing);
    }
    return 0;
}

static enum fc_hope hope_of(fc_machine *M, fc_flow *f, const fc_sent *m, uint64_t psn)
{
    uint64_t after = f->next_psn - psn - 1, step = m->step;
    uint64_t enough = M->patience ? M->patience : (uint64_t)m->packets * m->call->lane.slices;
    if (psn < f->acked)
        return FC_ACKNOWLEDGED;
    if (f->acked && !M->patience) {
        const fc_sent *newest = fc_locate(M, f, f->next_psn - 1);
        return newest != NULL && newest->step < step + STEP_SLOTS ? FC_MAY_COME : FC_PASSED;
    }
    return after < enough ? FC_MAY_COME : FC_PASSED;
}

/* Of a flow that is past the iteration. */
static enum fc_hope hope_of_flow(fc_machine *M, fc_flow *f, int64_t iteration)
{
    const fc_sent *m = NULL;
    for (int32_t i = f->side_head; i >= 0; i = M->side[i].next)
        if (M->side[i].sent.iteration <= iteration)
            return FC_MAY_COME; /* a witness may vouch for it */
    for (uint64_t i = f->messages, n = 0; i-- > 0 && n < FC_WINDOW; n++) {
        m = &f->window[i % FC_WINDOW];
        if (m->iteration < iteration)
            return FC_ALL_CAME;
        if (m->iteration > iteration || m->content != FC_FINAL || m->target != FC_GRADIENT)
            continue;
        uint64_t missing = newest_missing(f, m);
        if (missing)
            return hope_of(M, f, m, missing - 1);
    }
    if (m == NULL || f->messages <= FC_WINDOW || f->missing + fc_unseen(f) == 0)
        return FC_ALL_CAME;
    return m->psn <= f->acked ? FC_ACKNOWLEDGED : FC_PASSED; /* what is missing is older than the window: it is stale */
}

enum fc_hope fc_hope_of(fc_machine *M, uint32_t stream, int64_t iteration)
{
    enum fc_hope least = FC_ALL_CAME;
    for (uint32_t i = 0; i < M->flows; i++) {
        fc_flow *f = &M->states[stream * M->flows + i];
        if (!f->active || !f->data || !fc_is_trusted(f))
            continue;
        const fc_sent *next = fc_locate(M, f, f->next_psn);
        if (next != NULL && next->iteration <= iteration)
            return FC_MAY_COME; /* it had brought nothing when somebody asked where it stands */
        if (f->position != FC_COUNTED)
            continue;
        enum fc_hope hope = hope_of_flow(M, f, iteration);
        if (hope == FC_MAY_COME)
            return FC_MAY_COME;
        least = hope > least ? hope : least;
    }
    return least;
}
