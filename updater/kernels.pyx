"""The optimizer kernels (include/update.h): constants in, pieces of tensors in, versions out.

Model: a `Rule` holds the constants of one step of one parameter group. A `Pool` applies rules to pieces, in the
order given, on worker threads of its own (0: on the caller's thread); it also sums tensors up (`checksums`) and copies
them (`copies`). Addresses are plain integers: the caller keeps the memory alive, large enough and unchanged until `wait`
says that the batch is done. Legal calls of a Pool: (submit | checksums | copies | cancel)* wait* close; all from one
thread. The workers never take the GIL. Whoever submits bounds the queue: a slot has one batch for each bucket.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

__all__ = ["Pool", "Rule", "Sums", "checksum", "copy", "in_use", "names", "narrow", "roots", "set_root"]


cdef extern from "sums.h" nogil:
    ctypedef void fcs_blocks(const void *data, int abreast, uint64_t k, int size, uint64_t *sums)
    uint64_t fcs_begin(uint64_t n)
    uint64_t fcs_part(fcs_blocks *blocks_of, const void *data, uint64_t first, uint64_t n, int size)


cdef extern from "update.h" nogil:
    enum: FCU_TORCH_CPU, FCU_CUDA_FOREACH, FCU_CUDA_FUSED
    enum: FCU_SQRT_IEEE, FCU_SQRT_CALL, FCU_SQRT_RSQRT
    enum: FCU_SQRT_RSQRT14, FCU_SQRT_RSQRT14_COUPLED, FCU_SQRT_RSQRT14_NEWTON
    enum: FCU_F32, FCU_BF16, FCU_F16
    enum: FCU_DIVIDE, FCU_TIMES, FCU_UNSCALE, FCU_UNSCALE_DIV, FCU_CLIP, FCU_NEGATE
    ctypedef void (*fcu_sqrt_call)(long long n, const float *src, float *out, long long mode) noexcept nogil
    ctypedef struct fcu_rule:
        int sgd, held, order, sqrt_mode, grad, ops, amsgrad, decay, lerp_far, omb2_is_one
        float divisor, scale, clip, weight_decay, beta1, w1, beta2, omb2, bc2_sqrt, eps, step
        int momentum_state, nesterov
        float momentum, undamped
        fcu_sqrt_call call
        int low
    ctypedef struct fcu_piece:
        uint64_t n
        const void *g
        const float *p
        const float *m
        const float *v
        const float *x
        float *p1
        float *m1
        float *v1
        float *x1
        uint16_t *low
        uint64_t odd
    ctypedef struct fcu_tuning:
        int together
        uint32_t ahead
    ctypedef struct fcu_kernels:
        const char *name
        void (*update)(const fcu_rule *rule, const fcu_piece *piece, const fcu_tuning *tuning) noexcept nogil
        void (*roots)(float *out, const float *src, uint64_t n, int how) noexcept nogil
        void (*narrow)(uint16_t *out, const float *src, uint64_t n, int type) noexcept nogil
        fcs_blocks *sums
    ctypedef struct fcu_pool:
        pass
    const fcu_kernels *fcu_all[4]
    const fcu_kernels *fcu_best
    const fcu_kernels *fcu_named(const char *name)
    bint fcu_has_root(int how)
    void fcu_copy(void *dst, const void *src, size_t nbytes)
    ctypedef struct fcu_sum:
        const void *data
        uint64_t n, sum
        int size
    ctypedef struct fcu_block:
        void *to
        const void *source "from"
        uint64_t nbytes "bytes"
    fcu_pool *fcu_pool_start(int threads, const fcu_kernels *kernels, fcu_tuning tuning)
    uint64_t fcu_submit(
        fcu_pool *pool, const fcu_rule *rules, const uint32_t *rule_of, const fcu_piece *pieces, uint32_t count)
    uint64_t fcu_submit_sums(fcu_pool *pool, fcu_sum *sums, uint32_t count)
    uint64_t fcu_submit_copies(fcu_pool *pool, const fcu_block *blocks, uint32_t count)
    void fcu_cancel(fcu_pool *pool)
    int fcu_wait(fcu_pool *pool, uint64_t ticket, int64_t nanoseconds)
    void fcu_pool_stop(fcu_pool *pool)


ORDERS = {"torch-cpu": FCU_TORCH_CPU, "torch-cpu-fused": FCU_TORCH_CPU, "torch-cuda-foreach": FCU_CUDA_FOREACH,
          "torch-cuda-fused": FCU_CUDA_FUSED}
ROOTS = {"ieee": FCU_SQRT_IEEE, "rsqrt": FCU_SQRT_RSQRT, "rsqrt14": FCU_SQRT_RSQRT14,
         "rsqrt14-coupled": FCU_SQRT_RSQRT14_COUPLED, "rsqrt14-newton": FCU_SQRT_RSQRT14_NEWTON, "call": FCU_SQRT_CALL}
TOGETHER = (1, 2, 4, 8)
GRADIENTS = {"float32": FCU_F32, "bfloat16": FCU_BF16, "float16": FCU_F16}

cdef fcu_sqrt_call vendor_root = NULL


cdef const fcu_kernels *kernels(str name) except NULL:
    cdef bytes asked = name.encode()
    cdef const fcu_kernels *found = fcu_named(asked)
    if found == NULL:
        raise ValueError(f"{name!r} is not a kernel of this processor: {', '.join(names())}")
    return found


def names():
    """Kernels of this processor, best first; "portable" is always the last."""
    cdef int i = 0
    out = []
    while fcu_all[i] != NULL:
        out.append(fcu_all[i].name.decode())
        i += 1
    return out


def in_use():
    """The kernel that a Pool takes if it is not told otherwise."""
    return fcu_best.name.decode()


def set_root(uintptr_t address):
    """Address of the vendor's vmsSqrt(n, in, out, mode) for rules with root "call"; 0: there is none."""
    global vendor_root
    vendor_root = <fcu_sqrt_call>address


def has_root(str root):
    """Can this processor take square roots so? "call": is there something to call?"""
    return vendor_root != NULL if root == "call" else fcu_has_root(ROOTS[root])


cdef int check_root(str root) except -1:
    if not has_root(root):
        raise ValueError("no vendor's square root was set" if root == "call" else f"no square root {root!r} here")
    return 0


def roots(uintptr_t out, uintptr_t src, uint64_t n, str root, str name=""):
    """n square roots of fp32 by one of ROOTS."""
    cdef const fcu_kernels *k = kernels(name)
    cdef int how = ROOTS[root]
    check_root(root)
    with nogil:
        if how == FCU_SQRT_CALL:
            vendor_root(<long long>n, <const float *>src, <float *>out, 0x2 | 0x140000 | 0x100)
        else:
            k.roots(<float *>out, <const float *>src, n, how)


def narrow(uintptr_t out, uintptr_t src, uint64_t n, str dtype, str name=""):
    """n fp32 to "bfloat16" or "float16", to nearest even."""
    cdef const fcu_kernels *k = kernels(name)
    cdef int kind = GRADIENTS[dtype]
    with nogil:
        k.narrow(<uint16_t *>out, <const float *>src, n, kind)


def copy(uintptr_t dst, uintptr_t src, size_t nbytes):
    """Non-temporal copy; fenced."""
    with nogil:
        fcu_copy(<void *>dst, <const void *>src, nbytes)


cdef int check_size(int size) except -1:
    if size not in (1, 2, 4, 8):
        raise ValueError(f"elements of {size} bytes have no checksum")
    return 0


def checksum(uintptr_t data, uint64_t n, int size, str name=""):
    """The checksum of flowcheck/control/checksum.py over n elements of 1, 2, 4 or 8 bytes, on this thread."""
    cdef const fcu_kernels *k = kernels(name)
    cdef uint64_t found
    check_size(size)
    with nogil:
        found = fcs_begin(n) + fcs_part(k.sums, <const void *>data, 0, n, size)
    return found


cdef class Rule:
    """Constants of one step of one group. Keywords are the fields of fcu_rule; floats are rounded to fp32 here.

    order, root, grad, low: names of ORDERS, ROOTS, GRADIENTS ("" low: no low-precision copy). held: of GRADIENTS, what
    parameters and states are held in; where that has 16 bits, the gradient has the same type.
    """

    cdef fcu_rule rule

    def __cinit__(
        self, *, bint sgd=False, str order="torch-cpu", str root="ieee", str grad="float32", str low="",
        str held="float32", int decay=0, bint amsgrad=False, bint lerp_far=False, bint omb2_is_one=False,
        double divisor=1, bint divisor_times=False, double scale=1, bint scale_divides=False, object clip=None,
        bint unscale=False, bint maximize=False, double weight_decay=0, double beta1=0, double w1=0,
        double beta2=0, double omb2=0, double bc2_sqrt=1, double eps=0, double step=0,
        int momentum_state=0, bint nesterov=False, double momentum=0, double undamped=1,
    ):
        cdef fcu_rule *r = &self.rule
        r.sgd, r.order, r.sqrt_mode, r.grad = sgd, ORDERS[order], ROOTS[root], GRADIENTS[grad]
        r.low, r.held = GRADIENTS[low] if low else 0, GRADIENTS[held]
        if r.held != FCU_F32 and (r.held != r.grad or r.order != FCU_TORCH_CPU):
            raise ValueError(f"parameters held in {held}, a gradient in {grad}, order {order}: there is no kernel")
        r.amsgrad, r.decay, r.lerp_far = amsgrad, decay, lerp_far
        r.omb2_is_one = omb2_is_one
        if divisor != 1:
            r.ops |= FCU_TIMES if divisor_times else FCU_DIVIDE
        if unscale:
            r.ops |= FCU_UNSCALE_DIV if scale_divides else FCU_UNSCALE
        if clip is not None:
            r.ops |= FCU_CLIP
            r.clip = <float><double>clip
        if maximize:
            r.ops |= FCU_NEGATE
        # torch forms the reciprocal in fp32 (CUDA, an averaging divisor).
        r.divisor = <float>1 / <float>divisor if divisor_times else <float>divisor
        r.scale, r.weight_decay, r.beta1, r.w1 = <float>scale, <float>weight_decay, <float>beta1, <float>w1
        r.beta2, r.omb2, r.bc2_sqrt, r.eps = <float>beta2, <float>omb2, <float>bc2_sqrt, <float>eps
        r.step, r.momentum, r.undamped = <float>step, <float>momentum, <float>undamped
        r.momentum_state, r.nesterov = momentum_state, nesterov
        r.call = vendor_root
        check_root(root)


cdef class _Batch:
    """Memory of one batch: lives until the pool has done it."""

    cdef fcu_rule *rules
    cdef uint32_t *rule_of
    cdef fcu_piece *pieces
    cdef fcu_sum *sums
    cdef fcu_block *blocks
    cdef uint32_t count
    cdef object keep
    cdef readonly uint64_t ticket

    def __dealloc__(self):
        free(self.sums)
        free(self.blocks)
        free(self.rules)
        free(self.rule_of)
        free(self.pieces)


cdef class Pool:
    """threads: 0 (work is done inside submit) or the number of workers. kernel: a name of names(), "" the best.

    together, ahead: vectors of an array that are stored in a row (one of TOGETHER), and bytes by which each array is
    fetched ahead; they change the time and no bit.
    """

    cdef fcu_pool *pool
    cdef list batches
    cdef readonly int threads
    cdef readonly str kernel
    cdef readonly int together, ahead

    def __cinit__(self, int threads=0, str kernel="", int together=8, int ahead=0):
        if together not in TOGETHER or not 0 <= ahead <= 1 << 16:
            raise ValueError(f"{together} vectors together, {ahead} bytes ahead: {TOGETHER}, 0 to 65536")
        if not 0 <= threads <= 256:
            raise ValueError(f"{threads} threads asked for; 0 to 256")
        cdef const fcu_kernels *k = kernels(kernel)
        self.pool = fcu_pool_start(threads, k, fcu_tuning(together, ahead))
        if self.pool == NULL:
            raise MemoryError(f"{threads} worker threads could not be started")
        self.threads, self.kernel, self.batches = threads, k.name.decode(), []
        self.together, self.ahead = together, ahead

    def __dealloc__(self):
        if self.pool != NULL:
            with nogil:
                fcu_pool_stop(self.pool)

    def close(self):
        """Finish what was submitted and end the workers; may be called twice."""
        cdef fcu_pool *pool = self.pool
        self.pool = NULL
        if pool != NULL:
            with nogil:
                fcu_pool_stop(pool)
        self.batches = []

    def submit(self, list rules, list pieces, object keep=None):
        """Queue a batch; returns its ticket.

        rules: Rule objects. pieces: (rule index, n, g, p, m, v, x, p1, m1, v1, x1, low, odd), all integers, 0 for
        an array that the rule does not use. keep: kept alive until the batch is done (the gradients).
        """
        cdef _Batch batch = _Batch()
        cdef Rule rule
        cdef fcu_piece *c
        cdef uint32_t i
        cdef uint64_t ticket
        if self.pool == NULL:
            raise ValueError("the pool is closed")
        batch.rules = <fcu_rule *>calloc(max(len(rules), 1), sizeof(fcu_rule))
        batch.rule_of = <uint32_t *>calloc(max(len(pieces), 1), sizeof(uint32_t))
        batch.pieces = <fcu_piece *>calloc(max(len(pieces), 1), sizeof(fcu_piece))
        if batch.rules == NULL or batch.rule_of == NULL or batch.pieces == NULL:
            raise MemoryError("a batch of updates")
        for i, rule in enumerate(rules):
            batch.rules[i] = rule.rule
        for item in pieces:
            if not item[1]:
                continue
            c = &batch.pieces[batch.count]
            batch.rule_of[batch.count] = item[0]
            if batch.rule_of[batch.count] >= <uint32_t>len(rules):
                raise ValueError(f"a piece names rule {item[0]} of {len(rules)}")
            c.n = item[1]
            c.g = <const void *><uintptr_t>item[2]
            c.p, c.m = <const float *><uintptr_t>item[3], <const float *><uintptr_t>item[4]
            c.v, c.x = <const float *><uintptr_t>item[5], <const float *><uintptr_t>item[6]
            c.p1, c.m1 = <float *><uintptr_t>item[7], <float *><uintptr_t>item[8]
            c.v1, c.x1 = <float *><uintptr_t>item[9], <float *><uintptr_t>item[10]
            c.low, c.odd = <uint16_t *><uintptr_t>item[11], item[12]
            batch.count += 1
        batch.keep = keep
        with nogil:
            ticket = fcu_submit(self.pool, batch.rules, batch.rule_of, batch.pieces, batch.count)
        if not ticket:
            raise MemoryError("a batch of updates")
        batch.ticket = ticket
        self.batches.append(batch)
        return ticket

    def checksums(self, list tensors, object keep=None):
        """Queue the checksums of tensors, (address, elements, bytes of an element) each; returns Sums.

        What was submitted before need not be done when the summing begins.
        """
        cdef _Batch batch = _Batch()
        cdef fcu_sum *sum
        cdef uint64_t ticket
        if self.pool == NULL:
            raise ValueError("the pool is closed")
        batch.sums = <fcu_sum *>calloc(max(len(tensors), 1), sizeof(fcu_sum))
        if batch.sums == NULL:
            raise MemoryError("a batch of checksums")
        for address, elements, size in tensors:
            check_size(size)
            sum = &batch.sums[batch.count]
            sum.data, sum.n, sum.size = <const void *><uintptr_t>address, elements, size
            batch.count += 1
        batch.keep = keep
        with nogil:
            ticket = fcu_submit_sums(self.pool, batch.sums, batch.count)
        if not ticket:
            raise MemoryError("a batch of checksums")
        batch.ticket = ticket
        self.batches.append(batch)
        return Sums(self, batch)

    def copies(self, list blocks, object keep=None):
        """Queue copies past the cache, (to, from, bytes) each, which do not overlap; returns the batch's ticket."""
        cdef _Batch batch = _Batch()
        cdef fcu_block *block
        cdef uint64_t ticket
        if self.pool == NULL:
            raise ValueError("the pool is closed")
        batch.blocks = <fcu_block *>calloc(max(len(blocks), 1), sizeof(fcu_block))
        if batch.blocks == NULL:
            raise MemoryError("a batch of copies")
        for to, source, nbytes in blocks:
            if not nbytes:
                continue
            block = &batch.blocks[batch.count]
            block.to, block.source, block.nbytes = <void *><uintptr_t>to, <const void *><uintptr_t>source, nbytes
            batch.count += 1
        batch.keep = keep
        with nogil:
            ticket = fcu_submit_copies(self.pool, batch.blocks, batch.count)
        if not ticket:
            raise MemoryError("a batch of copies")
        batch.ticket = ticket
        self.batches.append(batch)
        return ticket

    def cancel(self):
        """Let go of what no worker has begun. A wait for what was submitted then lasts for a chunk of each worker, and
        what was to be written there is anything."""
        if self.pool != NULL:
            with nogil:
                fcu_cancel(self.pool)

    def wait(self, uint64_t ticket, double seconds=-1):
        """Return when this batch and all before it are done, or, if seconds are given, after that time at the latest.
        Says whether they are done."""
        cdef int64_t nanoseconds = -1 if seconds < 0 else <int64_t>(1e9 * seconds)
        cdef bint done = True
        if self.pool != NULL:
            with nogil:
                done = fcu_wait(self.pool, ticket, nanoseconds)
        if done:
            self.batches = [batch for batch in self.batches if (<_Batch>batch).ticket > ticket]
        return done


cdef class Sums:
    """Checksums that a pool forms; those of a pool that was closed are there."""

    cdef Pool pool
    cdef _Batch batch

    def __cinit__(self, Pool pool, _Batch batch):
        self.pool, self.batch = pool, batch

    def get(self, double seconds=-1):
        """The checksums in the order of the tensors; None if they are not there within so many seconds."""
        cdef uint32_t i
        if not self.pool.wait(self.batch.ticket, seconds):
            return None
        return [self.batch.sums[i].sum for i in range(self.batch.count)]
