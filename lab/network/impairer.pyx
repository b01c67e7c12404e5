"""The impairer's loop (src/impairer.c) for Python: `carry` runs until a signal says stop. impair.py is the way to use it.

One call per process, in the main thread. Everything is allocated before the first packet.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

import os
import signal


cdef extern from "impairer.h" nogil:
    ctypedef struct fc_impair_counts:
        uint64_t received, sent, dropped, doubled, moved, damaged, down, lost
    ctypedef struct fc_impair_way:
        uint8_t index, trace
        unsigned short distance
        uint32_t drop, duplicate, reorder, corrupt
        uint64_t state
        const uint8_t *down
        fc_impair_counts counts
    int fc_impair_open(fc_impair_way *way, const char *source, const char *target)
    void fc_impair_close(fc_impair_way *way)
    int fc_impair_run(fc_impair_way *ways, int count, int log, const int *stop)

cdef extern from "<signal.h>" nogil:
    ctypedef void (*handler_t)(int) noexcept nogil
    handler_t c_signal "signal"(int number, handler_t handler)


cdef int _stop = 0


cdef void _on_signal(int number) noexcept nogil:
    global _stop
    _stop = 1


cdef uint32_t _share(rate) except? 1:
    return <uint32_t>(float(rate) * 0xffffffff)


def carry(list ways, int log, const uint8_t[::1] down, ready):
    """Carry packets until SIGTERM or SIGINT; returns one dict of counters per way.

    ways: dicts with source, target (interface names), drop, duplicate, reorder, corrupt (0 to 1), distance, seed,
    trace. log: file descriptor for 32-byte records. down: one byte per way, shared with whoever cuts the wire. ready:
    called when the sockets are open. Raises OSError naming the interfaces.
    """
    cdef int n = len(ways), opened = 0, status
    cdef fc_impair_way *all_ways
    if down.shape[0] < n:
        raise ValueError(f"{down.shape[0]} switches for {n} ways")
    all_ways = <fc_impair_way *>PyMem_Malloc(n * sizeof(fc_impair_way))
    if all_ways == NULL:
        raise MemoryError
    memset(all_ways, 0, n * sizeof(fc_impair_way))
    try:
        for i, way in enumerate(ways):
            all_ways[i].index = i
            all_ways[i].trace = bool(way["trace"])
            all_ways[i].distance = way["distance"]
            all_ways[i].drop = _share(way["drop"])
            all_ways[i].duplicate = _share(way["duplicate"])
            all_ways[i].reorder = _share(way["reorder"])
            all_ways[i].corrupt = _share(way["corrupt"])
            all_ways[i].state = <uint64_t>way["seed"]
            all_ways[i].down = &down[i]
            status = fc_impair_open(&all_ways[i], way["source"].encode(), way["target"].encode())
            if status:
                raise OSError(-status, os.strerror(-status), f"{way['source']}, {way['target']}")
            opened += 1
        # Python's own handlers run between bytecodes, of which the loop has none.
        c_signal(signal.SIGTERM, _on_signal)
        c_signal(signal.SIGINT, _on_signal)
        ready()
        with nogil:
            status = fc_impair_run(all_ways, n, log, &_stop)
        if status:
            raise OSError(-status, os.strerror(-status), "the impairer's log")
        return [all_ways[i].counts for i in range(n)]
    finally:
        for i in range(opened):
            fc_impair_close(&all_ways[i])
        PyMem_Free(all_ways)
