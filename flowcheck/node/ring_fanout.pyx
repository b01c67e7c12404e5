"""One ring, several readers: each gets a ring of its own over the same entries.

    fanout = RingFanout(ring_address, 2);  address = fanout.open(0)     a reader begins with what comes from now on
    fanout.refresh()             shows the readers what is new, and gives back what all of them have read
    fanout.close(0)              nobody waits for this reader any more

The slowest open reader decides what the producer may reuse: if it stops, the ring fills for all, and drops are counted
where they happen. refresh, open and close belong to one thread at a time (the caller has a lock); each reader's ring to
one thread. The ring must outlive the fanout.
"""

from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from parser.packetref cimport fc_ring, fc_ring_release


cdef extern from *:
    """
    #include <stdlib.h>
    static inline uint64_t fc_load(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
    static inline void fc_store(uint64_t *at, uint64_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
    """
    uint64_t fc_load(const uint64_t *at) nogil
    void fc_store(uint64_t *at, uint64_t value) nogil
    int posix_memalign(void **memory, size_t alignment, size_t size) nogil


cdef class RingFanout:
    cdef fc_ring *ring
    cdef fc_ring *readers
    cdef int count
    cdef list active

    def __cinit__(self, uintptr_t ring_address, int readers):
        cdef void *memory = NULL
        if readers < 1 or posix_memalign(&memory, 64, readers * sizeof(fc_ring)) != 0:
            raise MemoryError(f"{readers} readers of a ring")
        memset(memory, 0, readers * sizeof(fc_ring))
        self.ring, self.readers, self.count = <fc_ring *>ring_address, <fc_ring *>memory, readers
        self.active = [False] * readers

    def __dealloc__(self):
        free(self.readers)

    def open(self, int reader):
        """Address of this reader's ring. Raises IndexError, ValueError if it is open."""
        cdef fc_ring *mine
        if self.active[reader]:
            raise ValueError(f"reader {reader} is open")
        mine = &self.readers[reader]
        mine.mask, mine.entries = self.ring.mask, self.ring.entries
        mine.head = mine.tail = fc_load(&self.ring.head)
        self.active[reader] = True
        return <uintptr_t>mine

    def close(self, int reader):
        self.active[reader] = False

    def refresh(self):
        """Returns how many entries were given back to the producer."""
        cdef uint64_t head = fc_load(&self.ring.head), done = head - self.ring.tail
        cdef int i
        for i in range(self.count):
            if self.active[i]:
                done = min(done, fc_load(&self.readers[i].tail) - self.ring.tail)
                fc_store(&self.readers[i].head, head)
        if done:
            fc_ring_release(self.ring, done)
        return done
