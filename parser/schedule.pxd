# What all placing threads of a job know: its connections with their calls, and whose packets are whose.
from libc.stdint cimport int32_t, int64_t, uint32_t

from parser.machine cimport fc_edge, fc_flow_key


cdef class Schedule:
    cdef fc_edge *edges
    cdef fc_flow_key *table   # table_mask + 1 places
    cdef uint32_t n_edges, table_mask
    cdef uint32_t mtu, header_lines, places  # as in fc_machine
    cdef int64_t region_bytes[3]        # by target
    cdef list orders          # ring orders that lanes point to

    cdef int64_t messages_before(self, int32_t edge, int64_t iteration)
    cdef bint unlike_rotations(self, int32_t edge, int32_t qp) except -1


cdef void *zeroed(size_t count, size_t size) except NULL
