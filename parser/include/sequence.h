/* One PSN sequence, the requests of one flow: what is missing, what came twice, what went back.
 *
 * PSNs are unwrapped from 24 bits. Holes are kept in order, at most FC_HOLES_MAX of them; then the oldest one is lost
 * for good. A packet costs a comparison; one that fills a hole costs a search. */
#ifndef FLOWCHECK_SEQUENCE_H
#define FLOWCHECK_SEQUENCE_H

#include <stdint.h>

#include "roce.h"

#ifndef FC_HOLES_MAX
#define FC_HOLES_MAX 4096
#endif

typedef struct fc_hole {
    int64_t start, end; /* end is exclusive */
} fc_hole;

typedef struct fc_sequence {
    uint64_t packets;
    int64_t first;
    int64_t next;          /* highest PSN seen + 1                                                  */
    int64_t previous;      /* PSN of the packet before                                              */
    int stepped_back;      /* the packet before went backwards: a restart if this one follows it    */
    uint64_t gaps;
    uint64_t duplicates;   /* a PSN that had arrived                                                */
    uint64_t late;         /* filled a gap                                                          */
    uint64_t before_first; /* below the first PSN seen: captured late, nothing known about it       */
    uint64_t backward;
    uint64_t restarts;
    uint64_t lost_for_good;
    uint32_t read_length;  /* length of the READ request at next - 1, else 0: it takes several PSNs */
    uint32_t n_holes, room;
    fc_hole *holes;        /* owned; free() it                                                      */
} fc_sequence;

/* Account for one request packet. Returns its unwrapped PSN, or -1 if it brings nothing new. */
int64_t fc_sequence_follow(fc_sequence *s, const fc_roce *p);

#endif
