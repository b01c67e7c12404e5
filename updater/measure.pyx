"""Norms, extremes and counts of gradients, and how far a step moved the weights (include/measure.h).

    parts = Parts([(tensor, dtype, at, first, n), ...])     once for a layout: n elements of a tensor, `at` bytes behind
                                                            an address, from its element `first` on
    parts.gradients(address, leave)                         where they lie now; tensors of `leave` are not measured
    parts.weights(before, after)                            or: addresses by tensor, of the weights before and after
    measurer = Measurer(threads);  ticket = measurer.begin(parts, keep);  measurer.wait(ticket, seconds)
    parts.found()                                           one Found for each tensor

Order and precision of the sums: include/measure.h. They depend on how a tensor is cut into spans, and not on threads or
kernels. Memory is taken by `Parts` alone. Addresses are plain integers; the caller keeps the memory alive and
unchanged until `wait` says that it is done. One thread calls; the workers never take the GIL.
"""

from collections import namedtuple

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

__all__ = ["Found", "Measurer", "Parts"]


cdef extern from "update.h" nogil:
    enum: FCU_F32, FCU_BF16, FCU_F16
    ctypedef struct fcu_tuning:
        int together
        uint32_t ahead
    ctypedef struct fcu_kernels:
        const char *name
    ctypedef struct fcu_pool:
        pass
    ctypedef void fcu_call(void *of, uint32_t i) noexcept
    const fcu_kernels *fcu_named(const char *name)
    fcu_pool *fcu_pool_start(int threads, const fcu_kernels *kernels, fcu_tuning tuning)
    uint64_t fcu_submit_calls(fcu_pool *pool, fcu_call *call, void *of, uint32_t count)
    int fcu_wait(fcu_pool *pool, uint64_t ticket, int64_t nanoseconds)
    void fcu_pool_stop(fcu_pool *pool)


cdef extern from "measure.h" nogil:
    enum: FCM_PART
    ctypedef struct fcm_part:
        const void *data
        const void *before
        uint64_t at, first, n
        uint32_t tensor
        int type
        double squares, change
        uint64_t zeros, nans, infs, first_nan, first_inf
        float largest
    ctypedef struct fcm_kernels:
        pass
    const fcm_kernels *fcm_of(const fcu_kernels *kernels)
    uint64_t fcm_size(int type)
    ctypedef struct fcm_pass:
        const fcm_kernels *kernels
        fcm_part *parts
    void fcm_call(void *of, uint32_t i)
    void fcm_fold(fcm_part *sum, const fcm_part *part)


TYPES = {"float32": FCU_F32, "bfloat16": FCU_BF16, "float16": FCU_F16}

Found = namedtuple("Found", "elements squares change largest zeros nans infs first_nan first_inf")
Found.__doc__ = """Of one tensor. elements: that were measured; 0: none. squares: their sum of squares, of gradients without
what is not finite, of weights as they were before. change: sum of squares of what was added to weights. largest: of
finite absolute values. first_nan, first_inf: elements of the tensor, counted from 0; -1: there is none."""


cdef class Parts:
    """tensors: how many there are. Raises ValueError for spans that are out of their tensors' order."""

    cdef fcm_part *parts
    cdef fcm_pass pass_
    cdef readonly uint32_t count, tensors

    def __cinit__(self, list spans, uint32_t tensors):
        cdef uint64_t n, first, at
        cdef uint32_t i = 0, tensor
        cdef int type
        self.tensors = tensors
        self.parts = <fcm_part *>calloc(max(sum(-(-span[4] // FCM_PART) for span in spans), 1), sizeof(fcm_part))
        if self.parts == NULL:
            raise MemoryError("what is measured of gradients")
        before = (0, 0)
        for tensor, dtype, at, first, n in spans:
            if tensor >= tensors or (tensor, first) < before:
                raise ValueError(f"a span of tensor {tensor}, from {first} on, of {tensors} tensors, after {before}")
            before, type = (tensor, first + n), TYPES[dtype]
            while n:
                self.parts[i].tensor, self.parts[i].type = tensor, type
                self.parts[i].at, self.parts[i].first, self.parts[i].n = at, first, min(n, <uint64_t>FCM_PART)
                n -= self.parts[i].n
                first += self.parts[i].n
                at += self.parts[i].n * fcm_size(type)
                i += 1
        self.count = i

    def __dealloc__(self):
        free(self.parts)

    def gradients(self, uintptr_t address, leave=frozenset()):
        """address: that every span's `at` is behind. leave: tensors that are not measured."""
        cdef uint32_t i
        cdef bint some = bool(leave)
        for i in range(self.count):
            self.parts[i].before = NULL
            self.parts[i].data = <const void *>(address + self.parts[i].at)
            if some and self.parts[i].tensor in leave:
                self.parts[i].data = NULL

    def weights(self, list before, list after):
        """Addresses by tensor; 0: it is not measured."""
        cdef uint32_t i
        cdef uintptr_t old, new
        for i in range(self.count):
            old, new = before[self.parts[i].tensor], after[self.parts[i].tensor]
            self.parts[i].before = <const void *>(old + self.parts[i].at) if old and new else NULL
            self.parts[i].data = <const void *>(new + self.parts[i].at) if old and new else NULL

    def found(self):
        """Of each tensor, in their order."""
        cdef fcm_part sum
        cdef uint32_t i = 0, tensor
        cdef uint64_t elements
        out = []
        for tensor in range(self.tensors):
            memset(&sum, 0, sizeof(sum))
            sum.first_nan = sum.first_inf = <uint64_t>-1
            elements = 0
            while i < self.count and self.parts[i].tensor == tensor:
                if self.parts[i].data != NULL:
                    elements += self.parts[i].n
                    fcm_fold(&sum, &self.parts[i])
                i += 1
            out.append(Found(elements, sum.squares, sum.change, sum.largest, sum.zeros, sum.nans, sum.infs,
                             <int64_t>sum.first_nan, <int64_t>sum.first_inf))
        return out


cdef class Measurer:
    """threads: workers, 0: on the caller's. kernel: a name of kernels.names(), "" the best."""

    cdef fcu_pool *pool
    cdef const fcm_kernels *kernels
    cdef list under_way

    def __cinit__(self, int threads, str kernel=""):
        cdef bytes asked = kernel.encode()
        cdef const fcu_kernels *chosen = fcu_named(asked)
        if not 0 <= threads <= 256:
            raise ValueError(f"{threads} threads asked for; 0 to 256")
        if chosen == NULL:
            raise ValueError(f"{kernel!r} is not a kernel of this processor")
        self.kernels = fcm_of(chosen)
        self.pool = fcu_pool_start(threads, chosen, fcu_tuning(1, 0))
        if self.pool == NULL:
            raise MemoryError(f"{threads} threads cannot be had")
        self.under_way = []

    def __dealloc__(self):
        self.close()

    def close(self):
        """What was begun is finished. May be called twice."""
        cdef fcu_pool *pool = self.pool
        self.pool = NULL
        if pool != NULL:
            with nogil:
                fcu_pool_stop(pool)
        self.under_way = []

    def begin(self, Parts parts, object keep=None):
        """Measure them; returns a ticket. keep: is kept until that is done, as the parts are."""
        cdef uint64_t ticket
        if self.pool == NULL:
            raise ValueError("the measurer is closed")
        parts.pass_ = fcm_pass(self.kernels, parts.parts)
        with nogil:
            ticket = fcu_submit_calls(self.pool, fcm_call, &parts.pass_, parts.count)
        if not ticket:
            raise MemoryError("what is measured of gradients")
        self.under_way.append((ticket, parts, keep))
        return ticket

    def wait(self, uint64_t ticket, double seconds=-1):
        """Return when this and all that was begun before is done, or, if seconds are given, after that time at the
        latest. Says whether it is done."""
        cdef int64_t nanoseconds = -1 if seconds < 0 else <int64_t>(1e9 * seconds)
        cdef bint done = True
        if self.pool != NULL:
            with nogil:
                done = fcu_wait(self.pool, ticket, nanoseconds)
        if done:
            self.under_way = [one for one in self.under_way if one[0] > ticket]
        return done
