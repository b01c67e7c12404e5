/* Dump strategy `copy`: the CPU moves every packet into the dense ring.
 *
 * The ring is far larger than the caches and the consumer reads each byte once, so whole cache lines are
 * written with non-temporal stores, which saves reading the old line first. They are not ordered by the
 * release store that publishes: one sfence per burst comes before it (one per packet costs three times
 * the copy of a 1 KB packet).
 */
#include <errno.h>
#include <string.h>

#include <rte_mbuf.h>
#include <rte_mbuf_dyn.h>
#include <rte_prefetch.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "dump.h"
#include "frame.h"
#include "rx.h"

#define LINE FC_CACHE_LINE

static inline void stream_copy(uint8_t *to, const uint8_t *from, uint32_t length)
{
#ifdef __SSE2__
    uint32_t lead = (uint32_t)(-(uintptr_t)to & (LINE - 1)); /* a later segment may start anywhere */

    if (lead && lead < length) {
        memcpy(to, from, lead);
        to += lead, from += lead, length -= lead;
    }
    if (((uintptr_t)to & (LINE - 1)) == 0) {
        for (; length >= LINE; to += LINE, from += LINE, length -= LINE) {
            __m128i a = _mm_loadu_si128((const __m128i *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), c);
            _mm_stream_si128((__m128i *)(to + 48), d);
        }
    }
#endif
    memcpy(to, from, length);
}

static inline void copy_packet(uint8_t *slot, const struct rte_mbuf *packet)
{
    for (const struct rte_mbuf *m = packet; m != NULL; m = m->next) {
        stream_copy(slot, rte_pktmbuf_mtod(m, const uint8_t *), m->data_len);
        slot += m->data_len;
    }
}

static inline uint64_t timestamp_of(const fc_dump_config *c, const struct rte_mbuf *m)
{
    if (c->timestamp_offset < 0 || !(m->ol_flags & c->timestamp_flag))
        return 0;
    return *RTE_MBUF_DYNFIELD(m, c->timestamp_offset, const rte_mbuf_timestamp_t *) * c->ns_per_tick;
}

static int copy_setup(fc_dump *d)
{
    const fc_dump_config *c = &d->config;

    if (c->slots == NULL || c->slot_size == 0 || c->slot_size % LINE != 0
        || (uintptr_t)c->slots % LINE != 0)
        return -EINVAL;
    return 0;
}

static uint64_t copy_room(fc_dump *d)
{
    fc_ring *r = d->config.ring;

    /* fc_ring_free refreshes its copy of the consumer's index only when the ring looks full; a source
     * that waits needs a whole burst of room, so look again as soon as that runs short. */
    if (r->mask + 1 - (r->head - r->tail_seen) < FC_RX_BURST_MAX)
        r->tail_seen = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE);
    return fc_ring_free(r);
}

static void copy_dump(fc_dump *d, struct rte_mbuf **mbufs, uint16_t n)
{
    const fc_dump_config *c = &d->config;
    fc_ring *ring = c->ring;
    uint64_t taken = 0, truncated = 0;

    for (uint16_t i = 0; i < n; i++) {
        struct rte_mbuf *m = mbufs[i];
        uint8_t *slot;
        fc_packetref *ref;

        if (i + 1 < n)
            rte_prefetch0(rte_pktmbuf_mtod(mbufs[i + 1], const void *));
        if (m->pkt_len > c->slot_size)
            continue;
        slot = c->slots + ((ring->head + taken) & ring->mask) * c->slot_size;
        copy_packet(slot, m);
        ref = fc_ring_slot(ring, taken++);
        ref->data = slot;
        ref->timestamp_ns = timestamp_of(c, m);
        ref->length = m->pkt_len;
        ref->stream = c->stream;
        ref->flags = 0;
        if (fc_frame_cut(rte_pktmbuf_mtod(m, const uint8_t *), m->data_len, m->pkt_len)) {
            ref->flags = FC_REF_TRUNCATED;
            truncated++;
        }
    }
    rte_pktmbuf_free_bulk(mbufs, n);
#ifdef __SSE2__
    _mm_sfence();
#endif
    fc_count(&c->counters->truncated, truncated);
    fc_count(&c->counters->oversize, n - taken);
    fc_count(&c->counters->published, taken);
    fc_ring_publish(ring, taken);
}

static uint64_t copy_reclaim(fc_dump *d)
{
    (void)d;
    return 0; /* every packet is published by the call that took it */
}

static void copy_teardown(fc_dump *d)
{
    (void)d; /* the slots belong to whoever created the queue */
}

const fc_dump_ops fc_dump_copy = {
    .name = "copy",
    .setup = copy_setup,
    .room = copy_room,
    .dump = copy_dump,
    .reclaim = copy_reclaim,
    .teardown = copy_teardown,
};
