#include "sr_wire.h"

#include <isa-l/crc.h>
#include <string.h>

enum { ETH = 14, IP = 20, UDP = 8, BTH = 12 };

uint16_t sr_source_port(uint32_t a, uint32_t b) {
    uint64_t v = (uint64_t)a * b;
    v ^= v >> 20;
    v ^= v >> 40;
    uint32_t label = v & 0xFFFFF;
    return (uint16_t)(((label & 0x3FFF) ^ (label >> 14)) | 0xC000);
}

static uint32_t word_sum(const uint8_t *p, int words) {
    uint32_t sum = 0;
    for (int i = 0; i < words; i++)
        sum += (uint32_t)p[2 * i] << 8 | p[2 * i + 1];
    return sum;
}

void sr_path_init(struct sr_path *path, const uint8_t *source_mac, const uint8_t *target_mac, uint32_t source,
                  uint32_t target, uint16_t source_port, uint8_t traffic_class) {
    uint8_t *b = path->bytes;
    memset(b, 0, sizeof path->bytes);
    memcpy(b, target_mac, 6);
    memcpy(b + 6, source_mac, 6);
    sr_put16(b + 12, 0x0800);
    uint8_t *ip = b + ETH;
    ip[0] = 0x45;
    ip[1] = traffic_class;
    sr_put16(ip + 6, 0x4000);
    ip[8] = 64;
    ip[9] = 17;
    memcpy(ip + 12, &source, 4);
    memcpy(ip + 16, &target, 4);
    path->sum = word_sum(ip, IP / 2);
    sr_put16(ip + IP, source_port);
    sr_put16(ip + IP + 2, SR_ROCE_PORT);
}

/* CRC of the eight ones and the IPv4, UDP and BTH headers at `ip`, masked. */
static uint32_t masked_crc(const uint8_t *ip, uint32_t length) {
    uint8_t m[8 + IP + UDP + BTH + 20];
    memset(m, 0xFF, 8);
    memcpy(m + 8, ip, length);
    m[8 + 1] = m[8 + 8] = 0xFF;                     /* DSCP and ECN, TTL */
    m[8 + 10] = m[8 + 11] = 0xFF;                   /* header checksum */
    m[8 + IP + 6] = m[8 + IP + 7] = 0xFF;           /* UDP checksum */
    m[8 + IP + UDP + 4] = 0xFF;                     /* FECN, BECN, reserved */
    return crc32_gzip_refl(0, m, 8 + length);
}

void sr_frame_build(struct sr_frame *frame, const struct sr_path *path, uint8_t opcode, uint32_t qpn, uint32_t psn,
                    int ack_request, const uint8_t *extension, uint32_t extension_length, const uint8_t *data,
                    uint32_t length) {
    uint32_t pad = -length & 3;
    uint32_t udp_length = UDP + BTH + extension_length + length + pad + 4;
    uint8_t *h = frame->head, *ip = h + ETH, *bth = ip + IP + UDP;
    memcpy(h, path->bytes, sizeof path->bytes);
    sr_put16(ip + 2, (uint16_t)(IP + udp_length));
    uint32_t sum = path->sum + IP + udp_length;
    while (sum >> 16)
        sum = (sum & 0xFFFF) + (sum >> 16);
    sr_put16(ip + 10, (uint16_t)~sum);
    sr_put16(ip + IP + 4, (uint16_t)udp_length);
    bth[0] = opcode;
    bth[1] = (uint8_t)(0x40 | pad << 4);
    sr_put16(bth + 2, 0xFFFF);
    sr_put32(bth + 4, qpn & 0xFFFFFF);
    sr_put32(bth + 8, (ack_request ? 0x80000000u : 0) | (psn & 0xFFFFFF));
    memcpy(bth + BTH, extension, extension_length);
    frame->head_length = ETH + IP + UDP + BTH + extension_length;
    frame->data = data;
    frame->data_length = length;
    uint32_t crc = masked_crc(ip, IP + UDP + BTH + extension_length);
    if (length)
        crc = crc32_gzip_refl(crc, (uint8_t *)data, length);
    memset(frame->tail, 0, 4);
    if (pad)
        crc = crc32_gzip_refl(crc, frame->tail, pad);
    memcpy(frame->tail + pad, &crc, 4); /* least significant byte first */
    frame->tail_length = pad + 4;
}

enum sr_verdict sr_frame_parse(const uint8_t *frame, uint32_t length, struct sr_packet *packet) {
    if (length < ETH + IP + UDP + BTH + 4 || frame[12] != 0x08 || frame[13] != 0 || frame[ETH] != 0x45)
        return SR_FRAME_OTHER;
    const uint8_t *ip = frame + ETH, *udp = ip + IP, *bth = udp + UDP;
    uint32_t total = (uint32_t)ip[2] << 8 | ip[3], fragment = (uint32_t)ip[6] << 8 | ip[7];
    if (ip[9] != 17 || (fragment & 0x3FFF) || (udp[2] << 8 | udp[3]) != SR_ROCE_PORT)
        return SR_FRAME_OTHER;
    if (total < IP + UDP + BTH + 4 || total > length - ETH || (uint32_t)(udp[4] << 8 | udp[5]) != total - IP)
        return SR_FRAME_DAMAGED;
    uint32_t crc = masked_crc(ip, IP + UDP + BTH), given, rest = total - IP - UDP - BTH - 4;
    crc = crc32_gzip_refl(crc, (uint8_t *)bth + BTH, rest);
    memcpy(&given, bth + BTH + rest, 4);
    if (crc != given)
        return SR_FRAME_DAMAGED;
    uint32_t extension = 0, pad = bth[1] >> 4 & 3;
    packet->opcode = bth[0];
    switch (packet->opcode) {
    case SR_WRITE_FIRST: case SR_WRITE_ONLY: extension = 16; break;
    case SR_WRITE_ONLY_IMM: extension = 20; break;
    case SR_WRITE_LAST_IMM: case SR_ACK: extension = 4; break;
    case SR_WRITE_MIDDLE: case SR_WRITE_LAST: break;
    default: return SR_FRAME_OTHER;
    }
    if (extension + pad > rest)
        return SR_FRAME_DAMAGED;
    packet->ack_request = bth[8] >> 7;
    packet->qpn = sr_get32(bth + 4) & 0xFFFFFF;
    packet->psn = sr_get32(bth + 8) & 0xFFFFFF;
    packet->extension = bth + BTH;
    packet->payload = bth + BTH + extension;
    packet->length = rest - extension - pad;
    memcpy(&packet->source, ip + 12, 4);
    return SR_FRAME_OK;
}
