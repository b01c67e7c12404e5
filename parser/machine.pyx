"""The packet-counting state machine, from Python: one job's engine over captures. parser/include/machine.h has the model.

Call order: Engine(config); run() per stream until drained; past(), close(), retire() as iterations close; finish() once
at the end; read results with the accessors. Garbage collection frees the memory.
Thread rule: one thread is in charge and calls everything. Packets may be taken by config.threads others, each for its own
streams (stream modulo threads): by run() or parser.placers, without the GIL. They go on while anything else here is called,
but finish() and feed(). What is read of an iteration then is as of some moment, and final once close() has returned.
"""


import numpy as np

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from parser.cts cimport cts_fill
from parser.packetref cimport fc_ring_at, fc_ring_closed, fc_ring_drained, fc_ring_peek
from parser.roce cimport (
    FC_RC_WRITE_FIRST, FC_RC_WRITE_ONLY_IMM, FC_REFUSALS, FC_ROCE, fc_icrc_all, fc_icrc_choose, fc_icrc_ok, fc_roce,
    fc_roce_decode,
)

from parser.arenas cimport Arenas
from parser.schedule cimport zeroed

from parser.flow_table import FLOW
from parser.nccl import CTS_ELEMENTS
from parser.names import DISAGREEMENTS, HOPES, OUTCOMES, POSITIONS, TRUSTS
from parser.roce import REFUSAL_NAMES


cdef extern from "serve.h" nogil:
    ctypedef struct fc_service:
        pass
    void fc_serve(fc_service *service)


cdef extern from "place.h" nogil:
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


cdef int64_t ALWAYS = <int64_t>1 << 62  # the end of iterations that a flow ignores until it is trusted again
NOTHING_SEEN = FC_NOTHING_SEEN  # what Engine.past() says of a stream that has brought no data of the job


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
    """From now on every engine places packets of a protocol (parser.chunk_layout.Protocol) in this way, all of which
    give the same bytes. Before engines run. See flowcheck.rebuild.calibration."""
    names = [fc_way_names[i].decode() for i in range(FC_WAYS)]
    if way not in names or not 0 <= protocol <= 2:
        raise ValueError(f"protocol {protocol}, way {way!r}: 0 to 2 and {', '.join(names)} are possible")
    fc_place_choose(protocol, names.index(way), ahead)


def serve(uintptr_t service):
    """Be a placing thread until it is stopped: parser.placers, which made the service."""
    with nogil:
        fc_serve(<fc_service *>service)


cdef str _state(const fc_flow *f):
    """UNSEEN, MID_STREAM, COUNTED, ANCHORED (a witness agreed with the count), ADRIFT, ON_TRIAL or LOST."""
    if f.trust != FC_TRUSTED:
        return "ON_TRIAL" if f.trust == FC_ON_TRIAL else "LOST"
    return "ANCHORED" if f.position == FC_COUNTED and f.first_anchor else POSITIONS[f.position]


cdef class Engine(Arenas):
    """One job's state machine over `config.streams` captures. See the module docstring for call order.

    config: parser.engine_config.EngineConfig. Raises ValueError for a config that contradicts itself.
    """

    cdef fc_shared shared
    cdef tuple elements         # forms of the clear-to-send element: the job's, then the others
    cdef public object placers  # of parser.placers, while the engine has a seat there: machines point into their memory

    def __cinit__(self, config):
        cdef uint32_t t, o
        if not 256 <= config.mtu <= FC_SIDE_BYTES:
            raise ValueError(f"MTU {config.mtu} is not between 256 and {FC_SIDE_BYTES}")
        self.elements = tuple(dict.fromkeys((config.cts, *CTS_ELEMENTS)))
        self.shared.first = -1
        self.machines = <fc_machine **>zeroed(config.threads, sizeof(fc_machine *))
        for t in range(config.threads):
            self.machines[t] = <fc_machine *>zeroed(1, sizeof(fc_machine))
            self._build(self.machines[t], t)
        for t in range(config.threads):
            self.machines[t].others = <fc_machine **>zeroed(config.threads, sizeof(fc_machine *))
            for o in range(config.threads):
                if o != t:
                    self.machines[t].others[self.machines[t].n_others] = self.machines[o]
                    self.machines[t].n_others += 1

    cdef int _build(self, fc_machine *M, uint32_t thread) except -1:
        """All but what depends on the other threads."""
        cdef fc_flow *f
        cdef uint32_t i, s
        config, schedule = self.config, self.schedule
        M.mtu, M.flows, M.arenas = config.mtu, len(config.flows), config.arenas
        M.streams = len(range(thread, config.streams, config.threads))
        M.check_icrc, M.outage_ns, M.patience = config.check_icrc, config.outage_ns, config.patience
        M.cts_known = cts_fill(M.cts_elements, self.elements)
        M.begun = M.unlogged_last = M.missed_iteration = -1
        M.unlogged_first = INT64_MAX
        M.times = <fc_times *>zeroed(M.streams * FC_TIMES, sizeof(fc_times))
        for i in range(M.streams * <uint32_t>FC_TIMES):
            M.times[i].iteration = -2
        for s in range(M.streams):
            M.stands[s] = FC_NOTHING_SEEN
        M.shared, M.final_hint = &self.shared, M.own_hint
        M.edges, M.table, M.table_mask = schedule.edges, schedule.table, schedule.table_mask
        M.header_lines, M.places, M.cts_tables = schedule.header_lines, schedule.places, schedule.n_edges
        self.build_slots(M)
        M.states = <fc_flow *>zeroed(<size_t>M.streams * M.flows, sizeof(fc_flow))
        M.cts = <fc_cts_table *>zeroed(<size_t>M.streams * M.cts_tables, sizeof(fc_cts_table))
        partners = {(spec.edge, spec.qp): i for i, spec in enumerate(config.flows) if spec.data}
        for i, spec in enumerate(config.flows):
            for s in range(M.streams):
                f = &M.states[s * M.flows + i]
                f.edge, f.qp, f.cts, f.data = spec.edge, spec.qp, spec.edge, spec.data
                f.partner = -1 if spec.data else partners.get((spec.edge, spec.qp), -1)
                f.side_head = f.side_tail = f.iteration = -1
        M.side = <fc_side_packet *>calloc(FC_SIDE_PACKETS, sizeof(fc_side_packet))  # pages are taken as they are used
        if M.side == NULL:
            raise MemoryError(f"{FC_SIDE_PACKETS} packets that may be kept aside")
        M.side_free = -1
        M.counts = <fc_outcome_count *>zeroed(M.streams * FC_OUTCOMES, sizeof(fc_outcome_count))
        return 0

    def __dealloc__(self):
        cdef uint32_t t, i
        if self.machines == NULL:
            return
        for t in range(self.threads):
            M = self.machines[t]
            if M == NULL:
                continue
            for i in range(M.arenas + 1 if M.slots != NULL else 0):
                free(M.slots[i].places)
            for memory in (<uintptr_t>M.states, <uintptr_t>M.cts, <uintptr_t>M.slots, <uintptr_t>M.side,
                           <uintptr_t>M.counts, <uintptr_t>M.others, <uintptr_t>M.times, <uintptr_t>M):
                free(<void *><uintptr_t>memory)
        free(self.machines)

    cdef fc_machine *_of(self, uint32_t stream) except NULL:
        """The machine of the thread that serves a stream; there it is stream // threads."""
        if stream >= <uint32_t>self.config.streams:
            raise IndexError(f"stream {stream} of {self.config.streams}")
        return self.machines[stream % self.threads]

    # -- packets --

    def run(self, uint32_t stream, uintptr_t ring_address, int64_t limit):
        """Take at most `limit` packets from an fc_ring. Returns (packets consumed, blocked).

        blocked: the next packet belongs to an iteration that has no arena yet; retire() first.
        """
        cdef int64_t done
        cdef int blocked = 0
        M = self._of(stream)
        stream //= self.threads
        with nogil:
            done = fc_drive(M, stream, <fc_ring *>ring_address, limit, &blocked)
        return done, bool(blocked)

    def machine(self, uint32_t thread):
        """Address of a thread's machine, for parser.placers. It lives as long as the engine."""
        return <uintptr_t>self.machines[thread]

    def feed(self, uint32_t stream, const uint8_t[::1] frame):
        """One frame from memory: the same function that run() calls. False: blocked, not consumed."""
        cdef fc_packetref ref
        cdef int consumed
        M = self._of(stream)
        ref.data = &frame[0] if frame.shape[0] else NULL
        ref.length = <uint32_t>frame.shape[0]
        ref.stream = <uint16_t>stream
        ref.timestamp_ns = ref.flags = 0
        fc_take(&M.lock)
        consumed = fc_process(M, stream // self.threads, &ref)
        fc_end_burst(M)
        fc_give(&M.lock)
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
            if key == NULL or 0 < p.psn < FC_YOUNG or (self.config.check_icrc and not fc_icrc_ok(&p)):
                continue
            (old if p.psn else begun).add(<uintptr_t>key)
        if not begun - old:  # beside large ones PSN 0 is no beginning, but a wrap
            return False
        self.shared.from_start = 1
        return True

    cdef const fc_flow_key *_write_at(self, fc_ring *ring, uint64_t ahead, fc_roce *p) noexcept:
        """The data flow of a WRITE that lies ahead in a ring; NULL: something else."""
        cdef const fc_packetref *ref = fc_ring_at(ring, ahead)
        cdef const fc_flow_key *key
        if fc_roce_decode(ref.data, ref.length, p) != FC_ROCE or not FC_RC_WRITE_FIRST <= p.opcode <= FC_RC_WRITE_ONLY_IMM:
            return NULL
        key = fc_find_flow(self.machines[0], p.src, p.ip_version, p.dest_qp)
        return key if key != NULL and key.data else NULL

    def next_ns(self, uintptr_t ring_address):
        """When the next packet of a ring was captured, nanoseconds; None: none is there (yet)."""
        cdef fc_ring *ring = <fc_ring *>ring_address
        return fc_ring_at(ring, 0).timestamp_ns if fc_ring_peek(ring, 1) else None

    def waiting(self, uintptr_t ring_address):
        """(packets that wait in a ring, packets that it has room for)."""
        cdef fc_ring *ring = <fc_ring *>ring_address
        return fc_ring_peek(ring, ring.mask + 1), ring.mask + 1

    def drained(self, uintptr_t ring_address):
        return bool(fc_ring_drained(<fc_ring *>ring_address))

    # -- iterations --

    @property
    def disagreed(self):
        """How many disagreements there were."""
        return sum(self.machines[t].logged for t in range(self.threads))

    @property
    def oldest(self):
        """The oldest iteration that has not retired."""
        return max(self.machines[t].base_iteration for t in range(self.threads))

    @property
    def missed_iteration(self):
        """The oldest iteration that one stream brought after another, read first, had begun after it; -1: none."""
        missed = [self.machines[t].missed_iteration for t in range(self.threads)]
        return min((iteration for iteration in missed if iteration >= 0), default=-1)

    @property
    def begun(self):
        """Highest iteration of which a gradient packet was seen; -1: none."""
        return max(fc_begun(self.machines[t]) for t in range(self.threads))

    def past(self, uint32_t stream):
        """The iteration the slowest active flow of a stream works on: all before it are behind it. While a thread places, as
        it stood after an earlier burst: nobody waits for the lock here.

        A flow that is LOST or whose schedule has ended holds nothing up. -1: start-up traffic. NOTHING_SEEN: no data of
        the job has come there.
        """
        return fc_ask_past(self._of(stream), stream // self.threads)

    def hope(self, uint32_t stream, int64_t iteration):
        """May a stream, which is past the iteration, still bring something of it? parser.names.HOPES; hope.c has the rules."""
        cdef fc_hope found
        M = self._of(stream)
        fc_take(&M.lock)
        found = fc_hope_of(M, stream // self.threads, iteration)
        fc_give(&M.lock)
        return HOPES[<int>found]

    cdef inline fc_flow *_flow(self, uint32_t stream, uint32_t flow) noexcept:
        M = self.machines[stream % self.threads]
        return &M.states[stream // self.threads * M.flows + flow]

    def wanted(self, uint32_t stream):
        """The iteration that a blocked stream's next packet belongs to."""
        return self._of(stream).wanted[stream // self.threads]

    def close(self, int64_t count=1):
        """The oldest iterations get no more bytes: packets for them are late from now on."""
        cdef uint32_t t
        cdef int64_t end = self.oldest + count
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            fc_close_before(M, max(end, M.closed))
            fc_give(&M.lock)

    def retire(self, int64_t count=1):
        """Close the oldest iterations, and give their arenas to later ones. The bitmaps of those that retired before are
        cleared, piece by piece, while threads go on: what retires now still tells what its last messages were."""
        cdef uint32_t t
        cdef int64_t end = self.oldest + count
        cdef bint begun = self.begun >= 0
        self.close(count)
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            fc_retire_before(M, end)
            M.opened |= begun
            fc_give(&M.lock)
        self.let_bursts_end()  # nobody looks at what retired before any more
        for t in range(self.threads):
            self._clear(self.machines[t])
        self.twice = {iteration: n for iteration, n in self.twice.items() if iteration is None or iteration >= end}

    cdef int _clear(self, fc_machine *M) except -1:
        cdef int more = 1
        with nogil:
            while more:
                fc_take(&M.lock)
                more = fc_clear(M)
                fc_give(&M.lock)
        return 0

    def times(self, iteration):
        """When the first and the last packet of an iteration's gradients were captured that have come so far, nanoseconds
        since the epoch; None: none has come, it is FC_TIMES iterations ago, or the source has no clock. Between the packets
        that begin and end a message nobody looks at the clock."""
        found = [times for times in self.stream_times(iteration) if times is not None and times[0]]
        return (min(first for first, _ in found), max(last for _, last in found)) if found else None

    def stream_times(self, iteration):
        """The same for each stream; (0, 0): it brought packets without a time. None: it brought none of this iteration, or
        that is FC_TIMES iterations ago. iteration -1: of the parameters that the start-up brings."""
        cdef uint32_t t, s
        cdef uint64_t place = <uint64_t>(<int64_t>iteration + 1) % FC_TIMES
        cdef fc_times times
        out = [None] * self.config.streams
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            for s in range(M.streams):
                times = M.times[s * FC_TIMES + place]
                if times.iteration == iteration:
                    out[s * self.threads + t] = times.first_ns, times.last_ns
            fc_give(&M.lock)
        return out

    def flow_times(self, iteration):
        """For each stream (when the last of its flows began with an iteration's gradients, when the first of them ended),
        nanoseconds since the epoch, or None as in stream_times(). Costs a look at all flows."""
        cdef uint32_t t, s, i
        cdef uint64_t ends
        cdef fc_times times
        cdef fc_flow *f
        out = [None] * self.config.streams
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            for s in range(M.streams):
                times = M.times[s * FC_TIMES + <uint64_t>(<int64_t>iteration + 1) % FC_TIMES]
                if times.iteration == iteration:
                    ends = times.earliest_last_ns
                    for i in range(M.flows):
                        f = &M.states[s * M.flows + i]
                        if f.iteration == iteration and f.gradient_ns < ends:
                            ends = f.gradient_ns
                    out[s * self.threads + t] = times.latest_first_ns, ends
            fc_give(&M.lock)
        return out

    # -- overload --

    def give_up(self):
        """From the next boundary on packets are counted and not placed, and need no arena, until take_up(). Returns the
        first iteration that is given up: nothing of it has come. Those given up before must have retired."""
        return self._set_shed(-1)

    def take_up(self):
        """From the next boundary on packets are placed again. Returns the first such iteration."""
        return self._set_shed(self.machines[0].shed.first)

    cdef int64_t _set_shed(self, int64_t first):
        """All machines meet between two bursts, so none has begun the iteration that the others are told. first: of those
        given up, -1: they begin now."""
        cdef uint32_t t
        cdef int64_t boundary
        for t in range(self.threads):
            fc_take(&self.machines[t].lock)
        boundary = max(self.begun + 1, self.oldest)  # of an iteration that has retired nothing may have come
        for t in range(self.threads):
            self.machines[t].shed.first = boundary if first < 0 else first
            self.machines[t].shed.end = INT64_MAX if first < 0 else boundary
        for t in range(self.threads):
            fc_give(&self.machines[t].lock)
        return boundary

    @property
    def given_up(self):
        """range of the iterations that are given up; without an end until take_up()."""
        return range(self.machines[0].shed.first, self.machines[0].shed.end)

    def reached(self, uint32_t stream):
        """The highest iteration of which a stream, or another one that its thread serves, has brought a gradient packet."""
        return self._of(stream).begun

    def forget(self):
        """Drop what is logged of closed iterations: a live engine has no last one at which all would be read."""
        cdef uint32_t t
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            fc_forget(M)
            fc_give(&M.lock)

    @property
    def unlogged(self):
        """range of iterations with disagreements that found no room in the log."""
        full = [t for t in range(self.threads) if self.machines[t].unlogged_last >= 0]
        if not full:
            return range(0)
        return range(min(self.machines[t].unlogged_first for t in full),
                     max(self.machines[t].unlogged_last for t in full) + 1)

    def consider_recovery(self):
        """Decide for flows that became LOST since whether they may ever be trusted again: see fc_recover(). Costs one
        walk over an iteration's messages for each."""
        cdef uint32_t s, i
        cdef fc_flow *f
        for s in range(self.config.streams):
            for i in range(self.machines[0].flows):
                f = self._flow(s, i)
                if f.trust == FC_LOST and f.rotations == 0:
                    f.rotations = 2 if self.schedule.unlike_rotations(f.edge, f.qp) else 1  # one byte: no lock

    def finish(self):
        """No more packets: give up what is aside, count the PSNs that never came."""
        cdef uint32_t s, i
        cdef fc_flow *f
        for s in range(self.config.streams):
            for i in range(self.machines[0].flows):
                f = self._flow(s, i)
                fc_settle_aside(self._of(s), s // self.threads, f, 0)
                if f.active:
                    f.missing += fc_unseen(f)
                    memset(f.seen, 0xff, 8 * FC_SEEN_WORDS)

    # -- results --

    def outcomes(self, uint32_t stream):
        """{outcome name: (packets, bytes)}; the packets add up to what run() consumed."""
        cdef const fc_outcome_count *counts = &self._of(stream).counts[stream // self.threads * FC_OUTCOMES]
        return {name: (counts[i].packets, counts[i].bytes) for i, name in enumerate(OUTCOMES)}

    def encapsulated(self):
        """{what: packets} of outcome "encapsulated", all streams together: tunnels that are not unpacked."""
        found = {
            REFUSAL_NAMES[i]: sum(self.machines[t].refused[i] for t in range(self.threads)) for i in range(1, FC_REFUSALS)
        }
        return {what: packets for what, packets in found.items() if packets}

    def flows(self):
        """What is known of every flow of every stream: parser.flow_table.FLOW array (streams, flows)."""
        cdef uint32_t s, i
        cdef fc_flow *f
        cdef int64_t[:, :, ::1] out
        table = np.zeros((self.config.streams, len(self.config.flows)), FLOW)
        out = table.view(np.int64).reshape(*table.shape, len(FLOW.names))
        for s in range(self.config.streams):
            M = self._of(s)
            fc_take(&M.lock)
            for i in range(M.flows):
                f = self._flow(s, i)
                out[s, i, 0], out[s, i, 1], out[s, i, 2] = f.packets, f.first_anchor > 0, f.trust == FC_TRUSTED
                out[s, i, 3] = f.position == FC_ADRIFT
                if f.disagreements:
                    out[s, i, 4] = f.lost_iteration
                    out[s, i, 5] = ALWAYS if f.trust != FC_TRUSTED else f.back_iteration
                if f.packets and f.data:
                    out[s, i, 6] = f.missing + fc_unseen(f)
                out[s, i, 7] = f.duplicates
            fc_give(&M.lock)
        return table

    def flow_counters(self, uint32_t stream):
        """One dict per flow of the config, in order: all counters, for reports."""
        cdef uint32_t i
        cdef fc_flow *f
        M = self._of(stream)
        out = []
        fc_take(&M.lock)
        try:
            for i in range(M.flows):
                f = self._flow(stream, i)
                out.append({
                    "seen": bool(f.active), "state": _state(f), "anchored": f.first_anchor > 0,
                    "ignored": self._ignored(f),
                    "adrift": f.position == FC_ADRIFT,  # lost in an outage, and not found again
                    "packets": f.packets, "payload_bytes": f.payload_bytes, "missing": f.missing,
                    "duplicates": f.duplicates, "retransmissions": f.retransmissions, "out_of_order": f.out_of_order,
                    "icrc_wrong": f.bad_icrc, "agreements": f.agreements, "disagreements": f.disagreements,
                    "first_psn": f.first_psn, "next_psn": f.next_psn,
                })
        finally:
            fc_give(&M.lock)
        return out

    def cts_tags(self):
        """{edge: the rank its receiver names as sender, in the numbering of NCCL's top communicator}, for
        edges whose CTS were seen and always said the same."""
        cdef uint32_t s, e
        cdef const fc_cts_table *table
        out = {}
        for s in range(self.config.streams):
            for e in range(self.schedule.n_edges):  # no lock: one word, and the byte that says that it is there
                table = &self._of(s).cts[s // self.threads * self.schedule.n_edges + e]
                if table.tagged == 1:
                    out[e] = table.tag
        return out

    def cts_forms(self):
        """{nccl.CtsElement: clear-to-send writes seen that can be read as it; a write may count for several}."""
        return {
            element: sum(self.machines[t].cts_forms[i] for t in range(self.threads))
            for i, element in enumerate(self.elements)
        }

    cdef object _ignored(self, fc_flow *f):
        """range of iterations that the flow, LOST, brought nothing to."""
        if f.disagreements == 0:
            return range(0)
        return range(f.lost_iteration, ALWAYS if f.trust != FC_TRUSTED else f.back_iteration)

    def disagreements(self):
        """The logged disagreements: dicts of kind, stream, flow, iteration, message, psn, expected, found."""
        cdef uint32_t t
        cdef uint64_t i, n
        cdef fc_log_entry entries[FC_LOG_ENTRIES]
        out = []
        for t in range(self.threads):
            M = self.machines[t]
            fc_take(&M.lock)
            n = M.kept
            memcpy(entries, M.log, n * sizeof(fc_log_entry))
            fc_give(&M.lock)
            for i in range(n):
                entry = &entries[i]
                out.append({
                    "kind": DISAGREEMENTS[entry.kind], "stream": entry.stream * self.threads + t, "flow": entry.flow,
                    "iteration": entry.iteration, "message": entry.number, "psn": entry.psn,
                    "expected": entry.expected, "found": entry.found,
                })
        return out

    def late_places(self):
        """What has come for gradients of iterations that were closed: (iteration, first region byte, bytes) of each
        packet, the first 8192 of each thread."""
        cdef uint32_t t
        cdef uint64_t i
        cdef const fc_loss *one
        out = []
        for t in range(self.threads):
            for i in range(min(self.machines[t].n_late, <uint64_t>FC_LATE_ENTRIES)):
                one = &self.machines[t].late[i]
                if one.target == FC_GRADIENT:
                    out.append((one.iteration, one.offset, one.bytes))
        return out

    def losses(self):
        """Places known to be missing: dicts of cause, target, iteration, offset, bytes (region bytes)."""
        cdef uint32_t t
        cdef uint64_t i
        out = []
        for t in range(self.threads):
            for i in range(min(self.machines[t].lost, <uint64_t>FC_LOSS_ENTRIES)):
                loss = &self.machines[t].losses[i]  # no lock: written before it is counted, and dropped by forget() alone
                out.append({"cause": OUTCOMES[loss.cause], "target": loss.target, "iteration": loss.iteration,
                            "offset": loss.offset, "bytes": loss.bytes})
        return out
