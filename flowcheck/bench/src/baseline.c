#include "baseline.h"

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

static uint32_t be16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return __builtin_bswap16(v);
}

static uint32_t be32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return __builtin_bswap32(v);
}

uint32_t fcb_hash(const uint8_t *src, const uint8_t *dst, uint32_t width, uint32_t qpn)
{
    return (be32(src + width - 4) * 31 + be32(dst + width - 4)) * 0x9e3779b1u ^ qpn * 0x85ebca6bu;
}

/* Words, not memcmp: its wide loads would wait for the counters stored beside the addresses a packet ago. */
static int is_flow(const fcb_flow *f, const uint8_t *src, const uint8_t *dst, uint32_t qpn, uint32_t version)
{
    uint64_t wrong = (f->qpn ^ qpn) | (f->version ^ version);
    for (uint32_t i = 0; i < (version == 4 ? 4 : 16); i += 4) {
        uint32_t a, b, c, d;
        memcpy(&a, f->src + i, 4);
        memcpy(&b, src + i, 4);
        memcpy(&c, f->dst + i, 4);
        memcpy(&d, dst + i, 4);
        wrong |= (a ^ b) | (c ^ d);
    }
    return wrong == 0;
}

uint64_t fcb_parse(const fc_packetref *refs, uint64_t n, fcb_flow *table, uint32_t mask, uint64_t ahead)
{
    uint64_t known = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint8_t *p = refs[i].data;
        uint32_t length = refs[i].length, type, width, version;
        const uint8_t *src, *dst, *udp;
        if (ahead && i + ahead < n)
            __builtin_prefetch(refs[i + ahead].data);
        if (length < 14 + 20 + 8 + 12 + 4)
            continue;
        type = be16(p + 12);
        if (type == 0x0800 && p[14] == 0x45 && p[23] == 17) {
            version = 4, width = 4, src = p + 26, dst = p + 30, udp = p + 34;
        } else if (type == 0x86dd && p[20] == 17 && length >= 14 + 40 + 8 + 12 + 4) {
            version = 6, width = 16, src = p + 22, dst = p + 38, udp = p + 54;
        } else {
            continue;
        }
        if (be16(udp + 2) != 4791 || (size_t)(udp - p) + be16(udp + 4) > length)
            continue;
        const uint8_t *bth = udp + 8;
        uint32_t opcode = bth[0], qpn = be32(bth + 4) & 0xffffff, psn = be32(bth + 8) & 0xffffff;
        uint32_t at = fcb_hash(src, dst, width, qpn) & mask;
        while (table[at].version && !is_flow(&table[at], src, dst, qpn, version))
            at = (at + 1) & mask;
        fcb_flow *flow = &table[at];
        if (!flow->version)
            continue;
        if (opcode == 0x06 || opcode == 0x0a || opcode == 0x0b)
            flow->address = (uint64_t)be32(bth + 12) << 32 | be32(bth + 16);
        flow->gaps += psn != flow->next_psn;
        flow->next_psn = (psn + 1) & 0xffffff;
        flow->packets++;
        flow->bytes += be16(udp + 4);
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
