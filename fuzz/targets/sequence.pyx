"""Fuzz inputs as edits of a valid packet sequence: loss, repeats, reordering, damage, forgery, garbage.

    byte 0      which job of jobs.py
    byte 1      FLAG_* below
    then        instructions of four bytes: operation, a, b, c

An instruction acts on the cursor, a place in the job's genuine packets; what it emits is delivered through a
real fc_ring, each frame in memory of exactly its size, so AddressSanitizer sees a read one byte too far.

A packet is genuine if it is a packet of the job, changed at most where routers and mirrors may. It is harmless
if its ICRC is wrong and the machine checks ICRCs. Anything else taints the input: then what is placed need not
be the truth, and only crashes, sanitizers and the books are looked at. Python in charge, one thread.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport abort, free, malloc
from libc.string cimport memcpy, memset

from parser.packetref cimport (
    FC_REF_TRUNCATED, fc_packetref, fc_ring, fc_ring_close, fc_ring_init, fc_ring_publish,
)
from parser.roce cimport FC_ROCE, fc_icrc, fc_icrc_ok, fc_roce, fc_roce_decode

from targets.jobs import make_jobs


cdef enum:
    FLAG_FORGE = 1       # allow packets that lie under a right ICRC
    FLAG_UNCHECKED = 2   # the machine does not check ICRCs
    FLAG_REST = 4        # after the instructions, the rest of the job as it is
    MAX_PACKETS = 2048   # a power of two: entries of the ring
    MAX_FRAME = 10000
    RETIRE = 0xffff      # in a Chunk: close the oldest iteration here
    RECOVER = 0xfffe     # consider_recovery()


cdef struct Genuine:
    uint8_t *data
    uint32_t length
    uint64_t time


cdef struct Emitted:
    fc_packetref *refs
    uint32_t n
    uint32_t tainted
    uint32_t nmarks
    uint32_t mark_at[64]     # between packets: RETIRE or RECOVER
    uint32_t mark_kind[64]


cdef class Packets:
    """Genuine packets of one job, in C memory."""

    cdef Genuine *all
    cdef uint32_t n

    def __cinit__(self, packets):
        cdef uint32_t i
        self.n = len(packets)
        self.all = <Genuine *>malloc(self.n * sizeof(Genuine))
        for i, (time, frame) in enumerate(packets):
            self.all[i].length = len(frame)
            self.all[i].time = time
            self.all[i].data = <uint8_t *>malloc(len(frame))
            memcpy(self.all[i].data, <const uint8_t *>frame, len(frame))


# -- changing a frame -----------------------------------------------------------------------------


cdef void seal(uint8_t *frame, uint32_t length) noexcept nogil:
    """Give a changed frame the ICRC it should have."""
    cdef fc_roce p
    cdef uint32_t crc
    cdef uint8_t *tail
    if fc_roce_decode(frame, length, &p) == FC_ROCE:
        crc = fc_icrc(&p)
        tail = <uint8_t *>p.bth + p.ib_len - 4
        tail[0], tail[1], tail[2], tail[3] = crc & 0xff, crc >> 8 & 0xff, crc >> 16 & 0xff, crc >> 24


cdef void add_to(uint8_t *field, uint32_t width, uint32_t by) noexcept nogil:
    """Big-endian addition."""
    cdef uint32_t i = width
    while i and by:
        i -= 1
        by += field[i]
        field[i] = by & 0xff
        by >>= 8


cdef void forge(uint8_t *frame, uint32_t length, uint8_t what, uint32_t value) noexcept nogil:
    """Change one header or payload field by `value` (signed 16 bits)."""
    cdef fc_roce p
    cdef uint8_t *bth
    cdef uint8_t *ext
    cdef uint32_t delta = value if value < 0x8000 else value - 0x10000
    if fc_roce_decode(frame, length, &p) != FC_ROCE:
        return
    bth = <uint8_t *>p.bth
    ext = bth + 12
    what %= 12
    if what == 0:
        bth[0] = value & 0xff  # opcode: other headers may now lie where the payload was
    elif what == 1:
        add_to(bth + 5, 3, delta & 0xffffff)
    elif what == 2:
        add_to(bth + 9, 3, delta & 0xffffff)
    elif what == 3:
        # far back, or ahead by less than a few hundred iterations: further only costs time
        add_to(bth + 9, 3, (value << 8) & 0xffffff if value & 0x8000 else value % 8192)
    elif what == 4 and p.ib_len >= 32:
        add_to(ext + 4, 4, delta)  # virtual address
    elif what == 5 and p.ib_len >= 32:
        add_to(ext + 12, 4, delta)  # RETH length
    elif what == 6 and p.payload_len >= 8:
        add_to(<uint8_t *>p.payload + 4, 4, delta)  # LL flag
    elif what == 7 and p.payload_len >= 128:
        add_to(<uint8_t *>p.payload + 120, 8, delta)
    elif what == 8 and p.payload_len:
        (<uint8_t *>p.payload)[value % p.payload_len] ^= 0xff
    elif what == 9:
        bth[1] = value & 0xff  # pad count
    elif what == 10 and p.payload_len:
        memset(<uint8_t *>p.payload, value & 0xff, p.payload_len)
    elif what == 11 and p.ib_len > 32:  # all LL flags alike
        for delta in range(0, p.payload_len // 8):
            (<uint8_t *>p.payload)[8 * delta + 4] = value & 0xff
            (<uint8_t *>p.payload)[8 * delta + 5] = value >> 8
            (<uint8_t *>p.payload)[8 * delta + 6] = (<uint8_t *>p.payload)[8 * delta + 7] = 0


cdef void rewrite(uint8_t *frame, uint32_t length, uint8_t what, uint8_t value) noexcept nogil:
    """What a router or a mirror may change: MAC addresses, class, hops, UDP checksum, congestion bits."""
    cdef fc_roce p
    if fc_roce_decode(frame, length, &p) != FC_ROCE:
        return
    what %= 5
    if what == 0:
        frame[value % 12] ^= 0xff
    elif what == 1:
        (<uint8_t *>p.ip)[8 if p.ip_version == 4 else 7] = value
    elif what == 2:
        if p.ip_version == 4:
            (<uint8_t *>p.ip)[1] = value
        else:
            (<uint8_t *>p.ip)[1] = value
            (<uint8_t *>p.ip)[0] = 0x60 | value >> 4
    elif what == 3:
        (<uint8_t *>p.bth)[-1 - value % 2] = value
    else:
        (<uint8_t *>p.bth)[4] = value


cdef uint32_t wrap(uint8_t *to, const uint8_t *frame, uint32_t length, uint8_t kind) noexcept nogil:
    """The frame inside a mirror's tunnel: GRE, ERSPAN I to III or VXLAN over IPv4. Returns the length."""
    cdef uint32_t head, total
    cdef uint8_t *gre = to + 34
    memset(to, 0, 34 + 24)
    kind %= 5
    head = 4 if kind <= 1 else 8 + 8 if kind == 2 else 8 + 12 if kind == 3 else 16
    total = 20 + head + length
    to[12] = 0x08
    to[14] = 0x45
    to[16], to[17] = total >> 8, total & 0xff
    to[22] = 64
    to[23] = 17 if kind == 4 else 47
    to[26] = to[30] = 192
    if kind == 0:
        gre[2], gre[3] = 0x65, 0x58
    elif kind == 1:
        gre[2], gre[3] = 0x88, 0xbe
    elif kind == 2:
        gre[0], gre[2], gre[3], gre[8] = 0x10, 0x88, 0xbe, 0x10
    elif kind == 3:
        gre[0], gre[2], gre[3], gre[8] = 0x10, 0x22, 0xeb, 0x20
    else:
        gre[2], gre[3] = 4789 >> 8, 4789 & 0xff
        gre[4], gre[5] = (16 + length) >> 8, (16 + length) & 0xff
        gre[8] = 0x08
    memcpy(gre + head, frame, length)
    return 34 + head + length


cdef int harmless(const uint8_t *frame, uint32_t length) noexcept nogil:
    """No receiver would take it: not RoCE, or a wrong ICRC."""
    cdef fc_roce p
    return fc_roce_decode(frame, length, &p) != FC_ROCE or not fc_icrc_ok(&p)


# -- the program ----------------------------------------------------------------------------------


cdef void emit(Emitted *out, const uint8_t *frame, uint32_t length, uint64_t time, uint16_t stream) noexcept nogil:
    cdef fc_packetref *ref
    cdef uint8_t *copy
    if out.n == MAX_PACKETS:
        return
    copy = <uint8_t *>malloc(length if length else 1)
    if copy == NULL:
        abort()
    if length:
        memcpy(copy, frame, length)
    ref = &out.refs[out.n]
    ref.data = copy
    ref.length = length
    ref.timestamp_ns = time
    ref.stream = stream
    ref.flags = 0
    out.n += 1


cdef void mark(Emitted *out, uint32_t kind) noexcept nogil:
    if out.nmarks < 64:
        out.mark_at[out.nmarks] = out.n
        out.mark_kind[out.nmarks] = kind
        out.nmarks += 1


cdef void play(Packets packets, const uint8_t *program, size_t size, Emitted *out) noexcept nogil:
    cdef uint32_t flags = program[1], at = 0, n = packets.n, a, b, c, wide, i, length
    cdef uint16_t stream = 0
    cdef uint64_t lag = 0
    cdef size_t pc = 2
    cdef Genuine *g
    cdef uint8_t operation
    cdef uint8_t frame[MAX_FRAME + 128]
    cdef uint8_t wrapped[MAX_FRAME + 128]
    while pc + 4 <= size and out.n < MAX_PACKETS:
        operation, a, b, c = program[pc] % 16, program[pc + 1], program[pc + 2], program[pc + 3]
        wide = b | c << 8
        pc += 4
        g = &packets.all[at % n]
        memcpy(frame, g.data, g.length)
        length = g.length
        if operation == 0:  # as they are
            for i in range(a + 1):
                if at < n:
                    emit(out, packets.all[at].data, packets.all[at].length, packets.all[at].time + lag, stream)
                    at += 1
        elif operation == 1:  # lost
            at += a + 1
        elif operation == 2:  # the sender goes back
            at = at - a - 1 if at > a else 0
        elif operation == 3:  # anywhere
            at = wide % n
        elif operation == 4:  # one overtakes
            i = at + 1 + a % 32
            if i < n:
                emit(out, packets.all[i].data, packets.all[i].length, packets.all[i].time + lag, stream)
        elif operation == 5:  # damage
            # one byte: either the ICRC is wrong now, or it was a byte that may change
            frame[wide % length] ^= a if a else 1
            out.tainted |= flags & FLAG_UNCHECKED
            emit(out, frame, length, g.time + lag, stream)
            at += 1
        elif operation == 6:  # cut
            out.tainted |= flags & FLAG_UNCHECKED
            emit(out, frame, wide % length, g.time + lag, stream)
            at += 1
        elif operation == 7:  # bytes of the input itself
            i = <uint32_t>min(<size_t>wide % 1500, size - pc)
            if not harmless(program + pc, i) or flags & FLAG_UNCHECKED:
                out.tainted = 1
            emit(out, program + pc, i, g.time + lag, stream)
            pc += i
        elif operation == 8:  # changed on the way, rightly
            rewrite(frame, length, a, b)
            emit(out, frame, length, g.time + lag, stream)
            at += 1
        elif operation == 9:  # padded by the link
            i = min(a, <uint32_t>(MAX_FRAME - length))
            memset(frame + length, b, i)
            emit(out, frame, length + i, g.time + lag, stream)
            at += 1
        elif operation == 10:
            stream = a % 2
        elif operation == 11:
            lag += <uint64_t>wide << (a % 24)  # silence
        elif operation == 12:
            mark(out, RETIRE if a % 2 else RECOVER)
        elif operation == 13:  # mirrored through a tunnel
            if length < MAX_FRAME - 64:
                length = wrap(wrapped, frame, length, a)
                emit(out, wrapped, length, g.time + lag, stream)
            at += 1
        elif flags & FLAG_FORGE:
            if operation == 14:
                forge(frame, length, a, wide)
            else:  # headers of one packet, payload of another
                g = &packets.all[wide % n]
                if g.length == length:
                    memcpy(frame + 14 + a % (length - 14), g.data + 14 + a % (length - 14), length - 14 - a % (length - 14))
            seal(frame, length)
            out.tainted = 1
            emit(out, frame, length, packets.all[at % n].time + lag, stream)
            at += 1
    if flags & FLAG_REST:
        while at < n and out.n < MAX_PACKETS:
            emit(out, packets.all[at].data, packets.all[at].length, packets.all[at].time + lag, stream)
            at += 1


cdef class Program:
    """One input played: the packets it delivers, and whether they may lie."""

    cdef Emitted out
    cdef fc_ring *ring

    def __cinit__(self, Packets packets, const uint8_t[::1] data):
        cdef size_t size = data.shape[0]
        memset(&self.out, 0, sizeof(Emitted))
        self.out.refs = <fc_packetref *>malloc(MAX_PACKETS * sizeof(fc_packetref))
        self.ring = <fc_ring *>_cache_line(sizeof(fc_ring))
        with nogil:
            play(packets, &data[0], size, &self.out)

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.out.n):
            free(<void *>self.out.refs[i].data)
        free(self.out.refs)
        free(self.ring)

    @property
    def packets(self):
        return self.out.n

    @property
    def tainted(self):
        return bool(self.out.tainted)

    def runs(self):
        """(stream, address of a closed ring, packets, mark or None) in order; a ring is valid until the next."""
        cdef uint32_t start = 0, end, m = 0, size
        while start < self.out.n or m < self.out.nmarks:
            if m < self.out.nmarks and self.out.mark_at[m] == start:
                m += 1
                yield 0, 0, 0, "retire" if self.out.mark_kind[m - 1] == RETIRE else "recover"
                continue
            end = start
            while (end < self.out.n and self.out.refs[end].stream == self.out.refs[start].stream
                    and not (m < self.out.nmarks and self.out.mark_at[m] == end)):
                end += 1
            fc_ring_init(self.ring, self.out.refs + start, MAX_PACKETS)
            fc_ring_publish(self.ring, end - start)
            fc_ring_close(self.ring)
            yield self.out.refs[start].stream, <uintptr_t>self.ring, end - start, None
            start = end


cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size)


cdef void *_cache_line(size_t size) except NULL:
    cdef void *memory = aligned_alloc(64, (size + 63) // 64 * 64)
    if memory == NULL:
        raise MemoryError
    return memory


JOBS = make_jobs()
_PACKETS = [Packets(job.packets) for job in JOBS]


def decode(bytes data):
    """(job, unchecked, Program) of an input, or None: too short."""
    if len(data) < 2:
        return None
    number = data[0] % len(JOBS)
    return JOBS[number], bool(data[1] & FLAG_UNCHECKED), Program(_PACKETS[number], data)
