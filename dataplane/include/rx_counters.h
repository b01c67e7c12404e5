/* What one rx queue did, by cause, counted at the place of the event.
 *
 * Two sums hold whenever the rx thread is not in the middle of a burst, and always after it ended:
 *
 *     arrived at the port = received + nic_missed + errors + no_mbuf
 *     received            = published + ring_full + oversize
 *
 * Thread rule: only the rx thread writes (aligned 64-bit stores); anybody may read at any time.
 * `truncated` and `waits` are not losses: a truncated packet is published with FC_REF_TRUNCATED set, and
 * a wait is one round in which a source that can wait found the ring full.
 */
#ifndef FLOWCHECK_RX_COUNTERS_H
#define FLOWCHECK_RX_COUNTERS_H

#include <stdint.h>

typedef struct fc_rx_counters {
    uint64_t received;   /* packets the port handed over                                            */
    uint64_t bytes;      /* their captured bytes                                                    */
    uint64_t published;  /* packets handed to the ring                                              */
    uint64_t ring_full;  /* dropped: the consumer was too slow (live sources only)                  */
    uint64_t oversize;   /* dropped: larger than a slot of the dense ring                           */
    uint64_t truncated;  /* published, but cut by the capture                                       */
    uint64_t nic_missed; /* the port's imissed: no descriptor was free                              */
    uint64_t errors;     /* the port's ierrors                                                      */
    uint64_t no_mbuf;    /* the port's rx_nombuf: the pool was empty, or too small for the frame    */
    uint64_t waits;      /* rounds spent waiting for the consumer                                   */
} fc_rx_counters;

#endif
