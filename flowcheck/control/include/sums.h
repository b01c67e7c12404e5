/* Position-weighted checksums, as flowcheck/control/checksum.py defines them: of trainers, who load this as a library
 * by ctypes, and of the updater, which has it compiled in. libc and nothing else. Any thread. */
#ifndef FLOWCHECK_SUMS_H
#define FLOWCHECK_SUMS_H

#include <stdint.h>

enum { FCS_BLOCK = 1 << 16 };

/* Of `abreast` (1 or 4) blocks that follow each other, the first k elements of each, `size` (1, 2, 4, 8) bytes wide:
 * sums[b] = sum over i of weight(i) * element(b, i), modulo 2^64. */
typedef void fcs_blocks(const void *data, int abreast, uint64_t k, int size, uint64_t *sums);
fcs_blocks fcs_avx512, fcs_avx2, fcs_portable;

/* The checksum of n elements is fcs_begin(n) plus, modulo 2^64, the parts; `from` is a multiple of FCS_BLOCK, and so is
 * n but in the last. */
uint64_t fcs_begin(uint64_t n);
uint64_t fcs_part(fcs_blocks *blocks_of, const void *data, uint64_t from, uint64_t n, int size);

/* Elements [from, from + n) of a tensor of `whole`, as of fcs_part. */
typedef struct fcs_piece { uint64_t data, from, n, whole, size; } fcs_piece;

/* For trainers: of each piece its part, and of a first one (from 0) fcs_begin(whole) with it. By the best instructions
 * of this processor, or those that FLOWCHECK_SIMD names. */
void fcs_checksums(const fcs_piece *pieces, uint64_t count, uint64_t *sums);

#endif
