"""What is in a stream of packets, with no job given: counts and observations per flow, nothing more.

    ring -> see() -> decode -> flow (source, destination, destination QP)
                                 |- sequence: gaps, repeats, restarts of the request PSNs
                                 |- messages: sizes, immediates, adaptive-routing pairs, cut writes
                                 |- clear-to-send writes, LL and LL128 flags
                                 `- answers: ACK, NAK, RNR

Observations only. What they mean (which flows are one connection, which protocol) is decided by
parser.findings from the dictionary that report() returns.

A packet whose ICRC is wrong is counted and otherwise ignored: the receiver dropped it too. Tables are
bounded (survey.pxd); what does not fit is counted as such, so memory does not depend on hostile input.
Thread rule: one thread calls everything; drain() releases the GIL.
"""
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from parser.roce cimport (
    FC_ENCAPSULATED, FC_HAS_AETH, FC_HAS_DETH, FC_HAS_IMM, FC_NOT_ROCE, FC_ROCE, FC_TRUNCATED, FC_TUNNEL_INSIDE,
    fc_icrc_ok, fc_roce, fc_roce_decode, fc_tunnel, fc_tunnel_enter,
)

from parser.roce import REFUSAL_NAMES, STATUS_NAMES, TUNNEL_NAMES, address, opcode_name

__all__ = ["CTS_LAYOUT_NAMES", "NOISE_NAMES", "Survey"]

#: NCCL versions by the layout of their clear-to-send element.
CTS_LAYOUT_NAMES = ("2.12-2.19", "2.20-2.23", "2.24-2.29", "2.30")
NAK_NAMES = ("sequence_error", "invalid_request", "remote_access_error", "remote_operational_error",
             "invalid_rd_request", "reserved")
#: Other traffic by kind, in the order of Survey.noise.
NOISE_NAMES = (
    "arp", "ptp", "lldp", "flow_control", "roce_v1", "llc", "tcp", "icmp", "igmp", "icmpv6", "udp",
    "other_ipv4", "other_ipv6", "other_ethertype",
)
cdef enum:
    N_ARP, N_PTP, N_LLDP, N_PAUSE, N_ROCE1, N_LLC, N_TCP, N_ICMP, N_IGMP, N_ICMP6, N_UDP, N_IP4, N_IP6, N_OTHER

# The bytes a QP handshake of NCCL's network transport starts with (0x564ab9f2fc4b9d6c, little-endian).
cdef uint64_t HANDSHAKE_MAGIC = 0x564AB9F2FC4B9D6C


cdef inline uint32_t be16(const uint8_t *p) noexcept nogil:
    return <uint32_t>p[0] << 8 | p[1]


cdef inline uint32_t le32(const uint8_t *p) noexcept nogil:
    cdef uint32_t v
    memcpy(&v, p, 4)
    return v


cdef inline uint64_t le64(const uint8_t *p) noexcept nogil:
    cdef uint64_t v
    memcpy(&v, p, 8)
    return v


cdef inline uint32_t swap32(uint32_t v) noexcept nogil:
    return v >> 24 | (v >> 8 & 0xFF00) | (v << 8 & 0xFF0000) | v << 24


cdef void tally(Tally *t, uint64_t key) noexcept nogil:
    cdef uint32_t i
    for i in range(t.used):
        if t.key[i] == key:
            t.count[i] += 1
            return
    if t.used == TALLY_SLOTS:
        t.other += 1
        return
    t.key[t.used] = key
    t.count[t.used] = 1
    t.used += 1


cdef void remember(Region *regions, uint32_t *used, uint64_t address_, uint64_t size, uint32_t rkey) noexcept nogil:
    cdef uint32_t i
    for i in range(used[0]):
        if regions[i].address == address_ and regions[i].rkey == rkey:
            if size > regions[i].size:
                regions[i].size = size
            return
    if used[0] < REGIONS:
        regions[used[0]].address = address_
        regions[used[0]].size = size
        regions[used[0]].rkey = rkey
        used[0] += 1


# -- PSN sequence ---------------------------------------------------------------------------------------

cdef bint add_hole(Sequence *s, uint32_t at, int64_t start, int64_t end) noexcept nogil:
    """Insert a hole before index `at`. The oldest one goes when the table is full."""
    cdef uint32_t room
    cdef Hole *larger
    if s.n_holes == HOLES_MAX:
        s.lost_for_good += s.holes[0].end - s.holes[0].start
        memmove(s.holes, s.holes + 1, (s.n_holes - 1) * sizeof(Hole))
        s.n_holes -= 1
        if at:
            at -= 1
    if s.n_holes == s.room:
        room = s.room * 2 if s.room else 16
        larger = <Hole *>realloc(s.holes, room * sizeof(Hole))
        if larger == NULL:
            s.lost_for_good += end - start
            return False
        s.holes = larger
        s.room = room
    memmove(s.holes + at + 1, s.holes + at, (s.n_holes - at) * sizeof(Hole))
    s.holes[at].start = start
    s.holes[at].end = end
    s.n_holes += 1
    return True


cdef bint fill_hole(Sequence *s, int64_t psn) noexcept nogil:
    """True if psn was missing; it no longer is."""
    cdef uint32_t low = 0, high = s.n_holes, middle
    cdef int64_t end
    while low < high:
        middle = (low + high) // 2
        if s.holes[middle].end <= psn:
            low = middle + 1
        else:
            high = middle
    if low == s.n_holes or psn < s.holes[low].start:
        return False
    end = s.holes[low].end
    if s.holes[low].start == psn:
        s.holes[low].start = psn + 1
    else:
        s.holes[low].end = psn
        if psn + 1 < end:
            add_hole(s, low + 1, psn + 1, end)
            return True
    if s.holes[low].start == s.holes[low].end:
        memmove(s.holes + low, s.holes + low + 1, (s.n_holes - low - 1) * sizeof(Hole))
        s.n_holes -= 1
    return True


cdef bint read_explains(uint32_t length, int64_t distance) noexcept nogil:
    """A READ request takes one PSN per packet of its response, at whatever path MTU."""
    cdef uint32_t mtu = 256
    while mtu <= 4096:
        if distance == (<int64_t>length + mtu - 1) // mtu:
            return True
        mtu *= 2
    return False


cdef int64_t follow(Sequence *s, const fc_roce *p) noexcept nogil:
    """Account for one request packet. Returns its unwrapped PSN, or -1 if it brings nothing new."""
    cdef int64_t psn, ahead
    cdef bint fresh = True
    s.packets += 1
    if s.packets == 1:
        s.first = s.next = p.psn
        s.previous = s.first - 1
    ahead = (<int64_t>p.psn - s.next) & 0xFFFFFF
    if ahead >= 0x800000:
        ahead -= 0x1000000
    psn = s.next + ahead
    if s.stepped_back and psn == s.previous + 1:
        s.restarts += 1
    s.stepped_back = False
    if ahead >= 0:
        if ahead > 0 and not (s.read_length and read_explains(s.read_length, ahead + 1)):
            s.gaps += 1
            add_hole(s, s.n_holes, s.next, psn)
        s.next = psn + 1
        s.read_length = p.dma_len if p.opcode == 0x0C else 0
    else:
        if psn <= s.previous:
            s.backward += 1
            s.stepped_back = True
        if psn < s.first:
            s.before_first += 1
        elif fill_hole(s, psn):
            s.late += 1
        else:
            s.duplicates += 1
            fresh = False
    s.previous = psn
    return psn if fresh else -1


# -- messages -------------------------------------------------------------------------------------------

cdef void weigh_immediate(Flow *f, uint32_t imm, uint64_t size) noexcept nogil:
    """Which byte order makes the immediate the size of its write, or of a message split over several QPs?"""
    cdef uint64_t little = swap32(imm), big = imm
    cdef uint32_t used
    if little == big:
        return
    if size == little:
        f.imm_little += 1
        return
    if size == big:
        f.imm_big += 1
        return
    if size:
        for used in range(2, SPLIT_MAX + 1):
            # pieces are rounded up to 128 bytes; the last one is shorter and is not decided on
            if ((little + used - 1) // used + 127) // 128 * 128 == size:
                f.imm_split_little[used] += 1
                return
            if ((big + used - 1) // used + 127) // 128 * 128 == size:
                f.imm_split_big[used] += 1
                return
    f.imm_unexplained += 1


cdef void finish_write(Flow *f) noexcept nogil:
    """The plain write in f.write had no immediate behind it: its pieces were messages of their own."""
    cdef uint32_t i
    if f.write.open and f.write.plain:
        if f.write.pieces:
            f.messages += f.write.pieces
            for i in range(f.write.pieces - 1):
                tally(&f.sizes, f.write.unit)
            tally(&f.sizes, f.write.last)
        else:
            f.messages += 1
            tally(&f.sizes, f.write.length)
    f.write.open = False


cdef void begin_write(Flow *f, const fc_roce *p, int64_t psn, bint only) noexcept nogil:
    cdef Writing *w = &f.write
    remember(f.regions, &f.n_regions, p.va, p.dma_len, p.rkey)
    if (only and w.open and w.plain and w.pieces and w.whole and w.next == psn and p.rkey == w.rkey
            and p.va == w.address + w.length and w.last == w.unit and p.dma_len <= w.unit):
        w.length += p.dma_len
        w.got += p.payload_len
        w.last = p.dma_len
        w.pieces += 1
        w.next = psn + 1
        return
    finish_write(f)
    w.open = True
    w.whole = True
    w.plain = True
    w.ended = only
    w.address = p.va
    w.rkey = p.rkey
    w.length = p.dma_len
    w.got = p.payload_len
    w.pieces = 1 if only else 0
    w.unit = w.last = p.dma_len
    w.next = psn + 1


cdef void take_write(Flow *f, const fc_roce *p, int64_t psn) noexcept nogil:
    """One fresh WRITE packet that is no clear-to-send."""
    cdef Writing *w = &f.write
    cdef uint32_t operation = p.opcode & 0x1F
    if operation == 0x0B:  # ONLY with immediate
        if (p.dma_len == 0 and p.va == 0 and p.rkey == 0 and w.open and w.plain and w.whole and w.next == psn
                and w.got == w.length):
            f.pairs += 1
            if w.pieces > 1:
                f.cut_writes += 1
                f.cut_pieces += w.pieces
            weigh_immediate(f, p.imm, w.length)
            f.messages += 1
            tally(&f.sizes, w.length)
            w.open = False
            return
        finish_write(f)
        f.messages += 1
        tally(&f.sizes, p.dma_len)
        if p.dma_len == 0:
            f.empty += 1
        else:
            remember(f.regions, &f.n_regions, p.va, p.dma_len, p.rkey)
        weigh_immediate(f, p.imm, p.dma_len)
    elif operation == 0x0A:
        begin_write(f, p, psn, True)
    elif operation == 0x06:
        begin_write(f, p, psn, False)
    else:  # MIDDLE, LAST, LAST with immediate
        if not w.open or w.ended:
            finish_write(f)  # the message's first packet was not seen: it is not counted
            return
        if psn != w.next:
            w.whole = False
        w.next = psn + 1
        w.got += p.payload_len
        w.ended = operation != 0x07
        if operation == 0x09:
            if w.whole and w.got == w.length:
                weigh_immediate(f, p.imm, w.length)
            f.messages += 1
            tally(&f.sizes, w.length)
            w.open = False


# -- clear to send --------------------------------------------------------------------------------------

ctypedef struct Element:
    uint8_t bytes, size_width, rkey, nreqs, tag, idx

# By CTS_LAYOUT_NAMES: element size, width of the size field, offsets of the rest.
cdef Element[4] ELEMENTS = [
    Element(32, 4, 12, 16, 20, 24), Element(64, 4, 12, 20, 24, 32),
    Element(64, 8, 16, 32, 36, 40), Element(64, 8, 16, 48, 52, 56),
]


cdef int cts_layout(const uint8_t *p, uint32_t length) noexcept nogil:
    """Which layout makes every field plausible? -1 if none. No two can: the field that counts the
    requests (1..8) is a key or a zero in the others, or their message number is zero padding."""
    cdef int i
    cdef Element e
    cdef uint64_t size, number
    cdef uint32_t requests
    for i in range(CTS_LAYOUTS):
        e = ELEMENTS[i]
        if length != e.bytes:
            continue
        size = le32(p + 8) if e.size_width == 4 else le64(p + 8)
        requests = le32(p + e.nreqs)
        number = le64(p + e.idx)
        if 1 <= requests <= 8 and 1 <= number < <uint64_t>1 << 48 and 1 <= size < <uint64_t>1 << 34 \
                and le64(p) != 0 and le32(p + e.rkey) != 0 and le32(p + e.tag) < 1 << 24:
            return i
    return -1


cdef void take_cts(Flow *f, const fc_roce *p, int layout) noexcept nogil:
    cdef Element e = ELEMENTS[layout]
    cdef const uint8_t *at = p.payload
    cdef uint64_t number = le64(at + e.idx)
    cdef uint64_t size = le32(at + 8) if e.size_width == 4 else le64(at + 8)
    cdef uint64_t step
    if f.cts == 0:
        f.cts_first = number
    else:
        if number != f.cts_last + 1:
            f.cts_jumps += 1
        step = p.va - f.cts_last_va if p.va > f.cts_last_va else f.cts_last_va - p.va
        if step == 256 or step == 255 * 256:
            f.cts_steps[0] += 1
        elif step == 512 or step == 255 * 512:
            f.cts_steps[1] += 1
        else:
            f.cts_steps_other += 1
    f.cts += 1
    f.cts_layout[layout] += 1
    f.cts_last = number
    f.cts_last_va = p.va
    tally(&f.cts_sizes, size)
    tally(&f.cts_tags, le32(at + e.tag))
    remember(f.cts_regions, &f.n_cts_regions, le64(at), size, le32(at + e.rkey))


# -- payload flags --------------------------------------------------------------------------------------

cdef void weigh_flags(Flow *f, const fc_roce *p, bint starts) noexcept nogil:
    """LL: 16-byte lines of data 4, flag 4, data 4, flag 4. LL128: 128-byte lines ending in an 8-byte flag.
    One message has one flag, and it is never zero."""
    cdef const uint8_t *at = p.payload
    cdef uint32_t n = p.payload_len, i
    cdef uint32_t flag
    cdef uint64_t wide
    cdef bint same, varies = False
    if n == 0:
        return
    if n % 16:
        f.raw += 1  # LL and LL128 messages are whole lines
        return
    for i in range(8, n, 8):
        if le64(at + i) != le64(at):
            varies = True
            break
    if not varies and le32(at) == le32(at + 4):
        f.constant += 1
        return
    flag = le32(at + 4)
    same = flag != 0
    for i in range(0, n, 16):
        if le32(at + i + 4) != flag or le32(at + i + 12) != flag:
            same = False
            break
    if same:
        f.ll += 1
        if starts:
            note_flag(f, flag)
        return
    if n % 128 == 0 and n >= 256:
        wide = le64(at + 120)
        same = wide != 0
        for i in range(0, n, 128):
            if le64(at + i + 120) != wide:
                same = False
                break
        if same:
            f.ll128 += 1
            if starts:
                note_flag(f, wide)
            return
    f.raw += 1


cdef void note_flag(Flow *f, uint64_t flag) noexcept nogil:
    if f.flag_first == 0:
        f.flag_first = flag
    elif flag == f.flag_last + 1:
        f.flag_steps += 1
    elif flag != f.flag_last:
        f.flag_jumps += 1
    f.flag_last = flag


# -- one packet -----------------------------------------------------------------------------------------

cdef void take_answer(Flow *f, const fc_roce *p) noexcept nogil:
    cdef uint32_t kind
    if not f.answered:
        f.answer_low = f.answer_high = p.psn
        f.answered = True
    elif ((p.psn - f.answer_high) & 0xFFFFFF) < 0x800000:
        f.answer_high = p.psn
    elif ((f.answer_low - p.psn) & 0xFFFFFF) < 0x800000:
        f.answer_low = p.psn
    if not p.headers & FC_HAS_AETH:
        return
    f.msn = p.msn
    kind = p.syndrome >> 5 & 3
    if kind == 0:
        f.acks += 1
    elif kind == 1:
        f.rnr += 1
    else:
        kind = p.syndrome & 0x1F
        f.naks[kind if kind < NAK_KINDS - 1 else NAK_KINDS - 1] += 1


cdef void take_request(Flow *f, const fc_roce *p) noexcept nogil:
    cdef uint32_t operation = p.opcode & 0x1F
    cdef int layout = -1
    cdef int64_t psn = follow(&f.seq, p)
    if psn < 0:
        return
    if 0x06 <= operation <= 0x0B:
        if operation == 0x0A and p.dma_len == p.payload_len:
            layout = cts_layout(p.payload, p.payload_len)
        if layout >= 0:
            take_cts(f, p, layout)
        else:
            weigh_flags(f, p, operation == 0x06 or operation >= 0x0A)
            take_write(f, p, psn)
    elif operation <= 0x05 or operation == 0x16 or operation == 0x17:
        if operation != 0x01 and operation != 0x02 and operation != 0x03 and operation != 0x16:
            f.sends += 1


cdef bint same_flow(const Flow *f, const fc_roce *p) noexcept nogil:
    cdef size_t width = 4 if p.ip_version == 4 else 16
    return (f.dest_qp == p.dest_qp and f.ip_version == p.ip_version and memcmp(f.src, p.src, width) == 0
            and memcmp(f.dst, p.dst, width) == 0)


cdef uint32_t flow_hash(const uint8_t *src, const uint8_t *dst, size_t width, uint32_t qp) noexcept nogil:
    cdef uint64_t h = qp * <uint64_t>0x9E3779B97F4A7C15
    cdef size_t i
    for i in range(0, width, 4):
        h = (h ^ le32(src + i)) * <uint64_t>0xFF51AFD7ED558CCD
        h = (h ^ h >> 29 ^ le32(dst + i)) * <uint64_t>0xC4CEB9FE1A85EC53
    return <uint32_t>(h >> 32)


cdef class Survey:
    """Accumulates over any number of rings; report() may be called at any time between them."""

    def __cinit__(self):
        self.room = 64
        self.table_mask = 4 * FLOWS_MAX - 1
        self.flows = <Flow *>calloc(self.room, sizeof(Flow))
        self.table = <uint32_t *>calloc(self.table_mask + 1, sizeof(uint32_t))
        if self.flows == NULL or self.table == NULL:
            raise MemoryError("no memory for the survey's flow table")

    def __dealloc__(self):
        cdef uint32_t i
        if self.flows != NULL:
            for i in range(self.n_flows):
                free(self.flows[i].seq.holes)
        free(self.flows)
        free(self.table)

    cdef bint grow(self) noexcept nogil:
        cdef Flow *larger
        if self.n_flows == FLOWS_MAX:
            return False
        if self.n_flows < self.room:
            return True
        larger = <Flow *>realloc(self.flows, 2 * self.room * sizeof(Flow))
        if larger == NULL:
            return False
        memset(larger + self.room, 0, self.room * sizeof(Flow))
        self.flows = larger
        self.room *= 2
        return True

    cdef Flow *flow_of(self, const fc_roce *p) noexcept nogil:
        """The packet's flow, created at its first packet; NULL when the table is full."""
        cdef size_t width = 4 if p.ip_version == 4 else 16
        cdef uint32_t at = flow_hash(p.src, p.dst, width, p.dest_qp) & self.table_mask
        cdef Flow *f
        while self.table[at]:
            f = &self.flows[self.table[at] - 1]
            if same_flow(f, p):
                return f
            at = (at + 1) & self.table_mask
        if not self.grow():
            return NULL
        f = &self.flows[self.n_flows]
        self.n_flows += 1
        self.table[at] = self.n_flows
        memcpy(f.src, p.src, width)
        memcpy(f.dst, p.dst, width)
        f.ip_version = p.ip_version
        f.dest_qp = p.dest_qp
        return f

    cdef void see(self, const fc_packetref *ref) noexcept nogil:
        cdef fc_roce p
        cdef Flow *f
        cdef uint32_t transport, operation
        cdef int status = fc_roce_decode(ref.data, ref.length, &p)
        self.packets += 1
        self.status[status] += 1
        self.per_stream[ref.stream % STREAMS_MAX] += 1
        if ref.timestamp_ns:
            if self.first_ns == 0 or ref.timestamp_ns < self.first_ns:
                self.first_ns = ref.timestamp_ns
            if ref.timestamp_ns > self.last_ns:
                self.last_ns = ref.timestamp_ns
        if status != FC_ROCE:
            if status == FC_TRUNCATED:
                if ref.length > self.longest_cut:
                    self.longest_cut = ref.length
            elif status == FC_NOT_ROCE:
                if ref.flags & FC_REF_TRUNCATED:
                    self.cut_other += 1
                self.count_noise(ref.data, ref.length, False)
            elif status == FC_ENCAPSULATED:
                self.refused[p.refusal] += 1
            return

        f = self.flow_of(&p)
        if f == NULL:
            self.unlisted += 1
            return
        f.packets += 1
        f.bytes += ref.length
        f.streams |= <uint64_t>1 << (ref.stream % STREAMS_MAX)
        f.opcodes[p.opcode] += 1
        if p.tunnel:
            tally(&f.mirror, <uint64_t>p.tunnel << 32 | p.session)
        if ref.timestamp_ns:
            if f.first_ns == 0 or ref.timestamp_ns < f.first_ns:
                f.first_ns = ref.timestamp_ns
            if ref.timestamp_ns > f.last_ns:
                f.last_ns = ref.timestamp_ns
        if not fc_icrc_ok(&p):
            f.icrc_wrong += 1
            return
        f.icrc_ok += 1
        f.payload_bytes += p.payload_len
        if p.payload_len > f.max_payload:
            f.max_payload = p.payload_len
        tally(&f.tclass, p.tclass)
        tally(&f.sport, p.udp_sport)
        if p.tclass & 3 == 3:
            f.congestion += 1
        if p.vlan != 0xFFFF:
            tally(&f.vlan, p.vlan & 0xFFF)
        if p.headers & FC_HAS_DETH:
            tally(&f.src_qp, p.src_qp)
        transport = p.opcode >> 5
        operation = p.opcode & 0x1F
        if transport > 1:
            return  # datagrams, vendor opcodes, congestion notifications: no sequence to follow
        if transport == 0 and 0x0D <= operation <= 0x12:
            take_answer(f, &p)
        elif operation <= 0x0C or operation == 0x13 or operation == 0x14 or operation == 0x16 or operation == 0x17:
            take_request(f, &p)

    cdef bint count_inside(self, uint32_t protocol, const uint8_t *at, size_t length) noexcept nogil:
        """Sort what a mirror had wrapped by what is inside. False: `at` is no tunnel."""
        cdef fc_tunnel tunnel
        if fc_tunnel_enter(protocol, at, length, &tunnel) != FC_TUNNEL_INSIDE or length < tunnel.offset + 14:
            return False
        self.count_noise(tunnel.inner, length - tunnel.offset, True)
        return True

    cdef void count_noise(self, const uint8_t *frame, size_t length, bint inside) noexcept nogil:
        """Sort a frame that is not RoCEv2. The decoder has already refused anything cut short."""
        cdef size_t at = 14, transport
        cdef uint32_t kind = be16(frame + 12), protocol
        while (kind == 0x8100 or kind == 0x88A8 or kind == 0x9100) and length >= at + 4:
            kind = be16(frame + at + 2)
            at += 4
        if kind == 0x0806:
            self.noise[N_ARP] += 1
        elif kind == 0x88F7:
            self.noise[N_PTP] += 1
        elif kind == 0x88CC:
            self.noise[N_LLDP] += 1
        elif kind == 0x8808:
            self.noise[N_PAUSE] += 1
        elif kind == 0x8915:
            self.noise[N_ROCE1] += 1
        elif kind < 0x0600:
            self.noise[N_LLC] += 1
        elif kind == 0x0800 and length >= at + 20:
            protocol = frame[at + 9]
            transport = at + (frame[at] & 0x0F) * 4
            if not inside and length > transport and self.count_inside(protocol, frame + transport, length - transport):
                return
            if protocol == 6:
                self.noise[N_TCP] += 1
                self.look_for_bootstrap(frame, length, transport)
            elif protocol == 1:
                self.noise[N_ICMP] += 1
            elif protocol == 2:
                self.noise[N_IGMP] += 1
            elif protocol == 17:
                self.noise[N_PTP if is_ptp(frame, length, transport) else N_UDP] += 1
            else:
                self.noise[N_IP4] += 1
        elif kind == 0x86DD and length >= at + 40:
            protocol = frame[at + 6]
            transport = at + 40
            if protocol == 0 and length >= transport + 8:  # hop-by-hop: neighbour discovery's multicast reports
                protocol = frame[transport]
                transport += (<size_t>frame[transport + 1] + 1) * 8
            if not inside and length > transport and self.count_inside(protocol, frame + transport, length - transport):
                return
            if protocol == 6:
                self.noise[N_TCP] += 1
                self.look_for_bootstrap(frame, length, transport)
            elif protocol == 58:
                self.noise[N_ICMP6] += 1
            elif protocol == 17:
                self.noise[N_PTP if is_ptp(frame, length, transport) else N_UDP] += 1
            else:
                self.noise[N_IP6] += 1
        else:
            self.noise[N_OTHER] += 1

    cdef void look_for_bootstrap(self, const uint8_t *frame, size_t length, size_t tcp) noexcept nogil:
        cdef size_t data
        if length < tcp + 20:
            return
        data = tcp + (frame[tcp + 12] >> 4) * 4
        if length >= data + 8 and le64(frame + data) == HANDSHAKE_MAGIC:
            self.bootstrap += 1

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
        """Survey what the ring at this address holds now, about `limit` packets at most so that signals are
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
        """True when the producer has closed the ring and everything in it was surveyed."""
        return bool(fc_ring_drained(<fc_ring *><size_t>ring_address))

    def report(self) -> dict:
        """Observations as plain dictionaries, keys as in docs/use/inspect.md. Flows in order of appearance."""
        cdef int i
        return {
            "packets": {
                "total": self.packets,
                **{name: self.status[i] for i, name in enumerate(STATUS_NAMES)},
            },
            "first_ns": self.first_ns, "last_ns": self.last_ns,
            "per_capture": [self.per_stream[i] for i in range(STREAMS_MAX)],
            "cut": {"longest_captured": self.longest_cut, "other_traffic": self.cut_other},
            "unlisted_flow_packets": self.unlisted,
            "encapsulated": {REFUSAL_NAMES[i]: self.refused[i] for i in range(1, FC_REFUSALS) if self.refused[i]},
            "noise": {name: self.noise[i] for i, name in enumerate(NOISE_NAMES) if self.noise[i]},
            "bootstrap_handshakes": self.bootstrap,
            "flows": [_flow(&self.flows[i]) for i in range(<int>self.n_flows)],
        }


cdef bint is_ptp(const uint8_t *frame, size_t length, size_t udp) noexcept nogil:
    return length >= udp + 4 and (be16(frame + udp + 2) == 319 or be16(frame + udp + 2) == 320)


# -- report ---------------------------------------------------------------------------------------------

cdef dict _tally(const Tally *t):
    return {t.key[i]: t.count[i] for i in range(t.used)}


cdef dict _mirrors(const Tally *t):
    """{"ERSPAN II session 7": packets}: the mirrors that had wrapped a flow's packets."""
    return {f"{TUNNEL_NAMES[key >> 32]} session {key & 0xFFFFFFFF}": n for key, n in _tally(t).items()}


cdef list _regions(const Region *regions, uint32_t used):
    return [(regions[i].rkey, regions[i].address, regions[i].size) for i in range(used)]


cdef dict _sequence(const Sequence *s):
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


cdef dict _flow(const Flow *f):
    width = 4 if f.ip_version == 4 else 16
    cts = None
    if f.cts:
        cts = {
            "count": f.cts,
            "layouts": {CTS_LAYOUT_NAMES[i]: f.cts_layout[i] for i in range(CTS_LAYOUTS) if f.cts_layout[i]},
            "first_number": f.cts_first, "last_number": f.cts_last, "number_jumps": f.cts_jumps,
            "fifo_steps": {"256": f.cts_steps[0], "512": f.cts_steps[1], "other": f.cts_steps_other},
            "sizes": _tally(&f.cts_sizes), "tags": _tally(&f.cts_tags),
            "regions": _regions(f.cts_regions, f.n_cts_regions),
        }
    return {
        "src": address((<const uint8_t *>f.src)[:width]), "dst": address((<const uint8_t *>f.dst)[:width]),
        "dest_qp": f.dest_qp, "captures": [i for i in range(STREAMS_MAX) if f.streams >> i & 1],
        "packets": f.packets, "bytes": f.bytes, "payload_bytes": f.payload_bytes,
        "max_payload": f.max_payload, "first_ns": f.first_ns, "last_ns": f.last_ns,
        "icrc": {"ok": f.icrc_ok, "wrong": f.icrc_wrong}, "congestion_marked": f.congestion,
        "opcodes": {opcode_name(i): f.opcodes[i] for i in range(256) if f.opcodes[i]},
        "tclass": _tally(&f.tclass), "vlan": _tally(&f.vlan), "mirrors": _mirrors(&f.mirror), "udp_sport": _tally(&f.sport),
        "source_qps": _tally(&f.src_qp),
        "requests": _sequence(&f.seq) if f.seq.packets else None,
        "answers": {
            "acks": f.acks, "rnr_naks": f.rnr, "last_msn": f.msn,
            "naks": {NAK_NAMES[i]: f.naks[i] for i in range(NAK_KINDS) if f.naks[i]},
            "psn_low": f.answer_low, "psn_high": f.answer_high,
        } if f.answered else None,
        "messages": _messages(f),
        "cts": cts,
        "payload": {
            "ll_packets": f.ll, "ll128_packets": f.ll128, "constant_packets": f.constant,
            "raw_packets": f.raw, "first_flag": f.flag_first, "last_flag": f.flag_last,
            "flag_steps": f.flag_steps, "flag_jumps": f.flag_jumps,
        },
        "regions": _regions(f.regions, f.n_regions),
    }


cdef dict _messages(const Flow *f):
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
            "split_little_endian": {i: f.imm_split_little[i] for i in range(SPLIT_MAX + 1) if f.imm_split_little[i]},
            "split_big_endian": {i: f.imm_split_big[i] for i in range(SPLIT_MAX + 1) if f.imm_split_big[i]},
        },
    }
