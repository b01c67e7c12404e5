/* A lock for a few threads that hold it for microseconds: first come, first served, so that whoever takes it again and
 * again keeps nobody waiting for longer than one turn. Not for signal handlers, nor twice by one thread. */
#ifndef FLOWCHECK_LOCK_H
#define FLOWCHECK_LOCK_H

#include <sched.h>
#include <stdint.h>

typedef struct fc_lock {
    uint32_t next, serving;
} fc_lock;

static inline void fc_take(fc_lock *lock)
{
    enum { SPINS = 256 }; /* the holder may be waiting for this very core */
    uint32_t mine = __atomic_fetch_add(&lock->next, 1, __ATOMIC_ACQ_REL);
    for (uint32_t i = 0; __atomic_load_n(&lock->serving, __ATOMIC_ACQUIRE) != mine; i++) {
        if (i % SPINS == SPINS - 1)
            sched_yield();
        else
            __builtin_ia32_pause();
    }
}

/* 1: taken. 0: somebody has it, or waits for it. */
static inline int fc_try(fc_lock *lock)
{
    uint32_t mine = __atomic_load_n(&lock->serving, __ATOMIC_ACQUIRE);
    return __atomic_compare_exchange_n(&lock->next, &mine, mine + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static inline void fc_give(fc_lock *lock)
{
    __atomic_store_n(&lock->serving, lock->serving + 1, __ATOMIC_RELEASE);
}

#endif
