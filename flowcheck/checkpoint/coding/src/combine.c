/* See combine.h.
 *
 * GFNI multiplies 64 bytes by a constant in one instruction: the constant as a matrix of 8 x 8 bits, because the
 * instruction that multiplies directly has another polynomial. Four rows share each load. What comes out is not read
 * again soon, so large results bypass the caches (non-temporal stores); without that each line would be read before it
 * is written, a third of all traffic.
 */
#include "combine.h"

#include <immintrin.h>
#include <isa-l/erasure_code.h>

#define TOGETHER 4                 /* rows of a pass: with two registers for each, eight sums and two loads */
#define BYPASS ((size_t)1 << 20)   /* bytes of a stream from which the result would not stay in a cache */
#define PIECE ((size_t)1 << 30)    /* isa-l counts bytes with an int */

static int always(void) { return 1; }

static void by_isal(const uint8_t *c, int k, int rows, size_t n, const uint8_t *const *in, uint8_t *const *out)
{
    unsigned char tables[32 * FCP_MOST * FCP_MOST];
    unsigned char *from[FCP_MOST], *to[FCP_MOST];

    ec_init_tables(k, rows, (unsigned char *)c, tables);
    for (size_t at = 0; at < n; at += PIECE) {
        for (int j = 0; j < k; j++)
            from[j] = (unsigned char *)in[j] + at;
        for (int i = 0; i < rows; i++)
            to[i] = out[i] + at;
        ec_encode_data((int)(n - at < PIECE ? n - at : PIECE), k, rows, tables, from, to);
    }
}

static int has_gfni(void)
{
    return __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

/* Row i of the matrix (byte 7 - i) picks the bits of a factor that bit i of the product is the sum of. */
static uint64_t matrix_of(uint8_t c)
{
    uint64_t matrix = 0;

    for (int l = 0; l < 8; l++) {
        for (int i = 0; i < 8; i++)
            matrix |= (uint64_t)(c >> i & 1) << (8 * (7 - i) + l);
        c = (uint8_t)(c << 1 ^ (c & 0x80 ? 0x1d : 0));
    }
    return matrix;
}

#define GFNI __attribute__((target("avx512f,avx512bw,gfni"), always_inline)) static inline

/* `rows` and `bypass` are constants where this is inlined. */
GFNI void gfni_rows(const uint64_t *m, int k, int stride, const int rows, size_t n, const uint8_t *const *in,
                    uint8_t *const *out, const int bypass)
{
    size_t at = 0;

    for (; at + 128 <= n; at += 128) {
        __m512i sums[TOGETHER][2];
        for (int i = 0; i < rows; i++)
            sums[i][0] = sums[i][1] = _mm512_setzero_si512();
        for (int j = 0; j < k; j++) {
            const __m512i a = _mm512_loadu_si512(in[j] + at), b = _mm512_loadu_si512(in[j] + at + 64);
            for (int i = 0; i < rows; i++) {
                const __m512i by = _mm512_set1_epi64((long long)m[i * stride + j]);
                sums[i][0] = _mm512_xor_si512(sums[i][0], _mm512_gf2p8affine_epi64_epi8(a, by, 0));
                sums[i][1] = _mm512_xor_si512(sums[i][1], _mm512_gf2p8affine_epi64_epi8(b, by, 0));
            }
        }
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++) {
                if (bypass)
                    _mm512_stream_si512((void *)(out[i] + at + 64 * half), sums[i][half]);
                else
                    _mm512_storeu_si512(out[i] + at + 64 * half, sums[i][half]);
            }
    }
    for (; at < n; at += 64) {
        const __mmask64 left = n - at < 64 ? ((__mmask64)1 << (n - at)) - 1 : ~(__mmask64)0;
        for (int i = 0; i < rows; i++) {
            __m512i sum = _mm512_setzero_si512();
            for (int j = 0; j < k; j++)
                sum = _mm512_xor_si512(sum, _mm512_gf2p8affine_epi64_epi8(
                    _mm512_maskz_loadu_epi8(left, in[j] + at), _mm512_set1_epi64((long long)m[i * stride + j]), 0));
            _mm512_mask_storeu_epi8(out[i] + at, left, sum);
        }
    }
    if (bypass)
        _mm_sfence();
}

#define PASS(ROWS, BYPASSES)                                                                                      \
    __attribute__((target("avx512f,avx512bw,gfni"))) static void pass_##ROWS##_##BYPASSES(                        \
        const uint64_t *m, int k, int stride, size_t n, const uint8_t *const *in, uint8_t *const *out)            \
    {                                                                                                             \
        gfni_rows(m, k, stride, ROWS, n, in, out, BYPASSES);                                                      \
    }
PASS(1, 0) PASS(2, 0) PASS(3, 0) PASS(4, 0) PASS(1, 1) PASS(2, 1) PASS(3, 1) PASS(4, 1)

typedef void pass(const uint64_t *m, int k, int stride, size_t n, const uint8_t *const *in, uint8_t *const *out);
static pass *const passes[2][TOGETHER] = {
    {pass_1_0, pass_2_0, pass_3_0, pass_4_0}, {pass_1_1, pass_2_1, pass_3_1, pass_4_1},
};

static void by_gfni(const uint8_t *c, int k, int rows, size_t n, const uint8_t *const *in, uint8_t *const *out)
{
    uint64_t matrices[FCP_MOST * FCP_MOST];

    for (int i = 0; i < rows * k; i++)
        matrices[i] = matrix_of(c[i]);
    for (int first = 0; first < rows; first += TOGETHER) {
        const int some = rows - first < TOGETHER ? rows - first : TOGETHER;
        int bypass = n >= BYPASS;
        for (int i = first; i < first + some; i++)
            bypass &= (uintptr_t)out[i] % 64 == 0;
        passes[bypass][some - 1](matrices + first * k, k, k, n, in, out + first);
    }
}

const fcp_kernel fcp_kernels[] = {{"gfni", has_gfni, by_gfni}, {"isal", always, by_isal}, {0, 0, 0}};
