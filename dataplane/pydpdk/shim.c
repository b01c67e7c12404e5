#include "shim.h"

#include <string.h>

#include <rte_errno.h>
#include <rte_ethdev.h>

int fc_rte_errno(void)
{
    return rte_errno;
}

int fc_port_configure(uint16_t port, uint16_t rx_queues, uint16_t mtu)
{
    struct rte_eth_conf conf;
    struct rte_eth_dev_info dev;
    int rc = rte_eth_dev_info_get(port, &dev);

    if (rc != 0)
        return rc;
    memset(&conf, 0, sizeof(conf));
    if (mtu != 0)
        conf.rxmode.mtu = mtu;
    conf.rxmode.offloads = dev.rx_offload_capa & RTE_ETH_RX_OFFLOAD_SCATTER;
    return rte_eth_dev_configure(port, rx_queues, 0, &conf);
}

int fc_port_rx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, struct rte_mempool *pool)
{
    uint16_t tx = 1;
    int rc = rte_eth_dev_adjust_nb_rx_tx_desc(port, &descriptors, &tx);

    if (rc != 0)
        return rc;
    return rte_eth_rx_queue_setup(port, queue, descriptors, (unsigned)rte_eth_dev_socket_id(port), NULL, pool);
}
