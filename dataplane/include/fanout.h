/* One ring of packet references, several readers: each has a ring of its own over the same entries.
 *
 * Whoever reads refreshes first: that shows all open readers what is new, and gives back to the producer what all of them
 * have read. The slowest open reader decides what may be reused: if it stops, the ring fills for all, and drops are counted
 * where they happen.
 * Thread rule: any thread may open, close and refresh; a reader's ring belongs to one consumer. The producer and its ring
 * must outlive the fanout.
 */
#ifndef FLOWCHECK_FANOUT_H
#define FLOWCHECK_FANOUT_H

#include "lock.h"
#include "packetref.h"

typedef struct fc_reader {
    fc_ring ring;
    uint32_t open;
} fc_reader;

typedef struct fc_fanout {
    fc_ring *ring;
    fc_reader *readers;
    uint32_t count;
    fc_lock lock;
} fc_fanout;

/* A reader begins with what comes from now on. 0: it is open already. */
static inline int fc_fanout_open(fc_fanout *f, uint32_t reader)
{
    fc_reader *r = &f->readers[reader];
    fc_take(&f->lock);
    int was = (int)r->open;
    if (!was) {
        fc_ring_init(&r->ring, f->ring->entries, f->ring->mask + 1);
        r->ring.head = r->ring.tail = __atomic_load_n(&f->ring->head, __ATOMIC_ACQUIRE);
        r->open = 1;
    }
    fc_give(&f->lock);
    return !was;
}

/* Nobody waits for this reader any more. */
static inline void fc_fanout_close(fc_fanout *f, uint32_t reader)
{
    fc_take(&f->lock);
    f->readers[reader].open = 0;
    fc_give(&f->lock);
}

/* Returns how many entries were given back to the producer. */
static inline uint64_t fc_fanout_refresh(fc_fanout *f)
{
    fc_take(&f->lock);
    uint64_t head = __atomic_load_n(&f->ring->head, __ATOMIC_ACQUIRE), done = head - f->ring->tail;
    for (uint32_t i = 0; i < f->count; i++) {
        fc_ring *r = &f->readers[i].ring;
        if (!f->readers[i].open)
            continue;
        uint64_t read = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE) - f->ring->tail;
        done = read < done ? read : done;
        fc_ring_publish(r, head - r->head);
    }
    if (done)
        fc_ring_release(f->ring, done);
    fc_give(&f->lock);
    return done;
}

#endif
