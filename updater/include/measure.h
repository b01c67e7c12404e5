/* What gradients hold, and how far a step moved the weights: one pass over memory, nothing is written but sums.
 *
 * Work is cut into parts of at most FCM_PART elements that lie behind each other and are of one tensor. Parts know
 * nothing of each other, so threads share them; fcm_fold adds them up in the order in which they stand.
 *
 *     gradient part     squares, largest, zeros, nans, infs, first_nan, first_inf
 *     weights part      squares (of the weights before), change (of what a step did to them)
 *
 * Order and precision, the same for every kernel, whatever threads there are: elements are widened to fp64, where the
 * square of a gradient or a weight is exact; a difference of two weights is rounded once, and its square once. In a
 * block of FCM_BLOCK elements element i goes to lane i % 16; the lanes are added as a tree (8, 4, 2, 1 apart); blocks
 * are added in their order, and so are parts. A NaN or an infinity of a gradient is counted and goes into no sum and no
 * largest; of weights it goes into the sums.
 */
#ifndef FLOWCHECK_MEASURE_H
#define FLOWCHECK_MEASURE_H

#include <stdint.h>

#include "update.h"

enum { FCM_BLOCK = 4096, FCM_PART = 1 << 16, FCM_LANES = 16 };

typedef struct fcm_part {
    const void *data;       /* NULL: not measured now                                                     */
    const void *before;     /* NULL: a gradient; else weights before the step, and data is those after it */
    uint64_t at;            /* of its first byte, behind whatever address the caller says                 */
    uint64_t first, n;      /* elements of the tensor before it; its own                                  */
    uint32_t tensor;
    int type;               /* FCU_F32, FCU_BF16, FCU_F16                                                 */
    double squares, change;
    uint64_t zeros, nans, infs, first_nan, first_inf;
    float largest;          /* absolute value; 0 where nothing is finite                                  */
} fcm_part;

/* Sums of a block's first n elements, n a multiple of FCM_LANES, as `fcm_part` has them; added to what is there. */
typedef struct fcm_lanes {
    double squares[FCM_LANES], change[FCM_LANES];
    uint64_t zeros, nans, infs;
    uint32_t largest;       /* bits of a float without its sign */
} fcm_lanes;

typedef struct fcm_kernels {
    const char *name;       /* as of fcu_kernels */
    void (*gradient)(const void *data, int type, uint64_t n, fcm_lanes *sums);
    void (*weights)(const void *before, const void *after, int type, uint64_t n, fcm_lanes *sums);
} fcm_kernels;

extern const fcm_kernels fcm_avx512, fcm_avx2, fcm_portable;

/* Those that belong to kernels of the updater. */
const fcm_kernels *fcm_of(const fcu_kernels *kernels);

static inline uint64_t fcm_size(int type) { return type == FCU_F32 ? 4 : 2; }

/* Measure one part; what it found before is gone. */
void fcm_measure(const fcm_kernels *kernels, fcm_part *part);

/* The parts of one pass, for a pool's workers: fcu_submit_calls(pool, fcm_call, &pass, count). */
typedef struct fcm_pass { const fcm_kernels *kernels; fcm_part *parts; } fcm_pass;
void fcm_call(void *pass, uint32_t i);

/* Add a part to what stands before it. first_nan, first_inf of `sum` are elements of the tensor, UINT64_MAX: none. */
void fcm_fold(fcm_part *sum, const fcm_part *part);

#endif
