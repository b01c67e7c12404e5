/* A receiving thread without a port: the packets of a window into a ring, as `copy` dumps them, lap after lap.
 *
 *     fill in the window and the ring;  fcb_feed(F, first, count), on one thread;  another one may set `stop`
 *
 * Packet i of a lap is of flow i modulo `flows`. Its PSN is lap * (packets / flows) + i / flows, and its ICRC is made to
 * fit: a CRC is linear, so what other bits of a PSN change in it depends on them and on the packet's length alone. That
 * is in `patches`, by byte of the PSN and its value. `stream` of a window's reference is the row of its length.
 */
#ifndef FLOWCHECK_BENCH_FEEDER_H
#define FLOWCHECK_BENCH_FEEDER_H

#include "packetref.h"

typedef uint32_t fcb_patch[3][256];

typedef struct fcb_feeder {
    const fc_packetref *window; /* of lap 0; each packet on a cache line                            */
    uint64_t packets, flows;
    const fcb_patch *patches;
    uint8_t *slots; /* on a cache line; as many as the ring has entries                  */
    uint64_t slot;  /* bytes from one to the next: whole cache lines, at least the longest packet's */
    uint32_t stop;
    fc_ring ring;
} fcb_feeder;

/* Put packets number `first` and following, counted from the first one of lap 0, into the ring: `count` of them, or
 * fewer if `stop` is set. Waits while the ring is full. Returns how many. */
uint64_t fcb_feed(fcb_feeder *F, uint64_t first, uint64_t count);

#endif
