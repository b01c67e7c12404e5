/* LL lines straight into the update, or first into a gradient arena? The measurement behind docs/decisions/0003.
 *
 *     gcc -O3 -ffp-contract=off -Iupdater/include benchmarks/ll_update.c updater/src/update*.c -lpthread -lm -o /tmp/ll
 *     /tmp/ll 24000000 41
 *
 * Packets of 1 KiB LL payload (64 lines of two 4-byte values and two flags: 128 fp32 gradients), in memory that no cache
 * holds. `two`: lines to the arena past the cache, then Adam out of place over the arena. `one`: lines of a packet to a
 * buffer in the first cache, then Adam over its 128 parameters; with the next packets' parameters and moments fetched
 * AHEAD packets before. Both check every flag. Packets lie in the order of the tensor or at random places of it.
 * Needs AVX-512. Prints the medians of ratios inside a round, in alternating order.
 */
#include "update.h"

#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { VALUES = 128, LINES = 64, AHEAD = 6 };
static const uint32_t FLAG = 7;
static uint64_t packets;
static uint32_t *lines, *place;
static float *array[7]; /* g, p m v, p1 m1 v1 */
static fcu_rule rule = { .order = FCU_TORCH_CPU, .w1 = .1f, .beta2 = .999f, .omb2 = .001f, .bc2_sqrt = .3f,
                         .eps = 1e-8f, .step = -.001f };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

__attribute__((target("avx512f"))) static inline int take(const uint32_t *src, float *to, int nt)
{
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512i wrong = _mm512_setzero_si512(), flag = _mm512_set1_epi32((int)FLAG);
    for (int i = 0; i < LINES * 4; i += 32) {
        __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 16);
        wrong = _mm512_or_si512(wrong, _mm512_xor_si512(_mm512_permutex2var_epi32(a, odd, b), flag));
        __m512i v = _mm512_permutex2var_epi32(a, even, b);
        if (nt)
            _mm512_stream_si512((__m512i *)(to + i / 2), v);
        else
            _mm512_store_si512((__m512i *)(to + i / 2), v);
    }
    return _mm512_test_epi32_mask(wrong, wrong) != 0;
}

static fcu_piece piece(uint64_t at, uint64_t n, const float *g)
{
    return (fcu_piece){ .n = n, .g = g, .p = array[1] + at, .m = array[2] + at, .v = array[3] + at,
                        .p1 = array[4] + at, .m1 = array[5] + at, .v1 = array[6] + at };
}

static int two(int ahead)
{
    int wrong = 0;
    (void)ahead;
    for (uint64_t i = 0; i < packets; i++)
        wrong |= take(lines + i * LINES * 4, array[0] + (uint64_t)place[i] * VALUES, 1);
    fcu_fence();
    for (uint64_t at = 0; at < packets * VALUES; at += 65536) {
        uint64_t left = packets * VALUES - at;
        fcu_piece c = piece(at, left < 65536 ? left : 65536, array[0] + at);
        fcu_best->update(&rule, &c);
    }
    fcu_fence();
    return wrong;
}

static int one(int ahead)
{
    float g[VALUES] __attribute__((aligned(64)));
    int wrong = 0;
    for (uint64_t i = 0; i < packets; i++) {
        if (ahead && i + ahead < packets)
            for (int k = 1; k < 4; k++)
                for (int line = 0; line < VALUES; line += 16)
                    _mm_prefetch((const char *)(array[k] + (uint64_t)place[i + ahead] * VALUES + line), _MM_HINT_T0);
        wrong |= take(lines + i * LINES * 4, g, 0);
        fcu_piece c = piece((uint64_t)place[i] * VALUES, VALUES, g);
        fcu_best->update(&rule, &c);
    }
    fcu_fence();
    return wrong;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void compare(const char *name, int rounds, int ahead)
{
    double *ratio = malloc(sizeof(double) * (size_t)rounds), best[2] = { 1e9, 1e9 };
    for (int round = -1; round < rounds; round++) {
        double took[2];
        for (int k = 0; k < 2; k++) {
            int which = (round & 1) ^ k;
            double begin = now();
            if (which ? one(ahead) : two(0))
                abort();
            took[which] = now() - begin;
            best[which] = took[which] < best[which] ? took[which] : best[which];
        }
        if (round >= 0)
            ratio[round] = took[0] / took[1];
    }
    qsort(ratio, (size_t)rounds, sizeof *ratio, ascending);
    printf("%-28s one pass is %.2f [%.2f..%.2f] times as fast as two; best %.2f and %.2f ns per parameter\n", name,
           ratio[rounds / 2], ratio[rounds / 10], ratio[rounds - 1 - rounds / 10],
           1e9 * best[1] / (packets * VALUES), 1e9 * best[0] / (packets * VALUES));
    free(ratio);
}

int main(int argc, char **argv)
{
    packets = (argc > 1 ? strtoull(argv[1], NULL, 10) : 24000000) / VALUES;
    int rounds = argc > 2 ? atoi(argv[2]) : 21;
    if (fcu_best->name[3] != '5')
        return fprintf(stderr, "this needs AVX-512\n"), 1;
    lines = mmap(NULL, packets * 1024, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    place = malloc(packets * sizeof *place);
    for (int k = 0; k < 7; k++) {
        array[k] = mmap(NULL, packets * VALUES * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(array[k], packets * VALUES * 4, MADV_HUGEPAGE);
        for (uint64_t i = 0; i < packets * VALUES; i++)
            array[k][i] = 1e-3f * (float)(i % 977 + 1);
    }
    for (uint64_t i = 0; i < packets * LINES * 4; i++) {
        float value = 1e-2f * (float)(i % 1009);
        memcpy(&lines[i], &value, 4);
        if (i & 1)
            lines[i] = FLAG;
    }
    for (uint64_t i = 0; i < packets; i++)
        place[i] = (uint32_t)i;
    compare("in order", rounds, 0);
    compare("in order, fetched ahead", rounds, AHEAD);
    for (uint64_t i = packets - 1; i > 0; i--) {
        uint64_t j = (uint64_t)rand() % (i + 1);
        uint32_t held = place[i];
        place[i] = place[j], place[j] = held;
    }
    compare("random places", rounds, 0);
    compare("random places, fetched ahead", rounds, AHEAD);
    return 0;
}
