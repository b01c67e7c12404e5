/* Coverage: a bitmap in which bit c says that cell c (8 bytes of a region) holds valid bytes.
 *
 * A bitmap has one writer, the thread that places; others read it between its runs. No atomics: a locked instruction
 * would drain the non-temporal stores that are under way. Everything works on words; nothing here costs per cell.
 */
#ifndef FLOWCHECK_COVER_H
#define FLOWCHECK_COVER_H

#include <stdint.h>

#define FC_CELL 8

/* The bits of [first, end) that lie in the word of `first`; *n says how many they are. */
static inline uint64_t fc_cover_mask(uint64_t first, uint64_t end, uint64_t *n)
{
    uint64_t bit = first & 63;
    *n = 64 - bit < end - first ? 64 - bit : end - first;
    return (*n == 64 ? ~0ull : (1ull << *n) - 1) << bit;
}

/* Any bit set in cells [first, end)? */
static inline int fc_cover_any(const uint64_t *map, uint64_t first, uint64_t end)
{
    uint64_t n;
    for (; first < end; first += n)
        if (map[first >> 6] & fc_cover_mask(first, end, &n))
            return 1;
    return 0;
}

static inline void fc_cover_set(uint64_t *map, uint64_t first, uint64_t end)
{
    uint64_t n;
    for (; first < end; first += n)
        map[first >> 6] |= fc_cover_mask(first, end, &n);
}

static inline int fc_cover_bit(const uint64_t *map, uint64_t cell)
{
    return (int)(map[cell >> 6] >> (cell & 63) & 1);
}

/* First cell of [first, end) whose bit is `bit`; `end` if there is none. */
static inline uint64_t fc_cover_find(const uint64_t *map, uint64_t first, uint64_t end, int bit)
{
    const uint64_t other = bit ? 0 : ~0ull; /* a word without such a cell */
    uint64_t word;
    if (first >= end)
        return end;
    word = (map[first >> 6] ^ other) & (~0ull << (first & 63));
    first &= ~63ull;
    while (!word) {
        first += 64;
        /* a region that is complete is passed eight words at a time: that is what a closing iteration waits for */
        for (; end > first + 512; first += 512) {
            const uint64_t *w = map + (first >> 6);
            if ((w[0] ^ other) | (w[1] ^ other) | (w[2] ^ other) | (w[3] ^ other) | (w[4] ^ other) | (w[5] ^ other) |
                (w[6] ^ other) | (w[7] ^ other))
                break;
        }
        if (first >= end)
            return end;
        word = map[first >> 6] ^ other;
    }
    first += (uint64_t)__builtin_ctzll(word);
    return first < end ? first : end;
}

/* How many bits are set. */
static inline uint64_t fc_cover_count(const uint64_t *map, uint64_t words)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < words; i++)
        n += (uint64_t)__builtin_popcountll(map[i]);
    return n;
}

/* Gaps in [*first, end): [start, end) of each run of cells without a bit into out, at most `room` of them. Returns how
 * many; *first is where to go on, `end` when there are no more. */
static inline uint64_t fc_cover_gaps(const uint64_t *map, uint64_t *first, uint64_t end, int64_t (*out)[2], uint64_t room)
{
    uint64_t n = 0;
    while (n < room) {
        uint64_t start = fc_cover_find(map, *first, end, 0);
        *first = end;
        if (start == end)
            break;
        *first = fc_cover_find(map, start, end, 1);
        out[n][0] = (int64_t)start;
        out[n][1] = (int64_t)*first;
        n++;
    }
    return n;
}

#endif
