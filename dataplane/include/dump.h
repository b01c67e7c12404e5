/* Dump strategies: how a received packet becomes a PacketRef that outlives its rx burst.
 *
 *   copy   the CPU moves the bytes into a dense ring of equal slots; slot i belongs to ring entry i
 *   dma    the same, moved by rte_dma engines; published in order once the engine reports completion
 *   hold   nothing moves: the mbuf stays in its pool and is freed when the consumer released its entry
 *
 * Call order, all on the one thread that owns the queue, except setup and teardown, which the control
 * thread calls before that thread starts and after it ended:
 *
 *   setup -> { reclaim -> room -> [rx burst of at most room packets] -> dump }* -> reclaim until 0 -> teardown
 *
 * Ownership: dump takes all n mbufs; the strategy frees them when it no longer needs their bytes.
 * Order: entries are published in the order in which dump was given the packets.
 * Ordering of memory: a strategy that writes with non-temporal stores fences before it publishes.
 */
#ifndef FLOWCHECK_DUMP_H
#define FLOWCHECK_DUMP_H

#include <stdint.h>

#include <rte_mbuf.h>

#include "packetref.h"
#include "rx_counters.h"

typedef struct fc_dump_config {
    fc_ring *ring;            /* the strategy is its producer                                       */
    fc_rx_counters *counters; /* published, oversize, truncated are the strategy's to count         */
    uint8_t *slots;           /* dense ring, one slot per entry, 64-byte aligned (NULL for hold)    */
    uint32_t slot_size;       /* multiple of 64                                                     */
    uint16_t stream;
    int timestamp_offset;     /* mbuf dynamic field of the receive time, -1: the source has none    */
    uint64_t timestamp_flag;  /* ol_flags bit that says the field is filled                         */
    uint64_t ns_per_tick;     /* unit of that field                                                 */
} fc_dump_config;

struct fc_dump_ops;

typedef struct fc_dump {
    const struct fc_dump_ops *ops;
    fc_dump_config config;
    void *state;              /* the strategy's own, NULL if it needs none                          */
} fc_dump;

typedef struct fc_dump_ops {
    const char *name;
    /* 0, or a negative errno. config is filled in. */
    int (*setup)(fc_dump *d);
    /* Packets that dump would take right now. */
    uint64_t (*room)(fc_dump *d);
    /* Takes n <= room() packets, all of them. */
    void (*dump)(fc_dump *d, struct rte_mbuf **mbufs, uint16_t n);
    /* Finishes what can be finished without waiting; returns how many packets taken are not published. */
    uint64_t (*reclaim)(fc_dump *d);
    void (*teardown)(fc_dump *d);
} fc_dump_ops;

extern const fc_dump_ops fc_dump_copy;

/* The strategy of that name, or NULL. */
const fc_dump_ops *fc_dump_find(const char *name);

#endif
