typedef struct fc_dma_facts {
    uint16_t max_channels;
    uint16_t min_depth;
    uint16_t max_depth;
    int copies;
    int any_address;
    int socket;
} fc_dma_facts;

int rte_dma_get_dev_id_by_name(const char *name);
int rte_dma_stop(int16_t dev_id);
int rte_dma_close(int16_t dev_id);
int fc_dma_facts_get(int16_t device, fc_dma_facts *facts);
int fc_dma_open(int16_t device, uint16_t depth);
int fc_dma_copy(int16_t device, const void *from, void *to, uint32_t length);
int fc_dma_submit(int16_t device);
uint16_t fc_dma_completed(int16_t device, uint16_t most, int *failed);
uint16_t fc_dma_capacity(int16_t device);
