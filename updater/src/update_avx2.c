/* Optimizer steps, 8 floats at a time. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")

#include "update.h"

#include <immintrin.h>
#include <string.h>

typedef __m256 V;
enum { N = 8 };
#define OP static inline __attribute__((always_inline))
OP V ld(const float *p) { return _mm256_loadu_ps(p); }
OP void st(float *p, V x) { _mm256_storeu_ps(p, x); }
OP void stream(float *p, V x) { _mm256_stream_ps(p, x); }
OP V set1(float x) { return _mm256_set1_ps(x); }
OP V add(V a, V b) { return _mm256_add_ps(a, b); }
OP V sub(V a, V b) { return _mm256_sub_ps(a, b); }
OP V mul(V a, V b) { return _mm256_mul_ps(a, b); }
OP V dvd(V a, V b) { return _mm256_div_ps(a, b); }
OP V fma_(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
OP V neg(V a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
OP V root(V a) { return _mm256_sqrt_ps(a); }
OP V std_max(V x, V v) { return _mm256_max_ps(v, x); }
OP V larger(V x, V v)
{
    __m256 keep = _mm256_or_ps(_mm256_cmp_ps(x, v, _CMP_GT_OQ), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_ps(v, x, keep);
}
typedef __m256 M;
OP V rsqrt(V a) { return _mm256_rsqrt_ps(a); }
/* On a processor with AVX-512 that was told to use this file: the same estimate as there. */
static __attribute__((noinline, target("avx512f,avx512vl"))) V rsqrt14(V a) { return _mm256_rsqrt14_ps(a); }
OP M rare(V a, uint32_t first, uint32_t n)
{
    __m256i at = _mm256_sub_epi32(_mm256_castps_si256(a), _mm256_set1_epi32((int)first));
    __m256i flip = _mm256_set1_epi32(INT32_MIN), last = _mm256_set1_epi32((int)(n - 1 + 0x80000000u));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_xor_si256(at, flip), last)); /* there is no unsigned one */
}
OP int any(M m) { return !_mm256_testz_si256(_mm256_castps_si256(m), _mm256_castps_si256(m)); }
OP V pick(M m, V yes, V no) { return _mm256_blendv_ps(no, yes, m); }
OP M small(V a) { return _mm256_cmp_ps(a, set1(0x1p-96f), _CMP_LT_OQ); }
OP M special(V a)
{
    return _mm256_or_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NGT_UQ),
                        _mm256_cmp_ps(a, set1(__builtin_inff()), _CMP_NLT_UQ));
}
OP V widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
OP __m128i to_bf16(V x)
{
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0x08);
    return _mm256_castsi256_si128(packed);
}
OP V ld_bf16(const void *p) { return widen_bf16(_mm_loadu_si128(p)); }
OP V ld_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
OP V round_bf16(V x) { return widen_bf16(to_bf16(x)); }
OP V round_f16(V x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
OP void st_16(uint16_t *p, __m128i x, int nt)
{
    if (nt)
        _mm_stream_si128((__m128i *)p, x);
    else
        _mm_storeu_si128((__m128i *)p, x);
}
OP void st_bf16(uint16_t *p, V x, int nt) { st_16(p, to_bf16(x), nt); }
OP void st_f16(uint16_t *p, V x, int nt) { st_16(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), nt); }

#define FETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#include "update_body.h"

const fcu_kernels fcu_avx2 = { "avx2", update, roots, narrow, fcs_avx2 };
#else
typedef int fcu_not_here;
#endif
