/* Dump strategy `copy`: the CPU moves every packet into the dense ring (dump_common.h says how). */
#include <rte_prefetch.h>

#include "dump_common.h"

static int copy_setup(fc_dump *d)
{
    return fc_slots_usable(&d->config) ? 0 : -EINVAL;
}

static uint64_t copy_room(fc_dump *d)
{
    return fc_ring_room(d->config.ring, 0);
}

static void copy_dump(fc_dump *d, struct rte_mbuf **mbufs, uint16_t n)
{
    const fc_dump_config *c = &d->config;
    uint64_t taken = 0, truncated = 0;

    for (uint16_t i = 0; i < n; i++) {
        struct rte_mbuf *m = mbufs[i];
        uint8_t *slot;

        if (i + 1 < n)
            rte_prefetch0(rte_pktmbuf_mtod(mbufs[i + 1], const void *));
        if (m->pkt_len > c->slot_size)
            continue;
        slot = fc_slot_at(c, taken);
        fc_copy_packet(slot, m);
        truncated += fc_fill_ref(c, taken++, slot, m);
    }
    rte_pktmbuf_free_bulk(mbufs, n);
    fc_copy_fence();
    fc_count(&c->counters->truncated, truncated);
    fc_count(&c->counters->oversize, n - taken);
    fc_count(&c->counters->published, taken);
    fc_ring_publish(c->ring, taken);
}

static uint64_t copy_reclaim(fc_dump *d)
{
    (void)d;
    return 0; /* every packet is published by the call that took it */
}

static void copy_nothing(fc_dump *d)
{
    (void)d; /* the slots belong to whoever created the queue */
}

const fc_dump_ops fc_dump_copy = {
    .name = "copy",
    .setup = copy_setup,
    .room = copy_room,
    .dump = copy_dump,
    .reclaim = copy_reclaim,
    .abandon = copy_nothing,
    .teardown = copy_nothing,
};
