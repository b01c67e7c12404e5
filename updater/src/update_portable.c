/* Optimizer steps in plain C, one float at a time: the reference that the vector versions must equal bit for bit.
 *
 * fmaf is exact on every processor (in software where there is no instruction, then slow).
 */
#include "update.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float V;
enum { N = 1 };
#define OP static inline __attribute__((always_inline))
OP V ld(const float *p) { return *p; }
OP void st(float *p, V x) { *p = x; }
OP void stream(float *p, V x) { *p = x; }
OP V set1(float x) { return x; }
OP V add(V a, V b) { return a + b; }
OP V sub(V a, V b) { return a - b; }
OP V mul(V a, V b) { return a * b; }
OP V dvd(V a, V b) { return a / b; }
OP V fma_(V a, V b, V c) { return fmaf(a, b, c); }
OP V neg(V a) { return -a; }
OP V root(V a) { return sqrtf(a); }
OP V std_max(V x, V v) { return x < v ? v : x; }
OP V larger(V x, V v) { return x > v || x != x ? x : v; }
OP uint32_t bits_of(V x) { uint32_t b; memcpy(&b, &x, 4); return b; }
OP V of_bits(uint32_t b) { V x; memcpy(&x, &b, 4); return x; }
typedef int M;
#if defined(__x86_64__)
OP V rsqrt(V a) { return _mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(a))); }
static __attribute__((noinline, target("avx512f"))) V rsqrt14(V a)
{
    return _mm_cvtss_f32(_mm_rsqrt14_ss(_mm_set_ss(a), _mm_set_ss(a)));
}
#else /* nobody asks: fcu_has_root() */
OP V rsqrt(V a) { return 1 / sqrtf(a); }
OP V rsqrt14(V a) { return 1 / sqrtf(a); }
#endif
OP M rare(V a, uint32_t first, uint32_t n) { return bits_of(a) - first >= n; }
OP int any(M m) { return m; }
OP V pick(M m, V yes, V no) { return m ? yes : no; }
OP M small(V a) { return a < 0x1p-96f; }
OP M special(V a) { return !(a > 0 && a < __builtin_inff()); }
OP uint16_t to_bf16(V x)
{
    uint32_t b = bits_of(x);
    return x != x ? 0x7fc0 : (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
OP V widen_bf16(uint16_t x) { return of_bits((uint32_t)x << 16); }
OP uint16_t to_f16(V x) { _Float16 h = (_Float16)x; uint16_t b; memcpy(&b, &h, 2); return b; }
OP V widen_f16(uint16_t b) { _Float16 h; memcpy(&h, &b, 2); return (V)h; }
OP V ld_bf16(const void *p) { return widen_bf16(*(const uint16_t *)p); }
OP V ld_f16(const void *p) { return widen_f16(*(const uint16_t *)p); }
OP V round_bf16(V x) { return widen_bf16(to_bf16(x)); }
OP V round_f16(V x) { return widen_f16(to_f16(x)); }
OP void st_bf16(uint16_t *p, V x, int nt) { (void)nt; *p = to_bf16(x); }
OP void st_f16(uint16_t *p, V x, int nt) { (void)nt; *p = to_f16(x); }

#define FETCH(p) ((void)(p)) /* it is not there for its speed */
#include "update_body.h"

const fcu_kernels fcu_portable = { "portable", update, roots, narrow, fcs_portable };
