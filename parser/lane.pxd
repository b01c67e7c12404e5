# C declarations of parser/include/lane.h, and the bridge from a wire.Lane to it.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "lane.h" nogil:
    enum: FC_LL, FC_LL128, FC_SIMPLE
    enum: FC_RING_ALLREDUCE, FC_RING_ALLGATHER, FC_RING_REDUCESCATTER, FC_TREE_UP, FC_TREE_DOWN
    enum: FC_PARTIAL, FC_FINAL
    ctypedef struct fc_segment:
        int64_t base, loop_stride, chunk_stride, chunk, limit, loops
    ctypedef struct fc_lane:
        uint8_t kind, protocol, slices, nseg
        uint32_t elem_bytes, step_inc, step_align, slot_bytes
        int32_t ranks, index
        int64_t slice_floor, block, messages
        const int32_t *order
        fc_segment seg[2]
    ctypedef struct fc_message:
        int64_t first, count
        uint64_t data_bytes, wire_bytes
        uint8_t content, phase, opens_loop
    void fc_lane_message(const fc_lane *lane, int64_t index, fc_message *out)


# Fill `out` from a parser.wire.Lane. `order` must outlive `out` (it is pointed to, not copied).
cdef int lane_fill(fc_lane *out, object lane, const int32_t *order) except -1
