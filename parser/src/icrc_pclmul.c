/* The invariant CRC by carry-less multiplication of 16 bytes at a time, for processors without VPCLMULQDQ: the same
 * padding in front, the same folding and the same constants as icrc_avx512.c, which explains them.
 *
 * Eight sums of 16 bytes each, two blocks of 64 on their way: the multiplier takes one product a cycle on the
 * processors that need this, and four sums would wait for its latency.
 */
#if defined(__x86_64__)
#pragma GCC target("avx,pclmul,bmi,bmi2")

#include "icrc.h"

#include <immintrin.h>

#include "icrc_reduce.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)

enum { LRH_LEFT = 4, BLOCK = 64 };

typedef struct block { __m128i lane[4]; } block;

static inline __m128i load(const uint8_t *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

static inline __m128i by(uint64_t near, uint64_t far)
{
    return _mm_set_epi64x((long long)far, (long long)near);
}

#define BY_1024 by(0x1e88ef372, 0x14a7fe880)
#define BY_512 by(0x154442bd4, 0x1c6e41596)

static inline __attribute__((always_inline)) __m128i times(__m128i x, __m128i k)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11));
}

static inline __attribute__((always_inline)) block fold(block x, __m128i k, const uint8_t *next)
{
    for (int i = 0; i < 4; i++)
        x.lane[i] = _mm_xor_si128(times(x.lane[i], k), load(next + 16 * i));
    return x;
}

/* 16 bytes of headers beginning `at` bytes from the IP header. Negative: nothing in front of it is read. */
static inline __m128i front_lane(const uint8_t *ip, const uint8_t *ones, int64_t at)
{
    /* 16 times "zero", then 0..15: loaded n bytes before its middle, it shifts up by n bytes */
    static const uint8_t up[32] = {
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
        0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
    };
    __m128i mask = load(ones + at);
    if (at >= 0)
        return _mm_or_si128(mask, load(ip + at));
    if (at <= -16)
        return mask;
    return _mm_or_si128(mask, _mm_shuffle_epi8(load(ip), load(up + 16 + at)));
}

static inline __attribute__((always_inline)) block front(const uint8_t *ip, const uint8_t *ones, int64_t at)
{
    block x;
    for (int i = 0; i < 4; i++)
        x.lane[i] = front_lane(ip, ones, at + 16 * i);
    return x;
}

static inline uint32_t reduce(block x)
{
    __m128i v = _mm_xor_si128(times(x.lane[0], by(0x3db1ecdc, 0x174359406)), times(x.lane[1], by(0xf1da05aa, 0x15a546366)));
    v = _mm_xor_si128(v, _mm_xor_si128(times(x.lane[2], by(0x1751997d0, 0xccaa009e)), x.lane[3]));
    return fc_icrc_reduce(v);
}

uint32_t fc_icrc_pclmul(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len)
{
    const uint8_t *ones = fc_icrc_ones(version);
    const int64_t headers = version == 4 ? 40 : 60;
    const int64_t rest = (int64_t)ib_len - 12 - 4, over = rest & (BLOCK - 1);
    const uint8_t *at = bth + 12 + over;
    int64_t blocks = rest / BLOCK, last = headers + over - BLOCK; /* first byte of the last front block */
    block x = front(ip, ones, last);

    if (!LIKELY(last <= -LRH_LEFT)) {
        block y = front(ip, ones, last - BLOCK);
        for (int i = 0; i < 4; i++)
            x.lane[i] = _mm_xor_si128(times(y.lane[i], BY_512), x.lane[i]);
    }
    if (blocks & 1)
        x = fold(x, BY_512, at), at += BLOCK, blocks--;
    if (blocks) {
        block a = fold(x, BY_512, at), b;
        for (int i = 0; i < 4; i++)
            b.lane[i] = load(at + BLOCK + 16 * i);
        for (blocks -= 2, at += 2 * BLOCK; blocks; blocks -= 2, at += 2 * BLOCK) {
            a = fold(a, BY_1024, at);
            b = fold(b, BY_1024, at + BLOCK);
        }
        for (int i = 0; i < 4; i++)
            x.lane[i] = _mm_xor_si128(times(a.lane[i], BY_512), b.lane[i]);
    }
    return ~reduce(x);
}

#endif
