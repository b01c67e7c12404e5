/* A packet's way to its flow and the short way from there, and bursts of packets out of a ring: machine.h has the model,
 * packet.c the long way. */
#include "machine.h"

#ifdef FC_DEBUG
#undef NDEBUG /* of Python's flags: assertions are for debug builds and fuzzers */
#endif
#include <assert.h>
#include <string.h>

#include "middle.h"
#include "place.h"
#include "psn.h"
#include "serve.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
/* Not inlined into what every packet passes: their registers and stack would burden the others. */
#define RARE __attribute__((noinline))

/* -- what is known of a flow -------------------------------------------------------------------------------- */

/* By state: to which others a flow may change. The header draws it; tests compare the two. */
static const uint8_t position_edges[FC_POSITIONS] = {
    [FC_UNSEEN] = 1 << FC_COUNTED | 1 << FC_MID_STREAM,
    [FC_MID_STREAM] = 1 << FC_COUNTED,
    [FC_COUNTED] = 1 << FC_ADRIFT,
    [FC_ADRIFT] = 1 << FC_COUNTED,
};
static const uint8_t trust_edges[FC_TRUSTS] = {
    [FC_TRUSTED] = 1 << FC_LOST | 1 << FC_LOST_FOR_GOOD,
    [FC_LOST] = 1 << FC_ON_TRIAL | 1 << FC_LOST_FOR_GOOD,
    [FC_ON_TRIAL] = 1 << FC_TRUSTED | 1 << FC_LOST | 1 << FC_LOST_FOR_GOOD,
};

int fc_position_edge(int from, int to)
{
    return position_edges[from] >> to & 1;
}

int fc_trust_edge(int from, int to)
{
    return trust_edges[from] >> to & 1;
}

void fc_set_position(fc_flow *f, enum fc_position to)
{
    assert(f->position == to || fc_position_edge(f->position, to));
    f->position = (uint8_t)to;
}

void fc_set_trust(fc_flow *f, enum fc_trust to)
{
    assert(f->trust == to || fc_trust_edge(f->trust, to));
    f->trust = (uint8_t)to;
}

/* -- which flow ----------------------------------------------------------------------------------------------- */

static inline const fc_flow_key *find_flow(const fc_machine *M, const uint8_t *ends, uint32_t version, uint32_t qpn)
{
    uint64_t first, number = qpn | (uint64_t)version << 32;
    memcpy(&first, ends, 8);
    for (uint32_t i = fc_key_hash(first, qpn) & M->table_mask;; i = (i + 1) & M->table_mask) {
        const fc_flow_key *key = &M->table[i];
        if (key->ends[0] == first && key->number == number && (version == 4 || memcmp(key->ends, ends, 32) == 0))
            return key;
        if (key->number == 0)
            return NULL;
    }
}

const fc_flow_key *fc_find_flow(const fc_machine *M, const uint8_t *ends, uint32_t version, uint32_t qpn)
{
    return find_flow(M, ends, version, qpn);
}

void fc_enter_flow(fc_flow_key *table, uint32_t mask, const fc_flow_key *key)
{
    uint32_t i = fc_key_hash(key->ends[0], (uint32_t)key->number) & mask;
    while (table[i].number)
        i = (i + 1) & mask;
    table[i] = *key;
}

/* -- one packet ----------------------------------------------------------------------------------------------- */

/* A packet of no flow. status: what fc_roce_decode() said of it. length: of the frame. */
static void count_as(fc_outcome_count *counts, uint64_t *refused, int status, const fc_roce *p, uint32_t length)
{
    static const uint8_t outcomes[FC_DECODE_STATUS_COUNT] = {
        [FC_ROCE] = FC_OTHER_PACKET, [FC_NOT_ROCE] = FC_NO_ROCE, [FC_TRUNCATED] = FC_CUT,
        [FC_MALFORMED] = FC_CONTRADICTORY, [FC_FRAGMENT] = FC_FRAGMENTED, [FC_ENCAPSULATED] = FC_WRAPPED,
    };
    if (status == FC_ENCAPSULATED)
        refused[p->refusal]++;
    counts[outcomes[status]].packets++;
    counts[outcomes[status]].bytes += status == FC_ROCE ? p->payload_len : length;
}

static void count_stranger(fc_strangers *strangers, int status, const fc_roce *p, uint32_t length)
{
    count_as(strangers->counts, strangers->refused, status, p, length);
    strangers->packets++;
}

/* The long way of a packet whose flow is known. */
static inline int settle(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns)
{
    int outcome = fc_outcome_of(M, stream, f, p, now_ns);
    if (outcome == FC_BLOCKED)
        return 0;
    M->counts[stream * FC_OUTCOMES + (uint32_t)outcome].packets++;
    M->counts[stream * FC_OUTCOMES + (uint32_t)outcome].bytes += p->payload_len;
    return 1;
}

/* process() for the packets that fast_path() is not for. */
RARE static int examine(fc_machine *M, uint32_t stream, const fc_packetref *ref)
{
    fc_roce p;
    int status = fc_roce_decode(ref->data, ref->length, &p);
    const fc_flow_key *key = status == FC_ROCE ? find_flow(M, p.src, p.ip_version, p.dest_qp) : NULL;
    if (key != NULL)
        return settle(M, stream, &M->states[stream * M->flows + (uint32_t)key->flow], &p, ref->timestamp_ns);
    if (M->strangers == NULL)
        count_as(&M->counts[stream * FC_OUTCOMES], M->refused, status, &p, ref->length);
    else
        count_stranger(M->strangers, status, &p, ref->length);
    return 1;
}

RARE static int refuse_on_fast_path(fc_machine *M, fc_flow *f)
{
    fc_note_loss(M, FC_BAD_ICRC, f->ahead, (uint32_t)(f->next_psn - f->ahead->psn), M->mtu);
    return fc_refuse_icrc(f);
}

/* A full MIDDLE packet with the expected PSN, after a packet of the same message that packet.c accepted: whatever
 * that would look at is known already, but ICRC and flags. */
static inline int fast_path(fc_machine *M, uint32_t stream, fc_flow *f, const fc_middle *p, uint64_t now_ns)
{
    uint64_t psn = f->next_psn, bit = 1ull << (psn % 64), *seen = fc_seen_word(f, psn);
    if (f->carries_final && M->check_icrc && !fc_middle_icrc_ok(*p, M->mtu))
        return refuse_on_fast_path(M, f);
    f->last_ns = now_ns;
    f->packets++;
    f->payload_bytes += M->mtu;
    f->next_psn = psn + 1;
    if (!(*seen & bit)) { /* set: seen a lap of the history ago */
        if (psn >= FC_HISTORY + f->start_psn) /* adding the condition would store to one more line for every packet */
            f->missing++;
        *seen |= bit;
    }
    if (!f->carries_final)
        return f->passes_as;
    if (LIKELY(psn < f->track_end))
        return fc_place_in_order(M, stream, f, p->bth + 12, psn);
    return fc_place_general(M, stream, f, p->bth + 12, psn);
}

/* A full MIDDLE packet may take the fast path. */
static inline int is_expected(const fc_flow *f, uint32_t psn)
{
    return f->next_psn < f->fast_end && !((psn ^ f->next_psn) & FC_PSN_MASK);
}

static inline int go_fast(fc_machine *M, uint32_t stream, fc_flow *f, const fc_middle *p, uint64_t now_ns)
{
    int outcome = fast_path(M, stream, f, p, now_ns);
    fc_outcome_count *n = &M->counts[stream * FC_OUTCOMES + (uint32_t)outcome];
    n->packets++;
    n->bytes += M->mtu;
    return 1;
}

static inline int process(fc_machine *M, uint32_t stream, const fc_packetref *ref)
{
    fc_middle p;
    if (LIKELY(fc_middle_decode(ref->data, ref->length, M->mtu, &p))) {
        const fc_flow_key *key = find_flow(M, p.ends, p.version, p.dest_qp);
        if (LIKELY(key != NULL)) {
            fc_flow *f = &M->states[stream * M->flows + (uint32_t)key->flow];
            if (LIKELY(is_expected(f, p.psn)))
                return go_fast(M, stream, f, &p, ref->timestamp_ns);
        }
    }
    return examine(M, stream, ref);
}

int fc_process(fc_machine *M, uint32_t stream, const fc_packetref *ref)
{
    return process(M, stream, ref);
}

/* The packet if it will be placed, otherwise NULL. A guess: the price is a useless load or a late one. */
static inline const uint8_t *worth_fetching(const uint8_t *final_hint, const fc_packetref *ref)
{
    const uint8_t *bth = fc_probable_bth(ref->data, ref->length);
    uint32_t qpn;
    if (bth == NULL)
        return NULL;
    memcpy(&qpn, bth + 4, 4);
    return final_hint[__builtin_bswap32(qpn) % FC_HINTS] ? bth : NULL;
}

/* The cells with which a packet soon to come is compared. Not those of its flow's next packet: of many flows that take
 * turns, the lines fetched so early push each other out of the cache. Guessed from headers alone, as above. */
static inline void fetch_cells(const fc_flow *f, uint32_t psn)
{
    uint64_t index = (psn - f->track_psn) & FC_PSN_MASK;
    if (f->brings_copies && f->track_psn + index < f->track_end)
        fc_prefetch_bytes_far(f->track_to + index * f->track_bytes, f->track_bytes);
}

static inline void fetch_cells_of(const fc_machine *M, uint32_t stream, const fc_packetref *ref)
{
    fc_middle p;
    if (!fc_middle_decode(ref->data, ref->length, M->mtu, &p))
        return;
    const fc_flow_key *key = find_flow(M, p.ends, p.version, p.dest_qp);
    if (key != NULL)
        fetch_cells(&M->states[stream * M->flows + (uint32_t)key->flow], p.psn);
}

int64_t fc_drive(fc_machine *M, uint32_t stream, fc_ring *ring, int64_t limit, int *blocked)
{
    int64_t done = 0;
    int wide_headers = M->header_lines > 1;
    while (done < limit && !*blocked) {
        uint64_t ahead = fc_place_ahead(M->placing, M->mtu, FC_HEADERS_AHEAD - 1); /* payloads under way */
        /* up to where the ring begins again: references one after the other are cheap to walk */
        const fc_packetref *refs = fc_ring_at(ring, 0);
        uint64_t to_end = ring->mask + 1 - (ring->tail & ring->mask);
        uint64_t seen = fc_ring_peek(ring, FC_BURST + FC_HEADERS_AHEAD), n;
        seen = seen < to_end ? seen : to_end;
        n = seen < FC_BURST ? seen : FC_BURST;
        n = n < (uint64_t)(limit - done) ? n : (uint64_t)(limit - done);
        if (n == 0)
            break;
        fc_take(&M->lock);
        for (uint64_t i = 0; i < n; i++) {
            if (i + FC_HEADERS_AHEAD < seen) {
                fc_prefetch(&refs[i + 2 * FC_HEADERS_AHEAD]); /* may lie after the last: harmless */
                fc_prefetch(refs[i + FC_HEADERS_AHEAD].data);
                if (wide_headers)
                    fc_prefetch(refs[i + FC_HEADERS_AHEAD].data + 64);
            }
            M->next = M->n_final && i + ahead < seen ? worth_fetching(M->final_hint, &refs[i + ahead]) : NULL;
            if (M->copying[stream] && M->next != NULL)
                fetch_cells_of(M, stream, &refs[i + ahead]);
            if (!process(M, stream, &refs[i])) {
                *blocked = 1;
                n = i;
                break;
            }
            if (M->next != NULL) /* nobody placed anything meanwhile */
                fc_place_fetch(M->placing, M->next, M->mtu);
        }
        fc_leave(M);
        fc_ring_release(ring, n);
        done += (int64_t)n;
    }
    return done;
}

/* -- several jobs at a ring: serve.h -------------------------------------------------------------------------- */

static inline const fc_route *find_route(const fc_table *t, const uint8_t *ends, uint32_t version, uint32_t qpn)
{
    uint64_t first, number = qpn | (uint64_t)version << 32;
    memcpy(&first, ends, 8);
    for (uint32_t i = fc_key_hash(first, qpn) & t->mask;; i = (i + 1) & t->mask) {
        const fc_route *r = &t->routes[i];
        if (r->ends[0] == first && r->number == number && (version == 4 || memcmp(r->ends, ends, 32) == 0))
            return r;
        if (r->number == 0)
            return NULL;
    }
}

static inline void fetch_cells_by_route(const fc_table *t, const fc_packetref *ref)
{
    fc_middle p;
    const fc_route *r = fc_middle_read(ref->data, ref->length, &p) ? find_route(t, p.ends, p.version, p.dest_qp) : NULL;
    if (r != NULL && r->also == NULL)
        fetch_cells(r->flow, p.psn);
}

/* A packet that was not placed fetches what is to be fetched now. */
static inline void fetch_next(fc_machine *M)
{
    if (M->next != NULL)
        fc_place_fetch(M->placing, M->next, M->mtu);
}

/* deal() for the packets that fast_path() is not for. */
RARE static uint8_t deal_long(fc_queue *q, const fc_table *t, const fc_packetref *ref, uint64_t at, const uint8_t *next)
{
    fc_roce p;
    int status = fc_roce_decode(ref->data, ref->length, &p);
    uint8_t owner = FC_NOBODY;
    const fc_route *r = status == FC_ROCE ? find_route(t, p.src, p.ip_version, p.dest_qp) : NULL;
    for (; r != NULL; r = r->also) {
        fc_seat *s = r->seat;
        if (s->waits != FC_CURRENT && at < s->waits)
            continue; /* it has not begun */
        owner = owner == FC_NOBODY ? (uint8_t)s->number : FC_SEVERAL;
        if (s->waits != FC_CURRENT)
            continue; /* what is new waits as well */
        s->M->next = next;
        if (settle(s->M, s->stream, r->flow, &p, ref->timestamp_ns))
            s->taken++;
        else
            fc_seat_waits(s, at, 1);
        fetch_next(s->M);
    }
    if (owner == FC_NOBODY)
        count_stranger(&q->strangers, status, &p, ref->length);
    return owner;
}

/* A packet to the jobs that it belongs to. at: its place in the ring. Returns its owner. */
static inline uint8_t deal(fc_queue *q, const fc_table *t, const fc_packetref *ref, uint64_t at, const uint8_t *next)
{
    fc_middle p;
    uint32_t payload = fc_middle_read(ref->data, ref->length, &p);
    const fc_route *r = LIKELY(payload) ? find_route(t, p.ends, p.version, p.dest_qp) : NULL;
    if (LIKELY(r != NULL && r->also == NULL)) {
        fc_seat *s = r->seat;
        fc_machine *M = s->M;
        if (LIKELY(s->waits == FC_CURRENT && payload == M->mtu && is_expected(r->flow, p.psn))) {
            M->next = next;
            go_fast(M, s->stream, r->flow, &p, ref->timestamp_ns);
            fetch_next(M);
            s->taken++;
            q->lead = M;
            q->copying = M->copying[s->stream];
            return (uint8_t)s->number;
        }
    }
    return deal_long(q, t, ref, at, next);
}

/* The machines of all seats that wait for nothing. Whoever has one may be clearing its arenas, or wait for Python's lock
 * while its owner waits for another machine: the thread waits for none here. A seat whose machine is taken catches up. */
static void take_all(const fc_queue *q, const fc_table *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        fc_seat *s = t->seats[i];
        s->held = s->waits == FC_CURRENT && fc_try(&s->M->lock);
        if (s->waits == FC_CURRENT && !s->held)
            fc_seat_waits(s, q->scan, 0);
    }
}

/* Other threads of the same job may know of what it placed after every FC_BURST packets, as those of fc_drive(). */
static void show_all(const fc_table *t)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (t->seats[i]->taken && t->seats[i]->M->n_unshown)
            fc_end_burst(t->seats[i]->M);
}

static void give_all(const fc_table *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        fc_seat *s = t->seats[i];
        if (!s->held)
            continue;
        fc_leave(s->M);
        __atomic_store_n(&s->consumed, s->consumed + s->taken, __ATOMIC_RELEASE);
        s->taken = 0;
    }
}

uint64_t fc_deal(fc_queue *q, const fc_table *t)
{
    fc_ring *ring = q->ring;
    uint64_t from = q->scan & ring->mask, seen = fc_ring_head(ring) - q->scan, to_end = ring->mask + 1 - from;
    const fc_packetref *refs = &ring->entries[from];
    seen = seen < to_end ? seen : to_end; /* references one after the other are cheap to walk */
    uint64_t n = seen < FC_DEAL ? seen : FC_DEAL, ahead = q->ahead;
    if (n == 0)
        return 0;
    take_all(q, t);
    q->lead = NULL;
    for (uint64_t i = 0; i < n; i++) {
        if (i + FC_HEADERS_AHEAD < seen) {
            fc_prefetch(&refs[i + 2 * FC_HEADERS_AHEAD]); /* may lie after the last: harmless */
            fc_prefetch(refs[i + FC_HEADERS_AHEAD].data);
            if (t->header_lines > 1)
                fc_prefetch(refs[i + FC_HEADERS_AHEAD].data + 64);
        }
        const uint8_t *next = i + ahead < seen ? worth_fetching(q->final_hint, &refs[i + ahead]) : NULL;
        if (q->copying && next != NULL)
            fetch_cells_by_route(t, &refs[i + ahead]);
        q->owners[from + i] = deal(q, t, &refs[i], q->scan + i, next);
        if ((i + 1) % FC_BURST == 0)
            show_all(t);
    }
    if (q->lead != NULL)
        q->ahead = fc_place_ahead(q->lead->placing, q->lead->mtu, FC_HEADERS_AHEAD - 1);
    give_all(t);
    __atomic_store_n(&q->scan, q->scan + n, __ATOMIC_RELEASE);
    return n;
}

/* The next packet from `at` on that may be the seat's. */
static uint64_t next_of(const fc_queue *q, const fc_seat *s, uint64_t at)
{
    uint8_t owner;
    while (at < q->scan && (owner = q->owners[at & q->ring->mask]) != s->number && owner != FC_SEVERAL)
        at++;
    return at;
}

/* A packet of several jobs that this one does not claim is counted by nobody a second time. */
int fc_catch_up(fc_queue *q, fc_seat *s)
{
    fc_machine *M = s->M;
    const uint64_t from = s->waits, others = q->counted.packets;
    uint64_t at, taken = 0;
    int blocked = 0;
    if (from > q->scan)
        return 0; /* it has not begun */
    at = next_of(q, s, from);
    if (at < q->scan) {
        if (!fc_try(&M->lock))
            return 0;
        M->strangers = &q->counted;
        for (; at < q->scan && taken < 2 * FC_DEAL && !blocked; at = blocked ? at : next_of(q, s, at + 1)) {
            M->next = NULL;
            blocked = !process(M, s->stream, &q->ring->entries[at & q->ring->mask]);
            taken += !blocked;
        }
        M->strangers = NULL;
        fc_leave(M);
        taken -= q->counted.packets - others;
        __atomic_store_n(&s->consumed, s->consumed + taken, __ATOMIC_RELEASE);
    }
    fc_seat_waits(s, at < q->scan ? at : FC_CURRENT, blocked);
    return at != from;
}
