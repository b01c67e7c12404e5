#include "reader.h"

#include <string.h>

uint64_t fc_reader_take(fc_ring *ring, fc_packetref *refs, uint64_t want, uint8_t *bytes, uint64_t capacity)
{
    uint64_t ready = fc_ring_peek(ring, want), n, used = 0;

    for (n = 0; n < ready; n++) {
        const fc_packetref *ref = fc_ring_at(ring, n);

        if (ref->length > capacity - used)
            break;
        memcpy(bytes + used, ref->data, ref->length);
        refs[n] = *ref;
        refs[n].data = bytes + used;
        used += ref->length;
    }
    fc_ring_release(ring, n);
    return n;
}

uint64_t fc_reader_discard(fc_ring *ring, uint64_t want)
{
    uint64_t n = fc_ring_peek(ring, want);

    fc_ring_release(ring, n);
    return n;
}
