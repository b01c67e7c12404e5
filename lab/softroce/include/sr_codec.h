/* Payload of a message: LL and LL128 lines or the bytes themselves, and sums in the element type's arithmetic.
 *
 *   sr_wire_bytes   data bytes -> bytes of the message
 *   sr_encode, sr_decode
 *   sr_add          out = a + b, one rounding per element
 *
 * What NCCL leaves undefined behind the last element is zero here. Source: nccl-wire.md 4.1 to 4.3.
 * Pure functions of their arguments; any thread. */
#ifndef SR_CODEC_H
#define SR_CODEC_H

#include <stdint.h>

enum sr_protocol { SR_LL, SR_LL128, SR_SIMPLE, SR_P2P, SR_PROTOCOLS }; /* SR_P2P: raw bytes in other slots */
enum sr_dtype {
    SR_U8, SR_I32, SR_I64, SR_F16, SR_BF16, SR_F32, SR_F64,
};

uint32_t sr_wire_bytes(enum sr_protocol protocol, uint32_t bytes);
void sr_encode(enum sr_protocol protocol, uint8_t *wire, const uint8_t *data, uint32_t bytes, uint64_t step);
/* 0, or -1 if a line's flag is not that of `step`: what lies in the slot is not this message. */
int sr_decode(enum sr_protocol protocol, uint8_t *data, const uint8_t *wire, uint32_t bytes, uint64_t step);
/* `out` may be `a` or `b`. */
void sr_add(enum sr_dtype dtype, uint8_t *out, const uint8_t *a, const uint8_t *b, uint64_t bytes);

#endif
