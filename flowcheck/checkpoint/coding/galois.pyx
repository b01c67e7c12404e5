"""Matrices over GF(2^8) and streams of bytes multiplied by them (include/combine.h; isa-l's field, polynomial 0x11d).

A matrix is bytes, row after row. Streams are buffers of one length. Functions that touch streams release the GIL; what
they read must not change meanwhile. Any thread.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t

__all__ = ["MOST", "combine", "inverse", "kernels", "multiply", "product", "reciprocal"]


cdef extern from "combine.h" nogil:
    enum: FCP_MOST
    ctypedef struct fcp_kernel:
        const char *name
        int (*here)()
        void (*combine)(const uint8_t *c, int k, int rows, size_t n, const uint8_t **src, uint8_t **out) noexcept nogil
    const fcp_kernel fcp_kernels[3]

cdef extern from "isa-l/erasure_code.h" nogil:
    unsigned char gf_mul(unsigned char a, unsigned char b)
    unsigned char gf_inv(unsigned char a)
    int gf_invert_matrix(unsigned char *src, unsigned char *out, const int n)

MOST = FCP_MOST


def kernels() -> list[str]:
    """Names of those that this processor has, the best first."""
    return [kernel.name.decode() for kernel in fcp_kernels[:2] if kernel.here()]


def multiply(int a, int b) -> int:
    """The product of two elements."""
    return gf_mul(a, b)


def reciprocal(int a) -> int:
    """What makes 1 of it. ZeroDivisionError for 0."""
    if not a:
        raise ZeroDivisionError("0 has no reciprocal")
    return gf_inv(a)


def inverse(matrix: bytes, int n) -> bytes:
    """Of an n x n matrix. ValueError: it has none, or is of another size."""
    if len(matrix) != n * n or not 0 < n <= FCP_MOST:
        raise ValueError(f"{len(matrix)} elements for {n} x {n}")
    given, found = bytearray(matrix), bytearray(n * n)  # isa-l works in the one that it is given
    cdef unsigned char[::1] src = given
    cdef unsigned char[::1] out = found
    if gf_invert_matrix(&src[0], &out[0], n):
        raise ValueError("the matrix has no inverse")
    return bytes(found)


def product(a: bytes, b: bytes, int n) -> bytes:
    """A matrix of n columns times one of n rows."""
    if not 0 < n or len(a) % n or len(b) % n:
        raise ValueError(f"{len(a)} and {len(b)} elements, and {n} between them")
    cdef int columns = len(b) // n
    found = bytearray(len(a) // n * columns)
    cdef int i, j, l, total
    for i in range(len(a) // n):
        for j in range(columns):
            total = 0
            for l in range(n):
                total ^= gf_mul(a[i * n + l], b[l * columns + j])
            found[i * columns + j] = total
    return bytes(found)


def combine(coefficients: bytes, streams, out, kernel: str = "") -> None:
    """out[i] = the sum over j of coefficients[i * len(streams) + j] * streams[j]. kernel: none but this one. ValueError:
    sizes that do not fit, more than MOST streams, a kernel that this processor does not have."""
    cdef int k = len(streams), rows = len(out), i, which = -1, opened = 0
    cdef Py_buffer views[2 * FCP_MOST]
    cdef const uint8_t *src[FCP_MOST]
    cdef uint8_t *dst[FCP_MOST]
    cdef size_t n
    if not 0 < k <= FCP_MOST or not 0 < rows <= FCP_MOST or len(coefficients) != k * rows:
        raise ValueError(f"{len(coefficients)} coefficients for {k} streams in and {rows} out, at most {FCP_MOST} each")
    for i in range(2):
        if fcp_kernels[i].here() and which < 0 and (not kernel or fcp_kernels[i].name.decode() == kernel):
            which = i
    if which < 0:
        raise ValueError(f"{kernel!r} is not one of {', '.join(kernels())}")
    cdef const uint8_t[::1] matrix = coefficients
    try:
        for i in range(k + rows):
            one = streams[i] if i < k else out[i - k]
            PyObject_GetBuffer(one, &views[i], PyBUF_SIMPLE if i < k else PyBUF_WRITABLE)
            opened += 1
            if views[i].len != views[0].len:
                raise ValueError(f"streams of {views[0].len} and {views[i].len} bytes")
        for i in range(k):
            src[i] = <const uint8_t *>views[i].buf
        for i in range(rows):
            dst[i] = <uint8_t *>views[k + i].buf
        n = views[0].len
        if n:
            with nogil:
                fcp_kernels[which].combine(&matrix[0], k, rows, n, src, dst)
    finally:
        for i in range(opened):
            PyBuffer_Release(&views[i])
