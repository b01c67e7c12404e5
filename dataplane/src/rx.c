#define _GNU_SOURCE
#include "rx.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_lcore.h>
#include <rte_mbuf_dyn.h>
#include <rte_pause.h>

#include "dump.h"

#define SPINS_BEFORE_NAP 64
#define NAP_NS 50000
#define NIC_COUNTERS_EVERY_NS 100000000ull

struct fc_rx {
    fc_rx_config config;
    fc_dump dump;
    pthread_t thread;
    int started; /* control thread only: there is a thread to join */
    int stop;    /* atomic */
    int state;   /* atomic, enum fc_rx_state */
    int error;   /* written before state becomes FC_RX_FAILED */
};

const fc_dump_ops *fc_dump_find(const char *name)
{
    static const fc_dump_ops *const all[] = {&fc_dump_copy};

    for (size_t i = 0; i < RTE_DIM(all); i++)
        if (strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void back_off(unsigned *spins)
{
    static const struct timespec nap = {0, NAP_NS};

    if (++*spins < SPINS_BEFORE_NAP)
        rte_pause();
    else
        nanosleep(&nap, NULL);
}

static void read_nic_counters(fc_rx *rx)
{
    struct rte_eth_stats stats;

    if (rx->config.queue != 0 || rte_eth_stats_get(rx->config.port, &stats) != 0)
        return;
    __atomic_store_n(&rx->config.counters->nic_missed, stats.imissed, __ATOMIC_RELAXED);
    __atomic_store_n(&rx->config.counters->errors, stats.ierrors, __ATOMIC_RELAXED);
    __atomic_store_n(&rx->config.counters->no_mbuf, stats.rx_nombuf, __ATOMIC_RELAXED);
}

static int accounted_for(const fc_rx *rx)
{
    const fc_rx_counters *c = rx->config.counters;

    return rx->config.expected != 0 && c->received + c->errors + c->no_mbuf >= rx->config.expected;
}

/* One burst. Returns packets received, or -1 when the ring has no room and the source waits. */
static int poll_once(fc_rx *rx)
{
    const fc_rx_config *c = &rx->config;
    fc_dump *dump = &rx->dump;
    struct rte_mbuf *mbufs[FC_RX_BURST_MAX];
    uint64_t room, bytes = 0;
    uint16_t want = c->burst, n, taken;

    dump->ops->reclaim(dump);
    room = dump->ops->room(dump);
    if (c->wait_when_full && room < want) {
        if (room == 0) {
            fc_count(&c->counters->waits, 1);
            return -1;
        }
        want = (uint16_t)room;
    }
    n = rte_eth_rx_burst(c->port, c->queue, mbufs, want);
    if (n == 0)
        return 0;
    for (uint16_t i = 0; i < n; i++)
        bytes += mbufs[i]->pkt_len;
    fc_count(&c->counters->received, n);
    fc_count(&c->counters->bytes, bytes);
    taken = n <= room ? n : (uint16_t)room;
    if (taken)
        dump->ops->dump(dump, mbufs, taken);
    if (taken < n) {
        fc_count(&c->counters->ring_full, (uint64_t)(n - taken));
        rte_pktmbuf_free_bulk(mbufs + taken, n - taken);
    }
    return n;
}

static int receive(fc_rx *rx)
{
    const uint64_t stall_ns = rx->config.stall_ms * 1000000ull;
    uint64_t progress = now_ns(), nic_read = progress;
    unsigned idle = 0, bursts = 0;

    while (!__atomic_load_n(&rx->stop, __ATOMIC_ACQUIRE)) {
        int n = poll_once(rx);

        if (n > 0) {
            idle = 0;
            if (accounted_for(rx))
                return FC_RX_DONE;
            if (++bursts % 256 == 0) {
                progress = now_ns();
                if (progress - nic_read > NIC_COUNTERS_EVERY_NS) {
                    read_nic_counters(rx);
                    nic_read = progress;
                }
            }
            continue;
        }
        back_off(&idle);
        if (n < 0 || idle == 1) { /* waiting for the consumer is not the source's silence */
            progress = now_ns();
            continue;
        }
        if (idle < SPINS_BEFORE_NAP)
            continue;
        read_nic_counters(rx);
        if (rx->config.expected == 0)
            continue;
        if (accounted_for(rx))
            return FC_RX_DONE;
        if (now_ns() - progress > stall_ns)
            return FC_RX_STALLED;
    }
    return FC_RX_STOPPED;
}

static int fail(fc_rx *rx, int error)
{
    rx->error = error;
    return FC_RX_FAILED;
}

static int pin(int core)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

static void *rx_main(void *arg)
{
    fc_rx *rx = arg;
    int state, rc = 0;

    if (rx->config.core >= 0)
        rc = pin(rx->config.core);
    if (rc != 0) {
        state = fail(rx, rc);
    } else if (rte_thread_register() != 0) {
        state = fail(rx, rte_errno);
    } else {
        state = receive(rx);
        while (rx->dump.ops->reclaim(&rx->dump) != 0)
            rte_pause();
        read_nic_counters(rx);
        rte_thread_unregister();
    }
    /* State before the ring: a consumer that sees the ring closed may ask why at once. */
    __atomic_store_n(&rx->state, state, __ATOMIC_RELEASE);
    fc_ring_close(rx->config.ring);
    return NULL;
}

int fc_rx_create(const fc_rx_config *config, fc_rx **out)
{
    const fc_dump_ops *ops = fc_dump_find(config->dump);
    fc_rx *rx;
    int rc;

    if (ops == NULL)
        return -ENOENT;
    if (config->burst == 0 || config->burst > FC_RX_BURST_MAX || config->core >= CPU_SETSIZE)
        return -EINVAL;
    rx = calloc(1, sizeof(*rx));
    if (rx == NULL)
        return -ENOMEM;
    rx->config = *config;
    rx->config.dump = ops->name;
    rx->dump.ops = ops;
    rx->dump.config = (fc_dump_config){
        .ring = config->ring,
        .counters = config->counters,
        .slots = config->slots,
        .slot_size = config->slot_size,
        .stream = config->stream,
        .timestamp_offset = -1,
        .ns_per_tick = config->ns_per_tick,
    };
    if (config->ns_per_tick != 0) {
        int flag = rte_mbuf_dynflag_lookup(RTE_MBUF_DYNFLAG_RX_TIMESTAMP_NAME, NULL);
        int offset = rte_mbuf_dynfield_lookup(RTE_MBUF_DYNFIELD_TIMESTAMP_NAME, NULL);

        if (flag >= 0 && offset >= 0) {
            rx->dump.config.timestamp_offset = offset;
            rx->dump.config.timestamp_flag = 1ull << flag;
        }
    }
    rc = ops->setup(&rx->dump);
    if (rc != 0) {
        free(rx);
        return rc;
    }
    *out = rx;
    return 0;
}

int fc_rx_start(fc_rx *rx)
{
    int rc;

    if (rx->started || rx->state != FC_RX_NEW)
        return -EALREADY;
    rx->state = FC_RX_RUNNING;
    rc = pthread_create(&rx->thread, NULL, rx_main, rx);
    if (rc != 0) {
        rx->state = FC_RX_NEW;
        return -rc;
    }
    pthread_setname_np(rx->thread, "fc-rx");
    rx->started = 1;
    return 0;
}

void fc_rx_stop(fc_rx *rx)
{
    __atomic_store_n(&rx->stop, 1, __ATOMIC_RELEASE);
    if (rx->started) {
        pthread_join(rx->thread, NULL);
        rx->started = 0;
    } else if (rx->state == FC_RX_NEW) {
        rx->state = FC_RX_STOPPED;
        fc_ring_close(rx->config.ring);
    }
}

int fc_rx_state(const fc_rx *rx)
{
    return __atomic_load_n(&rx->state, __ATOMIC_ACQUIRE);
}

int fc_rx_error(const fc_rx *rx)
{
    return rx->error;
}

void fc_rx_destroy(fc_rx *rx)
{
    if (rx == NULL)
        return;
    fc_rx_stop(rx);
    rx->dump.ops->teardown(&rx->dump);
    free(rx);
}
