struct rte_eth_stats {
    uint64_t ipackets;
    uint64_t ibytes;
    uint64_t imissed;
    uint64_t ierrors;
    uint64_t rx_nombuf;
    ...;
};

typedef struct fc_port_facts {
    uint16_t max_rx_queues;
    uint16_t max_mtu;
    uint16_t mtu;
    int socket;
    int scatter;
    int rx_timestamp;
    int ip_checksum;
    int rss;
    int rss_source_port;
    uint64_t rss_functions;
    const char *driver;
} fc_port_facts;

enum fc_rss {
    FC_RSS_NONE,
    FC_RSS_SOURCE_PORT,
    FC_RSS_ADDRESSES,
    ...
};

int rte_eal_hotplug_add(const char *busname, const char *devname, const char *drvargs);
int rte_eal_hotplug_remove(const char *busname, const char *devname);
int rte_eth_dev_get_port_by_name(const char *name, uint16_t *port_id);
int rte_eth_dev_start(uint16_t port_id);
int rte_eth_dev_stop(uint16_t port_id);
int rte_eth_dev_close(uint16_t port_id);
int rte_eth_promiscuous_enable(uint16_t port_id);
int rte_eth_stats_get(uint16_t port_id, struct rte_eth_stats *stats);
int rte_eth_stats_reset(uint16_t port_id);
int fc_port_facts_get(uint16_t port, fc_port_facts *facts);
int fc_port_configure(uint16_t port, uint16_t rx_queues, uint16_t mtu, int rss);
int fc_port_rx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, struct rte_mempool *pool);
uint16_t fc_port_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t count);
