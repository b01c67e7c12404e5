/* What a packet of a known flow means, by the long way: where it belongs, whether it is right, what becomes of it.
 * machine.h has the model; machine.c has the short way, which nearly all packets of gradients take. */
#include "machine.h"

#include <string.h>

#include "psn.h"

/* -- PSNs: loss, duplicates, retransmission ------------------------------------------------------------------- */

uint64_t fc_unseen(const fc_flow *f)
{
    uint64_t first = f->next_psn > FC_HISTORY ? f->next_psn - FC_HISTORY : 0, n = 0, here;
    for (uint64_t p = first > f->start_psn ? first : f->start_psn; p < f->next_psn; p += here) {
        here = 64 - p % 64 < f->next_psn - p ? 64 - p % 64 : f->next_psn - p;
        uint64_t word = ~f->seen[p / 64 % FC_SEEN_WORDS] >> (p % 64);
        n += (uint64_t)__builtin_popcountll(here == 64 ? word : word & ((1ull << here) - 1));
    }
    return n;
}

/* Count a PSN. 1 if it was seen before. */
static int note_psn(fc_flow *f, uint64_t psn)
{
    uint64_t bit = 1ull << (psn % 64);
    if (psn >= f->next_psn) {
        /* PSNs that leave the history unseen are missing for good; finish() counts the rest */
        if (psn - f->next_psn >= FC_HISTORY) {
            f->missing += fc_unseen(f) + psn + 1 - FC_HISTORY - f->next_psn;
            memset(f->seen, 0, sizeof f->seen);
        } else {
            for (uint64_t p = f->next_psn; p <= psn; p++) {
                uint64_t here = 1ull << (p % 64);
                f->missing += p >= FC_HISTORY + f->start_psn && !(*fc_seen_word(f, p) & here);
                *fc_seen_word(f, p) &= ~here;
            }
        }
        f->next_psn = psn + 1;
    } else if (psn + FC_HISTORY < f->next_psn) {
        f->retransmissions++; /* older than the history */
        return 1;
    } else if (*fc_seen_word(f, psn) & bit) {
        /* a mirror's second copy follows closely; a sender that went back repeats a run of packets */
        if (f->next_psn - psn > 4)
            f->went_back_at = f->next_psn;
        *(f->went_back_at == f->next_psn ? &f->retransmissions : &f->duplicates) += 1;
        return 1;
    } else {
        f->out_of_order++;
    }
    *fc_seen_word(f, psn) |= bit;
    return 0;
}

/* -- a data packet, step by step ------------------------------------------------------------------------------- */

/* One packet of a data flow on its way. Each step fills in what it finds, and returns an outcome or FC_GO_ON. */
typedef struct packet {
    fc_machine *M;
    uint32_t stream;
    fc_flow *f;
    const fc_roce *p;
    uint64_t now_ns;
    uint64_t psn;     /* unwrapped: count()                       */
    fc_sent *m;       /* owns it: locate()                        */
    uint32_t index;   /* of the packet in it                      */
    int final;        /* it carries bytes to keep                 */
    int shed;         /* ... but nobody keeps them: fc_shed       */
    int icrc_checked; /* and right                                */
    int repeated;     /* seen before on this flow: admit()        */
    int witness;      /* 2: a header agreed: witness()            */
} packet;

/* Where a packet with a wrong ICRC goes: it is counted, no PSN of it is noted, and nothing placed. Who knows which bytes it
 * should have brought notes these as lost first. */
int fc_refuse_icrc(fc_flow *f)
{
    f->bad_icrc++;
    return FC_BAD_ICRC;
}

/* A packet that is counted and goes no further. */
static int count_only(packet *w, int outcome)
{
    w->f->packets++;
    note_psn(w->f, w->psn);
    return outcome;
}

static int end_of_run(packet *w)
{
    fc_flow *f = w->f;
    fc_log_disagreement(w->M, w->stream, f, FC_MADE_ANEW, &f->window[f->current % FC_WINDOW], 0, 0, 0);
    return FC_DISAGREED;
}

/* Would this packet begin its flow's count? PSNs start at 0 with the connection, so a flow seen from its beginning is
 * counted from there. The connections of a communicator are born together: where one was seen at 0, others are young. */
static int would_begin(const packet *w)
{
    return w->f->position == FC_UNSEEN && (w->p->psn == 0 || (fc_from_start(w->M) && w->p->psn < FC_YOUNG));
}

/* Where is a flow whose place is not known? 1: it is known now. A packet that is damaged says nothing. */
static int find_place(packet *w)
{
    if (would_begin(w)) {
        fc_set_position(w->f, FC_COUNTED);
        return 1;
    }
    if (fc_find_position(w->M, w->stream, w->f, w->p, w->now_ns))
        return 1;
    if (w->f->position == FC_UNSEEN && w->p->psn >= FC_YOUNG)
        fc_set_position(w->f, FC_MID_STREAM);
    return 0;
}

/* Which PSN is it, of 64 bits? */
static int count(packet *w)
{
    fc_machine *M = w->M;
    fc_flow *f = w->f;
    int64_t delta = fc_psn_distance(w->p->psn, (int64_t)f->next_psn);
    if (delta != 0 && f->last_ns && w->now_ns > f->last_ns + M->outage_ns) {
        /* 2^23 packets could have passed unseen: which lap of the PSN is this? A repeat after a timeout looks no
         * different; it has nothing to place, and if nothing absolute follows, neither has what comes after it. */
        if (w->p->psn == 0 && f->position == FC_COUNTED && fc_connection_reset(M, f, w->p))
            return end_of_run(w);
        if (f->position == FC_COUNTED)
            fc_set_position(f, FC_ADRIFT);
    }
    if (f->position != FC_COUNTED) {
        if (M->check_icrc && !fc_icrc_ok(w->p)) /* one damaged bit makes PSN 512 a beginning */
            return f->position == FC_UNSEEN && w->p->psn < FC_YOUNG ? fc_refuse_icrc(f) : FC_UNANCHORED;
        if (!find_place(w))
            return FC_UNANCHORED;
        delta = fc_psn_distance(w->p->psn, (int64_t)f->next_psn);
    }
    if (delta < 0 && ((uint64_t)-delta > f->next_psn || f->next_psn + (uint64_t)delta < f->start_psn))
        return FC_UNANCHORED; /* from before this flow's history */
    w->psn = f->next_psn + (uint64_t)delta;
    /* a PSN out of order moves the cursor: trust it only with a right ICRC */
    if (delta != 0 && M->check_icrc) {
        if (!fc_icrc_ok(w->p))
            return fc_refuse_icrc(f);
        w->icrc_checked = 1;
    }
    if (!fc_is_trusted(f) && !fc_recover(M, f, w->p, w->psn))
        return count_only(w, FC_NOT_SYNCED);
    if (w->psn == 0 && fc_connection_reset(M, f, w->p))
        return end_of_run(w);
    return FC_GO_ON;
}

/* Is the message's iteration given up? */
static inline int is_shed(const fc_machine *M, const fc_sent *m)
{
    return m->target == FC_GRADIENT && M->shed.first <= m->iteration && m->iteration < M->shed.end;
}

/* Which message owns it? */
static int locate(packet *w)
{
    fc_machine *M = w->M;
    fc_flow *f = w->f;
    w->m = fc_locate(M, f, w->psn);
    if (w->m != NULL) {
        w->index = (uint32_t)(w->psn - w->m->psn);
        w->final = w->m->target != FC_NOTHING && w->m->content == FC_FINAL && w->index < w->m->packets;
        w->shed = w->final && is_shed(M, w->m);
        w->final &= !w->shed;
        return FC_GO_ON;
    }
    if (w->psn < f->cursor.psn)
        return count_only(w, FC_STALE);
    if (M->check_icrc && !w->icrc_checked && !fc_icrc_ok(w->p))
        return fc_refuse_icrc(f);
    count_only(w, FC_BEYOND);
    fc_log_disagreement(M, w->stream, f, FC_EXTRA_MESSAGE, NULL, w->psn, f->cursor.psn, w->psn);
    return FC_BEYOND;
}

/* Is there an arena for its iteration? */
static int find_arena(packet *w)
{
    fc_machine *M = w->M;
    int64_t iteration = w->m->iteration;
    if (w->m->target != FC_GRADIENT)
        return FC_GO_ON;
    if (iteration > M->base_iteration) {
        if (!M->opened && !fc_from_start(M))
            fc_open(M, w->stream, iteration); /* the capture began in mid-stream: this is its first */
        if (iteration >= M->base_iteration + M->arenas && !is_shed(M, w->m)) {
            M->wanted[w->stream] = iteration;
            return FC_BLOCKED;
        }
    } else if (iteration < M->first_iteration && w->stream != M->first_stream) {
        fc_reopen(M, iteration);
    }
    return FC_GO_ON;
}

static fc_times *times_of(fc_machine *M, uint32_t stream, int64_t iteration)
{
    return &M->times[stream * FC_TIMES + (uint64_t)(iteration + 1) % FC_TIMES];
}

/* Packets of a message that go by fast_path() are captured between those that begin and end it. */
static void note_time(fc_machine *M, uint32_t stream, int64_t iteration, uint64_t now_ns)
{
    fc_times *times = times_of(M, stream, iteration);
    if (times->iteration < iteration)
        *times = (fc_times){iteration, now_ns, now_ns, now_ns, UINT64_MAX};
    if (times->iteration == iteration) {
        times->first_ns = now_ns < times->first_ns ? now_ns : times->first_ns;
        times->last_ns = now_ns > times->last_ns ? now_ns : times->last_ns;
    }
}

/* The flow brings a packet of an iteration, whose time was noted. Flows of one job overlap in each. */
static void note_flow_time(fc_machine *M, uint32_t stream, fc_flow *f, int64_t iteration, uint64_t now_ns)
{
    if (f->iteration < iteration) {
        fc_times *before = times_of(M, stream, f->iteration), *now = times_of(M, stream, iteration);
        if (f->iteration >= 0 && before->iteration == f->iteration && f->gradient_ns < before->earliest_last_ns)
            before->earliest_last_ns = f->gradient_ns;
        if (now->iteration == iteration && now_ns > now->latest_first_ns)
            now->latest_first_ns = now_ns;
        f->iteration = iteration;
    }
    if (f->iteration == iteration)
        f->gradient_ns = now_ns;
}

/* Is it whole? What ends a flow must be right too: a receiver drops a damaged packet, and the flow goes on. */
static int admit(packet *w)
{
    fc_machine *M = w->M;
    fc_flow *f = w->f;
    const fc_roce *p = w->p;
    int outcome = find_arena(w);
    if (outcome != FC_GO_ON)
        return outcome;
    if (M->check_icrc && !w->icrc_checked
        && (w->final || p->headers & (FC_HAS_RETH | FC_HAS_IMM) || p->payload_len != fc_length_of(M, w->m, w->index)
            || !fc_right_opcode(w->m, w->index, p->opcode))
        && !fc_icrc_ok(p)) {
        fc_note_loss(M, FC_BAD_ICRC, w->m, w->index, p->payload_len);
        return fc_refuse_icrc(f);
    }
    if (f->packets == 0)
        f->first_psn = w->psn;
    if (w->psn == 0)
        __atomic_store_n(&M->shared->from_start, 1, __ATOMIC_RELAXED);
    f->last_ns = w->now_ns;
    f->packets++;
    f->payload_bytes += p->payload_len;
    w->repeated = note_psn(f, w->psn);
    if (w->m->target == FC_PARAMETERS) {
        note_time(M, w->stream, -1, w->now_ns);
    } else if (w->m->target == FC_GRADIENT) {
        note_time(M, w->stream, w->m->iteration, w->now_ns);
        note_flow_time(M, w->stream, f, w->m->iteration, w->now_ns);
        if (w->m->iteration > M->begun) {
            __atomic_store_n(&M->begun, w->m->iteration, __ATOMIC_RELEASE); /* after fc_open(): fc_begun() */
            M->opened = 1;
        }
    }
    return FC_GO_ON;
}

static int is_flagged(const packet *w)
{
    return w->m->call->lane.protocol != FC_SIMPLE && w->index < w->m->packets;
}

/* Do its headers agree with the count? Its flags are looked at here if it carries nothing to keep. Only a packet of which
 * nothing disagrees vouches for those that wait. One to be kept does as it is placed, when its flags are looked at. */
static int witness(packet *w)
{
    fc_machine *M = w->M;
    fc_sent *m = w->m;
    const fc_roce *p = w->p;
    w->witness = fc_check_headers(M, w->stream, w->f, m, w->index, p, w->psn);
    if (w->witness == 0)
        return FC_DISAGREED;
    if (is_flagged(w) && !w->final && w->index == 0) {
        /* of bytes that nobody keeps only the step matters: look at flags that came along with the headers */
        uint32_t head = p->payload_len < 128 ? p->payload_len : 128;
        if (!fc_check_flags(M, w->stream, w->f, m, w->index, p->payload, head, w->psn))
            return FC_DISAGREED;
    }
    if (m->opens_loop && w->index == 0 && !w->repeated
        && fc_repeats_previous(M, w->f, m, p->payload, p->payload_len)) {
        fc_log_disagreement(M, w->stream, w->f, FC_REPEATED_CHUNK, m, w->psn, 0, 0);
        return FC_DISAGREED;
    }
    if (w->witness == 2 && !(w->final && is_flagged(w)))
        fc_agree(M, w->stream, w->f, w->psn);
    return FC_GO_ON;
}

/* The packets of this message that follow in order need nothing of what was looked at here: fast_path(). */
static void open_fast_path(packet *w)
{
    fc_machine *M = w->M;
    fc_flow *f = w->f;
    f->fast_end = w->m->psn + w->m->packets - 1;
    f->ahead = w->m;
    f->passes_as = w->shed ? FC_OVERLOAD : FC_RELEASED;
    if (w->final)
        fc_prepare_message(M, f, w->m);
    if (f->carries_final != w->final) {
        f->carries_final = (uint8_t)w->final;
        M->n_final += 2 * (uint32_t)w->final - 1;
        M->final_hint[w->p->dest_qp % FC_HINTS] = (uint8_t)w->final;
    }
}

/* A packet of LL or LL128 that is kept: its flags are looked at last. */
static int place_flagged(packet *w)
{
    int outcome = fc_place_flagged(w->M, w->stream, w->f, w->m, w->index, w->p->payload, w->p->payload_len, w->psn);
    if (outcome != FC_DISAGREED && w->witness == 2)
        fc_agree(w->M, w->stream, w->f, w->psn);
    return outcome;
}

static int place(packet *w)
{
    fc_machine *M = w->M;
    fc_sent *m = w->m;
    const fc_roce *p = w->p;
    int flagged = is_flagged(w);
    if (w->psn + 1 == w->f->next_psn && (!w->final || flagged || m->agreed))
        open_fast_path(w);
    if (!w->final)
        return w->repeated ? FC_REPEATED : w->shed ? FC_OVERLOAD : FC_RELEASED;
    if (flagged)
        return place_flagged(w);
    if (m->agreed || w->witness == 2)
        return fc_place(M, w->stream, w->f, m, w->index, p->payload, p->payload_len);
    if (w->repeated)
        return FC_REPEATED; /* its first copy is aside */
    int outcome = fc_keep_aside(M, w->f, w->f->current, w->index, p->payload, p->payload_len);
    if (outcome == FC_UNANCHORED) /* no room: it is known what is lost, and why */
        fc_note_loss(M, FC_UNANCHORED, m, w->index, p->payload_len);
    return outcome;
}

static int data_packet(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns)
{
    packet w = {.M = M, .stream = stream, .f = f, .p = p, .now_ns = now_ns};
    int outcome;
    f->fast_end = 0;
    if ((outcome = count(&w)) != FC_GO_ON || (outcome = locate(&w)) != FC_GO_ON || (outcome = admit(&w)) != FC_GO_ON
        || (outcome = witness(&w)) != FC_GO_ON)
        return outcome;
    return place(&w);
}

/* -- other packets ---------------------------------------------------------------------------------------------- */

static int is_cts_length(const fc_machine *M, uint32_t length)
{
    for (uint32_t i = 0; i < M->cts_known; i++)
        if (length == M->cts_elements[i].bytes)
            return 1;
    return 0;
}

/* Read a CTS. Its other readings are counted: they may tell that the manifest names another version. 0: not the job's. */
static int read_cts(fc_machine *M, const fc_roce *p, fc_cts *c)
{
    for (uint32_t i = M->cts_known; i-- > 0;)
        if (fc_cts_read(&M->cts_elements[i], p->payload, p->payload_len, c)) {
            M->cts_forms[i]++;
            if (i == 0)
                return c->number < FC_NEVER;
        }
    return 0;
}

/* Other threads may read the table meanwhile: whoever has read anything of this announcement sees that the turn is not the
 * one before any more, whichever numbers take turns in this place. */
static void announce(fc_cts_table *cts, const fc_cts *c, uint64_t now_ns)
{
    uint64_t at = (c->number - 1) % FC_CTS_SLOTS;
    uint32_t turn = cts->turn[at];
    __atomic_store_n(&cts->turn[at], turn + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&cts->index[at], c->number, __ATOMIC_RELEASE);
    __atomic_store_n(&cts->address[at], c->address, __ATOMIC_RELEASE);
    __atomic_store_n(&cts->time_ns[at], now_ns, __ATOMIC_RELEASE);
    __atomic_store_n(&cts->turn[at], turn + 2, __ATOMIC_RELEASE);
}

/* CTS writes (5.4) and ACKs towards the sender of a connection's data. */
static int control_packet(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns)
{
    fc_cts c;
    if (p->opcode == FC_RC_ACK)
        return fc_acknowledge(M, stream, f, p);
    if (p->opcode != FC_RC_WRITE_ONLY || !is_cts_length(M, p->payload_len) || f->cts < 0)
        return FC_OTHER_PACKET;
    if (M->check_icrc && !fc_icrc_ok(p))
        return fc_refuse_icrc(f);
    if (f->packets++ == 0) {
        f->first_psn = p->psn;
        if (!(fc_from_start(M) && p->psn < FC_YOUNG)) /* what came before was not mirrored: not missing */
            f->next_psn = f->start_psn = p->psn;
    }
    int64_t delta = fc_psn_distance(p->psn, (int64_t)f->next_psn);
    if (delta >= 0 || (uint64_t)-delta <= f->next_psn - f->start_psn)
        note_psn(f, f->next_psn + (uint64_t)delta);
    if (!read_cts(M, p, &c))
        return FC_CONTROL;
    fc_cts_table *cts = &M->cts[stream * M->cts_tables + (uint32_t)f->cts];
    cts->tagged = !cts->tagged || (cts->tagged == 1 && cts->tag == c.tag) ? 1 : 2;
    cts->tag = c.tag;
    announce(cts, &c, now_ns);
    return FC_CONTROL;
}

int fc_outcome_of(fc_machine *M, uint32_t stream, fc_flow *f, const fc_roce *p, uint64_t now_ns)
{
    f->active = 1;
    if (!f->data)
        return control_packet(M, stream, f, p, now_ns);
    if (FC_RC_WRITE_FIRST <= p->opcode && p->opcode <= FC_RC_WRITE_ONLY_IMM)
        return data_packet(M, stream, f, p, now_ns);
    return p->opcode == FC_RC_ACK ? FC_CONTROL : FC_OTHER_PACKET;
}
