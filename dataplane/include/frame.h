/* Does an Ethernet frame end before its IP header says it does?
 *
 * A capture with a snap length (tcpdump -s, a truncating mirror port, an AF_PACKET frame that is too
 * small) hands over a frame that looks whole. The IP length is the only witness in the bytes. Frames
 * that are not IP carry no such witness and count as whole.
 */
#ifndef FLOWCHECK_FRAME_H
#define FLOWCHECK_FRAME_H

#include <stdint.h>

static inline uint32_t fc_be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

/* head: the first `have` bytes of a frame of which `captured` bytes were captured. Reads at most 28. */
static inline int fc_frame_cut(const uint8_t *head, uint32_t have, uint32_t captured)
{
    uint32_t at = 12, type;

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
    if (type == 0x0800)
        return captured < at + fc_be16(head + at + 2);
    return captured < at + 40 + fc_be16(head + at + 4);
}

#endif
