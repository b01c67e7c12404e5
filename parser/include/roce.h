/* RoCEv2 headers: one bounds-checked decode of a captured Ethernet frame, in place, no allocation.
 *
 * A frame that a mirror wrapped (dataplane/include/tunnel.h) is decoded as the frame, or the IP packet, inside; every
 * pointer then points into that one. Tags of switches (tag.h) are passed. What is not unpacked is FC_ENCAPSULATED.
 *
 * The fields of fc_roce are valid only when fc_roce_decode returned FC_ROCE. Pointers point into the
 * frame and live as long as it does. Sources: InfiniBand Architecture Specification 1.4 chapter 9
 * (BTH, RETH, AETH, immediate, DETH, AtomicETH) and annex A17 (RoCEv2).
 */
#ifndef FLOWCHECK_ROCE_H
#define FLOWCHECK_ROCE_H

#include <stddef.h>
#include <stdint.h>

enum fc_decode_status {
    FC_ROCE = 0,       /* a RoCEv2 packet, every header it announces is complete                    */
    FC_NOT_ROCE = 1,   /* other traffic: not IP, not UDP, not port 4791                             */
    FC_TRUNCATED = 2,  /* RoCEv2, but the captured bytes end before the IP length says              */
    FC_MALFORMED = 3,  /* lengths contradict each other, or a header does not fit into the packet   */
    FC_FRAGMENT = 4,   /* an IP fragment that may carry RoCEv2: never reassembled                   */
    FC_ENCAPSULATED = 5, /* may carry RoCEv2 inside something that is not unpacked: see refusal     */
    FC_DECODE_STATUS_COUNT = 6
};

/* BTH opcodes, reliable connection (transport bits 000). */
enum fc_opcode {
    FC_RC_SEND_FIRST = 0x00, FC_RC_SEND_MIDDLE = 0x01, FC_RC_SEND_LAST = 0x02, FC_RC_SEND_LAST_IMM = 0x03,
    FC_RC_SEND_ONLY = 0x04, FC_RC_SEND_ONLY_IMM = 0x05,
    FC_RC_WRITE_FIRST = 0x06, FC_RC_WRITE_MIDDLE = 0x07, FC_RC_WRITE_LAST = 0x08, FC_RC_WRITE_LAST_IMM = 0x09,
    FC_RC_WRITE_ONLY = 0x0a, FC_RC_WRITE_ONLY_IMM = 0x0b,
    FC_RC_READ_REQUEST = 0x0c, FC_RC_READ_RESP_FIRST = 0x0d, FC_RC_READ_RESP_MIDDLE = 0x0e,
    FC_RC_READ_RESP_LAST = 0x0f, FC_RC_READ_RESP_ONLY = 0x10, FC_RC_ACK = 0x11, FC_RC_ATOMIC_ACK = 0x12,
    FC_RC_CMP_SWAP = 0x13, FC_RC_FETCH_ADD = 0x14, FC_CNP = 0x81
};

/* Which optional headers are present (fc_roce.headers). */
#define FC_HAS_RETH 0x01
#define FC_HAS_IMM 0x02
#define FC_HAS_AETH 0x04
#define FC_HAS_DETH 0x08
#define FC_HAS_ATOMIC 0x10

typedef struct fc_roce {
    const uint8_t *frame;    /* Ethernet header (of the mirrored frame if it was wrapped; a tunnel that has
                                none: IP header)                                                   */
    const uint8_t *ip;       /* IPv4 or IPv6 header                                                 */
    const uint8_t *src, *dst; /* address bytes in the frame: 4 (IPv4) or 16 (IPv6)                  */
    const uint8_t *bth;
    const uint8_t *payload;  /* after all extended headers                                          */
    uint32_t payload_len;    /* without pad and ICRC                                                */
    uint32_t ib_len;         /* BTH first byte .. ICRC last byte                                    */
    uint32_t dest_qp, psn;   /* 24 bits each                                                        */
    uint32_t rkey, dma_len;  /* RETH                                                                */
    uint64_t va;             /* RETH                                                                */
    uint32_t imm;            /* the four bytes as on the wire, read as big-endian                   */
    uint32_t msn;            /* AETH, 24 bits                                                       */
    uint32_t src_qp;         /* DETH                                                                */
    uint32_t session;        /* which mirror session wrapped it (fc_tunnel.session)                 */
    uint16_t udp_sport, vlan; /* vlan: TCI of the innermost tag, 0xffff without one                 */
    uint16_t ip_id;          /* IPv4 identification, 0 for IPv6                                     */
    uint8_t ip_version;      /* 4 or 6                                                              */
    uint8_t tclass, ttl;     /* DSCP/ECN byte or traffic class; TTL or hop limit                    */
    uint8_t opcode, pad, ack_req, headers;
    uint8_t syndrome;
    uint8_t tunnel;          /* fc_tunnel_kind, 0: not wrapped                                      */
    uint8_t refusal;         /* fc_refusal; valid with FC_ENCAPSULATED only                         */
} fc_roce;

/* Decode `len` captured bytes at `frame`. Never reads past frame + len. Ethernet padding behind the
 * IP packet is ignored. Returns an fc_decode_status. */
int fc_roce_decode(const uint8_t *frame, size_t len, fc_roce *out);

/* 1 if a frame that is FC_NOT_ROCE has a whole RoCEv2 packet with a right ICRC in its first bytes, behind headers that
 * nobody here knows. It is counted by what is in front of it, and never placed. */
int fc_roce_hidden(const uint8_t *frame, size_t len);

/* 1 if the packet's invariant CRC is right (IBTA A17.3.3; reference/icrc.md), 0 if not. */
int fc_icrc_ok(const fc_roce *p);

/* The invariant CRC the packet should carry, as the integer whose little-endian bytes end the frame. */
uint32_t fc_icrc(const fc_roce *p);

/* The ways to compute it that this processor has, best first, ended by a null pointer, and the choice of one: 0 if
 * there is none of that name. Of this library; before threads use it. */
extern const char *fc_icrc_all[4];
int fc_icrc_choose(const char *name);

#endif
