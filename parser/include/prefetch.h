/* Loads ahead of need.
 *
 * In assembly because GCC takes __builtin_prefetch for something without effect: a function that does nothing else
 * is "pure", and calls of it vanish without a word.
 */
#ifndef FLOWCHECK_PREFETCH_H
#define FLOWCHECK_PREFETCH_H

#include <stdint.h>

#if defined(__x86_64__)

/* A line that is needed soon, and again. */
static inline void fc_prefetch(const void *at)
{
    __asm__ volatile("prefetcht0 %0" : : "m"(*(const char *)at));
}

/* A line that is read once: it need not stay in the outer caches. */
static inline void fc_prefetch_once(const void *at)
{
    __asm__ volatile("prefetchnta %0" : : "m"(*(const char *)at));
}

/* A line that is compared soon: into the second cache only, where more of them can be under way. */
static inline void fc_prefetch_far(const void *at)
{
    __asm__ volatile("prefetcht1 %0" : : "m"(*(const char *)at));
}

#else
#define fc_prefetch(at) __builtin_prefetch(at)
#define fc_prefetch_far(at) __builtin_prefetch(at, 0, 2)
#define fc_prefetch_once(at) __builtin_prefetch(at, 0, 0)
#endif

/* `bytes` from `at`, wherever they begin on a line. Plainly one line a turn, upwards: unrolled or downwards it is
 * measurably worse (benchmarks/README.md). */
static inline void fc_prefetch_bytes(const uint8_t *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 64)
        fc_prefetch(at + i);
    fc_prefetch(at + bytes - 1);
}

static inline void fc_prefetch_bytes_once(const uint8_t *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 64)
        fc_prefetch_once(at + i);
    fc_prefetch_once(at + bytes - 1);
}

static inline void fc_prefetch_bytes_far(const uint8_t *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 64)
        fc_prefetch_far(at + i);
    fc_prefetch_far(at + bytes - 1);
}

#endif
