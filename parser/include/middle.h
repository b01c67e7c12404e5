/* The packet that nearly every packet is: an RC WRITE MIDDLE in Ethernet, IPv4 or IPv6 and UDP, with no tag, option,
 * extension header or wrapping. It has nothing behind its BTH but payload, so a few comparisons within one cache
 * line decode it, into registers. Everything else is for fc_roce_decode, which says the same of these packets.
 */
#ifndef FLOWCHECK_MIDDLE_H
#define FLOWCHECK_MIDDLE_H

#include "roce.h"

#include <string.h>

typedef struct fc_middle {
    const uint8_t *ip, *bth;
    const uint8_t *ends; /* source and destination address, one behind the other: 8 or 32 bytes */
    uint32_t version;    /* 4 or 6 */
    uint32_t ib_len, payload_len, dest_qp, psn;
} fc_middle;

static inline uint32_t fc_middle_be16(const uint8_t *at)
{
    uint16_t v;
    memcpy(&v, at, sizeof v);
    return __builtin_bswap16(v);
}

static inline uint32_t fc_middle_be24(const uint8_t *at) /* at[-1] is readable */
{
    uint32_t v;
    memcpy(&v, at - 1, sizeof v);
    return __builtin_bswap32(v) & 0xffffff;
}

/* 1 if the frame is such a packet. Never reads past frame + len. */
static inline int fc_middle_decode(const uint8_t *frame, size_t len, fc_middle *out)
{
    const uint8_t *ip = frame + 14, *udp;
    size_t behind; /* bytes from the UDP header on, as the IP header says */

    if (len < 14 + 20 + 8 + 12 + 4)
        return 0;
    if (fc_middle_be16(frame + 12) == 0x0800) {
        if (ip[0] != 0x45 || ip[9] != 17 || (fc_middle_be16(ip + 6) & 0x3fff))
            return 0;
        out->version = 4;
        out->ends = ip + 12;
        udp = ip + 20;
        behind = fc_middle_be16(ip + 2) - (size_t)20;
    } else {
        if (fc_middle_be16(frame + 12) != 0x86dd || len < 14 + 40 + 8 + 12 + 4 || ip[0] >> 4 != 6 || ip[6] != 17)
            return 0;
        out->version = 6;
        out->ends = ip + 8;
        udp = ip + 40;
        behind = fc_middle_be16(ip + 4);
    }
    const uint8_t *bth = udp + 8;
    uint32_t udp_len = fc_middle_be16(udp + 4), pad = bth[1] >> 4 & 3;
    if (bth[0] != FC_RC_WRITE_MIDDLE || fc_middle_be16(udp + 2) != 4791 || udp_len != behind ||
        udp_len > len - (size_t)(udp - frame) || udp_len < 8 + 12 + pad + 4)
        return 0;
    out->ip = ip;
    out->bth = bth;
    out->ib_len = udp_len - 8;
    out->payload_len = udp_len - 8 - 12 - pad - 4;
    out->dest_qp = fc_middle_be24(bth + 5);
    out->psn = fc_middle_be24(bth + 9);
    return 1;
}

/* fc_icrc_ok for such a packet. */
int fc_middle_icrc_ok(const uint8_t *ip, const uint8_t *bth, uint32_t version, uint32_t ib_len);

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
