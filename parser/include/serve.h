/* A placing thread: takes packets out of the rings of a node's ports, for all of its jobs at once.
 *
 *     packet --- decoded and looked up once --.--> seat of a job --- fc_machine
 *                 fc_table: flow -> seat      `--> nobody's: counted, and that is all
 *
 * Every job has a seat at every queue. Packets are dealt in their order, FC_DEAL at a time: each is placed by its seat's
 * machine at once. The machines of the queue are held meanwhile, and fenced at the end; a seat whose machine is taken
 * waits. A job that is alone at a queue reads the ring itself (fc_drive).
 *
 * What a ring gives back to its producer is what every seat has taken. A seat whose next packet has to wait for an arena
 * holds up nobody else: others go on behind it, for as long as the ring has room. `owners` says whose each packet was,
 * so that the seat finds its own again (`waits`), in their order, before it takes what is new. A flow that two jobs claim
 * is of both: each takes every packet of it.
 *
 * Jobs come and go while packets flow. One writer makes a new table, shows it (fc_queue_show) and waits until the thread
 * has taken it up, which it does between two looks (fc_queue_has): then nobody reads the one before, nor seats that were
 * only in that one. A new seat waits for the place where the ring ended when it was made.
 *
 *     fill in queues and n;  a thread calls fc_serve(service);  set stop;  join the thread
 *
 * Counters have one writer, the thread; anybody may read them.
 */
#ifndef FLOWCHECK_SERVE_H
#define FLOWCHECK_SERVE_H

#include "machine.h"

enum {
    FC_QUEUES = 64,
    FC_SEATS = 64,
    FC_DEAL = 256,    /* packets between two fences, which take a lock for each seat       */
    FC_NOBODY = 254,  /* of owners                                                          */
    FC_SEVERAL = 255, /* ... : of more than one seat                                        */
};
#define FC_CURRENT (~0ull)

typedef struct fc_seat { /* a job at a queue */
    fc_machine *M;
    uint32_t stream;   /* of the machine                                    */
    uint32_t number;   /* in owners; no other seat of the queue has it      */
    uint64_t waits;    /* place of the oldest packet that was not taken; FC_CURRENT: there is none before `scan` */
    uint64_t consumed; /* packets of the job                                */
    uint32_t blocked;  /* that packet has to wait for an arena, and fc_machine.wanted says of which iteration    */
    uint32_t taken;    /* packets since the lock was taken                  */
    uint32_t held;     /* the machine's lock                                */
    uint8_t unused[20];
} __attribute__((aligned(64))) fc_seat;

typedef struct fc_route { /* as fc_flow_key; 64 bytes */
    uint64_t number, ends[4];
    fc_flow *flow;
    fc_seat *seat;
    const struct fc_route *also; /* another job's claim to this flow */
} fc_route;

typedef struct fc_table { /* who sits at a queue, and whose each flow is. Never written once it is shown */
    fc_route *routes, *more; /* more: claims to flows that are in routes already */
    uint32_t mask, header_lines, n;
    fc_seat *seats[FC_SEATS];
} fc_table;

typedef struct fc_queue {
    fc_ring *ring;
    const fc_table *table;   /* that the writer shows                          */
    const fc_table *current; /* that the thread works with                     */
    uint64_t scan;           /* packets before this were dealt                 */
    uint8_t *owners;         /* by place in the ring                           */
    uint8_t *final_hint;     /* of the thread's machines: fc_machine.final_hint */
    fc_machine *lead;        /* that placed last, while packets are dealt      */
    uint32_t copying;        /* flows of the job dealt to last that bring copies: fc_machine.copying */
    uint64_t ahead;          /* packets after the one that is placed, from which payload is fetched */
    fc_strangers strangers;  /* packets of nobody                              */
    fc_strangers counted;    /* ... that were met again: of no meaning         */
} __attribute__((aligned(64))) fc_queue;

typedef struct fc_service {
    fc_queue *queues[FC_QUEUES];
    uint32_t n, stop;
    uint8_t final_hint[FC_HINTS];
} fc_service;

/* -- machine.c: within a turn ---------------------------------------------------------------------------- */

/* Deal what has come since, FC_DEAL packets at most. Returns how many. */
uint64_t fc_deal(fc_queue *q, const fc_table *t);
/* A seat that waits takes some of what waits for it, more than FC_DEAL packets. 1 if anything moved. */
int fc_catch_up(fc_queue *q, fc_seat *s);

static inline void fc_seat_waits(fc_seat *s, uint64_t at, int blocked)
{
    __atomic_store_n(&s->blocked, (uint32_t)blocked, __ATOMIC_RELEASE);
    __atomic_store_n(&s->waits, at, __ATOMIC_RELEASE);
}

/* -- serve.c ---------------------------------------------------------------------------------------------- */

void fc_serve(fc_service *service);

/* The thread ends after its turn. */
static inline void fc_service_stop(fc_service *service)
{
    __atomic_store_n(&service->stop, 1, __ATOMIC_RELEASE);
}

/* -- for the one writer (route.c) -------------------------------------------------------------------- */

/* NULL: no memory. */
fc_table *fc_table_make(fc_seat *const *seats, uint32_t n);
void fc_table_free(fc_table *table);

/* running: there is a thread that will take it up. */
static inline void fc_queue_show(fc_queue *q, const fc_table *table, int running)
{
    __atomic_store_n(&q->table, table, __ATOMIC_RELEASE);
    if (!running)
        q->current = table;
}

static inline int fc_queue_has(const fc_queue *q, const fc_table *table)
{
    return __atomic_load_n(&q->current, __ATOMIC_ACQUIRE) == table;
}

/* -- for anybody --------------------------------------------------------------------------------------- */

static inline uint64_t fc_ring_head(const fc_ring *r)
{
    return __atomic_load_n(&r->head, __ATOMIC_ACQUIRE);
}

/* The ring got everything back before this place. A job that is alone gives back before it says what it has taken. */
static inline uint64_t fc_ring_tail(const fc_ring *r)
{
    return __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE);
}

/* The seat has taken all of its packets before this place. */
static inline uint64_t fc_seat_passed(const fc_queue *q, const fc_seat *s)
{
    uint64_t scan = __atomic_load_n(&q->scan, __ATOMIC_ACQUIRE), waits = __atomic_load_n(&s->waits, __ATOMIC_ACQUIRE);
    return waits < scan ? waits : scan;
}

static inline uint64_t fc_seat_consumed(const fc_seat *s)
{
    return __atomic_load_n(&s->consumed, __ATOMIC_ACQUIRE);
}

static inline int fc_seat_blocked(const fc_seat *s)
{
    return (int)__atomic_load_n(&s->blocked, __ATOMIC_ACQUIRE);
}

#endif
