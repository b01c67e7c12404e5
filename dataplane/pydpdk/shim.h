/* DPDK's inline functions, macros and version differences, as functions that cffi can bind. */
#ifndef FLOWCHECK_DPDK_SHIM_H
#define FLOWCHECK_DPDK_SHIM_H

#include <stdint.h>

struct rte_mempool;
struct rte_mbuf;
struct rte_ring;

/* rte_errno is a per-thread lvalue macro. */
int fc_rte_errno(void);

/* Year and month of the release whose headers this was compiled with, year * 100 + month. */
int fc_built_release(void);

/* What a port offers of what a capture can use. */
typedef struct fc_port_facts {
    uint16_t max_rx_queues;
    uint16_t max_mtu;
    uint16_t mtu;
    int socket;              /* NUMA node, -1: any                                             */
    int scatter;             /* frames over several buffers                                    */
    int rx_timestamp;        /* receive times in the mbufs                                     */
    int ip_checksum;         /* tells damaged IP headers                                       */
    int rss;                 /* spreads over queues by UDP/IP                                  */
    int rss_source_port;     /* ... by the source port alone                                   */
    uint64_t rss_functions;  /* as the port names them                                         */
    const char *driver;
} fc_port_facts;

int fc_port_facts_get(uint16_t port, fc_port_facts *facts);

/* How packets spread over queues. Both directions of a connection come to one queue if their UDP source
 * ports are equal, which is how RoCE senders choose them (docs/understand/dataplane.md); by address in any case. */
enum fc_rss {
    FC_RSS_NONE = 0,
    FC_RSS_SOURCE_PORT = 1,
    FC_RSS_ADDRESSES = 2
};

/* Receive-only configuration: mtu 0 leaves the driver's own; scatter and IP checksum are used where
 * offered. No tx queue is set up (net_af_xdp insists on one; it is never given a packet). */
int fc_port_configure(uint16_t port, uint16_t rx_queues, uint16_t mtu, int rss);
int fc_port_rx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, struct rte_mempool *pool);

/* 0, or a negative errno: the frame does not fit into one buffer. */
int fc_mbuf_fill(struct rte_mbuf *mbuf, const void *data, uint32_t length);
uint32_t fc_mbuf_length(const struct rte_mbuf *mbuf);
uint32_t fc_mbuf_segments(const struct rte_mbuf *mbuf);
/* Copies the whole frame out; `to` has room for fc_mbuf_length bytes. */
void fc_mbuf_read(const struct rte_mbuf *mbuf, void *to);
struct rte_mbuf *fc_mbuf_alloc(struct rte_mempool *pool);
void fc_mbuf_free(struct rte_mbuf *mbuf);
uint16_t fc_port_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t count);

unsigned int fc_ring_put(struct rte_ring *ring, void **objects, unsigned int count);
unsigned int fc_ring_get(struct rte_ring *ring, void **objects, unsigned int count);

/* -ENOENT, or the device behind a started dmadev: what its channel can do. */
typedef struct fc_dma_facts {
    uint16_t max_channels;
    uint16_t min_depth;
    uint16_t max_depth;
    int copies;        /* memory to memory                                                     */
    int any_address;   /* takes any address of this process (SVA): no mapping needed           */
    int socket;
} fc_dma_facts;

int fc_dma_facts_get(int16_t device, fc_dma_facts *facts);
/* Configures one memory-to-memory channel of `depth` descriptors and starts the device. */
int fc_dma_open(int16_t device, uint16_t depth);
int fc_dma_copy(int16_t device, const void *from, void *to, uint32_t length);
int fc_dma_submit(int16_t device);
/* Copies completed since the last call; *failed is set when the engine stopped at one. */
uint16_t fc_dma_completed(int16_t device, uint16_t most, int *failed);
uint16_t fc_dma_capacity(int16_t device);

#endif
