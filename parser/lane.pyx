"""Messages of a lane, one by one: the Python door to parser/include/lane.h (used by tests and tools)."""

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from parser.nccl import WireError


cdef int lane_fill(fc_lane *out, object lane, const int32_t *order) except -1:
    cdef int i
    if not 1 <= len(lane.segments) <= 2:
        raise WireError(f"a lane has one or two segments, not {len(lane.segments)}")
    out.kind = lane.kind
    out.protocol = lane.protocol
    out.slices = lane.slices
    out.nseg = len(lane.segments)
    out.elem_bytes = lane.elem_bytes
    out.step_inc = lane.step_inc
    out.step_align = lane.step_align
    out.slot_bytes = lane.slot_bytes
    out.ranks = lane.ranks
    out.index = lane.index
    out.slice_floor = lane.slice_floor
    out.block = lane.block
    out.messages = lane.messages
    out.order = order
    for i in range(out.nseg):
        segment = lane.segments[i]
        out.seg[i].base = segment.base
        out.seg[i].loop_stride = segment.loop_stride
        out.seg[i].chunk_stride = segment.chunk_stride
        out.seg[i].chunk = segment.chunk
        out.seg[i].limit = segment.limit
        out.seg[i].loops = segment.loops
    return 0


def messages(lane):
    """Yield (first element, count, wire bytes, final, gather phase) of every message of a wire.Lane."""
    cdef fc_lane c
    cdef fc_message m
    cdef int64_t i
    cdef int32_t *order = <int32_t *>malloc(len(lane.order) * sizeof(int32_t))
    if order == NULL:
        raise MemoryError("ring order")
    try:
        for i in range(len(lane.order)):
            order[i] = lane.order[i]
        lane_fill(&c, lane, order)
        for i in range(c.messages):
            fc_lane_message(&c, i, &m)
            yield m.first, m.count, m.wire_bytes, m.content == FC_FINAL, m.phase == 1
    finally:
        free(order)
