/* Frames that are not RoCEv2: what they are, and the TCP segment inside, which may be NCCL's bootstrap.
 *
 * Pure, no state. The frame may be anything: everything is checked against its length. */
#ifndef FLOWCHECK_OTHERTRAFFIC_H
#define FLOWCHECK_OTHERTRAFFIC_H

#include <stddef.h>
#include <stdint.h>

enum fc_other_kind {
    FC_OTHER_ARP, FC_OTHER_PTP, FC_OTHER_LLDP, FC_OTHER_PAUSE, FC_OTHER_ROCE1, FC_OTHER_LLC, FC_OTHER_TCP, FC_OTHER_ICMP,
    FC_OTHER_IGMP, FC_OTHER_ICMP6, FC_OTHER_UDP, FC_OTHER_IP4, FC_OTHER_IP6, FC_OTHER_ETHERTYPE, FC_OTHER_KINDS
};

typedef struct fc_tcp_part {
    const uint8_t *src, *dst; /* 4 or 16 bytes */
    const uint8_t *payload;
    uint32_t length;          /* of the payload */
    uint32_t ports;           /* source << 16 | destination */
    uint32_t seq;
    uint8_t ip_version, flags;
} fc_tcp_part;

typedef struct fc_other {
    uint32_t number;   /* FC_OTHER_UDP: destination port; other IP: protocol; else the Ethernet type */
    uint32_t handshake; /* 1: a TCP segment that begins with the magic of NCCL's queue pair handshake (nccl-wire.md 6.1) */
} fc_other;

/* Sort a frame; what a mirror had wrapped is sorted by what is inside. */
enum fc_other_kind fc_other_sort(const uint8_t *frame, size_t length, fc_other *out);

/* 1 and the segment, if the frame is a whole TCP segment with payload or SYN that no mirror has wrapped. 0 if not;
 * *encrypted is then 1 for MACsec and ESP, after which nothing can be read. */
int fc_tcp_segment(const uint8_t *frame, size_t length, fc_tcp_part *out, int *encrypted);

#endif
