/* What comparing a copy costs at least, beside placing it: loads of two cold streams against loads of one and stores.
 *
 *     gcc -O2 -mavx512f -o /tmp/compare_bound benchmarks/compare_bound.c && /tmp/compare_bound
 *
 * 64 MB of payloads of 1 KB, one after the other, and as many places in 16 runs that take turns, as 16 flows have them;
 * huge pages where the kernel gives them. No headers, no flows, no coverage, no ICRC. Nanoseconds a packet, the least of
 * 15 rounds and of fetching 1, 2, 4, 8 and 16 packets ahead. The last column is what three mirrors would cost in times
 * of one, if nothing but this had to be done: place once, compare twice. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { BYTES = 64 << 20, PACKET = 1024, PACKETS = BYTES / PACKET, FLOWS = 16, ROUNDS = 15, LINE = 64 };
enum { PLACE, COMPARE_FIRST, COMPARE_SECOND, KINDS };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint8_t *memory(void)
{
    uint8_t *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        perror("compare_bound: 64 MB of memory");
        exit(1);
    }
    madvise(at, BYTES, MADV_HUGEPAGE);
    memset(at, 1, BYTES);
    return at;
}

static inline const uint8_t *place_of(const uint8_t *places, uint64_t i)
{
    return places + PACKET * (i % FLOWS * (PACKETS / FLOWS) + i / FLOWS);
}

/* All packets once. Returns whether any differed. */
static inline __attribute__((always_inline)) int run(const uint8_t *packets, uint8_t *places, uint64_t ahead, int kind)
{
    __m512i differs = _mm512_setzero_si512();
    for (uint64_t i = 0; i < PACKETS; i++) {
        uint64_t soon = i + ahead < PACKETS ? i + ahead : i;
        const uint8_t *from = packets + PACKET * i, *next = packets + PACKET * soon, *cells = place_of(places, soon);
        uint8_t *to = (uint8_t *)place_of(places, i);
        for (int at = 0; at < PACKET; at += LINE) {
            if (kind == COMPARE_SECOND) {
                __asm__ volatile("prefetcht1 %0; prefetcht1 %1" : : "m"(next[at]), "m"(cells[at]));
            } else {
                __asm__ volatile("prefetcht0 %0" : : "m"(next[at]));
                if (kind == COMPARE_FIRST)
                    __asm__ volatile("prefetcht0 %0" : : "m"(cells[at]));
            }
            __m512i line = _mm512_load_si512(from + at);
            if (kind == PLACE)
                _mm512_stream_si512((void *)(to + at), line);
            else
                differs = _mm512_ternarylogic_epi64(differs, line, _mm512_load_si512(to + at), 0xf6); /* a | b ^ c */
        }
    }
    _mm_sfence();
    return _mm512_test_epi64_mask(differs, differs) != 0;
}

int main(void)
{
    static const char *names[KINDS] = {"place", "compare, both fetched into the first cache", "... into the second"};
    uint8_t *packets = memory(), *places = memory();
    double least[KINDS] = {1e9, 1e9, 1e9};
    int differed = 0;
    for (int round = 0; round < ROUNDS; round++)
        for (uint64_t ahead = 1; ahead <= 16; ahead *= 2)
            for (int kind = 0; kind < KINDS; kind++) {
                double begin = now();
                if (kind == PLACE)
                    run(packets, places, ahead, PLACE);
                else if (kind == COMPARE_FIRST)
                    differed |= run(packets, places, ahead, COMPARE_FIRST);
                else
                    differed |= run(packets, places, ahead, COMPARE_SECOND);
                double ns = 1e9 * (now() - begin) / PACKETS;
                least[kind] = ns < least[kind] ? ns : least[kind];
            }
    for (int kind = 0; kind < KINDS; kind++)
        printf("%-45s %6.1f ns   three mirrors %.2f\n", names[kind], least[kind],
               kind == PLACE ? 3.0 : (least[PLACE] + 2 * least[kind]) / least[PLACE]);
    return differed;
}
