/* A placing thread: takes packets out of its rings for as long as it is wanted.
 *
 *     fill in queues and n;  a thread calls fc_serve(M, service);  set stop;  join the thread
 *
 * A queue whose next packet has to wait for an arena is tried again until the iteration before has retired: `blocked`,
 * and then fc_machine.wanted, say so. Counters have one writer, the thread; anybody may read them.
 */
#ifndef FLOWCHECK_SERVE_H
#define FLOWCHECK_SERVE_H

#include "fanout.h"
#include "machine.h"

enum { FC_QUEUES = 64 };

typedef struct fc_queue {
    fc_ring *ring;
    fc_fanout *fanout; /* that the ring is a reader's of; or NULL */
    uint32_t stream;   /* of the machine                         */
    uint32_t blocked;
    uint64_t consumed;
} fc_queue;

typedef struct fc_service {
    fc_queue queues[FC_QUEUES];
    uint32_t n, stop;
} fc_service;

void fc_serve(fc_machine *M, fc_service *service);

#endif
