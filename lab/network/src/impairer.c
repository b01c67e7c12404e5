#define _GNU_SOURCE
#include "impairer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64
#define LOG_RECORDS 2048
#define IDLE_MS 20         /* nothing came for so long: what waits to be overtaken leaves, the log is written */
#define RECEIVE_BYTES (64 << 20)
#ifndef PACKET_IGNORE_OUTGOING
#define PACKET_IGNORE_OUTGOING 23
#endif

typedef struct {
    fc_impair_record records[LOG_RECORDS];
    uint32_t used;
    int file, error;
} event_log;

typedef struct {
    uint8_t frames[BATCH][FC_IMPAIR_FRAME];
    struct iovec in[BATCH], out[2 * BATCH + FC_IMPAIR_HELD];
    struct mmsghdr received[BATCH], sending[2 * BATCH + FC_IMPAIR_HELD];
    uint32_t queued;
} packet_batch;

/* -- sockets --------------------------------------------------------------------------------------------------- */

static int open_socket(const char *name, int receive) {
    /* protocol 0: a socket that only sends must not collect everything it could hear */
    int s = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    if (s < 0) return -errno;
    int index = (int)if_nametoindex(name), bytes = RECEIVE_BYTES, one = 1;
    struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_ifindex = index,
                             .sll_protocol = receive ? htons(ETH_P_ALL) : 0};
    struct packet_mreq promiscuous = {.mr_ifindex = index, .mr_type = PACKET_MR_PROMISC};
    if (index == 0) goto fail;
    if (receive) {
        if (setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes)) goto fail;
        if (setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one)) goto fail;
        if (setsockopt(s, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &promiscuous, sizeof promiscuous)) goto fail;
    }
    if (bind(s, (struct sockaddr *)&at, sizeof at)) goto fail;
    return s;
fail:;
    int error = errno ? errno : ENODEV;
    close(s);
    return -error;
}

int fc_impair_open(fc_impair_way *way, const char *from, const char *to) {
    way->tx = open_socket(to, 0);
    if (way->tx < 0) return way->tx;
    way->rx = open_socket(from, 1);
    if (way->rx >= 0) return 0;
    close(way->tx);
    return way->rx;
}

void fc_impair_close(fc_impair_way *way) {
    close(way->rx);
    close(way->tx);
}

/* -- the log ---------------------------------------------------------------------------------------------------- */

static void flush_log(event_log *log) {
    const uint8_t *from = (const uint8_t *)log->records;
    size_t left = log->used * sizeof log->records[0];
    while (left) {
        ssize_t n = write(log->file, from, left);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            log->error = -errno;
            break;
        }
        from += n;
        left -= (size_t)n;
    }
    log->used = 0;
}

/* The frame's place in RoCEv2 over IPv4 over Ethernet: offset of the BTH, or 0. */
static uint32_t bth_of(const uint8_t *frame, uint32_t length) {
    if (length < 14 + 20 + 8 + 12 || frame[12] != 0x08 || frame[13] != 0x00 || frame[14] >> 4 != 4) return 0;
    uint32_t ip = (frame[14] & 15u) * 4;
    if (frame[23] != 17 || length < 14 + ip + 8 + 12) return 0;
    const uint8_t *udp = frame + 14 + ip;
    return (udp[2] << 8 | udp[3]) == 4791 ? 14 + ip + 8 : 0;
}

static uint32_t be32(const uint8_t *p) { return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3]; }

static void record(event_log *log, fc_impair_way *way, int what, const uint8_t *frame, uint32_t length, uint32_t bth,
                   uint32_t at, uint32_t bit) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    log->records[log->used++] = (fc_impair_record){
        .ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec,
        .src = be32(frame + 26), .dst = be32(frame + 30),
        .qpn = be32(frame + bth + 4) & 0xffffff, .psn = be32(frame + bth + 8) & 0xffffff,
        .length = (uint16_t)length, .at = (uint16_t)at,
        .opcode = frame[bth], .what = (uint8_t)what, .way = way->index, .bit = (uint8_t)bit,
    };
    if (log->used == LOG_RECORDS) flush_log(log);
}

/* -- what happens to a packet ------------------------------------------------------------------------------------ */

static uint32_t draw(fc_impair_way *way) { /* splitmix64 */
    uint64_t z = way->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}

static void queue(packet_batch *batch, uint8_t *frame, uint32_t length) {
    batch->out[batch->queued] = (struct iovec){frame, length};
    memset(&batch->sending[batch->queued], 0, sizeof batch->sending[0]);
    batch->sending[batch->queued].msg_hdr.msg_iov = &batch->out[batch->queued];
    batch->sending[batch->queued].msg_hdr.msg_iovlen = 1;
    batch->queued++;
}

static void send_queued(fc_impair_way *way, packet_batch *batch) {
    uint32_t done = 0;
    while (done < batch->queued) {
        int n = sendmmsg(way->tx, batch->sending + done, batch->queued - done, 0);
        if (n > 0) {
            done += (uint32_t)n;
            way->counts.sent += (uint32_t)n;
        } else if (errno == ENOBUFS || errno == EAGAIN) { /* a rate limit downstream: wait for room */
            struct pollfd room = {.fd = way->tx, .events = POLLOUT};
            poll(&room, 1, 1);
        } else if (errno != EINTR) { /* ENETDOWN, EMSGSIZE: this one cannot leave */
            done++;
            way->counts.lost++;
        }
    }
    batch->queued = 0;
}

/* A frame has passed: those that it overtook are one nearer to leaving. They are sent at once: their places may be
 * taken by the next frame that is held. */
static void overtaken(fc_impair_way *way, packet_batch *batch, int all) {
    uint32_t left = 0;
    for (int i = 0; way->holding && i < FC_IMPAIR_HELD; i++) {
        if (way->held[i].left && (all || --way->held[i].left == 0)) {
            way->held[i].left = 0;
            way->holding--;
            queue(batch, way->held[i].frame, way->held[i].length);
            left++;
        }
    }
    if (left) send_queued(way, batch);
}

static int hold(fc_impair_way *way, const uint8_t *frame, uint32_t length) {
    for (int i = 0; i < FC_IMPAIR_HELD; i++) {
        if (way->held[i].left == 0) {
            memcpy(way->held[i].frame, frame, length);
            way->held[i].length = length;
            way->held[i].left = way->distance;
            way->holding++;
            return 1;
        }
    }
    return 0;
}

static void carry(fc_impair_way *way, packet_batch *batch, event_log *log, uint8_t *frame, uint32_t length) {
    uint32_t bth = bth_of(frame, length);
    way->counts.received++;
    if (*way->down) {
        way->counts.down++;
        if (bth) record(log, way, FC_DOWN, frame, length, bth, 0, 0);
        return;
    }
    if (bth == 0) {
        queue(batch, frame, length);
        return;
    }
    /* Always the same number of draws per packet: one rate does not shift the others' decisions. */
    uint32_t drop = draw(way), corrupt = draw(way), duplicate = draw(way), reorder = draw(way), where = draw(way);
    if (drop < way->drop) {
        way->counts.dropped++;
        record(log, way, FC_DROPPED, frame, length, bth, 0, 0);
        return;
    }
    if (reorder < way->reorder && hold(way, frame, length)) {
        way->counts.moved++;
        record(log, way, FC_MOVED, frame, length, bth, way->distance, 0);
        return;
    }
    if (corrupt < way->corrupt) {
        uint32_t at = bth + where % (length - bth), bit = where >> 29;
        record(log, way, FC_DAMAGED, frame, length, bth, at, bit); /* before: the log names the packet that it was */
        frame[at] ^= (uint8_t)(1u << bit);
        way->counts.damaged++;
    } else if (way->trace) {
        record(log, way, FC_PASSED, frame, length, bth, 0, 0);
    }
    queue(batch, frame, length);
    if (duplicate < way->duplicate) {
        way->counts.doubled++;
        record(log, way, FC_DOUBLED, frame, length, bth, 0, 0);
        queue(batch, frame, length);
    }
    overtaken(way, batch, 0);
}

static void collect(fc_impair_way *way, packet_batch *batch, event_log *log) {
    for (int i = 0; i < BATCH; i++) {
        batch->in[i] = (struct iovec){batch->frames[i], FC_IMPAIR_FRAME};
        memset(&batch->received[i], 0, sizeof batch->received[i]);
        batch->received[i].msg_hdr.msg_iov = &batch->in[i];
        batch->received[i].msg_hdr.msg_iovlen = 1;
    }
    int n = recvmmsg(way->rx, batch->received, BATCH, MSG_DONTWAIT, NULL);
    for (int i = 0; i < n; i++) {
        if (batch->received[i].msg_hdr.msg_flags & MSG_TRUNC) {
            way->counts.lost++; /* larger than any frame of the lab */
            continue;
        }
        carry(way, batch, log, batch->frames[i], batch->received[i].msg_len);
        if (batch->queued > 2 * BATCH - 2) send_queued(way, batch);
    }
    send_queued(way, batch);
}

static void count_lost(fc_impair_way *way) { /* PACKET_STATISTICS: reading sets them to zero */
    struct tpacket_stats stats;
    socklen_t size = sizeof stats;
    if (getsockopt(way->rx, SOL_PACKET, PACKET_STATISTICS, &stats, &size) == 0) way->counts.lost += stats.tp_drops;
}

int fc_impair_run(fc_impair_way *ways, int count, int file, const volatile int *stop) {
    static packet_batch batch; /* 600 KB: too large for the stack; one impairer per process */
    static event_log log;
    struct pollfd ready[64];
    if (count > 64) return -EINVAL;
    log.file = file;
    for (int i = 0; i < count; i++) ready[i] = (struct pollfd){.fd = ways[i].rx, .events = POLLIN};
    while (!*stop && !log.error) {
        int n = poll(ready, (nfds_t)count, IDLE_MS);
        if (n < 0 && errno != EINTR) return -errno;
        if (n <= 0) flush_log(&log);
        for (int i = 0; i < count; i++) {
            if (n > 0 && ready[i].revents & POLLIN) {
                collect(&ways[i], &batch, &log);
            } else if (n == 0 && ways[i].holding) { /* nobody comes to overtake */
                overtaken(&ways[i], &batch, 1);
            }
        }
    }
    for (int i = 0; i < count; i++) {
        overtaken(&ways[i], &batch, 1);
        count_lost(&ways[i]);
    }
    flush_log(&log);
    return log.error;
}
