/* Dump strategy `dma`: K engines move packets into the dense ring, dealt by burst, published in order.
 *
 *   burst 0 -> engine 0     one copy per piece (a segment), then one submit: the doorbell
 *   burst 1 -> engine 1     entries are filled from the mbufs' headers while the copies fly
 *   burst 2 -> engine 0
 *
 *   engine.ops      ring of copies under way, oldest first; the engine completes them in this order
 *   batches         bursts not yet published, oldest first: published when the engine is past `until`
 *
 * A completed copy frees its mbuf (that of a packet's last piece), also when an older burst of another
 * engine still holds back publishing. The CPU moves a piece that is small (a hand-over to an engine costs
 * more than the copy) or finds the engine full, and what an engine reports as failed.
 *
 * Addresses: engines get virtual addresses, so EAL must run in that mode (it does: eal.py), and a physical
 * engine needs the memory mapped for it (dmadev.py).
 */
#include <stdlib.h>

#include <rte_dmadev.h>
#include <rte_eal.h>

#include "dump_common.h"

#define COLLECT_AT_ONCE 64

struct op {
    struct rte_mbuf *done; /* to free when this piece is there, NULL: a later piece of the packet does it */
    const uint8_t *from;
    uint8_t *to;
    uint32_t length;
};

struct engine {
    int16_t device;
    uint16_t channel;
    uint64_t mask;
    uint64_t issued, completed; /* pieces; free-running */
    struct op *ops;
};

struct batch {
    uint64_t until; /* engine.completed at which the burst is there */
    uint32_t entries;
    uint32_t engine;
};

struct dma {
    unsigned engine_count, next;
    uint64_t taken;       /* entries filled, not published */
    uint64_t first, last; /* batches, free-running */
    uint64_t mask;
    struct batch *batches;
    struct engine engines[FC_ENGINES_MAX];
};

static void dma_teardown(fc_dump *d)
{
    struct dma *s = d->state;

    if (s == NULL)
        return;
    for (unsigned i = 0; i < s->engine_count; i++)
        free(s->engines[i].ops);
    free(s->batches);
    free(s);
    d->state = NULL;
}

static int dma_setup(fc_dump *d)
{
    const fc_dump_config *c = &d->config;
    struct dma *s;

    if (!fc_slots_usable(c) || c->engine_count == 0 || c->engine_count > FC_ENGINES_MAX)
        return -EINVAL;
    if (rte_eal_iova_mode() != RTE_IOVA_VA)
        return -ENOTSUP;
    s = calloc(1, sizeof(*s));
    if (s == NULL)
        return -ENOMEM;
    d->state = s;
    s->mask = c->ring->mask; /* a batch has at least one entry */
    s->batches = calloc(s->mask + 1, sizeof(*s->batches));
    if (s->batches == NULL)
        goto no_memory;
    for (; s->engine_count < c->engine_count; s->engine_count++) {
        struct engine *e = &s->engines[s->engine_count];

        e->device = c->engines[s->engine_count].device;
        e->channel = c->engines[s->engine_count].channel;
        e->mask = rte_align32pow2(c->engines[s->engine_count].depth) - 1u;
        e->ops = calloc(e->mask + 1, sizeof(*e->ops));
        if (e->ops == NULL)
            goto no_memory;
    }
    return 0;
no_memory:
    dma_teardown(d);
    return -ENOMEM;
}

static uint64_t dma_room(fc_dump *d)
{
    return fc_ring_room(d->config.ring, ((struct dma *)d->state)->taken);
}

/* Frees what the oldest n pieces of an engine were the last of. */
static void retire(struct engine *e, unsigned n)
{
    struct rte_mbuf *done[COLLECT_AT_ONCE];
    unsigned count = 0;

    while (n--) {
        struct op *op = &e->ops[e->completed++ & e->mask];

        if (op->done != NULL)
            done[count++] = op->done;
    }
    rte_pktmbuf_free_bulk(done, count);
}

/* The engine stopped at a piece it could not move: find out which, and move them. */
static void repair(struct engine *e, fc_rx_counters *counters)
{
    enum rte_dma_status_code status[COLLECT_AT_ONCE];
    uint16_t last, n = rte_dma_completed_status(e->device, e->channel, COLLECT_AT_ONCE, &last, status);

    for (uint16_t i = 0; i < n; i++) {
        const struct op *op = &e->ops[(e->completed + i) & e->mask];

        if (status[i] == RTE_DMA_STATUS_SUCCESSFUL)
            continue;
        fc_stream_copy(op->to, op->from, op->length);
        fc_count(&counters->dma_errors, 1);
    }
    fc_copy_fence();
    retire(e, n);
}

static void collect(struct engine *e, fc_rx_counters *counters)
{
    uint16_t n, last;

    while (e->completed != e->issued) {
        bool failed = false;

        n = rte_dma_completed(e->device, e->channel, COLLECT_AT_ONCE, &last, &failed);
        retire(e, n);
        if (failed)
            repair(e, counters);
        else if (n < COLLECT_AT_ONCE)
            return;
    }
}

static uint64_t dma_reclaim(fc_dump *d)
{
    const fc_dump_config *c = &d->config;
    struct dma *s = d->state;
    uint64_t ready = 0;

    for (unsigned i = 0; i < s->engine_count; i++)
        collect(&s->engines[i], c->counters);
    for (; s->first != s->last; s->first++) {
        const struct batch *b = &s->batches[s->first & s->mask];

        if (s->engines[b->engine].completed < b->until)
            break;
        ready += b->entries;
    }
    if (ready) {
        s->taken -= ready;
        fc_count(&c->counters->published, ready);
        fc_ring_publish(c->ring, ready);
    }
    return s->taken;
}

/* Hands the pieces of one packet over. Returns 1 if none of them flies: the mbuf is free to go. */
static int move(const fc_dump_config *c, struct engine *e, uint8_t *to, struct rte_mbuf *packet, uint16_t *capacity)
{
    uint64_t first = e->issued, by_cpu = 0;

    for (struct rte_mbuf *m = packet; m != NULL; to += m->data_len, m = m->next) {
        const uint8_t *from = rte_pktmbuf_mtod(m, const uint8_t *);

        if (m->data_len < c->dma_minimum || *capacity == 0
            || rte_dma_copy(e->device, e->channel, rte_pktmbuf_iova(m), (rte_iova_t)(uintptr_t)to, m->data_len, 0)
                   < 0) {
            fc_stream_copy(to, from, m->data_len);
            by_cpu++;
            continue;
        }
        --*capacity;
        e->ops[e->issued++ & e->mask] = (struct op){NULL, from, to, m->data_len};
    }
    fc_count(&c->counters->cpu_pieces, by_cpu);
    fc_count(&c->counters->dma_pieces, e->issued - first);
    if (e->issued == first)
        return 1;
    e->ops[(e->issued - 1) & e->mask].done = packet;
    return 0;
}

static void dma_dump(fc_dump *d, struct rte_mbuf **mbufs, uint16_t n)
{
    const fc_dump_config *c = &d->config;
    struct dma *s = d->state;
    struct engine *e = &s->engines[s->next];
    struct rte_mbuf *idle[FC_RX_BURST_MAX];
    uint64_t taken = 0, truncated = 0, before = e->issued;
    uint16_t capacity = rte_dma_burst_capacity(e->device, e->channel);
    unsigned idle_count = 0;

    for (uint16_t i = 0; i < n; i++) {
        if (mbufs[i]->pkt_len > c->slot_size || move(c, e, fc_slot_at(c, s->taken + taken), mbufs[i], &capacity))
            idle[idle_count++] = mbufs[i];
        taken += mbufs[i]->pkt_len <= c->slot_size;
    }
    if (e->issued != before)
        rte_dma_submit(e->device, e->channel);
    taken = 0;
    for (uint16_t i = 0; i < n; i++) {
        if (mbufs[i]->pkt_len > c->slot_size)
            continue;
        truncated += fc_fill_ref(c, s->taken + taken, fc_slot_at(c, s->taken + taken), mbufs[i]);
        taken++;
    }
    rte_pktmbuf_free_bulk(idle, idle_count);
    fc_copy_fence(); /* publishing is this thread's, later */
    fc_count(&c->counters->truncated, truncated);
    fc_count(&c->counters->oversize, n - taken);
    if (taken == 0)
        return;
    s->batches[s->last++ & s->mask] = (struct batch){e->issued, (uint32_t)taken, s->next};
    s->taken += taken;
    s->next = (s->next + 1) % s->engine_count;
}

static void dma_abandon(fc_dump *d)
{
    struct dma *s = d->state;

    /* The mbufs stay with the engine: it may still read them. */
    fc_count(&d->config.counters->unfinished, s->taken);
    s->taken = 0;
    s->first = s->last;
}

const fc_dump_ops fc_dump_dma = {
    .name = "dma",
    .setup = dma_setup,
    .room = dma_room,
    .dump = dma_dump,
    .reclaim = dma_reclaim,
    .abandon = dma_abandon,
    .teardown = dma_teardown,
};
