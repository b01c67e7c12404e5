/* Codecs for AVX2; see place_avx512.c for the approach. Edges go through the portable version. */
#if defined(__x86_64__)
#pragma GCC target("avx2,bmi,bmi2")

#include "ways.h"

#include <immintrin.h>

static inline __m256i load(const uint8_t *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

FC_ONE_WAY void put(uint8_t *at, __m256i v, const int regular)
{
    if (regular)
        _mm256_store_si256((__m256i *)at, v);
    else
        _mm256_stream_si256((__m256i *)at, v);
}

FC_ONE_WAY void copy(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next, const int fetch,
                     const int regular)
{
    uint64_t head = -(uintptr_t)dst & 63;
    if (head > bytes)
        head = bytes;
    memcpy(dst, src, head);
    dst += head, src += head, bytes -= head;
    /* Two stores complete a line: the write-combining buffer leaves as one burst. */
    for (; bytes >= 64; dst += 64, src += 64, bytes -= 64, next += 64) {
        __m256i a = load(src), b = load(src + 32);
        fc_fetch(next, fetch);
        put(dst, a, regular);
        put(dst + 32, b, regular);
    }
    fc_fetch(next, fetch); /* the line in which the next payload ends, as it need not begin on one */
    memcpy(dst, src, bytes);
}

/* Even dwords of four lines, in order. */
static inline __m256i ll_data(__m256i a, __m256i b)
{
    __m256 even = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(even), 0xd8);
}

FC_ONE_WAY int64_t ll(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next,
                      const int fetch, const int regular)
{
    const __m256i want = _mm256_set1_epi32((int)flag), odd = _mm256_set1_epi64x(0xffffffff00000000);
    const uint8_t *from = wire;
    uint64_t left = bytes, head = -(uintptr_t)dst & 63;
    __m256i wrong = _mm256_setzero_si256();

    if (head > left || (head & 7))
        head = left;
    if (head) {
        int64_t bad = fc_place_portable.ll[0](dst, from, head, flag, next);
        if (bad >= 0)
            return bad;
        dst += head, from += 2 * head, left -= head;
    }
    for (; left >= 64; dst += 64, from += 128, left -= 64, next += 128) {
        fc_fetch(next, fetch);
        fc_fetch(next + 64, fetch);
        __m256i a = load(from), b = load(from + 32), c = load(from + 64), d = load(from + 96);
        __m256i ab = _mm256_or_si256(_mm256_xor_si256(a, want), _mm256_xor_si256(b, want));
        __m256i cd = _mm256_or_si256(_mm256_xor_si256(c, want), _mm256_xor_si256(d, want));
        wrong = _mm256_or_si256(wrong, _mm256_or_si256(ab, cd));
        put(dst, ll_data(a, b), regular);
        put(dst + 32, ll_data(c, d), regular);
    }
    fc_fetch(next, fetch); /* see copy() */
    if (__builtin_expect(!_mm256_testz_si256(wrong, odd), 0))
        return fc_ll_bad_line(wire, (bytes + 7) / 8, flag);
    if (left) {
        int64_t bad = fc_place_portable.ll[0](dst, from, left, flag, next);
        if (bad >= 0)
            return (from - wire) / 16 + bad;
    }
    return -1;
}

/* Lines are stored one behind the other, so that what a line writes too much is overwritten by its successor;
 * the words 14 of lines 4..7 come last. `near` has room for the excess of the last one. */
static inline void ll128_half(uint8_t *near, const uint8_t *half)
{
    for (int line = 0; line < 8; line++) {
        uint8_t *to = near + fc_ll128_offset((uint32_t)line, 0);
        const uint8_t *from = half + FC_LL128_LINE * line;
        for (int part = 0; part < FC_LL128_LINE; part += 32)
            _mm256_storeu_si256((__m256i *)(to + part), load(from + part));
    }
    for (uint32_t line = 4; line < 8; line++)
        memcpy(near + fc_ll128_offset(line, 14), half + FC_LL128_LINE * line + 112, 8);
}

FC_ONE_WAY int64_t ll128(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                         const uint8_t *next, const int fetch, const int regular, const int whole)
{
    uint8_t near[FC_LL128_DATA + 64] __attribute__((aligned(64)));
    const uint8_t *half = wire;
    uint64_t wrong = 0;

    for (uint64_t i = 0; i < halves; i++, half += FC_LL128_WIRE, dst += FC_LL128_DATA, next += FC_LL128_WIRE) {
        uint64_t n = bytes < FC_LL128_DATA ? bytes : FC_LL128_DATA;
        for (int line = 0; line < 8; line++) {
            uint64_t found;
            memcpy(&found, half + FC_LL128_LINE * line + 120, 8);
            wrong |= found ^ flag;
        }
        ll128_half(near, half);
        copy(dst, near, n, next, fetch, regular);
        bytes -= n;
    }
    if (__builtin_expect(wrong != 0, 0))
        return fc_ll128_bad_line(wire, 8 * halves, flag);
    return -1;
}

FC_KERNELS(fc_place_avx2, "avx2")

#endif
