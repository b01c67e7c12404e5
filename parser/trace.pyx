"""The beginning of every message and every TCP byte that may be NCCL's: what learning a job reads.

    ring -> see() -> RoCE request: the start of each write (address, length, immediate, first bytes)
                  |- RoCE request inside a wanted PSN range: its whole payload
                  `- TCP segment: its payload (NCCL's bootstrap is plaintext)

Two passes are usual: the first knows nothing and collects starts; when it is known which messages carry
announcements, the second (`wanted`) fetches their bytes. Nothing is interpreted here: flowcheck.learning does.

All memory is bounded by the constants below; what does not fit is counted (`dropped`, `unlisted`), and the
reader of report() must treat a flow that dropped something as known only up to there. Packets with a wrong
ICRC are counted and ignored: the receiver dropped them too.
Thread rule: one thread calls everything; drain() releases the GIL.
"""
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from parser.roce cimport FC_ENCAPSULATED, FC_REFUSALS, FC_ROCE, FC_TRUNCATED, fc_icrc_ok, fc_roce, fc_roce_decode

from parser.roce import REFUSAL_NAMES

__all__ = ["START_DTYPE", "Trace"]

cdef enum:
    FLOWS_MAX = 65536
    STARTS_MAX = 1 << 19            # all flows together, 88 MiB
    STARTS_PER_FLOW = 1 << 18
    SEGMENTS_MAX = 1 << 20
    TCP_FLOW_BYTES = 1 << 20        # of one direction; a bootstrap connection has a few KB
    POOL_MAX = 128 << 20
    WISHES_MAX = 4096

#: One message start, as numpy sees it (struct Start of trace.pxd).
START_DTYPE = np.dtype({
    "names": ["psn", "va", "ns", "flow", "rkey", "length", "imm", "payload", "opcode", "head"],
    "formats": ["<i8", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<u4", "u1", "V128"],
    "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 44, 48],
    "itemsize": sizeof(Start),
})


cdef inline uint32_t be16(const uint8_t *p) noexcept nogil:
    return <uint32_t>p[0] << 8 | p[1]


cdef inline uint32_t be32(const uint8_t *p) noexcept nogil:
    return be16(p) << 16 | be16(p + 2)


cdef void *roomier(void *old, uint64_t *room, uint64_t used, uint64_t most, size_t size) noexcept nogil:
    """`old` with room for one more element of `size`, or NULL (then `old` is as it was)."""
    cdef uint64_t larger
    cdef void *new
    if used < room[0]:
        return old
    if used >= most:
        return NULL
    larger = room[0] * 2 if room[0] else 1024
    if larger > most:
        larger = most
    new = realloc(old, larger * size)
    if new != NULL:
        room[0] = larger
    return new


cdef class Trace:
    """Collects over any number of rings in one thread; report() may be asked at any time between drains.

    wanted: (source address, destination address, destination QP, first PSN, end PSN): packets of WRITEs whose
    unwrapped PSN is inside are kept whole. At most 4096; a trace with wishes keeps nothing else.
    """

    def __cinit__(self, wanted=()):
        cdef uint32_t i
        self.table_mask = 4 * FLOWS_MAX - 1
        self.table = <uint32_t *>calloc(self.table_mask + 1, sizeof(uint32_t))
        if self.table == NULL:
            raise MemoryError("no memory for the trace's flow table")
        wanted = list(wanted)
        if len(wanted) > WISHES_MAX:
            raise ValueError(f"{len(wanted)} wanted ranges, at most {WISHES_MAX}")
        self.wishes = <Wish *>calloc(len(wanted) + 1, sizeof(Wish))
        if self.wishes == NULL:
            raise MemoryError("no memory for the wanted ranges")
        for i in range(<uint32_t>len(wanted)):
            src, dst, qpn, low, high = wanted[i]
            if len(src) not in (4, 16) or len(src) != len(dst):
                raise ValueError("addresses have 4 or 16 bytes, both the same")
            memcpy(self.wishes[i].src, <const uint8_t *>src, len(src))
            memcpy(self.wishes[i].dst, <const uint8_t *>dst, len(dst))
            self.wishes[i].dest_qp = qpn
            self.wishes[i].low = low
            self.wishes[i].high = high
        self.n_wishes = <uint32_t>len(wanted)

    def __dealloc__(self):
        free(self.flows)
        free(self.table)
        free(self.starts)
        free(self.segments)
        free(self.pieces)
        free(self.pool)
        free(self.wishes)

    cdef Lane *flow_of(self, const uint8_t *src, const uint8_t *dst, int version, uint32_t id, int tcp) noexcept nogil:
        """The flow of these ends, made at its first packet; NULL when the table is full."""
        cdef size_t width = 4 if version == 4 else 16, i
        cdef uint64_t h = (id + 1) * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>tcp
        cdef uint32_t at, word
        cdef uint64_t room
        cdef Lane *f
        for i in range(0, width, 4):
            memcpy(&word, src + i, 4)
            h = (h ^ word) * <uint64_t>0xFF51AFD7ED558CCD
            memcpy(&word, dst + i, 4)
            h = (h ^ h >> 29 ^ word) * <uint64_t>0xC4CEB9FE1A85EC53
        at = <uint32_t>(h >> 32) & self.table_mask
        while self.table[at]:
            f = &self.flows[self.table[at] - 1]
            if (f.id == id and f.tcp == tcp and f.ip_version == version and memcmp(f.src, src, width) == 0
                    and memcmp(f.dst, dst, width) == 0):
                return f
            at = (at + 1) & self.table_mask
        room = self.flow_room
        f = <Lane *>roomier(self.flows, &room, self.n_flows, FLOWS_MAX, sizeof(Lane))
        if f == NULL:
            return NULL
        self.flows = f
        self.flow_room = <uint32_t>room
        f = &self.flows[self.n_flows]
        memset(f, 0, sizeof(Lane))
        self.n_flows += 1
        self.table[at] = self.n_flows
        memcpy(f.src, src, width)
        memcpy(f.dst, dst, width)
        f.ip_version = version
        f.id = id
        f.tcp = tcp
        return f

    cdef int64_t keep(self, const uint8_t *data, uint32_t length) noexcept nogil:
        """Offset of a copy in the pool, or -1."""
        cdef uint64_t larger
        cdef uint8_t *new
        if self.pool_used + length > self.pool_room:
            larger = self.pool_room * 2 if self.pool_room else 1 << 16
            while larger < self.pool_used + length:
                larger *= 2
            if larger > POOL_MAX:
                return -1
            new = <uint8_t *>realloc(self.pool, larger)
            if new == NULL:
                return -1
            self.pool = new
            self.pool_room = larger
        if length:  # the pool may not exist yet
            memcpy(self.pool + self.pool_used, data, length)
        self.pool_used += length
        return <int64_t>(self.pool_used - length)

    cdef void see(self, const fc_packetref *ref) noexcept nogil:
        cdef fc_roce p
        cdef Lane *f
        cdef Start *start
        cdef Piece *piece
        cdef Wish *w
        cdef int64_t psn, ahead, at
        cdef uint32_t operation, i
        cdef size_t width
        cdef int status = fc_roce_decode(ref.data, ref.length, &p)
        self.packets += 1
        if status == FC_TRUNCATED or ref.flags & FC_REF_TRUNCATED:
            self.cut += 1
            self.cut_roce += status == FC_TRUNCATED
            return
        if status != FC_ROCE:
            if status == FC_ENCAPSULATED:
                self.refused[p.refusal] += 1
            self.tcp_segment(ref.data, ref.length)
            return
        operation = p.opcode & 0x1F
        if p.opcode >> 5 != 0 or operation < 0x06 or operation > 0x0B:
            return
        if not fc_icrc_ok(&p):
            self.wrong_icrc += 1
            return
        f = self.flow_of(p.src, p.dst, p.ip_version, p.dest_qp, 0)
        if f == NULL:
            self.unlisted += 1
            return
        f.packets += 1
        if not f.begun:
            f.begun = 1
            f.next = p.psn
            f.sport = p.udp_sport
        ahead = (<int64_t>p.psn - f.next) & 0xFFFFFF
        if ahead >= 0x800000:
            ahead -= 0x1000000
        psn = f.next + ahead
        if ahead >= 0:
            f.next = psn + 1
        if p.payload_len > f.max_payload:
            f.max_payload = p.payload_len
        width = 4 if p.ip_version == 4 else 16
        for i in range(self.n_wishes):
            w = &self.wishes[i]
            if (w.dest_qp == p.dest_qp and w.low <= psn < w.high and memcmp(w.src, p.src, width) == 0
                    and memcmp(w.dst, p.dst, width) == 0):
                piece = <Piece *>roomier(self.pieces, &self.piece_room, self.n_pieces, STARTS_MAX, sizeof(Piece))
                at = self.keep(p.payload, p.payload_len) if piece != NULL else -1
                if piece != NULL:
                    self.pieces = piece
                if at < 0:
                    f.dropped += 1
                    break
                piece = &self.pieces[self.n_pieces]
                self.n_pieces += 1
                piece.psn = psn
                piece.offset = <uint64_t>at
                piece.flow = <uint32_t>(f - self.flows)
                piece.length = p.payload_len
                break
        if operation == 0x07 or operation == 0x08 or self.n_wishes:
            return
        if f.records >= STARTS_PER_FLOW:
            f.dropped += 1
            return
        start = <Start *>roomier(self.starts, &self.start_room, self.n_starts, STARTS_MAX, sizeof(Start))
        if start == NULL:
            f.dropped += 1
            return
        self.starts = start
        start = &self.starts[self.n_starts]
        self.n_starts += 1
        f.records += 1
        memset(start, 0, sizeof(Start))
        start.psn = psn
        start.timestamp_ns = ref.timestamp_ns
        start.flow = <uint32_t>(f - self.flows)
        start.opcode = <uint8_t>operation
        start.payload = p.payload_len
        if operation != 0x09:
            start.va = p.va
            start.rkey = p.rkey
            start.length = p.dma_len
        if operation == 0x09 or operation == 0x0B:
            start.imm = p.imm
        memcpy(start.head, p.payload, p.payload_len if p.payload_len < HEAD_BYTES else HEAD_BYTES)

    cdef void tcp_segment(self, const uint8_t *frame, size_t length) noexcept nogil:
        """Keep the payload of a TCP segment over IPv4 or IPv6, VLAN tags allowed. Everything is bounds-checked:
        the frame may be anything."""
        cdef size_t at = 12, ip, tcp, end, data
        cdef uint32_t kind, seq
        cdef const uint8_t *src
        cdef const uint8_t *dst
        cdef int version, tags = 0
        cdef Lane *f
        cdef Segment *s
        cdef int64_t offset
        if length < 14 or self.n_wishes:
            return
        kind = be16(frame + at)
        while (kind == 0x8100 or kind == 0x88A8) and tags < 2 and length >= at + 6:
            at += 4
            tags += 1
            kind = be16(frame + at)
        ip = at + 2
        if kind == 0x88E5:  # MACsec: nothing behind it can be read
            self.encrypted += 1
            return
        if kind == 0x0800:
            if length < ip + 20 or frame[ip] >> 4 != 4:
                return
            if frame[ip + 9] == 50:
                self.encrypted += 1
                return
            if frame[ip + 9] != 6 or be16(frame + ip + 6) & 0x3FFF:
                return
            tcp = ip + (frame[ip] & 15) * 4
            end = ip + be16(frame + ip + 2)
            src, dst, version = frame + ip + 12, frame + ip + 16, 4
        elif kind == 0x86DD:
            if length < ip + 40:
                return
            if frame[ip + 6] == 50:
                self.encrypted += 1
                return
            if frame[ip + 6] != 6:
                return
            tcp = ip + 40
            end = ip + 40 + be16(frame + ip + 4)
            src, dst, version = frame + ip + 8, frame + ip + 24, 6
        else:
            return
        if end > length or end < tcp + 20:
            return
        data = tcp + (frame[tcp + 12] >> 4) * 4
        if data > end or data < tcp + 20:
            return
        if data == end and not frame[tcp + 13] & 2:  # neither payload nor SYN
            return
        f = self.flow_of(src, dst, version, be32(frame + tcp), 1)
        if f == NULL:
            self.unlisted += 1
            return
        f.packets += 1
        if f.bytes + (end - data) > TCP_FLOW_BYTES:
            f.dropped += 1
            return
        s = <Segment *>roomier(self.segments, &self.segment_room, self.n_segments, SEGMENTS_MAX, sizeof(Segment))
        if s == NULL:
            f.dropped += 1
            return
        self.segments = s
        offset = self.keep(frame + data, <uint32_t>(end - data))
        if offset < 0:
            f.dropped += 1
            return
        seq = be32(frame + tcp + 4)
        s = &self.segments[self.n_segments]
        self.n_segments += 1
        f.bytes += end - data
        s.offset = <uint64_t>offset
        s.flow = <uint32_t>(f - self.flows)
        s.seq = seq
        s.length = <uint32_t>(end - data)
        s.flags = frame[tcp + 13]

    def add(self, frame: bytes, timestamp_ns: int = 0) -> None:
        """One captured frame; the ring loop does exactly this."""
        cdef const uint8_t[::1] view = frame
        cdef fc_packetref ref
        memset(&ref, 0, sizeof(ref))
        ref.data = &view[0] if view.shape[0] else NULL
        ref.length = view.shape[0]
        ref.timestamp_ns = timestamp_ns
        self.see(&ref)

    def drain(self, ring_address: int, limit: int = 65536) -> int:
        """Trace about `limit` packets of the ring at this address, release them, return how many. Consumer
        side of the ring (packetref.h)."""
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
        """True when the producer has closed the ring and everything in it was traced."""
        return bool(fc_ring_drained(<fc_ring *><size_t>ring_address))

    def flow_list(self) -> list:
        """Every flow as a dictionary, in order of appearance; the number of a flow is its place here."""
        cdef uint32_t i
        cdef Lane *f
        out = []
        for i in range(self.n_flows):
            f = &self.flows[i]
            width = 4 if f.ip_version == 4 else 16
            out.append({
                "tcp": bool(f.tcp), "src": (<const uint8_t *>f.src)[:width], "dst": (<const uint8_t *>f.dst)[:width],
                "id": f.id, "sport": f.sport, "packets": f.packets, "dropped": f.dropped,
                "max_payload": f.max_payload,
            })
        return out

    def start_records(self):
        """All message starts in order of arrival: a numpy array of START_DTYPE (a copy)."""
        cdef uint64_t size = self.n_starts * sizeof(Start)
        raw = bytes((<const uint8_t *>self.starts)[:size]) if size else b""
        return np.frombuffer(raw, START_DTYPE)

    def tcp_segments(self) -> list:
        """(flow, sequence number, TCP flags, payload) in order of arrival."""
        cdef uint64_t i
        cdef Segment *s
        out = []
        for i in range(self.n_segments):
            s = &self.segments[i]
            out.append((s.flow, s.seq, s.flags, bytes((<const uint8_t *>self.pool + s.offset)[:s.length])
                        if s.length else b""))
        return out

    def payloads(self) -> list:
        """(flow, PSN, payload) of every packet inside a wanted range."""
        cdef uint64_t i
        cdef Piece *p
        out = []
        for i in range(self.n_pieces):
            p = &self.pieces[i]
            out.append((p.flow, p.psn, bytes((<const uint8_t *>self.pool + p.offset)[:p.length]) if p.length else b""))
        return out

    def counters(self) -> dict:
        """packets: all. unlisted: of flows beyond the table. wrong_icrc (of writes), cut, cut_roce: ignored. encrypted:
        MACsec or ESP frames. encapsulated: {what: packets} of tunnels that are not unpacked."""
        return {"packets": self.packets, "unlisted": self.unlisted, "wrong_icrc": self.wrong_icrc, "cut": self.cut,
                "cut_roce": self.cut_roce, "encrypted": self.encrypted,
                "encapsulated": {REFUSAL_NAMES[i]: self.refused[i] for i in range(1, FC_REFUSALS) if self.refused[i]}}
