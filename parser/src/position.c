/* Where a flow is in its schedule, when the count cannot say: after a start in mid-stream, a restart, or an end.
 *
 * A place needs two witnesses that never restart with the traffic: an absolute one (the step of an LL or LL128 flag, the
 * number of a CTS) names a message, and that message must lie at this packet's PSN and have its length. A CTS must not
 * stand alone: is_borne_out(). It may have come over another stream: is_placed_elsewhere(). A flow that was given up comes
 * back only after a whole iteration that agreed in everything: fc_recover(). A first packet that comes again with other
 * contents is another connection's: fc_connection_reset(). machine.h has the model. */
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

/* A place in a flow's schedule: the message that a packet is of, which of its packets it is, and the message after it. */
typedef struct place {
    fc_cursor after;
    fc_sent m;
    uint32_t index;
} place;

/* An absolute witness says step (or message number) `want`. Has the schedule that message, and at this packet's PSN
 * modulo 2^24? Then two witnesses that never restart agree. protocol: of the flag, or -1 for a CTS; then `shift` is how
 * far into the announced buffer this packet's address points. */
static int is_place(const fc_machine *M, const fc_flow *f, const fc_roce *p, int by_step, uint64_t want, int protocol,
                    uint64_t shift, place *at)
{
    const fc_sent *m = &at->m;
    if (!fc_seek(M, f, by_step, want, &at->after, &at->m))
        return 0;
    at->index = (uint32_t)((p->psn - m->psn) & FC_PSN_MASK);
    if (at->index >= m->packets || (protocol >= 0 && m->call->lane.protocol != protocol))
        return 0;
    if (protocol < 0 && m->piece + (uint64_t)at->index * M->mtu != shift)
        return 0;
    return p->payload_len == fc_length_of(M, m, at->index);
}

/* The flow goes on from there. */
static void take_place(fc_machine *M, uint32_t stream, fc_flow *f, const place *at)
{
    uint64_t psn = at->m.psn + at->index;
    f->seeks = f->elsewhere = 0;
    fc_set_position(f, FC_COUNTED);
    if (count_is_there(f, &at->m, at->index))
        return;
    fc_settle_aside(M, stream, f, 0);
    if (f->packets) {
        f->missing += fc_unseen(f);
        if (psn > f->next_psn)
            f->missing += psn - f->next_psn;
    }
    memset(f->seen, 0, sizeof f->seen);
    f->acked = 0;
    f->window[0] = at->m;
    f->messages = 1;
    f->current = 0;
    f->cursor = at->after;
    f->finished = 0;
    f->next_psn = f->start_psn = psn;
    f->first_anchor = f->next_psn + 1;
}

/* -- what was announced --------------------------------------------------------------------------------------- */

static const fc_cts_table *table_of(const fc_machine *M, uint32_t stream, const fc_flow *f)
{
    return &M->cts[stream * M->cts_tables + (uint32_t)f->cts];
}

/* The connection's table of another stream, of this machine or of the others, by a number from 0 on; NULL: no more. */
static const fc_cts_table *table_elsewhere(const fc_machine *M, uint32_t stream, const fc_flow *f, uint32_t number)
{
    if (number < M->streams - 1)
        return table_of(M, number < stream ? number : number + 1, f);
    number -= M->streams - 1;
    for (uint32_t i = 0; i < M->n_others; i++) {
        if (number < M->others[i]->streams)
            return table_of(M->others[i], number, f);
        number -= M->others[i]->streams;
    }
    return NULL;
}

/* What of another stream's table counts now, which its thread may be writing: the rest is left out. */
static void read_elsewhere(const fc_machine *M, const fc_cts_table *from, uint64_t now_ns, fc_cts_table *to)
{
    for (int i = 0; i < FC_CTS_SLOTS; i++) {
        uint32_t turn = __atomic_load_n(&from->turn[i], __ATOMIC_ACQUIRE);
        uint64_t index = __atomic_load_n(&from->index[i], __ATOMIC_ACQUIRE);
        uint64_t address = __atomic_load_n(&from->address[i], __ATOMIC_ACQUIRE);
        uint64_t time_ns = __atomic_load_n(&from->time_ns[i], __ATOMIC_ACQUIRE);
        uint64_t apart = time_ns < now_ns ? now_ns - time_ns : time_ns - now_ns;
        int whole = !(turn & 1) && __atomic_load_n(&from->turn[i], __ATOMIC_ACQUIRE) == turn;
        to->index[i] = whole && apart <= M->outage_ns ? index : 0;
        to->address[i] = address;
    }
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

/* The newest announcement that is borne out; 0: none. */
static uint64_t newest_of(const fc_cts_table *cts)
{
    uint64_t newest = 0;
    for (int i = 0; i < FC_CTS_SLOTS; i++)
        if (cts->index[i] > newest && is_borne_out(cts, cts->index[i]))
            newest = cts->index[i];
    return newest;
}

/* The same of another stream, if the own one has none. 0 as well: two of them are not near each other. */
static uint64_t newest_elsewhere(const fc_machine *M, uint32_t stream, const fc_flow *f, uint64_t now_ns)
{
    uint64_t newest = 0;
    const fc_cts_table *table;
    fc_cts_table recent;
    for (uint32_t i = 0; (table = table_elsewhere(M, stream, f, i)) != NULL; i++) {
        read_elsewhere(M, table, now_ns, &recent);
        uint64_t here = newest_of(&recent);
        if (here && newest && (here + FC_CTS_SLOTS <= newest || newest + FC_CTS_SLOTS <= here))
            return 0;
        newest = here > newest ? here : newest;
    }
    return newest;
}

/* A step from its low 32 bits: the one nearest to the newest CTS, whose number has 64, if there is one; otherwise nearest
 * to where the flow was. (After 2^32 steps the PSN can repeat as well and tells nothing.) */
static uint64_t whole_step(const fc_machine *M, uint32_t stream, const fc_flow *f, uint32_t low, uint64_t now_ns)
{
    uint64_t near = f->cursor.step;
    fc_cursor c;
    fc_sent m;
    if (f->cts >= 0) {
        uint64_t newest = newest_of(table_of(M, stream, f));
        if (!newest)
            newest = newest_elsewhere(M, stream, f, now_ns);
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

enum { NEWEST = 4 }; /* announcements of a packet's address that are tried */

/* The announcement that this packet's place was found by, with the buffer that it named; 0: none. *tried: how many there
 * were, at most NEWEST. */
static uint64_t announced_place(const fc_machine *M, const fc_flow *f, const fc_roce *p, const fc_cts_table *cts,
                                place *at, uint64_t *buffer, int *tried)
{
    uint64_t most = ~0ull;
    for (*tried = 0; *tried < NEWEST; ++*tried) {
        uint64_t number = announcement(cts, p->va, most, buffer);
        if (number == 0)
            return 0;
        if (is_borne_out(cts, number) && is_place(M, f, p, 0, number - 1, -1, p->va - *buffer, at))
            return number;
        most = number - 1;
    }
    return 0;
}

static int says_otherwise(const fc_cts_table *cts, uint64_t number, uint64_t buffer)
{
    uint64_t at = (number - 1) % FC_CTS_SLOTS;
    return cts->index[at] == number && cts->address[at] != buffer;
}

/* Do other streams' announcements say where this packet is, and none of any stream anything else? */
static int is_placed_elsewhere(const fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns,
                               place *found)
{
    uint64_t number = 0, buffer = 0, here, at_buffer = 0;
    const fc_cts_table *table;
    fc_cts_table recent;
    place at;
    int tried, vain = 0, contradicted = 0;
    if (f->elsewhere >= FC_SEEK_TRIES && ++f->elsewhere % FC_SEEK_PAUSE)
        return 0;
    for (uint32_t i = 0; (table = table_elsewhere(M, stream, f, i)) != NULL; i++) {
        read_elsewhere(M, table, now_ns, &recent);
        here = announced_place(M, f, p, &recent, &at, &at_buffer, &tried);
        vain |= tried > 0;
        contradicted |= here && number && here != number;
        if (here && !number) {
            number = here;
            buffer = at_buffer;
            *found = at;
        }
    }
    contradicted |= number && says_otherwise(table_of(M, stream, f), number, buffer);
    for (uint32_t i = 0; number && (table = table_elsewhere(M, stream, f, i)) != NULL; i++) {
        read_elsewhere(M, table, now_ns, &recent);
        contradicted |= says_otherwise(&recent, number, buffer);
    }
    f->elsewhere += vain;
    return number && !contradicted;
}

/* By a flag: its step is the packet's. */
static int is_flagged_place(const fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns, place *at)
{
    uint32_t n = p->payload_len, low;
    uint64_t flag;
    if (n >= FC_LL_LINE && n % FC_LL_LINE == 0) {
        memcpy(&low, p->payload + 4, 4);
        if (low && fc_ll_bad_line(p->payload, n / FC_LL_LINE, low) < 0) {
            if (is_place(M, f, p, 1, whole_step(M, stream, f, low - 1, now_ns), FC_LL, 0, at))
                return 1;
            f->seeks++;
        }
    }
    if (n >= FC_LL128_LINE && n % FC_LL128_LINE == 0) {
        memcpy(&flag, p->payload + 120, 8);
        if (flag && flag < FC_NEVER && fc_ll128_bad_line(p->payload, n / FC_LL128_LINE, flag) < 0) {
            if (is_place(M, f, p, 1, flag - 1, FC_LL128, 0, at))
                return 1;
            f->seeks++;
        }
    }
    return 0;
}

/* By the announcements of its own stream. */
static int is_announced_place(const fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, place *at)
{
    uint64_t buffer = 0;
    int tried;
    if (announced_place(M, f, p, table_of(M, stream, f), at, &buffer, &tried))
        return 1;
    f->seeks += tried == NEWEST;
    return 0;
}

int fc_find_position(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns)
{
    int addressed = p->headers & FC_HAS_RETH && p->va && f->cts >= 0;
    int patient = f->seeks < FC_SEEK_TRIES;
    place at;
    if ((patient && is_flagged_place(M, stream, f, p, now_ns, &at))
        || (patient && addressed && is_announced_place(M, stream, f, p, &at))
        || (addressed && is_placed_elsewhere(M, stream, f, p, now_ns, &at))) {
        take_place(M, stream, f, &at);
        return 1;
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
    if (!M->n_others && M->base_iteration == M->first_iteration && M->closed == M->first_iteration
        && M->begun < iteration + M->arenas)
        M->base_iteration = M->first_iteration = M->closed = iteration;
    else if (M->missed_iteration < 0 || iteration < M->missed_iteration)
        M->missed_iteration = iteration;
}
