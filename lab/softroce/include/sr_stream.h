/* One direction of a connection without a peer: messages from memory to an interface. What a mirror port shows of it is
 * what a NIC would send; nobody acknowledges, and nothing is sent again.
 *
 * One thread per stream. Source: nccl-wire.md 5.2, 5.5. */
#ifndef SR_STREAM_H
#define SR_STREAM_H

#include "sr_wire.h"

struct sr_stream {
    int socket; /* AF_PACKET, SOCK_RAW, bound to the interface */
    int big_endian_imm;
    uint32_t qpn, mtu;
    uint32_t psn; /* of the next packet, unwrapped */
    struct sr_path path;
};

/* One message to a slot of the receiver: WRITE FIRST, MIDDLE.., LAST with immediate, or an ONLY with immediate. Waits
 * where the interface has no room. Returns the number of packets, or -errno. */
int64_t sr_stream_message(struct sr_stream *s, uint64_t address, uint32_t rkey, const uint8_t *data, uint32_t length);

#endif
