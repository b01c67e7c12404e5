/* The progress engine: one thread per address that owns an AF_PACKET socket, RC queue pairs, NCCL's connections
 * over them and the collectives that run on those.
 *
 *   wire.c    frames                         codec.c   payloads, sums
 *   qp.c      RC queue pairs: requester with go-back-N, responder with ACK and NAK
 *   lanes.c   connections (slots, CTS, steps) and operations (primitives on lanes)
 *   engine.c  socket, thread, lock, timers
 *
 * Legal order:  sr_open, then any of
 *     sr_communicator; sr_connection (local half: QPs and buffers), sr_connect (the peer's half); sr_lane;
 *     sr_submit any number of times; sr_finished in one thread; sr_drain; sr_close.
 * Every function locks; any thread may call any of them except sr_close, which must be the last call. What a plan
 * and an operation point to (primitives, input, output) stays valid until sr_finished names the operation.
 *
 * Within a lane operations run strictly one after the other, as NCCL's channels do; lanes run independently.
 * Source: reference nccl-wire.md 2.7, 4.4, 5.1 to 5.8. */
#ifndef SR_ENGINE_H
#define SR_ENGINE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sendmmsg, recvmmsg */
#endif
#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>

#include "sr_codec.h"
#include "sr_wire.h"

enum {
    SR_STEPS = 8, SR_FIFO_SLOTS = 256, SR_WQES = 256, SR_MAX_QPS = 8, SR_MAX_FAN = 3, SR_BATCH = 64,
    SR_FRAME_BYTES = 9216, SR_IMMEDIATES = 64, SR_TEXT = 240,
};

/* -- what the caller gives ------------------------------------------------------------------------------- */

struct sr_cts_form { /* offsets and widths of a CTS element; addr is at 0 (nccl-wire.md 5.4) */
    uint32_t bytes, size_at, size_width, rkey_at, nreqs_at, tag_at, idx_at;
};

struct sr_settings { /* of one communicator */
    uint32_t mtu, qps, split_on_qps, adaptive_routing, ar_threshold, big_endian_imm;
    uint32_t slot[SR_PROTOCOLS]; /* bytes of a step's slot */
    struct sr_cts_form cts;
    uint64_t peer_timeout_ns; /* without any progress: the operation fails */
};

struct sr_primitive { /* one message in, one out, or both; numpy sees the same layout (primitives.py) */
    uint64_t input, output; /* byte offsets */
    uint32_t bytes;
    uint32_t flags; /* SR_USE_INPUT | SR_STORE */
    int32_t receive[SR_MAX_FAN], send[SR_MAX_FAN]; /* connections, -1: none */
};
enum { SR_USE_INPUT = 1, SR_STORE = 2 };

struct sr_use { /* a connection that an operation uses on a lane */
    int32_t connection;
    uint32_t messages; /* that it receives; 0 on an outbound connection */
};

struct sr_part { /* an operation's share of one lane: primitives of up to two strands that advance independently */
    int32_t lane;
    uint32_t start[2], count[2]; /* in the plan's primitives */
    uint32_t first_use, uses;
};

struct sr_plan {
    const struct sr_primitive *primitives;
    const struct sr_use *uses;
    const struct sr_part *parts;
    uint32_t part_count;
    uint32_t protocol, dtype;
    uint32_t steps;    /* of one message */
    uint32_t round_to; /* the step is rounded up to it when the operation begins (2.7) */
    uint32_t posted;   /* bytes that the receiver announces */
};

/* One side of a connection, for the peer's handshake. */
struct sr_side {
    uint32_t qpns[SR_MAX_QPS];
    uint64_t fifo; /* sender: its CTS FIFO; receiver: its size FIFO, which nothing writes */
    uint32_t fifo_rkey;
};

struct sr_counters {
    uint64_t sent, received, retransmitted, timeouts, naks_sent, naks_received, damaged, duplicates, out_of_order, strangers;
};

/* -- inside ----------------------------------------------------------------------------------------------- */

struct sr_region { uint64_t base, length; uint32_t rkey; };

struct sr_wqe {
    uint64_t first_psn, address;
    const uint8_t *data;
    uint32_t packets, length, rkey, immediate;
    uint8_t has_immediate, signalled;
};

struct sr_connection;

struct sr_qp {
    uint32_t qpn, remote_qpn, peer_address;
    uint8_t ready;
    struct sr_connection *connection;
    struct sr_path path;
    /* requester; packet numbers do not wrap here */
    struct sr_wqe queue[SR_WQES];
    uint64_t oldest, newest;   /* work requests [oldest, newest) are not acknowledged */
    uint64_t unacked, next, sent, posted; /* unacked <= next <= sent <= posted */
    uint64_t sending; /* work request that holds `next` */
    uint64_t deadline, heard; /* ns; 0: nothing outstanding */
    uint32_t retries;
    /* responder */
    uint64_t expected, completed;
    uint8_t *write_at;
    uint64_t write_left;
    uint8_t nak_sent;
    uint64_t immediates;
    uint32_t immediate[SR_IMMEDIATES];
};

struct sr_connection {
    struct sr_communicator *communicator;
    int outbound;
    uint32_t sender, receiver, channel; /* ranks */
    struct sr_qp *qp[SR_MAX_QPS];
    uint8_t *buffer[SR_PROTOCOLS]; /* 8 slots each, made when first used */
    uint32_t rkey[SR_PROTOCOLS];
    uint64_t step, messages; /* sent, or received and consumed */
    /* outbound */
    uint8_t *fifo;
    uint64_t slot_psn[SR_STEPS][SR_MAX_QPS]; /* the slot is free when each QP has this acknowledged */
    /* inbound */
    uint8_t *elements; /* of CTS writes under way */
    uint64_t peer_fifo, announced_step, announced, announce_until;
    uint32_t peer_fifo_rkey;
};

struct sr_communicator {
    struct sr_settings settings;
    char error[SR_TEXT];
};

struct sr_operation {
    uint64_t id, progress_ns;
    struct sr_communicator *communicator;
    struct sr_plan plan;
    const uint8_t *input;
    uint8_t *output;
    uint32_t left; /* parts */
    struct sr_item *items;
    struct sr_operation *next;
};

struct sr_item {
    struct sr_operation *operation;
    struct sr_part part;
    uint32_t done[2];
    int begun;
    struct sr_item *next;
};

struct sr_lane { struct sr_item *first, *last; };

struct sr_engine {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation is finished, or the engine stops */
    pthread_cond_t quiet;   /* a round is over; sr_drain looks again */
    pthread_t thread;
    int socket, wake, running, stop, sleeping, drainers;
    uint32_t address, window;
    uint64_t retransmit_ns;
    uint8_t mac[6], traffic_class;
    uint32_t first_qpn, random;
    struct sr_qp **qps;
    struct sr_connection **connections;
    struct sr_communicator **communicators;
    struct sr_lane *lanes;
    struct sr_region *regions;
    uint32_t qp_count, connection_count, communicator_count, lane_count, region_count;
    struct sr_operation *operations, **operations_end, *finished, **finished_end;
    uint64_t next_id;
    uint8_t *scratch[2];
    uint64_t scratch_bytes;
    struct sr_counters counters;
    struct sr_frame frames[SR_BATCH];
    struct mmsghdr out[SR_BATCH], in[SR_BATCH];
    struct iovec out_pieces[SR_BATCH][3], in_pieces[SR_BATCH];
    uint8_t (*received)[SR_FRAME_BYTES];
    uint32_t queued;
    char error[SR_TEXT];
};

/* -- engine.c: the caller's functions ------------------------------------------------------------------------- */

/* `socket`: AF_PACKET, bound to the interface, filtered to UDP 4791 of `address`; the engine owns it from here on.
 * 0, or -1 with errno. */
int sr_open(struct sr_engine *e, int socket, uint32_t address, const uint8_t *mac, uint8_t traffic_class,
            uint32_t window, uint64_t retransmit_ns, uint32_t seed);
int sr_communicator(struct sr_engine *e, const struct sr_settings *settings); /* its number, -1: no memory */
int sr_connection(struct sr_engine *e, int communicator, int outbound, uint32_t sender, uint32_t receiver,
                  uint32_t channel, struct sr_side *local); /* its number, -1: no memory */
void sr_connect(struct sr_engine *e, int connection, const struct sr_side *remote, uint32_t address, const uint8_t *mac);
int sr_lane(struct sr_engine *e); /* its number, -1: no memory */
/* The operation's number (from 1), 0: no memory. */
uint64_t sr_submit(struct sr_engine *e, int communicator, const struct sr_plan *plan, const void *input, void *output);
/* Wait until an operation is finished; its number, `error` empty or why it failed. 0: the engine is closing. */
uint64_t sr_finished(struct sr_engine *e, char error[SR_TEXT]);
/* Wait until everything sent on a communicator is acknowledged: 0, or -1 after `limit_ns` or its failure. */
int sr_drain(struct sr_engine *e, int communicator, uint64_t limit_ns);
void sr_abort(struct sr_engine *e, int communicator, const char *why); /* fail everything of a communicator */
void sr_stop(struct sr_engine *e);  /* end the thread, release waiters in sr_finished */
void sr_close(struct sr_engine *e); /* free everything; after sr_stop, with no other caller left */
struct sr_counters sr_counted(struct sr_engine *e);

/* -- between the parts; the lock is held ------------------------------------------------------------------------ */

uint64_t sr_now(void);
struct sr_frame *sr_queue_frame(struct sr_engine *e);
void sr_flush(struct sr_engine *e);
void sr_fail(struct sr_engine *e, struct sr_communicator *c, const char *form, ...)
    __attribute__((format(printf, 3, 4)));
uint32_t sr_register(struct sr_engine *e, const void *base, uint64_t length); /* rkey; 0: no memory */

/* qp.c */
int sr_qp_room(const struct sr_qp *qp, uint32_t requests);
void sr_qp_post(struct sr_qp *qp, uint32_t mtu, const struct sr_wqe *request); /* first_psn, packets are filled in */
void sr_qp_transmit(struct sr_engine *e, struct sr_qp *qp, uint64_t now);
void sr_qp_receive(struct sr_engine *e, struct sr_qp *qp, const struct sr_packet *packet, uint64_t now);
void sr_qp_timer(struct sr_engine *e, struct sr_qp *qp, uint64_t now);

/* lanes.c */
int sr_lane_progress(struct sr_engine *e, struct sr_lane *lane, uint64_t now); /* 1: something moved */
void sr_stalled(struct sr_engine *e, struct sr_operation *operation, uint64_t now);
void sr_complete(struct sr_engine *e, struct sr_operation *operation);

#endif
