struct rte_mempool;

struct rte_mempool *rte_pktmbuf_pool_create(const char *name, unsigned int n, unsigned int cache_size,
                                            uint16_t priv_size, uint16_t data_room_size, int socket_id);
unsigned int rte_mempool_avail_count(const struct rte_mempool *mp);
unsigned int rte_mempool_in_use_count(const struct rte_mempool *mp);
void rte_mempool_free(struct rte_mempool *mp);
