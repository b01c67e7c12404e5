/* Codecs for AVX-512: whole cache lines, permuted in registers, stored past the cache.
 *
 * The pragma, not a compiler flag, sets the target: `pkg-config --cflags libdpdk` ends in -march=corei7 and
 * would undo a flag. Masked stores cost double, so they appear only in front of the first whole line of the
 * destination and behind the last. A wrong flag is accumulated, tested once per packet and searched for
 * afterwards: an exit per line would cost more than the flags do.
 */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,bmi,bmi2")

#include "ways.h"

#include <immintrin.h>

#define OR_XOR 0xf6 /* vpternlog: a | (b ^ c) */

static inline uint64_t low_bits(uint64_t n) /* n < 64 */
{
    return (1ull << n) - 1;
}

FC_ONE_WAY void fetch256(const uint8_t *next, const int fetch)
{
    fc_fetch(next, fetch);
    fc_fetch(next + 64, fetch);
    fc_fetch(next + 128, fetch);
    fc_fetch(next + 192, fetch);
}

FC_ONE_WAY void put(uint8_t *at, __m512i v, const int regular)
{
    if (regular)
        _mm512_store_si512((void *)at, v);
    else
        _mm512_stream_si512((void *)at, v);
}

/* -- copy ------------------------------------------------------------------------------------------ */

FC_ONE_WAY void copy(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next, const int fetch,
                     const int regular)
{
    uint64_t head = -(uintptr_t)dst & 63;
    if (head) {
        if (head > bytes)
            head = bytes;
        __mmask64 k = low_bits(head);
        _mm512_mask_storeu_epi8(dst, k, _mm512_maskz_loadu_epi8(k, src));
        dst += head, src += head, bytes -= head;
    }
    for (; bytes >= 256; dst += 256, src += 256, bytes -= 256, next += 256) {
        fetch256(next, fetch);
        __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
        __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);
        put(dst, a, regular);
        put(dst + 64, b, regular);
        put(dst + 128, c, regular);
        put(dst + 192, d, regular);
    }
    for (; bytes >= 64; dst += 64, src += 64, bytes -= 64, next += 64) {
        fc_fetch(next, fetch);
        put(dst, _mm512_loadu_si512(src), regular);
    }
    fc_fetch(next, fetch); /* the line in which the next payload ends, as it need not begin on one */
    if (bytes) {
        __mmask64 k = low_bits(bytes);
        _mm512_mask_storeu_epi8(dst, k, _mm512_maskz_loadu_epi8(k, src));
    }
}

/* -- LL -------------------------------------------------------------------------------------------- */

/* Even dwords of two registers, in order: the data of eight lines. */
static inline __m512i ll_data(__m512i a, __m512i b)
{
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_epi32(a, even, b);
}

/* 1..63 data bytes; returns `wrong` with what is wrong in their lines. */
static inline __m512i ll_part(uint8_t *dst, const uint8_t *wire, uint64_t bytes, __m512i want, __m512i wrong)
{
    uint32_t k = (uint32_t)low_bits((bytes + 7) / 8 * 4); /* dwords of the lines touched */
    __mmask16 ka = (__mmask16)k, kb = (__mmask16)(k >> 16);
    __m512i a = _mm512_maskz_loadu_epi32(ka, wire), b = _mm512_maskz_loadu_epi32(kb, wire + 64);
    wrong = _mm512_mask_ternarylogic_epi32(wrong, ka, a, want, OR_XOR);
    wrong = _mm512_mask_ternarylogic_epi32(wrong, kb, b, want, OR_XOR);
    _mm512_mask_storeu_epi8(dst, low_bits(bytes), ll_data(a, b));
    return wrong;
}

FC_ONE_WAY int64_t ll(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next,
                      const int fetch, const int regular)
{
    const __m512i want = _mm512_set1_epi32((int)flag);
    const uint8_t *from = wire;
    uint64_t left = bytes, head = -(uintptr_t)dst & 63;
    __m512i wrong = _mm512_setzero_si512();

    if (head & 7)
        return fc_place_portable.ll[0](dst, wire, bytes, flag, next);
    if (head && left) {
        if (head > left)
            head = left;
        wrong = ll_part(dst, from, head, want, wrong);
        dst += head, from += 2 * head, left -= head;
    }
    for (; left >= 128; dst += 128, from += 256, left -= 128, next += 256) {
        fetch256(next, fetch);
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
        wrong = _mm512_ternarylogic_epi32(wrong, a, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, b, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, c, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, d, want, OR_XOR);
        put(dst, ll_data(a, b), regular);
        put(dst + 64, ll_data(c, d), regular);
    }
    if (left >= 64) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        wrong = _mm512_ternarylogic_epi32(wrong, a, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, b, want, OR_XOR);
        put(dst, ll_data(a, b), regular);
        fc_fetch(next, fetch);
        fc_fetch(next + 64, fetch);
        dst += 64, from += 128, left -= 64, next += 128;
    }
    fc_fetch(next, fetch); /* see copy() */
    if (left)
        wrong = ll_part(dst, from, left, want, wrong);
    if (__builtin_expect(_mm512_test_epi32_mask(wrong, wrong) & 0xaaaa, 0)) /* odd dwords are flags */
        return fc_ll_bad_line(wire, (bytes + 7) / 8, flag);
    return -1;
}

/* -- LL128 ----------------------------------------------------------------------------------------- */

/* The 15 cache lines that a half-slice becomes: lines 0..3 lie together with word 14 of lines 4..7 between them; then
 * come the other 14 words of lines 4..7. Line by line, or all loaded first, each line once and upwards, before the first
 * is stored: processors disagree, so the whole ways do the latter. Both return `wrong` with what is wrong in the flags,
 * which are word 15; in other words it has no meaning. */
#define LOW8(i) _mm512_loadu_si512(half + FC_LL128_LINE * (i))
#define HIGH8(i) _mm512_loadu_si512(half + FC_LL128_LINE * (i) + 64)
#define NINE _mm512_set_epi64(9, 8, 5, 4, 3, 2, 1, 0)
#define ELEVEN _mm512_set_epi64(11, 10, 9, 8, 5, 4, 3, 2)
#define THIRTEEN _mm512_set_epi64(13, 12, 11, 10, 9, 8, 5, 4)
#define WITH(flags) wrong = _mm512_ternarylogic_epi64(wrong, flags, want, OR_XOR)
#define PUT(i, v) put(dst + 64 * (i), v, regular), fc_fetch(next + 64 * (i), fetch)

FC_ONE_WAY __m512i ll128_lines(uint8_t *dst, const uint8_t *half, __m512i want, __m512i wrong, const uint8_t *next,
                               const int fetch, const int regular)
{
    for (int i = 0; i < 4; i++) {
        __m512i high = HIGH8(i);
        WITH(high);
        PUT(2 * i, LOW8(i));
        PUT(2 * i + 1, _mm512_mask_loadu_epi64(high, 0x80, half + FC_LL128_LINE * (4 + i) + 8 * (14 - 7)));
    }
    __m512i high = HIGH8(4), low = LOW8(5);
    WITH(high);
    PUT(8, LOW8(4));
    PUT(9, _mm512_permutex2var_epi64(high, NINE, low));
    high = HIGH8(5);
    WITH(high);
    PUT(10, _mm512_alignr_epi64(high, low, 2));
    low = LOW8(6);
    PUT(11, _mm512_permutex2var_epi64(high, ELEVEN, low));
    high = HIGH8(6);
    WITH(high);
    PUT(12, _mm512_alignr_epi64(high, low, 4));
    low = LOW8(7);
    PUT(13, _mm512_permutex2var_epi64(high, THIRTEEN, low));
    high = HIGH8(7);
    WITH(high);
    PUT(14, _mm512_alignr_epi64(high, low, 6));
    fc_fetch(next + 64 * 15, fetch);
    return wrong;
}

FC_ONE_WAY __m512i ll128_whole(uint8_t *dst, const uint8_t *half, __m512i want, __m512i wrong, const uint8_t *next,
                               const int fetch, const int regular)
{
    const __m512i sixth = _mm512_set1_epi64(6);
    __m512i low[8], high[8]; /* words 0..7 and 8..15 of each line: registers, as every index is a constant */
/* The empty assembly keeps the compiler from loading in an order of its own. */
#define LOAD(i)                                                                                                      \
    low[i] = LOW8(i), high[i] = HIGH8(i);                                                                            \
    __asm__ volatile("" : "+v"(low[i]), "+v"(high[i]));                                                              \
    WITH(high[i])
    LOAD(0);
    LOAD(1);
    LOAD(2);
    LOAD(3);
    LOAD(4);
    LOAD(5);
    LOAD(6);
    LOAD(7);
#undef LOAD
    for (int i = 0; i < 4; i++) {
        PUT(2 * i, low[i]);
        PUT(2 * i + 1, _mm512_mask_permutexvar_epi64(high[i], 0x80, sixth, high[4 + i]));
    }
    PUT(8, low[4]);
    PUT(9, _mm512_permutex2var_epi64(high[4], NINE, low[5]));
    PUT(10, _mm512_alignr_epi64(high[5], low[5], 2));
    PUT(11, _mm512_permutex2var_epi64(high[5], ELEVEN, low[6]));
    PUT(12, _mm512_alignr_epi64(high[6], low[6], 4));
    PUT(13, _mm512_permutex2var_epi64(high[6], THIRTEEN, low[7]));
    PUT(14, _mm512_alignr_epi64(high[7], low[7], 6));
    return wrong;
}

/* A half-slice off a cache line, or cut by the end of the tensor: through a buffer that stays in the cache. Apart,
 * because the loop beside it would lose registers and its plain addresses. */
static __attribute__((noinline)) __m512i ll128_edge(uint8_t *dst, const uint8_t *half, uint64_t bytes, __m512i want,
                                                    __m512i wrong, const uint8_t *next, int fetch, int regular)
{
    uint8_t near[FC_LL128_DATA] __attribute__((aligned(64)));
    for (int line = 0; line < FC_LL128_WIRE; line += 64)
        fc_fetch(next + line, fetch);
    wrong = ll128_lines(near, half, want, wrong, half, FC_NO_FETCH, 1);
    if (regular)
        copy(dst, near, bytes, near, FC_NO_FETCH, 1);
    else
        copy(dst, near, bytes, near, FC_NO_FETCH, 0);
    return wrong;
}

FC_ONE_WAY int64_t ll128(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                         const uint8_t *next, const int fetch, const int regular, const int whole)
{
    const __m512i want = _mm512_set1_epi64((long long)flag);
    const uint8_t *half = wire;
    __m512i wrong = _mm512_setzero_si512();

    for (uint64_t i = 0; i < halves; i++, half += FC_LL128_WIRE, dst += FC_LL128_DATA, next += FC_LL128_WIRE) {
        uint64_t n = bytes < FC_LL128_DATA ? bytes : FC_LL128_DATA;
        if (__builtin_expect(n == FC_LL128_DATA && ((uintptr_t)dst & 63) == 0, 1))
            wrong = whole ? ll128_whole(dst, half, want, wrong, next, fetch, regular)
                          : ll128_lines(dst, half, want, wrong, next, fetch, regular);
        else
            wrong = ll128_edge(dst, half, n, want, wrong, next, fetch, regular);
        bytes -= n;
    }
    fc_fetch(next, fetch); /* see copy() */
    if (__builtin_expect(_mm512_test_epi64_mask(wrong, wrong) & 0x80, 0)) /* word 15 is the flag */
        return fc_ll128_bad_line(wire, 8 * halves, flag);
    return -1;
}

FC_KERNELS(fc_place_avx512, "avx512")

#endif
