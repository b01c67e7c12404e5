/* Dump strategies: how a received packet becomes a PacketRef that outlives its rx burst.
 *
 *   copy   the CPU moves the bytes into a dense ring of equal slots; slot i belongs to ring entry i
 *   dma    the same, moved by rte_dma engines; published in order once the engine reports completion
 *   hold   nothing moves: the mbuf stays in its pool and is freed when the consumer released its entry
 *
 *   copy:  mbufs --nt stores--> slots, fence, publish, free
 *   hold:  mbufs, publish ......... consumer releases ......... free
 *   dma:   mbufs -> engine k --> slots ....... completed: free | all before it complete: publish
 *                \-> engine full, or a small piece: nt stores
 *
 * Call order, all on the one thread that owns the queue, except setup and teardown, which the control
 * thread calls before that thread starts and after it ended:
 *
 *   setup -> { reclaim -> room -> [rx burst of at most room packets] -> dump }*
 *         -> reclaim until 0 -> [abandon] -> teardown
 *
 * Ownership: dump takes all n mbufs; the strategy frees them when it no longer needs their bytes. What
 * hold still keeps at teardown is freed there, so the consumer must be done by then.
 * Order: entries are published in the order in which dump was given the packets.
 * Ordering of memory: a strategy that writes with non-temporal stores fences before it publishes.
 */
#ifndef FLOWCHECK_DUMP_H
#define FLOWCHECK_DUMP_H

#include <stdint.h>

#include <rte_mbuf.h>

#include "packetref.h"
#include "rx_counters.h"

#define FC_ENGINES_MAX 16

/* A virtual channel of a started dmadev, used by one queue alone (an engine's channel has no lock). */
typedef struct fc_dump_engine {
    int16_t device;
    uint16_t channel;
    uint16_t depth; /* descriptors it was set up with */
} fc_dump_engine;

typedef struct fc_dump_config {
    fc_ring *ring;            /* the strategy is its producer                                       */
    fc_rx_counters *counters; /* published, oversize, truncated and the engines' are its to count   */
    uint8_t *slots;           /* dense ring, one slot per entry, 64-byte aligned                    */
    uint32_t slot_size;       /* multiple of 64. hold: 0, or room for frames of several buffers     */
    uint16_t stream;
    int timestamp_offset;     /* mbuf dynamic field of the receive time, -1: the source has none    */
    uint64_t timestamp_flag;  /* ol_flags bit that says the field is filled                         */
    uint64_t ns_per_tick;     /* unit of that field                                                 */
    uint64_t burst_ns;        /* time of the current burst, for packets without one; 0: none        */
    const fc_dump_engine *engines; /* dma                                                           */
    uint16_t engine_count;
    uint32_t dma_minimum;     /* smaller pieces are moved by the CPU                                */
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
    /* Gives up what reclaim cannot finish (an engine that hangs) and counts it as unfinished. */
    void (*abandon)(fc_dump *d);
    void (*teardown)(fc_dump *d);
} fc_dump_ops;

extern const fc_dump_ops fc_dump_copy;
extern const fc_dump_ops fc_dump_hold;
extern const fc_dump_ops fc_dump_dma;

/* The strategy of that name, or NULL. */
const fc_dump_ops *fc_dump_find(const char *name);

#endif
