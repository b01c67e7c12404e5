/* A placing thread: serve.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif
#include "serve.h"

#include <pthread.h>
#include <time.h>

enum {
    TURN = 2048,      /* packets of a queue before the next one has its turn                     */
    SPINS = 4096,     /* looks at empty queues before the thread sleeps                          */
    NAP_NS = 20000,   /* a ring of 16,384 entries holds some 5 ms of 100 Gb/s                    */
};

static void rest(uint32_t *idle)
{
    static const struct timespec nap = {0, NAP_NS};
    if (++*idle < SPINS)
        __builtin_ia32_pause();
    else
        nanosleep(&nap, NULL);
}

/* One turn. 1 if anything moved. */
static int take_turn(fc_machine *M, fc_queue *q)
{
    int blocked = 0;
    if (q->fanout != NULL)
        fc_fanout_refresh(q->fanout);
    int64_t done = fc_drive(M, q->stream, q->ring, TURN, &blocked);
    __atomic_store_n(&q->consumed, q->consumed + (uint64_t)done, __ATOMIC_RELEASE);
    __atomic_store_n(&q->blocked, (uint32_t)blocked, __ATOMIC_RELEASE);
    return done > 0;
}

void fc_serve(fc_machine *M, fc_service *service)
{
    uint32_t idle = 0;
    pthread_setname_np(pthread_self(), "fc-place");
    while (!__atomic_load_n(&service->stop, __ATOMIC_ACQUIRE)) {
        int moved = 0;
        for (uint32_t i = 0; i < service->n; i++)
            moved |= take_turn(M, &service->queues[i]);
        if (moved)
            idle = 0;
        else
            rest(&idle);
    }
}
