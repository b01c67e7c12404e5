/* Sorting what is not RoCEv2: othertraffic.h. Every read is covered by a check against `length` before it. */
#include "othertraffic.h"

#include <string.h>

#include "tag.h"
#include "tunnel.h"

enum {
    ETH_HEADER = 14, ETH_TYPES = 0x0600, ETH_IPV4 = 0x0800, ETH_ARP = 0x0806, ETH_IPV6 = 0x86DD,
    ETH_PAUSE = 0x8808, ETH_LLDP = 0x88CC, ETH_MACSEC = 0x88E5, ETH_PTP = 0x88F7, ETH_ROCE1 = 0x8915,
    IP_HOP_BY_HOP = 0, IP_ICMP = 1, IP_IGMP = 2, IP_TCP = 6, IP_UDP = 17, IP_ESP = 50, IP_ICMP6 = 58,
    PTP_EVENT = 319, PTP_GENERAL = 320, TCP_HEADER = 20, TCP_SYN = 2,
};

/* The first bytes of a queue pair handshake of NCCL's network transport, little-endian. */
static const uint64_t HANDSHAKE = 0x564AB9F2FC4B9D6C;

static uint32_t be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

static uint32_t be32(const uint8_t *p)
{
    return be16(p) << 16 | be16(p + 2);
}

static int is_ptp(const uint8_t *udp, size_t length)
{
    return length >= 4 && (be16(udp + 2) == PTP_EVENT || be16(udp + 2) == PTP_GENERAL);
}

static int is_handshake(const uint8_t *tcp, size_t length)
{
    if (length < TCP_HEADER)
        return 0;
    size_t data = (size_t)(tcp[12] >> 4) * 4;
    return length >= data + 8 && memcmp(tcp + data, &HANDSHAKE, 8) == 0;
}

static enum fc_other_kind sort(const uint8_t *frame, size_t length, int inside, fc_other *out);
static enum fc_other_kind sort_ip(uint32_t type, const uint8_t *ip, size_t length, int inside, fc_other *out);

/* What a tunnel holds; FC_OTHER_KINDS if it is not one. */
static enum fc_other_kind sort_inside(int found, const fc_tunnel *tunnel, size_t length, fc_other *out)
{
    if (found != FC_TUNNEL_INSIDE || tunnel->refusal || length < tunnel->offset + ETH_HEADER)
        return FC_OTHER_KINDS;
    length -= tunnel->offset;
    return tunnel->inside == FC_INSIDE_FRAME ? sort(tunnel->inner, length, 1, out)
                                             : sort_ip(tunnel->inside, tunnel->inner, length, 1, out);
}

/* By the protocol after an IP header; `at` is what follows it. */
static enum fc_other_kind sort_protocol(
    uint32_t protocol, const uint8_t *at, size_t length, int version, int inside, fc_other *out)
{
    fc_tunnel tunnel;
    if (!inside && length) {
        enum fc_other_kind found
            = sort_inside(fc_tunnel_enter(protocol, at, length, &tunnel), &tunnel, length, out);
        if (found != FC_OTHER_KINDS)
            return found;
    }
    out->number = protocol;
    switch (protocol) {
    case IP_TCP:
        out->handshake = is_handshake(at, length);
        return FC_OTHER_TCP;
    case IP_UDP:
        out->number = length >= 4 ? be16(at + 2) : 0;
        return is_ptp(at, length) ? FC_OTHER_PTP : FC_OTHER_UDP;
    }
    if (version == 6)
        return protocol == IP_ICMP6 ? FC_OTHER_ICMP6 : FC_OTHER_IP6;
    return protocol == IP_ICMP ? FC_OTHER_ICMP : protocol == IP_IGMP ? FC_OTHER_IGMP : FC_OTHER_IP4;
}

static enum fc_other_kind sort_ip(uint32_t type, const uint8_t *ip, size_t length, int inside, fc_other *out)
{
    size_t next = 40;
    uint32_t protocol;

    out->number = type;
    if (type == ETH_IPV4 && length >= 20) {
        next = (size_t)(ip[0] & 15) * 4;
        return sort_protocol(ip[9], ip + next, length > next ? length - next : 0, 4, inside, out);
    }
    if (type != ETH_IPV6 || length < 40)
        return FC_OTHER_ETHERTYPE;
    protocol = ip[6];
    if (protocol == IP_HOP_BY_HOP && length >= next + 8) { /* neighbour discovery's multicast reports */
        protocol = ip[next];
        next += ((size_t)ip[next + 1] + 1) * 8;
    }
    return sort_protocol(protocol, ip + next, length > next ? length - next : 0, 6, inside, out);
}

static enum fc_other_kind sort(const uint8_t *frame, size_t length, int inside, fc_other *out)
{
    fc_tunnel tunnel;
    size_t at;
    uint32_t type = fc_frame_type(frame, length, &at);

    out->number = type;
    switch (type) {
    case ETH_ARP: return FC_OTHER_ARP;
    case ETH_PTP: return FC_OTHER_PTP;
    case ETH_LLDP: return FC_OTHER_LLDP;
    case ETH_PAUSE: return FC_OTHER_PAUSE;
    case ETH_ROCE1: return FC_OTHER_ROCE1;
    }
    if (type < ETH_TYPES)
        return FC_OTHER_LLC;
    if (length < at)
        return FC_OTHER_ETHERTYPE;
    if (!inside && fc_tunnel_has_type(type)) {
        enum fc_other_kind found
            = sort_inside(fc_tunnel_type(type, frame + at, length - at, &tunnel), &tunnel, length - at, out);
        if (found != FC_OTHER_KINDS)
            return found;
    }
    return sort_ip(type, frame + at, length - at, inside, out);
}

enum fc_other_kind fc_other_sort(const uint8_t *frame, size_t length, fc_other *out)
{
    *out = (fc_other){0};
    return length < ETH_HEADER ? FC_OTHER_ETHERTYPE : sort(frame, length, 0, out);
}

int fc_tcp_segment(const uint8_t *frame, size_t length, fc_tcp_part *out, int *encrypted)
{
    size_t ip, tcp, end, data;
    uint32_t protocol;
    *encrypted = 0;
    if (length < ETH_HEADER)
        return 0;
    switch (fc_frame_type(frame, length, &ip)) {
    case ETH_IPV4:
        if (length < ip + 20 || frame[ip] >> 4 != 4)
            return 0;
        protocol = frame[ip + 9];
        if (protocol != IP_ESP && be16(frame + ip + 6) & 0x3FFF) /* a fragment */
            return 0;
        tcp = ip + (size_t)(frame[ip] & 15) * 4;
        end = ip + be16(frame + ip + 2);
        *out = (fc_tcp_part){.src = frame + ip + 12, .dst = frame + ip + 16, .ip_version = 4};
        break;
    case ETH_IPV6:
        if (length < ip + 40)
            return 0;
        protocol = frame[ip + 6];
        tcp = ip + 40;
        end = tcp + be16(frame + ip + 4);
        *out = (fc_tcp_part){.src = frame + ip + 8, .dst = frame + ip + 24, .ip_version = 6};
        break;
    case ETH_MACSEC:
        *encrypted = 1;
        return 0;
    default:
        return 0;
    }
    *encrypted = protocol == IP_ESP;
    if (protocol != IP_TCP || end > length || end < tcp + TCP_HEADER)
        return 0;
    data = tcp + (size_t)(frame[tcp + 12] >> 4) * 4;
    if (data > end || data < tcp + TCP_HEADER)
        return 0;
    out->payload = frame + data;
    out->length = (uint32_t)(end - data);
    out->ports = be32(frame + tcp);
    out->seq = be32(frame + tcp + 4);
    out->flags = frame[tcp + 13];
    return out->length || out->flags & TCP_SYN;
}
