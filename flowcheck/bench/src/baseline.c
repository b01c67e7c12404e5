#include "baseline.h"

#include "decode.h"

#include "place.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static void copy512(uint8_t *dst, const uint8_t *src, size_t n)
{
    for (size_t i = 0; i < n; i += 256) {
        __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 64);
        __m512i c = _mm512_loadu_si512(src + i + 128), d = _mm512_loadu_si512(src + i + 192);
        _mm512_stream_si512((void *)(dst + i), a);
        _mm512_stream_si512((void *)(dst + i + 64), b);
        _mm512_stream_si512((void *)(dst + i + 128), c);
        _mm512_stream_si512((void *)(dst + i + 192), d);
    }
    _mm_sfence();
}

__attribute__((target("avx2"))) static void copy256(uint8_t *dst, const uint8_t *src, size_t n)
{
    for (size_t i = 0; i < n; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
    }
    _mm_sfence();
}
#endif

void fcb_copy(uint8_t *dst, const uint8_t *src, size_t n)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        copy512(dst, src, n);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        copy256(dst, src, n);
        return;
    }
#endif
    memcpy(dst, src, n);
}

uint64_t fcb_parse(const fc_packetref *refs, uint64_t n, fcb_flow *table, uint32_t mask, uint64_t ahead)
{
    uint64_t known = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint8_t *bth;
        uint32_t udp_length;
        if (ahead && i + ahead < n)
            __builtin_prefetch(refs[i + ahead].data);
        fcb_flow *flow = fcb_decode(refs[i].data, refs[i].length, table, mask, &bth, &udp_length);
        if (!flow)
            continue;
        if (bth[0] == 0x06 || bth[0] == 0x0a || bth[0] == 0x0b)
            flow->address = (uint64_t)fcb_be32(bth + 12) << 32 | fcb_be32(bth + 16);
        fcb_count(flow, fcb_be32(bth + 8) & 0xffffff, udp_length);
        known++;
    }
    return known;
}

uint64_t fcb_place(int protocol, const uint64_t *to, const uint64_t *payloads, const uint64_t *flags, uint64_t n,
                   uint32_t length, uint64_t ahead)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint8_t *wire = (const uint8_t *)payloads[i], *next = (const uint8_t *)payloads[i + ahead < n ? i + ahead : i];
        uint8_t *dst = (uint8_t *)to[i];
        if (protocol == 0)
            wrong += fc_ll_place(dst, wire, length / 2, (uint32_t)flags[i], next) >= 0;
        else if (protocol == 1)
            wrong += fc_ll128_place(dst, wire, length / 1024, length / 1024 * 960, flags[i], next) >= 0;
        else
            fc_copy_place(dst, wire, length, next);
        if ((i & 31) == 31)
            fc_place_fence();
    }
    fc_place_fence();
    return wrong;
}
