# Declarations of dataplane/include/packetref.h, for all that reads or fills a ring of packets.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "packetref.h" nogil:
    int FC_REF_TRUNCATED
    ctypedef struct fc_packetref:
        const uint8_t *data
        uint64_t timestamp_ns
        uint32_t length
        uint16_t stream, flags
    ctypedef struct fc_ring:
        uint64_t head, tail, mask
        fc_packetref *entries
    void fc_ring_init(fc_ring *r, fc_packetref *entries, uint64_t size)
    # the producer
    void fc_ring_publish(fc_ring *r, uint64_t n)
    void fc_ring_close(fc_ring *r)
    # the consumer
    uint64_t fc_ring_peek(fc_ring *r, uint64_t want)
    const fc_packetref *fc_ring_at(const fc_ring *r, uint64_t ahead)
    void fc_ring_release(fc_ring *r, uint64_t n)
    int fc_ring_closed(const fc_ring *r)
    int fc_ring_drained(fc_ring *r)
