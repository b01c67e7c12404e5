/* Sequences of PSNs: sequence.h. */
#include "sequence.h"

#include <stdlib.h>
#include <string.h>

#include "psn.h"

/* Insert a hole before index `at`. The oldest one goes when the table is full. */
static void add_hole(fc_sequence *s, uint32_t at, int64_t start, int64_t end)
{
    if (s->n_holes == FC_HOLES_MAX) {
        s->lost_for_good += (uint64_t)(s->holes[0].end - s->holes[0].start);
        s->n_holes--;
        memmove(s->holes, s->holes + 1, s->n_holes * sizeof(fc_hole));
        at -= at > 0;
    }
    if (s->n_holes == s->room) {
        uint32_t room = s->room ? 2 * s->room : 16;
        fc_hole *larger = realloc(s->holes, room * sizeof(fc_hole));
        if (larger == NULL) {
            s->lost_for_good += (uint64_t)(end - start);
            return;
        }
        s->holes = larger;
        s->room = room;
    }
    memmove(s->holes + at + 1, s->holes + at, (s->n_holes - at) * sizeof(fc_hole));
    s->holes[at] = (fc_hole){start, end};
    s->n_holes++;
}

/* 1 if psn was missing; it is not any more. */
static int fill_hole(fc_sequence *s, int64_t psn)
{
    uint32_t low = 0, high = s->n_holes;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (s->holes[middle].end <= psn)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == s->n_holes || psn < s->holes[low].start)
        return 0;
    fc_hole *hole = &s->holes[low];
    int64_t end = hole->end;
    if (hole->start == psn) {
        hole->start = psn + 1;
    } else {
        hole->end = psn;
        if (psn + 1 < end)
            add_hole(s, low + 1, psn + 1, end);
        return 1;
    }
    if (hole->start == hole->end) {
        s->n_holes--;
        memmove(hole, hole + 1, (s->n_holes - low) * sizeof(fc_hole));
    }
    return 1;
}

/* A READ request takes one PSN for each packet of its response, at whatever path MTU. */
static int read_explains(uint32_t length, int64_t distance)
{
    for (uint32_t mtu = 256; mtu <= 4096; mtu *= 2)
        if (distance == ((int64_t)length + mtu - 1) / mtu)
            return 1;
    return 0;
}

int64_t fc_sequence_follow(fc_sequence *s, const fc_roce *p)
{
    s->packets++;
    if (s->packets == 1) {
        s->first = s->next = p->psn;
        s->previous = s->first - 1;
    }
    int64_t ahead = fc_psn_distance(p->psn, s->next), psn = s->next + ahead;
    int fresh = 1;
    if (s->stepped_back && psn == s->previous + 1)
        s->restarts++;
    s->stepped_back = 0;
    if (ahead >= 0) {
        if (ahead > 0 && !(s->read_length && read_explains(s->read_length, ahead + 1))) {
            s->gaps++;
            add_hole(s, s->n_holes, s->next, psn);
        }
        s->next = psn + 1;
        s->read_length = p->opcode == FC_RC_READ_REQUEST ? p->dma_len : 0;
    } else {
        if (psn <= s->previous) {
            s->backward++;
            s->stepped_back = 1;
        }
        if (psn < s->first) {
            s->before_first++;
        } else if (fill_hole(s, psn)) {
            s->late++;
        } else {
            s->duplicates++;
            fresh = 0;
        }
    }
    s->previous = psn;
    return fresh ? psn : -1;
}
