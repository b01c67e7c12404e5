struct rte_ring;

#define RING_F_SP_ENQ ...
#define RING_F_SC_DEQ ...

struct rte_ring *rte_ring_create(const char *name, unsigned int count, int socket_id, unsigned int flags);
struct rte_ring *rte_ring_lookup(const char *name);
void rte_ring_free(struct rte_ring *r);
unsigned int rte_ring_count(const struct rte_ring *r);
unsigned int rte_ring_get_capacity(const struct rte_ring *r);
unsigned int fc_ring_put(struct rte_ring *ring, void **objects, unsigned int count);
unsigned int fc_ring_get(struct rte_ring *ring, void **objects, unsigned int count);
