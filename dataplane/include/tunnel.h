/* Encapsulated mirrors: from a transport header, or an Ethernet type, to the mirrored frame or IP packet behind it.
 *
 *   Ethernet | IPv4/IPv6 | GRE [| ERSPAN II or III]      | frame, IP       (IP protocol 47)
 *   Ethernet | IPv4/IPv6 | UDP | VXLAN, GENEVE, TZSP     | frame, IP
 *   Ethernet | IPv4/IPv6                                 | IP              (IP in IP; EtherIP: frame)
 *   Ethernet | PBB, FabricPath, TRILL, NSH               | frame           (NSH: IP too)
 *   Ethernet | PPPoE, MPLS                               | IP
 *
 * One step in, no state: the caller has walked Ethernet and IP and calls fc_tunnel_enter with the bytes behind
 * the IP header, or fc_tunnel_type with those behind an Ethernet type. What may hold RoCE and is not unpacked here is
 * refused with its name, never taken for other traffic. Plain C, shared by dataplane (is the frame cut?) and parser
 * (decode).
 *
 * Sources: RFC 2784/2890 (GRE), RFC 7348 (VXLAN), draft-ietf-nvo3-vxlan-gpe, draft-smith-vxlan-group-policy, RFC 8926
 * (GENEVE), draft-foschiano-erspan-03 (ERSPAN I, II, III), RFC 2003 and 4213 (IP in IP), RFC 3378 (EtherIP), RFC 3032
 * (MPLS), RFC 2516 (PPPoE), RFC 8300 (NSH), RFC 6325 (TRILL), IEEE 802.1ah (PBB), Wireshark's packet-tzsp.c.
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
    FC_TUNNEL_GENEVE,
    FC_TUNNEL_TZSP,
    FC_TUNNEL_IP,
    FC_TUNNEL_ETHERIP,
    FC_TUNNEL_MPLS,
    FC_TUNNEL_PPPOE,
    FC_TUNNEL_NSH,
    FC_TUNNEL_PBB,
    FC_TUNNEL_FABRICPATH,
    FC_TUNNEL_TRILL,
    FC_TUNNEL_STAMP,          /* not a tunnel: a time stamp in front of the type (tag.h)   */
    FC_TUNNEL_KINDS
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
    FC_REFUSED_GRE_MPLS,
    FC_REFUSED_GRE_VENDOR,
    FC_REFUSED_GRE_OTHER,
    FC_REFUSED_ERSPAN_VERSION,
    FC_REFUSED_ERSPAN_PAYLOAD,
    FC_REFUSED_VXLAN,
    FC_REFUSED_GENEVE,
    FC_REFUSED_MPLS,
    FC_REFUSED_L2TP,
    FC_REFUSED_ENCRYPTED,
    FC_REFUSED_NSH,
    FC_REFUSED_TWICE,
    FC_REFUSALS
};

static const char *const fc_refusal_names[FC_REFUSALS] = {
    "", "GRE version 1", "GRE with source routing", "GRE carrying MPLS",
    "GRE with a vendor's mirror header (0x8949)", "GRE carrying another protocol", "unknown ERSPAN version",
    "ERSPAN payload is not Ethernet", "VXLAN without a plain Ethernet payload", "GENEVE", "MPLS", "L2TP or EtherIP",
    "encrypted (IPsec or MACsec)", "NSH", "encapsulated twice",
};

static const char *const fc_tunnel_names[FC_TUNNEL_KINDS] = {
    "", "GRE", "ERSPAN I", "ERSPAN II", "ERSPAN III", "VXLAN", "GENEVE", "TZSP", "IP in IP", "EtherIP", "MPLS",
    "PPPoE", "NSH", "PBB", "FabricPath", "TRILL", "Arista time stamp",
};

enum { FC_INSIDE_FRAME = 0, FC_INSIDE_IPV4 = 0x0800, FC_INSIDE_IPV6 = 0x86dd }; /* an Ethernet type, 0: a frame */

typedef struct fc_tunnel {
    const uint8_t *inner; /* mirrored Ethernet frame, or IP packet                            */
    uint32_t offset;      /* of it behind the header that was given                           */
    uint32_t session;     /* ERSPAN session, GRE key, network of VXLAN, GENEVE, PBB; 0 without */
    uint16_t inside;      /* FC_INSIDE_*                                                      */
    uint8_t kind;
    uint8_t refusal;      /* with FC_TUNNEL_INSIDE: what it is if no RoCE is inside, 0: what is inside */
    uint8_t truncated;    /* ERSPAN's T bit: the mirror cut the frame                         */
    uint8_t bad;          /* ERSPAN III: the mirrored frame had a CRC or alignment error      */
} fc_tunnel;

static inline uint32_t fc_tunnel_be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

/* IP protocols and IPv6 next headers that may hold RoCE and are not unpacked; FC_REFUSED_NOT for all others. */
static inline int fc_refused_protocol(uint32_t protocol)
{
    switch (protocol) {
    case 50:
    case 51: return FC_REFUSED_ENCRYPTED;
    case 115: return FC_REFUSED_L2TP;
    default: return FC_REFUSED_NOT;
    }
}

/* IP protocols that are walked into. */
static inline int fc_tunnel_protocol(uint32_t protocol)
{
    return protocol == 47 || protocol == 4 || protocol == 41 || protocol == 97 || protocol == 137;
}

/* UDP ports likewise. */
static inline int fc_tunnel_port(uint32_t port)
{
    return port == 4789 || port == 8472 || port == 4790 || port == 6081 || port == 6635 || port == 37008;
}

static inline int fc_tunnel_refuse(fc_tunnel *out, int refusal)
{
    out->refusal = (uint8_t)refusal;
    return FC_TUNNEL_REFUSED;
}

static inline int fc_tunnel_inside(
    fc_tunnel *out, int kind, uint32_t inside, const uint8_t *at, size_t have, size_t offset)
{
    if (have < offset)
        return FC_TUNNEL_SHORT;
    out->kind = (uint8_t)kind;
    out->inside = (uint16_t)inside;
    out->inner = at + offset;
    out->offset = (uint32_t)offset;
    return FC_TUNNEL_INSIDE;
}

static inline int fc_tunnel_erspan(const uint8_t *at, size_t have, uint32_t version, uint32_t offset, fc_tunnel *out)
{
    uint32_t word, type = 0, size = version == 1 ? 8 : 12;

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
        type = word >> 10 & 0x1f; /* 0: Ethernet, 2: IP */
        if (type != 0 && type != 2)
            return fc_tunnel_refuse(out, FC_REFUSED_ERSPAN_PAYLOAD);
        if (word & 1) {
            size += 8; /* platform specific subheader */
            if (have < offset + size)
                return FC_TUNNEL_SHORT;
        }
    }
    if (type == 2 && have == offset + size)
        return FC_TUNNEL_SHORT;
    out->inside = type == 0 ? FC_INSIDE_FRAME : at[size] >> 4 == 6 ? FC_INSIDE_IPV6 : FC_INSIDE_IPV4;
    out->inner = at + size;
    out->offset = offset + size;
    return FC_TUNNEL_INSIDE;
}

/* A stack of labels, and IP below the last one; a pseudo-wire with a control word has a frame there. The labels do not
 * say which, so it counts only if it is RoCE. */
static inline int fc_tunnel_mpls(const uint8_t *at, size_t have, size_t offset, fc_tunnel *out)
{
    out->refusal = FC_REFUSED_MPLS;
    for (int labels = 0; labels < 16; labels++) {
        if (have < offset + 5)
            return FC_TUNNEL_SHORT;
        offset += 4;
        if (!(at[offset - 2] & 1))
            continue;
        switch (at[offset] >> 4) {
        case 4: return fc_tunnel_inside(out, FC_TUNNEL_MPLS, FC_INSIDE_IPV4, at, have, offset);
        case 6: return fc_tunnel_inside(out, FC_TUNNEL_MPLS, FC_INSIDE_IPV6, at, have, offset);
        case 0: return fc_tunnel_inside(out, FC_TUNNEL_MPLS, FC_INSIDE_FRAME, at, have, offset + 4);
        default: return FC_TUNNEL_REFUSED;
        }
    }
    return FC_TUNNEL_REFUSED;
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
    case 0x86dd: return fc_tunnel_inside(out, FC_TUNNEL_GRE, type, at, have, size);
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

static inline int fc_tunnel_geneve(const uint8_t *at, size_t have, fc_tunnel *out)
{
    uint32_t type;

    if (have < 16)
        return FC_TUNNEL_SHORT;
    type = fc_tunnel_be16(at + 10);
    if (at[8] >> 6 || at[9] & 0x80) /* another version, a control packet */
        return fc_tunnel_refuse(out, FC_REFUSED_GENEVE);
    if (type != 0x6558 && type != 0x0800 && type != 0x86dd)
        return fc_tunnel_refuse(out, FC_REFUSED_GENEVE);
    out->session = fc_tunnel_be16(at + 12) << 8 | at[14];
    return fc_tunnel_inside(
        out, FC_TUNNEL_GENEVE, type == 0x6558 ? FC_INSIDE_FRAME : type, at, have, 16 + (at[8] & 0x3fu) * 4);
}

/* usual: the port is VXLAN's own, so what is not plain is refused. gpe: a header that names what it carries. */
static inline int fc_tunnel_vxlan(const uint8_t *at, size_t have, int usual, int gpe, fc_tunnel *out)
{
    uint32_t inside = FC_INSIDE_FRAME;

    if (have < 16)
        return usual ? FC_TUNNEL_SHORT : FC_TUNNEL_ABSENT;
    if (gpe && at[8] == 0x0c) {
        if (at[11] == 0 || at[11] > 3)
            return fc_tunnel_refuse(out, FC_REFUSED_VXLAN);
        inside = at[11] == 1 ? FC_INSIDE_IPV4 : at[11] == 2 ? FC_INSIDE_IPV6 : FC_INSIDE_FRAME;
    } else if (at[8] != 0x08 && at[8] != 0x88) { /* the network is valid, and perhaps a group policy */
        if (!usual)
            return FC_TUNNEL_ABSENT;
        if (!(at[8] & 0x08))
            return fc_tunnel_refuse(out, FC_REFUSED_VXLAN);
        out->refusal = FC_REFUSED_VXLAN; /* a frame, if these bits are those that a receiver ignores (RFC 7348) */
    }
    out->session = fc_tunnel_be16(at + 12) << 8 | at[14];
    return fc_tunnel_inside(out, FC_TUNNEL_VXLAN, inside, at, have, 16);
}

static inline int fc_tunnel_tzsp(const uint8_t *at, size_t have, fc_tunnel *out)
{
    size_t offset = 12;

    if (have < 13 || at[8] != 1 || at[9] > 1 || fc_tunnel_be16(at + 10) != 1) /* not a packet of Ethernet */
        return FC_TUNNEL_ABSENT;
    for (int tags = 0; tags < 32 && offset + 2 <= have; tags++) {
        if (at[offset] == 1)
            return fc_tunnel_inside(out, FC_TUNNEL_TZSP, FC_INSIDE_FRAME, at, have, offset + 1);
        offset += at[offset] == 0 ? 1 : 2 + (size_t)at[offset + 1];
    }
    return FC_TUNNEL_SHORT;
}

static inline int fc_tunnel_udp(const uint8_t *at, size_t have, fc_tunnel *out)
{
    if (have < 4)
        return FC_TUNNEL_SHORT;
    switch (fc_tunnel_be16(at + 2)) {
    case 4789: return fc_tunnel_vxlan(at, have, 1, 0, out);
    case 8472: return fc_tunnel_vxlan(at, have, 0, 0, out); /* Linux' default */
    case 4790: return fc_tunnel_vxlan(at, have, 1, 1, out);
    case 6081: return fc_tunnel_geneve(at, have, out);
    case 6635: return fc_tunnel_mpls(at, have, 8, out);
    case 37008: return fc_tunnel_tzsp(at, have, out);
    default: return FC_TUNNEL_ABSENT;
    }
}

/* at: the header behind IP, of which `have` bytes may be read. Returns an fc_tunnel_status. */
static inline int fc_tunnel_enter(uint32_t protocol, const uint8_t *at, size_t have, fc_tunnel *out)
{
    int refusal = fc_refused_protocol(protocol);

    *out = (fc_tunnel){0};
    if (refusal)
        return fc_tunnel_refuse(out, refusal);
    switch (protocol) {
    case 17: return fc_tunnel_udp(at, have, out);
    case 47: return fc_tunnel_gre(at, have, out);
    case 4: return fc_tunnel_inside(out, FC_TUNNEL_IP, FC_INSIDE_IPV4, at, have, 0);
    case 41: return fc_tunnel_inside(out, FC_TUNNEL_IP, FC_INSIDE_IPV6, at, have, 0);
    case 97:
        if (have >= 2 && at[0] >> 4 != 3)
            return fc_tunnel_refuse(out, FC_REFUSED_L2TP);
        return fc_tunnel_inside(out, FC_TUNNEL_ETHERIP, FC_INSIDE_FRAME, at, have, 2);
    case 137: return fc_tunnel_mpls(at, have, 0, out);
    default: return FC_TUNNEL_ABSENT;
    }
}

/* Does fc_tunnel_type know this Ethernet type? */
static inline int fc_tunnel_has_type(uint32_t type)
{
    return type == 0x8847 || type == 0x8848 || type == 0x8864 || type == 0x88e5 || type == 0x88e7 || type == 0x894f
           || type == 0x8903 || type == 0x22f3;
}

/* The same by an Ethernet type; at: behind it. Tags (tag.h) were passed, so MACsec is one that encrypts. */
static inline int fc_tunnel_type(uint32_t type, const uint8_t *at, size_t have, fc_tunnel *out)
{
    uint32_t next, size;

    *out = (fc_tunnel){0};
    switch (type) {
    case 0x8847:
    case 0x8848: return fc_tunnel_mpls(at, have, 0, out);
    case 0x88e5: return fc_tunnel_refuse(out, FC_REFUSED_ENCRYPTED);
    case 0x8903: return fc_tunnel_inside(out, FC_TUNNEL_FABRICPATH, FC_INSIDE_FRAME, at, have, 2);
    case 0x88e7: /* I-tag: flags, service 24; the customer's addresses follow */
        out->session = have < 4 ? 0 : fc_tunnel_be16(at + 1) << 8 | at[3];
        return fc_tunnel_inside(out, FC_TUNNEL_PBB, FC_INSIDE_FRAME, at, have, 4);
    case 0x22f3: /* version 2, reserved 2, multicast 1, words of options 5, hops 6; two nicknames */
        next = have < 2 ? 0 : fc_tunnel_be16(at) >> 6 & 0x1f;
        return fc_tunnel_inside(out, FC_TUNNEL_TRILL, FC_INSIDE_FRAME, at, have, 6 + next * 4);
    case 0x8864: /* version and type, code, session, length; PPP's protocol, of one byte if that is odd (RFC 1661) */
        size = have > 6 && at[6] & 1 ? 7 : 8;
        next = have < 8 ? 0x21 : size == 7 ? at[6] : fc_tunnel_be16(at + 6);
        if (next != 0x21 && next != 0x57)
            return FC_TUNNEL_ABSENT;
        return fc_tunnel_inside(out, FC_TUNNEL_PPPOE, next == 0x21 ? FC_INSIDE_IPV4 : FC_INSIDE_IPV6, at, have, size);
    case 0x894f: /* flags and hops 10, words 6; kind, next protocol; path */
        if (have < 4)
            return FC_TUNNEL_SHORT;
        if (at[3] == 0 || at[3] > 3)
            return fc_tunnel_refuse(out, FC_REFUSED_NSH);
        next = at[3] == 1 ? FC_INSIDE_IPV4 : at[3] == 2 ? FC_INSIDE_IPV6 : FC_INSIDE_FRAME;
        return fc_tunnel_inside(out, FC_TUNNEL_NSH, next, at, have, (at[1] & 0x3fu) * 4);
    default: return FC_TUNNEL_ABSENT;
    }
}

#endif
