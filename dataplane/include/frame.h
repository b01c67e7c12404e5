/* Does an Ethernet frame end before its IP header says it does?
 *
 * A capture with a snap length (tcpdump -s, a truncating mirror port, an AF_PACKET frame that is too
 * small) hands over a frame that looks whole. The IP length is the only witness in the bytes. Frames
 * that are not IP carry no such witness and count as whole.
 *
 * A mirror that encapsulates (tunnel.h) cuts the frame inside and writes consistent lengths around it, so
 * there the inner IP length and ERSPAN's own truncated bit are asked as well.
 */
#ifndef FLOWCHECK_FRAME_H
#define FLOWCHECK_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "tunnel.h"

static inline uint32_t fc_be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

/* head: the first `have` bytes of a frame of which `captured` bytes were captured. Reads no more than the
 * headers up to the tunnel's end. inside: head is a mirrored frame, a second tunnel is not entered. */
static inline int fc_frame_cut_at(const uint8_t *head, size_t have, size_t captured, int inside)
{
    size_t at = 12, behind, end;
    uint32_t type, protocol, length;
    fc_tunnel tunnel;

    if (have < 14)
        return 1;
    type = fc_be16(head + at);
    for (int tags = 0; tags < 2 && (type == 0x8100 || type == 0x88a8); tags++) {
        at += 4;
        if (have < at + 2)
            return 1;
        type = fc_be16(head + at);
    }
    at += 2;
    if (type != 0x0800 && type != 0x86dd)
        return 0;
    if (have < at + 6)
        return 1;
    /* IPv4 total length 0 and IPv6 payload length 0 mean "not said here" (offloaded, jumbogram). */
    length = type == 0x0800 ? fc_be16(head + at + 2) : 40 + fc_be16(head + at + 4);
    if (captured < at + length)
        return 1;
    if (inside || have < at + 20)
        return 0;
    protocol = type == 0x0800 ? head[at + 9] : head[at + 6];
    behind = at + (type == 0x0800 ? (head[at] & 0x0fu) * 4 : 40);
    end = at + length;
    /* A fragment is no whole tunnel; IPv6 extension headers in front of one are not looked through. */
    if ((protocol != 47 && protocol != 17) || behind >= end || behind >= have
        || (type == 0x0800 && fc_be16(head + at + 6) & 0x3fff))
        return 0;
    if (fc_tunnel_enter(protocol, head + behind, (have < end ? have : end) - behind, &tunnel) != FC_TUNNEL_INSIDE)
        return 0;
    behind += tunnel.offset;
    return tunnel.truncated || fc_frame_cut_at(head + behind, (have < end ? have : end) - behind, end - behind, 1);
}

/* The same in short for what nearly every packet is: untagged, no IP options or extension headers, UDP to RoCE's
 * port, so no tunnel. -1: look closely. */
static inline int fc_frame_cut_roce(const uint8_t *head, uint32_t have, uint32_t captured)
{
    uint32_t type;

    if (have < 58)
        return -1;
    type = fc_be16(head + 12);
    if (type == 0x0800 && head[14] == 0x45 && head[23] == 17 && fc_be16(head + 36) == 4791)
        return captured < 14 + fc_be16(head + 16);
    if (type == 0x86dd && head[20] == 17 && fc_be16(head + 56) == 4791)
        return captured < 14 + 40 + fc_be16(head + 18);
    return -1;
}

static inline int fc_frame_cut(const uint8_t *head, uint32_t have, uint32_t captured)
{
    int cut = fc_frame_cut_roce(head, have, captured);

    return cut >= 0 ? cut : fc_frame_cut_at(head, have, captured, 0);
}

/* Can this frame not hold RoCE, whatever lies behind what is read here? Frames that are cut short, fragments,
 * tunnels and what may hide RoCE and is not unpacked (tunnel.h) are kept: the parser names them. */
static inline int fc_frame_other(const uint8_t *head, uint32_t have)
{
    size_t at = 12, behind;
    uint32_t type, protocol;

    if (have < 14)
        return 0;
    type = fc_be16(head + at);
    for (int tags = 0; tags < 2 && (type == 0x8100 || type == 0x88a8); tags++) {
        at += 4;
        if (have < at + 2)
            return 0;
        type = fc_be16(head + at);
    }
    at += 2;
    if (type != 0x0800 && type != 0x86dd)
        return type != 0x8915 && fc_refused_type(type) == FC_REFUSED_NOT; /* 0x8915: RoCE version 1 */
    if (have < at + 40)
        return 0;
    protocol = type == 0x0800 ? head[at + 9] : head[at + 6];
    if (protocol == 6 || protocol == 1 || protocol == 58 || protocol == 2 || protocol == 132)
        return 1; /* TCP, ICMP, ICMPv6, IGMP, SCTP */
    if (protocol != 17 || (type == 0x0800 && fc_be16(head + at + 6) & 0x3fff))
        return 0;
    behind = at + (type == 0x0800 ? (head[at] & 0x0fu) * 4 : 40);
    if (have < behind + 4)
        return 0;
    switch (fc_be16(head + behind + 2)) {
    case 4791: /* RoCEv2 */
    case 4789: /* VXLAN, and what is refused by name */
    case 4790:
    case 6081:
    case 6635: return 0;
    default: return 1;
    }
}

#endif
