/* Ethernet / VLAN / IPv4 / IPv6 / [tunnel /] UDP / BTH decode. See include/roce.h for the contract.
 *
 * Model: one forward walk. `avail` is what was captured from the IP header on, `total` what the IP
 * header says the wire had. Every read is covered by a check against `avail` above it; every length
 * taken from the packet is checked against `total`. The common frame (no tag, no option) takes four
 * branches that never turn. Tunnels are met where the walk finds no RoCE, so they cost the common frame
 * nothing; the frame inside is decoded by a second copy of the walk, which refuses another tunnel.
 *
 * When the capture ends before RoCE can be ruled out, the answer is FC_TRUNCATED, not FC_NOT_ROCE: a
 * snap length of 30 must not look like a quiet link.
 */
#include "roce.h"
#include "tag.h"
#include "tunnel.h"

#include <string.h>

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

enum {
    ETH_HEADER = 14, ETH_IPV4 = 0x0800, ETH_IPV6 = 0x86dd,
    IP_UDP = 17, IP6_HOP_BY_HOP = 0, IP6_ROUTING = 43, IP6_FRAGMENT = 44, IP6_DEST_OPTS = 60,
    UDP_HEADER = 8, ROCE_PORT = 4791,
    BTH_SIZE = 12, ICRC_SIZE = 4,
    HIDDEN_DEPTH = 192, /* bytes of unknown headers that RoCE is looked for behind */
    MAX_IP6_EXTENSIONS = 8 /* deeper nesting is an attack, not a network */
};

static inline uint32_t be16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return __builtin_bswap16(v);
}

static inline uint32_t be32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return __builtin_bswap32(v);
}

static inline uint64_t be64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return __builtin_bswap64(v);
}

/* Extended headers by opcode: bytes between BTH and payload, and which of them we read. Opcodes not
 * named here (reliable datagram, XRC, vendor, CNP) have length 0: their bytes count as payload. */
typedef struct {
    uint8_t bytes, headers;
} shape;

enum { RETH = 16, IMM = 4, AETH = 4, DETH = 8, ATOMIC = 28, ATOMIC_ACK = 8, IETH = 4 };

#define WRITES(transport)                                                                                   \
    [(transport) + 0x06] = {RETH, FC_HAS_RETH}, [(transport) + 0x09] = {IMM, FC_HAS_IMM},                   \
    [(transport) + 0x0a] = {RETH, FC_HAS_RETH}, [(transport) + 0x0b] = {RETH + IMM, FC_HAS_RETH | FC_HAS_IMM}
#define SENDS(transport)                                                                                    \
    [(transport) + 0x03] = {IMM, FC_HAS_IMM}, [(transport) + 0x05] = {IMM, FC_HAS_IMM}

static const shape shapes[256] = {
    SENDS(0x00), WRITES(0x00), /* RC */
    [FC_RC_READ_REQUEST] = {RETH, FC_HAS_RETH},
    [FC_RC_READ_RESP_FIRST] = {AETH, FC_HAS_AETH},
    [FC_RC_READ_RESP_LAST] = {AETH, FC_HAS_AETH},
    [FC_RC_READ_RESP_ONLY] = {AETH, FC_HAS_AETH},
    [FC_RC_ACK] = {AETH, FC_HAS_AETH},
    [FC_RC_ATOMIC_ACK] = {AETH + ATOMIC_ACK, FC_HAS_AETH | FC_HAS_ATOMIC},
    [FC_RC_CMP_SWAP] = {ATOMIC, FC_HAS_ATOMIC},
    [FC_RC_FETCH_ADD] = {ATOMIC, FC_HAS_ATOMIC},
    [0x16] = {IETH, 0}, [0x17] = {IETH, 0}, /* SEND LAST / ONLY with invalidate: skipped, not read */
    SENDS(0x20), WRITES(0x20), /* UC */
    [0x64] = {DETH, FC_HAS_DETH}, [0x65] = {DETH + IMM, FC_HAS_DETH | FC_HAS_IMM}, /* UD */
};

/* May a packet of this IP protocol hold RoCE, plain or wrapped? */
static inline int may_hold(uint32_t protocol)
{
    return protocol == IP_UDP || fc_tunnel_protocol(protocol) || fc_refused_protocol(protocol) != FC_REFUSED_NOT;
}

static inline int may_hold_port(uint32_t port)
{
    return port == ROCE_PORT || fc_tunnel_port(port);
}

/* The UDP header is not complete. Whose fault, and could it have been RoCE? */
static int short_udp(const uint8_t *ip, size_t avail, size_t l4, size_t total)
{
    if (avail >= l4 + 4 && total >= l4 + 4 && !may_hold_port(be16(ip + l4 + 2)))
        return FC_NOT_ROCE;
    return total < l4 + UDP_HEADER ? FC_MALFORMED : FC_TRUNCATED;
}

/* A UDP fragment: the first one shows its port, the others could be anything. */
static int udp_fragment(const uint8_t *ip, size_t avail, size_t l4, size_t total, uint32_t offset)
{
    if (offset == 0 && avail >= l4 + 4 && total >= l4 + 4 && !may_hold_port(be16(ip + l4 + 2)))
        return FC_NOT_ROCE;
    return FC_FRAGMENT;
}

static inline int is_ip6_extension(uint32_t next)
{
    return next == IP6_HOP_BY_HOP || next == IP6_ROUTING || next == IP6_FRAGMENT || next == IP6_DEST_OPTS;
}

/* Walks IPv6 extension headers. FC_ROCE here means: a packet of *protocol, which may hold RoCE, at *l4. */
static int walk_ip6(const uint8_t *ip, size_t avail, size_t total, size_t *l4, uint32_t *protocol)
{
    uint32_t next = ip[6];
    size_t at = 40;

    for (int depth = 0; is_ip6_extension(next); depth++) {
        if (depth == MAX_IP6_EXTENSIONS || total < at + 8)
            return FC_MALFORMED;
        if (avail < at + 8)
            return FC_TRUNCATED;
        if (next == IP6_FRAGMENT) {
            uint32_t inner = ip[at];
            uint32_t offset = be16(ip + at + 2) >> 3;
            if (inner == IP_UDP)
                return udp_fragment(ip, avail, at + 8, total, offset);
            return is_ip6_extension(inner) || may_hold(inner) ? FC_FRAGMENT : FC_NOT_ROCE;
        }
        next = ip[at];
        at += ((size_t)ip[at + 1] + 1) * 8;
    }
    *l4 = at;
    *protocol = next;
    return may_hold(next) ? FC_ROCE : FC_NOT_ROCE;
}

static int decode_wrapped(const uint8_t *frame, size_t len, fc_roce *out);
static int decode_wrapped_ip(const uint8_t *ip, size_t avail, uint32_t type, fc_roce *out);

static int refuse(fc_roce *out, int refusal)
{
    out->refusal = (uint8_t)refusal;
    return FC_ENCAPSULATED;
}

/* What is behind a header that fc_tunnel_* looked at. left: bytes behind that header's beginning. cut: the capture ends
 * before the packet around it does. wrapped: it is inside a tunnel already. */
static int unwrap(int found, const fc_tunnel *tunnel, size_t left, int cut, int wrapped, fc_roce *out)
{
    int status;

    switch (found) {
    case FC_TUNNEL_ABSENT: return FC_NOT_ROCE;
    case FC_TUNNEL_SHORT: return cut ? FC_TRUNCATED : FC_MALFORMED;
    case FC_TUNNEL_REFUSED: return refuse(out, tunnel->refusal);
    default: break;
    }
    if (wrapped)
        return refuse(out, FC_REFUSED_TWICE);
    left -= tunnel->offset;
    status = tunnel->inside == FC_INSIDE_FRAME ? decode_wrapped(tunnel->inner, left, out)
                                               : decode_wrapped_ip(tunnel->inner, left, tunnel->inside, out);
    if (status != FC_ROCE)
        return tunnel->refusal && status != FC_TRUNCATED ? refuse(out, tunnel->refusal) : status;
    if (cut || tunnel->truncated)
        return FC_TRUNCATED;
    if (tunnel->bad)
        return FC_MALFORMED;
    out->tunnel = tunnel->kind;
    out->session = tunnel->session;
    return FC_ROCE;
}

/* A frame that is not IP. at: behind its type. */
static __attribute__((noinline)) int other_type(uint32_t type, const uint8_t *at, size_t avail, int wrapped,
                                                fc_roce *out)
{
    fc_tunnel tunnel;
    int found;

    if (!fc_tunnel_has_type(type))
        return FC_NOT_ROCE;
    found = fc_tunnel_type(type, at, avail, &tunnel);
    return unwrap(found, &tunnel, avail, found == FC_TUNNEL_SHORT, wrapped, out);
}

/* The packet at ip + l4 is not RoCE itself. What does it wrap? */
static __attribute__((noinline)) int enter(const uint8_t *ip, size_t avail, size_t l4, size_t total, uint32_t protocol,
                                           int wrapped, fc_roce *out)
{
    fc_tunnel tunnel;
    size_t left = avail < total ? avail : total;
    int found;

    left = left > l4 ? left - l4 : 0;
    found = fc_tunnel_enter(protocol, ip + l4, left, &tunnel);
    return unwrap(found, &tunnel, left, avail < total, wrapped, out);
}

/* An IP packet in the frame at `frame` (or without one: frame is ip), of which `avail` bytes were captured. */
static inline __attribute__((always_inline)) int decode_ip(const uint8_t *frame, const uint8_t *ip, size_t avail,
                                                           uint32_t type, uint32_t vlan, int wrapped, fc_roce *out)
{
    size_t total, l4;

    if (LIKELY(type == ETH_IPV4)) {
        if (UNLIKELY(avail < 20))
            return avail >= 10 && !may_hold(ip[9]) ? FC_NOT_ROCE : FC_TRUNCATED;
        l4 = (size_t)(ip[0] & 0x0f) * 4;
        total = be16(ip + 2);
        if (ip[9] != IP_UDP) {
            if (!may_hold(ip[9]))
                return FC_NOT_ROCE;
            if (ip[0] >> 4 != 4 || l4 < 20)
                return FC_MALFORMED;
            return be16(ip + 6) & 0x3fff ? FC_FRAGMENT : enter(ip, avail, l4, total, ip[9], wrapped, out);
        }
        if (UNLIKELY(ip[0] >> 4 != 4 || l4 < 20))
            return FC_MALFORMED;
        if (UNLIKELY(be16(ip + 6) & 0x3fff)) /* more-fragments bit or an offset */
            return udp_fragment(ip, avail, l4, total, be16(ip + 6) & 0x1fff);
        out->src = ip + 12;
        out->dst = ip + 16;
        out->ip_version = 4;
        out->tclass = ip[1];
        out->ttl = ip[8];
        out->ip_id = (uint16_t)be16(ip + 4);
    } else if (type == ETH_IPV6) {
        if (UNLIKELY(avail < 40))
            return avail >= 7 && !may_hold(ip[6]) && !is_ip6_extension(ip[6]) ? FC_NOT_ROCE : FC_TRUNCATED;
        total = 40 + (size_t)be16(ip + 4);
        l4 = 40;
        if (UNLIKELY(ip[6] != IP_UDP)) {
            uint32_t protocol = IP_UDP;
            int status = walk_ip6(ip, avail, total, &l4, &protocol);
            if (status != FC_ROCE)
                return status;
            if (protocol != IP_UDP)
                return ip[0] >> 4 != 6 ? FC_MALFORMED : enter(ip, avail, l4, total, protocol, wrapped, out);
        }
        if (UNLIKELY(ip[0] >> 4 != 6))
            return FC_MALFORMED;
        out->src = ip + 8;
        out->dst = ip + 24;
        out->ip_version = 6;
        out->tclass = (uint8_t)(be16(ip) >> 4);
        out->ttl = ip[7];
        out->ip_id = 0;
    } else {
        return other_type(type, ip, avail, wrapped, out);
    }

    if (UNLIKELY(total < l4 + UDP_HEADER || avail < l4 + UDP_HEADER))
        return short_udp(ip, avail, l4, total);
    const uint8_t *udp = ip + l4;
    if (be16(udp + 2) != ROCE_PORT)
        return enter(ip, avail, l4, total, IP_UDP, wrapped, out);
    uint32_t udp_len = be16(udp + 4);
    if (UNLIKELY(udp_len != total - l4 || udp_len < UDP_HEADER + BTH_SIZE + ICRC_SIZE))
        return FC_MALFORMED;
    if (UNLIKELY(avail < total))
        return FC_TRUNCATED;

    /* From here on [udp, udp + udp_len) is known to be captured. */
    const uint8_t *bth = udp + UDP_HEADER, *at = bth + BTH_SIZE;
    uint32_t ib_len = udp_len - UDP_HEADER;
    uint32_t opcode = bth[0], pad = (bth[1] >> 4) & 3;
    shape s = shapes[opcode];
    if (UNLIKELY(ib_len < (uint32_t)BTH_SIZE + s.bytes + pad + ICRC_SIZE))
        return FC_MALFORMED;

    out->frame = frame;
    out->ip = ip;
    out->bth = bth;
    out->payload = at + s.bytes;
    out->payload_len = ib_len - BTH_SIZE - s.bytes - pad - ICRC_SIZE;
    out->ib_len = ib_len;
    out->dest_qp = be32(bth + 4) & 0xffffff;
    out->psn = be32(bth + 8) & 0xffffff;
    out->ack_req = bth[8] >> 7;
    out->opcode = (uint8_t)opcode;
    out->pad = (uint8_t)pad;
    out->headers = s.headers;
    out->udp_sport = (uint16_t)be16(udp);
    out->vlan = (uint16_t)vlan;
    out->va = 0;
    out->rkey = out->dma_len = out->imm = out->msn = out->src_qp = out->session = 0;
    out->syndrome = out->tunnel = 0;

    /* Order on the wire: DETH, RETH | AETH | AtomicETH, immediate. */
    if (s.headers & FC_HAS_DETH) {
        out->src_qp = be32(at + 4) & 0xffffff;
        at += DETH;
    }
    if (s.headers & FC_HAS_RETH) {
        out->va = be64(at);
        out->rkey = be32(at + 8);
        out->dma_len = be32(at + 12);
        at += RETH;
    } else if (s.headers & FC_HAS_AETH) {
        out->syndrome = at[0];
        out->msn = be32(at) & 0xffffff;
    } else if (s.headers & FC_HAS_ATOMIC) {
        out->va = be64(at);
        out->rkey = be32(at + 8);
    }
    if (s.headers & FC_HAS_IMM)
        out->imm = be32(at);
    return FC_ROCE;
}

static inline __attribute__((always_inline)) int decode(const uint8_t *frame, size_t len, int wrapped, fc_roce *out)
{
    size_t off = ETH_HEADER, size;
    uint32_t type, vlan = 0xffff;
    int stamped = 0, status;

    if (UNLIKELY(len < ETH_HEADER))
        return FC_TRUNCATED;
    type = be16(frame + 12);
    for (int tags = 0; UNLIKELY(type != ETH_IPV4 && type != ETH_IPV6); tags++) {
        size = fc_tag_size(type, frame + off, len - off);
        if (size == 0)
            break;
        if (tags == FC_TAGS_MAX)
            return FC_MALFORMED;
        if (len - off < size)
            return FC_TRUNCATED;
        vlan = fc_is_vlan(type) ? be16(frame + off) : vlan;
        stamped |= type == FC_TYPE_STAMP;
        off += size;
        type = be16(frame + off - 2);
    }
    status = decode_ip(frame, frame + off, len - off, type, vlan, wrapped, out);
    if (UNLIKELY(stamped && status == FC_ROCE && !out->tunnel))
        out->tunnel = FC_TUNNEL_STAMP;
    return status;
}

static int decode_wrapped(const uint8_t *frame, size_t len, fc_roce *out)
{
    return decode(frame, len, 1, out);
}

static int decode_wrapped_ip(const uint8_t *ip, size_t avail, uint32_t type, fc_roce *out)
{
    return decode_ip(ip, ip, avail, type, 0xffff, 1, out);
}

int fc_roce_decode(const uint8_t *frame, size_t len, fc_roce *out)
{
    return decode(frame, len, 0, out);
}

int fc_roce_hidden(const uint8_t *frame, size_t len)
{
    size_t most = len < ETH_HEADER + HIDDEN_DEPTH ? len : ETH_HEADER + HIDDEN_DEPTH;
    fc_roce p;

    for (size_t at = ETH_HEADER; at + 20 <= most; at++) {
        int version = frame[at] >> 4;
        if ((version == 4 && frame[at + 9] == IP_UDP) || (version == 6 && frame[at + 6] == IP_UDP))
            if (decode_wrapped_ip(frame + at, len - at, version == 4 ? ETH_IPV4 : ETH_IPV6, &p) == FC_ROCE
                && fc_icrc_ok(&p))
                return 1;
    }
    return 0;
}
