/* Sums of gradients and weights, 16 elements at a time. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

#include "measure.h"

#include <immintrin.h>

#define OP static inline __attribute__((always_inline))

OP __m512 widen(const char *p, int type, uint64_t i)
{
    if (type == FCU_F32)
        return _mm512_loadu_ps((const float *)p + i);
    __m256i half = _mm256_loadu_si256((const __m256i *)(p + 2 * i));
    if (type == FCU_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    return _mm512_cvtph_ps(half);
}

OP __m512d low(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
OP __m512d high(__m512 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
OP __m512d square(__m512d x) { return _mm512_mul_pd(x, x); }

OP void gradients(const char *data, int type, uint64_t n, fcm_lanes *sums)
{
    const __m512i inf = _mm512_set1_epi32(0x7f800000), bare = _mm512_set1_epi32(INT32_MAX);
    __m512d a = _mm512_loadu_pd(sums->squares), b = _mm512_loadu_pd(sums->squares + 8);
    __m512i largest = _mm512_setzero_si512();
    uint64_t zeros = 0;
    for (uint64_t i = 0; i < n; i += 16) {
        __m512 x = widen(data, type, i);
        __m512i size = _mm512_and_si512(_mm512_castps_si512(x), bare);
        zeros += (unsigned)__builtin_popcount(_mm512_testn_epi32_mask(size, size));
        __mmask16 odd = _mm512_cmpge_epi32_mask(size, inf);
        if (__builtin_expect(odd, 0)) {
            unsigned nans = (unsigned)__builtin_popcount(_mm512_cmpgt_epi32_mask(size, inf));
            sums->nans += nans, sums->infs += (unsigned)__builtin_popcount(odd) - nans;
            x = _mm512_mask_mov_ps(x, odd, _mm512_setzero_ps());
            size = _mm512_mask_mov_epi32(size, odd, _mm512_setzero_si512());
        }
        largest = _mm512_max_epi32(largest, size);
        a = _mm512_add_pd(a, square(low(x))), b = _mm512_add_pd(b, square(high(x)));
    }
    _mm512_storeu_pd(sums->squares, a), _mm512_storeu_pd(sums->squares + 8, b);
    uint32_t found = (uint32_t)_mm512_reduce_max_epi32(largest);
    sums->largest = found > sums->largest ? found : sums->largest;
    sums->zeros += zeros;
}

OP void moves(const char *before, const char *after, int type, uint64_t n, fcm_lanes *sums)
{
    __m512d a = _mm512_loadu_pd(sums->squares), b = _mm512_loadu_pd(sums->squares + 8);
    __m512d c = _mm512_loadu_pd(sums->change), d = _mm512_loadu_pd(sums->change + 8);
    for (uint64_t i = 0; i < n; i += 16) {
        __m512 x = widen(before, type, i), y = widen(after, type, i);
        a = _mm512_add_pd(a, square(low(x))), b = _mm512_add_pd(b, square(high(x)));
        c = _mm512_add_pd(c, square(_mm512_sub_pd(low(y), low(x))));
        d = _mm512_add_pd(d, square(_mm512_sub_pd(high(y), high(x))));
    }
    _mm512_storeu_pd(sums->squares, a), _mm512_storeu_pd(sums->squares + 8, b);
    _mm512_storeu_pd(sums->change, c), _mm512_storeu_pd(sums->change + 8, d);
}

#include "measure_body.h"

const fcm_kernels fcm_avx512 = { "avx512", gradient, weights };
#else
typedef int fcm_not_here;
#endif
