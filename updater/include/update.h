/* One step of an optimizer over one contiguous piece of one tensor: a single pass over memory, out of place.
 *
 *     version t      p m v x  --+
 *     gradient       g        --+-->  version t+1   p1 m1 v1 x1 (low)
 *
 * All of version t+1 is written with non-temporal stores; version t is only read. The order of roundings is part of
 * the contract: `order` names whose it is, and every kernel (AVX-512, AVX2, portable) gives the same bits. That
 * holds only if the compiler never contracts a*b+c by itself: these files are compiled with -ffp-contract=off, and
 * every fused multiply-add that torch's kernels contain is written as one.
 *
 * Rules for the caller
 *   - p1, m1, v1, x1 (those that are used) have the same address modulo 64, or all goes through a slow path. `low`
 *     then lies at the same element modulo 16 (32 bytes).
 *   - fcu_fence() before anything that tells another thread that a piece is there. The pool does it.
 *   - Kernels keep no state. Several threads may work on different pieces.
 * The kernels are chosen once, when the library is loaded; FLOWCHECK_SIMD=avx2 or =portable takes a lesser one.
 */
#ifndef FLOWCHECK_UPDATE_H
#define FLOWCHECK_UPDATE_H

#include <stddef.h>
#include <stdint.h>

#include "sums.h"

/* Whose order of roundings (docs/understand/updater.md has them as formulas). */
enum { FCU_TORCH_CPU, FCU_CUDA_FOREACH, FCU_CUDA_FUSED, FCU_ORDERS };
/* The square root of torch-cpu: IEEE; a call of the library's; or a textbook sequence behind an estimate of the
 * reciprocal root: of 12 bits (rsqrtps), a coupled and a residual step with single operations; of 14 bits (vrsqrt14ps),
 * a residual step, a coupled step or a Newton step, fused. update_body.h has them. */
enum {
    FCU_SQRT_IEEE, FCU_SQRT_CALL, FCU_SQRT_RSQRT, FCU_SQRT_RSQRT14, FCU_SQRT_RSQRT14_COUPLED, FCU_SQRT_RSQRT14_NEWTON,
};
enum { FCU_F32, FCU_BF16, FCU_F16, FCU_GRADS };

/* What happens to a gradient before the optimizer sees it, in this order. */
enum {
    FCU_DIVIDE = 1,        /* by the averaging divisor, rounded to the gradient's own type  */
    FCU_TIMES = 2,         /* the same as a product with the reciprocal (torch on CUDA)     */
    FCU_UNSCALE = 4,       /* AMP: times the reciprocal of the loss scale                   */
    FCU_UNSCALE_DIV = 8,   /* AMP inside a fused kernel: divided by the loss scale          */
    FCU_CLIP = 16,         /* times the clip coefficient of the step record                 */
    FCU_NEGATE = 32,       /* maximize                                                      */
};

typedef void (*fcu_sqrt_call)(long long n, const float *in, float *out, long long mode);

/* Constants of one step of one parameter group, already rounded as torch rounds them. */
typedef struct fcu_rule {
    int sgd;                /* else Adam                                                                       */
    int held;               /* element type of parameters and states; in 16 bits the gradient has the same type */
    int order, sqrt_mode, grad, ops;
    int amsgrad;
    int decay;              /* 0 none, 1 into the gradient, 2 decoupled                                         */
    int lerp_far;           /* |1-beta1| >= 0.5: lerp counts from the other end                                 */
    int omb2_is_one;        /* addcmul's own case for a factor of one (CUDA foreach)                            */
    float divisor, scale, clip;
    float weight_decay;     /* decay 2: the factor 1-lr*wd; CUDA fused: lr*wd                                   */
    float beta1, w1;        /* w1: 1-beta1, or -beta1 where lerp_far                                            */
    float beta2, omb2;
    float bc2_sqrt, eps;
    float step;             /* -lr/bc1; CUDA fused: lr/bc1; SGD: -lr                                            */
    int momentum_state;     /* SGD: 0 no momentum, 1 first step (the buffer becomes the gradient), 2 later      */
    int nesterov;
    float momentum, undamped;
    fcu_sqrt_call call;
    int low;                /* element type of the low-precision copy: FCU_BF16 or FCU_F16                      */
} fcu_rule;

typedef struct fcu_piece {
    uint64_t n;
    const void *g;
    const float *p, *m, *v, *x;
    float *p1, *m1, *v1, *x1;
    uint16_t *low;          /* NULL: there is no 16-bit copy of fp32 parameters                                 */
    uint64_t odd;           /* of the n, the last ones that torch computes in a scalar loop of other roundings:
                             * torch-cpu-fused, and 16 bits alone                                               */
} fcu_piece;                /* held in 16 bits: elements of 2 bytes lie behind these pointers, of any alignment */

/* What makes no difference to a bit, but to time. together: vectors (1, 2, 4, 8) of an array that are stored in a row.
 * ahead: bytes by which each array is fetched ahead, 0 for not at all. */
typedef struct fcu_tuning { int together; uint32_t ahead; } fcu_tuning;

typedef struct fcu_kernels {
    const char *name;
    void (*update)(const fcu_rule *rule, const fcu_piece *piece, const fcu_tuning *tuning);
    /* Square roots by one of the sequences; only those that fcu_has_root() says this processor has. */
    void (*roots)(float *out, const float *in, uint64_t n, int how);
    /* fp32 to bf16 or fp16, to nearest even, regular stores. */
    void (*narrow)(uint16_t *out, const float *in, uint64_t n, int type);
    /* Weighted sums of the first k elements of so many blocks that follow each other (sums.c). */
    fcs_blocks *sums;
} fcu_kernels;

extern const fcu_kernels fcu_avx512, fcu_avx2, fcu_portable;
extern const fcu_kernels *fcu_all[4];  /* those of this processor, best first, NULL at the end */
extern const fcu_kernels *fcu_best;
const fcu_kernels *fcu_named(const char *name); /* "": the best; NULL: none of this processor */

/* Elements [from, from+n) of a piece of this rule as a piece of their own. */
fcu_piece fcu_part(const fcu_piece *piece, const fcu_rule *rule, uint64_t from, uint64_t n);

int fcu_has_root(int how); /* FCU_SQRT_CALL aside */
void fcu_fence(void);
void fcu_copy(void *dst, const void *src, size_t bytes);  /* non-temporal; any alignment */

/* One tensor to sum: its memory stays as it is until fcu_wait says the batch is done; then `sum` is its checksum. */
typedef struct fcu_sum { const void *data; uint64_t n, sum; int size; } fcu_sum;

/* Bytes to copy past the cache, to memory that does not overlap them. */
typedef struct fcu_block { void *to; const void *from; uint64_t bytes; } fcu_block;

/* -- workers ---------------------------------------------------------------------------------------------------
 * Batches are done in the order they were submitted, their pieces in order, cut into chunks. A worker that finds
 * no chunk left in one batch goes on with the next: nobody waits for the slowest. One thread submits and waits. */
typedef struct fcu_pool fcu_pool;
fcu_pool *fcu_pool_start(int threads, const fcu_kernels *kernels, fcu_tuning tuning); /* NULL: no memory, no thread */
/* rules[rule_of[i]] is applied to pieces[i]; everything stays where it is until fcu_wait says the batch is done. */
uint64_t fcu_submit(fcu_pool *pool, const fcu_rule *rules, const uint32_t *rule_of, const fcu_piece *pieces,
                    uint32_t count);
uint64_t fcu_submit_sums(fcu_pool *pool, fcu_sum *sums, uint32_t count); /* 0: no memory, as above */
uint64_t fcu_submit_copies(fcu_pool *pool, const fcu_block *blocks, uint32_t count); /* 0: no memory, as above */
/* call(of, i) for each i below count, each on some worker. */
typedef void fcu_call(void *of, uint32_t i);
uint64_t fcu_submit_calls(fcu_pool *pool, fcu_call *call, void *of, uint32_t count); /* 0: no memory, as above */
/* What no worker has begun is not done: all batches end as soon as the chunks under way are. */
void fcu_cancel(fcu_pool *pool);
/* This batch and all before it are done? Waits for it so many nanoseconds, without end if negative. */
int fcu_wait(fcu_pool *pool, uint64_t ticket, int64_t nanoseconds);
/* Finishes what was submitted. In another process than the pool's it does nothing: a fork has none of its threads. */
void fcu_pool_stop(fcu_pool *pool);

#endif
