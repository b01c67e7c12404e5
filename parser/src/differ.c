/* Copies of a cell that differ: machine.h.
 *
 * The ICRC of both was right, so nobody can say which one is the trainer's. The cell is void: it counts as missing until
 * the iteration's arena is given away, whatever else comes, also a third copy that agrees with one of the two. Its bit of
 * coverage stays, so later copies are compared and never written. This is the rare path: nothing here is reached while
 * copies agree. */
#include "machine.h"

#include "cover.h"

/* Of a flow of one of this machine's streams. */
static int32_t number_of(const fc_machine *M, const fc_origin *from)
{
    return (int32_t)((from->f - M->states) - (int64_t)from->stream * M->flows);
}

static void note(fc_machine *M, const fc_slot *slot, const fc_origin *from, int64_t offset, int64_t nbytes)
{
    int32_t stream = (int32_t)from->stream, flow = number_of(M, from);
    int32_t target = slot == &M->slots[M->arenas] ? FC_PARAMETERS : FC_GRADIENT;
    fc_difference *last = M->differed && M->differed <= FC_DIFFERENCES ? &M->differences[M->differed - 1] : NULL;
    if (last != NULL && last->stream == stream && last->flow == flow && last->psn == from->psn
        && last->target == target && last->iteration == slot->iteration && last->offset + last->bytes == offset) {
        last->bytes += nbytes;
        return;
    }
    if (M->differed < FC_DIFFERENCES)
        M->differences[M->differed] = (fc_difference){
            .stream = stream, .flow = flow, .target = target, .iteration = slot->iteration, .offset = offset,
            .bytes = nbytes, .psn = from->psn,
        };
    M->differed++;
}

void fc_void(fc_machine *M, fc_slot *slot, uint64_t *count, const fc_origin *from, uint64_t cell, uint64_t nbytes)
{
    if (!fc_cover_bit(slot->voids, cell)) {
        fc_cover_set(slot->voids, cell, cell + 1);
        slot->voided++;
        --*count; /* where another thread had placed the cell this may be less than nothing: sums are right */
    }
    note(M, slot, from, (int64_t)cell * FC_CELL, (int64_t)nbytes);
}

void fc_forget_differences(fc_machine *M)
{
    uint64_t logged = M->differed < FC_DIFFERENCES ? M->differed : FC_DIFFERENCES;
    M->differed = 0;
    for (uint64_t i = 0; i < logged; i++)
        if (M->differences[i].target == FC_GRADIENT && M->differences[i].iteration >= M->base_iteration)
            M->differences[M->differed++] = M->differences[i];
}
