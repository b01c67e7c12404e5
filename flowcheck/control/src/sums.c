/* Position-weighted checksums (flowcheck/control/checksum.py defines them): blocks of elements times the weights of their places.
 *
 *     sum over c: (mix(c + BLOCK) | 1) * sum over i: w[i] * b[c][i]            w[i] = mix(i) | 1, all modulo 2^64
 *
 * A weight is 64 bits and an element up to 32, so a product is  lo(w) * b + (hi(w) * b << 32):  one multiplication of
 * 32 by 32 bits to 64, and one of which 32 bits matter. The halves of the weights are kept apart for that. ABREAST
 * blocks are summed side by side, so that a weight (512 KiB of them, in the second cache) is loaded once for all.
 */
#include "sums.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { BLOCK = FCS_BLOCK, ABREAST = 4 };

static _Alignas(64) uint32_t low[BLOCK], high[BLOCK]; /* of the weights */
static pthread_once_t filled = PTHREAD_ONCE_INIT;

static uint64_t mix(uint64_t i)
{
    uint64_t h = (i + 1) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

static void fill(void)
{
    for (uint64_t i = 0; i < BLOCK; i++) {
        uint64_t w = mix(i) | 1;
        low[i] = (uint32_t)w, high[i] = (uint32_t)(w >> 32);
    }
}

static uint64_t element(const uint8_t *at, int size)
{
    uint8_t b;
    uint16_t h;
    uint32_t w;
    uint64_t q;
    switch (size) {
    case 1: memcpy(&b, at, 1); return b;
    case 2: memcpy(&h, at, 2); return h;
    case 4: memcpy(&w, at, 4); return w;
    default: memcpy(&q, at, 8); return q;
    }
}

/* Elements [from, to) of one block. The reference, and what is left of a block whose length fits no vector. */
static inline __attribute__((always_inline)) uint64_t plain(const uint8_t *block, uint64_t from, uint64_t to,
                                                            const int size)
{
    uint64_t sum = 0;
    for (uint64_t i = from; i < to; i++)
        sum += element(block + i * size, size) * ((uint64_t)high[i] << 32 | low[i]);
    return sum;
}

#define BY_SIZE(function, ...)                                 \
    switch (size) {                                            \
    case 1: function(__VA_ARGS__, 1); return;                  \
    case 2: function(__VA_ARGS__, 2); return;                  \
    case 4: function(__VA_ARGS__, 4); return;                  \
    default: function(__VA_ARGS__, 8); return;                 \
    }

static inline __attribute__((always_inline)) void plain_blocks(const uint8_t *data, int abreast, uint64_t k,
                                                               uint64_t *sums, const int size)
{
    for (int b = 0; b < abreast; b++)
        sums[b] = plain(data + (uint64_t)b * BLOCK * size, 0, k, size);
}

void fcs_portable(const void *data, int abreast, uint64_t k, int size, uint64_t *sums)
{
    BY_SIZE(plain_blocks, data, abreast, k, sums)
}

#if defined(__x86_64__)
#define OP static inline __attribute__((always_inline, target(TARGET)))
#define JOINED(x, width) x##_##width
#define JOIN(x, width) JOINED(x, width)
#define NAME(x) JOIN(x, WIDTH)

/* -- 16 elements at a time ----------------------------------------------------------------------------------- */
#define WIDTH avx512
#define TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2"
#define MM(operation) _mm512_##operation
#define V __m512i
enum { NAME(N) = 16 };

OP V NAME(load)(const uint8_t *at, const int size)
{
    if (size == 1)
        return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
    if (size == 2)
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return _mm512_loadu_si512(at);
}

OP V NAME(weights)(const uint32_t *at) { return _mm512_load_si512(at); }
OP V NAME(widened)(const uint32_t *at) { return _mm512_cvtepu32_epi64(_mm256_load_si256((const __m256i *)at)); }
OP V NAME(product)(V x, V lo, V hi) { return _mm512_mullo_epi64(x, _mm512_or_si512(lo, _mm512_slli_epi64(hi, 32))); }
OP uint64_t NAME(sum_64)(V x) { return (uint64_t)_mm512_reduce_add_epi64(x); }
OP uint32_t NAME(sum_32)(V x) { return (uint32_t)_mm512_reduce_add_epi32(x); }

#include "sums_body.h"

/* -- 8 elements at a time ------------------------------------------------------------------------------------ */
#define WIDTH avx2
#define TARGET "avx2"
#define MM(operation) _mm256_##operation
#define V __m256i
enum { NAME(N) = 8 };

OP V NAME(load)(const uint8_t *at, const int size)
{
    if (size == 1)
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
    if (size == 2)
        return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_loadu_si256((const __m256i *)at);
}

OP V NAME(weights)(const uint32_t *at) { return _mm256_load_si256((const __m256i *)at); }
OP V NAME(widened)(const uint32_t *at) { return _mm256_cvtepu32_epi64(_mm_load_si128((const __m128i *)at)); }

OP V NAME(product)(V x, V lo, V hi) /* (xlo, xhi) * (lo, hi): the crossed products belong 32 higher */
{
    __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(x, hi), _mm256_mul_epu32(_mm256_srli_epi64(x, 32), lo));
    return _mm256_add_epi64(_mm256_mul_epu32(x, lo), _mm256_slli_epi64(crossed, 32));
}

OP uint64_t NAME(sum_64)(V x)
{
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)lanes, x);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

OP uint32_t NAME(sum_32)(V x)
{
    uint32_t lanes[8], sum = 0;
    _mm256_storeu_si256((__m256i *)lanes, x);
    for (int i = 0; i < 8; i++)
        sum += lanes[i];
    return sum;
}

#include "sums_body.h"
#endif

/* -- a tensor ------------------------------------------------------------------------------------------------ */

uint64_t fcs_part(fcs_blocks *blocks_of, const void *data, uint64_t from, uint64_t n, int size)
{
    uint64_t sum = 0, first = from / BLOCK, whole = n / BLOCK, blocks = (n + BLOCK - 1) / BLOCK, sums[ABREAST];
    const uint8_t *at = (const uint8_t *)data + from * (uint64_t)size;
    pthread_once(&filled, fill);
    for (uint64_t c = 0, together; c < blocks; c += together) {
        together = whole - c >= ABREAST && c < whole ? ABREAST : 1;
        uint64_t k = n - c * BLOCK < BLOCK ? n - c * BLOCK : BLOCK;
        blocks_of(at + c * BLOCK * (uint64_t)size, (int)together, k, size, sums);
        for (uint64_t b = 0; b < together; b++)
            sum += (mix(first + c + b + BLOCK) | 1) * sums[b];
    }
    return sum;
}

uint64_t fcs_begin(uint64_t n) { return mix(n); }

/* -- of trainers --------------------------------------------------------------------------------------------- */

static fcs_blocks *best(void)
{
#if defined(__x86_64__)
    const char *wanted = getenv("FLOWCHECK_SIMD");
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && (!wanted || strcmp(wanted, "portable"));
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && (!wanted || strcmp(wanted, "avx2")))
        return fcs_avx512;
    if (avx2)
        return fcs_avx2;
#endif
    return fcs_portable;
}

__attribute__((visibility("default"))) void fcs_checksums(const fcs_piece *pieces, uint64_t count, uint64_t *sums)
{
    fcs_blocks *blocks_of = best();
    for (const fcs_piece *p = pieces; p < pieces + count; p++)
        *sums++ = (p->from ? 0 : mix(p->whole)) +
                  fcs_part(blocks_of, (const void *)(uintptr_t)p->data, p->from, p->n, (int)p->size);
}
