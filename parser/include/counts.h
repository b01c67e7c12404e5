/* What is counted of one flow with no job given: observations, nothing concluded.
 *
 *   fc_count_packet -> opcodes, histograms, times
 *        |- requests:  sequence (sequence.h) -> clear-to-send write, or payload marks and messages
 *        `- answers:   ACK, NAK, RNR
 *
 * A packet whose ICRC is wrong is counted and otherwise ignored: the receiver dropped it too. Tables are bounded; what
 * does not fit is counted as such. What the observations mean is decided by parser/findings.py.
 * Thread rule: one thread at a time for one fc_counts. Nothing here allocates but the table of holes. */
#ifndef FLOWCHECK_COUNTS_H
#define FLOWCHECK_COUNTS_H

#include <stdint.h>

#include "cts.h"
#include "packetref.h"
#include "roce.h"
#include "sequence.h"

#ifndef FC_TALLY_SLOTS
#define FC_TALLY_SLOTS 32 /* distinct values remembered per histogram; the rest is counted as `other` */
#endif
#ifndef FC_REGIONS
#define FC_REGIONS 64 /* distinct (rkey, address) pairs remembered: 8 slots x 3 protocols fit */
#endif
#define FC_SPLIT_MAX 16     /* QPs per connection that a message may be split over */
#define FC_STREAMS_MAX 64   /* captures */
#define FC_NAK_KINDS 6      /* sequence, invalid, access, operational, invalid RD, reserved */

typedef struct fc_tally {
    uint32_t used;
    uint64_t other;
    uint64_t key[FC_TALLY_SLOTS], count[FC_TALLY_SLOTS];
} fc_tally;

/* One more of this value. */
void fc_tally_add(fc_tally *t, uint64_t key);

typedef struct fc_region {
    uint64_t address, size;
    uint32_t rkey;
} fc_region;

typedef struct fc_regions {
    uint32_t used;
    fc_region region[FC_REGIONS];
} fc_regions;

/* The WRITE that the next packets belong to, and the plain one that an adaptive-routing immediate may follow. */
typedef struct fc_writing {
    int open;
    int whole;       /* every packet since its first one came in order     */
    int plain;       /* ends without an immediate, as far as is known      */
    int ended;       /* its last packet was seen                           */
    uint32_t pieces; /* one-packet writes with consecutive addresses       */
    uint32_t unit;   /* length of the pieces                               */
    uint32_t last;   /* length of the last piece                           */
    uint32_t rkey;
    uint64_t address, length, got;
    int64_t next;
} fc_writing;

typedef struct fc_counts {
    uint64_t streams; /* bit per capture */
    uint64_t packets, bytes, payload_bytes;
    uint64_t first_ns, last_ns;
    uint64_t icrc_ok, icrc_wrong;
    uint64_t congestion; /* ECN says congestion experienced */
    uint32_t max_payload;
    uint64_t opcodes[256];
    fc_tally tclass, sport, vlan, src_qp;
    fc_tally mirror; /* kind << 32 | session of the mirror that had wrapped it */
    fc_sequence sequence;
    /* answers */
    uint64_t acks, rnr, naks[FC_NAK_KINDS];
    uint32_t msn;
    int answered;
    uint32_t answer_low, answer_high; /* lowest and highest PSN answered, 24 bits */
    /* messages */
    fc_writing write;
    uint64_t messages, sends;
    fc_tally sizes;
    uint64_t empty, pairs, cut_writes, cut_pieces;
    uint64_t imm_little, imm_big, imm_unexplained; /* immediates explained by a size, by byte order */
    uint64_t imm_split_little[FC_SPLIT_MAX + 1], imm_split_big[FC_SPLIT_MAX + 1];
    fc_regions regions;
    /* clear-to-send writes */
    uint64_t cts, cts_element[FC_CTS_ELEMENTS_MAX];
    uint64_t cts_first, cts_last, cts_jumps, cts_last_va;
    uint64_t cts_steps[FC_CTS_ELEMENTS_MAX]; /* by form: the one before is a neighbour in the FIFO */
    uint64_t cts_steps_other;
    fc_tally cts_sizes, cts_tags;
    fc_regions cts_regions;
    /* payload of WRITE packets */
    uint64_t ll, ll128, raw;
    uint64_t constant; /* every word equal: says nothing */
    uint64_t flag_first, flag_last, flag_steps, flag_jumps;
} fc_counts;

/* One packet of the flow. elements: `n` forms of the clear-to-send element. */
void fc_count_packet(
    fc_counts *f, const fc_packetref *ref, const fc_roce *p, const fc_cts_element *elements, uint32_t n);

#endif
