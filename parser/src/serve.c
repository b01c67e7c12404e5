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

/* The ring gets back what all seats have taken. */
static void release(fc_queue *q, const fc_table *t)
{
    uint64_t oldest = q->scan;
    for (uint32_t i = 0; i < t->n; i++)
        oldest = t->seats[i]->waits < oldest ? t->seats[i]->waits : oldest;
    if (oldest != q->ring->tail)
        fc_ring_release(q->ring, oldest - q->ring->tail);
}

/* The only job reads the ring itself. */
static int drive_alone(fc_queue *q, fc_seat *s)
{
    uint64_t others = q->strangers.packets;
    int blocked = 0;
    s->M->strangers = &q->strangers;
    int64_t done = fc_drive(s->M, s->stream, q->ring, TURN, &blocked);
    s->M->strangers = NULL;
    __atomic_store_n(&s->consumed, s->consumed + (uint64_t)done - (q->strangers.packets - others), __ATOMIC_RELEASE);
    __atomic_store_n(&s->blocked, (uint32_t)blocked, __ATOMIC_RELEASE);
    __atomic_store_n(&q->scan, q->ring->tail, __ATOMIC_RELEASE);
    return done > 0;
}

/* Before each deal: seats that wait come nearer by more than is dealt, however many packets come. */
static int catch_up(fc_queue *q, const fc_table *t)
{
    int moved = 0;
    for (uint32_t i = 0; i < t->n; i++)
        if (t->seats[i]->waits != FC_CURRENT)
            moved |= fc_catch_up(q, t->seats[i]);
    return moved;
}

/* One turn. 1 if anything moved. */
static int take_turn(fc_queue *q)
{
    const fc_table *t = __atomic_load_n(&q->table, __ATOMIC_ACQUIRE);
    int moved = 0;
    if (t != q->current)
        __atomic_store_n(&q->current, t, __ATOMIC_RELEASE);
    if (t->n == 1 && t->seats[0]->waits == FC_CURRENT && q->scan == q->ring->tail)
        return drive_alone(q, t->seats[0]);
    for (uint64_t i = 0; i < TURN / FC_DEAL; i++) {
        int caught_up = catch_up(q, t);
        if (fc_deal(q, t) == 0 && !caught_up)
            break;
        moved = 1;
        release(q, t);
    }
    release(q, t); /* what a job that left has held */
    return moved;
}

static void rest(uint32_t *idle)
{
    static const struct timespec nap = {0, NAP_NS};
    if (++*idle < SPINS)
        __builtin_ia32_pause();
    else
        nanosleep(&nap, NULL);
}

void fc_serve(fc_service *service)
{
    uint32_t idle = 0;
    pthread_setname_np(pthread_self(), "fc-place");
    while (!__atomic_load_n(&service->stop, __ATOMIC_ACQUIRE)) {
        int moved = 0;
        for (uint32_t i = 0; i < service->n; i++)
            moved |= take_turn(service->queues[i]);
        if (moved)
            idle = 0;
        else
            rest(&idle);
    }
}
