/* Tags between an Ethernet frame's addresses and the type of what it carries.
 *
 *   addresses (12) | { tag's type (2) | tag's content }* | type (2) | packet
 *
 * VLAN tags, and what switches put there: time stamps of a tap aggregation port (Arista), port and security tags
 * (802.1BR, VN-tag, Cisco metadata, Marvell EDSA, Broadcom), MACsec that signs and does not encrypt. Plain C, shared by
 * dataplane and parser as tunnel.h is.
 *
 * Sources: IEEE 802.1Q, 802.1BR 7.1, 802.1AE 9; tcpdump's print-arista.c, print-dsa.c; Linux net/dsa/tag_brcm.c;
 * Wireshark's packet-cisco-metadata.c, packet-vntag.c.
 */
#ifndef FLOWCHECK_TAG_H
#define FLOWCHECK_TAG_H

#include <stddef.h>
#include <stdint.h>

#define FC_TAGS_MAX 6 /* more are an attack, not a network */

enum { FC_TYPE_STAMP = 0xd28b };

static inline int fc_is_vlan(uint32_t type)
{
    return type == 0x8100 || type == 0x88a8 || type == 0x9100 || type == 0x9200;
}

/* Bytes from behind a tag's type to behind the type that follows; 0: `type` is not a tag, or one that is not known.
 * at: behind the type, of which `have` bytes may be read. A size beyond `have`: the frame ends before it is told. */
static inline size_t fc_tag_size(uint32_t type, const uint8_t *at, size_t have)
{
    switch (type) {
    case 0x8100:
    case 0x88a8:
    case 0x9100:
    case 0x9200: return 4;
    case 0x8874: /* Broadcom, the kind with a type */
    case 0x8926: return 6; /* VN-tag */
    case 0x893f: /* 802.1BR E-tag */
    case 0xdada: return 8; /* Marvell EDSA */
    case 0x8909: /* Cisco metadata, version 1 */
        return have >= 1 && at[0] != 1 ? 0 : 8;
    case FC_TYPE_STAMP: /* subtype 1; format 1: 64 bits, 2: 48 bits */
        if (have < 4)
            return 12;
        if (at[0] != 0 || at[1] != 1)
            return 0;
        return at[3] >> 4 == 1 ? 14 : at[3] >> 4 == 2 ? 12 : 0;
    case 0x88e5: /* MACsec: neither encrypted nor changed, with a channel identifier or without */
        return have >= 1 && at[0] & 0x8c ? 0 : have >= 1 && at[0] & 0x20 ? 16 : 8;
    default: return 0;
    }
}

static inline uint32_t fc_tag_be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

/* Passes the tags of a frame of which `have` >= 14 bytes may be read. Returns the type behind them, and where what it
 * names begins; beyond `have` if the frame ends before that. */
static inline uint32_t fc_frame_type(const uint8_t *head, size_t have, size_t *at)
{
    uint32_t type = fc_tag_be16(head + 12);
    size_t size;

    *at = 14;
    for (int tags = 0; tags < FC_TAGS_MAX && (size = fc_tag_size(type, head + *at, have - *at)) != 0; tags++) {
        *at += size;
        if (have < *at)
            break;
        type = fc_tag_be16(head + *at - 2);
    }
    return type;
}

#endif
