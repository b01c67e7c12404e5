/* Codecs for AVX-512: whole cache lines, permuted in registers, stored past the cache.
 *
 * The pragma, not a compiler flag, sets the target: `pkg-config --cflags libdpdk` ends in -march=corei7 and
 * would undo a flag. Masked stores cost double, so they appear only in front of the first whole line of the
 * destination and behind the last. A wrong flag is accumulated, tested once per packet and searched for
 * afterwards: an exit per line would cost more than the flags do.
 */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,bmi,bmi2")

#include "place.h"
#include "prefetch.h"

#include <immintrin.h>

#define OR_XOR 0xf6 /* vpternlog: a | (b ^ c) */

static inline uint64_t low_bits(uint64_t n) /* n < 64 */
{
    return (1ull << n) - 1;
}

static inline void fetch256(const uint8_t *next)
{
    fc_prefetch_once(next);
    fc_prefetch_once(next + 64);
    fc_prefetch_once(next + 128);
    fc_prefetch_once(next + 192);
}

/* -- copy ------------------------------------------------------------------------------------------ */

static void copy(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next)
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
        fetch256(next);
        __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
        __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);
        _mm512_stream_si512((void *)dst, a);
        _mm512_stream_si512((void *)(dst + 64), b);
        _mm512_stream_si512((void *)(dst + 128), c);
        _mm512_stream_si512((void *)(dst + 192), d);
    }
    for (; bytes >= 64; dst += 64, src += 64, bytes -= 64, next += 64) {
        fc_prefetch_once(next);
        _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
    }
    fc_prefetch_once(next); /* the line in which the next payload ends, as it need not begin on one */
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

static int64_t ll(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next)
{
    const __m512i want = _mm512_set1_epi32((int)flag);
    const uint8_t *from = wire;
    uint64_t left = bytes, head = -(uintptr_t)dst & 63;
    __m512i wrong = _mm512_setzero_si512();

    if (head & 7)
        return fc_place_portable.ll(dst, wire, bytes, flag, next);
    if (head && left) {
        if (head > left)
            head = left;
        wrong = ll_part(dst, from, head, want, wrong);
        dst += head, from += 2 * head, left -= head;
    }
    for (; left >= 128; dst += 128, from += 256, left -= 128, next += 256) {
        fetch256(next);
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
        wrong = _mm512_ternarylogic_epi32(wrong, a, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, b, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, c, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, d, want, OR_XOR);
        _mm512_stream_si512((void *)dst, ll_data(a, b));
        _mm512_stream_si512((void *)(dst + 64), ll_data(c, d));
    }
    if (left >= 64) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        wrong = _mm512_ternarylogic_epi32(wrong, a, want, OR_XOR);
        wrong = _mm512_ternarylogic_epi32(wrong, b, want, OR_XOR);
        _mm512_stream_si512((void *)dst, ll_data(a, b));
        fc_prefetch_once(next);
        fc_prefetch_once(next + 64);
        dst += 64, from += 128, left -= 64, next += 128;
    }
    fc_prefetch_once(next); /* see copy() */
    if (left)
        wrong = ll_part(dst, from, left, want, wrong);
    if (__builtin_expect(_mm512_test_epi32_mask(wrong, wrong) & 0xaaaa, 0)) /* odd dwords are flags */
        return fc_ll_bad_line(wire, (bytes + 7) / 8, flag);
    return -1;
}

/* -- LL128 ----------------------------------------------------------------------------------------- */

/* Words of `line` from `word` on, eight of them (the last may reach into the next line). */
static inline __m512i words(const uint8_t *half, int line, int word)
{
    return _mm512_loadu_si512(half + 128 * line + 8 * word);
}

/* The 15 cache lines that a half-slice becomes, given to STORE(number, register). Lines 0..3 lie together
 * with word 14 of lines 4..7 between them; then come the other 14 words of lines 4..7. Returns `wrong`. */
#define LL128_HALF(half, want, wrong, STORE)                                                                  \
    do {                                                                                                      \
        const __m512i sixth = _mm512_set1_epi64(6);                                                           \
        __m512i b4 = words(half, 4, 8), b5 = words(half, 5, 8), b6 = words(half, 6, 8), b7 = words(half, 7, 8); \
        __m512i b0 = words(half, 0, 8), b1 = words(half, 1, 8), b2 = words(half, 2, 8), b3 = words(half, 3, 8); \
        __m512i x = _mm512_ternarylogic_epi64(wrong, b0, want, OR_XOR);                                       \
        __m512i y = _mm512_ternarylogic_epi64(_mm512_xor_si512(b4, want), b1, want, OR_XOR);                  \
        x = _mm512_ternarylogic_epi64(x, b2, want, OR_XOR);                                                   \
        y = _mm512_ternarylogic_epi64(y, b5, want, OR_XOR);                                                   \
        x = _mm512_ternarylogic_epi64(x, b3, want, OR_XOR);                                                   \
        y = _mm512_ternarylogic_epi64(y, b6, want, OR_XOR);                                                   \
        x = _mm512_ternarylogic_epi64(x, b7, want, OR_XOR);                                                   \
        wrong = _mm512_or_si512(x, y);                                                                        \
        STORE(0, words(half, 0, 0));                                                                          \
        STORE(1, _mm512_mask_permutexvar_epi64(b0, 0x80, sixth, b4));                                         \
        STORE(2, words(half, 1, 0));                                                                          \
        STORE(3, _mm512_mask_permutexvar_epi64(b1, 0x80, sixth, b5));                                         \
        STORE(4, words(half, 2, 0));                                                                          \
        STORE(5, _mm512_mask_permutexvar_epi64(b2, 0x80, sixth, b6));                                         \
        STORE(6, words(half, 3, 0));                                                                          \
        STORE(7, _mm512_mask_permutexvar_epi64(b3, 0x80, sixth, b7));                                         \
        STORE(8, words(half, 4, 0));                                                                          \
        STORE(9, _mm512_permutex2var_epi64(b4, _mm512_set_epi64(9, 8, 5, 4, 3, 2, 1, 0), words(half, 5, 0))); \
        STORE(10, words(half, 5, 2));                                                                         \
        STORE(11, _mm512_permutex2var_epi64(b5, _mm512_set_epi64(11, 10, 9, 8, 5, 4, 3, 2), words(half, 6, 0))); \
        STORE(12, words(half, 6, 4));                                                                         \
        STORE(13, _mm512_permutex2var_epi64(b6, _mm512_set_epi64(13, 12, 11, 10, 9, 8, 5, 4), words(half, 7, 0))); \
        STORE(14, words(half, 7, 6));                                                                         \
    } while (0)

static int64_t ll128(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                     const uint8_t *next)
{
    const __m512i want = _mm512_set1_epi64((long long)flag);
    const uint8_t *half = wire;
    uint8_t near[FC_LL128_DATA] __attribute__((aligned(64)));
    __m512i wrong = _mm512_setzero_si512();

#define PAST_CACHE(i, v) _mm512_stream_si512((void *)(dst + 64 * (i)), v), fc_prefetch_once(next + 64 * (i))
#define INTO_CACHE(i, v) _mm512_store_si512((void *)(near + 64 * (i)), v)
    for (uint64_t i = 0; i < halves; i++, half += FC_LL128_WIRE, dst += FC_LL128_DATA, next += FC_LL128_WIRE) {
        fc_prefetch_once(next + 64 * 15);
        if (bytes >= FC_LL128_DATA && ((uintptr_t)dst & 63) == 0) {
            LL128_HALF(half, want, wrong, PAST_CACHE);
            bytes -= FC_LL128_DATA;
        } else { /* off a cache line, or the end of the tensor: through a buffer that stays in the cache */
            uint64_t n = bytes < FC_LL128_DATA ? bytes : FC_LL128_DATA;
            LL128_HALF(half, want, wrong, INTO_CACHE);
            copy(dst, near, n, next);
            bytes -= n;
        }
    }
    fc_prefetch_once(next);
#undef PAST_CACHE
#undef INTO_CACHE
    if (__builtin_expect(_mm512_test_epi64_mask(wrong, wrong) & 0x80, 0)) /* word 15 is the flag */
        return fc_ll128_bad_line(wire, 8 * halves, flag);
    return -1;
}

const fc_place_kernels fc_place_avx512 = {"avx512", ll, ll128, copy};

#endif
