/* One block of memory per rx queue, so that it is computed, reserved and given back as one thing:
 *
 *   | fc_rx_counters | fc_ring | entries[ring_size] | pad | slots[ring_size] |
 *   0                128       320                        64-byte aligned    bytes
 *
 * With huge pages the block is a memzone (DPDK maps it for DMA engines); without, an own anonymous mapping,
 * committed at once, so that a machine that is too small says so now and not in the middle of a run.
 */
#ifndef FLOWCHECK_BLOCK_H
#define FLOWCHECK_BLOCK_H

#include <stdint.h>

#include "packetref.h"
#include "rx_counters.h"

typedef struct fc_block {
    void *base;
    uint64_t bytes;
    const void *zone;  /* the memzone, NULL: an anonymous mapping */
    fc_rx_counters *counters;
    fc_ring *ring;
    uint8_t *slots;    /* NULL if slot_size is 0 */
    uint32_t slot_size;
} fc_block;

/* 0 if ring_size is not a power of two or slot_size not a multiple of 64. */
uint64_t fc_block_bytes(uint64_t ring_size, uint32_t slot_size);

/* 0, or a negative errno. name: unique among memzones, at most 31 characters (huge only). */
int fc_block_create(fc_block *block, const char *name, uint64_t ring_size, uint32_t slot_size, int huge);
/* Idempotent. Nobody may use the ring any more. */
void fc_block_destroy(fc_block *block);

#endif
