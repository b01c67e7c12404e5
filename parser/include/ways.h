/* One kernel in all its ways, for parser/src only.
 *
 * The including file has ll(), ll128() and copy(), marked FC_ONE_WAY, with two arguments more than a kernel: `fetch`,
 * one of FC_NO_FETCH, FC_T0 and FC_NTA, and `regular`; ll128() has a third, `whole`: load all before it stores. They are
 * constants wherever these are called, so the compiler makes one straight loop for each; nothing is decided per line.
 * The whole ways fetch first and then run a loop that does not.
 */
#ifndef FLOWCHECK_WAYS_H
#define FLOWCHECK_WAYS_H

#include "place.h"

#define FC_ONE_WAY static inline __attribute__((always_inline))

FC_ONE_WAY void fc_fetch(const uint8_t *at, const int fetch)
{
    if (fetch == FC_T0)
        fc_prefetch(at);
    else if (fetch == FC_NTA)
        fc_prefetch_once(at);
}

#define FC_WAY(name, fetch, regular)                                                                                 \
    static int64_t ll_##name(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next)  \
    {                                                                                                                \
        return ll(dst, wire, bytes, flag, next, fetch, regular);                                                     \
    }                                                                                                                \
    static int64_t ll128_##name(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,   \
                                const uint8_t *next)                                                                 \
    {                                                                                                                \
        return ll128(dst, wire, halves, bytes, flag, next, fetch, regular, 0);                                       \
    }                                                                                                                \
    static void copy_##name(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next)                   \
    {                                                                                                                \
        copy(dst, src, bytes, next, fetch, regular);                                                                 \
    }

#define FC_WAY_WHOLE(name, first, then, regular)                                                                     \
    static int64_t ll_##name(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next)  \
    {                                                                                                                \
        first(next, 2 * bytes);                                                                                      \
        return ll_##then(dst, wire, bytes, flag, next);                                                              \
    }                                                                                                                \
    static int64_t ll128_##name(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,   \
                                const uint8_t *next)                                                                 \
    {                                                                                                                \
        first(next, FC_LL128_WIRE *halves);                                                                          \
        return ll128(dst, wire, halves, bytes, flag, next, FC_NO_FETCH, regular, 1);                                 \
    }                                                                                                                \
    static void copy_##name(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next)                   \
    {                                                                                                                \
        first(next, bytes);                                                                                          \
        copy_##then(dst, src, bytes, next);                                                                          \
    }

#define FC_EVERY_WAY(kind)                                                                                           \
    {                                                                                                                \
        kind##_none, kind##_t0, kind##_nta, kind##_t0_whole, kind##_nta_whole, kind##_none_regular,                  \
            kind##_t0_regular, kind##_nta_regular, kind##_t0_whole_regular, kind##_nta_whole_regular,                \
    }

#define FC_KERNELS(variable, name)                                                                                   \
    FC_WAY(none, FC_NO_FETCH, 0)                                                                                     \
    FC_WAY(t0, FC_T0, 0)                                                                                             \
    FC_WAY(nta, FC_NTA, 0)                                                                                           \
    FC_WAY_WHOLE(t0_whole, fc_prefetch_bytes, none, 0)                                                               \
    FC_WAY_WHOLE(nta_whole, fc_prefetch_bytes_once, none, 0)                                                         \
    FC_WAY(none_regular, FC_NO_FETCH, 1)                                                                             \
    FC_WAY(t0_regular, FC_T0, 1)                                                                                     \
    FC_WAY(nta_regular, FC_NTA, 1)                                                                                   \
    FC_WAY_WHOLE(t0_whole_regular, fc_prefetch_bytes, none_regular, 1)                                               \
    FC_WAY_WHOLE(nta_whole_regular, fc_prefetch_bytes_once, none_regular, 1)                                         \
    const fc_place_kernels variable = {name, FC_EVERY_WAY(ll), FC_EVERY_WAY(ll128), FC_EVERY_WAY(copy)};

#endif
