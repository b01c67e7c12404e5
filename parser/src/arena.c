/* Bytes into the gradient arena: machine.h.
 *
 * A cell is 8 bytes. A slot has a coverage bitmap for each placing thread, whatever the number of streams that it serves
 * (cover.h). The first copy of a cell is placed, later ones are compared, whichever stream and thread they come over; a
 * cell of which two differ is void (differ.c).
 * Flags were checked before anything here is called, unless a name says otherwise. Data is stored past the cache:
 * fc_end_burst() fences, and then shows others what is covered. */
#include "machine.h"

#include <string.h>

#include "cover.h"
#include "place.h"

enum { WORTH_STREAMING = 256 }; /* shorter pieces are few whole cache lines, or none */

/* Words of all bitmaps, from where they are clear on. */
static void clear_to(fc_slot *slot, uint64_t end)
{
    size_t nbytes = (end - slot->clear) * sizeof(uint64_t);
    memset(slot->cover + slot->clear, 0, nbytes);
    if (slot->shown != NULL)
        memset(slot->shown + slot->clear, 0, nbytes);
    if (slot->voided)
        memset(slot->voids + slot->clear, 0, nbytes);
    slot->clear = end;
}

/* A slot becomes a later iteration's. Other threads take a slot's bits for an iteration's only if it says so. */
static void take_over(fc_machine *M, fc_slot *slot, int64_t iteration)
{
    __atomic_store_n(&slot->iteration, -1, __ATOMIC_RELEASE);
    slot->copies_differ = slot->compared_bytes = slot->late = 0;
    memset(slot->places, 0, M->places * sizeof(uint64_t));
    clear_to(slot, M->words[FC_GRADIENT]);
    slot->clear = slot->voided = 0;
    __atomic_store_n(&slot->iteration, iteration, __ATOMIC_RELEASE);
}

/* The live buffer of a message, taken over from an older iteration on first use. NULL: closed. */
static fc_slot *slot_of(fc_machine *M, const fc_sent *m)
{
    if (m->target == FC_PARAMETERS)
        return &M->slots[M->arenas];
    if (m->iteration < M->closed)
        return NULL;
    fc_slot *slot = &M->slots[m->iteration % M->arenas];
    if (slot->iteration != m->iteration)
        take_over(M, slot, m->iteration);
    return slot;
}

/* -- coverage, and other threads ------------------------------------------------------------------------------ */

/* What another thread shows of this slot's iteration; NULL: it has nothing of it. It cannot give the slot to a later one
 * while this thread has not been told that the iteration is closed. */
static const uint64_t *shown_by(const fc_machine *M, uint32_t other, const fc_slot *slot)
{
    const fc_slot *its = &M->others[other]->slots[slot - M->slots];
    return __atomic_load_n(&its->iteration, __ATOMIC_ACQUIRE) == slot->iteration ? its->shown : NULL;
}

/* A word of coverage as another thread shows it: what is set there lies in memory. */
static uint64_t shown_word(const uint64_t *shown, uint64_t word)
{
    return __atomic_load_n(&shown[word], __ATOMIC_ACQUIRE);
}

static int shown_elsewhere(const fc_machine *M, const fc_slot *slot, uint64_t first, uint64_t end)
{
    uint64_t n;
    for (uint32_t i = 0; i < M->n_others; i++) {
        const uint64_t *shown = shown_by(M, i, slot);
        for (uint64_t cell = first; shown != NULL && cell < end; cell += n)
            if (fc_cover_mask(cell, end, &n) & shown_word(shown, cell >> 6))
                return 1;
    }
    return 0;
}

int fc_has_cell(const fc_machine *M, const fc_slot *slot, uint64_t cell)
{
    return fc_cover_bit(slot->cover, cell) || (M->n_others && shown_elsewhere(M, slot, cell, cell + 1));
}

/* Has any of the cells arrived? */
static inline int has_any(const fc_machine *M, const fc_slot *slot, uint64_t first, uint64_t end)
{
    return fc_cover_any(slot->cover, first, end) || (M->n_others && shown_elsewhere(M, slot, first, end));
}

/* Have all of them? By words, as has_any(). */
static int has_all(const fc_machine *M, const fc_slot *slot, uint64_t first, uint64_t end)
{
    uint64_t n;
    for (; first < end; first += n) {
        uint64_t mask = fc_cover_mask(first, end, &n), lacking = mask & ~slot->cover[first >> 6];
        for (uint32_t i = 0; lacking && i < M->n_others; i++) {
            const uint64_t *shown = shown_by(M, i, slot);
            lacking &= shown != NULL ? ~shown_word(shown, first >> 6) : ~0ull;
        }
        if (lacking)
            return 0;
    }
    return 1;
}

/* Words are written by this thread alone; others may read them meanwhile. */
static void show(fc_machine *M)
{
    for (uint32_t i = 0; i < M->n_unshown; i++) {
        const fc_unshown *u = &M->unshown[i];
        for (uint64_t word = u->first >> 6; word <= (u->end - 1) >> 6; word++)
            __atomic_store_n(&u->slot->shown[word], u->slot->cover[word], __ATOMIC_RELEASE);
    }
    M->n_unshown = 0;
}

void fc_end_burst(fc_machine *M)
{
    fc_place_fence();
    if (M->n_unshown)
        show(M);
}

static void show_later(fc_machine *M, fc_slot *slot, uint64_t first, uint64_t end)
{
    fc_unshown *last = M->n_unshown ? &M->unshown[M->n_unshown - 1] : NULL;
    if (last != NULL && last->slot == slot && last->end == first) {
        last->end = end;
        return;
    }
    if (M->n_unshown == FC_UNSHOWN)
        fc_end_burst(M);
    M->unshown[M->n_unshown++] = (fc_unshown){slot, first, end};
    for (uint32_t i = 0; i < M->n_others; i++)
        fc_prefetch(M->others[i]->slots[slot - M->slots].shown + end / 64 + 8);
}

/* Cells of which none had arrived. count: of their place. */
static inline void cover(fc_machine *M, fc_slot *slot, uint64_t *count, uint64_t first, uint64_t end)
{
    fc_cover_set(slot->cover, first, end);
    *count += end - first;
    fc_prefetch(slot->cover + end / 64 + 8); /* the line that the packets to come will set */
    if (M->n_others)
        show_later(M, slot, first, end);
}

void fc_close_before(fc_machine *M, int64_t iteration)
{
    M->closed = iteration;
    for (uint64_t i = 0; i < (uint64_t)M->streams * M->flows; i++)
        M->states[i].track_end = 0;
}

void fc_retire_before(fc_machine *M, int64_t iteration)
{
    M->base_iteration = iteration;
    for (uint32_t i = 0; i < M->arenas; i++)
        if (M->slots[i].iteration < iteration - 1)
            __atomic_store_n(&M->slots[i].iteration, -1, __ATOMIC_RELEASE);
}

int fc_clear(fc_machine *M)
{
    enum { AT_ONCE = 8192 }; /* words: some microseconds, for which the thread has to wait */
    uint64_t words = M->words[FC_GRADIENT];
    for (uint32_t i = 0; i < M->arenas; i++) {
        fc_slot *slot = &M->slots[i];
        if (slot->iteration == -1 && slot->clear < words) {
            clear_to(slot, words - slot->clear < AT_ONCE ? words : slot->clear + AT_ONCE);
            return 1;
        }
    }
    return 0;
}

/* -- placing --------------------------------------------------------------------------------------------------- */

/* What to fetch while placing: once. */
static inline const uint8_t *take_next(fc_machine *M, const uint8_t *none)
{
    const uint8_t *next = M->next;
    M->next = NULL;
    return next != NULL ? next : none;
}

static uint64_t is_late(const fc_flow *f, uint64_t psn)
{
    return psn + 1 < f->next_psn;
}

/* What is known of bytes that are to be placed. */
typedef struct arrival {
    fc_machine *M;
    fc_slot *slot;
    const fc_sent *m;
    uint64_t *count; /* how many cells of the message's tensor are there */
    uint64_t late;   /* 1: packets that were sent after it have come before */
    fc_origin from;
} arrival;

/* Place contiguous bytes; cells that have arrived are compared instead. 1 if any cell was new.
 * offset is a multiple of a cell; only the end of a tensor is not, and nothing else lives in that cell. */
static int put(const arrival *a, int64_t offset, const uint8_t *data, int64_t nbytes)
{
    fc_machine *M = a->M;
    fc_slot *slot = a->slot;
    uint64_t first = (uint64_t)offset / FC_CELL, end = (uint64_t)(offset + nbytes + FC_CELL - 1) / FC_CELL;
    int new = 0;
    if (!has_any(M, slot, first, end)) {
        if (nbytes >= WORTH_STREAMING)
            fc_copy_place(slot->data + offset, data, (uint64_t)nbytes, take_next(M, data));
        else
            memcpy(slot->data + offset, data, (size_t)nbytes);
        cover(M, slot, a->count, first, end);
        slot->late += a->late ? end - first : 0;
        return 1;
    }
    /* a copy of what is there, as a rule all of it: fetch what the next packet of its message will be held against */
    for (int64_t at = 0; nbytes >= WORTH_STREAMING && at < nbytes; at += 64)
        fc_prefetch(slot->data + offset + nbytes + at);
    if (has_all(M, slot, first, end) && memcmp(slot->data + offset, data, (size_t)nbytes) == 0) {
        slot->compared_bytes += (uint64_t)nbytes;
        return 0;
    }
    for (uint64_t cell = first; cell < end; cell++) {
        int64_t here = (int64_t)(cell - first) * FC_CELL;
        size_t n = (size_t)(nbytes - here < FC_CELL ? nbytes - here : FC_CELL);
        if (!fc_has_cell(M, slot, cell)) {
            memcpy(slot->data + offset + here, data + here, n);
            cover(M, slot, a->count, cell, cell + 1);
            slot->late += a->late;
            new = 1;
            continue;
        }
        slot->compared_bytes += n;
        if (memcmp(slot->data + offset + here, data + here, n) != 0) {
            if (slot->copies_differ == 0)
                slot->differ_offset = (uint64_t)(offset + here);
            slot->copies_differ++;
            fc_void(M, slot, a->count, &a->from, cell, n);
        }
    }
    return new;
}

/* How many cells of a message's tensor are there. */
static inline uint64_t *count_of(fc_slot *slot, const fc_sent *m)
{
    return &slot->places[m->call->place];
}

/* The words of a LL128 line from `word` on that lie together, cut at the message's last element. 1 if any cell was new,
 * 0 if none, -1 if there are none of the message's. */
static int put_words(const arrival *a, int64_t offset, const uint8_t *data, int64_t n)
{
    n = a->m->data_bytes - offset < n ? a->m->data_bytes - offset : n;
    return n > 0 ? put(a, a->m->offset + offset, data, n) : -1;
}

/* Whole half-slices of a LL128 message: their data lies together, and goes as one piece. Returns as put_words(). */
static int put_halves(const arrival *a, uint64_t at, const uint8_t *wire, uint32_t length, uint8_t *unpacked)
{
    uint32_t lines = length / FC_LL128_LINE;
    for (uint32_t i = 0; i < lines; i++) {
        const uint8_t *words = wire + FC_LL128_LINE * i;
        uint8_t *half = unpacked + fc_data_bytes(FC_LL128, FC_LL128_WIRE) * (i / 8);
        memcpy(half + fc_ll128_offset(i % 8, 0), words, i % 8 < 4 ? 120 : 112);
        if (i % 8 >= 4)
            memcpy(half + fc_ll128_offset(i % 8, 14), words + 112, 8);
    }
    return put_words(a, (int64_t)fc_data_bytes(FC_LL128, at), unpacked, (int64_t)fc_data_bytes(FC_LL128, length));
}

/* Lines of a LL128 message beginning at wire byte `at` of the message (a multiple of 128). Returns as put_words(). */
static int put_ll128(const arrival *a, uint64_t at, const uint8_t *wire, uint32_t length)
{
    int new = -1;
    for (uint32_t i = 0; i < length / FC_LL128_LINE; i++) {
        const uint8_t *words = wire + FC_LL128_LINE * i;
        int64_t half = (int64_t)fc_data_bytes(FC_LL128, at + FC_LL128_LINE * i);
        uint32_t line = (uint32_t)((at + FC_LL128_LINE * i) / FC_LL128_LINE % 8);
        /* words 0..13 lie together; word 14 follows them only in lines 0..3 */
        int found = put_words(a, half + fc_ll128_offset(line, 0), words, line < 4 ? 120 : 112);
        new = found > new ? found : new;
        if (line >= 4) {
            found = put_words(a, half + fc_ll128_offset(line, 14), words + 112, 8);
            new = found > new ? found : new;
        }
    }
    return new;
}

/* Region bytes of what a packet brings final, as an entry of that cause; 0 if it brings nothing. */
static int loss_of(const fc_machine *M, int cause, const fc_sent *m, uint32_t index, uint32_t length, fc_loss *out)
{
    int protocol = m->call->lane.protocol;
    uint64_t unit = protocol == FC_LL128 ? FC_LL128_WIRE : 1; /* of LL128 the slices that it touches */
    int64_t at = (int64_t)fc_data_bytes(protocol, m->piece + (uint64_t)index * M->mtu);
    int64_t n = (int64_t)fc_data_bytes(protocol, (length + unit - 1) / unit * unit);
    n = m->data_bytes - at < n ? m->data_bytes - at : n;
    if (m->target == FC_NOTHING || m->content != FC_FINAL || n <= 0)
        return 0;
    *out = (fc_loss){
        .cause = cause, .target = m->target, .iteration = m->iteration, .offset = m->offset + at, .bytes = n,
    };
    return 1;
}

/* What comes for an iteration that is closed: an iteration that lacks it can say why. */
static void note_late(fc_machine *M, const fc_sent *m, uint32_t index, uint32_t length)
{
    fc_loss late;
    if (!loss_of(M, FC_LATE, m, index, length, &late))
        return;
    if (M->n_late < FC_LATE_ENTRIES)
        M->late[M->n_late] = late;
    __atomic_store_n(&M->n_late, M->n_late + 1, __ATOMIC_RELEASE);
}

int fc_place(fc_machine *M, uint32_t stream, const fc_flow *f, const fc_sent *m, uint32_t index, const uint8_t *wire,
             uint32_t length)
{
    fc_slot *slot = slot_of(M, m);
    int protocol = m->call->lane.protocol;
    uint64_t at = m->piece + (uint64_t)index * M->mtu;
    uint8_t unpacked[FC_SIDE_BYTES];
    if (slot == NULL) {
        note_late(M, m, index, length);
        return FC_LATE;
    }
    arrival a = {.M = M, .slot = slot, .m = m, .count = count_of(slot, m),
                 .late = is_late(f, m->psn + index), .from = {stream, f, m->psn + index}};
    if (protocol == FC_LL128) {
        int whole = (at | length) % FC_LL128_WIRE == 0;
        int new = whole ? put_halves(&a, at, wire, length, unpacked) : put_ll128(&a, at, wire, length);
        return new > 0 ? FC_PLACED : new == 0 ? FC_COMPARED : FC_RELEASED;
    }
    int64_t offset = (int64_t)fc_data_bytes(protocol, at), n = (int64_t)fc_data_bytes(protocol, length);
    n = m->data_bytes - offset < n ? m->data_bytes - offset : n;
    if (n <= 0)
        return FC_RELEASED;
    if (protocol == FC_LL) {
        uint64_t first = (uint64_t)(m->offset + offset) / FC_CELL;
        uint64_t end = (uint64_t)(m->offset + offset + n + FC_CELL - 1) / FC_CELL;
        if (!has_any(M, slot, first, end)) {
            fc_ll_unpack(slot->data + m->offset + offset, wire, (uint64_t)n);
            cover(M, slot, a.count, first, end);
            slot->late += a.late ? end - first : 0;
            return FC_PLACED;
        }
        fc_ll_unpack(unpacked, wire, (uint64_t)n);
        wire = unpacked;
    }
    return put(&a, m->offset + offset, wire, n) ? FC_PLACED : FC_COMPARED;
}

/* A wrong flag leaves bytes of no meaning in cells that stay uncovered. */
int fc_place_flagged(fc_machine *M, uint32_t stream, fc_flow *f, const fc_sent *m, uint32_t index, const uint8_t *wire,
                     uint32_t length, uint64_t psn)
{
    int is_ll = m->call->lane.protocol == FC_LL;
    uint64_t at = m->piece + (uint64_t)index * M->mtu, lines = fc_flagged_lines(m, at, length);
    uint64_t unit = fc_wire_unit(m->call->lane.protocol);
    int64_t offset = (int64_t)fc_data_bytes(m->call->lane.protocol, at);
    int64_t n = (int64_t)fc_data_bytes(m->call->lane.protocol, length), bad;
    n = m->data_bytes - offset < n ? m->data_bytes - offset : n;
    fc_slot *slot = slot_of(M, m);
    uint64_t first = (uint64_t)(m->offset + offset) / FC_CELL;
    uint64_t end = (uint64_t)(m->offset + offset + n + FC_CELL - 1) / FC_CELL;
    if (slot == NULL || n <= 0 || (at | length) % unit || (is_ll && lines != end - first)
        || has_any(M, slot, first, end)) {
        int flags = fc_check_flags(M, stream, f, m, index, wire, length, psn);
        if (flags == 0)
            return FC_DISAGREED;
        if (flags == 2)
            fc_agree(M, stream, f, psn);
        return fc_place(M, stream, f, m, index, wire, length);
    }
    uint8_t *to = slot->data + m->offset + offset;
    if (is_ll)
        bad = fc_ll_place(to, wire, (uint64_t)n, (uint32_t)(m->step + 1), take_next(M, wire));
    else
        bad = fc_ll128_place(to, wire, lines / 8, (uint64_t)n, m->step + 1, take_next(M, wire));
    if (bad >= 0) {
        fc_wrong_flag(M, stream, f, m, wire, psn, bad);
        return FC_DISAGREED;
    }
    cover(M, slot, count_of(slot, m), first, end);
    slot->late += is_late(f, psn) ? end - first : 0;
    fc_agree(M, stream, f, psn);
    return FC_PLACED;
}

/* What is special - bytes after the last element, pieces that are not whole lines or cells, a closed iteration - is left
 * to fc_place(). */
void fc_prepare_message(fc_machine *M, fc_flow *f, const fc_sent *m)
{
    fc_slot *slot = slot_of(M, m);
    int protocol = m->call->lane.protocol;
    uint64_t unit = fc_wire_unit(protocol), from_byte = fc_data_bytes(protocol, m->piece);
    f->track_end = 0;
    if (slot == NULL || M->mtu % unit || m->piece % unit || m->offset % FC_CELL || m->data_bytes <= (int64_t)from_byte)
        return;
    f->track_bytes = (uint32_t)fc_data_bytes(protocol, M->mtu);
    f->track_psn = m->psn;
    f->track_end = m->psn + ((uint64_t)m->data_bytes - from_byte) / f->track_bytes;
    f->track_to = slot->data + m->offset + from_byte;
    f->track_cell = ((uint64_t)m->offset + from_byte) / FC_CELL;
    f->track_slot = slot;
    f->track_count = count_of(slot, m);
    f->track_flag = m->step + 1;
    f->track_protocol = M->placing = (uint8_t)protocol;
}

int fc_place_general(fc_machine *M, uint32_t stream, fc_flow *f, const uint8_t *wire, uint64_t psn)
{
    const fc_sent *m = f->ahead;
    uint32_t index = (uint32_t)(psn - m->psn);
    if (m->call->lane.protocol == FC_SIMPLE)
        return fc_place(M, stream, f, m, index, wire, M->mtu);
    return fc_place_flagged(M, stream, f, m, index, wire, M->mtu, psn);
}

/* A copy of cells that are all there, as it should be: the same bytes, right flags. What is not is left to
 * fc_place_general(), which says why. */
static int compare_in_order(fc_machine *M, uint32_t stream, fc_flow *f, const uint8_t *to, const uint8_t *wire,
                            uint64_t psn)
{
    uint8_t unpacked[FC_SIDE_BYTES] __attribute__((aligned(64)));
    const uint8_t *data = f->track_protocol == FC_SIMPLE ? wire : unpacked, *next = take_next(M, wire);
    uint64_t nbytes = f->track_bytes;
    int64_t bad = -1;
    if (f->track_protocol == FC_LL)
        bad = fc_ll_near(unpacked, wire, nbytes, (uint32_t)f->track_flag, next);
    else if (f->track_protocol == FC_LL128)
        bad = fc_ll128_near(unpacked, wire, M->mtu / FC_LL128_WIRE, nbytes, f->track_flag, next);
    else
        fc_prefetch_bytes_far(next, nbytes);
    if (bad >= 0 || memcmp(to, data, nbytes) != 0)
        return fc_place_general(M, stream, f, wire, psn);
    f->track_slot->compared_bytes += nbytes;
    if (f->track_protocol != FC_SIMPLE)
        fc_agree(M, stream, f, psn);
    return FC_COMPARED;
}

/* What the flow's packets bring at the moment, as far as this one says: fetch_cells() in machine.c. */
static inline void note_copies(fc_machine *M, uint32_t stream, fc_flow *f, uint8_t copies)
{
    if (f->brings_copies != copies) {
        f->brings_copies = copies;
        M->copying[stream] += 2 * (uint32_t)copies - 1;
    }
}

/* What fc_place_flagged() and fc_place() do, with nothing left to work out. A wrong flag leaves bytes of no meaning in
 * cells that stay uncovered. */
int fc_place_in_order(fc_machine *M, uint32_t stream, fc_flow *f, const uint8_t *wire, uint64_t psn)
{
    uint64_t index = psn - f->track_psn, nbytes = f->track_bytes, first = f->track_cell + index * (nbytes / FC_CELL);
    uint64_t end = first + nbytes / FC_CELL;
    uint8_t *to = f->track_to + index * nbytes;
    fc_slot *slot = f->track_slot;
    int64_t bad = -1;
    if (has_any(M, slot, first, end)) {
        note_copies(M, stream, f, 1);
        return has_all(M, slot, first, end) ? compare_in_order(M, stream, f, to, wire, psn)
                                            : fc_place_general(M, stream, f, wire, psn);
    }
    note_copies(M, stream, f, 0);
    if (f->track_protocol == FC_LL)
        bad = fc_ll_place(to, wire, nbytes, (uint32_t)f->track_flag, take_next(M, wire));
    else if (f->track_protocol == FC_LL128)
        bad = fc_ll128_place(to, wire, M->mtu / FC_LL128_WIRE, nbytes, f->track_flag, take_next(M, wire));
    else
        fc_copy_place(to, wire, nbytes, take_next(M, wire));
    if (bad >= 0) {
        fc_wrong_flag(M, stream, f, f->ahead, wire, psn, bad);
        return FC_DISAGREED;
    }
    cover(M, slot, f->track_count, first, end);
    if (f->track_protocol != FC_SIMPLE)
        fc_agree(M, stream, f, psn);
    return FC_PLACED;
}

void fc_note_loss(fc_machine *M, int cause, const fc_sent *m, uint32_t index, uint32_t length)
{
    fc_loss loss;
    if (!loss_of(M, cause, m, index, length, &loss))
        return;
    if (M->lost < FC_LOSS_ENTRIES)
        M->losses[M->lost] = loss;
    __atomic_store_n(&M->lost, M->lost + 1, __ATOMIC_RELEASE);
}
