/* Witnesses: what of a packet agrees or disagrees with the count, the log of it, and packets that wait for one.
 *
 * Headers (length, opcode, RETH, immediate, the CTS that announced the message) and, in LL and LL128, the flag of every
 * line. One that disagrees ends the flow: fc_log_disagreement(). machine.h has the model. */
#include "machine.h"

#include <string.h>

#include "cover.h"
#include "place.h"

void fc_log_disagreement(fc_machine *M, uint32_t stream, fc_flow *f, int kind, const fc_sent *m, uint64_t psn,
                         uint64_t expected, uint64_t found)
{
    int64_t iteration = m != NULL ? m->iteration : f->cursor.iteration;
    if (M->kept < FC_LOG_ENTRIES) {
        M->log[M->kept++] = (fc_log_entry){
            .kind = kind, .stream = (int32_t)stream,
            .flow = (int32_t)((f - M->states) - (int64_t)stream * M->flows), .iteration = iteration,
            .number = m != NULL ? m->number : f->cursor.number, .psn = psn, .expected = expected, .found = found,
        };
    } else {
        M->unlogged_first = iteration < M->unlogged_first ? iteration : M->unlogged_first;
        M->unlogged_last = iteration > M->unlogged_last ? iteration : M->unlogged_last;
    }
    M->logged++;
    f->disagreements++;
    f->fast_end = 0;
    f->lost_iteration = iteration;
    fc_settle_aside(M, stream, f, 0);
    /* for good: it is not the NCCL, or not the connection, that the schedule describes */
    int for_good = kind == FC_EXTRA_MESSAGE || kind == FC_REPEATED_CHUNK || kind == FC_MADE_ANEW;
    if (f->trust != FC_LOST_FOR_GOOD)
        fc_set_trust(f, for_good ? FC_LOST_FOR_GOOD : FC_LOST);
}

void fc_forget(fc_machine *M)
{
    uint64_t kept = 0, lost = M->lost < FC_LOSS_ENTRIES ? M->lost : FC_LOSS_ENTRIES;
    for (uint64_t i = 0; i < M->kept; i++)
        if (M->log[i].iteration >= M->base_iteration)
            M->log[kept++] = M->log[i];
    M->kept = kept;
    M->lost = 0;
    for (uint64_t i = 0; i < lost; i++)
        if (M->losses[i].target == FC_GRADIENT && M->losses[i].iteration >= M->base_iteration)
            M->losses[M->lost++] = M->losses[i];
    fc_forget_differences(M);
    if (M->unlogged_last < M->base_iteration) {
        M->unlogged_first = INT64_MAX;
        M->unlogged_last = -1;
    }
}

int fc_right_opcode(const fc_sent *m, uint32_t index, uint8_t opcode)
{
    int last = index + 1 == m->packets;
    if (index == m->packets)
        return opcode == FC_RC_WRITE_ONLY_IMM;
    switch (opcode) {
    case FC_RC_WRITE_FIRST: /* index > 0: a restart under a fresh RETH */
        return !last;
    case FC_RC_WRITE_MIDDLE:
        return index > 0 && !last;
    case FC_RC_WRITE_LAST:
        return last && m->pair && index > 0;
    case FC_RC_WRITE_LAST_IMM:
        return last && !m->pair && index > 0;
    case FC_RC_WRITE_ONLY: /* a plain write, whole or cut by the NIC into one-packet writes */
        return m->pair;
    default:
        return last && !m->pair;
    }
}

static uint32_t immediate(const fc_machine *M, const fc_flow *f, const fc_roce *p)
{
    return M->edges[f->edge].imm_big_endian ? p->imm : __builtin_bswap32(p->imm);
}

/* Step slots of a receive buffer follow each other and begin again after eight. */
static uint64_t step_slot(const fc_sent *m)
{
    return m->step % 8 * m->call->lane.slot_bytes;
}

/* The write's address against the step slot and the CTS. 0 and logged on disagreement. */
static int check_address(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, uint64_t address, uint64_t psn)
{
    uint64_t *base = &f->base[m->call->lane.protocol];
    if (*base == 0) {
        *base = address - step_slot(m);
    } else if (address != *base + step_slot(m)) {
        fc_log_disagreement(M, stream, f, FC_WRONG_ADDRESS, m, psn, *base + step_slot(m), address);
        return 0;
    }
    if (f->cts < 0)
        return 1;
    const fc_cts_table *cts = &M->cts[stream * M->cts_tables + (uint32_t)f->cts];
    uint64_t at = m->number % FC_CTS_SLOTS;
    if (cts->index[at] == m->number + 1 && cts->address[at] != address) {
        fc_log_disagreement(M, stream, f, FC_WRONG_CTS, m, psn, cts->address[at], address);
        return 0;
    }
    return 1;
}

int fc_check_headers(
    fc_machine *M, uint32_t stream, fc_flow *f, fc_sent *m, uint32_t index, const fc_roce *p, uint64_t psn)
{
    uint32_t want = fc_length_of(M, m, index);
    uint32_t rest = m->size && index < m->packets ? m->size - index * M->mtu : 0;
    if (p->payload_len != want) {
        fc_log_disagreement(M, stream, f, FC_WRONG_LENGTH, m, psn, want, p->payload_len);
        return 0;
    }
    if (!fc_right_opcode(m, index, p->opcode)) {
        fc_log_disagreement(M, stream, f, FC_WRONG_OPCODE, m, psn, index, p->opcode);
        return 0;
    }
    if (p->headers & FC_HAS_IMM && immediate(M, f, p) != m->total) {
        fc_log_disagreement(M, stream, f, FC_WRONG_IMMEDIATE, m, psn, m->total, immediate(M, f, p));
        return 0;
    }
    if (p->headers & FC_HAS_RETH) {
        if (p->dma_len != rest && !(p->opcode == FC_RC_WRITE_ONLY && p->dma_len == p->payload_len)) {
            fc_log_disagreement(M, stream, f, FC_WRONG_SIZE, m, psn, rest, p->dma_len);
            return 0;
        }
        if (index < m->packets && (m->size || M->edges[f->edge].used == 1)) {
            if (!check_address(M, stream, f, m, p->va - m->piece - (uint64_t)index * M->mtu, psn))
                return 0;
            if (index == 0)
                m->agreed = 1;
        }
    }
    return p->headers & (FC_HAS_IMM | FC_HAS_RETH) ? 2 : 1;
}

uint64_t fc_flagged_lines(const fc_sent *m, uint64_t at, uint32_t length)
{
    if (m->call->lane.protocol != FC_LL)
        return length / FC_LL128_LINE;
    if ((m->step & FC_LL_CLEAN) != FC_LL_CLEAN)
        return length / FC_LL_LINE;
    int64_t carried = (m->data_bytes - (int64_t)fc_data_bytes(FC_LL, at) + 7) / 8; /* 4.1: only the lines with data */
    uint64_t lines = length / FC_LL_LINE;
    return carried < 0 ? 0 : (uint64_t)carried < lines ? (uint64_t)carried : lines;
}

void fc_wrong_flag(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, const uint8_t *wire, uint64_t psn,
                   int64_t line)
{
    uint64_t found = 0;
    if (m->call->lane.protocol == FC_LL) {
        uint32_t low;
        memcpy(&low, wire + FC_LL_LINE * line + 4, 4);
        if (low == (uint32_t)(m->step + 1))
            memcpy(&low, wire + FC_LL_LINE * line + 12, 4);
        found = low;
    } else {
        memcpy(&found, wire + FC_LL128_LINE * line + 120, 8);
    }
    fc_log_disagreement(M, stream, f, FC_WRONG_FLAG, m, psn, m->step + 1, found);
}

/* First of `lines` lines whose flag does not say the message's step, or -1. */
static int64_t bad_line(const fc_sent *m, const uint8_t *wire, uint64_t lines)
{
    if (m->call->lane.protocol == FC_LL)
        return fc_ll_bad_line(wire, lines, (uint32_t)(m->step + 1));
    return fc_ll128_bad_line(wire, lines, m->step + 1);
}

int fc_check_flags(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, uint32_t index, const uint8_t *wire,
                   uint32_t length, uint64_t psn)
{
    uint64_t lines = fc_flagged_lines(m, m->piece + (uint64_t)index * M->mtu, length);
    if (lines == 0)
        return 1;
    int64_t bad = bad_line(m, wire, lines);
    if (bad >= 0) {
        fc_wrong_flag(M, stream, f, m, wire, psn, bad);
        return 0;
    }
    return 2;
}

int fc_agrees(const fc_machine *M, const fc_flow *f, const fc_sent *m, const fc_roce *p)
{
    if (p->payload_len != fc_length_of(M, m, 0) || !fc_right_opcode(m, 0, p->opcode) || !(p->headers & FC_HAS_RETH))
        return 0;
    if (p->dma_len != m->size && !(p->opcode == FC_RC_WRITE_ONLY && p->dma_len == p->payload_len))
        return 0;
    if (m->size && p->va - m->piece != f->base[m->call->lane.protocol] + step_slot(m))
        return 0;
    if (p->headers & FC_HAS_IMM && immediate(M, f, p) != m->total)
        return 0;
    if (m->call->lane.protocol == FC_LL && (m->step & FC_LL_CLEAN) != FC_LL_CLEAN)
        return bad_line(m, p->payload, p->payload_len / FC_LL_LINE) < 0;
    if (m->call->lane.protocol == FC_LL128)
        return bad_line(m, p->payload, p->payload_len / FC_LL128_LINE) < 0;
    return 1;
}

/* -- packets kept aside ------------------------------------------------------------------------------------- */

int fc_keep_aside(fc_machine *M, fc_flow *f, uint64_t message, uint32_t index, const uint8_t *wire, uint32_t length)
{
    int fresh = M->side_free < 0;
    int32_t i = fresh ? M->side_fresh : M->side_free;
    if (i >= FC_SIDE_PACKETS || length > FC_SIDE_BYTES)
        return FC_UNANCHORED;
    fc_side_packet *packet = &M->side[i];
    if (fresh)
        M->side_fresh++;
    else
        M->side_free = packet->next;
    packet->next = -1;
    packet->message = message;
    packet->sent = f->window[message % FC_WINDOW];
    packet->index = index;
    packet->length = length;
    memcpy(packet->bytes, wire, length);
    *(f->side_tail < 0 ? &f->side_head : &M->side[f->side_tail].next) = i;
    f->side_tail = i;
    return FC_ASIDE;
}

/* What becomes of a packet aside, now that a witness agreed before `before_psn`; FC_ASIDE: it stays, as long as what
 * comes late may vouch for it. */
static int judge_aside(
    fc_machine *M, uint32_t stream, const fc_flow *f, const fc_side_packet *packet, uint64_t before_psn)
{
    const fc_sent *m = &packet->sent;
    uint64_t psn = m->psn + packet->index;
    int remembered = packet->message + FC_WINDOW >= f->messages;
    if ((f->first_anchor - 1 < psn && psn < before_psn)
        || (remembered && f->window[packet->message % FC_WINDOW].agreed))
        return fc_place(M, stream, f, m, packet->index, packet->bytes, packet->length);
    if (remembered && before_psn)
        return FC_ASIDE;
    fc_note_loss(M, FC_UNANCHORED, m, packet->index, packet->length);
    return FC_UNANCHORED;
}

void fc_settle_aside(fc_machine *M, uint32_t stream, fc_flow *f, uint64_t before_psn)
{
    fc_outcome_count *counts = &M->counts[stream * FC_OUTCOMES];
    int32_t kept_head = -1, kept_tail = -1;
    for (int32_t i = f->side_head, following; i >= 0; i = following) {
        fc_side_packet *packet = &M->side[i];
        following = packet->next;
        int outcome = judge_aside(M, stream, f, packet, before_psn);
        if (outcome == FC_ASIDE) {
            *(kept_tail < 0 ? &kept_head : &M->side[kept_tail].next) = i;
            kept_tail = i;
            packet->next = -1;
            continue;
        }
        counts[FC_ASIDE].packets--;
        counts[FC_ASIDE].bytes -= packet->length;
        counts[outcome].packets++;
        counts[outcome].bytes += packet->length;
        packet->next = M->side_free;
        M->side_free = i;
    }
    f->side_head = kept_head;
    f->side_tail = kept_tail;
}

/* -- one send too many --------------------------------------------------------------------------------------- */

/* At least three different 4-byte words: equality of such bytes is no accident. */
static int nontrivial(const uint8_t *data, int64_t nbytes)
{
    uint32_t word, a, b;
    if (nbytes < 16)
        return 0;
    memcpy(&a, data, 4);
    b = a;
    for (int64_t i = 4; i + 4 <= nbytes; i += 4) {
        memcpy(&word, data + i, 4);
        if (word != a && b == a)
            b = word;
        else if (word != a && word != b)
            return 1;
    }
    return 0;
}

/* The call before that this connection has something to send for, and its iteration; NULL: none. */
static const fc_call *call_before(const fc_edge *e, const fc_call *call, int64_t *iteration)
{
    int32_t c = (int32_t)(call - e->calls);
    for (int32_t hops = 1; hops <= e->ncalls + 1; hops++) {
        c--;
        if (c < e->steady && *iteration > 1) {
            c = e->ncalls - 1;
            --*iteration;
        }
        if (c < 0)
            return NULL;
        if (e->calls[c].has_lane)
            return &e->calls[c];
    }
    return NULL;
}

/* A loop's first send is rank r's own contribution to chunk r-1. An NCCL changed to send 2n-1 times per loop
 * (nccl-wire.md 10) sends the reduced chunk r+1 there, and for n = 2 or equal chunks size, slot and flag all agree with
 * the unchanged schedule: only the bytes tell. Comparing them with the arena keeps such traffic from being read one
 * message off. Equal by honest means only when the data is trivial, which is not taken as evidence. */
int fc_repeats_previous(fc_machine *M, const fc_flow *f, const fc_sent *m, const uint8_t *wire, uint32_t length)
{
    const fc_call *call = m->call;
    const fc_lane *lane = &call->lane;
    if (lane->kind != FC_RING_ALLREDUCE || m->target != FC_GRADIENT)
        return 0;
    int64_t per_loop = 2 * (lane->ranks - 1) * lane->slices, loop = m->index / per_loop - 1, iteration = m->iteration;
    if (loop < 0) {
        call = call_before(&M->edges[f->edge], call, &iteration);
        if (call == NULL || call->target != FC_GRADIENT || call->lane.kind != FC_RING_ALLREDUCE)
            return 0;
        lane = &call->lane;
        if (call->phase <= 1)
            iteration = 0;
        loop = lane->messages / (2 * (lane->ranks - 1) * lane->slices) - 1;
    }
    const fc_slot *slot = &M->slots[iteration % M->arenas];
    if (slot->iteration != iteration)
        return 0;
    /* the last chunk that r-1 sends to r is chunk r+1: rank (r-1)'s message of k = 2n-3 */
    fc_lane received = *lane;
    fc_message shape;
    received.index = (lane->index + lane->ranks - 1) % lane->ranks;
    received.slices = 1;
    fc_lane_message(&received, (loop + 1) * 2 * (lane->ranks - 1) - 1, &shape);
    int64_t offset = call->base + shape.first * lane->elem_bytes, n = 256;
    uint8_t data[256];
    n = (int64_t)shape.data_bytes < n ? (int64_t)shape.data_bytes : n;
    if (m->call->lane.protocol == FC_LL) {
        n = (int64_t)fc_data_bytes(FC_LL, length) < n ? (int64_t)fc_data_bytes(FC_LL, length) : n;
        fc_ll_unpack(data, wire, (uint64_t)n);
    } else {
        int64_t together = m->call->lane.protocol == FC_LL128 ? 112 : 256; /* what lies in order at the beginning */
        n = together < n ? together : n;
        n = (int64_t)length < n ? (int64_t)length : n;
        memcpy(data, wire, (size_t)n);
    }
    for (int64_t cell = offset / 8; cell < (offset + n) / 8; cell++)
        if (!fc_has_cell(M, slot, (uint64_t)cell))
            return 0;
    return nontrivial(data, n) && memcmp(data, slot->data + offset, (size_t)n) == 0;
}
