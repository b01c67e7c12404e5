typedef struct fc_packetref {
    const uint8_t *data;
    uint64_t timestamp_ns;
    uint32_t length;
    uint16_t stream;
    uint16_t flags;
} fc_packetref;

typedef struct fc_ring {
    uint64_t mask;
    ...;
} fc_ring;

#define FC_REF_TRUNCATED ...
#define FC_RX_BURST_MAX ...

int fc_ring_drained(fc_ring *r);
uint64_t fc_ring_peek(fc_ring *r, uint64_t want);
uint64_t fc_reader_take(fc_ring *ring, fc_packetref *refs, uint64_t want, uint8_t *bytes, uint64_t capacity);

typedef struct fc_rx_counters {
    uint64_t received;
    uint64_t bytes;
    uint64_t published;
    uint64_t ring_full;
    uint64_t oversize;
    uint64_t truncated;
    uint64_t nic_missed;
    uint64_t errors;
    uint64_t no_mbuf;
    uint64_t waits;
} fc_rx_counters;

typedef struct fc_block {
    void *base;
    uint64_t bytes;
    const void *zone;
    fc_rx_counters *counters;
    fc_ring *ring;
    uint8_t *slots;
    uint32_t slot_size;
} fc_block;

uint64_t fc_block_bytes(uint64_t ring_size, uint32_t slot_size);
int fc_block_create(fc_block *block, const char *name, uint64_t ring_size, uint32_t slot_size, int huge);
void fc_block_destroy(fc_block *block);

enum fc_rx_state {
    FC_RX_NEW,
    FC_RX_RUNNING,
    FC_RX_DONE,
    FC_RX_STOPPED,
    FC_RX_STALLED,
    FC_RX_FAILED,
    ...
};

typedef struct fc_rx_config {
    uint16_t port;
    uint16_t queue;
    uint16_t stream;
    uint16_t burst;
    int32_t core;
    uint32_t wait_when_full;
    uint32_t stall_ms;
    uint64_t expected;
    uint64_t ns_per_tick;
    fc_ring *ring;
    fc_rx_counters *counters;
    uint8_t *slots;
    uint32_t slot_size;
    const char *dump;
} fc_rx_config;

typedef struct fc_rx fc_rx;

int fc_rx_create(const fc_rx_config *config, fc_rx **out);
int fc_rx_start(fc_rx *rx);
void fc_rx_stop(fc_rx *rx);
int fc_rx_state(const fc_rx *rx);
int fc_rx_error(const fc_rx *rx);
void fc_rx_destroy(fc_rx *rx);
