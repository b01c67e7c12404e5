/* From (lane, message index) to one message: the per-message half of NCCL's wire model.
 *
 * A lane is what one directed edge sends for one call, as a closed form (parser/wire.py plans it).
 * fc_lane_message is O(1), allocates nothing and keeps no state, so any message can be asked for in
 * any order. Section numbers: reference nccl-wire.md.
 */
#ifndef FLOWCHECK_LANE_H
#define FLOWCHECK_LANE_H

#include <stdint.h>

#include "protocol.h"

enum fc_kind {
    FC_RING_ALLREDUCE = 0,
    FC_RING_ALLGATHER = 1,
    FC_RING_REDUCESCATTER = 2,
    FC_RING_BROADCAST = 3,
    FC_TREE_UP = 4,
    FC_TREE_DOWN = 5
};

/* What a message carries. Only FC_FINAL bytes are what every rank ends up with. */
enum fc_content { FC_PARTIAL = 0, FC_FINAL = 1 };

typedef struct fc_segment {
    int64_t base, loop_stride, chunk_stride, chunk, limit, loops; /* elements */
} fc_segment;

typedef struct fc_lane {
    uint8_t kind, protocol, slices, nseg;
    uint32_t elem_bytes, step_inc, step_align, slot_bytes;
    int32_t ranks, index;
    int64_t slice_floor, block, messages;
    const int32_t *order; /* ranks in ring order, `ranks` entries */
    fc_segment seg[2];
} fc_lane;

typedef struct fc_message {
    int64_t first, count; /* element range of the call's tensor                        */
    uint64_t data_bytes;  /* count * elem_bytes                                        */
    uint64_t wire_bytes;  /* size handed to isend (4.1-4.3), without LL slot cleaning  */
    uint8_t content;      /* fc_content                                                */
    uint8_t phase;        /* 0 reduce-scatter half, 1 gather half (ring allreduce)     */
    uint8_t opens_loop;   /* first message of a loop                                   */
} fc_message;

static inline int32_t fc_mod(int32_t a, int32_t n)
{
    int32_t m = a % n;
    return m < 0 ? m + n : m;
}

static inline int32_t fc_lane_sends(const fc_lane *lane)
{
    if (lane->kind == FC_RING_ALLREDUCE)
        return 2 * (lane->ranks - 1);
    if (lane->kind == FC_RING_ALLGATHER || lane->kind == FC_RING_REDUCESCATTER)
        return lane->ranks - 1;
    return 1;
}

static inline void fc_lane_message(const fc_lane *lane, int64_t index, fc_message *out)
{
    int32_t sends = fc_lane_sends(lane), n = lane->ranks, r = lane->index, j = 0;
    int64_t per_loop = (int64_t)sends * lane->slices;
    int64_t loop = index / per_loop, within = index % per_loop;
    int32_t k = (int32_t)(within / lane->slices), slice = (int32_t)(within % lane->slices);
    const fc_segment *s = &lane->seg[0];
    if (loop >= s->loops && lane->nseg > 1) {
        loop -= s->loops;
        s = &lane->seg[1];
    }
    int64_t shift = 0; /* where the block of a rank begins (AllGather output) */
    out->content = FC_PARTIAL;
    out->phase = 0;
    out->opens_loop = within == 0;
    switch (lane->kind) {
    case FC_RING_ALLREDUCE: /* 2.2 */
        if (k < n - 1) {
            j = fc_mod(r - 1 - k, n);
        } else {
            j = fc_mod(r - (k - (n - 1)), n);
            out->content = FC_FINAL;
            out->phase = 1;
        }
        break;
    case FC_RING_ALLGATHER: /* 8.1 */
        shift = (int64_t)lane->order[fc_mod(r - k, n)] * lane->block;
        out->content = FC_FINAL;
        break;
    case FC_RING_REDUCESCATTER: /* 8.2: never a final byte */
        shift = (int64_t)lane->order[fc_mod(r - 1 - k, n)] * lane->block;
        break;
    case FC_RING_BROADCAST: /* 8.4 */
    case FC_TREE_DOWN:      /* 7.2 */
        out->content = FC_FINAL;
        break;
    default: /* FC_TREE_UP: partial sum of a subtree */
        break;
    }
    int64_t offset = s->base + loop * s->loop_stride + (int64_t)j * s->chunk_stride;
    int64_t count = s->limit - offset;
    count = count < 0 ? 0 : count > s->chunk ? s->chunk : count;
    if (lane->slices == 2) { /* 2.7 */
        int64_t first = (count + 31) / 32 * 16;
        if (first < lane->slice_floor)
            first = lane->slice_floor;
        if (first > count)
            first = count;
        if (slice) {
            offset += first;
            count -= first;
        } else {
            count = first;
        }
    }
    out->first = shift + offset;
    out->count = count;
    out->data_bytes = (uint64_t)count * lane->elem_bytes;
    out->wire_bytes = fc_wire_bytes(lane->protocol, out->data_bytes);
}

#endif
