#include "baseline.h"

#include "decode.h"

#include <isa-l/crc.h>
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

/* -- the traffic of placing ------------------------------------------------------------------------ */

#if defined(__x86_64__)
#define TRAFFIC(name) name##_512
#define TARGET __attribute__((target("avx512f")))
#define LINE __m512i
#define load(at) _mm512_load_si512(at)
#define mix(x, y) _mm512_xor_si512(x, y)
#define store(at, line) _mm512_stream_si512((void *)(at), line)
#include "traffic_body.h"

typedef struct two {
    __m256i a, b;
} two;

__attribute__((target("avx2"), always_inline)) static inline two load256(const uint8_t *at)
{
    two line = {_mm256_load_si256((const __m256i *)at), _mm256_load_si256((const __m256i *)(at + 32))};
    return line;
}

__attribute__((target("avx2"), always_inline)) static inline two mix256(two x, two y)
{
    two line = {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
    return line;
}

#define TRAFFIC(name) name##_256
#define TARGET __attribute__((target("avx2")))
#define LINE two
#define load load256
#define mix mix256
#define store(at, line) _mm256_stream_si256((__m256i *)(at), (line).a), _mm256_stream_si256((__m256i *)((at) + 32), (line).b)
#include "traffic_body.h"
#endif

typedef struct eight {
    uint64_t word[8];
} eight;

static inline eight load_plain(const uint8_t *at)
{
    eight line;
    memcpy(&line, at, sizeof line);
    return line;
}

static inline eight mix_plain(eight x, eight y)
{
    for (int i = 0; i < 8; i++)
        x.word[i] ^= y.word[i];
    return x;
}

#define TRAFFIC(name) name##_plain
#define TARGET
#define LINE eight
#define load load_plain
#define mix mix_plain
#define store(at, line) memcpy(at, &(line), sizeof(line))
#include "traffic_body.h"

void fcb_traffic(const uint64_t *to, const uint64_t *payloads, uint64_t n, uint32_t length, uint32_t bytes,
                 uint64_t ahead)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        choose_512(to, payloads, n, length, bytes, ahead);
        _mm_sfence();
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        choose_256(to, payloads, n, length, bytes, ahead);
        _mm_sfence();
        return;
    }
#endif
    choose_plain(to, payloads, n, length, bytes, ahead);
}

uint32_t fcb_crc_hot(const uint8_t *at, uint64_t bytes, uint64_t times)
{
    uint32_t sum = 0;
    for (uint64_t i = 0; i < times; i++)
        sum ^= crc32_gzip_refl((uint32_t)i, at, bytes);
    return sum;
}
