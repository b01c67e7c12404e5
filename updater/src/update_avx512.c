/* Optimizer steps, 16 floats at a time. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

#include "update.h"

#include <immintrin.h>
#include <string.h>

typedef __m512 V;
enum { N = 16 };
#define OP static inline __attribute__((always_inline))
OP V ld(const float *p) { return _mm512_loadu_ps(p); }
OP void st(float *p, V x) { _mm512_storeu_ps(p, x); }
OP void stream(float *p, V x) { _mm512_stream_ps(p, x); }
OP V set1(float x) { return _mm512_set1_ps(x); }
OP V add(V a, V b) { return _mm512_add_ps(a, b); }
OP V sub(V a, V b) { return _mm512_sub_ps(a, b); }
OP V mul(V a, V b) { return _mm512_mul_ps(a, b); }
OP V dvd(V a, V b) { return _mm512_div_ps(a, b); }
OP V fma_(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
OP V neg(V a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
OP V root(V a) { return _mm512_sqrt_ps(a); }
OP V std_max(V x, V v) { return _mm512_max_ps(v, x); }
OP V larger(V x, V v)
{
    __mmask16 keep = _mm512_cmp_ps_mask(x, v, _CMP_GT_OQ) | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(keep, v, x);
}
typedef __mmask16 M;
OP V rsqrt14(V a) { return _mm512_rsqrt14_ps(a); }
OP V rsqrt(V a) /* another table than vrsqrt14ps: the 256-bit instruction, twice */
{
    __m256 lo = _mm256_rsqrt_ps(_mm512_castps512_ps256(a)), hi = _mm256_rsqrt_ps(_mm512_extractf32x8_ps(a, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1);
}
OP M rare(V a, uint32_t first, uint32_t n)
{
    __m512i at = _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_set1_epi32((int)first));
    return _mm512_cmpge_epu32_mask(at, _mm512_set1_epi32((int)n));
}
OP int any(M m) { return m != 0; }
OP V pick(M m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }
OP M small(V a) { return _mm512_cmp_ps_mask(a, set1(0x1p-96f), _CMP_LT_OQ); }
OP M special(V a) /* neither above zero nor finite */
{
    return ~(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ) &
             _mm512_cmp_ps_mask(a, set1(__builtin_inff()), _CMP_LT_OQ));
}
OP V widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
OP __m256i to_bf16(V x)
{
    __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(up);
}
OP V ld_bf16(const void *p) { return widen_bf16(_mm256_loadu_si256(p)); }
OP V ld_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
OP V round_bf16(V x) { return widen_bf16(to_bf16(x)); }
OP V round_f16(V x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
OP void st_16(uint16_t *p, __m256i x, int nt)
{
    if (nt)
        _mm256_stream_si256((__m256i *)p, x);
    else
        _mm256_storeu_si256((__m256i *)p, x);
}
OP void st_bf16(uint16_t *p, V x, int nt) { st_16(p, to_bf16(x), nt); }
OP void st_f16(uint16_t *p, V x, int nt) { st_16(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), nt); }

#define FETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#include "update_body.h"

const fcu_kernels fcu_avx512 = { "avx512", update, roots, narrow, fcs_avx512 };
#else
typedef int fcu_not_here;
#endif
