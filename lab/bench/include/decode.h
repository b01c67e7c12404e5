/* The least that tells the flow of a RoCEv2 packet: shared by the bench's minimal parser and its minimal loop, and with
 * nothing of the product. */
#ifndef FLOWCHECK_BENCH_DECODE_H
#define FLOWCHECK_BENCH_DECODE_H

#include "baseline.h"

#include <string.h>

static inline uint32_t fcb_be16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return __builtin_bswap16(v);
}

static inline uint32_t fcb_be32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return __builtin_bswap32(v);
}

static inline uint32_t fcb_hash(const uint8_t *src, const uint8_t *dst, uint32_t width, uint32_t qpn)
{
    return (fcb_be32(src + width - 4) * 31 + fcb_be32(dst + width - 4)) * 0x9e3779b1u ^ qpn * 0x85ebca6bu;
}

/* Words, not memcmp: its wide loads would wait for the counters stored beside the addresses a packet ago. */
static inline int fcb_is_flow(const fcb_flow *f, const uint8_t *src, const uint8_t *dst, uint32_t qpn, uint32_t version)
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

/* Ethernet, IPv4 or IPv6, UDP, BTH, the QP's entry in the table (mask + 1 entries). NULL: not a known flow's. */
static inline fcb_flow *fcb_decode(const uint8_t *p, uint32_t length, fcb_flow *table, uint32_t mask,
                                   const uint8_t **bth, uint32_t *udp_length)
{
    uint32_t type, width, version;
    const uint8_t *src, *dst, *udp;
    if (length < 14 + 20 + 8 + 12 + 4)
        return NULL;
    type = fcb_be16(p + 12);
    if (type == 0x0800 && p[14] == 0x45 && p[23] == 17) {
        version = 4, width = 4, src = p + 26, dst = p + 30, udp = p + 34;
    } else if (type == 0x86dd && p[20] == 17 && length >= 14 + 40 + 8 + 12 + 4) {
        version = 6, width = 16, src = p + 22, dst = p + 38, udp = p + 54;
    } else {
        return NULL;
    }
    *udp_length = fcb_be16(udp + 4);
    if (fcb_be16(udp + 2) != 4791 || (size_t)(udp - p) + *udp_length > length)
        return NULL;
    *bth = udp + 8;
    uint32_t qpn = fcb_be32(*bth + 4) & 0xffffff, at = fcb_hash(src, dst, width, qpn) & mask;
    while (table[at].version && !fcb_is_flow(&table[at], src, dst, qpn, version))
        at = (at + 1) & mask;
    return table[at].version ? &table[at] : NULL;
}

/* PSN against the expected one, and counters. */
static inline void fcb_count(fcb_flow *flow, uint32_t psn, uint32_t udp_length)
{
    flow->gaps += psn != flow->next_psn;
    flow->next_psn = (psn + 1) & 0xffffff;
    flow->packets++;
    flow->bytes += udp_length;
}

#endif
