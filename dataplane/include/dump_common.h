/* What the dump strategies share: copying past the cache, filling an entry, room in the ring. */
#ifndef FLOWCHECK_DUMP_COMMON_H
#define FLOWCHECK_DUMP_COMMON_H

#include <errno.h>
#include <string.h>

#include <rte_mbuf.h>
#include <rte_mbuf_dyn.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "dump.h"
#include "frame.h"
#include "rx.h"

/* The ring is far larger than the caches and the consumer reads each byte once, so whole cache lines are
 * written with non-temporal stores, which saves reading the old line first. They are not ordered by the
 * release store that publishes: fc_copy_fence comes before it, once per burst (one per packet costs three
 * times the copy of a 1 KB packet). */
static inline void fc_stream_copy(uint8_t *to, const uint8_t *from, uint32_t length)
{
#ifdef __SSE2__
    uint32_t lead = (uint32_t)(-(uintptr_t)to & (FC_CACHE_LINE - 1)); /* a later segment may start anywhere */

    if (lead && lead < length) {
        memcpy(to, from, lead);
        to += lead, from += lead, length -= lead;
    }
    if (((uintptr_t)to & (FC_CACHE_LINE - 1)) == 0) {
        for (; length >= FC_CACHE_LINE; to += FC_CACHE_LINE, from += FC_CACHE_LINE, length -= FC_CACHE_LINE) {
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

static inline void fc_copy_fence(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static inline void fc_copy_packet(uint8_t *slot, const struct rte_mbuf *packet)
{
    for (const struct rte_mbuf *m = packet; m != NULL; m = m->next) {
        fc_stream_copy(slot, rte_pktmbuf_mtod(m, const uint8_t *), m->data_len);
        slot += m->data_len;
    }
}

/* Slots that hold whole cache lines, one per entry. */
static inline int fc_slots_usable(const fc_dump_config *c)
{
    return c->slots != NULL && c->slot_size != 0 && c->slot_size % FC_CACHE_LINE == 0
           && (uintptr_t)c->slots % FC_CACHE_LINE == 0;
}

static inline uint8_t *fc_slot_at(const fc_dump_config *c, uint64_t ahead)
{
    return c->slots + ((c->ring->head + ahead) & c->ring->mask) * c->slot_size;
}

static inline uint64_t fc_mbuf_time(const fc_dump_config *c, const struct rte_mbuf *m)
{
    if (c->timestamp_offset < 0 || !(m->ol_flags & c->timestamp_flag))
        return c->burst_ns;
    return *RTE_MBUF_DYNFIELD(m, c->timestamp_offset, const rte_mbuf_timestamp_t *) * c->ns_per_tick;
}

/* Fills the entry `ahead` places before the ring's head. Returns 1 if the packet is cut. Reads headers from
 * the mbuf, not from the copy, which may still be under way. */
static inline uint64_t fc_fill_ref(const fc_dump_config *c, uint64_t ahead, const uint8_t *data,
                                   const struct rte_mbuf *m)
{
    fc_packetref *ref = fc_ring_slot(c->ring, ahead);
    uint64_t cut = (uint64_t)fc_frame_cut(rte_pktmbuf_mtod(m, const uint8_t *), m->data_len, m->pkt_len);

    ref->data = data;
    ref->timestamp_ns = fc_mbuf_time(c, m);
    ref->length = m->pkt_len;
    ref->stream = c->stream;
    ref->flags = cut ? FC_REF_TRUNCATED : 0;
    return cut;
}

/* Free entries. fc_ring_free refreshes its copy of the consumer's index only when the ring looks full; a
 * source that waits needs a whole burst of room, so look again as soon as that runs short. */
static inline uint64_t fc_ring_room(fc_ring *r, uint64_t taken)
{
    if (r->mask + 1 - (r->head + taken - r->tail_seen) < FC_RX_BURST_MAX)
        r->tail_seen = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE);
    return r->mask + 1 - (r->head + taken - r->tail_seen);
}

#endif
