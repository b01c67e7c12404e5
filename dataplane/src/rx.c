#define _GNU_SOURCE
#include "rx.h"

#include <errno.h>
#include <linux/if_packet.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_lcore.h>
#include <rte_mbuf_dyn.h>
#include <rte_pause.h>

#include "dump.h"
#include "frame.h"

#define SPINS_BEFORE_NAP 64
#define NAP_NS 50000
#define NIC_COUNTERS_EVERY_NS 20000000ull
#define ENGINE_HANGS_NS 2000000000ull

struct fc_rx {
    fc_rx_config config;
    fc_dump dump;
    pthread_t thread;
    int started; /* control thread only: there is a thread to join */
    int stop;    /* atomic */
    int state;   /* atomic, enum fc_rx_state */
    int error;   /* written before state becomes FC_RX_FAILED */
    uint64_t empty; /* atomic, written by the producer's thread */
};

const fc_dump_ops *fc_dump_find(const char *name)
{
    static const fc_dump_ops *const all[] = {&fc_dump_copy, &fc_dump_hold, &fc_dump_dma};

    for (size_t i = 0; i < RTE_DIM(all); i++)
        if (strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static uint64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

static void back_off(unsigned *spins)
{
    static const struct timespec nap = {0, NAP_NS};

    if (++*spins < SPINS_BEFORE_NAP)
        rte_pause();
    else
        nanosleep(&nap, NULL);
}

/* net_af_packet reports no drops; its socket knows them. Reading clears the kernel's counts. */
static void read_packet_socket(fc_rx *rx)
{
    struct tpacket_stats stats;
    socklen_t size = sizeof(stats);

    if (rx->config.packet_socket < 0
        || getsockopt(rx->config.packet_socket, SOL_PACKET, PACKET_STATISTICS, &stats, &size) != 0)
        return;
    fc_count(&rx->config.counters->kernel_seen, stats.tp_packets);
    fc_count(&rx->config.counters->kernel_ring_full, stats.tp_drops);
}

/* Deleted, or moved to another network namespace. Down is not gone: packets come again when it is up. */
static int interface_gone(const fc_rx *rx)
{
    struct sockaddr_ll at;
    socklen_t size = sizeof(at);

    return rx->config.bound_socket >= 0
           && getsockname(rx->config.bound_socket, (struct sockaddr *)&at, &size) == 0 && at.sll_ifindex <= 0;
}

static void read_nic_counters(fc_rx *rx)
{
    struct rte_eth_stats stats;

    read_packet_socket(rx);
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

/* Frees what is not to be dumped, and counts why. Returns how many are left, in order. */
static uint16_t sift(fc_rx *rx, struct rte_mbuf **mbufs, uint16_t n)
{
    struct rte_mbuf *out[FC_RX_BURST_MAX];
    uint16_t kept = 0, damaged = 0, other = 0;

    for (uint16_t i = 0; i < n; i++) {
        struct rte_mbuf *m = mbufs[i];

        if ((m->ol_flags & RTE_MBUF_F_RX_IP_CKSUM_MASK) == RTE_MBUF_F_RX_IP_CKSUM_BAD)
            out[damaged++ + other] = m;
        else if (rx->config.roce_only && fc_frame_other(rte_pktmbuf_mtod(m, const uint8_t *), m->data_len))
            out[damaged + other++] = m;
        else
            mbufs[kept++] = m;
    }
    if (kept == n)
        return n;
    rte_pktmbuf_free_bulk(out, damaged + other);
    fc_count(&rx->config.counters->bad_checksum, damaged);
    fc_count(&rx->config.counters->not_roce, other);
    return kept;
}

/* How many packets may still be asked for: of a file no more than it held when it was scanned. */
static uint16_t wanted(const fc_rx *rx)
{
    const fc_rx_counters *c = rx->config.counters;
    uint64_t had = c->received + c->errors + c->no_mbuf;

    if (rx->config.expected == 0)
        return rx->config.burst;
    return (uint16_t)(had >= rx->config.expected ? 0 : RTE_MIN(rx->config.expected - had, rx->config.burst));
}

/* One burst. Returns packets received, or -1 when the ring has no room and the source waits. */
static int poll_once(fc_rx *rx)
{
    const fc_rx_config *c = &rx->config;
    fc_dump *dump = &rx->dump;
    struct rte_mbuf *mbufs[FC_RX_BURST_MAX];
    uint64_t waiting, room, bytes = 0;
    uint16_t want = wanted(rx), n, kept, taken;

    waiting = dump->ops->reclaim(dump);
    room = dump->ops->room(dump);
    if (c->wait_when_full && room < want) {
        if (room == 0) {
            fc_count(&c->counters->waits, 1);
            return -1;
        }
        want = (uint16_t)room;
    }
    n = rte_eth_rx_burst(c->port, c->queue, mbufs, want);
    if (n == 0) {
        if (waiting == 0) /* release: whoever sees it sees what was published before */
            __atomic_store_n(&rx->empty, rx->empty + 1, __ATOMIC_RELEASE);
        return 0;
    }
    for (uint16_t i = 0; i < n; i++)
        bytes += mbufs[i]->pkt_len;
    fc_count(&c->counters->received, n);
    fc_count(&c->counters->bytes, bytes);
    if (c->stamp)
        dump->config.burst_ns = clock_ns(CLOCK_REALTIME);
    kept = sift(rx, mbufs, n);
    taken = kept <= room ? kept : (uint16_t)room;
    if (taken)
        dump->ops->dump(dump, mbufs, taken);
    if (taken < kept) {
        fc_count(&c->counters->ring_full, (uint64_t)(kept - taken));
        rte_pktmbuf_free_bulk(mbufs + taken, kept - taken);
    }
    return n;
}

static int fail(fc_rx *rx, int error)
{
    rx->error = error;
    return FC_RX_FAILED;
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
        if (rx->config.expected == 0 && now_ns() - nic_read < NIC_COUNTERS_EVERY_NS)
            continue;
        read_nic_counters(rx);
        nic_read = now_ns();
        if (interface_gone(rx))
            return fail(rx, ENODEV);
        if (rx->config.expected == 0)
            continue;
        if (accounted_for(rx))
            return FC_RX_DONE;
        if (now_ns() - progress > stall_ns)
            return FC_RX_STALLED;
    }
    return FC_RX_STOPPED;
}

static int pin(int core)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

/* Waits until what was taken is published, but not for ever for an engine that hangs. */
static int finish_dump(fc_rx *rx)
{
    uint64_t left = UINT64_MAX, now, since = now_ns();

    for (;;) {
        uint64_t waiting = rx->dump.ops->reclaim(&rx->dump);

        if (waiting == 0)
            return 1;
        now = now_ns();
        if (waiting < left) {
            left = waiting;
            since = now;
        } else if (now - since > ENGINE_HANGS_NS) {
            rx->dump.ops->abandon(&rx->dump);
            return 0;
        }
        rte_pause();
    }
}

static void end(fc_rx *rx, int state)
{
    /* State before the ring: a consumer that sees the ring closed may ask why at once. */
    __atomic_store_n(&rx->state, state, __ATOMIC_RELEASE);
    fc_ring_close(rx->config.ring);
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
        if (!finish_dump(rx))
            state = fail(rx, ETIMEDOUT);
        read_nic_counters(rx);
        rte_thread_unregister();
    }
    end(rx, state);
    return NULL;
}

int fc_rx_create(const fc_rx_config *config, fc_rx **out)
{
    const fc_dump_ops *ops = fc_dump_find(config->dump);
    fc_rx *rx;
    int rc;

    if (ops == NULL)
        return -ENOENT;
    if (config->burst == 0 || config->burst > FC_RX_BURST_MAX || config->core >= CPU_SETSIZE
        || config->engine_count > FC_ENGINES_MAX)
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
        .engines = rx->config.engines,
        .engine_count = (uint16_t)config->engine_count,
        .dma_minimum = config->dma_minimum,
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
    } else if (rx->state == FC_RX_NEW || rx->state == FC_RX_RUNNING) {
        int done = finish_dump(rx); /* fc_rx_poll may have left copies under way */

        end(rx, done ? FC_RX_STOPPED : fail(rx, ETIMEDOUT));
    }
}

uint64_t fc_rx_poll(fc_rx *rx, uint64_t bursts)
{
    uint64_t taken = 0;

    if (rx->started || (rx->state != FC_RX_NEW && rx->state != FC_RX_RUNNING))
        return 0;
    rx->state = FC_RX_RUNNING;
    while (bursts--) {
        int n = poll_once(rx);

        if (n <= 0) {
            read_nic_counters(rx);
            break;
        }
        taken += (uint64_t)n;
        if (accounted_for(rx)) {
            read_nic_counters(rx);
            end(rx, finish_dump(rx) ? FC_RX_DONE : fail(rx, ETIMEDOUT));
            break;
        }
    }
    return taken;
}

uint64_t fc_rx_bare(uint16_t port, uint16_t queue, uint16_t burst, uint64_t packets, fc_rx_taker take, void *arg)
{
    struct rte_mbuf *mbufs[FC_RX_BURST_MAX];
    const uint8_t *at[FC_RX_BURST_MAX];
    uint32_t lengths[FC_RX_BURST_MAX];
    uint64_t taken = 0;
    uint16_t n;

    burst = burst < FC_RX_BURST_MAX ? burst : FC_RX_BURST_MAX;
    while (taken < packets && (n = rte_eth_rx_burst(port, queue, mbufs, burst)) != 0) {
        if (take != NULL) {
            for (uint16_t i = 0; i < n; i++) {
                at[i] = rte_pktmbuf_mtod(mbufs[i], const uint8_t *);
                lengths[i] = mbufs[i]->data_len;
            }
            take(arg, at, lengths, n);
        }
        rte_pktmbuf_free_bulk(mbufs, n);
        taken += n;
    }
    return taken;
}

int fc_rx_state(const fc_rx *rx)
{
    return __atomic_load_n(&rx->state, __ATOMIC_ACQUIRE);
}

uint64_t fc_rx_empty(const fc_rx *rx)
{
    return __atomic_load_n(&rx->empty, __ATOMIC_ACQUIRE);
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
