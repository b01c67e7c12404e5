/* Frames: Ethernet, IPv4, UDP 4791, BTH and its extensions, payload, pad, ICRC.
 *
 *   sr_path_init    constant headers of one QP pair and direction
 *   sr_frame_build  headers and ICRC of one frame; the payload stays where it is (three pieces to send)
 *   sr_frame_parse  a received frame to a packet, with its ICRC checked
 *
 * IPv4 as ConnectX sends it: identification 0, DF, TTL 64, UDP checksum 0, MigReq set, partition 0xFFFF.
 * Source: reference icrc.md, nccl-wire.md 5.5 and 5.8. Pure functions of their arguments; any thread. */
#ifndef SR_WIRE_H
#define SR_WIRE_H

#include <stdint.h>

enum {
    SR_WRITE_FIRST = 6, SR_WRITE_MIDDLE = 7, SR_WRITE_LAST = 8, SR_WRITE_LAST_IMM = 9,
    SR_WRITE_ONLY = 10, SR_WRITE_ONLY_IMM = 11, SR_ACK = 17,
};
enum { SR_ROCE_PORT = 4791, SR_HEAD_BYTES = 14 + 20 + 8 + 12 + 20, SR_OVERHEAD = 20 + 8 + 12 + 20 + 4 };

struct sr_path {
    uint8_t bytes[42];
    uint32_t sum; /* of the IPv4 header's words without total length and checksum */
};

struct sr_frame {
    uint8_t head[SR_HEAD_BYTES], tail[8];
    uint32_t head_length, data_length, tail_length;
    const uint8_t *data;
};

struct sr_packet {
    uint8_t opcode, ack_request;
    uint32_t qpn, psn, length;
    uint32_t source; /* IPv4 address, network order */
    const uint8_t *extension, *payload;
};

enum sr_verdict { SR_FRAME_OK, SR_FRAME_OTHER, SR_FRAME_DAMAGED };

/* Addresses in network order. */
void sr_path_init(struct sr_path *path, const uint8_t *source_mac, const uint8_t *target_mac, uint32_t source,
                  uint32_t target, uint16_t source_port, uint8_t traffic_class);
void sr_frame_build(struct sr_frame *frame, const struct sr_path *path, uint8_t opcode, uint32_t qpn, uint32_t psn,
                    int ack_request, const uint8_t *extension, uint32_t extension_length, const uint8_t *data,
                    uint32_t length);
enum sr_verdict sr_frame_parse(const uint8_t *frame, uint32_t length, struct sr_packet *packet);

/* The UDP source port that the kernel derives from a connection's two QP numbers; equal in both directions. */
uint16_t sr_source_port(uint32_t a, uint32_t b);

static inline uint64_t sr_get64(const uint8_t *p) {
    uint64_t v;
    __builtin_memcpy(&v, p, 8);
    return __builtin_bswap64(v);
}
static inline uint32_t sr_get32(const uint8_t *p) {
    uint32_t v;
    __builtin_memcpy(&v, p, 4);
    return __builtin_bswap32(v);
}
static inline void sr_put64(uint8_t *p, uint64_t v) {
    v = __builtin_bswap64(v);
    __builtin_memcpy(p, &v, 8);
}
static inline void sr_put32(uint8_t *p, uint32_t v) {
    v = __builtin_bswap32(v);
    __builtin_memcpy(p, &v, 4);
}
static inline void sr_put16(uint8_t *p, uint16_t v) {
    v = __builtin_bswap16(v);
    __builtin_memcpy(p, &v, 2);
}

#endif
