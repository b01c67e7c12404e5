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

/* The 15 cache lines that a half-slice becomes. All its 16 lines are loaded before the first store, each once and
 * upwards, which is what processors fetch ahead best. Lines 0..3 lie together with word 14 of lines 4..7 between
 * them; then come the other 14 words of lines 4..7. Returns `wrong` with what is wrong in their flags. */
FC_ONE_WAY __m512i ll128_half(uint8_t *dst, const uint8_t *half, __m512i want, __m512i wrong, const uint8_t *next,
                              const int fetch, const int regular)
{
    const __m512i sixth = _mm512_set1_epi64(6);
    __m512i a[8], b[8]; /* words 0..7 and 8..15 of each line: registers, as every index is a constant */
#define LOAD(i)                                                                                                      \
    a[i] = _mm512_loadu_si512(half + FC_LL128_LINE * (i)), b[i] = _mm512_loadu_si512(half + FC_LL128_LINE * (i) + 64), \
    fc_fetch(next + FC_LL128_LINE * (i), fetch), fc_fetch(next + FC_LL128_LINE * (i) + 64, fetch)
    LOAD(0), LOAD(1), LOAD(2), LOAD(3), LOAD(4), LOAD(5), LOAD(6), LOAD(7);
#undef LOAD
    __m512i x = _mm512_ternarylogic_epi64(wrong, b[0], want, OR_XOR);
    __m512i y = _mm512_ternarylogic_epi64(_mm512_xor_si512(b[4], want), b[1], want, OR_XOR);
    x = _mm512_ternarylogic_epi64(x, b[2], want, OR_XOR);
    y = _mm512_ternarylogic_epi64(y, b[5], want, OR_XOR);
    x = _mm512_ternarylogic_epi64(x, b[3], want, OR_XOR);
    y = _mm512_ternarylogic_epi64(y, b[6], want, OR_XOR);
    x = _mm512_ternarylogic_epi64(x, b[7], want, OR_XOR);
    put(dst + 64 * 0, a[0], regular);
    put(dst + 64 * 1, _mm512_mask_permutexvar_epi64(b[0], 0x80, sixth, b[4]), regular);
    put(dst + 64 * 2, a[1], regular);
    put(dst + 64 * 3, _mm512_mask_permutexvar_epi64(b[1], 0x80, sixth, b[5]), regular);
    put(dst + 64 * 4, a[2], regular);
    put(dst + 64 * 5, _mm512_mask_permutexvar_epi64(b[2], 0x80, sixth, b[6]), regular);
    put(dst + 64 * 6, a[3], regular);
    put(dst + 64 * 7, _mm512_mask_permutexvar_epi64(b[3], 0x80, sixth, b[7]), regular);
    put(dst + 64 * 8, a[4], regular);
    put(dst + 64 * 9, _mm512_permutex2var_epi64(b[4], _mm512_set_epi64(9, 8, 5, 4, 3, 2, 1, 0), a[5]), regular);
    put(dst + 64 * 10, _mm512_alignr_epi64(b[5], a[5], 2), regular);
    put(dst + 64 * 11, _mm512_permutex2var_epi64(b[5], _mm512_set_epi64(11, 10, 9, 8, 5, 4, 3, 2), a[6]), regular);
    put(dst + 64 * 12, _mm512_alignr_epi64(b[6], a[6], 4), regular);
    put(dst + 64 * 13, _mm512_permutex2var_epi64(b[6], _mm512_set_epi64(13, 12, 11, 10, 9, 8, 5, 4), a[7]), regular);
    put(dst + 64 * 14, _mm512_alignr_epi64(b[7], a[7], 6), regular);
    return _mm512_or_si512(x, y);
}

FC_ONE_WAY int64_t ll128(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                         const uint8_t *next, const int fetch, const int regular)
{
    const __m512i want = _mm512_set1_epi64((long long)flag);
    const uint8_t *half = wire;
    uint8_t near[FC_LL128_DATA] __attribute__((aligned(64)));
    __m512i wrong = _mm512_setzero_si512();

    for (uint64_t i = 0; i < halves; i++, half += FC_LL128_WIRE, dst += FC_LL128_DATA, next += FC_LL128_WIRE) {
        if (bytes >= FC_LL128_DATA && ((uintptr_t)dst & 63) == 0) {
            wrong = ll128_half(dst, half, want, wrong, next, fetch, regular);
            bytes -= FC_LL128_DATA;
        } else { /* off a cache line, or the end of the tensor: through a buffer that stays in the cache */
            uint64_t n = bytes < FC_LL128_DATA ? bytes : FC_LL128_DATA;
            wrong = ll128_half(near, half, want, wrong, next, fetch, 1);
            copy(dst, near, n, next, FC_NO_FETCH, regular);
            bytes -= n;
        }
    }
    fc_fetch(next, fetch); /* see copy() */
    if (__builtin_expect(_mm512_test_epi64_mask(wrong, wrong) & 0x80, 0)) /* word 15 is the flag */
        return fc_ll128_bad_line(wire, 8 * halves, flag);
    return -1;
}

FC_KERNELS(fc_place_avx512, "avx512")

#endif
