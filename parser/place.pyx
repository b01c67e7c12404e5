"""The placing kernels one by one, and the short decode: the Python door to parser/include/place.h and middle.h
(used by tests).

Every function takes the kernel's name, so that those this processor has can be compared; `names` lists them,
best first, and the state machine uses names()[0] unless FLOWCHECK_SIMD says otherwise.
Addresses are plain integers: the caller keeps the memory alive and large enough.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t


cdef extern from "place.h" nogil:
    ctypedef struct fc_place_kernels:
        const char *name
        int64_t (*ll)(uint8_t *dst, const uint8_t *wire, uint64_t nbytes, uint32_t flag, const uint8_t *next)
        int64_t (*ll128)(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t nbytes, uint64_t flag, const uint8_t *next)
        void (*copy)(uint8_t *dst, const uint8_t *src, uint64_t nbytes, const uint8_t *next)
    const fc_place_kernels *fc_place_all[4]
    const fc_place_kernels *fc_place_best
    void fc_place_fence()
    void fc_cover_set(uint64_t *cover, uint64_t first, uint64_t end)
    int fc_cover_any(const uint64_t *cover, uint64_t first, uint64_t end)


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


def in_use():
    """The kernel that fc_ll_place and the others of place.h call."""
    return fc_place_best.name.decode()


def ll(str name, uintptr_t dst, uintptr_t wire, uint64_t nbytes, uint32_t flag):
    """fc_ll_place: -1, or the first line with a wrong flag."""
    cdef int64_t bad = kernels(name).ll(<uint8_t *>dst, <const uint8_t *>wire, nbytes, flag, <const uint8_t *>wire)
    fc_place_fence()
    return bad


def ll128(str name, uintptr_t dst, uintptr_t wire, uint64_t halves, uint64_t nbytes, uint64_t flag):
    """fc_ll128_place: -1, or the first line with a wrong flag."""
    cdef int64_t bad = kernels(name).ll128(<uint8_t *>dst, <const uint8_t *>wire, halves, nbytes, flag, <const uint8_t *>wire)
    fc_place_fence()
    return bad


def copy(str name, uintptr_t dst, uintptr_t src, uint64_t nbytes):
    """fc_copy_place."""
    kernels(name).copy(<uint8_t *>dst, <const uint8_t *>src, nbytes, <const uint8_t *>src)
    fc_place_fence()


def middle(const uint8_t[::1] frame, uint32_t mtu):
    """fc_middle_decode: (IP version, addresses, QP number, PSN), or None: not a full MIDDLE packet of `mtu` bytes."""
    cdef fc_middle p
    if frame.shape[0] == 0 or not fc_middle_decode(&frame[0], frame.shape[0], mtu, &p):
        return None
    return p.version, p.ends[:8 if p.version == 4 else 32], p.dest_qp, p.psn & 0xffffff


def cover_set(uint64_t[::1] bitmap, uint64_t first, uint64_t end):
    """fc_cover_set on cells [first, end); IndexError outside the bitmap."""
    if end > 64 * <uint64_t>bitmap.shape[0]:
        raise IndexError(f"cell {end} of {64 * bitmap.shape[0]}")
    fc_cover_set(&bitmap[0], first, end)


def cover_any(const uint64_t[::1] bitmap, uint64_t first, uint64_t end):
    """fc_cover_any on cells [first, end); IndexError outside the bitmap."""
    if end > 64 * <uint64_t>bitmap.shape[0]:
        raise IndexError(f"cell {end} of {64 * bitmap.shape[0]}")
    return bool(fc_cover_any(&bitmap[0], first, end))
