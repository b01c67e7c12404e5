struct rte_mempool;

struct rte_mempool *rte_pktmbuf_pool_create(const char *name, unsigned int n, unsigned int cache_size,
                                            uint16_t priv_size, uint16_t data_room_size, int socket_id);
unsigned int rte_mempool_avail_count(const struct rte_mempool *mp);
unsigned int rte_mempool_in_use_count(const struct rte_mempool *mp);
void rte_mempool_free(struct rte_mempool *mp);

struct rte_mbuf;

struct rte_mbuf *fc_mbuf_alloc(struct rte_mempool *pool);
void fc_mbuf_free(struct rte_mbuf *mbuf);
int fc_mbuf_fill(struct rte_mbuf *mbuf, const void *data, uint32_t length);
uint32_t fc_mbuf_length(const struct rte_mbuf *mbuf);
uint32_t fc_mbuf_segments(const struct rte_mbuf *mbuf);
void fc_mbuf_read(const struct rte_mbuf *mbuf, void *to);
