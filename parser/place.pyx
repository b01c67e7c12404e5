"""The placing kernels one by one, and the short decode: the Python door to parser/include/place.h and middle.h, for
those who measure the kernels (flowcheck.rebuild.calibration, lab.bench) and for tests.

Every function takes the kernel's name and its way, so that all that this processor has can be compared; `names` lists
the kernels, best first, `ways` the ways, and parser.machine.placing() says which of them the engines use.
Addresses are plain integers: the caller keeps the memory alive and large enough.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t


cdef extern from "place.h" nogil:
    enum:
        FC_WAYS
        FC_PLACE_VERSION
    ctypedef struct fc_place_kernels:
        const char *name
        int64_t (*ll[FC_WAYS])(uint8_t *dst, const uint8_t *wire, uint64_t nbytes, uint32_t flag, const uint8_t *next)
        int64_t (*ll128[FC_WAYS])(
            uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t nbytes, uint64_t flag, const uint8_t *next)
        void (*copy[FC_WAYS])(uint8_t *dst, const uint8_t *src, uint64_t nbytes, const uint8_t *next)
    ctypedef struct fc_place_choice:
        const fc_place_kernels *kernels
    const fc_place_kernels *fc_place_all[4]
    const char *fc_way_names[FC_WAYS]
    fc_place_choice fc_placing
    void fc_place_fence()
    uint64_t fc_place_sweep(
        const fc_place_kernels *kernels, int protocol, int way, const uint64_t *to, const uint64_t *payloads,
        const uint64_t *flags, uint64_t n, uint32_t length, uint64_t ahead)
    void fc_place_flush(const uint64_t *at, uint64_t n, uint64_t nbytes)


cdef extern from "middle.h" nogil:
    ctypedef struct fc_middle:
        const uint8_t *ends
        uint32_t version, dest_qp, psn
    int fc_middle_decode(const uint8_t *frame, size_t length, uint32_t mtu, fc_middle *out)


cdef const fc_place_kernels *kernels(str name) except NULL:
    cdef int i = 0
    while fc_place_all[i] != NULL:
        if fc_place_all[i].name == name.encode():
            return fc_place_all[i]
        i += 1
    raise ValueError(f"{name!r} is not a kernel of this processor: {', '.join(names())}")


def names():
    """Kernels of this processor, best first; "portable" is always the last."""
    cdef int i = 0
    out = []
    while fc_place_all[i] != NULL:
        out.append(fc_place_all[i].name.decode())
        i += 1
    return out


def ways():
    """Of every kernel, in the order of fc_way: how bytes are fetched and stored."""
    return [fc_way_names[i].decode() for i in range(FC_WAYS)]


cdef int way_of(str way) except -1:
    try:
        return ways().index(way)
    except ValueError:
        raise ValueError(f"{way!r} is no way of placing: {', '.join(ways())}") from None


def version():
    """What was measured of kernels of another version is worth nothing."""
    return FC_PLACE_VERSION


def in_use():
    """The kernel that was chosen when this library was loaded, as it was in all others."""
    return fc_placing.kernels.name.decode()


def ll(str name, uintptr_t dst, uintptr_t wire, uint64_t nbytes, uint32_t flag, str way="t0"):
    """fc_ll_place: -1, or the first line with a wrong flag."""
    cdef int64_t bad = kernels(name).ll[way_of(way)](
        <uint8_t *>dst, <const uint8_t *>wire, nbytes, flag, <const uint8_t *>wire)
    fc_place_fence()
    return bad


def ll128(str name, uintptr_t dst, uintptr_t wire, uint64_t halves, uint64_t nbytes, uint64_t flag, str way="t0"):
    """fc_ll128_place: -1, or the first line with a wrong flag."""
    cdef int64_t bad = kernels(name).ll128[way_of(way)](
        <uint8_t *>dst, <const uint8_t *>wire, halves, nbytes, flag, <const uint8_t *>wire)
    fc_place_fence()
    return bad


def copy(str name, uintptr_t dst, uintptr_t src, uint64_t nbytes, str way="t0"):
    """fc_copy_place."""
    kernels(name).copy[way_of(way)](<uint8_t *>dst, <const uint8_t *>src, nbytes, <const uint8_t *>src)
    fc_place_fence()


def sweep(
    str name, int protocol, str way, const uint64_t[::1] to, const uint64_t[::1] payloads, const uint64_t[::1] flags,
    uint32_t length, uint64_t ahead,
):
    """One packet behind the other: payloads of `length` wire bytes to the addresses `to`, fetching the packet `ahead`
    further on. protocol: 0 LL, 1 LL128, 2 SIMPLE. Returns the number of packets with a wrong flag."""
    cdef uint64_t n = to.shape[0]
    cdef const fc_place_kernels *chosen = kernels(name)
    cdef int how = way_of(way)
    if n == 0 or <uint64_t>payloads.shape[0] != n or <uint64_t>flags.shape[0] != n or not 0 <= protocol <= 2:
        raise ValueError("one payload and one flag for every place, of one of three protocols")
    with nogil:
        n = fc_place_sweep(chosen, protocol, how, &to[0], &payloads[0], &flags[0], n, length, ahead)
    return n


def flush(const uint64_t[::1] at, uint64_t nbytes):
    """`nbytes` from each of these addresses leave every cache, as far as the processor lets a program do that."""
    if at.shape[0]:
        fc_place_flush(&at[0], at.shape[0], nbytes)


def middle(const uint8_t[::1] frame, uint32_t mtu):
    """fc_middle_decode: (IP version, addresses, QP number, PSN), or None: not a full MIDDLE packet of `mtu` bytes."""
    cdef fc_middle p
    if frame.shape[0] == 0 or not fc_middle_decode(&frame[0], frame.shape[0], mtu, &p):
        return None
    return p.version, p.ends[:8 if p.version == 4 else 32], p.dest_qp, p.psn & 0xffffff
