"""One ring, several readers: the Python door to dataplane/include/fanout.h.

    fanout = RingFanout(ring_address, 2);  address = fanout.open(0)     a reader begins with what comes from now on
    fanout.refresh()             shows the readers what is new, and gives back what all of them have read
    fanout.close(0)              nobody waits for this reader any more

The ring must outlive the fanout. Any thread.
"""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from parser.packetref cimport fc_ring


cdef extern from "fanout.h" nogil:
    ctypedef struct fc_reader:
        fc_ring ring
    ctypedef struct fc_fanout:
        fc_ring *ring
        fc_reader *readers
        uint32_t count
    int fc_fanout_open(fc_fanout *f, uint32_t reader)
    void fc_fanout_close(fc_fanout *f, uint32_t reader)
    uint64_t fc_fanout_refresh(fc_fanout *f)


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)


cdef class RingFanout:
    """address: of the fc_fanout, for whoever refreshes without Python."""

    cdef fc_fanout fanout

    def __cinit__(self, uintptr_t ring_address, int readers):
        cdef void *memory = NULL
        if readers < 1 or posix_memalign(&memory, 64, readers * sizeof(fc_reader)) != 0:
            raise MemoryError(f"{readers} readers of a ring")
        memset(memory, 0, readers * sizeof(fc_reader))
        self.fanout.ring, self.fanout.readers = <fc_ring *>ring_address, <fc_reader *>memory
        self.fanout.count = readers

    def __dealloc__(self):
        free(self.fanout.readers)

    @property
    def address(self):
        return <uintptr_t>&self.fanout

    cdef uint32_t _known(self, int reader) except? 0xffffffff:
        if not 0 <= reader < <int>self.fanout.count:
            raise IndexError(f"reader {reader} of {self.fanout.count}")
        return <uint32_t>reader

    def open(self, int reader):
        """Address of this reader's ring. Raises IndexError, ValueError if it is open."""
        cdef uint32_t number = self._known(reader)
        if not fc_fanout_open(&self.fanout, number):
            raise ValueError(f"reader {reader} is open")
        return <uintptr_t>&self.fanout.readers[number].ring

    def close(self, int reader):
        fc_fanout_close(&self.fanout, self._known(reader))

    def refresh(self):
        """Returns how many entries were given back to the producer."""
        return fc_fanout_refresh(&self.fanout)
