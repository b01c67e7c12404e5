/* The invariant CRC by carry-less multiplication of 64 bytes at a time (VPCLMULQDQ).
 *
 * Why not isa-l here too: a 1 KB packet is so short that isa-l's entry, its tail and the second call for the
 * headers are half of the work. Two properties of this sum remove them:
 *   - The initial value ones cancels the first four of the eight 0xff bytes in front: the sum begins with zeros,
 *     and further zeros in front change nothing. So the stream is padded in front to whole blocks, and no tail
 *     exists.
 *   - The headers and all behind them lie together. Their first block or two are loaded with a mask and OR-ed
 *     with the ones that replace the variant fields, straight from a table; nothing is copied.
 *
 *        ip-4  ip                      bth+12                                        ICRC
 *    00 00 | ff | IP . UDP . BTH | ox | <- front: ends `over` bytes behind the BTH     |
 *                                     | block | block | block | ...                    |
 *
 * Folding constants: x^n mod P, bit-reflected and shifted left by one (n above each). Method: Gopal et al., Fast
 * CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009.
 */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.1,bmi,bmi2")

#include "icrc.h"

#include <immintrin.h>

#include "icrc_reduce.h"

#define XOR3 0x96 /* vpternlog: a ^ b ^ c */
#define LIKELY(x) __builtin_expect(!!(x), 1)

enum { LRH_LEFT = 4 };

static inline __m512i both(uint64_t near, uint64_t far)
{
    return _mm512_set_epi64((long long)far, (long long)near, (long long)far, (long long)near, (long long)far,
                            (long long)near, (long long)far, (long long)near);
}

#define BY_2048 both(0x11542778a, 0x1322d1430) /* 2080, 2016 */
#define BY_1536 both(0x1821d8bc0, 0x12e958ac4) /* 1568, 1504 */
#define BY_1024 both(0x1e88ef372, 0x14a7fe880) /* 1056,  992 */
#define BY_512 both(0x154442bd4, 0x1c6e41596)  /*  544,  480 */

/* x times x^distance, modulo P in every lane, plus `next`. */
static inline __m512i fold(__m512i x, __m512i by, __m512i next)
{
    __m512i low = _mm512_clmulepi64_epi128(x, by, 0x00), high = _mm512_clmulepi64_epi128(x, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, XOR3);
}

/* 64 bytes of headers beginning `at` bytes from the IP header (negative: in front of it, where nothing is read). */
static inline __m512i front(const uint8_t *ip, const uint8_t *ones, int64_t at)
{
    __mmask64 real = at >= 0 ? ~0ull : at <= -64 ? 0 : ~0ull << -at;
    return _mm512_or_si512(_mm512_maskz_loadu_epi8(real, ip + at), _mm512_loadu_si512(ones + at));
}

/* 512 bits to the 32 of the sum. */
static inline uint32_t reduce(__m512i x)
{
    /* lanes by 384, 256, 128 and 0 bits */
    const __m512i by = _mm512_set_epi64(0, 0, 0xccaa009e, 0x1751997d0, 0x15a546366, 0xf1da05aa, 0x174359406, 0x3db1ecdc);
    __m512i y = _mm512_xor_si512(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11));
    __m256i z = _mm256_xor_si256(_mm512_castsi512_si256(y), _mm512_extracti64x4_epi64(y, 1));
    __m128i v = _mm_xor_si128(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
    v = _mm_xor_si128(v, _mm512_extracti32x4_epi32(x, 3));
    return fc_icrc_reduce(v);
}

uint32_t fc_icrc_avx512(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len)
{
    const uint8_t *ones = fc_icrc_ones(version);
    const int64_t headers = version == 4 ? 40 : 60;
    const int64_t rest = (int64_t)ib_len - 12 - 4, over = rest & 63;
    const uint8_t *block = bth + 12 + over;
    int64_t blocks = rest >> 6, at = headers + over - 64; /* first byte of the last front block */
    __m512i x;

    if (LIKELY(at <= -LRH_LEFT))
        x = front(ip, ones, at);
    else
        x = fold(front(ip, ones, at - 64), BY_512, front(ip, ones, at));
    for (; blocks & 3; blocks--, block += 64)
        x = fold(x, BY_512, _mm512_loadu_si512(block));
    if (blocks) { /* four independent sums hide the latency of the multiplication */
        __m512i a = fold(x, BY_512, _mm512_loadu_si512(block)), b = _mm512_loadu_si512(block + 64);
        __m512i c = _mm512_loadu_si512(block + 128), d = _mm512_loadu_si512(block + 192);
        for (blocks -= 4, block += 256; blocks; blocks -= 4, block += 256) {
            a = fold(a, BY_2048, _mm512_loadu_si512(block));
            b = fold(b, BY_2048, _mm512_loadu_si512(block + 64));
            c = fold(c, BY_2048, _mm512_loadu_si512(block + 128));
            d = fold(d, BY_2048, _mm512_loadu_si512(block + 192));
        }
        x = fold(a, BY_1536, fold(b, BY_1024, fold(c, BY_512, d)));
    }
    return ~reduce(x);
}

#endif
