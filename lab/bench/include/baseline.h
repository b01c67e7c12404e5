/* What the machine can do, in C that shares no line with the parser. Any thread, no state but the arguments. */
#ifndef FLOWCHECK_BENCH_BASELINE_H
#define FLOWCHECK_BENCH_BASELINE_H

#include "packetref.h"

#include <stddef.h>
#include <stdint.h>

/* Copy with the widest non-temporal stores of this processor. dst on a cache line, n a multiple of 256. */
void fcb_copy(uint8_t *dst, const uint8_t *src, size_t n);

/* A flow of the minimal parser; version 0 marks an empty place of the table. */
typedef struct fcb_flow {
    uint8_t src[16], dst[16];
    uint32_t qpn, version, next_psn;
    uint32_t messages; /* begun; of the minimal loop */
    uint64_t packets, bytes, gaps;
    uint64_t address; /* of the newest RETH; of the minimal loop: where its part of the region begins */
} fcb_flow;

/* The least that anything which tells flows apart and notices loss has to do: Ethernet, IPv4 or IPv6, UDP, BTH,
 * RETH, the QP's entry in a hash table, PSN against the expected one, counters. Prefetches `ahead` packets.
 * table: mask + 1 entries. Returns packets whose flow is known. */
uint64_t fcb_parse(const fc_packetref *refs, uint64_t n, fcb_flow *table, uint32_t mask, uint64_t ahead);

/* The least that placing packets costs the memory: every cache line of n payloads of `length` bytes is loaded, and
 * `bytes` (whole lines) are stored past the cache at each of the addresses `to` (on a cache line), in that order. What
 * is stored comes from the loads and means nothing. Payloads are prefetched `ahead` packets before, 0: not at all. */
void fcb_traffic(const uint64_t *to, const uint64_t *payloads, uint64_t n, uint32_t length, uint32_t bytes,
                 uint64_t ahead);

/* isa-l's CRC-32 over the same `bytes`, `times` over: they are in the nearest cache. Returns something of all of them. */
uint32_t fcb_crc_hot(const uint8_t *at, uint64_t bytes, uint64_t times);

#endif
