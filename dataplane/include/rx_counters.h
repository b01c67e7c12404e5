/* What one rx queue did, by cause, counted at the place of the event.
 *
 * Two sums hold whenever the rx thread is not in the middle of a burst, and always after it ended:
 *
 *     arrived at the port = received + nic_missed + errors + no_mbuf + kernel_ring_full
 *     received            = published + ring_full + oversize + not_roce + bad_checksum + unfinished
 *
 * Thread rule: only the rx thread writes (aligned 64-bit stores); anybody may read at any time, also from
 * another process (counters.py maps them from a file).
 * `truncated`, `waits` and what follows it are not losses: a truncated packet is published with
 * FC_REF_TRUNCATED set, a wait is one round in which a source that can wait found the ring full, and the
 * engine's three say how pieces were moved. Wrong ICRC is found by the parser and counted there.
 */
#ifndef FLOWCHECK_RX_COUNTERS_H
#define FLOWCHECK_RX_COUNTERS_H

#include <stdint.h>

typedef struct fc_rx_counters {
    uint64_t received;         /* packets the port handed over                                          */
    uint64_t bytes;            /* their captured bytes                                                  */
    uint64_t published;        /* packets handed to the ring                                            */
    uint64_t ring_full;        /* dropped: the consumer was too slow (live sources only)                */
    uint64_t oversize;         /* dropped: larger than a slot (hold: scattered, and no slots)           */
    uint64_t not_roce;         /* dropped: cannot hold RoCE (only where roce_only is set)               */
    uint64_t bad_checksum;     /* dropped: the port found the IP header's checksum wrong                */
    uint64_t unfinished;       /* dropped: a DMA engine never completed them                            */
    uint64_t truncated;        /* published, but cut by the capture                                     */
    uint64_t nic_missed;       /* the port's imissed: no descriptor was free                            */
    uint64_t errors;           /* the port's ierrors                                                    */
    uint64_t no_mbuf;          /* the port's rx_nombuf: the pool was empty, or too small for the frame  */
    uint64_t kernel_ring_full; /* net_af_packet: the kernel's ring had no free frame                    */
    uint64_t kernel_seen;      /* net_af_packet: what the kernel counted for the socket, drops included */
    uint64_t waits;            /* rounds spent waiting for the consumer                                 */
    uint64_t dma_pieces;       /* pieces moved by an engine                                             */
    uint64_t cpu_pieces;       /* pieces a strategy with engines moved by CPU: small, or no engine free */
    uint64_t dma_errors;       /* pieces an engine failed on; the CPU moved them                        */
} fc_rx_counters;

#endif
