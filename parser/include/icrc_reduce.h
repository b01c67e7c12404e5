/* The end of an ICRC by carry-less multiplication: 128 bits to the 32 of the sum. For icrc_avx512.c and icrc_pclmul.c,
 * which include it after their target pragma and <immintrin.h>. */
#ifndef FLOWCHECK_ICRC_REDUCE_H
#define FLOWCHECK_ICRC_REDUCE_H

#include <stdint.h>

/* 128 -> 96 -> 64 bits (x^96, x^64), then Barrett's division by P. */
static inline __attribute__((always_inline)) uint32_t fc_icrc_reduce(__m128i v)
{
    const __m128i low32 = _mm_set_epi32(0, 0, 0, -1), mu_p = _mm_set_epi64x(0x1db710641, 0x1f7011641);
    v = _mm_xor_si128(_mm_srli_si128(v, 8), _mm_clmulepi64_si128(v, _mm_set_epi64x(0, 0xccaa009e), 0x00));
    v = _mm_xor_si128(_mm_srli_si128(v, 4),
                      _mm_clmulepi64_si128(_mm_and_si128(v, low32), _mm_set_epi64x(0, 0x163cd6124), 0x00));
    __m128i q = _mm_clmulepi64_si128(_mm_and_si128(v, low32), mu_p, 0x00);
    q = _mm_clmulepi64_si128(_mm_and_si128(q, low32), mu_p, 0x10);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(v, q), 1);
}

#endif
