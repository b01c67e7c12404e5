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
uint64_t fc_reader_discard(fc_ring *ring, uint64_t want);
uint64_t fc_reader_take(fc_ring *ring, fc_packetref *refs, uint64_t want, uint8_t *bytes, uint64_t capacity);

typedef struct fc_rx_counters {
    uint64_t received;
    uint64_t bytes;
    uint64_t published;
    uint64_t ring_full;
    uint64_t oversize;
    uint64_t not_roce;
    uint64_t bad_checksum;
    uint64_t unfinished;
    uint64_t truncated;
    uint64_t nic_missed;
    uint64_t errors;
    uint64_t no_mbuf;
    uint64_t kernel_ring_full;
    uint64_t kernel_seen;
    uint64_t waits;
    uint64_t dma_pieces;
    uint64_t cpu_pieces;
    uint64_t dma_errors;
} fc_rx_counters;

typedef struct fc_block {
    void *base;
    uint64_t bytes;
    uint64_t mapped;
    const void *zone;
    int external;
    fc_rx_counters *counters;
    fc_ring *ring;
    uint8_t *slots;
    uint32_t slot_size;
} fc_block;

uint64_t fc_block_bytes(uint64_t ring_size, uint32_t slot_size);
int fc_block_create(fc_block *block, const char *name, uint64_t ring_size, uint32_t slot_size, int huge, int socket);
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

#define FC_ENGINES_MAX ...

typedef struct fc_dump_engine {
    int16_t device;
    uint16_t channel;
    uint16_t depth;
} fc_dump_engine;

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
    uint32_t roce_only;
    uint32_t stamp;
    int32_t packet_socket;
    int32_t bound_socket;
    uint32_t engine_count;
    uint32_t dma_minimum;
    fc_dump_engine engines[...];
} fc_rx_config;

typedef struct fc_rx fc_rx;

int fc_rx_create(const fc_rx_config *config, fc_rx **out);
int fc_rx_start(fc_rx *rx);
void fc_rx_stop(fc_rx *rx);
uint64_t fc_rx_poll(fc_rx *rx, uint64_t bursts);
typedef void (*fc_rx_taker)(void *arg, const uint8_t *const *packets, const uint32_t *lengths, uint16_t n);
uint64_t fc_rx_bare(uint16_t port, uint16_t queue, uint16_t burst, uint64_t packets, fc_rx_taker take, void *arg);
int fc_rx_state(const fc_rx *rx);
int fc_rx_error(const fc_rx *rx);
uint64_t fc_rx_empty(const fc_rx *rx);
void fc_rx_destroy(fc_rx *rx);
