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

#include "tag.h"
#include "tunnel.h"

static inline uint32_t fc_be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

static inline int fc_frame_cut_at(const uint8_t *head, size_t have, size_t captured, int inside);

/* ip: a packet of which `have` bytes may be read and `captured` were captured. */
static inline int fc_ip_cut(uint32_t type, const uint8_t *ip, size_t have, size_t captured, int inside);

/* What is behind a header that is entered; it ends `end` bytes behind that header's beginning, by what it says. */
static inline int fc_inside_cut(int status, const fc_tunnel *tunnel, size_t have, size_t end)
{
    size_t at = tunnel->offset, left = (have < end ? have : end) - at;

    if (status != FC_TUNNEL_INSIDE || tunnel->refusal)
        return 0;
    if (tunnel->truncated)
        return 1;
    if (tunnel->inside == FC_INSIDE_FRAME)
        return fc_frame_cut_at(tunnel->inner, left, end - at, 1);
    return fc_ip_cut(tunnel->inside, tunnel->inner, left, end - at, 1);
}

static inline int fc_ip_cut(uint32_t type, const uint8_t *ip, size_t have, size_t captured, int inside)
{
    size_t behind, end;
    uint32_t protocol;
    fc_tunnel tunnel;
    int status;

    if (have < 6)
        return 1;
    /* IPv4 total length 0 and IPv6 payload length 0 mean "not said here" (offloaded, jumbogram). */
    end = type == 0x0800 ? fc_be16(ip + 2) : 40 + fc_be16(ip + 4);
    if (captured < end)
        return 1;
    if (inside || have < 20)
        return 0;
    protocol = type == 0x0800 ? ip[9] : ip[6];
    behind = type == 0x0800 ? (ip[0] & 0x0fu) * 4 : 40;
    /* A fragment is no whole tunnel; IPv6 extension headers in front of one are not looked through. */
    if ((!fc_tunnel_protocol(protocol) && protocol != 17) || behind >= end || behind >= have
        || (type == 0x0800 && fc_be16(ip + 6) & 0x3fff))
        return 0;
    status = fc_tunnel_enter(protocol, ip + behind, (have < end ? have : end) - behind, &tunnel);
    return fc_inside_cut(status, &tunnel, have - behind, end - behind);
}

/* head: the first `have` bytes of a frame of which `captured` bytes were captured. Reads no more than the
 * headers up to the tunnel's end. inside: head is a mirrored frame, a second tunnel is not entered. */
static inline int fc_frame_cut_at(const uint8_t *head, size_t have, size_t captured, int inside)
{
    size_t at;
    uint32_t type;
    fc_tunnel tunnel;
    int status;

    if (have < 14)
        return 1;
    type = fc_frame_type(head, have, &at);
    if (have < at)
        return 1;
    if (type == 0x0800 || type == 0x86dd)
        return fc_ip_cut(type, head + at, have - at, captured - at, inside);
    if (inside || !fc_tunnel_has_type(type))
        return 0;
    status = fc_tunnel_type(type, head + at, have - at, &tunnel);
    return status == FC_TUNNEL_SHORT || fc_inside_cut(status, &tunnel, have - at, captured - at);
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

/* Can this frame not hold RoCE, whatever lies behind what is read here? Frames that are cut short, fragments, tunnels,
 * what may hold RoCE and is not unpacked (tunnel.h), and types that nobody here knows are kept: the parser names them. */
static inline int fc_frame_other(const uint8_t *head, uint32_t have)
{
    size_t at, behind;
    uint32_t type, protocol, port;

    if (have < 14)
        return 0;
    type = fc_frame_type(head, have, &at);
    if (have < at)
        return 0;
    if (type != 0x0800 && type != 0x86dd) /* 802.3 lengths, ARP, flow control, LLDP, PTP, 802.1X, PPPoE discovery */
        return type < 0x0600 || type == 0x0806 || type == 0x8808 || type == 0x88cc || type == 0x88f7 || type == 0x888e
               || type == 0x8863;
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
    port = fc_be16(head + behind + 2);
    return port != 4791 && !fc_tunnel_port(port);
}

#endif
