/* Bytes of a packet into the gradient arena: payload codecs and coverage bitmaps.
 *
 * A cell is 8 bytes; bit c of a bitmap says that cell c holds valid bytes. Each stream owns its bitmap
 * (single writer); readers may look at the others'. All functions are pure on their arguments.
 */
#ifndef FLOWCHECK_PLACE_H
#define FLOWCHECK_PLACE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FC_CELL 8

/* -- coverage -------------------------------------------------------------------------------- */

/* Any bit set in cells [first, end)? */
static inline int fc_cover_any(const uint64_t *map, uint64_t first, uint64_t end)
{
    while (first < end) {
        uint64_t bit = first & 63, n = 64 - bit;
        if (n > end - first)
            n = end - first;
        uint64_t mask = (n == 64 ? ~0ull : ((1ull << n) - 1)) << bit;
        if (map[first >> 6] & mask)
            return 1;
        first += n;
    }
    return 0;
}

static inline void fc_cover_set(uint64_t *map, uint64_t first, uint64_t end)
{
    while (first < end) {
        uint64_t bit = first & 63, n = 64 - bit;
        if (n > end - first)
            n = end - first;
        uint64_t mask = (n == 64 ? ~0ull : ((1ull << n) - 1)) << bit;
        map[first >> 6] |= mask;
        first += n;
    }
}

static inline int fc_cover_bit(const uint64_t *map, uint64_t cell)
{
    return (int)(map[cell >> 6] >> (cell & 63) & 1);
}

/* -- LL (4.1): 16-byte lines of data4 flag4 data4 flag4 ---------------------------------------- */

/* First of `lines` lines whose two flags are not both `flag`, or -1. */
int64_t fc_ll_bad_line(const uint8_t *wire, uint64_t lines, uint32_t flag);

/* Data of lines into dst: `bytes` data bytes, the last line may be used in part. */
void fc_ll_unpack(uint8_t *dst, const uint8_t *wire, uint64_t bytes);

/* -- LL128 (4.2): 128-byte lines, 15 words of data and a flag, permuted in 960-byte halves ------- */

/* First of `lines` lines whose flag is not `flag`, or -1. */
int64_t fc_ll128_bad_line(const uint8_t *wire, uint64_t lines, uint64_t flag);

/* Data offset (multiple of 8) inside its 960-byte half-slice of word `word` (0..14) of line `line` (0..7). */
static inline uint32_t fc_ll128_offset(uint32_t line, uint32_t word)
{
    if (line < 4)
        return 128 * line + 8 * word;
    return word < 14 ? 512 + 112 * (line - 4) + 8 * word : 128 * (line - 4) + 120;
}

#endif
