/* Dump strategy `hold`: packets stay where the port put them and only pointers travel.
 *
 *   held[i & mask]   the mbuf behind ring entry i, NULL if it was given back early
 *   freed            entries below it have been given back; freed <= tail <= head
 *
 * The consumer's index is the release, so an mbuf lives as long as its entry: the pool must hold a full
 * ring, what the port keeps in its descriptors, and a burst. A PacketRef is one pointer, so a frame of
 * several buffers is copied into slot i, where there are slots, and its mbufs go back at once.
 */
#include <stdlib.h>

#include "dump_common.h"

#define FREE_AT_ONCE 64

struct hold {
    struct rte_mbuf **held;
    uint64_t freed;
};

static int hold_setup(fc_dump *d)
{
    const fc_dump_config *c = &d->config;
    struct hold *h;

    if (c->slot_size != 0 && !fc_slots_usable(c))
        return -EINVAL;
    h = calloc(1, sizeof(*h));
    if (h == NULL)
        return -ENOMEM;
    h->held = calloc(c->ring->mask + 1, sizeof(*h->held));
    if (h->held == NULL) {
        free(h);
        return -ENOMEM;
    }
    h->freed = c->ring->head;
    d->state = h;
    return 0;
}

static void give_back(const fc_ring *ring, struct hold *h, uint64_t until)
{
    struct rte_mbuf *batch[FREE_AT_ONCE];
    unsigned n = 0;

    for (; h->freed != until; h->freed++) {
        struct rte_mbuf *m = h->held[h->freed & ring->mask];

        if (m == NULL)
            continue;
        batch[n++] = m;
        if (n == FREE_AT_ONCE) {
            rte_pktmbuf_free_bulk(batch, n);
            n = 0;
        }
    }
    rte_pktmbuf_free_bulk(batch, n);
}

static uint64_t hold_reclaim(fc_dump *d)
{
    fc_ring *ring = d->config.ring;

    ring->tail_seen = __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE);
    give_back(ring, d->state, ring->tail_seen);
    return 0; /* every packet is published by the call that took it */
}

/* Not fc_ring_room: an entry is free only when its mbuf went back, and that is reclaim's. */
static uint64_t hold_room(fc_dump *d)
{
    const struct hold *h = d->state;
    const fc_ring *ring = d->config.ring;

    return ring->mask + 1 - (ring->head - h->freed);
}

static void hold_dump(fc_dump *d, struct rte_mbuf **mbufs, uint16_t n)
{
    const fc_dump_config *c = &d->config;
    struct hold *h = d->state;
    fc_ring *ring = c->ring;
    uint64_t taken = 0, truncated = 0;

    for (uint16_t i = 0; i < n; i++) {
        struct rte_mbuf *m = mbufs[i];
        uint8_t *slot;

        if (m->nb_segs == 1) {
            h->held[(ring->head + taken) & ring->mask] = m;
            truncated += fc_fill_ref(c, taken++, rte_pktmbuf_mtod(m, const uint8_t *), m);
            continue;
        }
        if (m->pkt_len <= c->slot_size) {
            h->held[(ring->head + taken) & ring->mask] = NULL;
            slot = fc_slot_at(c, taken);
            fc_copy_packet(slot, m);
            truncated += fc_fill_ref(c, taken++, slot, m);
        }
        rte_pktmbuf_free(m);
    }
    fc_copy_fence();
    fc_count(&c->counters->truncated, truncated);
    fc_count(&c->counters->oversize, n - taken);
    fc_count(&c->counters->published, taken);
    fc_ring_publish(ring, taken);
}

static void hold_abandon(fc_dump *d)
{
    (void)d;
}

static void hold_teardown(fc_dump *d)
{
    struct hold *h = d->state;

    if (h == NULL)
        return;
    give_back(d->config.ring, h, d->config.ring->head);
    free(h->held);
    free(h);
    d->state = NULL;
}

const fc_dump_ops fc_dump_hold = {
    .name = "hold",
    .setup = hold_setup,
    .room = hold_room,
    .dump = hold_dump,
    .reclaim = hold_reclaim,
    .abandon = hold_abandon,
    .teardown = hold_teardown,
};
