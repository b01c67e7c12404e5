#include "shim.h"

#include <errno.h>
#include <string.h>

#include <rte_dmadev.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_ring.h>
#include <rte_version.h>

#define UDP_RSS (RTE_ETH_RSS_NONFRAG_IPV4_UDP | RTE_ETH_RSS_NONFRAG_IPV6_UDP)
#define IP_RSS (RTE_ETH_RSS_IPV4 | RTE_ETH_RSS_IPV6 | UDP_RSS)
#define RSS_KEY_MAX 64

int fc_rte_errno(void)
{
    return rte_errno;
}

int fc_built_release(void)
{
    return RTE_VER_YEAR * 100 + RTE_VER_MONTH;
}

/* -- ports ------------------------------------------------------------------------------------------- */

int fc_port_facts_get(uint16_t port, fc_port_facts *facts)
{
    struct rte_eth_dev_info dev;
    int rc = rte_eth_dev_info_get(port, &dev);

    if (rc != 0)
        return rc;
    memset(facts, 0, sizeof(*facts));
    facts->max_rx_queues = dev.max_rx_queues;
    facts->max_mtu = dev.max_mtu;
    facts->socket = rte_eth_dev_socket_id(port);
    facts->scatter = (dev.rx_offload_capa & RTE_ETH_RX_OFFLOAD_SCATTER) != 0;
    facts->rx_timestamp = (dev.rx_offload_capa & RTE_ETH_RX_OFFLOAD_TIMESTAMP) != 0;
    facts->ip_checksum = (dev.rx_offload_capa & RTE_ETH_RX_OFFLOAD_IPV4_CKSUM) != 0;
    facts->rss = (dev.flow_type_rss_offloads & UDP_RSS) != 0;
    facts->rss_source_port = (dev.flow_type_rss_offloads & RTE_ETH_RSS_L4_SRC_ONLY) != 0;
    facts->rss_functions = dev.flow_type_rss_offloads;
    facts->driver = dev.driver_name;
    return rte_eth_dev_get_mtu(port, &facts->mtu);
}

static int paired(const struct rte_eth_dev_info *dev)
{
    return strcmp(dev->driver_name, "net_af_xdp") == 0;
}

int fc_port_configure(uint16_t port, uint16_t rx_queues, uint16_t mtu, int rss)
{
    /* Every second byte pair equal: swapping source and destination leaves the Toeplitz hash as it is. */
    static uint8_t symmetric[RSS_KEY_MAX];
    struct rte_eth_conf conf;
    struct rte_eth_dev_info dev;
    int rc = rte_eth_dev_info_get(port, &dev);

    if (rc != 0)
        return rc;
    memset(&conf, 0, sizeof(conf));
    if (mtu != 0)
        conf.rxmode.mtu = mtu;
    conf.rxmode.offloads = dev.rx_offload_capa & (RTE_ETH_RX_OFFLOAD_SCATTER | RTE_ETH_RX_OFFLOAD_IPV4_CKSUM);
    if (rx_queues > 1 && rss != FC_RSS_NONE && dev.flow_type_rss_offloads != 0) {
        for (int i = 0; i < RSS_KEY_MAX; i += 2)
            symmetric[i] = 0x6d, symmetric[i + 1] = 0x5a;
        conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
        conf.rx_adv_conf.rss_conf.rss_key = symmetric;
        conf.rx_adv_conf.rss_conf.rss_key_len =
            dev.hash_key_size != 0 && dev.hash_key_size <= RSS_KEY_MAX ? dev.hash_key_size : 40;
        conf.rx_adv_conf.rss_conf.rss_hf = dev.flow_type_rss_offloads & IP_RSS;
        if (rss == FC_RSS_SOURCE_PORT)
            conf.rx_adv_conf.rss_conf.rss_hf =
                dev.flow_type_rss_offloads & (UDP_RSS | RTE_ETH_RSS_L4_SRC_ONLY);
        else if (dev.flow_type_rss_offloads & RTE_ETH_RSS_L3_SRC_ONLY)
            conf.rx_adv_conf.rss_conf.rss_hf &= ~(uint64_t)UDP_RSS;
    }
    /* net_af_xdp alone takes queues in pairs only; nobody ever calls its tx burst. */
    return rte_eth_dev_configure(port, rx_queues, paired(&dev) ? rx_queues : 0, &conf);
}

int fc_port_rx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, struct rte_mempool *pool)
{
    struct rte_eth_dev_info dev;
    uint16_t tx = descriptors;
    int rc = rte_eth_dev_adjust_nb_rx_tx_desc(port, &descriptors, &tx);

    if (rc == 0)
        rc = rte_eth_dev_info_get(port, &dev);
    if (rc == 0 && paired(&dev))
        rc = rte_eth_tx_queue_setup(port, queue, tx, (unsigned)rte_eth_dev_socket_id(port), NULL);
    if (rc != 0)
        return rc;
    return rte_eth_rx_queue_setup(port, queue, descriptors, (unsigned)rte_eth_dev_socket_id(port), NULL, pool);
}

uint16_t fc_port_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t count)
{
    return rte_eth_rx_burst(port, queue, mbufs, count);
}

/* -- packet buffers and rings ------------------------------------------------------------------------- */

struct rte_mbuf *fc_mbuf_alloc(struct rte_mempool *pool)
{
    return rte_pktmbuf_alloc(pool);
}

void fc_mbuf_free(struct rte_mbuf *mbuf)
{
    rte_pktmbuf_free(mbuf);
}

int fc_mbuf_fill(struct rte_mbuf *mbuf, const void *data, uint32_t length)
{
    char *to;

    rte_pktmbuf_reset(mbuf);
    if (length > UINT16_MAX)
        return -EMSGSIZE;
    to = rte_pktmbuf_append(mbuf, (uint16_t)length);
    if (to == NULL)
        return -EMSGSIZE;
    memcpy(to, data, length);
    return 0;
}

uint32_t fc_mbuf_length(const struct rte_mbuf *mbuf)
{
    return mbuf->pkt_len;
}

uint32_t fc_mbuf_segments(const struct rte_mbuf *mbuf)
{
    return mbuf->nb_segs;
}

void fc_mbuf_read(const struct rte_mbuf *mbuf, void *to)
{
    uint8_t *at = to;

    for (const struct rte_mbuf *m = mbuf; m != NULL; m = m->next) {
        memcpy(at, rte_pktmbuf_mtod(m, const void *), m->data_len);
        at += m->data_len;
    }
}

unsigned int fc_ring_put(struct rte_ring *ring, void **objects, unsigned int count)
{
    return rte_ring_enqueue_burst(ring, objects, count, NULL);
}

unsigned int fc_ring_get(struct rte_ring *ring, void **objects, unsigned int count)
{
    return rte_ring_dequeue_burst(ring, objects, count, NULL);
}

/* -- DMA engines -------------------------------------------------------------------------------------- */

int fc_dma_facts_get(int16_t device, fc_dma_facts *facts)
{
    struct rte_dma_info info;
    int rc = rte_dma_info_get(device, &info);

    if (rc != 0)
        return rc;
    facts->max_channels = info.max_vchans;
    facts->min_depth = info.min_desc;
    facts->max_depth = info.max_desc;
    facts->copies = (info.dev_capa & RTE_DMA_CAPA_MEM_TO_MEM) != 0 && (info.dev_capa & RTE_DMA_CAPA_OPS_COPY) != 0;
    facts->any_address = (info.dev_capa & RTE_DMA_CAPA_SVA) != 0;
    facts->socket = info.numa_node;
    return 0;
}

int fc_dma_open(int16_t device, uint16_t depth)
{
    const struct rte_dma_conf conf = {.nb_vchans = 1};
    const struct rte_dma_vchan_conf channel = {.direction = RTE_DMA_DIR_MEM_TO_MEM, .nb_desc = depth};
    int rc = rte_dma_configure(device, &conf);

    if (rc == 0)
        rc = rte_dma_vchan_setup(device, 0, &channel);
    if (rc == 0)
        rc = rte_dma_start(device);
    return rc;
}

int fc_dma_copy(int16_t device, const void *from, void *to, uint32_t length)
{
    return rte_dma_copy(device, 0, (rte_iova_t)(uintptr_t)from, (rte_iova_t)(uintptr_t)to, length, 0);
}

int fc_dma_submit(int16_t device)
{
    return rte_dma_submit(device, 0);
}

uint16_t fc_dma_completed(int16_t device, uint16_t most, int *failed)
{
    uint16_t last;
    bool error = false;
    uint16_t n = rte_dma_completed(device, 0, most, &last, &error);

    *failed = error;
    return n;
}

uint16_t fc_dma_capacity(int16_t device)
{
    return rte_dma_burst_capacity(device, 0);
}
