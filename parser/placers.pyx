"""The placing threads of an engine: each takes packets out of its rings, without the GIL, until it is stopped.

    with Placers(engine, rings) as placers:       rings: (address of the ring, of its fanout or 0), by stream
        placers.look(stream)                      again and again, while iterations close and retire

parser/include/serve.h is the loop. One thread makes, starts, looks and stops. While they run, only calls of the engine
that need no thread to rest are legal (machine.pyx), and nobody else reads the rings.
"""

import threading

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from parser.packetref cimport fc_ring
from parser.schedule cimport zeroed

from libc.stdlib cimport free


cdef extern from "serve.h" nogil:
    ctypedef struct fc_fanout:
        pass
    ctypedef struct fc_queue:
        fc_ring *ring
        fc_fanout *fanout
        uint32_t stream, blocked
        uint64_t consumed
    ctypedef struct fc_service:
        fc_queue queues[64]
        uint32_t n, stop


cdef class Placers:
    """engine: parser.machine.Engine. rings: one for each of its streams. consumed: packets of all of them so far."""

    cdef fc_service *services
    cdef list threads
    cdef object engine

    def __cinit__(self, engine, rings):
        cdef uint32_t stream, count = engine.config.threads
        cdef fc_queue *queue
        if len(rings) != engine.config.streams:
            raise ValueError(f"{len(rings)} rings for {engine.config.streams} streams")
        self.engine, self.threads = engine, []
        self.services = <fc_service *>zeroed(count, sizeof(fc_service))
        for stream, (ring, fanout) in enumerate(rings):
            service = &self.services[stream % count]
            queue = &service.queues[service.n]
            queue.ring, queue.fanout = <fc_ring *><uintptr_t>ring, <fc_fanout *><uintptr_t>fanout
            queue.stream = stream // count
            service.n += 1

    def start(self):
        cdef uint32_t t
        for t in range(self.engine.config.threads):
            thread = threading.Thread(target=self._serve, args=(t,), name=f"placing {t}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def _serve(self, uint32_t thread):
        """A method of ours, so that the services live for as long as a thread that reads them."""
        self.engine.serve(thread, <uintptr_t>&self.services[thread])

    def stop(self):
        """Join the threads. What they have not taken stays in the rings. Idempotent."""
        cdef uint32_t t
        for t in range(self.engine.config.threads):
            self.services[t].stop = 1
        while self.threads:
            self.threads.pop().join()

    def look(self, uint32_t stream):
        """(packets consumed so far, is the next one blocked) of a stream."""
        cdef uint32_t count = self.engine.config.threads
        cdef const fc_queue *queue = &self.services[stream % count].queues[stream // count]
        return queue.consumed, bool(queue.blocked)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def __dealloc__(self):
        free(self.services)
