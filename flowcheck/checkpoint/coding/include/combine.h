/* Streams of bytes multiplied by a matrix over GF(2^8): what encodes parity, and what takes lost data back.
 *
 *   out[i][b] = sum over j of c[i * k + j] * in[j][b]          i < rows, j < k, b < n
 *
 * The field is isa-l's: polynomial 0x11d. Sums are XOR. Streams overlap neither each other nor what comes out; they may
 * begin anywhere, and are fastest where they begin at multiples of 64. Any thread; nothing is allocated or kept.
 *
 * A kernel is legal on a processor where `here` says so. fcp_kernels lists them, the best first; isa-l's is legal
 * everywhere, chooses by itself among its own, and is what the others are held against.
 */
#ifndef FCP_COMBINE_H
#define FCP_COMBINE_H

#include <stddef.h>
#include <stdint.h>

#define FCP_MOST 32 /* streams in, and streams out */

typedef struct {
    const char *name;
    int (*here)(void);
    void (*combine)(const uint8_t *c, int k, int rows, size_t n, const uint8_t *const *in, uint8_t *const *out);
} fcp_kernel;

extern const fcp_kernel fcp_kernels[]; /* ends with a name that is NULL */

#endif
