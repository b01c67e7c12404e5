/* The packet that nearly every packet is: an RC WRITE MIDDLE, so a full one, in Ethernet, IPv4 or IPv6 and UDP, with no
 * tag, option, extension header or wrapping. It has nothing behind its BTH but payload, so a few comparisons of
 * words within one cache line decode it, into registers. Everything else is for fc_roce_decode, which says the
 * same of these packets. Little-endian machines only, as NCCL's wire formats are.
 */
#ifndef FLOWCHECK_MIDDLE_H
#define FLOWCHECK_MIDDLE_H

#include "roce.h"

#include <string.h>

typedef struct fc_middle {
    const uint8_t *ip, *bth;
    const uint8_t *ends; /* source and destination address, one behind the other: 8 or 32 bytes */
    uint32_t version;    /* 4 or 6 */
    uint32_t dest_qp;    /* 24 bits */
    uint32_t psn;        /* the low 24 bits */
} fc_middle;

static inline uint16_t fc_word16(const uint8_t *at)
{
    uint16_t v;
    memcpy(&v, at, sizeof v);
    return v;
}

static inline uint32_t fc_word32(const uint8_t *at)
{
    uint32_t v;
    memcpy(&v, at, sizeof v);
    return v;
}

static inline uint64_t fc_word64(const uint8_t *at)
{
    uint64_t v;
    memcpy(&v, at, sizeof v);
    return v;
}

/* 1 if the frame is such a packet with `mtu` bytes of payload (a multiple of 4). Never reads past frame + len. */
static inline int fc_middle_decode(const uint8_t *frame, size_t len, uint32_t mtu, fc_middle *out)
{
    const uint8_t *ip = frame + 14, *udp;
    uint32_t udp_len = 8 + 12 + mtu + 4, behind; /* behind: bytes from the UDP header on, as the IP header says */

    if (len < (size_t)14 + 20 + udp_len)
        return 0;
    if ((fc_word32(frame + 12) & 0xffffff) == 0x450008) { /* type 0x0800, version 4, five words of header */
        if ((fc_word32(ip + 6) & 0xff00ff3f) != 0x11000000) /* no fragment, UDP */
            return 0;
        out->version = 4;
        out->ends = ip + 12;
        udp = ip + 20;
        behind = (uint32_t)__builtin_bswap16(fc_word16(ip + 2)) - 20;
    } else {
        if ((fc_word32(frame + 12) & 0xf0ffff) != 0x60dd86 || ip[6] != 17 || len < (size_t)14 + 40 + udp_len)
            return 0;
        out->version = 6;
        out->ends = ip + 8;
        udp = ip + 40;
        behind = __builtin_bswap16(fc_word16(ip + 4));
    }
    /* BTH: opcode 8 bits, SE and MigReq 2, pad 2, version 4, P_Key 16, reserved 8, QP 24 */
    uint64_t bth = fc_word64(udp + 8), ports = fc_word64(udp);
    if ((bth & 0x30ff) != FC_RC_WRITE_MIDDLE || (ports >> 16 & 0xffff) != 0xb712 /* 4791 */ ||
        __builtin_bswap16((uint16_t)(ports >> 32)) != udp_len || behind != udp_len)
        return 0;
    out->ip = ip;
    out->bth = udp + 8;
    out->dest_qp = (uint32_t)__builtin_bswap64(bth) & 0xffffff;
    out->psn = __builtin_bswap32(fc_word32(udp + 16));
    return 1;
}

/* The same of a packet whose `mtu` nobody knows yet: its payload's bytes, 0 if it is no such packet. */
static inline uint32_t fc_middle_read(const uint8_t *frame, size_t len, fc_middle *out)
{
    enum { AROUND = 8 + 12 + 4 }; /* UDP, BTH, ICRC */
    if (len < (size_t)14 + 40 + AROUND)
        return 0;
    uint32_t udp_len = __builtin_bswap16(fc_word16(frame + (frame[12] == 0x08 ? 14 + 20 : 14 + 40) + 4));
    return udp_len > AROUND && fc_middle_decode(frame, len, udp_len - AROUND, out) ? udp_len - AROUND : 0;
}

/* Where things lie in such a packet, which was decoded before; of its headers only these are looked at again. */
static inline void fc_middle_at(const uint8_t *frame, uint32_t version, fc_middle *out)
{
    out->ip = frame + 14;
    out->version = version;
    out->ends = out->ip + (version == 4 ? 12 : 8);
    out->bth = out->ip + (version == 4 ? 20 : 40) + 8;
}

/* fc_icrc_ok for such a packet. By value: a packet whose address is taken is kept in memory, not in registers. */
int fc_middle_icrc_ok(fc_middle p, uint32_t mtu);

/* Where the first 12 bytes of a BTH probably are, judging by the Ethernet type alone: a guess for prefetching.
 * They are inside the frame. NULL: no guess. */
static inline const uint8_t *fc_probable_bth(const uint8_t *frame, size_t len)
{
    size_t tag = 0;
    if (len < 14 + 4 + 40 + 8 + 12)
        return NULL;
    if (frame[12] == 0x81 && frame[13] == 0x00)
        tag = 4;
    if (frame[12 + tag] == 0x08)
        return frame + 14 + tag + 20 + 8;
    return frame[12 + tag] == 0x86 ? frame + 14 + tag + 40 + 8 : NULL;
}

#endif
