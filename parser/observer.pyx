"""What is in a stream of packets, with no job given: one look at every packet, in two levels of detail.

    ring -> see() -> decode
              |- counts:   each flow's sequence, messages, clear-to-send writes, marks in the payload, answers
              |            (counts.h), and what other traffic there is (othertraffic.h)
              `- messages: the start of each write (address, length, immediate, first bytes), and every TCP byte,
                           NCCL's bootstrap being plaintext; or the whole payload of the PSN ranges asked for

Observations only. What they mean is decided by parser.findings (counts) and by flowcheck.learning (messages), which
looks twice: first at the starts, then, when it is known which messages carry announcements, at their payload.

A packet whose ICRC is wrong is counted and otherwise ignored: the receiver dropped it too. Tables are bounded
(observer.pxd); what does not fit is counted (`dropped`, `unlisted`), so memory does not depend on hostile input. The
reader must treat a flow that dropped something as known only up to there.
Thread rule: one thread calls everything; drain() releases the GIL.
"""
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from parser.cts cimport FC_CTS_REQUESTS, cts_fill
from parser.packetref cimport FC_REF_TRUNCATED, fc_ring, fc_ring_at, fc_ring_drained, fc_ring_peek, fc_ring_release
from parser.roce cimport (
    FC_ENCAPSULATED, FC_NOT_ROCE, FC_RC_WRITE_FIRST, FC_RC_WRITE_LAST, FC_RC_WRITE_LAST_IMM, FC_RC_WRITE_MIDDLE,
    FC_RC_WRITE_ONLY_IMM, FC_ROCE, FC_TRUNCATED, FC_TUNNEL_STAMP, fc_icrc_ok, fc_roce_decode, fc_roce_hidden,
)

from parser.nccl import CTS_ELEMENTS
from parser.roce import REFUSAL_NAMES, STATUS_NAMES, TUNNEL_NAMES, address, opcode_name

__all__ = ["NOISE_NAMES", "START_DTYPE", "Observer"]

NAK_NAMES = ("sequence_error", "invalid_request", "remote_access_error", "remote_operational_error",
             "invalid_rd_request", "reserved")
#: Other traffic by kind, in the order of fc_other_kind (othertraffic.h).
NOISE_NAMES = (
    "arp", "ptp", "lldp", "flow_control", "roce_v1", "llc", "tcp", "icmp", "igmp", "icmpv6", "udp",
    "other_ipv4", "other_ipv6", "other_ethertype",
)
#: One message start, as numpy sees it (struct Start of observer.pxd).
START_DTYPE = np.dtype({
    "names": ["psn", "va", "ns", "flow", "rkey", "length", "imm", "payload", "opcode", "head"],
    "formats": ["<i8", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<u4", "u1", "V128"],
    "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 44, 48],
    "itemsize": sizeof(Start),
})


cdef void *roomier(Array *a, uint64_t more, uint64_t most, size_t size) noexcept nogil:
    """Room for `more` items of `size` bytes after those used, or NULL (then the array is as it was)."""
    cdef uint64_t larger = a.room if a.room else 1024
    cdef void *new
    if a.used + more > most:
        return NULL
    while larger < a.used + more:
        larger *= 2
    larger = min(larger, most)
    if larger > a.room:
        new = realloc(a.items, larger * size)
        if new == NULL:
            return NULL
        a.items = new
        a.room = larger
    return <uint8_t *>a.items + a.used * size


cdef uint32_t hash_of(const uint8_t *src, const uint8_t *dst, size_t width, uint32_t id, int tcp) noexcept nogil:
    cdef uint64_t h = (id + 1) * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>tcp
    cdef uint32_t word
    cdef size_t i
    for i in range(0, width, 4):
        memcpy(&word, src + i, 4)
        h = (h ^ word) * <uint64_t>0xFF51AFD7ED558CCD
        memcpy(&word, dst + i, 4)
        h = (h ^ h >> 29 ^ word) * <uint64_t>0xC4CEB9FE1A85EC53
    return <uint32_t>(h >> 32)


cdef class Observer:
    """Accumulates over any number of rings in one thread; results may be asked for at any time between drains.

    messages: keep message starts and TCP bytes (flow_list, start_records, tcp_segments, counters) in place of counts
    (report).
    requests: (source address, destination address, destination QP, first PSN, end PSN): packets of WRITEs whose
    unwrapped PSN is inside are kept whole (payloads), and nothing else is. At most 4096.
    """

    def __cinit__(self, messages: bool = False, requests=()):
        cdef uint32_t i
        self.messages = messages or bool(requests)
        self.n_elements = cts_fill(self.elements, CTS_ELEMENTS)
        self.table_mask = 4 * FLOWS_MAX - 1
        self.table = <uint32_t *>calloc(self.table_mask + 1, sizeof(uint32_t))
        requests = list(requests)
        if len(requests) > REQUESTS_MAX:
            raise ValueError(f"{len(requests)} ranges of payload, at most {REQUESTS_MAX}")
        self.requests = <PayloadRequest *>calloc(len(requests) + 1, sizeof(PayloadRequest))
        if self.table == NULL or self.requests == NULL:
            raise MemoryError("no memory for the observer's tables")
        for i, (src, dst, qpn, low, high) in enumerate(requests):
            if len(src) not in (4, 16) or len(src) != len(dst):
                raise ValueError("addresses have 4 or 16 bytes, both the same")
            memcpy(self.requests[i].src, <const uint8_t *>src, len(src))
            memcpy(self.requests[i].dst, <const uint8_t *>dst, len(dst))
            self.requests[i].dest_qp = qpn
            self.requests[i].low = low
            self.requests[i].high = high
        self.n_requests = len(requests)

    def __dealloc__(self):
        cdef Flow *flows = <Flow *>self.flows.items
        cdef uint64_t i
        for i in range(self.flows.used):
            if flows[i].counts != NULL:
                free(flows[i].counts.sequence.holes)
                free(flows[i].counts)
        free(self.flows.items)
        free(self.starts.items)
        free(self.pieces.items)
        free(self.pool.items)
        free(self.table)
        free(self.requests)

    cdef Flow *flow_of(self, const uint8_t *src, const uint8_t *dst, int version, uint32_t id, int tcp) noexcept nogil:
        """The flow of these ends, made at its first packet; NULL when there is no room."""
        cdef size_t width = 4 if version == 4 else 16
        cdef uint32_t at = hash_of(src, dst, width, id, tcp) & self.table_mask
        cdef fc_counts *counts = NULL
        cdef Flow *f
        while self.table[at]:
            f = <Flow *>self.flows.items + (self.table[at] - 1)
            if (f.id == id and f.tcp == tcp and f.ip_version == version and memcmp(f.src, src, width) == 0
                    and memcmp(f.dst, dst, width) == 0):
                return f
            at = (at + 1) & self.table_mask
        f = <Flow *>roomier(&self.flows, 1, FLOWS_MAX if self.messages else COUNTED_MAX, sizeof(Flow))
        if f == NULL:
            return NULL
        if not self.messages:
            counts = <fc_counts *>calloc(1, sizeof(fc_counts))
            if counts == NULL:
                return NULL
        memset(f, 0, sizeof(Flow))
        memcpy(f.src, src, width)
        memcpy(f.dst, dst, width)
        f.ip_version = version
        f.id = id
        f.tcp = tcp
        f.counts = counts
        self.flows.used += 1
        self.table[at] = <uint32_t>self.flows.used
        return f

    cdef void see(self, const fc_packetref *ref) noexcept nogil:
        cdef fc_roce p
        cdef int status = fc_roce_decode(ref.data, ref.length, &p)
        cdef bint cut = status == FC_TRUNCATED or ref.flags & FC_REF_TRUNCATED != 0
        if status == FC_NOT_ROCE and self.sort(ref):
            status = FC_ENCAPSULATED
            p.refusal = 0
        self.packets += 1
        self.status[status] += 1
        self.per_stream[ref.stream % FC_STREAMS_MAX] += 1
        self.cut += cut
        if status == FC_ENCAPSULATED:
            self.refused[p.refusal] += 1
        if not self.messages:
            self.count(ref, &p if status == FC_ROCE else NULL, status)
        elif cut:
            return
        elif status == FC_ROCE:
            self.collect(ref, &p)
        elif not self.n_requests:
            self.keep_segment(ref)

    cdef bint sort(self, const fc_packetref *ref) noexcept nogil:
        """Count a packet that is not RoCEv2 by what it is. True: it holds RoCEv2 behind something that has no name."""
        cdef fc_other found
        cdef int kind = fc_other_sort(ref.data, ref.length, &found)
        cdef uint64_t key
        if kind in (FC_OTHER_UDP, FC_OTHER_IP4, FC_OTHER_IP6, FC_OTHER_ETHERTYPE, FC_OTHER_LLC):
            key = <uint64_t>(
                1 if kind == FC_OTHER_UDP else 2 if kind in (FC_OTHER_IP4, FC_OTHER_IP6) else 0) << 32 | found.number
            if fc_roce_hidden(ref.data, ref.length):
                fc_tally_add(&self.hidden, key)
                return True
            if kind != FC_OTHER_LLC:
                fc_tally_add(&self.unknown, key)
        self.other[kind] += 1
        self.bootstrap += found.handshake
        self.cut_other += (ref.flags & FC_REF_TRUNCATED) != 0
        return False

    # -- counts -------------------------------------------------------------------------------------------

    cdef void count(self, const fc_packetref *ref, const fc_roce *p, int status) noexcept nogil:
        """p: NULL if the packet is not RoCEv2."""
        cdef Flow *f
        if ref.timestamp_ns:
            if self.first_ns == 0 or ref.timestamp_ns < self.first_ns:
                self.first_ns = ref.timestamp_ns
            self.last_ns = max(self.last_ns, ref.timestamp_ns)
        if p != NULL:
            f = self.flow_of(p.src, p.dst, p.ip_version, p.dest_qp, 0)
            if f == NULL:
                self.unlisted += 1
            else:
                fc_count_packet(f.counts, ref, p, self.elements, self.n_elements)
        elif status == FC_TRUNCATED:
            self.longest_cut = max(self.longest_cut, ref.length)

    # -- messages -----------------------------------------------------------------------------------------

    cdef void collect(self, const fc_packetref *ref, const fc_roce *p) noexcept nogil:
        """One packet of a WRITE: its start, or its payload if that was asked for."""
        cdef Flow *f
        cdef int64_t ahead, psn
        if p.opcode < FC_RC_WRITE_FIRST or p.opcode > FC_RC_WRITE_ONLY_IMM:
            return
        if not fc_icrc_ok(p):
            self.wrong_icrc += 1
            return
        f = self.flow_of(p.src, p.dst, p.ip_version, p.dest_qp, 0)
        if f == NULL:
            self.unlisted += 1
            return
        f.packets += 1
        if not f.seen:
            f.seen = 1
            f.next = p.psn
            f.sport = p.udp_sport
        ahead = fc_psn_distance(p.psn, f.next)
        psn = f.next + ahead
        if ahead >= 0:
            f.next = psn + 1
        f.max_payload = max(f.max_payload, p.payload_len)
        if self.n_requests:
            if self.wants(p, psn):
                self.keep_piece(f, psn, p.payload, p.payload_len, 0)
        elif p.opcode != FC_RC_WRITE_MIDDLE and p.opcode != FC_RC_WRITE_LAST:
            self.keep_start(f, ref, p, psn)

    cdef bint wants(self, const fc_roce *p, int64_t psn) noexcept nogil:
        cdef size_t width = 4 if p.ip_version == 4 else 16
        cdef const PayloadRequest *r
        cdef uint32_t i
        for i in range(self.n_requests):
            r = &self.requests[i]
            if (r.dest_qp == p.dest_qp and r.low <= psn < r.high and memcmp(r.src, p.src, width) == 0
                    and memcmp(r.dst, p.dst, width) == 0):
                return True
        return False

    cdef void keep_start(self, Flow *f, const fc_packetref *ref, const fc_roce *p, int64_t psn) noexcept nogil:
        cdef Start *start = NULL
        if f.starts < STARTS_PER_FLOW:
            start = <Start *>roomier(&self.starts, 1, STARTS_MAX, sizeof(Start))
        if start == NULL:
            f.dropped += 1
            return
        self.starts.used += 1
        f.starts += 1
        memset(start, 0, sizeof(Start))
        start.psn = psn
        start.timestamp_ns = ref.timestamp_ns
        start.flow = <uint32_t>(f - <Flow *>self.flows.items)
        start.opcode = p.opcode
        start.payload = p.payload_len
        if p.opcode != FC_RC_WRITE_LAST_IMM:
            start.va = p.va
            start.rkey = p.rkey
            start.length = p.dma_len
        if p.opcode == FC_RC_WRITE_LAST_IMM or p.opcode == FC_RC_WRITE_ONLY_IMM:
            start.imm = p.imm
        memcpy(start.head, p.payload, min(p.payload_len, <uint32_t>HEAD_BYTES))

    cdef void keep_segment(self, const fc_packetref *ref) noexcept nogil:
        cdef fc_tcp_part s
        cdef int encrypted
        cdef Flow *f
        if not fc_tcp_segment(ref.data, ref.length, &s, &encrypted):
            self.encrypted += encrypted
            return
        f = self.flow_of(s.src, s.dst, s.ip_version, s.ports, 1)
        if f == NULL:
            self.unlisted += 1
            return
        f.packets += 1
        if f.bytes + s.length > TCP_FLOW_BYTES:
            f.dropped += 1
        elif self.keep_piece(f, s.seq, s.payload, s.length, s.flags):
            f.bytes += s.length

    cdef bint keep_piece(self, Flow *f, int64_t at, const uint8_t *data, uint32_t length, uint32_t flags) noexcept nogil:
        """A copy of payload in the pool. False, and counted, if there is no room."""
        cdef Piece *piece = <Piece *>roomier(&self.pieces, 1, PIECES_MAX, sizeof(Piece))
        cdef void *copy = roomier(&self.pool, length, POOL_MAX, 1) if piece != NULL else NULL
        if copy == NULL:
            f.dropped += 1
            return False
        memcpy(copy, data, length)
        piece.at = at
        piece.offset = self.pool.used
        piece.flow = <uint32_t>(f - <Flow *>self.flows.items)
        piece.length = length
        piece.tcp_flags = flags
        self.pieces.used += 1
        self.pool.used += length
        return True

    # -- Python -------------------------------------------------------------------------------------------

    def add(self, frame: bytes, timestamp_ns: int = 0, wire_length: int | None = None, stream: int = 0) -> None:
        """One captured frame; `wire_length` if the capture cut it. The ring loop does exactly this."""
        cdef const uint8_t[::1] view = frame
        cdef fc_packetref ref
        ref.data = &view[0] if view.shape[0] else NULL
        ref.length = view.shape[0]
        ref.timestamp_ns = timestamp_ns
        ref.stream = stream
        ref.flags = FC_REF_TRUNCATED if wire_length is not None and wire_length > len(frame) else 0
        self.see(&ref)

    def drain(self, ring_address: int, limit: int = 65536) -> int:
        """Observe what the ring at this address holds now, about `limit` packets at most so that signals are
        seen, release it, return the packet count. Call until drained(ring_address). Consumer side of the
        ring (packetref.h)."""
        cdef fc_ring *ring = <fc_ring *><size_t>ring_address
        cdef uint64_t total = 0, most = limit, n, i
        with nogil:
            while total < most:
                n = fc_ring_peek(ring, 32)
                if n == 0:
                    break
                for i in range(n):
                    self.see(fc_ring_at(ring, i))
                fc_ring_release(ring, n)
                total += n
        return total

    @staticmethod
    def drained(ring_address: int) -> bool:
        """True when the producer has closed the ring and everything in it was observed."""
        return bool(fc_ring_drained(<fc_ring *><size_t>ring_address))

    def flow_list(self) -> list:
        """messages: every flow as a dictionary, in order of appearance; the number of a flow is its place here."""
        cdef uint64_t i
        cdef Flow *f
        out = []
        for i in range(self.flows.used):
            f = <Flow *>self.flows.items + i
            out.append({
                "tcp": bool(f.tcp), "src": _packed(f.src, f.ip_version), "dst": _packed(f.dst, f.ip_version),
                "id": f.id, "sport": f.sport, "packets": f.packets, "dropped": f.dropped,
                "max_payload": f.max_payload,
            })
        return out

    def start_records(self):
        """messages: all message starts in order of arrival: a numpy array of START_DTYPE (a copy)."""
        cdef uint64_t size = self.starts.used * sizeof(Start)
        return np.frombuffer(bytes((<const uint8_t *>self.starts.items)[:size]) if size else b"", START_DTYPE)

    def tcp_segments(self) -> list:
        """messages: (flow, sequence number, TCP flags, payload) in order of arrival."""
        return [(flow, at, flags, data) for flow, at, flags, data in self._pieces() if not self.n_requests]

    def payloads(self) -> list:
        """requests: (flow, PSN, payload) of every packet inside a range."""
        return [(flow, at, data) for flow, at, _flags, data in self._pieces() if self.n_requests]

    def _pieces(self) -> list:
        cdef const Piece *p = <const Piece *>self.pieces.items
        cdef const uint8_t *pool = <const uint8_t *>self.pool.items
        cdef uint64_t i
        return [
            (p[i].flow, p[i].at, p[i].tcp_flags, bytes((pool + p[i].offset)[:p[i].length]) if p[i].length else b"")
            for i in range(self.pieces.used)
        ]

    def counters(self) -> dict:
        """messages: packets: all. unlisted: of flows beyond the table. wrong_icrc (of writes), cut, cut_roce: ignored.
        encrypted: MACsec or ESP frames. encapsulated: {what: packets} of tunnels that are not unpacked."""
        return {"packets": self.packets, "unlisted": self.unlisted, "wrong_icrc": self.wrong_icrc, "cut": self.cut,
                "cut_roce": self.status[FC_TRUNCATED], "encrypted": self.encrypted, "encapsulated": self._refused()}

    def _refused(self) -> dict:
        named = {REFUSAL_NAMES[i]: self.refused[i] for i in range(1, FC_REFUSALS) if self.refused[i]}
        return {**named, **_numbers(&self.hidden)}

    def report(self) -> dict:
        """counts: observations as plain dictionaries, keys as in docs/use/inspect.md. Flows in order of appearance."""
        cdef uint64_t i
        cdef const Flow *flows = <const Flow *>self.flows.items
        if self.messages:
            raise ValueError("this observer keeps messages, not counts")
        return {
            "packets": {
                "total": self.packets,
                **{name: self.status[i] for i, name in enumerate(STATUS_NAMES)},
            },
            "first_ns": self.first_ns, "last_ns": self.last_ns,
            "per_capture": [self.per_stream[i] for i in range(<uint64_t>FC_STREAMS_MAX)],
            "cut": {"longest_captured": self.longest_cut, "other_traffic": self.cut_other},
            "unlisted_flow_packets": self.unlisted,
            "encapsulated": self._refused(),
            "noise": {name: self.other[i] for i, name in enumerate(NOISE_NAMES) if self.other[i]},
            "unknown": _numbers(&self.unknown),
            "bootstrap_handshakes": self.bootstrap,
            "flows": [_flow(&flows[i]) for i in range(self.flows.used)],
        }


cdef bytes _packed(const uint8_t *at, int version):
    return at[:4 if version == 4 else 16]


# -- report ---------------------------------------------------------------------------------------------

cdef dict _tally(const fc_tally *t):
    return {t.key[i]: t.count[i] for i in range(t.used)}


cdef dict _mirrors(const fc_tally *t):
    """{"ERSPAN II session 7": packets}: the mirrors that had wrapped a flow's packets."""
    return {
        TUNNEL_NAMES[key >> 32] + ("" if key >> 32 == FC_TUNNEL_STAMP else f" session {key & 0xFFFFFFFF}"): n
        for key, n in _tally(t).items()
    }


cdef dict _numbers(const fc_tally *t):
    """{"ethertype 0x8903": packets}: what has no name, by its number; "further numbers" beyond those that are kept."""
    found = {}
    for key, n in _tally(t).items():
        number = key & 0xFFFFFFFF
        if key >> 32:
            found[f"UDP port {number}" if key >> 32 == 1 else f"IP protocol {number}"] = n
        else:
            found[f"ethertype {number:#06x}" if number >= 0x600 else "IEEE 802.3 length"] = (
                n + found.get("IEEE 802.3 length", 0) * (number < 0x600))
    if t.other:
        found["further numbers"] = t.other
    return found


cdef list _regions(const fc_regions *r):
    return [(r.region[i].rkey, r.region[i].address, r.region[i].size) for i in range(r.used)]


cdef dict _sequence(const fc_sequence *s):
    missing = s.lost_for_good
    ranges = []
    for i in range(s.n_holes):
        missing += s.holes[i].end - s.holes[i].start
        ranges.append((s.holes[i].start & 0xFFFFFF, s.holes[i].end - s.holes[i].start))
    return {
        "packets": s.packets, "psn_first": s.first & 0xFFFFFF, "psn_last": (s.next - 1) & 0xFFFFFF,
        "gaps": s.gaps, "missing": missing, "missing_ranges": ranges, "duplicates": s.duplicates,
        "late": s.late, "before_first": s.before_first, "restarts": s.restarts,
        "out_of_order": s.backward - s.restarts,
    }


cdef dict _flow(const Flow *flow):
    cdef const fc_counts *f = flow.counts
    return {
        "src": address(_packed(flow.src, flow.ip_version)), "dst": address(_packed(flow.dst, flow.ip_version)),
        "dest_qp": flow.id, "captures": [i for i in range(FC_STREAMS_MAX) if f.streams >> i & 1],
        "packets": f.packets, "bytes": f.bytes, "payload_bytes": f.payload_bytes,
        "max_payload": f.max_payload, "first_ns": f.first_ns, "last_ns": f.last_ns,
        "icrc": {"ok": f.icrc_ok, "wrong": f.icrc_wrong}, "congestion_marked": f.congestion,
        "opcodes": {opcode_name(i): f.opcodes[i] for i in range(256) if f.opcodes[i]},
        "tclass": _tally(&f.tclass), "vlan": _tally(&f.vlan), "mirrors": _mirrors(&f.mirror), "udp_sport": _tally(&f.sport),
        "source_qps": _tally(&f.src_qp),
        "requests": _sequence(&f.sequence) if f.sequence.packets else None,
        "answers": {
            "acks": f.acks, "rnr_naks": f.rnr, "last_msn": f.msn,
            "naks": {NAK_NAMES[i]: f.naks[i] for i in range(FC_NAK_KINDS) if f.naks[i]},
            "psn_low": f.answer_low, "psn_high": f.answer_high,
        } if f.answered else None,
        "messages": _messages(f),
        "cts": {
            "count": f.cts,
            "layouts": {e.versions: f.cts_element[i] for i, e in enumerate(CTS_ELEMENTS) if f.cts_element[i]},
            "first_number": f.cts_first, "last_number": f.cts_last, "number_jumps": f.cts_jumps,
            "fifo_steps": _fifo_steps(f),
            "sizes": _tally(&f.cts_sizes), "tags": _tally(&f.cts_tags),
            "regions": _regions(&f.cts_regions),
        } if f.cts else None,
        "payload": {
            "ll_packets": f.ll, "ll128_packets": f.ll128, "constant_packets": f.constant,
            "raw_packets": f.raw, "first_flag": f.flag_first, "last_flag": f.flag_last,
            "flag_steps": f.flag_steps, "flag_jumps": f.flag_jumps,
        },
        "regions": _regions(&f.regions),
    }


cdef dict _fifo_steps(const fc_counts *f):
    """{distance of neighbours in the FIFO, bytes: how often}, and "other" distances."""
    out = {}
    for i, e in enumerate(CTS_ELEMENTS):
        distance = str(FC_CTS_REQUESTS * e.bytes)
        out[distance] = out.get(distance, 0) + f.cts_steps[i]
    return {**out, "other": f.cts_steps_other}


cdef dict _messages(const fc_counts *f):
    cdef int64_t open_plain = 0
    sizes = _tally(&f.sizes)
    # A plain write still waiting for what may follow it is a message all the same.
    if f.write.open and f.write.plain:
        pieces = [f.write.length] if f.write.pieces < 2 else (
            [f.write.unit] * (f.write.pieces - 1) + [f.write.last])
        for size in pieces:
            sizes[size] = sizes.get(size, 0) + 1
        open_plain = len(pieces)
    return {
        "writes": f.messages + open_plain, "sends": f.sends, "sizes": sizes, "other_sizes": f.sizes.other,
        "empty": f.empty, "adaptive_routing_pairs": f.pairs,
        "cut_by_nic": {"writes": f.cut_writes, "packets": f.cut_pieces},
        "immediate": {
            "little_endian": f.imm_little, "big_endian": f.imm_big, "unexplained": f.imm_unexplained,
            "split_little_endian": {i: f.imm_split_little[i] for i in range(FC_SPLIT_MAX + 1) if f.imm_split_little[i]},
            "split_big_endian": {i: f.imm_split_big[i] for i in range(FC_SPLIT_MAX + 1) if f.imm_split_big[i]},
        },
    }
