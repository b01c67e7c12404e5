"""The progress engine of softroce for Python: sr_engine.h says what is legal when; nothing here holds the GIL while
it waits. One Engine per fabric address; see nic.py for who makes it."""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

cdef extern from "sr_engine.h" nogil:
    enum:
        SR_MAX_QPS
        SR_MAX_FAN
        SR_PROTOCOLS
        SR_TEXT
    struct sr_cts_form:
        uint32_t bytes, size_at, size_width, rkey_at, nreqs_at, tag_at, idx_at
    struct sr_settings:
        uint32_t mtu, qps, split_on_qps, adaptive_routing, ar_threshold, big_endian_imm
        uint32_t slot[4]
        sr_cts_form cts
        uint64_t peer_timeout_ns
    struct sr_primitive:
        uint64_t input
    struct sr_use:
        int32_t connection
    struct sr_part:
        int32_t lane
    struct sr_plan:
        const sr_primitive *primitives
        const sr_use *uses
        const sr_part *parts
        uint32_t part_count, protocol, dtype, steps, round_to, posted
    struct sr_side:
        uint32_t qpns[8]
        uint64_t fifo
        uint32_t fifo_rkey
    struct sr_counters:
        uint64_t sent, received, retransmitted, timeouts, naks_sent, naks_received, damaged, duplicates
        uint64_t out_of_order, strangers
    struct sr_engine:
        pass
    int sr_open(sr_engine *, int, uint32_t, const uint8_t *, uint8_t, uint32_t, uint64_t, uint32_t)
    int sr_communicator(sr_engine *, const sr_settings *)
    int sr_connection(sr_engine *, int, int, uint32_t, uint32_t, uint32_t, sr_side *)
    void sr_connect(sr_engine *, int, const sr_side *, uint32_t, const uint8_t *)
    int sr_lane(sr_engine *)
    uint64_t sr_submit(sr_engine *, int, const sr_plan *, const void *, void *)
    uint64_t sr_finished(sr_engine *, char *)
    int sr_drain(sr_engine *, int, uint64_t)
    void sr_abort(sr_engine *, int, const char *)
    void sr_stop(sr_engine *)
    void sr_close(sr_engine *)
    sr_counters sr_counted(sr_engine *)
    uint32_t sr_wire_bytes(int, uint32_t)
    void sr_encode(int, uint8_t *, const uint8_t *, uint32_t, uint64_t)
    int sr_decode(int, uint8_t *, const uint8_t *, uint32_t, uint64_t)
    void sr_add(int, uint8_t *, const uint8_t *, const uint8_t *, uint64_t)

MAX_QPS = SR_MAX_QPS
MAX_FAN = SR_MAX_FAN

# The C structs as numpy sees them; checked against sizeof when the module is loaded.
PRIMITIVE = np.dtype([
    ("input", "<u8"), ("output", "<u8"), ("bytes", "<u4"), ("flags", "<u4"), ("receive", "<i4", SR_MAX_FAN),
    ("send", "<i4", SR_MAX_FAN),
])
USE = np.dtype([("connection", "<i4"), ("messages", "<u4")])
PART = np.dtype([
    ("lane", "<i4"), ("start", "<u4", 2), ("count", "<u4", 2), ("first_use", "<u4"), ("uses", "<u4"),
])
if (PRIMITIVE.itemsize, USE.itemsize, PART.itemsize) != (sizeof(sr_primitive), sizeof(sr_use), sizeof(sr_part)):
    raise ImportError("softroce: the plan's arrays do not have the layout of sr_engine.h")


def encode(int protocol, const uint8_t[::1] data, uint64_t step):
    """Message of `data` in a protocol's number, as bytes."""
    cdef uint32_t length = sr_wire_bytes(protocol, <uint32_t>data.shape[0])
    out = np.zeros(length, np.uint8)
    cdef uint8_t[::1] view = out
    if length:
        sr_encode(protocol, &view[0], &data[0], <uint32_t>data.shape[0], step)
    return out.tobytes()


def decode(int protocol, const uint8_t[::1] wire, uint32_t count, uint64_t step):
    """The first `count` data bytes of a message. Raises ValueError if a flag is not that of the step."""
    if sr_wire_bytes(protocol, count) > wire.shape[0]:
        raise ValueError("the message is shorter than that")
    out = np.zeros(count, np.uint8)
    cdef uint8_t[::1] view = out
    if count and sr_decode(protocol, &view[0], &wire[0], count, step):
        raise ValueError("a line's flag is not that of the step")
    return out.tobytes()


def add(int dtype, const uint8_t[::1] a, const uint8_t[::1] b):
    """Sum of two arrays of the same elements, as bytes."""
    if a.shape[0] != b.shape[0]:
        raise ValueError("arrays of different sizes")
    out = np.zeros(a.shape[0], np.uint8)
    cdef uint8_t[::1] view = out
    if a.shape[0]:
        sr_add(dtype, &view[0], &a[0], &b[0], a.shape[0])
    return out.tobytes()


cdef class Plan:
    """An operation's primitives for the engine; keep it alive until the operation is finished."""

    cdef sr_plan plan
    cdef object _arrays

    def __init__(self, primitives, uses, parts, *, int protocol, int dtype, int steps, int round_to, uint32_t posted):
        cdef uint8_t[::1] p = _raw(primitives, PRIMITIVE)
        cdef uint8_t[::1] u = _raw(uses, USE)
        cdef uint8_t[::1] q = _raw(parts, PART)
        self._arrays = (primitives, uses, parts)
        self.plan.primitives = <const sr_primitive *>&p[0] if p.shape[0] else NULL
        self.plan.uses = <const sr_use *>&u[0] if u.shape[0] else NULL
        self.plan.parts = <const sr_part *>&q[0] if q.shape[0] else NULL
        self.plan.part_count = <uint32_t>len(parts)
        self.plan.protocol, self.plan.dtype = protocol, dtype
        self.plan.steps, self.plan.round_to, self.plan.posted = steps, round_to, posted


def _raw(array, dtype):
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"an array of {dtype} is needed")
    return array.view(np.uint8).reshape(-1)


cdef class Engine:
    """One address on the fabric. socket: file descriptor that the engine takes over. address: IPv4, 4 bytes.

    close() is the last call; until then any thread may use it, `finished` one at a time.
    """

    cdef sr_engine *_engine
    cdef bint _open

    def __init__(self, int socket, bytes address, bytes mac, *, int traffic_class, uint32_t window,
                 uint64_t retransmit_ns, uint32_t seed):
        cdef uint32_t place
        if len(address) != 4 or len(mac) != 6:
            raise ValueError("address of 4 bytes, mac of 6")
        memcpy(&place, <const char *>address, 4)
        self._engine = <sr_engine *>PyMem_Malloc(sizeof(sr_engine))
        if self._engine == NULL:
            raise MemoryError
        self._open = True
        if sr_open(self._engine, socket, place, <const uint8_t *><const char *>mac, traffic_class, window,
                   retransmit_ns, seed):
            self.close()
            raise MemoryError("softroce: no memory or no thread for the engine")

    def __dealloc__(self):
        self._shut()

    cdef void _shut(self):
        if self._open:
            self._open = False
            with nogil:
                sr_close(self._engine)
        PyMem_Free(self._engine)
        self._engine = NULL

    cdef int _check(self) except -1:
        if not self._open:
            raise RuntimeError("softroce: the engine is closed")
        return 0

    def communicator(self, *, mtu, qps, split_on_qps, adaptive_routing, ar_threshold, big_endian_imm, slots, cts,
                     peer_timeout_ns):
        """Settings of sr_settings; slots: bytes of a step for LL, LL128, SIMPLE, P2P; cts: sr_cts_form's fields."""
        cdef sr_settings s
        self._check()
        memset(&s, 0, sizeof(s))
        s.mtu, s.qps, s.split_on_qps, s.adaptive_routing = mtu, qps, split_on_qps, adaptive_routing
        s.ar_threshold, s.big_endian_imm, s.peer_timeout_ns = ar_threshold, big_endian_imm, peer_timeout_ns
        for i in range(SR_PROTOCOLS):
            s.slot[i] = slots[i]
        s.cts.bytes, s.cts.size_at, s.cts.size_width, s.cts.rkey_at = cts[:4]
        s.cts.nreqs_at, s.cts.tag_at, s.cts.idx_at = cts[4:]
        return self._number(sr_communicator(self._engine, &s))

    def connection(self, int communicator, bint outbound, uint32_t sender, uint32_t receiver, uint32_t channel,
                   int qps):
        """(number, QP numbers, FIFO address, FIFO rkey) of a new connection's local half."""
        cdef sr_side side
        self._check()
        number = self._number(
            sr_connection(self._engine, communicator, outbound, sender, receiver, channel, &side))
        return number, [side.qpns[i] for i in range(qps)], side.fifo, side.fifo_rkey

    def connect(self, int connection, qpns, uint64_t fifo, uint32_t rkey, bytes address, bytes mac):
        """The peer's half of a connection."""
        cdef sr_side side
        cdef uint32_t place
        self._check()
        if len(address) != 4 or len(mac) != 6 or len(qpns) > SR_MAX_QPS:
            raise ValueError("address of 4 bytes, mac of 6, at most 8 QPs")
        memset(&side, 0, sizeof(side))
        for i, qpn in enumerate(qpns):
            side.qpns[i] = qpn
        side.fifo, side.fifo_rkey = fifo, rkey
        memcpy(&place, <const char *>address, 4)
        sr_connect(self._engine, connection, &side, place, <const uint8_t *><const char *>mac)

    def lane(self):
        """Number of a new queue of operations."""
        self._check()
        return self._number(sr_lane(self._engine))

    def submit(self, int communicator, Plan plan, size_t source, size_t target):
        """Start an operation on memory at two addresses; its number."""
        cdef uint64_t number
        self._check()
        with nogil:
            number = sr_submit(self._engine, communicator, &plan.plan, <const void *>source, <void *>target)
        if not number:
            raise MemoryError
        return number

    def finished(self):
        """Wait for the next finished operation: (number, "" or why it failed); None when the engine stops."""
        cdef char error[240]
        cdef uint64_t number
        self._check()
        with nogil:
            number = sr_finished(self._engine, error)
        return (number, error.decode("utf-8", "replace")) if number else None

    def drain(self, int communicator, uint64_t limit_ns):
        """Wait until the peers have acknowledged everything; False if they have not in time."""
        cdef int left
        self._check()
        with nogil:
            left = sr_drain(self._engine, communicator, limit_ns)
        return left == 0

    def abort(self, int communicator, str why):
        """Fail every operation of a communicator, now and later."""
        cdef bytes text = why.encode()
        self._check()
        sr_abort(self._engine, communicator, text)

    def stop(self):
        """End the thread; `finished` returns None."""
        if self._open:
            with nogil:
                sr_stop(self._engine)

    def close(self):
        if self._open:
            self._open = False
            with nogil:
                sr_close(self._engine)

    def counters(self):
        """Packets since the beginning, by what happened to them."""
        cdef sr_counters c
        self._check()
        c = sr_counted(self._engine)
        return {
            "sent": c.sent, "received": c.received, "retransmitted": c.retransmitted, "timeouts": c.timeouts,
            "naks_sent": c.naks_sent, "naks_received": c.naks_received, "damaged": c.damaged,
            "duplicates": c.duplicates, "out_of_order": c.out_of_order, "strangers": c.strangers,
        }

    cdef _number(self, int number):
        if number < 0:
            raise MemoryError
        return number
