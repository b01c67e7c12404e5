/* The hand-over between dataplane and parser: a ring of packet references.
 *
 *   rx thread (producer)                         place thread (consumer)
 *   fc_ring_free -> entries[head & mask] = ref   fc_ring_peek -> entries[tail & mask]
 *   fc_ring_publish(n)        --- head --->      ... use the bytes ...
 *                             <-- tail ----      fc_ring_release(n)
 *
 * Model: single producer, single consumer, free-running 64-bit indices. The consumer's index *is* the
 * release: the producer may reuse the bytes behind every entry below `tail`, so a consumer that must
 * keep bytes copies them before it releases.
 * Thread rule: exactly one thread calls the producer functions, exactly one the consumer functions.
 * Ordering: publish is a store-release after the bytes were written (a producer that wrote them with
 * non-temporal stores must sfence first: the release store does not order those).
 * Plain C so that the parser can include it without DPDK.
 */
#ifndef FLOWCHECK_PACKETREF_H
#define FLOWCHECK_PACKETREF_H

#include <stdint.h>

#define FC_CACHE_LINE 64

/* Packet was cut by the capture: `length` bytes are here, the wire had more. */
#define FC_REF_TRUNCATED 0x0001

typedef struct fc_packetref {
    const uint8_t *data;   /* first byte of the Ethernet header                                  */
    uint64_t timestamp_ns; /* capture time, nanoseconds since the epoch (0: source has no clock)  */
    uint32_t length;       /* captured bytes at data                                             */
    uint16_t stream;       /* index of the capture this packet came from                         */
    uint16_t flags;        /* FC_REF_*                                                           */
} fc_packetref;

typedef struct fc_ring {
    /* producer's line */
    uint64_t head __attribute__((aligned(FC_CACHE_LINE)));
    uint64_t tail_seen; /* producer's stale copy of tail: re-read only when the ring looks full */
    uint32_t closed;    /* producer is done: nothing will follow what head shows                */
    /* consumer's line */
    uint64_t tail __attribute__((aligned(FC_CACHE_LINE)));
    /* read-only after init */
    uint64_t mask __attribute__((aligned(FC_CACHE_LINE)));
    fc_packetref *entries;
} fc_ring;

/* entries: array of `size` references; size is a power of two. */
static inline void fc_ring_init(fc_ring *r, fc_packetref *entries, uint64_t size)
{
    r->head = r->tail_seen = r->tail = 0;
    r->closed = 0;
    r->mask = size - 1;
    r->entries = entries;
}

/* -- producer ------------------------------------------------------------------------------- */

static inline uint64_t fc_ring_free(fc_ring *r)
{
    uint64_t size = r->mask + 1;
    if (r->head - r->tail_seen == size)
        r->tail_seen = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE);
    return size - (r->head - r->tail_seen);
}

static inline fc_packetref *fc_ring_slot(fc_ring *r, uint64_t ahead)
{
    return &r->entries[(r->head + ahead) & r->mask];
}

static inline void fc_ring_publish(fc_ring *r, uint64_t n)
{
    __atomic_store_n(&r->head, r->head + n, __ATOMIC_RELEASE);
}

static inline void fc_ring_close(fc_ring *r)
{
    __atomic_store_n(&r->closed, 1u, __ATOMIC_RELEASE);
}

/* -- consumer ------------------------------------------------------------------------------- */

/* Number of readable entries, at most `want`. */
static inline uint64_t fc_ring_peek(fc_ring *r, uint64_t want)
{
    uint64_t n = __atomic_load_n(&r->head, __ATOMIC_ACQUIRE) - r->tail;
    return n < want ? n : want;
}

static inline const fc_packetref *fc_ring_at(const fc_ring *r, uint64_t ahead)
{
    return &r->entries[(r->tail + ahead) & r->mask];
}

static inline void fc_ring_release(fc_ring *r, uint64_t n)
{
    __atomic_store_n(&r->tail, r->tail + n, __ATOMIC_RELEASE);
}

/* 1 when nothing will be added. What fc_ring_peek says after it is all there is. */
static inline int fc_ring_closed(const fc_ring *r)
{
    return (int)__atomic_load_n(&r->closed, __ATOMIC_ACQUIRE);
}

/* 1 when the producer has closed the ring and every entry was released. Read `closed` before head:
 * the other order could miss entries published in between. */
static inline int fc_ring_drained(fc_ring *r)
{
    int closed = fc_ring_closed(r);
    return closed && __atomic_load_n(&r->head, __ATOMIC_ACQUIRE) == r->tail;
}

#endif
