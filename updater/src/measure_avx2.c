/* Sums of gradients and weights, 8 elements at a time, of 16 lanes. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#include "measure.h"

#include <immintrin.h>

#define OP static inline __attribute__((always_inline))

OP __m256 widen(const char *p, int type, uint64_t i)
{
    if (type == FCU_F32)
        return _mm256_loadu_ps((const float *)p + i);
    __m128i half = _mm_loadu_si128((const __m128i *)(p + 2 * i));
    if (type == FCU_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    return _mm256_cvtph_ps(half);
}

OP __m256d low(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
OP __m256d high(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
OP __m256d plus_square(__m256d sum, __m256d x) { return _mm256_add_pd(sum, _mm256_mul_pd(x, x)); }
OP unsigned count(__m256i mask) { return (unsigned)__builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(mask))); }

OP void gradients(const char *data, int type, uint64_t n, fcm_lanes *sums)
{
    const __m256i most = _mm256_set1_epi32(0x7f7fffff), inf = _mm256_set1_epi32(0x7f800000);
    const __m256i bare = _mm256_set1_epi32(INT32_MAX), none = _mm256_setzero_si256();
    __m256d lane[4];
    __m256i largest = none, zeros = none;
    for (int k = 0; k < 4; k++)
        lane[k] = _mm256_loadu_pd(sums->squares + 4 * k);
    for (uint64_t i = 0; i < n; i += 16) {
        for (int half = 0; half < 2; half++) {
            __m256 x = widen(data, type, i + 8 * (unsigned)half);
            __m256i size = _mm256_and_si256(_mm256_castps_si256(x), bare);
            __m256i odd = _mm256_cmpgt_epi32(size, most);
            zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(size, none));
            if (__builtin_expect(!_mm256_testz_si256(odd, odd), 0)) {
                unsigned nans = count(_mm256_cmpgt_epi32(size, inf));
                sums->nans += nans, sums->infs += count(odd) - nans;
                x = _mm256_andnot_ps(_mm256_castsi256_ps(odd), x);
                size = _mm256_andnot_si256(odd, size);
            }
            largest = _mm256_max_epi32(largest, size);
            lane[2 * half] = plus_square(lane[2 * half], low(x));
            lane[2 * half + 1] = plus_square(lane[2 * half + 1], high(x));
        }
    }
    uint32_t found[8], empty[8];
    _mm256_storeu_si256((__m256i *)found, largest), _mm256_storeu_si256((__m256i *)empty, zeros);
    for (int k = 0; k < 8; k++) {
        sums->largest = found[k] > sums->largest ? found[k] : sums->largest;
        sums->zeros += empty[k];
    }
    for (int k = 0; k < 4; k++)
        _mm256_storeu_pd(sums->squares + 4 * k, lane[k]);
}

OP void moves(const char *before, const char *after, int type, uint64_t n, fcm_lanes *sums)
{
    __m256d was[4], moved[4];
    for (int k = 0; k < 4; k++)
        was[k] = _mm256_loadu_pd(sums->squares + 4 * k), moved[k] = _mm256_loadu_pd(sums->change + 4 * k);
    for (uint64_t i = 0; i < n; i += 16) {
        for (int half = 0; half < 2; half++) {
            __m256 x = widen(before, type, i + 8 * (unsigned)half), y = widen(after, type, i + 8 * (unsigned)half);
            was[2 * half] = plus_square(was[2 * half], low(x));
            was[2 * half + 1] = plus_square(was[2 * half + 1], high(x));
            moved[2 * half] = plus_square(moved[2 * half], _mm256_sub_pd(low(y), low(x)));
            moved[2 * half + 1] = plus_square(moved[2 * half + 1], _mm256_sub_pd(high(y), high(x)));
        }
    }
    for (int k = 0; k < 4; k++)
        _mm256_storeu_pd(sums->squares + 4 * k, was[k]), _mm256_storeu_pd(sums->change + 4 * k, moved[k]);
}

#include "measure_body.h"

const fcm_kernels fcm_avx2 = { "avx2", gradient, weights };
#else
typedef int fcm_not_here;
#endif
