/* Counting one flow: counts.h. Section numbers are those of nccl-wire.md. */
#include "counts.h"

#include <string.h>

#include "psn.h"

static uint32_t le32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static uint64_t le64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* The opcode within its transport: reliable and unreliable connections share the numbers. */
static uint32_t operation(const fc_roce *p)
{
    return p->opcode & 0x1F;
}

void fc_tally_add(fc_tally *t, uint64_t key)
{
    for (uint32_t i = 0; i < t->used; i++)
        if (t->key[i] == key) {
            t->count[i]++;
            return;
        }
    if (t->used == FC_TALLY_SLOTS) {
        t->other++;
        return;
    }
    t->key[t->used] = key;
    t->count[t->used++] = 1;
}

static void remember(fc_regions *r, uint64_t address, uint64_t size, uint32_t rkey)
{
    for (uint32_t i = 0; i < r->used; i++)
        if (r->region[i].address == address && r->region[i].rkey == rkey) {
            if (size > r->region[i].size)
                r->region[i].size = size;
            return;
        }
    if (r->used < FC_REGIONS)
        r->region[r->used++] = (fc_region){address, size, rkey};
}

/* -- messages -------------------------------------------------------------------------------------------- */

/* The piece of a message of `total` bytes that one of `used` QPs carries: rounded up to 128 bytes (5.3). The last
 * one is shorter; nothing is decided on it. */
static uint64_t split_piece(uint64_t total, uint32_t used)
{
    return ((total + used - 1) / used + 127) / 128 * 128;
}

/* Which byte order makes the immediate the size of its write, or of a message split over several QPs? */
static void weigh_immediate(fc_counts *f, uint32_t imm, uint64_t size)
{
    uint64_t little = __builtin_bswap32(imm), big = imm;
    if (little == big)
        return;
    if (size == little) {
        f->imm_little++;
        return;
    }
    if (size == big) {
        f->imm_big++;
        return;
    }
    for (uint32_t used = 2; size && used <= FC_SPLIT_MAX; used++) {
        if (split_piece(little, used) == size) {
            f->imm_split_little[used]++;
            return;
        }
        if (split_piece(big, used) == size) {
            f->imm_split_big[used]++;
            return;
        }
    }
    f->imm_unexplained++;
}

/* The plain write in f->write had no immediate after it: its pieces were messages of their own. */
static void finish_write(fc_counts *f)
{
    fc_writing *w = &f->write;
    if (w->open && w->plain) {
        if (w->pieces) {
            f->messages += w->pieces;
            for (uint32_t i = 0; i + 1 < w->pieces; i++)
                fc_tally_add(&f->sizes, w->unit);
            fc_tally_add(&f->sizes, w->last);
        } else {
            f->messages++;
            fc_tally_add(&f->sizes, w->length);
        }
    }
    w->open = 0;
}

static void begin_write(fc_counts *f, const fc_roce *p, int64_t psn, int only)
{
    fc_writing *w = &f->write;
    remember(&f->regions, p->va, p->dma_len, p->rkey);
    if (only && w->open && w->plain && w->pieces && w->whole && w->next == psn && p->rkey == w->rkey
        && p->va == w->address + w->length && w->last == w->unit && p->dma_len <= w->unit) {
        w->length += p->dma_len;
        w->got += p->payload_len;
        w->last = p->dma_len;
        w->pieces++;
        w->next = psn + 1;
        return;
    }
    finish_write(f);
    *w = (fc_writing){
        .open = 1, .whole = 1, .plain = 1, .ended = only, .pieces = only ? 1 : 0, .unit = p->dma_len, .last = p->dma_len,
        .rkey = p->rkey, .address = p->va, .length = p->dma_len, .got = p->payload_len, .next = psn + 1,
    };
}

static void take_only_with_immediate(fc_counts *f, const fc_roce *p, int64_t psn)
{
    fc_writing *w = &f->write;
    if (p->dma_len == 0 && p->va == 0 && p->rkey == 0 && w->open && w->plain && w->whole && w->next == psn
        && w->got == w->length) { /* an adaptive-routing pair (5.2) */
        f->pairs++;
        if (w->pieces > 1) {
            f->cut_writes++;
            f->cut_pieces += w->pieces;
        }
        weigh_immediate(f, p->imm, w->length);
        f->messages++;
        fc_tally_add(&f->sizes, w->length);
        w->open = 0;
        return;
    }
    finish_write(f);
    f->messages++;
    fc_tally_add(&f->sizes, p->dma_len);
    if (p->dma_len == 0)
        f->empty++;
    else
        remember(&f->regions, p->va, p->dma_len, p->rkey);
    weigh_immediate(f, p->imm, p->dma_len);
}

static void go_on_writing(fc_counts *f, const fc_roce *p, int64_t psn)
{
    fc_writing *w = &f->write;
    if (!w->open || w->ended) {
        finish_write(f); /* the message's first packet was not seen: it is not counted */
        return;
    }
    if (psn != w->next)
        w->whole = 0;
    w->next = psn + 1;
    w->got += p->payload_len;
    w->ended = operation(p) != FC_RC_WRITE_MIDDLE;
    if (operation(p) == FC_RC_WRITE_LAST_IMM) {
        if (w->whole && w->got == w->length)
            weigh_immediate(f, p->imm, w->length);
        f->messages++;
        fc_tally_add(&f->sizes, w->length);
        w->open = 0;
    }
}

/* -- clear to send --------------------------------------------------------------------------------------- */

/* The first of the forms that the write can be read as, or -1: parser/nccl.py says why no other can be meant. */
static int which_element(const fc_roce *p, const fc_cts_element *elements, uint32_t n, fc_cts *c)
{
    for (uint32_t i = 0; i < n; i++)
        if (fc_cts_read(&elements[i], p->payload, p->payload_len, c))
            return (int)i;
    return -1;
}

static void take_cts(fc_counts *f, const fc_roce *p, int which, const fc_cts *c)
{
    if (f->cts == 0) {
        f->cts_first = c->number;
    } else {
        uint64_t step = p->va > f->cts_last_va ? p->va - f->cts_last_va : f->cts_last_va - p->va;
        uint64_t next = (uint64_t)FC_CTS_REQUESTS * p->payload_len;
        if (c->number != f->cts_last + 1)
            f->cts_jumps++;
        *(step == next || step == 255 * next ? &f->cts_steps[which] : &f->cts_steps_other) += 1;
    }
    f->cts++;
    f->cts_element[which]++;
    f->cts_last = c->number;
    f->cts_last_va = p->va;
    fc_tally_add(&f->cts_sizes, c->size);
    fc_tally_add(&f->cts_tags, c->tag);
    remember(&f->cts_regions, c->address, c->size, c->rkey);
}

/* -- payload marks --------------------------------------------------------------------------------------- */

static void note_flag(fc_counts *f, uint64_t flag)
{
    if (f->flag_first == 0)
        f->flag_first = flag;
    else if (flag == f->flag_last + 1)
        f->flag_steps++;
    else if (flag != f->flag_last)
        f->flag_jumps++;
    f->flag_last = flag;
}

static int constant(const uint8_t *at, uint32_t n)
{
    if (le32(at) != le32(at + 4))
        return 0;
    for (uint32_t i = 8; i < n; i += 8)
        if (le64(at + i) != le64(at))
            return 0;
    return 1;
}

/* Lines of 16 bytes: data 4, flag 4, data 4, flag 4 (4.1). The flag, or 0. */
static uint32_t ll_flag(const uint8_t *at, uint32_t n)
{
    uint32_t flag = le32(at + 4);
    for (uint32_t i = 0; i < n; i += 16)
        if (le32(at + i + 4) != flag || le32(at + i + 12) != flag)
            return 0;
    return flag;
}

/* Lines of 128 bytes that end in a flag of 8 (4.2). The flag, or 0. */
static uint64_t ll128_flag(const uint8_t *at, uint32_t n)
{
    if (n % 128 || n < 256)
        return 0;
    uint64_t flag = le64(at + 120);
    for (uint32_t i = 0; i < n; i += 128)
        if (le64(at + i + 120) != flag)
            return 0;
    return flag;
}

/* One message has one flag, and it is never zero. starts: the packet is its message's first. */
static void weigh_flags(fc_counts *f, const fc_roce *p, int starts)
{
    uint32_t n = p->payload_len;
    uint64_t flag;
    if (n == 0)
        return;
    if (n % 16) { /* LL and LL128 messages are whole lines */
        f->raw++;
    } else if (constant(p->payload, n)) {
        f->constant++;
    } else if ((flag = ll_flag(p->payload, n))) {
        f->ll++;
        if (starts)
            note_flag(f, flag);
    } else if ((flag = ll128_flag(p->payload, n))) {
        f->ll128++;
        if (starts)
            note_flag(f, flag);
    } else {
        f->raw++;
    }
}

/* -- one packet ------------------------------------------------------------------------------------------ */

static void take_write(fc_counts *f, const fc_roce *p, int64_t psn, const fc_cts_element *elements, uint32_t n)
{
    uint32_t what = operation(p);
    if (what == FC_RC_WRITE_ONLY && p->dma_len == p->payload_len) {
        fc_cts c;
        int which = which_element(p, elements, n, &c);
        if (which >= 0) {
            take_cts(f, p, which, &c);
            return;
        }
    }
    weigh_flags(f, p, what == FC_RC_WRITE_FIRST || what >= FC_RC_WRITE_ONLY);
    if (what == FC_RC_WRITE_ONLY_IMM)
        take_only_with_immediate(f, p, psn);
    else if (what == FC_RC_WRITE_ONLY || what == FC_RC_WRITE_FIRST)
        begin_write(f, p, psn, what == FC_RC_WRITE_ONLY);
    else
        go_on_writing(f, p, psn);
}

static void take_answer(fc_counts *f, const fc_roce *p)
{
    if (!f->answered) {
        f->answer_low = f->answer_high = p->psn;
        f->answered = 1;
    } else if (fc_psn_distance(p->psn, f->answer_high) >= 0) {
        f->answer_high = p->psn;
    } else if (fc_psn_distance(f->answer_low, p->psn) >= 0) {
        f->answer_low = p->psn;
    }
    if (!(p->headers & FC_HAS_AETH))
        return;
    f->msn = p->msn;
    uint32_t kind = p->syndrome >> 5 & 3, code = p->syndrome & 0x1F;
    if (kind == 0)
        f->acks++;
    else if (kind == 1)
        f->rnr++;
    else
        f->naks[code < FC_NAK_KINDS - 1 ? code : FC_NAK_KINDS - 1]++;
}

/* Requests and answers of connections; datagrams, congestion notifications and vendors' opcodes have no sequence. */
static void take_operation(fc_counts *f, const fc_roce *p, const fc_cts_element *elements, uint32_t n)
{
    enum { SEND_LAST_INVALIDATE = 0x16, SEND_ONLY_INVALIDATE = 0x17 };
    uint32_t transport = p->opcode >> 5, what = operation(p);
    if (transport == 0 && FC_RC_READ_RESP_FIRST <= what && what <= FC_RC_ATOMIC_ACK) {
        take_answer(f, p);
        return;
    }
    if (transport > 1 || (what > FC_RC_READ_REQUEST && what != FC_RC_CMP_SWAP && what != FC_RC_FETCH_ADD
                          && what != SEND_LAST_INVALIDATE && what != SEND_ONLY_INVALIDATE))
        return;
    int64_t psn = fc_sequence_follow(&f->sequence, p);
    if (psn < 0)
        return;
    if (FC_RC_WRITE_FIRST <= what && what <= FC_RC_WRITE_ONLY_IMM)
        take_write(f, p, psn, elements, n);
    else if (what == FC_RC_SEND_FIRST || what == FC_RC_SEND_ONLY || what == FC_RC_SEND_ONLY_IMM
             || what == SEND_ONLY_INVALIDATE)
        f->sends++;
}

void fc_count_packet(
    fc_counts *f, const fc_packetref *ref, const fc_roce *p, const fc_cts_element *elements, uint32_t n)
{
    f->packets++;
    f->bytes += ref->length;
    f->streams |= 1ull << (ref->stream % FC_STREAMS_MAX);
    f->opcodes[p->opcode]++;
    if (p->tunnel)
        fc_tally_add(&f->mirror, (uint64_t)p->tunnel << 32 | p->session);
    if (ref->timestamp_ns) {
        if (f->first_ns == 0 || ref->timestamp_ns < f->first_ns)
            f->first_ns = ref->timestamp_ns;
        if (ref->timestamp_ns > f->last_ns)
            f->last_ns = ref->timestamp_ns;
    }
    if (!fc_icrc_ok(p)) {
        f->icrc_wrong++;
        return;
    }
    f->icrc_ok++;
    f->payload_bytes += p->payload_len;
    if (p->payload_len > f->max_payload)
        f->max_payload = p->payload_len;
    fc_tally_add(&f->tclass, p->tclass);
    fc_tally_add(&f->sport, p->udp_sport);
    f->congestion += (p->tclass & 3) == 3;
    if (p->vlan != 0xFFFF)
        fc_tally_add(&f->vlan, p->vlan & 0xFFF);
    if (p->headers & FC_HAS_DETH)
        fc_tally_add(&f->src_qp, p->src_qp);
    take_operation(f, p, elements, n);
}
