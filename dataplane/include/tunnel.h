/* Encapsulated mirrors: from a transport header to the mirrored Ethernet frame behind it.
 *
 *   Ethernet | IPv4/IPv6 | GRE [| ERSPAN II or III] | mirrored frame       (IP protocol 47)
 *   Ethernet | IPv4/IPv6 | UDP 4789 | VXLAN         | mirrored frame
 *
 * One step in, no loop, no state: the caller has walked Ethernet and IP and calls fc_tunnel_enter with the
 * bytes behind the IP header. What may hold RoCE and is not unpacked here is refused with its name, never
 * taken for other traffic. Plain C, shared by dataplane (is the frame cut?) and parser (decode).
 *
 * Sources: RFC 2784/2890 (GRE), RFC 7348 (VXLAN), draft-foschiano-erspan-03 (ERSPAN I, II, III).
 */
#ifndef FLOWCHECK_TUNNEL_H
#define FLOWCHECK_TUNNEL_H

#include <stddef.h>
#include <stdint.h>

enum fc_tunnel_kind {
    FC_TUNNEL_NONE = 0,
    FC_TUNNEL_GRE = 1,        /* transparent Ethernet bridging, protocol 0x6558            */
    FC_TUNNEL_ERSPAN_1 = 2,   /* 0x88be without a sequence number: no ERSPAN header at all */
    FC_TUNNEL_ERSPAN_2 = 3,
    FC_TUNNEL_ERSPAN_3 = 4,
    FC_TUNNEL_VXLAN = 5,
    FC_TUNNEL_KINDS = 6
};

enum fc_tunnel_status {
    FC_TUNNEL_ABSENT = 0,  /* no tunnel: other traffic                                        */
    FC_TUNNEL_INSIDE = 1,  /* fc_tunnel.inner is the mirrored frame                           */
    FC_TUNNEL_SHORT = 2,   /* its headers do not fit into the bytes there are                 */
    FC_TUNNEL_REFUSED = 3  /* may hold RoCE, is not unpacked: fc_tunnel.refusal says what     */
};

/* Why a packet was refused. Names: fc_refusal_names. */
enum fc_refusal {
    FC_REFUSED_NOT = 0,
    FC_REFUSED_GRE_VERSION,
    FC_REFUSED_GRE_ROUTING,
    FC_REFUSED_GRE_IP,
    FC_REFUSED_GRE_MPLS,
    FC_REFUSED_GRE_VENDOR,
    FC_REFUSED_GRE_OTHER,
    FC_REFUSED_ERSPAN_VERSION,
    FC_REFUSED_ERSPAN_PAYLOAD,
    FC_REFUSED_VXLAN,
    FC_REFUSED_GENEVE,
    FC_REFUSED_MPLS,
    FC_REFUSED_IP_IN_IP,
    FC_REFUSED_L2TP,
    FC_REFUSED_ENCRYPTED,
    FC_REFUSED_BACKBONE,
    FC_REFUSED_TWICE,
    FC_REFUSALS
};

static const char *const fc_refusal_names[FC_REFUSALS] = {
    "", "GRE version 1", "GRE with source routing", "GRE carrying IP", "GRE carrying MPLS",
    "GRE with a vendor's mirror header (0x8949)", "GRE carrying another protocol", "unknown ERSPAN version",
    "ERSPAN payload is not Ethernet", "VXLAN without a plain Ethernet payload", "GENEVE", "MPLS", "IP in IP",
    "L2TP or EtherIP", "encrypted (IPsec or MACsec)", "provider backbone bridge", "encapsulated twice",
};

static const char *const fc_tunnel_names[FC_TUNNEL_KINDS] = {
    "", "GRE", "ERSPAN I", "ERSPAN II", "ERSPAN III", "VXLAN",
};

typedef struct fc_tunnel {
    const uint8_t *inner; /* mirrored Ethernet frame                                          */
    uint32_t offset;      /* of it behind the transport header                                */
    uint32_t session;     /* ERSPAN session id (10 bits), GRE key, VXLAN network; 0 without   */
    uint8_t kind;
    uint8_t refusal;
    uint8_t truncated;    /* ERSPAN's T bit: the mirror cut the frame                         */
    uint8_t bad;          /* ERSPAN III: the mirrored frame had a CRC or alignment error      */
} fc_tunnel;

static inline uint32_t fc_tunnel_be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

/* Ethernet types that may hold RoCE and are not unpacked; FC_REFUSED_NOT for all others. */
static inline int fc_refused_type(uint32_t type)
{
    switch (type) {
    case 0x8847:
    case 0x8848: return FC_REFUSED_MPLS;
    case 0x88e5: return FC_REFUSED_ENCRYPTED; /* MACsec */
    case 0x88e7: return FC_REFUSED_BACKBONE;
    default: return FC_REFUSED_NOT;
    }
}

/* Likewise IP protocols and IPv6 next headers. */
static inline int fc_refused_protocol(uint32_t protocol)
{
    switch (protocol) {
    case 4:
    case 41: return FC_REFUSED_IP_IN_IP;
    case 50:
    case 51: return FC_REFUSED_ENCRYPTED;
    case 97:
    case 115: return FC_REFUSED_L2TP;
    case 137: return FC_REFUSED_MPLS;
    default: return FC_REFUSED_NOT;
    }
}

static inline int fc_tunnel_refuse(fc_tunnel *out, int refusal)
{
    out->refusal = (uint8_t)refusal;
    return FC_TUNNEL_REFUSED;
}

static inline int fc_tunnel_erspan(const uint8_t *at, size_t have, uint32_t version, uint32_t offset, fc_tunnel *out)
{
    uint32_t word, size = version == 1 ? 8 : 12;

    if (have < offset + size)
        return FC_TUNNEL_SHORT;
    at += offset;
    if (at[0] >> 4 != version)
        return fc_tunnel_refuse(out, FC_REFUSED_ERSPAN_VERSION);
    word = fc_tunnel_be16(at + 2); /* COS 3, En or BSO 2, T 1, session 10 */
    out->session = word & 0x03ff;
    out->truncated = (word & 0x0400) != 0;
    out->kind = version == 1 ? FC_TUNNEL_ERSPAN_2 : FC_TUNNEL_ERSPAN_3;
    if (version == 2) {
        word = fc_tunnel_be16(at + 10); /* P 1, frame type 5, hardware 6, D 1, granularity 2, O 1 */
        out->bad = (at[2] >> 3 & 3) == 3;
        if (word >> 10 & 0x1f)
            return fc_tunnel_refuse(out, FC_REFUSED_ERSPAN_PAYLOAD);
        if (word & 1) {
            size += 8; /* platform specific subheader */
            if (have < offset + size)
                return FC_TUNNEL_SHORT;
        }
    }
    out->inner = at + size;
    out->offset = offset + size;
    return FC_TUNNEL_INSIDE;
}

static inline int fc_tunnel_gre(const uint8_t *at, size_t have, fc_tunnel *out)
{
    uint32_t flags, type, size = 4;

    if (have < 4)
        return FC_TUNNEL_SHORT;
    flags = fc_tunnel_be16(at);
    type = fc_tunnel_be16(at + 2);
    if (flags & 7)
        return fc_tunnel_refuse(out, FC_REFUSED_GRE_VERSION);
    if (flags & 0x4800) /* routing present, strict source route */
        return fc_tunnel_refuse(out, FC_REFUSED_GRE_ROUTING);
    if (flags & 0x8000)
        size += 4; /* checksum */
    if (flags & 0x2000) {
        if (have < size + 4)
            return FC_TUNNEL_SHORT;
        out->session = fc_tunnel_be16(at + size) << 16 | fc_tunnel_be16(at + size + 2);
        size += 4;
    }
    if (flags & 0x1000)
        size += 4; /* sequence */
    switch (type) {
    case 0x6558: out->kind = FC_TUNNEL_GRE; break;
    case 0x88be:
        if (flags & 0x1000)
            return fc_tunnel_erspan(at, have, 1, size, out);
        out->kind = FC_TUNNEL_ERSPAN_1;
        break;
    case 0x22eb: return fc_tunnel_erspan(at, have, 2, size, out);
    case 0x0800:
    case 0x86dd: return fc_tunnel_refuse(out, FC_REFUSED_GRE_IP);
    case 0x8847:
    case 0x8848: return fc_tunnel_refuse(out, FC_REFUSED_GRE_MPLS);
    case 0x8949: return fc_tunnel_refuse(out, FC_REFUSED_GRE_VENDOR);
    default: return fc_tunnel_refuse(out, FC_REFUSED_GRE_OTHER);
    }
    if (have < size)
        return FC_TUNNEL_SHORT;
    out->inner = at + size;
    out->offset = size;
    return FC_TUNNEL_INSIDE;
}

static inline int fc_tunnel_udp(const uint8_t *at, size_t have, fc_tunnel *out)
{
    uint32_t port;

    if (have < 4)
        return FC_TUNNEL_SHORT;
    port = fc_tunnel_be16(at + 2);
    if (port == 6081)
        return fc_tunnel_refuse(out, FC_REFUSED_GENEVE);
    if (port == 6635)
        return fc_tunnel_refuse(out, FC_REFUSED_MPLS);
    if (port == 4790)
        return fc_tunnel_refuse(out, FC_REFUSED_VXLAN);
    if (port != 4789)
        return FC_TUNNEL_ABSENT;
    if (have < 16)
        return FC_TUNNEL_SHORT;
    if (at[8] != 0x08) /* the network identifier is valid, no extension changes the payload */
        return fc_tunnel_refuse(out, FC_REFUSED_VXLAN);
    out->session = fc_tunnel_be16(at + 12) << 8 | at[14];
    out->kind = FC_TUNNEL_VXLAN;
    out->inner = at + 16;
    out->offset = 16;
    return FC_TUNNEL_INSIDE;
}

/* at: the header behind IP, of which `have` bytes may be read. Returns an fc_tunnel_status. */
static inline int fc_tunnel_enter(uint32_t protocol, const uint8_t *at, size_t have, fc_tunnel *out)
{
    int refusal = fc_refused_protocol(protocol);

    *out = (fc_tunnel){0};
    if (refusal)
        return fc_tunnel_refuse(out, refusal);
    if (protocol == 47)
        return fc_tunnel_gre(at, have, out);
    return protocol == 17 ? fc_tunnel_udp(at, have, out) : FC_TUNNEL_ABSENT;
}

#endif
