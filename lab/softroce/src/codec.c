#include "sr_codec.h"

#include <string.h>

/* Loads and stores at any address: chunks of 2-byte elements begin anywhere. */
typedef uint32_t __attribute__((aligned(1), may_alias)) any32;
typedef uint64_t __attribute__((aligned(1), may_alias)) any64;

enum { LL_LINE = 16, SLICE_DATA = 1920, SLICE_WIRE = 2048, HALF_DATA = 960, HALF_WIRE = 1024 };

uint32_t sr_wire_bytes(enum sr_protocol protocol, uint32_t bytes) {
    if (protocol == SR_LL)
        return (bytes + 7) / 8 * LL_LINE;
    if (protocol == SR_LL128)
        return (bytes + SLICE_DATA - 1) / SLICE_DATA * SLICE_WIRE;
    return bytes;
}

static void encode_ll(uint8_t *wire, const uint8_t *data, uint32_t bytes, uint32_t flag) {
    any32 *w = (any32 *)wire;
    const any32 *d = (const any32 *)data;
    uint32_t lines = bytes / 8;
    for (uint32_t i = 0; i < lines; i++) {
        w[4 * i] = d[2 * i];
        w[4 * i + 1] = flag;
        w[4 * i + 2] = d[2 * i + 1];
        w[4 * i + 3] = flag;
    }
    if (bytes % 8) {
        uint32_t last[2] = {0, 0};
        memcpy(last, data + 8 * lines, bytes % 8);
        w[4 * lines] = last[0];
        w[4 * lines + 1] = flag;
        w[4 * lines + 2] = last[1];
        w[4 * lines + 3] = flag;
    }
}

static int decode_ll(uint8_t *data, const uint8_t *wire, uint32_t bytes, uint32_t flag) {
    const any32 *w = (const any32 *)wire;
    any32 *d = (any32 *)data;
    uint32_t lines = bytes / 8, wrong = 0;
    for (uint32_t i = 0; i < lines; i++) {
        d[2 * i] = w[4 * i];
        d[2 * i + 1] = w[4 * i + 2];
        wrong |= (w[4 * i + 1] ^ flag) | (w[4 * i + 3] ^ flag);
    }
    if (bytes % 8) {
        uint32_t last[2] = {w[4 * lines], w[4 * lines + 2]};
        wrong |= (w[4 * lines + 1] ^ flag) | (w[4 * lines + 3] ^ flag);
        memcpy(data + 8 * lines, last, bytes % 8);
    }
    return wrong ? -1 : 0;
}

/* Lines 0-3 of a half: the first 120 bytes of each 128; lines 4-7: 112 fresh bytes, then the eight that the flag
 * of line m displaced. */
static void encode_half(uint8_t *wire, const uint8_t *data, uint64_t flag) {
    for (int m = 0; m < 4; m++) {
        memcpy(wire + 128 * m, data + 128 * m, 120);
        memcpy(wire + 128 * (m + 4), data + 512 + 112 * m, 112);
        memcpy(wire + 128 * (m + 4) + 112, data + 128 * m + 120, 8);
    }
    for (int l = 0; l < 8; l++)
        *(any64 *)(wire + 128 * l + 120) = flag;
}

static uint64_t decode_half(uint8_t *data, const uint8_t *wire, uint64_t flag) {
    uint64_t wrong = 0;
    for (int m = 0; m < 4; m++) {
        memcpy(data + 128 * m, wire + 128 * m, 120);
        memcpy(data + 128 * m + 120, wire + 128 * (m + 4) + 112, 8);
        memcpy(data + 512 + 112 * m, wire + 128 * (m + 4), 112);
    }
    for (int l = 0; l < 8; l++)
        wrong |= *(const any64 *)(wire + 128 * l + 120) ^ flag;
    return wrong;
}

static void encode_ll128(uint8_t *wire, const uint8_t *data, uint32_t bytes, uint64_t flag) {
    uint32_t at = 0;
    for (; bytes - at >= SLICE_DATA; at += SLICE_DATA, wire += SLICE_WIRE) {
        encode_half(wire, data + at, flag);
        encode_half(wire + HALF_WIRE, data + at + HALF_DATA, flag);
    }
    if (at < bytes) {
        uint8_t last[SLICE_DATA] = {0};
        memcpy(last, data + at, bytes - at);
        encode_half(wire, last, flag);
        encode_half(wire + HALF_WIRE, last + HALF_DATA, flag);
    }
}

static int decode_ll128(uint8_t *data, const uint8_t *wire, uint32_t bytes, uint64_t flag) {
    uint64_t wrong = 0;
    uint32_t at = 0;
    for (; bytes - at >= SLICE_DATA; at += SLICE_DATA, wire += SLICE_WIRE) {
        wrong |= decode_half(data + at, wire, flag);
        wrong |= decode_half(data + at + HALF_DATA, wire + HALF_WIRE, flag);
    }
    if (at < bytes) {
        uint8_t last[SLICE_DATA];
        wrong |= decode_half(last, wire, flag);
        wrong |= decode_half(last + HALF_DATA, wire + HALF_WIRE, flag);
        memcpy(data + at, last, bytes - at);
    }
    return wrong ? -1 : 0;
}

void sr_encode(enum sr_protocol protocol, uint8_t *wire, const uint8_t *data, uint32_t bytes, uint64_t step) {
    if (protocol == SR_LL)
        encode_ll(wire, data, bytes, (uint32_t)(step + 1));
    else if (protocol == SR_LL128)
        encode_ll128(wire, data, bytes, step + 1);
    else
        memcpy(wire, data, bytes);
}

int sr_decode(enum sr_protocol protocol, uint8_t *data, const uint8_t *wire, uint32_t bytes, uint64_t step) {
    if (protocol == SR_LL)
        return decode_ll(data, wire, bytes, (uint32_t)(step + 1));
    if (protocol == SR_LL128)
        return decode_ll128(data, wire, bytes, step + 1);
    memcpy(data, wire, bytes);
    return 0;
}

static float from_bf16(uint16_t v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define PLAIN_SUM(type) \
    do { \
        typedef type __attribute__((aligned(1), may_alias)) any; \
        any *o = (any *)out; \
        const any *x = (const any *)a, *y = (const any *)b; \
        for (uint64_t i = 0; i < bytes / sizeof(type); i++) \
            o[i] = x[i] + y[i]; \
    } while (0)

typedef uint16_t __attribute__((aligned(1), may_alias)) any16;

void sr_add(enum sr_dtype dtype, uint8_t *out, const uint8_t *a, const uint8_t *b, uint64_t bytes) {
    switch (dtype) {
    case SR_U8: PLAIN_SUM(uint8_t); break;
    case SR_I32: PLAIN_SUM(uint32_t); break; /* wraps, as the GPU does */
    case SR_I64: PLAIN_SUM(uint64_t); break;
    case SR_F16: PLAIN_SUM(_Float16); break;
    case SR_F32: PLAIN_SUM(float); break;
    case SR_F64: PLAIN_SUM(double); break;
    case SR_BF16:
        for (uint64_t i = 0; i < bytes / 2; i++)
            ((any16 *)out)[i] = to_bf16(from_bf16(((const any16 *)a)[i]) + from_bf16(((const any16 *)b)[i]));
        break;
    }
}
