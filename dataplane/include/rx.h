/* One rx queue: a thread that takes bursts from (port, queue) and hands them to a dump strategy.
 *
 *   fc_rx_create -> fc_rx_start -> ... -> fc_rx_stop -> fc_rx_destroy        (control thread)
 *
 * Model: one pthread per queue, pinned if a core is given, known to DPDK (rte_thread_register) so that
 * the mempool's cache works. It polls; after a run of empty polls it sleeps in short naps. The stop flag
 * is looked at once per burst.
 *
 * A source that can wait (a file; wait_when_full) is asked for no more packets than the ring has room
 * for, so it loses nothing to a slow consumer. Any other source is polled always: what finds the ring
 * full is freed and counted.
 *
 * Dropped before the dump, and counted: frames whose IP header the port found damaged, and, where roce_only
 * is set, frames that cannot hold RoCE.
 *
 * A live source's clock: `stamp` gives every packet the time at which its burst was taken, unless the port
 * wrote a better one into the mbuf.
 *
 * Without a thread: fc_rx_poll does a number of bursts on the caller's thread, instead of fc_rx_start, so
 * that rx and consumer can share a core and its cache. The caller is then the producer's thread.
 *
 * An interface that is deleted delivers nothing and says nothing: a driver polls on for ever. The kernel takes its
 * index from every socket bound to it, so bound_socket is asked now and then, and the thread ends with ENODEV.
 *
 * The end: with `expected` set the thread ends when that many packets are accounted for (received +
 * errors + no_mbuf), or when nothing came for stall_ms although there was room. In every case it
 * publishes what it took and closes the ring, so that a consumer never waits for a thread that is gone.
 *
 * Thread rule: create, start, stop and destroy from one control thread; state and counters from any.
 * NIC counters are the port's: the thread of queue 0 accounts for them.
 */
#ifndef FLOWCHECK_RX_H
#define FLOWCHECK_RX_H

#include <stdint.h>

#include "dump.h"
#include "packetref.h"
#include "rx_counters.h"

#define FC_RX_BURST_MAX 256

enum fc_rx_state {
    FC_RX_NEW = 0,
    FC_RX_RUNNING = 1,
    FC_RX_DONE = 2,    /* everything expected is accounted for                                     */
    FC_RX_STOPPED = 3, /* fc_rx_stop came first                                                    */
    FC_RX_STALLED = 4, /* the source went silent before `expected` was reached                     */
    FC_RX_FAILED = 5   /* the thread could not start its work, an engine hangs (ETIMEDOUT), or the
                        * interface is gone (ENODEV): fc_rx_error has the errno                   */
};

typedef struct fc_rx_config {
    uint16_t port;
    uint16_t queue;
    uint16_t stream;
    uint16_t burst;           /* 1..FC_RX_BURST_MAX                                                 */
    int32_t core;             /* CPU to pin to, -1: wherever the process may run                    */
    uint32_t wait_when_full;
    uint32_t stall_ms;        /* only with `expected`                                               */
    uint64_t expected;        /* packets, 0: endless                                                */
    uint64_t ns_per_tick;     /* unit of the port's receive timestamps, 0: ignore them              */
    fc_ring *ring;
    fc_rx_counters *counters;
    uint8_t *slots;           /* see dump.h                                                         */
    uint32_t slot_size;
    const char *dump;         /* name of the strategy                                               */
    uint32_t roce_only;
    uint32_t stamp;
    int32_t packet_socket;    /* this queue's AF_PACKET socket, whose drops the PMD hides; -1: none  */
    int32_t bound_socket;     /* an AF_PACKET socket bound to the interface: tells that it vanished; -1: none */
    uint32_t engine_count;    /* dma: engines that no other queue uses                               */
    uint32_t dma_minimum;
    fc_dump_engine engines[FC_ENGINES_MAX];
} fc_rx_config;

typedef struct fc_rx fc_rx;

/* 0 and *out, or a negative errno (-ENOENT: no such strategy). The ring is initialised by the caller. */
int fc_rx_create(const fc_rx_config *config, fc_rx **out);
int fc_rx_start(fc_rx *rx);
/* Idempotent: asks the thread to end, waits for it, closes the ring. */
void fc_rx_stop(fc_rx *rx);
/* At most `bursts` bursts on this thread, ending early when nothing came or there is no room. Returns packets
 * taken. A source whose `expected` is reached closes the ring; so does fc_rx_stop. */
uint64_t fc_rx_poll(fc_rx *rx, uint64_t bursts);
/* For measurements: takes at least `packets` from a started port, shows each burst to `take` (NULL: to nobody) and
 * frees it, nothing else. Returns how many. */
typedef void (*fc_rx_taker)(void *arg, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n);
uint64_t fc_rx_bare(uint16_t port, uint16_t queue, uint16_t burst, uint64_t packets, fc_rx_taker take, void *arg);
int fc_rx_state(const fc_rx *rx);
/* errno behind FC_RX_FAILED. */
int fc_rx_error(const fc_rx *rx);
/* How often there was nothing to take and everything taken was published. Two more than before, and what the queue had
 * before is in the ring: the first look may have begun earlier. */
uint64_t fc_rx_empty(const fc_rx *rx);
/* Stops first. NULL is fine. */
void fc_rx_destroy(fc_rx *rx);

/* Single writer: no locked instruction, but never a torn value for a reader in another thread. */
static inline void fc_count(uint64_t *counter, uint64_t n)
{
    __atomic_store_n(counter, *counter + n, __ATOMIC_RELAXED);
}

#endif
