/* Entries of a journal on their way from an arena to a place in a file (docs/understand/journal.md has the bytes).
 *
 *     caller     FREE --fcj_offer--> GIVEN            never waits; no slot is FREE: it says so
 *     copier     GIVEN  -> COPIED                     memory speed: the caller's bytes are no longer read
 *     writer     COPIED -> DONE                       as fast as the file system is, or never
 *     caller     DONE --fcj_taken--> FREE
 *
 * Slots are used in turns, so that both threads find the next one without a search. In a file system that is memory
 * (tmpfs, hugetlbfs) an entry is copied straight to its place, which is mapped; else to the memory of its slot, from
 * which it is written. Nothing is allocated and no lock is held after fcj_start. One thread calls; fcj_reads: any.
 *
 * An entry is whole when the first word of its place is the sum of the rest of its first block. That word is cleared
 * before anything of an older entry is overwritten, and written after all else is where a power cut leaves it.
 */
#ifndef FLOWCHECK_RING_H
#define FLOWCHECK_RING_H

#include <stdint.h>

#include "sums.h"

enum { FCJ_BLOCK = 4096, FCJ_LINE = 64, FCJ_SLOTS = 2 };
enum { FCJ_FREE, FCJ_GIVEN, FCJ_COPIED, FCJ_DONE };
/* Where it went wrong. */
enum { FCJ_CLEARING = 1, FCJ_WRITING, FCJ_COMPLETING };
/* How files are written. MAPPED: their memory is. DIRECT: past the page cache. DISK: what was written is there after
 * fdatasync alone. */
enum { FCJ_MAPPED = 1, FCJ_DIRECT = 2, FCJ_DISK = 4 };

/* The first block of a place. word covers what follows it. */
typedef struct fcj_block {
    uint64_t word, magic;
    int64_t number;
    uint64_t ticket, head_bytes, spans, bytes, head_sum, table_sum;
    uint8_t zero[FCJ_BLOCK - 9 * 8];
} fcj_block;

typedef struct fcj_entry {
    int64_t number;
    uint64_t ticket;
    int fd;                  /* not MAPPED: of the file, and where its place begins there */
    uint64_t at;
    uint8_t *place;          /* MAPPED: the place */
    const uint8_t *head, *region;
    uint64_t head_bytes, count;
    const int64_t *spans;    /* of the region: first byte, bytes; `count` of them */
} fcj_entry;

typedef struct fcj_outcome {
    int64_t number;
    uint64_t ticket, bytes;
    int64_t nanoseconds;     /* that writing it to its file took; MAPPED: copying it there */
    int step, error;         /* 0, or FCJ_CLEARING... and errno */
} fcj_outcome;

typedef struct fcj_ring fcj_ring;

/* Bytes of a place that an entry takes. Overflow: the caller sees to it that all lies in memory. */
uint64_t fcj_bytes(uint64_t head_bytes, const int64_t *spans, uint64_t count);
uint64_t fcj_block_sum(fcs_blocks *blocks_of, const void *block);

fcj_ring *fcj_start(uint64_t slot_bytes, int how, fcs_blocks *blocks_of); /* NULL: no memory, no thread */
/* head, region and spans stay as they are while fcj_reads(number). 0: no slot is free. */
int fcj_offer(fcj_ring *ring, const fcj_entry *entry);
int fcj_reads(const fcj_ring *ring, int64_t number);
int fcj_taken(fcj_ring *ring, fcj_outcome *outcome); /* one that is DONE, in the order offered; 0: none */
int64_t fcj_writing(const fcj_ring *ring, int64_t *number); /* nanoseconds since it was begun; -1: none is written */
/* Ends both threads after what was offered, once; fcj_taken may follow. 0: the file system did not answer in time: the
 * writer and its memory are given up, and there is no fcj_free. */
int fcj_stop(fcj_ring *ring, int64_t nanoseconds);
void fcj_free(fcj_ring *ring);

#endif
