#include "minimal.h"

#include "decode.h"

#define INLINE static inline __attribute__((always_inline))
#define LINE 64

enum { FIRST = 0x06, LAST_IMM = 0x09, RETH = 16, IMM = 4, OUTSIDE = 8 + 12 + 4 /* UDP, BTH, ICRC */ };

/* -- plain C: any processor ------------------------------------------------------------------------------------ */

static int ll_plain(uint8_t *to, const uint8_t *wire, uint32_t length, uint32_t flag)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < length; i += 16, to += 8) {
        uint32_t line[4];
        memcpy(line, wire + i, 16);
        wrong |= (line[1] ^ flag) | (line[3] ^ flag);
        memcpy(to, &line[0], 4);
        memcpy(to + 4, &line[2], 4);
    }
    return wrong == 0;
}

/* Eight lines of 16 words: word 15 is the flag. The first 15 words of lines 0..3 become 16 with word 14 of lines
 * 4..7, whose other 14 words lie behind. */
static int ll128_plain(uint8_t *to, const uint8_t *wire, uint32_t length, uint64_t flag)
{
    uint64_t wrong = 0;
    for (uint32_t half = 0; half < length; half += 1024, wire += 1024, to += 960) {
        for (uint32_t line = 0; line < 8; line++) {
            uint64_t found;
            memcpy(&found, wire + 128 * line + 120, 8);
            wrong |= found ^ flag;
        }
        for (uint32_t line = 0; line < 4; line++) {
            memcpy(to + 128 * line, wire + 128 * line, 120);
            memcpy(to + 128 * line + 120, wire + 128 * (line + 4) + 112, 8);
            memcpy(to + 512 + 112 * line, wire + 128 * (line + 4), 112);
        }
    }
    return wrong == 0;
}

/* -- AVX-512: the same in registers, stored past the cache ------------------------------------------------------- */

#if defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl")))

WIDE static int ll_wide(uint8_t *to, const uint8_t *wire, uint32_t length, uint32_t flag)
{
    const __m512i data = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i flags = _mm512_set1_epi32((int)flag);
    __m512i wrong = _mm512_setzero_si512();
    for (uint32_t i = 0; i < length; i += 128, to += LINE) {
        __m512i a = _mm512_loadu_si512(wire + i), b = _mm512_loadu_si512(wire + i + 64);
        wrong = _mm512_or_si512(wrong, _mm512_or_si512(_mm512_xor_si512(a, flags), _mm512_xor_si512(b, flags)));
        _mm512_stream_si512((void *)to, _mm512_permutex2var_epi32(a, data, b));
    }
    return _mm512_mask_test_epi32_mask(0xaaaa, wrong, wrong) == 0;
}

WIDE static int ll128_wide(uint8_t *to, const uint8_t *wire, uint32_t length, uint64_t flag)
{
    const __m512i flags = _mm512_set1_epi64((long long)flag);
    __m512i wrong = _mm512_setzero_si512();
    for (uint32_t half = 0; half < length; half += 1024, wire += 1024, to += 960) {
        const uint8_t *low = wire + 512;
        for (uint32_t line = 0; line < 4; line++) {
            const uint8_t *at = wire + 128 * line;
            __m512i rest = _mm512_loadu_si512(at + 64);
            /* word 14 of the line four further on, shifted to where this one has its flag */
            __m512i whole = _mm512_mask_loadu_epi64(rest, 0x80, at + 512 + 56);
            __m512i far = _mm512_loadu_si512(at + 512 + 64);
            wrong = _mm512_or_si512(wrong, _mm512_or_si512(_mm512_xor_si512(rest, flags), _mm512_xor_si512(far, flags)));
            _mm512_stream_si512((void *)(to + 128 * line), _mm512_loadu_si512(at));
            _mm512_stream_si512((void *)(to + 128 * line + 64), whole);
        }
        /* 4 x 14 words without gaps: where a register reaches into the next line, that line's words come from 16 bytes
         * further to the left */
        _mm512_stream_si512((void *)(to + 512), _mm512_loadu_si512(low));
        _mm512_stream_si512((void *)(to + 576),
                            _mm512_mask_loadu_epi64(_mm512_loadu_si512(low + 64), 0xc0, low + 128 - 48));
        _mm512_stream_si512((void *)(to + 640), _mm512_loadu_si512(low + 128 + 16));
        _mm512_stream_si512((void *)(to + 704),
                            _mm512_mask_loadu_epi64(_mm512_loadu_si512(low + 128 + 80), 0xf0, low + 256 - 32));
        _mm512_stream_si512((void *)(to + 768), _mm512_loadu_si512(low + 256 + 32));
        _mm512_stream_si512((void *)(to + 832),
                            _mm512_mask_loadu_epi64(_mm512_loadu_si512(low + 256 + 96), 0xfc, low + 384 - 16));
        _mm512_stream_si512((void *)(to + 896), _mm512_loadu_si512(low + 384 + 48));
    }
    return _mm512_mask_test_epi64_mask(0x80, wrong, wrong) == 0;
}

WIDE static void simple_wide(uint8_t *to, const uint8_t *wire, uint32_t length)
{
    for (uint32_t i = 0; i < length; i += LINE)
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(wire + i));
}
#endif

/* -- one burst --------------------------------------------------------------------------------------------------- */

/* Sets the bits [first, first + n); returns whether any was set. */
INLINE uint64_t cover(uint64_t *map, uint64_t first, uint64_t n)
{
    uint64_t any = 0;
    while (n) {
        uint64_t bit = first & 63, some = 64 - bit < n ? 64 - bit : n;
        uint64_t bits = (some == 64 ? ~0ull : (1ull << some) - 1) << bit;
        any |= map[first >> 6] & bits;
        map[first >> 6] |= bits;
        first += some, n -= some;
    }
    return any;
}

INLINE int place(const fcb_loop *loop, int wide, uint8_t *to, const uint8_t *wire, uint32_t flag)
{
#if defined(__x86_64__)
    if (wide) {
        if (loop->protocol == 0)
            return ll_wide(to, wire, loop->mtu, flag);
        if (loop->protocol == 1)
            return ll128_wide(to, wire, loop->mtu, flag);
        simple_wide(to, wire, loop->mtu);
        return 1;
    }
#endif
    if (loop->protocol == 0)
        return ll_plain(to, wire, loop->mtu, flag);
    if (loop->protocol == 1)
        return ll128_plain(to, wire, loop->mtu, flag);
    memcpy(to, wire, loop->mtu);
    return 1;
}

static void next_lap(fcb_loop *loop)
{
    loop->lap++;
    loop->left = loop->per_lap;
    for (uint32_t i = 0; i <= loop->mask; i++)
        loop->table[i].next_psn = loop->table[i].messages = 0;
}

INLINE void one(fcb_loop *loop, int wide, const uint8_t *packet, uint32_t length)
{
    const uint8_t *bth;
    uint32_t udp_length, psn, outside;
    fcb_flow *flow;
    if (loop->left == 0)
        next_lap(loop);
    loop->left--;
    flow = fcb_decode(packet, length, loop->table, loop->mask, &bth, &udp_length);
    if (!flow || loop->lap >= loop->laps) {
        loop->strange++;
        return;
    }
    psn = fcb_be32(bth + 8) & 0xffffff;
    outside = bth[0] == FIRST ? RETH : bth[0] == LAST_IMM ? IMM : 0;
    flow->messages += bth[0] == FIRST;
    fcb_count(flow, psn, udp_length);
    uint64_t at = (uint64_t)psn * loop->piece;
    if (udp_length != OUTSIDE + outside + loop->mtu || at + loop->piece > loop->part) {
        loop->strange++;
        return;
    }
    at += flow->address;
    if (!place(loop, wide, loop->arenas[loop->lap] + at, bth + 12 + outside, flow->messages))
        loop->wrong++;
    else if (cover(loop->covers[loop->lap], at / 8, loop->piece / 8))
        loop->repeated++;
    else
        loop->placed++;
}

INLINE void burst(fcb_loop *loop, int wide, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n)
{
    for (uint16_t i = 0; i < n; i++) {
        if (i + 4 < n)
            __builtin_prefetch(packets[i + 4]);
        if (loop->ahead && i + loop->ahead < n)
            for (uint32_t line = LINE; line < loop->mtu + LINE; line += LINE)
                __builtin_prefetch(packets[i + loop->ahead] + line);
        one(loop, wide, packets[i], lengths[i]);
    }
}

#if defined(__x86_64__)
WIDE static void burst_wide(fcb_loop *loop, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n)
{
    burst(loop, 1, packets, lengths, n);
    _mm_sfence();
}
#endif

void fcb_loop_take(void *arg, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
        burst_wide(arg, packets, lengths, n);
        return;
    }
#endif
    burst(arg, 0, packets, lengths, n);
}
