/* One block of memory per rx queue, so that it is computed, reserved and given back as one thing:
 *
 *   | fc_rx_counters | fc_ring | entries[ring_size] | pad | slots[ring_size] |
 *   0                192       384                        64-byte aligned    bytes
 *
 * With huge pages the block is a memzone. What EAL cannot give in one piece (its lists of 2 MB pages end at
 * 16 GB) is mapped in huge pages by ourselves and registered with EAL, so that engines can be given it too.
 * Without huge pages it is an own anonymous mapping. All three are committed at once, so that a machine that
 * is too small says so now and not in the middle of a run.
 */
#ifndef FLOWCHECK_BLOCK_H
#define FLOWCHECK_BLOCK_H

#include <stdint.h>

#include "packetref.h"
#include "rx_counters.h"

#define FC_HUGE_PAGE (2ull << 20)

typedef struct fc_block {
    void *base;
    uint64_t bytes;
    uint64_t mapped;   /* bytes of an own mapping, 0: a memzone                       */
    const void *zone;  /* the memzone, NULL: an own mapping                           */
    int external;      /* the own mapping is registered with EAL                      */
    fc_rx_counters *counters;
    fc_ring *ring;
    uint8_t *slots;    /* NULL if slot_size is 0 */
    uint32_t slot_size;
} fc_block;

/* 0 if ring_size is not a power of two or slot_size not a multiple of 64. */
uint64_t fc_block_bytes(uint64_t ring_size, uint32_t slot_size);

/* 0, or a negative errno. name: unique among memzones, at most 31 characters (huge only). socket: NUMA node,
 * -1: any. */
int fc_block_create(fc_block *block, const char *name, uint64_t ring_size, uint32_t slot_size, int huge, int socket);
/* Idempotent. Nobody may use the ring any more. */
void fc_block_destroy(fc_block *block);

#endif
