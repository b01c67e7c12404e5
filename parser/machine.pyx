"""The packet-counting state machine, from Python: one job's engine over captures. parser/include/machine.h has the model.

Call order: Engine(config); run() per stream until drained; past() / retire() between runs as
iterations close; finish() once at the end; read results with the accessors. Garbage collection frees the memory.
Thread rule: one thread at a time calls an engine. run() releases the GIL.
"""

import numpy as np

from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from parser.lane cimport FC_RING_ALLGATHER, FC_RING_REDUCESCATTER, lane_fill
from parser.roce cimport (
    FC_RC_WRITE_FIRST, FC_RC_WRITE_ONLY_IMM, FC_REFUSALS, FC_ROCE, fc_icrc_all, fc_icrc_choose, fc_icrc_ok, fc_roce,
    fc_roce_decode,
)

from parser.roce import REFUSAL_NAMES


cdef extern from "cover.h" nogil:
    uint64_t fc_cover_gaps(const uint64_t *cover, uint64_t *first, uint64_t end, int64_t (*out)[2], uint64_t room)


cdef extern from "place.h" nogil:
    void fc_place_fence()
    void fc_place_choose(int protocol, int way, uint32_t ahead)
    enum:
        FC_WAYS
    ctypedef struct fc_place_kernels:
        const char *name
    ctypedef struct fc_place_choice:
        const fc_place_kernels *kernels
        int way[3]
        uint32_t ahead[3]
    const char *fc_way_names[FC_WAYS]
    fc_place_choice fc_placing


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size)


#: What is known of a flow's position, and whether it is trusted: fc_position and fc_trust.
POSITIONS = ("UNSEEN", "MID_STREAM", "COUNTED", "ADRIFT")
TRUSTS = ("TRUSTED", "LOST", "ON_TRIAL", "LOST_FOR_GOOD")
OUTCOME_NAMES = (
    "placed", "compared", "released", "repeated", "control", "other_roce", "not_roce", "truncated", "malformed",
    "fragment", "icrc", "late", "stale", "unanchored", "not_synced", "beyond", "disagreed", "aside",
    "encapsulated",
)
DISAGREEMENT_NAMES = (
    "", "payload length", "opcode", "RETH length", "RETH address", "immediate", "flag", "CTS address",
    "extra message", "repeated chunk", "made anew",
)


def edges():
    """Legal changes of (position, trust): two sets of (from, to)."""
    return (
        {(a, b) for i, a in enumerate(POSITIONS) for j, b in enumerate(POSITIONS) if fc_position_edge(i, j)},
        {(a, b) for i, a in enumerate(TRUSTS) for j, b in enumerate(TRUSTS) if fc_trust_edge(i, j)},
    )


def placing():
    """(instructions, [(way, payload bytes fetched ahead) of LL, LL128 and SIMPLE]): how every engine places."""
    return fc_placing.kernels.name.decode(), [
        (fc_way_names[fc_placing.way[i]].decode(), fc_placing.ahead[i]) for i in range(3)
    ]


def icrc_kernels():
    """The ways to compute an ICRC that this processor has; the first is used, unless FLOWCHECK_SIMD takes a lesser one."""
    out = []
    cdef int i = 0
    while fc_icrc_all[i] != NULL:
        out.append(fc_icrc_all[i].decode())
        i += 1
    return out


def choose_icrc(str name):
    """From now on every engine computes ICRCs so. Before engines run; benchmarks and tests."""
    if not fc_icrc_choose(name.encode()):
        raise ValueError(f"{name!r} is no ICRC of this processor: {', '.join(icrc_kernels())}")


def choose_placing(int protocol, str way, uint32_t ahead):
    """From now on every engine places packets of a protocol (parser.wire.Protocol) in this way, all of which give the same
    bytes. Before engines run. See flowcheck.rebuild.calibration."""
    names = [fc_way_names[i].decode() for i in range(FC_WAYS)]
    if way not in names or not 0 <= protocol <= 2:
        raise ValueError(f"protocol {protocol}, way {way!r}: 0 to 2 and {', '.join(names)} are possible")
    fc_place_choose(protocol, names.index(way), ahead)


cdef void *zeroed(size_t count, size_t size) except NULL:
    """Zeroed memory on a cache line."""
    cdef void *memory = NULL
    cdef size_t nbytes = max(<size_t>1, count) * size
    if posix_memalign(&memory, 64, nbytes) != 0:
        raise MemoryError(f"{count} x {size} bytes for the state machine")
    memset(memory, 0, nbytes)
    return memory


def _unlike_rotations(list items):
    """Is the sequence, read as a circle, different from every rotation of itself? (KMP: smallest period.)"""
    if not items:
        return False
    border = [0] * len(items)
    k = 0
    for i in range(1, len(items)):
        while k and items[i] != items[k]:
            k = border[k - 1]
        if items[i] == items[k]:
            k += 1
        border[i] = k
    period = len(items) - border[len(items) - 1]
    return len(items) % period != 0 or period == len(items)


def _aligned(size_t nbytes):
    """A zeroed uint8 array of nbytes beginning on a cache line."""
    raw = np.zeros(nbytes + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip:skip + nbytes]


cdef str _state(const fc_flow *f):
    """UNSEEN, MID_STREAM, COUNTED, ANCHORED (a witness agreed with the count), ADRIFT, ON_TRIAL or LOST."""
    if f.trust != FC_TRUSTED:
        return "ON_TRIAL" if f.trust == FC_ON_TRIAL else "LOST"
    return "ANCHORED" if f.position == FC_COUNTED and f.anchored else POSITIONS[f.position]


cdef class Engine:
    """One job's state machine over `config.streams` captures. See the module docstring for call order.

    config: parser.engine_config.EngineConfig. Raises ValueError for a config that contradicts itself.
    """

    cdef fc_machine *M
    cdef list arrays      # keeps the regions and bitmaps alive
    cdef list orders      # ring orders that lanes point to
    cdef readonly object config

    def __cinit__(self, config):
        cdef uint32_t i
        self.config = config
        self.arrays, self.orders = [], []
        self.M = <fc_machine *>zeroed(1, sizeof(fc_machine))
        M = self.M
        M.mtu, M.streams, M.flows, M.arenas = config.mtu, config.streams, len(config.flows), config.arenas
        M.check_icrc = config.check_icrc
        M.cts_index_at, M.cts_tag_at = config.cts_index_at, config.cts_tag_at
        M.begun = M.unlogged_last = M.missed_iteration = -1
        M.unlogged_first = INT64_MAX
        M.outage_ns = config.outage_ns
        if not 1 <= M.streams <= 64 or M.arenas < 2:
            raise ValueError(f"{M.streams} streams and {M.arenas} arenas: 1..64 and at least 2 are possible")
        if not 256 <= M.mtu <= FC_SIDE_BYTES:
            raise ValueError(f"MTU {M.mtu} is not between 256 and {FC_SIDE_BYTES}")
        M.region_bytes[FC_GRADIENT] = config.gradient_bytes
        M.region_bytes[FC_PARAMETERS] = config.parameter_bytes
        for target in (FC_GRADIENT, FC_PARAMETERS):
            M.words[target] = (<uint64_t>M.region_bytes[target] + 511) // 512 + 1
        M.slots = <fc_slot *>zeroed(M.arenas + 1, sizeof(fc_slot))
        for i in range(M.arenas + 1):
            target = FC_GRADIENT if i < M.arenas else FC_PARAMETERS
            data = _aligned(M.region_bytes[target])
            cover = np.zeros(M.words[target], dtype=np.uint64)
            self.arrays += [(data, cover)]
            M.slots[i].data = <uint8_t *><uintptr_t>data.ctypes.data
            M.slots[i].cover = <uint64_t *><uintptr_t>cover.ctypes.data
            M.slots[i].iteration = -1
        self._build_edges()
        self._build_flows()
        M.side = <fc_side_packet *>zeroed(FC_SIDE_PACKETS, sizeof(fc_side_packet))
        for i in range(FC_SIDE_PACKETS):
            M.side[i].next = <int32_t>i + 1 if i + 1 < FC_SIDE_PACKETS else -1
        M.counts = <fc_outcome_count *>zeroed(M.streams * FC_OUTCOMES, sizeof(fc_outcome_count))

    def _build_edges(self):
        cdef fc_edge *e
        cdef fc_call *call
        cdef size_t i, c
        cdef uintptr_t order
        M = self.M
        M.cts_tables = len(self.config.edges)  # one table per edge
        M.edges = <fc_edge *>zeroed(M.cts_tables, sizeof(fc_edge))
        known = {}
        for i, spec in enumerate(self.config.edges):
            e = &M.edges[i]
            if not 1 <= spec.used <= spec.qps:
                raise ValueError(f"edge {i}: messages over {spec.used} of {spec.qps} QPs")
            e.qps, e.used = spec.qps, spec.used
            e.ar_above = UINT32_MAX if spec.ar_above is None else spec.ar_above
            e.imm_big_endian = spec.imm_big_endian
            e.ncalls = len(spec.calls)
            e.steady = e.ncalls
            e.calls = <fc_call *>zeroed(e.ncalls, sizeof(fc_call))
            for c, item in enumerate(spec.calls):
                call = &e.calls[c]
                call.phase, call.target, call.base = int(item.phase), int(item.target), item.base
                if call.phase == 3 and e.steady == e.ncalls:
                    e.steady = c
                if item.lane is None or item.lane.messages == 0:
                    continue
                if item.lane.order not in known:
                    known[item.lane.order] = np.array(item.lane.order, dtype=np.int32)
                order = known[item.lane.order].ctypes.data
                lane_fill(&call.lane, item.lane, <const int32_t *>order)
                call.has_lane = 1
                self._check_region(item)
        self.orders = list(known.values())

    def _check_region(self, item):
        """Every final byte of a call must lie inside its region: checked here once, not per packet."""
        if item.target == FC_NOTHING:
            return
        if item.base % 8:
            raise ValueError(f"a call's tensor begins at byte {item.base}, not on a cell of 8 bytes")
        end = max(segment.limit for segment in item.lane.segments) * item.lane.elem_bytes
        if item.lane.kind in (FC_RING_ALLGATHER, FC_RING_REDUCESCATTER):  # segments are of one rank's block
            end += (item.lane.ranks - 1) * item.lane.block * item.lane.elem_bytes
        if item.base < 0 or item.base + end > self.M.region_bytes[<int>item.target]:
            raise ValueError(f"a call ends at byte {item.base + end} of a region of {self.M.region_bytes[<int>item.target]}")

    def _build_flows(self):
        cdef fc_flow *f
        cdef fc_flow_key key
        cdef uint32_t s, size = 16
        cdef uint32_t version
        M = self.M
        while size < 4 * len(self.config.flows):
            size *= 2
        M.table_mask = size - 1
        M.table = <fc_flow_key *>zeroed(size, sizeof(fc_flow_key))
        M.states = <fc_flow *>zeroed(<size_t>M.streams * M.flows, sizeof(fc_flow))
        M.cts = <fc_cts_table *>zeroed(<size_t>M.streams * M.cts_tables, sizeof(fc_cts_table))
        for number, spec in enumerate(self.config.flows):
            if len(spec.src_addr) != len(spec.dst_addr) or len(spec.src_addr) not in (4, 16):
                raise ValueError(f"flow {number}: addresses of {len(spec.src_addr)} and {len(spec.dst_addr)} bytes")
            addresses = spec.src_addr + spec.dst_addr
            version = 4 if len(addresses) == 8 else 6
            memset(&key, 0, sizeof(key))
            memcpy(key.ends, <const uint8_t *>addresses, len(addresses))
            key.number = <uint64_t>spec.qpn | <uint64_t>version << 32
            key.data, key.flow = spec.data, number
            fc_enter_flow(M, &key)
            M.header_lines = max(M.header_lines, 1 if version == 4 else 2)
            for s in range(M.streams):
                f = &M.states[s * M.flows + number]
                f.edge, f.qp, f.cts = spec.edge, spec.qp, spec.edge
                f.side_head = f.side_tail = -1

    def __dealloc__(self):
        cdef uint32_t i
        M = self.M
        if M == NULL:
            return
        if M.edges != NULL:
            for i in range(M.cts_tables):
                free(M.edges[i].calls)
        for memory in (<uintptr_t>M.edges, <uintptr_t>M.table, <uintptr_t>M.states, <uintptr_t>M.cts,
                       <uintptr_t>M.slots, <uintptr_t>M.side, <uintptr_t>M.counts):
            free(<void *><uintptr_t>memory)
        free(M)

    # -- packets --

    def run(self, uint32_t stream, uintptr_t ring_address, int64_t limit):
        """Take at most `limit` packets from an fc_ring. Returns (packets consumed, blocked).

        blocked: the next packet belongs to an iteration that has no arena yet; retire() first.
        """
        cdef int64_t done
        cdef int blocked = 0
        self._stream(stream)
        with nogil:
            done = fc_drive(self.M, stream, <fc_ring *>ring_address, limit, &blocked)
        return done, bool(blocked)

    def feed(self, uint32_t stream, const uint8_t[::1] frame):
        """One frame from memory: the same function that run() calls. False: blocked, not consumed."""
        cdef fc_packetref ref
        cdef int consumed
        self._stream(stream)
        ref.data = &frame[0] if frame.shape[0] else NULL
        ref.length = <uint32_t>frame.shape[0]
        ref.stream = <uint16_t>stream
        ref.timestamp_ns = ref.flags = 0
        consumed = fc_process(self.M, stream, &ref)
        fc_place_fence()
        return bool(consumed)

    def look_ahead(self, uintptr_t ring_address, uint64_t count=4096):
        """Does one of the job's connections begin within the next `count` packets of a ring? Then every connection whose
        first packet is young counts from PSN 0, also where packets come in another order than they were sent. Nothing is
        consumed. None: so many are not there yet."""
        cdef fc_ring *ring = <fc_ring *>ring_address
        cdef int closed = fc_ring_closed(ring)
        cdef uint64_t i, n = fc_ring_peek(ring, count)
        cdef fc_roce p
        cdef const fc_flow_key *key
        cdef set begun = set(), old = set()  # flows that have PSN 0 here; one that is no young one
        if n < min(count, ring.mask + 1) and not closed:
            return None
        for i in range(n):
            key = self._write_at(ring, i, &p)
            if key == NULL or 0 < p.psn < FC_YOUNG or (self.M.check_icrc and not fc_icrc_ok(&p)):
                continue
            (old if p.psn else begun).add(<uintptr_t>key)
        if not begun - old:  # beside large ones PSN 0 is no beginning, but a wrap
            return False
        self.M.from_start = 1
        return True

    cdef const fc_flow_key *_write_at(self, fc_ring *ring, uint64_t ahead, fc_roce *p) noexcept:
        """The data flow of a WRITE that lies ahead in a ring; NULL: something else."""
        cdef const fc_packetref *ref = fc_ring_at(ring, ahead)
        cdef const fc_flow_key *key
        if fc_roce_decode(ref.data, ref.length, p) != FC_ROCE or not FC_RC_WRITE_FIRST <= p.opcode <= FC_RC_WRITE_ONLY_IMM:
            return NULL
        key = fc_find_flow(self.M, p.src, p.ip_version, p.dest_qp)
        return key if key != NULL and key.data else NULL

    def next_ns(self, uintptr_t ring_address):
        """When the next packet of a ring was captured, nanoseconds; None: none is there (yet)."""
        cdef fc_ring *ring = <fc_ring *>ring_address
        return fc_ring_at(ring, 0).timestamp_ns if fc_ring_peek(ring, 1) else None

    def drained(self, uintptr_t ring_address):
        return bool(fc_ring_drained(<fc_ring *>ring_address))

    # -- iterations --

    @property
    def disagreed(self):
        """How many disagreements there were."""
        return self.M.logged

    @property
    def oldest(self):
        """The oldest iteration still open."""
        return self.M.base_iteration

    @property
    def missed_iteration(self):
        """The oldest iteration that one stream brought after another, read first, had begun after it; -1: none."""
        return self.M.missed_iteration

    @property
    def begun(self):
        """Highest iteration of which a gradient packet was seen; -1: none."""
        return self.M.begun

    def past(self, uint32_t stream):
        """The iteration the slowest active flow of a stream works on: all before it are behind it.

        A flow that is LOST or whose schedule has ended holds nothing up. -1: no flow seen yet.
        """
        cdef fc_flow *f
        cdef fc_sent *m
        cdef int64_t slowest = INT64_MAX, n = 0
        cdef uint32_t i
        self._stream(stream)
        for i in range(self.M.flows):
            f = &self.M.states[stream * self.M.flows + i]
            if not f.active or not self.config.flows[i].data:
                continue
            n += 1
            if f.trust != FC_TRUSTED:
                continue
            m = fc_locate(self.M, f, f.next_psn)
            if m != NULL and m.iteration < slowest:
                slowest = m.iteration
        return slowest if n else -1

    def wanted(self, uint32_t stream):
        """The iteration that a blocked stream's next packet belongs to."""
        self._stream(stream)
        return self.M.wanted[stream]

    def retire(self, int64_t count=1):
        """Close the oldest iterations: their arenas are free for later ones, packets for them are late."""
        cdef uint32_t i
        self.M.base_iteration += count
        for i in range(self.M.streams * self.M.flows):
            self.M.states[i].track_end = 0  # their arenas are somebody else's soon

    def forget(self):
        """Drop what is logged of closed iterations: a live engine has no last one at which all would be read."""
        cdef uint64_t i, kept = 0
        M = self.M
        for i in range(M.kept):
            if M.log[i].iteration >= M.base_iteration:
                M.log[kept] = M.log[i]
                kept += 1
        M.kept, kept = kept, 0
        for i in range(min(M.lost, <uint64_t>FC_LOSS_ENTRIES)):
            if M.losses[i].target == FC_GRADIENT and M.losses[i].iteration >= M.base_iteration:
                M.losses[kept] = M.losses[i]
                kept += 1
        M.lost = kept
        if M.unlogged_last < M.base_iteration:
            M.unlogged_first, M.unlogged_last = INT64_MAX, -1

    @property
    def unlogged(self):
        """range of iterations with disagreements that found no room in the log."""
        if self.M.unlogged_last < 0:
            return range(0)
        return range(self.M.unlogged_first, self.M.unlogged_last + 1)

    def gaps(self, uint32_t stream):
        """PSNs of data that were skipped and have not come (so far), all flows of a stream together."""
        cdef fc_flow *f
        cdef uint64_t n = 0
        cdef uint32_t i
        self._stream(stream)
        for i in range(self.M.flows):
            f = &self.M.states[stream * self.M.flows + i]
            if f.packets and self.config.flows[i].data:
                n += f.missing + fc_unseen(f)
        return n

    def consider_recovery(self):
        """Decide for flows that became LOST since whether they may ever be trusted again: see recover().

        True is possible if the sizes of one steady iteration's messages, as a circle, are unlike every
        rotation of themselves. fc_call between runs; costs one walk over an iteration's messages per flow.
        """
        cdef uint32_t s, i
        cdef fc_flow *f
        for s in range(self.M.streams):
            for i in range(self.M.flows):
                f = &self.M.states[s * self.M.flows + i]
                if f.trust == FC_LOST and f.rotations == 0:
                    f.rotations = 2 if _unlike_rotations(self._steady_sizes(i)) else 1

    def _steady_sizes(self, uint32_t flow):
        """Sizes of the messages of one steady iteration on a flow, as bytes objects would be compared."""
        cdef fc_flow *f = &self.M.states[flow]
        cdef const fc_edge *e = &self.M.edges[f.edge]
        cdef fc_cursor c
        cdef fc_sent m
        memset(&c, 0, sizeof(fc_cursor))
        c.call, c.iteration = e.steady, 1
        sizes = []
        while e.steady < e.ncalls and fc_step_on(self.M, e, f.qp, &c, &m) and m.iteration == 1:
            sizes.append((m.size, m.total))
        return sizes

    def finish(self):
        """No more packets: give up what is aside, count the PSNs that never came."""
        cdef uint32_t s, i
        cdef fc_flow *f
        for s in range(self.M.streams):
            for i in range(self.M.flows):
                f = &self.M.states[s * self.M.flows + i]
                fc_settle_aside(self.M, s, f, 0, 0)
                if f.active:
                    f.missing += fc_unseen(f)
                    memset(f.seen, 0xff, 8 * FC_SEEN_WORDS)

    # -- results --

    def region(self, iteration=None):
        """uint8 array of an iteration's gradient region (None: of the parameters), not a copy."""
        return self.arrays[self._slot(iteration)][0]

    def covered(self, iteration=None):
        """How many cells of 8 bytes of an iteration (None: of the parameters) are there. Counted as they come: O(1)."""
        cdef int64_t i = self._slot(iteration)
        return self.M.slots[i].covered if self._holds(i, iteration) else 0

    def missing(self, iteration, int64_t first, int64_t end):
        """int64 array (n, 2): the runs [start, end) of cells within [first, end) that are not there, in order.

        Reads the bitmap by words: a region that is complete costs 16 MB of reading for each GB of it."""
        cdef int64_t i = self._slot(iteration)
        cdef int64_t room = 256
        cdef int64_t[:, ::1] out
        cdef uint64_t at = first, n
        if not 0 <= first <= end <= <int64_t>self.M.words[FC_PARAMETERS if iteration is None else FC_GRADIENT] * 64:
            raise IndexError(f"cells {first} to {end} are not all in the region")
        if not self._holds(i, iteration):
            return np.array([(first, end)] if first < end else [], dtype=np.int64).reshape(-1, 2)
        parts = []
        while at < <uint64_t>end or not parts:
            found = np.empty((room, 2), dtype=np.int64)
            out = found
            with nogil:
                n = fc_cover_gaps(self.M.slots[i].cover, &at, end, <int64_t (*)[2]>&out[0, 0], room)
            parts.append(found[:n])
            room = min(4 * room, 1 << 20)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def cells(self, iteration=None):
        """bool array, one per cell of the region: is it there? For tests and tools: a byte for every 8 of the region."""
        cdef int64_t i = self._slot(iteration)
        size = (self.M.region_bytes[FC_PARAMETERS if iteration is None else FC_GRADIENT] + 7) // 8
        if not self._holds(i, iteration):
            return np.zeros(size, dtype=bool)
        return np.unpackbits(self.arrays[i][1].view(np.uint8), bitorder="little", count=size).astype(bool)

    def copies(self, iteration=None):
        """(cells whose copies differed, region byte of the first such, bytes compared)."""
        cdef int64_t i = self._slot(iteration)
        if not self._holds(i, iteration):
            return 0, 0, 0
        return self.M.slots[i].copies_differ, self.M.slots[i].differ_offset, self.M.slots[i].compared_bytes

    def outcomes(self, uint32_t stream):
        """{outcome name: (packets, bytes)}; the packets add up to what run() consumed."""
        self._stream(stream)
        return {name: (self.M.counts[stream * FC_OUTCOMES + i].packets, self.M.counts[stream * FC_OUTCOMES + i].bytes)
                for i, name in enumerate(OUTCOME_NAMES)}

    def encapsulated(self):
        """{what: packets} of outcome "encapsulated", all streams together: tunnels that are not unpacked."""
        return {REFUSAL_NAMES[i]: self.M.refused[i] for i in range(1, FC_REFUSALS) if self.M.refused[i]}

    def flow_counters(self, uint32_t stream):
        """One dict per flow of the config, in order."""
        cdef uint32_t i
        cdef fc_flow *f
        self._stream(stream)
        out = []
        for i in range(self.M.flows):
            f = &self.M.states[stream * self.M.flows + i]
            out.append({
                "seen": bool(f.active), "state": _state(f), "anchored": bool(f.anchored),
                "ignored": self._ignored(f),
                "adrift": f.position == FC_ADRIFT,  # lost in an outage, and not found again
                "packets": f.packets, "payload_bytes": f.payload_bytes, "missing": f.missing,
                "duplicates": f.duplicates, "retransmissions": f.retransmissions, "out_of_order": f.out_of_order,
                "icrc_wrong": f.bad_icrc, "agreements": f.agreements, "disagreements": f.disagreements,
                "first_psn": f.first_psn, "next_psn": f.next_psn,
            })
        return out

    def cts_tags(self):
        """{edge: the rank its receiver names as sender, in the numbering of NCCL's top communicator}, for
        edges whose CTS were seen and always said the same."""
        cdef uint32_t s, e
        out = {}
        for s in range(self.M.streams):
            for e in range(self.M.cts_tables):
                if self.M.cts[s * self.M.cts_tables + e].tagged == 1:
                    out[e] = self.M.cts[s * self.M.cts_tables + e].tag
        return out

    def cts_forms(self):
        """{bytes of the element: clear-to-send writes seen}."""
        return {32: self.M.cts_forms[0], 64: self.M.cts_forms[1]}

    cdef object _ignored(self, fc_flow *f):
        """range of iterations that the flow, LOST, brought nothing to."""
        if f.disagreements == 0:
            return range(0)
        return range(f.lost_iteration, <int64_t>1 << 62 if f.trust != FC_TRUSTED else f.back_iteration)

    def disagreements(self):
        """The logged disagreements: dicts of kind, stream, flow, iteration, message, psn, expected, found."""
        cdef uint64_t i
        out = []
        for i in range(self.M.kept):
            entry = self.M.log[i]
            out.append({
                "kind": DISAGREEMENT_NAMES[entry.kind], "stream": entry.stream, "flow": entry.flow,
                "iteration": entry.iteration, "message": entry.number, "psn": entry.psn,
                "expected": entry.expected, "found": entry.found,
            })
        return out

    def losses(self):
        """Places known to be missing: dicts of cause, target, iteration, offset, bytes (region bytes)."""
        cdef uint64_t i
        return [
            {"cause": OUTCOME_NAMES[self.M.losses[i].cause], "target": self.M.losses[i].target,
             "iteration": self.M.losses[i].iteration, "offset": self.M.losses[i].offset, "bytes": self.M.losses[i].bytes}
            for i in range(min(self.M.lost, <uint64_t>FC_LOSS_ENTRIES))
        ]

    cdef int64_t _slot(self, iteration) except -1:
        return self.M.arenas if iteration is None else <int64_t>iteration % self.M.arenas

    cdef bint _holds(self, int64_t slot, iteration) noexcept:
        """Has anything of the iteration come? Before that its slot is still an older one's."""
        return iteration is None or self.M.slots[slot].iteration == iteration

    cdef int _stream(self, uint32_t stream) except -1:
        if stream >= self.M.streams:
            raise IndexError(f"stream {stream} of {self.M.streams}")
        return 0
