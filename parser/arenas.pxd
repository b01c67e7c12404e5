# The arenas that the placing threads of a job share, and each thread's coverage of them.
from libc.stdint cimport int64_t, uint32_t

from parser.machine cimport fc_machine
from parser.schedule cimport Schedule


cdef class Arenas:
    cdef fc_machine **machines  # one for each placing thread
    cdef uint32_t threads
    cdef Schedule schedule
    cdef list arrays            # keeps the regions alive, by slot
    cdef list bitmaps           # by thread and slot: coverage, as the thread sees it and as it shows it; void cells
    cdef dict twice             # cells that two threads have placed, by iteration, as far as complete() looked
    cdef object union           # a bitmap to work in: untouched memory until it is needed
    cdef readonly object config

    cdef int64_t region_bytes(self, uint32_t slot)
    cdef int64_t words(self, uint32_t slot)
    cdef int build_slots(self, fc_machine *M) except -1
    cdef int let_bursts_end(self) except -1
    cdef object bitmap(self, object iteration, int64_t first, int64_t end)
    cdef list voids(self, object iteration)
    cdef int64_t slot(self, iteration) except -1
    cdef bint holds(self, uint32_t thread, int64_t slot, iteration)
