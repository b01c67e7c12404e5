/* Where a flow is in its schedule, when the count cannot say: after a start in mid-stream, a restart, or an end.
 *
 * A place needs two witnesses that never restart with the traffic: an absolute one (the step of an LL or LL128 flag, the
 * number of a CTS) names a message, and that message must lie at this packet's PSN and have its length. A CTS must not
 * stand alone: is_borne_out(). A flow that was given up comes back only after a whole iteration that agreed in
 * everything: fc_recover(). A first packet that comes again with other contents is another connection's:
 * fc_connection_reset(). machine.h has the model. */
#include "machine.h"

#include <string.h>

#include "place.h"
#include "psn.h"

/* Has the count the place where it is, or is this packet just before it? Then there is nothing to move. */
static int count_is_there(const fc_flow *f, const fc_sent *m, uint32_t index)
{
    uint64_t psn = m->psn + index;
    return f->packets && f->cursor.psn > m->psn && f->next_psn >= psn && f->next_psn - psn < 0x800000;
}

/* An absolute witness says step (or message number) `want`. If the schedule has that message, and at this packet's PSN
 * modulo 2^24, the flow goes on from there: two witnesses that never restart agree. protocol: of the flag, or -1 for a
 * CTS; then `shift` is how far into the announced buffer this packet's address points. */
static int try_position(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, int by_step, uint64_t want,
                        int protocol, uint64_t shift)
{
    fc_cursor c;
    fc_sent m;
    if (!fc_seek(M, f, by_step, want, &c, &m))
        return 0;
    uint32_t index = (uint32_t)((p->psn - m.psn) & FC_PSN_MASK);
    if (index >= m.packets || (protocol >= 0 && m.call->lane.protocol != protocol))
        return 0;
    if (protocol < 0 && m.piece + (uint64_t)index * M->mtu != shift)
        return 0;
    if (p->payload_len != fc_length_of(M, &m, index))
        return 0;
    f->seeks = 0;
    fc_set_position(f, FC_COUNTED);
    if (count_is_there(f, &m, index))
        return 1;
    fc_settle_aside(M, stream, f, 0);
    if (f->packets) {
        f->missing += fc_unseen(f);
        if (m.psn + index > f->next_psn)
            f->missing += m.psn + index - f->next_psn;
    }
    memset(f->seen, 0, sizeof f->seen);
    f->window[0] = m;
    f->messages = 1;
    f->current = 0;
    f->cursor = c;
    f->finished = 0;
    f->next_psn = f->start_psn = m.psn + index;
    f->first_anchor = f->next_psn + 1;
    return 1;
}

/* Is there another announcement near this number? One alone is not believed: the PSN says where a message is within a lap
 * of 2^24 packets, so a number that is whole laps off (2^37 too high, say) has the same PSN, and an iteration far ahead
 * would close all those before it. */
static int is_borne_out(const fc_cts_table *cts, uint64_t index)
{
    for (int i = 0; i < FC_CTS_SLOTS; i++)
        if (cts->index[i] && cts->index[i] != index && cts->index[i] + FC_CTS_SLOTS > index
            && cts->index[i] < index + FC_CTS_SLOTS)
            return 1;
    return 0;
}

/* A step from its low 32 bits: the one nearest to the newest CTS, whose number has 64, if there is one; otherwise nearest
 * to where the flow was. (After 2^32 steps the PSN can repeat as well and tells nothing.) */
static uint64_t whole_step(const fc_machine *M, uint32_t stream, const fc_flow *f, uint32_t low)
{
    uint64_t near = f->cursor.step, newest = 0;
    fc_cursor c;
    fc_sent m;
    if (f->cts >= 0) {
        const fc_cts_table *cts = &M->cts[stream * M->cts_tables + (uint32_t)f->cts];
        for (int i = 0; i < FC_CTS_SLOTS; i++)
            if (cts->index[i] > newest && is_borne_out(cts, cts->index[i]))
                newest = cts->index[i];
        if (newest && (fc_seek(M, f, 0, newest - 1, &c, &m) || c.step))
            near = c.step;
    }
    uint64_t step = (near & ~0xffffffffull) | low;
    if (step > near + 0x7fffffff && step >> 32)
        return step - (1ull << 32);
    return step + 0x7fffffff < near ? step + (1ull << 32) : step;
}

/* The newest announcement, not newer than `most`, of a buffer that holds `address`; 0: none. */
static uint64_t announcement(const fc_cts_table *cts, uint64_t address, uint64_t most, uint64_t *buffer)
{
    uint64_t best = 0;
    for (int i = 0; i < FC_CTS_SLOTS; i++)
        if (cts->address[i] <= address && address < cts->address[i] + FC_REACH && best < cts->index[i]
            && cts->index[i] <= most) {
            best = cts->index[i];
            *buffer = cts->address[i];
        }
    return best;
}

int fc_find_position(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p)
{
    uint32_t n = p->payload_len, low;
    uint64_t flag, buffer = 0;
    if (f->seeks >= FC_SEEK_TRIES)
        return 0;
    if (n >= FC_LL_LINE && n % FC_LL_LINE == 0) {
        memcpy(&low, p->payload + 4, 4);
        if (low && fc_ll_bad_line(p->payload, n / FC_LL_LINE, low) < 0) {
            if (try_position(M, stream, f, p, 1, whole_step(M, stream, f, low - 1), FC_LL, 0))
                return 1;
            f->seeks++;
        }
    }
    if (n >= FC_LL128_LINE && n % FC_LL128_LINE == 0) {
        memcpy(&flag, p->payload + 120, 8);
        if (flag && flag < FC_NEVER && fc_ll128_bad_line(p->payload, n / FC_LL128_LINE, flag) < 0) {
            if (try_position(M, stream, f, p, 1, flag - 1, FC_LL128, 0))
                return 1;
            f->seeks++;
        }
    }
    if (p->headers & FC_HAS_RETH && p->va && f->cts >= 0) {
        const fc_cts_table *cts = &M->cts[stream * M->cts_tables + (uint32_t)f->cts];
        uint64_t most = ~0ull;
        for (int tried = 0; tried < 4; tried++) { /* the newest announcements of this address first */
            uint64_t number = announcement(cts, p->va, most, &buffer);
            if (number == 0)
                return 0;
            if (is_borne_out(cts, number) && try_position(M, stream, f, p, 0, number - 1, -1, p->va - buffer))
                return 1;
            most = number - 1;
        }
        f->seeks++;
    }
    return 0;
}

/* Only after one whole iteration, later than the one that was lost, in which every message's first packet agreed in
 * size, address, flag and immediate - and only where the iteration's sizes cannot be mistaken for themselves shifted
 * (Engine.consider_recovery): otherwise traffic that is off by a call, such as an AllReduce the manifest does not list,
 * could pass. */
int fc_recover(fc_machine *M, fc_flow *f, const fc_roce *p, uint64_t psn)
{
    enum { UNLIKE = 2 };
    if (f->trust == FC_LOST_FOR_GOOD || f->rotations != UNLIKE)
        return 0;
    fc_sent *m = fc_locate(M, f, psn);
    if (m == NULL || psn != m->psn)
        return 0;
    if (!fc_agrees(M, f, m, p)) {
        fc_set_trust(f, FC_LOST);
        return 0;
    }
    if (f->trust == FC_ON_TRIAL && f->current < f->trial_messages)
        return 0; /* seen before */
    if (f->trust == FC_ON_TRIAL && f->current > f->trial_messages)
        fc_set_trust(f, FC_LOST); /* the first packet of a message in between is missing */
    if (f->trust == FC_ON_TRIAL) {
        if (m->iteration > f->trial_iteration) {
            fc_set_trust(f, FC_TRUSTED);
            f->back_iteration = m->iteration;
            return 1;
        }
    } else {
        if (f->current == 0 || f->current + FC_WINDOW <= f->messages)
            return 0;
        const fc_sent *before = &f->window[(f->current - 1) % FC_WINDOW];
        if (before->iteration == m->iteration || m->iteration <= f->lost_iteration)
            return 0;
        fc_set_trust(f, FC_ON_TRIAL);
        f->trial_iteration = m->iteration;
    }
    f->trial_messages = f->current + 1;
    return 0;
}

/* A mirror's copy has the same ICRC, which covers all but what switches rewrite; and NCCL fills a step slot again, 8
 * messages later, only when its write was acknowledged, so after those no retransmission of the first one comes. */
int fc_connection_reset(fc_machine *M, fc_flow *f, const fc_roce *p)
{
    if (!M->check_icrc || !fc_icrc_ok(p))
        return 0;
    uint32_t icrc = fc_icrc(p);
    int early = f->cursor.number <= (uint64_t)(8 + M->edges[f->edge].qps);
    if (f->packets == 0 || (f->first_icrc == 0 && early)) { /* those behind it may have overtaken it */
        f->first_icrc = icrc;
        return 0;
    }
    return f->first_icrc != 0 && icrc != f->first_icrc && !early;
}

void fc_open(fc_machine *M, uint32_t stream, int64_t iteration)
{
    int64_t first = -1;
    if (__atomic_compare_exchange_n(&M->shared->first, &first, iteration, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
        || !M->n_others) /* alone it may think again, until a packet has passed all that is asked of it */
        first = iteration;
    M->base_iteration = M->first_iteration = M->closed = first;
    M->first_stream = stream;
}

void fc_reopen(fc_machine *M, int64_t iteration)
{
    /* several threads would have to agree; live captures, which they serve, lie ahead and not behind */
    if (!M->n_others && M->base_iteration == M->first_iteration && M->begun < iteration + M->arenas)
        M->base_iteration = M->first_iteration = M->closed = iteration;
    else if (M->missed_iteration < 0 || iteration < M->missed_iteration)
        M->missed_iteration = iteration;
}
