"""The placing threads of a node: each takes packets out of its rings for all engines, without the GIL, until it is stopped.

    with Placers([ring_address, ...]) as placers:      a thread for each ring, unless `threads` says otherwise
        seat = placers.attach(engine)                  from now on packets of its flows are the engine's
        seat.look(stream), seat.ring(stream)           again and again, while iterations close and retire
        seat.leave()                                   the engine rests; then finish() is legal
        placers.strangers(queue)                       packets of nobody
        placers.claimed(queue)                         packets of engines, those that have left included

parser/include/serve.h has the model. Stream i of every engine is ring i, and its threads are these. Rings outlive the
Placers, which alone read them. Without engines the rings are emptied. Any thread may call anything; start and stop
belong to one. While a seat is taken, only calls of its engine that need no thread to rest are legal (machine.pyx).
"""

import os
import threading

from libc.stdint cimport uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport free

from parser.machine cimport FC_OUTCOMES, fc_machine, fc_outcome_count, fc_strangers
from parser.packetref cimport fc_ring, fc_ring_closed
from parser.roce cimport FC_REFUSALS
from parser.schedule cimport zeroed

from parser.machine import serve
from parser.names import OUTCOMES
from parser.roce import REFUSAL_NAMES


cdef extern from "serve.h" nogil:
    enum:
        FC_QUEUES
        FC_SEATS
    ctypedef struct fc_seat:
        fc_machine *M
        uint32_t stream, number
        uint64_t waits
    ctypedef struct fc_table:
        pass
    ctypedef struct fc_queue:
        fc_ring *ring
        const fc_table *table
        const fc_table *current
        uint64_t scan
        uint8_t *owners
        uint8_t *final_hint
        uint64_t ahead
        fc_strangers strangers
    ctypedef struct fc_service:
        fc_queue **queues
        uint32_t n, stop
        uint8_t *final_hint
    fc_table *fc_table_make(fc_seat **seats, uint32_t n)
    void fc_table_free(fc_table *table)
    void fc_queue_show(fc_queue *q, const fc_table *table, int running)
    int fc_queue_has(const fc_queue *q, const fc_table *table)
    uint64_t fc_ring_head(const fc_ring *r)
    uint64_t fc_ring_tail(const fc_ring *r)
    uint64_t fc_seat_passed(const fc_queue *q, const fc_seat *s)
    uint64_t fc_seat_consumed(const fc_seat *s)
    int fc_seat_blocked(const fc_seat *s)
    void fc_service_stop(fc_service *service)


cdef extern from "<unistd.h>" nogil:
    int usleep(unsigned int microseconds)


cdef class Seat:
    """An engine's place at all rings; made by Placers.attach."""

    cdef fc_seat *at  # by queue
    cdef readonly Placers placers
    cdef readonly object engine
    cdef readonly uint32_t number

    def __cinit__(self, Placers placers, engine, uint32_t number):
        cdef uint32_t q, threads = placers.n_threads
        self.placers, self.engine, self.number = placers, engine, number
        self.at = <fc_seat *>zeroed(placers.count, sizeof(fc_seat))
        for q in range(placers.count):
            self.at[q].M = <fc_machine *><uintptr_t>engine.machine(q % threads)
            self.at[q].stream, self.at[q].number = q // threads, number
            self.at[q].waits = fc_ring_head(placers.queues[q].ring)
            self.at[q].M.final_hint = placers.queues[q].final_hint

    def __dealloc__(self):
        free(self.at)

    cdef int let_go(self) except -1:
        """The engine's machines are its own again. No thread has the seat."""
        cdef uint32_t q
        for q in range(self.placers.count):
            self.at[q].M.final_hint = self.at[q].M.own_hint
        self.engine.placers = None
        return 0

    cdef uint32_t _queue(self, uint32_t stream) except? 0xffffffff:
        if stream >= self.placers.count:
            raise IndexError(f"stream {stream} of {self.placers.count}")
        return stream

    def look(self, uint32_t stream):
        """(packets of the engine consumed so far, is its next one blocked) of a stream."""
        cdef const fc_seat *s = &self.at[self._queue(stream)]
        cdef uint64_t consumed = fc_seat_consumed(s)
        return consumed, bool(fc_seat_blocked(s))

    def ring(self, uint32_t stream):
        """(place in a stream's ring before which the engine has taken all that is its; packets that wait there, of
        whatever job; how many the ring holds)."""
        cdef const fc_queue *q = &self.placers.queues[self._queue(stream)]
        cdef uint64_t passed = max(fc_seat_passed(q, &self.at[stream]), fc_ring_tail(q.ring))
        return passed, fc_ring_head(q.ring) - passed, q.ring.mask + 1

    def drained(self, uint32_t stream):
        """Nothing will follow, and all was taken."""
        cdef const fc_queue *q = &self.placers.queues[self._queue(stream)]
        return bool(fc_ring_closed(q.ring)) and fc_seat_passed(q, &self.at[stream]) == fc_ring_head(q.ring)

    def mark(self):
        """Where the rings end now: for `passed`."""
        cdef uint32_t q
        heads = []
        for q in range(self.placers.count):
            heads.append(fc_ring_head(self.placers.queues[q].ring))
        return heads

    def passed(self, mark):
        """Has the engine taken all that was in the rings then?"""
        cdef uint32_t q
        for q in range(self.placers.count):
            if fc_seat_passed(&self.placers.queues[q], &self.at[q]) < <uint64_t>mark[q]:
                return False
        return True

    def leave(self):
        """No thread touches the engine from now on. What was not taken is nobody's. Idempotent."""
        self.placers.detach(self)


cdef class Placers:
    """rings: addresses. threads: how many, each for every so-manieth ring; None: one for each. cores: of the threads, one
    for each, or none. A thread without one, or with None, is wherever the kernel puts it. Raises ValueError."""

    cdef fc_queue *queues
    cdef fc_service *services
    cdef uint64_t *before  # by queue: packets of engines that have left
    cdef readonly uint32_t count, n_threads
    cdef readonly tuple cores
    cdef list seats, threads
    cdef object writing  # one table at a time
    cdef bint running

    def __cinit__(self, rings, threads=None, cores=()):
        cdef uint32_t q
        cdef fc_service *service
        self.count, self.n_threads = len(rings), len(rings) if threads is None else threads
        self.cores, self.seats, self.threads, self.writing = tuple(cores), [], [], threading.Lock()
        if not 1 <= self.n_threads <= self.count <= FC_QUEUES:
            raise ValueError(f"{self.n_threads} threads for {self.count} rings: 1 to {FC_QUEUES}, and a ring for each thread")
        if self.cores and len(self.cores) != <Py_ssize_t>self.n_threads:
            raise ValueError(f"{len(self.cores)} cores for {self.n_threads} threads: one for each, or none")
        self.queues = <fc_queue *>zeroed(self.count, sizeof(fc_queue))
        self.services = <fc_service *>zeroed(self.n_threads, sizeof(fc_service))
        self.before = <uint64_t *>zeroed(self.count, sizeof(uint64_t))
        for q, ring in enumerate(rings):
            self.queues[q].ring = <fc_ring *><uintptr_t>ring
            self.queues[q].scan = self.queues[q].ring.tail
            self.queues[q].owners = <uint8_t *>zeroed(self.queues[q].ring.mask + 1, 1)
            self.queues[q].ahead = 1
            service = &self.services[q % self.n_threads]
            self.queues[q].final_hint = service.final_hint
            service.queues[service.n] = &self.queues[q]
            service.n += 1
        self._show([])

    def __dealloc__(self):
        cdef uint32_t q
        if self.queues != NULL:
            for q in range(self.count):
                free(self.queues[q].owners)
                fc_table_free(<fc_table *>self.queues[q].table)
        free(self.queues)
        free(self.services)
        free(self.before)

    # -- threads --

    def start(self):
        """Raises OSError for a core that no thread can be pinned to."""
        cdef uint32_t t
        self.running = True
        try:
            for t in range(self.n_threads):
                self.services[t].stop = 0
                began, failed = threading.Event(), []
                thread = threading.Thread(target=self._serve, args=(t, began, failed), name=f"fc-place {t}", daemon=True)
                thread.start()
                self.threads.append(thread)
                began.wait()
                if failed:
                    raise failed[0]
        except BaseException:
            self.stop()
            raise

    def _serve(self, uint32_t thread, began, list failed):
        """A method of ours, so that queues and seats live for as long as a thread that reads them."""
        try:
            if self.cores and self.cores[thread] is not None:
                os.sched_setaffinity(0, {self.cores[thread]})  # of this thread alone
        except OSError as error:
            failed.append(error)
            return
        finally:
            began.set()
        serve(<uintptr_t>&self.services[thread])

    def stop(self):
        """Join the threads. What they have not taken stays in the rings. Idempotent."""
        cdef uint32_t t
        for t in range(self.n_threads):
            fc_service_stop(&self.services[t])
        while self.threads:
            self.threads.pop().join()
        self.running = False

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    # -- engines --

    def attach(self, engine):
        """The engine's seat: packets that come from now on are looked up for it, too. Raises ValueError for an engine of
        other streams or threads, one that has a seat, or if there are too many."""
        config = engine.config
        if (config.streams, config.threads) != (self.count, self.n_threads):
            raise ValueError(
                f"an engine of {config.streams} streams and {config.threads} threads at {self.count} rings, which"
                f" {self.n_threads} threads read"
            )
        with self.writing:
            if engine.placers is not None:
                raise ValueError("the engine has a seat already: packets would come to it twice, from two threads")
            free_ones = sorted({*range(FC_SEATS)} - {seat.number for seat in self.seats})
            if not free_ones:
                raise ValueError(f"{FC_SEATS} engines are attached: there is no room for another")
            seat = Seat(self, engine, free_ones[0])
            engine.placers = self
            try:
                self._show([*self.seats, seat])
            except BaseException:
                seat.let_go()
                raise
        return seat

    def detach(self, Seat seat):
        cdef uint32_t q
        with self.writing:
            if seat in self.seats:
                self._show([one for one in self.seats if one is not seat])
                for q in range(self.count):
                    self.before[q] += fc_seat_consumed(&seat.at[q])
                seat.let_go()

    cdef int _show(self, list seats) except -1:
        """These seats from now on. Returns when no thread reads what was before."""
        cdef fc_seat *at[64]
        cdef fc_table *made[64]
        cdef const fc_table *before
        cdef uint32_t q, i, n = len(seats)
        cdef Seat seat
        for q in range(self.count):
            for i in range(n):
                seat = seats[i]
                at[i] = &seat.at[q]
            made[q] = fc_table_make(at, n)
            if made[q] == NULL:
                for i in range(q):
                    fc_table_free(made[i])
                raise MemoryError("a table of flows for placing threads")
        for q in range(self.count):
            before = self.queues[q].table
            fc_queue_show(&self.queues[q], made[q], self.running)
            with nogil:
                while not fc_queue_has(&self.queues[q], made[q]):
                    if not self.running:  # the threads could not be started after all
                        fc_queue_show(&self.queues[q], made[q], 0)
                    usleep(10)
            fc_table_free(<fc_table *>before)
        self.seats = seats
        return 0

    # -- what is said of the rings --

    cdef fc_queue *_at(self, uint32_t queue) except NULL:
        if queue >= self.count:
            raise IndexError(f"ring {queue} of {self.count}")
        return &self.queues[queue]

    def strangers(self, uint32_t queue):
        """{outcome name: (packets, bytes)} of packets that no engine has claimed, as Engine.outcomes says it."""
        cdef const fc_outcome_count *counts = self._at(queue).strangers.counts
        cdef int i
        out = {}
        for i in range(FC_OUTCOMES):
            out[OUTCOMES[i]] = (counts[i].packets, counts[i].bytes)
        return out

    def claimed(self, uint32_t queue):
        """Packets that engines have taken, those that have left included. A packet of two engines counts twice."""
        cdef uint64_t sum
        cdef Seat seat
        self._at(queue)
        with self.writing:
            sum = self.before[queue]
            for seat in self.seats:
                sum += fc_seat_consumed(&seat.at[queue])
        return sum

    def encapsulated(self):
        """{what: packets} of outcome "encapsulated", all rings together: tunnels that are not unpacked."""
        cdef uint32_t q
        cdef int i
        found = {}
        for q in range(self.count):
            for i in range(1, FC_REFUSALS):
                if self.queues[q].strangers.refused[i]:
                    what = REFUSAL_NAMES[i]
                    found[what] = found.get(what, 0) + self.queues[q].strangers.refused[i]
        return found
