/* The same loads and stores as Adam out of place, with one addition each instead of the arithmetic; and loads alone. */
#ifndef FLOWCHECK_ROOF_H
#define FLOWCHECK_ROOF_H

#include <stdint.h>

/* t1[k] = t[k] + g for k of 0..2. Stores go past the cache, or, where t1 is t, through it (in place). narrow: g
 * is 16 bits wide. n a multiple of 16, every array on a cache line. The widest vectors that the processor has. */
void fcb_roof(const void *g, int narrow, float **t, float **t1, uint64_t n);

/* Every cache line of `bytes` once, into registers; a multiple of 256, on a cache line. The result is of no use. */
uint64_t fcb_read(const void *data, uint64_t bytes);

#endif
