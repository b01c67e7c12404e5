/* PSNs have 24 bits on the wire and 64 in our books: the one place that goes from one to the other. */
#ifndef FLOWCHECK_PSN_H
#define FLOWCHECK_PSN_H

#include <stdint.h>

#define FC_PSN_MASK 0xFFFFFFu

/* How far `psn` is from the unwrapped position `from`, the shorter way round: -2^23 .. 2^23 - 1. */
static inline int64_t fc_psn_distance(uint32_t psn, int64_t from)
{
    int64_t ahead = ((int64_t)psn - from) & FC_PSN_MASK;
    return ahead < 0x800000 ? ahead : ahead - 0x1000000;
}

#endif
