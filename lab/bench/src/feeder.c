/* Packets of a window into a ring: feeder.h. */
#include "feeder.h"

#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum {
    LINE = 64,
    PSN_AT = 51,    /* three bytes of the BTH, behind Ethernet, IPv4 and UDP      */
    BURST = 64,     /* packets that become visible together                       */
    SPINS = 1024,   /* looks at a full ring before the thread sleeps              */
    NAP_NS = 20000,
};

static void store_lines(uint8_t *to, const uint8_t *from, uint64_t lines)
{
#if defined(__x86_64__)
    for (uint64_t i = 0; i < lines * LINE; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
#else
    memcpy(to, from, lines * LINE);
#endif
}

/* One packet: its first line with the new PSN, its last two with the ICRC that fits, what is between as it is. */
static void dump(const fcb_feeder *F, uint64_t number, uint8_t *slot)
{
    const fc_packetref *ref = &F->window[number % F->packets];
    const uint32_t old = (uint32_t)(number % F->packets / F->flows);
    const uint32_t psn = (uint32_t)(number / F->packets * (F->packets / F->flows) + old) & 0xffffff;
    const uint32_t change = old ^ psn, *row = F->patches[ref->stream][0];
    const uint64_t lines = (ref->length + LINE - 1) / LINE, middle = lines - 3;
    uint8_t edge[2 * LINE] __attribute__((aligned(LINE)));
    memcpy(edge, ref->data, LINE);
    for (int i = 0; i < 3; i++)
        edge[PSN_AT + i] = (uint8_t)(psn >> (16 - 8 * i));
    store_lines(slot, edge, 1);
    store_lines(slot + LINE, ref->data + LINE, middle);
    const uint64_t at = (lines - 2) * LINE;
    memcpy(edge, ref->data + at, 2 * LINE);
    uint32_t icrc;
    memcpy(&icrc, edge + ref->length - 4 - at, 4);
    icrc ^= row[change >> 16] ^ row[256 + (change >> 8 & 0xff)] ^ row[512 + (change & 0xff)];
    memcpy(edge + ref->length - 4 - at, &icrc, 4);
    store_lines(slot + at, edge, 2);
}

uint64_t fcb_feed(fcb_feeder *F, uint64_t first, uint64_t count)
{
    static const struct timespec nap = {0, NAP_NS};
    uint64_t done = 0;
    uint32_t idle = 0;
    while (done < count && !__atomic_load_n(&F->stop, __ATOMIC_ACQUIRE)) {
        uint64_t burst = fc_ring_free(&F->ring);
        burst = burst < BURST ? burst : BURST;
        burst = burst < count - done ? burst : count - done;
        if (!burst) {
            if (++idle >= SPINS)
                nanosleep(&nap, NULL);
#if defined(__x86_64__)
            else
                _mm_pause();
#endif
            continue;
        }
        idle = 0;
        for (uint64_t i = 0; i < burst; i++) {
            const uint64_t number = first + done + i;
            fc_packetref *ref = fc_ring_slot(&F->ring, i);
            uint8_t *slot = F->slots + ((F->ring.head + i) & F->ring.mask) * F->slot;
            dump(F, number, slot);
            *ref = (fc_packetref){.data = slot, .length = F->window[number % F->packets].length};
        }
#if defined(__x86_64__)
        _mm_sfence();
#endif
        fc_ring_publish(&F->ring, burst);
        done += burst;
    }
    return done;
}
