/* The least that places a job's gradients from received packets: the limit of `bench ingest`.
 *
 * Parse, flow by address and QP, PSN, every flag, the bytes to their place, coverage, a fence per burst. It knows what
 * a product has to find out: all packets are whole, come in order, belong to equal messages and are final. Written
 * from the reference; it shares no line with the parser. One thread.
 */
#ifndef FLOWCHECK_BENCH_MINIMAL_H
#define FLOWCHECK_BENCH_MINIMAL_H

#include "baseline.h"

typedef struct fcb_loop {
    fcb_flow *table; /* mask + 1 entries */
    uint32_t mask;
    int protocol;           /* 0 LL, 1 LL128, 2 SIMPLE                                                  */
    uint32_t mtu, piece;    /* payload bytes of a packet, and data bytes in it                          */
    uint32_t ahead;         /* packets whose payload is fetched ahead, inside a burst; 0: none          */
    uint64_t part;          /* data bytes of a flow in a lap: more is not placed                        */
    uint64_t per_lap, left; /* packets of a lap, and how many of this one are still to come             */
    uint64_t laps, lap;     /* a lap begins at PSN 0 and has an arena of its own                        */
    uint8_t **arenas;       /* on a cache line each                                                     */
    uint64_t **covers;      /* a bit per 8 bytes                                                        */
    uint64_t placed, repeated, wrong, strange; /* packets; wrong: of flag, strange: whatever else       */
} fcb_loop;

/* A burst, as fc_rx_taker. */
void fcb_loop_take(void *loop, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n);

#endif
