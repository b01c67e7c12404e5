/* The roof of an out-of-place optimizer step; see roof.h. */
#include "roof.h"

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f,avx512bw"))) static void wide(const void *g, int narrow, float **t, float **t1,
                                                             uint64_t n)
{
    float *a = t[0], *b = t[1], *c = t[2], *x = t1[0], *y = t1[1], *z = t1[2];
    for (uint64_t i = 0; i < n; i += 16) {
        __m512 v;
        if (narrow)
            v = _mm512_castsi512_ps(_mm512_slli_epi32(
                _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)((const uint16_t *)g + i))), 16));
        else
            v = _mm512_loadu_ps((const float *)g + i);
        __m512 p = _mm512_add_ps(_mm512_load_ps(a + i), v), q = _mm512_add_ps(_mm512_load_ps(b + i), v);
        __m512 r = _mm512_add_ps(_mm512_load_ps(c + i), v);
        if (a != x) {
            _mm512_stream_ps(x + i, p), _mm512_stream_ps(y + i, q), _mm512_stream_ps(z + i, r);
        } else {
            _mm512_store_ps(x + i, p), _mm512_store_ps(y + i, q), _mm512_store_ps(z + i, r);
        }
    }
}

/* SSE2, which every x86-64 has. */
static void plain(const void *g, int narrow, float **t, float **t1, uint64_t n)
{
    float *a = t[0], *b = t[1], *c = t[2], *x = t1[0], *y = t1[1], *z = t1[2];
    for (uint64_t i = 0; i < n; i += 4) {
        __m128 v;
        if (narrow)
            v = _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(),
                                                    _mm_loadl_epi64((const __m128i *)((const uint16_t *)g + i))));
        else
            v = _mm_loadu_ps((const float *)g + i);
        __m128 p = _mm_add_ps(_mm_load_ps(a + i), v), q = _mm_add_ps(_mm_load_ps(b + i), v);
        __m128 r = _mm_add_ps(_mm_load_ps(c + i), v);
        if (a != x) {
            _mm_stream_ps(x + i, p), _mm_stream_ps(y + i, q), _mm_stream_ps(z + i, r);
        } else {
            _mm_store_ps(x + i, p), _mm_store_ps(y + i, q), _mm_store_ps(z + i, r);
        }
    }
}

__attribute__((target("avx512f"))) static uint64_t read_wide(const char *at, uint64_t bytes)
{
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (uint64_t i = 0; i < bytes; i += 256) {
        a = _mm512_or_si512(a, _mm512_load_si512(at + i)), b = _mm512_or_si512(b, _mm512_load_si512(at + i + 64));
        c = _mm512_or_si512(c, _mm512_load_si512(at + i + 128)), d = _mm512_or_si512(d, _mm512_load_si512(at + i + 192));
    }
    return (uint64_t)_mm512_reduce_or_epi64(_mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
}

static uint64_t read_plain(const char *at, uint64_t bytes)
{
    __m128i a = _mm_setzero_si128(), b = a;
    for (uint64_t i = 0; i < bytes; i += 32) {
        a = _mm_or_si128(a, _mm_load_si128((const __m128i *)(at + i)));
        b = _mm_or_si128(b, _mm_load_si128((const __m128i *)(at + i + 16)));
    }
    return (uint64_t)_mm_cvtsi128_si64(_mm_or_si128(a, b));
}

uint64_t fcb_read(const void *data, uint64_t bytes)
{
    return __builtin_cpu_supports("avx512f") ? read_wide(data, bytes) : read_plain(data, bytes);
}

void fcb_roof(const void *g, int narrow, float **t, float **t1, uint64_t n)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        wide(g, narrow, t, t1, n);
    else
        plain(g, narrow, t, t1, n);
    _mm_sfence();
}
#else
void fcb_roof(const void *g, int narrow, float **t, float **t1, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        for (int k = 0; k < 3; k++)
            t1[k][i] = t[k][i] + (narrow ? (float)((const uint16_t *)g)[i] : ((const float *)g)[i]);
}

uint64_t fcb_read(const void *data, uint64_t bytes)
{
    uint64_t found = 0;
    for (uint64_t i = 0; i < bytes / 8; i++)
        found |= ((const uint64_t *)data)[i];
    return found;
}
#endif
