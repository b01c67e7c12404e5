/* A network for NCCL on one machine: what a rank's NIC would put on the cable, byte for byte, is what carries its data.
 *
 * A connection is a RoCEv2 queue pair. Its Ethernet frames go through a stream socket between the two processes, in
 * both directions: clear-to-sends, writes with immediate, acknowledgements. Data arrives in the receiver's memory out
 * of these frames and in no other way. Every frame that a rank sends or receives is also written to its mirrored port,
 * a capture file or an interface. No packet is lost here, so there is no retransmission.
 *
 *   FLOWCHECK_NET_RANK     this process's rank, for addresses (10.79.0.10 + rank)
 *   FLOWCHECK_NET_NCCL     NCCL's version, major.minor: form of clear-to-sends, byte order of immediates
 *   FLOWCHECK_NET_PORT     "pcap:FILE" or "interface:NAME"; unset: this rank's port is not mirrored
 *   FLOWCHECK_NET_FLOWS    file to which each connection is added when its first message passes, a JSON line each
 *
 * What goes where: NCCL's src/transport/net_ib.cc (ncclIbPostFifo, ncclIbMultiSend; from 2.29 net_ib/p2p.cc), as
 * reference nccl-wire.md 5.1 to 5.6 has it: one queue pair per connection, no adaptive routing.
 *
 * Threads: NCCL's proxy calls connect, accept and close from one thread, isend, irecv and test of one end from another,
 * never at once for one end. The mirrored port, and numbers that are given out, are shared, and locked. State is global
 * because interface version 10 has nowhere else to keep it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "nccl_net.h"
#include "sr_wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define WARN(...) warn(__LINE__, __VA_ARGS__)
enum {
    MTU = 4096, FRAME = MTU + 128, FIFO_SLOTS = 256, ELEMENT = 64, STRIDE = 8 * ELEMENT, INBOX = 64 * FRAME,
    TEXT = 200, CLOSE_MS = 5000,
};

struct form { uint32_t size_at, size_width, rkey_at, nreqs_at, tag_at, idx_at; }; /* of a clear-to-send; address at 0 */

static struct {
    pthread_mutex_t lock;
    nccl_logger logger;
    struct form form;
    uint32_t rank, numbers;
    int big_endian, mirror; /* packet socket, or -1 */
    FILE *capture, *flows;
} host = {.lock = PTHREAD_MUTEX_INITIALIZER, .mirror = -1};

struct request {
    struct end *end;
    uint64_t until; /* of a send: packets that must be acknowledged */
    uint8_t *at;    /* of a receive: where, how much room, which key */
    uint64_t room;
    uint32_t key, got;
    int used, done;
};

struct hello { uint32_t rank, qpn, fifo_key, zero; uint64_t fifo; };

struct end {
    int socket, outbound, greeted, listed, closed;
    struct hello mine, peer;
    struct sr_path path;
    uint64_t sent, acknowledged, expected, completed; /* packets, messages; they do not wrap here */
    uint64_t messages, finished;                      /* sends or receives asked for; receives that have come */
    struct request requests[NCCL_NET_MAX_REQUESTS];
    uint8_t *write_at; /* of the write under way */
    uint64_t write_left;
    uint8_t *outbox; /* frames that the socket has not taken yet, each after its length */
    size_t out_begin, out_end, out_size;
    uint8_t inbox[INBOX];
    size_t in_end;
    uint8_t fifo[FIFO_SLOTS * STRIDE];
};

struct listener { int socket; struct end *coming; };
struct handle { char name[64]; struct end *coming; };
_Static_assert(sizeof(struct handle) <= NCCL_NET_HANDLE_MAXSIZE, "a handle is too large");

__attribute__((format(printf, 2, 3))) static nccl_result warn(int line, const char *format, ...) {
    char text[TEXT];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    if (host.logger)
        host.logger(NCCL_LOG_WARN, NCCL_SUBSYS_NET, __FILE__, line, "NET/flowcheck: %s", text);
    return NCCL_INTERNAL_ERROR;
}

static uint32_t number(void) {
    pthread_mutex_lock(&host.lock);
    uint32_t n = ++host.numbers;
    pthread_mutex_unlock(&host.lock);
    return n;
}

static uint32_t address(uint32_t rank) { return htonl(0x0A4F000Au + rank); }

/* -- the mirrored port ------------------------------------------------------------------------------------------- */

static int open_port(const char *port) {
    if (!strncmp(port, "pcap:", 5)) {
        const uint32_t head[6] = {0xA1B23C4D, 4 << 16 | 2, 0, 0, FRAME, 1}; /* nanoseconds, Ethernet */
        host.capture = fopen(port + 5, "we");
        return host.capture && fwrite(head, sizeof head, 1, host.capture) == 1 ? 0 : -1;
    }
    if (strncmp(port, "interface:", 10)) {
        errno = EINVAL;
        return -1;
    }
    struct sockaddr_ll to = {.sll_family = AF_PACKET, .sll_ifindex = (int)if_nametoindex(port + 10)};
    host.mirror = to.sll_ifindex ? socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0) : -1; /* 0: it receives nothing */
    return host.mirror >= 0 ? bind(host.mirror, (struct sockaddr *)&to, sizeof to) : -1;
}

/* As a switch copies it: complete and in order. Waits where the interface has no room; a copy that cannot be made is
 * said, because nobody else would know of it. */
static void mirror(const struct iovec *pieces, int count, size_t length) {
    pthread_mutex_lock(&host.lock);
    if (host.capture) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        uint32_t head[4] = {(uint32_t)now.tv_sec, (uint32_t)now.tv_nsec, (uint32_t)length, (uint32_t)length};
        size_t wrote = fwrite(head, sizeof head, 1, host.capture);
        for (int i = 0; i < count; i++)
            wrote += pieces[i].iov_len ? fwrite(pieces[i].iov_base, pieces[i].iov_len, 1, host.capture) : 1;
        if (wrote != (size_t)count + 1)
            WARN("the capture cannot be written: %s", strerror(errno));
    }
    while (host.mirror >= 0 && writev(host.mirror, pieces, count) < 0) {
        struct pollfd room = {.fd = host.mirror, .events = POLLOUT};
        if (errno == ENOBUFS || errno == EAGAIN) {
            poll(&room, 1, 1);
        } else if (errno != EINTR) {
            WARN("the mirrored port cannot be written: %s", strerror(errno));
            break;
        }
    }
    pthread_mutex_unlock(&host.lock);
}

/* The connection in the manifest's form, when its first message passes: NCCL may make some that it never uses. */
static void list(struct end *e) {
    const struct hello *from = e->outbound ? &e->mine : &e->peer, *to = e->outbound ? &e->peer : &e->mine;
    if (e->listed++ || !host.flows)
        return;
    pthread_mutex_lock(&host.lock);
    fprintf(host.flows, "{\"src\": %u, \"dst\": %u, \"src_addr\": \"10.79.0.%u\", \"dst_addr\": \"10.79.0.%u\", "
            "\"qpns\": [%u], \"cts_qpns\": [%u]}\n", from->rank, to->rank, 10 + from->rank, 10 + to->rank,
            to->qpn, from->qpn);
    fflush(host.flows);
    pthread_mutex_unlock(&host.lock);
}

/* -- frames out ---------------------------------------------------------------------------------------------------- */

/* 0, or -1: the peer has gone. */
static int flush(struct end *e) {
    while (e->out_begin < e->out_end) {
        ssize_t n = send(e->socket, e->outbox + e->out_begin, e->out_end - e->out_begin, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0)
            e->out_begin += (size_t)n;
        else if (n < 0 && errno != EINTR)
            return errno == EAGAIN ? 0 : -1;
    }
    e->out_begin = e->out_end = 0;
    return 0;
}

static nccl_result emit(struct end *e, uint8_t opcode, uint64_t psn, int ack, const uint8_t *extension,
                        uint32_t extends, const uint8_t *data, uint32_t length) {
    struct sr_frame f;
    sr_frame_build(&f, &e->path, opcode, e->peer.qpn, (uint32_t)psn, ack, extension, extends, data, length);
    struct iovec pieces[3] = {{f.head, f.head_length}, {(void *)f.data, f.data_length}, {f.tail, f.tail_length}};
    uint16_t whole = (uint16_t)(f.head_length + f.data_length + f.tail_length);
    if (e->out_end + 2 + whole > e->out_size) {
        size_t size = e->out_size * 2 + FRAME;
        uint8_t *more = realloc(e->outbox, size);
        if (!more)
            return WARN("no memory for %zu bytes of frames", size);
        e->outbox = more;
        e->out_size = size;
    }
    uint8_t *to = e->outbox + e->out_end;
    memcpy(to, &whole, 2);
    to += 2;
    for (int i = 0; i < 3; i++) {
        if (pieces[i].iov_len)
            memcpy(to, pieces[i].iov_base, pieces[i].iov_len);
        to += pieces[i].iov_len;
    }
    e->out_end += 2 + whole;
    mirror(pieces, 3, whole);
    return NCCL_SUCCESS;
}

/* One RDMA write, cut into packets: with `immediate` a message's, without one a clear-to-send. */
static nccl_result post_write(struct end *e, uint64_t to, uint32_t key, const uint8_t *data, uint32_t length,
                              int has_immediate) {
    uint32_t packets = length ? (length + MTU - 1) / MTU : 1, immediate = host.big_endian ? htonl(length) : length;
    for (uint32_t i = 0; i < packets; i++) {
        uint32_t at = i * MTU, n = length - at < MTU ? length - at : MTU, used = 0;
        int last = i + 1 == packets;
        uint8_t extension[20], opcode = i ? SR_WRITE_MIDDLE : SR_WRITE_FIRST;
        if (i == 0) {
            sr_put64(extension, to);
            sr_put32(extension + 8, key);
            sr_put32(extension + 12, length);
            used = 16;
        }
        if (last) {
            opcode = has_immediate ? (i ? SR_WRITE_LAST_IMM : SR_WRITE_ONLY_IMM) : i ? SR_WRITE_LAST : SR_WRITE_ONLY;
            if (has_immediate)
                memcpy(extension + used, &immediate, 4);
            used += has_immediate ? 4 : 0;
        }
        nccl_result wrong = emit(e, opcode, e->sent++, last, extension, used, n ? data + at : NULL, n);
        if (wrong)
            return wrong;
    }
    return flush(e) ? WARN("rank %u has gone: %s", e->peer.rank, strerror(errno)) : NCCL_SUCCESS;
}

/* -- frames in ----------------------------------------------------------------------------------------------------- */

/* Words in ascending order, each at once: a GPU that looks at the flag behind the data (LL, LL128) finds the data. */
static void place(uint8_t *to, const uint8_t *from, size_t length) {
    for (; length >= 8 && !((uintptr_t)to & 7); to += 8, from += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        __atomic_store_n((uint64_t *)to, word, __ATOMIC_RELEASE);
    }
    memcpy(to, from, length);
}

/* Where a write may go: a sender's FIFO, a receiver's oldest receive. NULL: nowhere. */
static uint8_t *target(struct end *e, uint64_t to, uint32_t key, uint64_t length) {
    const struct request *r = &e->requests[e->finished % NCCL_NET_MAX_REQUESTS];
    uint8_t *base = e->outbound ? e->fifo : r->at;
    uint64_t room = e->outbound ? sizeof e->fifo : e->finished < e->messages ? r->room : 0;
    if (key != (e->outbound ? e->mine.fifo_key : r->key) || length > room)
        return NULL;
    uint64_t offset = to - (uintptr_t)base;
    return offset <= room - length && (e->outbound || !offset) ? base + offset : NULL;
}

static nccl_result take(struct end *e, const struct sr_packet *p) {
    const uint8_t *after = p->extension;
    int begins = p->opcode == SR_WRITE_FIRST || p->opcode == SR_WRITE_ONLY || p->opcode == SR_WRITE_ONLY_IMM;
    int ends = p->opcode != SR_WRITE_FIRST && p->opcode != SR_WRITE_MIDDLE;
    int immediate = p->opcode == SR_WRITE_LAST_IMM || p->opcode == SR_WRITE_ONLY_IMM;
    if (begins) {
        e->write_left = sr_get32(after + 12);
        e->write_at = target(e, sr_get64(after), sr_get32(after + 8), e->write_left);
        if (!e->write_at)
            return WARN("rank %u writes %llu bytes where it may not", e->peer.rank, (unsigned long long)e->write_left);
        after += 16;
    }
    if (p->length > e->write_left || (ends && p->length != e->write_left))
        return WARN("rank %u: a write of another length than it said", e->peer.rank);
    place(e->write_at, p->payload, p->length);
    e->write_at += p->length;
    e->write_left -= p->length;
    e->completed += ends;
    if (immediate) {
        struct request *r = &e->requests[e->finished++ % NCCL_NET_MAX_REQUESTS];
        memcpy(&r->got, after, 4);
        r->got = host.big_endian ? ntohl(r->got) : r->got;
        r->done = 1;
    }
    if (!p->ack_request)
        return NCCL_SUCCESS;
    uint8_t aeth[4];
    sr_put32(aeth, 0x1Fu << 24 | (uint32_t)(e->completed & 0xFFFFFF));
    return emit(e, SR_ACK, p->psn, 0, aeth, 4, NULL, 0);
}

static nccl_result receive(struct end *e, const uint8_t *frame, uint32_t length) {
    struct sr_packet p;
    const struct iovec whole = {(void *)frame, length};
    if (sr_frame_parse(frame, length, &p) != SR_FRAME_OK || p.qpn != e->mine.qpn)
        return WARN("rank %u sent a frame that is none of this queue pair's", e->peer.rank);
    mirror(&whole, 1, length);
    if (p.opcode == SR_ACK) {
        e->acknowledged += (p.psn + 1 - (uint32_t)e->acknowledged) & 0xFFFFFF;
        return e->acknowledged <= e->sent ? NCCL_SUCCESS : WARN("rank %u acknowledged what was not sent", e->peer.rank);
    }
    if (p.psn != (e->expected++ & 0xFFFFFF))
        return WARN("rank %u left a packet out", e->peer.rank);
    return take(e, &p);
}

/* The peer has closed. It may, once this side has all that it waits for: acknowledgements may still be unsent. */
static nccl_result gone(struct end *e) {
    e->closed = 1;
    int settled = e->outbound ? e->acknowledged == e->sent : e->finished == e->messages;
    return settled ? NCCL_SUCCESS : WARN("rank %u has gone", e->peer.rank);
}

static nccl_result progress(struct end *e) {
    for (;;) {
        flush(e); /* where that fails the rest is read all the same: it may be what this side waits for */
        ssize_t n = recv(e->socket, e->inbox + e->in_end, sizeof e->inbox - e->in_end, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno == ECONNRESET))
            return gone(e);
        if (n < 0)
            return errno == EAGAIN || errno == EINTR ? NCCL_SUCCESS
                                                     : WARN("rank %u: %s", e->peer.rank, strerror(errno));
        e->in_end += (size_t)n;
        size_t at = 0;
        uint16_t length;
        while (e->in_end - at >= 2 && (memcpy(&length, e->inbox + at, 2), e->in_end - at >= 2u + length)) {
            nccl_result wrong = receive(e, e->inbox + at + 2, length);
            if (wrong)
                return wrong;
            at += 2u + length;
        }
        memmove(e->inbox, e->inbox + at, e->in_end - at);
        e->in_end -= at;
    }
}

/* -- ends --------------------------------------------------------------------------------------------------------- */

static struct end *make_end(int socket, int outbound) {
    struct end *e = calloc(1, sizeof *e);
    if (e) {
        e->socket = socket;
        e->outbound = outbound;
        e->mine = (struct hello){host.rank, 0x100 + host.rank * 0x1000 + number(), number(), 0, (uintptr_t)e->fifo};
    }
    return e;
}

static void drop_end(struct end *e) {
    close(e->socket);
    free(e->outbox);
    free(e);
}

/* 1: both have told each other who they are; 0: not yet; -1: the peer has gone. */
static int greet(struct end *e) {
    if (!e->greeted && send(e->socket, &e->mine, sizeof e->mine, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof e->mine)
        e->greeted = 1;
    ssize_t n = e->greeted ? recv(e->socket, &e->peer, sizeof e->peer, MSG_DONTWAIT | MSG_PEEK) : 0;
    if (!e->greeted || (n < 0 && errno == EAGAIN) || (n > 0 && n < (ssize_t)sizeof e->peer))
        return 0;
    if (n <= 0 || recv(e->socket, &e->peer, sizeof e->peer, MSG_DONTWAIT) != sizeof e->peer)
        return -1;
    uint8_t mine[6] = {2, 0, 0, 0, 0, (uint8_t)(10 + host.rank)};
    uint8_t peer[6] = {2, 0, 0, 0, 0, (uint8_t)(10 + e->peer.rank)};
    sr_path_init(&e->path, mine, peer, address(host.rank), address(e->peer.rank),
                 sr_source_port(e->mine.qpn, e->peer.qpn), 0);
    return 1;
}

static struct sockaddr_un named(const char *name, socklen_t *length) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path + 1, name, strlen(name)); /* abstract: it goes with its socket */
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    return a;
}

static nccl_result net_listen(int device, void *handle, void **listener) {
    struct handle *h = memset(handle, 0, sizeof *h);
    struct listener *l = calloc(1, sizeof *l);
    if (!l || device)
        return free(l), WARN("no memory, or no such device");
    snprintf(h->name, sizeof h->name, "flowcheck-net-%d-%u", (int)getpid(), number());
    socklen_t length;
    struct sockaddr_un a = named(h->name, &length);
    l->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->socket < 0 || bind(l->socket, (struct sockaddr *)&a, length) || listen(l->socket, 16))
        return WARN("%s: %s", h->name, strerror(errno)), free(l), NCCL_SYSTEM_ERROR;
    *listener = l;
    return NCCL_SUCCESS;
}

static nccl_result net_connect(int device, void *config, void *handle, void **sender, void **of_device) {
    struct handle *h = handle;
    (void)device, (void)config, (void)of_device;
    *sender = NULL;
    if (!h->coming) { /* NCCL keeps the handle between its calls (net_ib.cc keeps its stage there, too) */
        socklen_t length;
        struct sockaddr_un a = named(h->name, &length);
        int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (s < 0 || connect(s, (struct sockaddr *)&a, length)) {
            int later = errno == EAGAIN;
            close(s);
            return later ? NCCL_SUCCESS : WARN("%s: %s", h->name, strerror(errno));
        }
        h->coming = make_end(s, 1);
        if (!h->coming)
            return WARN("no memory");
    }
    int met = greet(h->coming);
    if (met < 0)
        return WARN("%s: nobody answers", h->name);
    *sender = met ? h->coming : NULL;
    return NCCL_SUCCESS;
}

static nccl_result net_accept(void *listener, void **receiver, void **of_device) {
    struct listener *l = listener;
    (void)of_device;
    *receiver = NULL;
    if (!l->coming) {
        int s = accept4(l->socket, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (s < 0)
            return errno == EAGAIN || errno == EINTR ? NCCL_SUCCESS : WARN("accept: %s", strerror(errno));
        l->coming = make_end(s, 0);
        if (!l->coming)
            return WARN("no memory");
    }
    int met = greet(l->coming);
    if (met < 0)
        return WARN("a peer has gone before it said who it is");
    if (met) {
        *receiver = l->coming;
        l->coming = NULL;
    }
    return NCCL_SUCCESS;
}

static nccl_result net_register(void *end, void *data, size_t size, int type, void **registration) {
    (void)end, (void)data, (void)size;
    if (type != NCCL_PTR_HOST)
        return WARN("memory of type %d: this network reaches the host's alone", type);
    *registration = (void *)(uintptr_t)number(); /* the remote key */
    return NCCL_SUCCESS;
}

static nccl_result net_deregister(void *end, void *registration) { return (void)end, (void)registration, NCCL_SUCCESS; }

static struct request *free_request(struct end *e) {
    struct request *r = &e->requests[e->messages % NCCL_NET_MAX_REQUESTS];
    return r->used ? NULL : r;
}

static uint64_t field(const uint8_t *element, uint32_t at, uint32_t width) {
    uint64_t v = 0;
    memcpy(&v, element + at, width);
    return v;
}

static nccl_result net_send(void *sender, void *data, size_t size, int tag, void *registration, void *phandle,
                            void **request) {
    struct end *e = sender;
    (void)tag, (void)registration, (void)phandle;
    *request = NULL;
    nccl_result wrong = progress(e);
    const uint8_t *element = e->fifo + e->messages % FIFO_SLOTS * STRIDE;
    struct request *r = free_request(e);
    if (wrong || !r || field(element, host.form.idx_at, 8) != e->messages + 1)
        /* Not now: the receiver has not said yet that it is ready. */
        return !wrong && e->closed ? WARN("rank %u has gone", e->peer.rank) : wrong;
    if (size > field(element, host.form.size_at, host.form.size_width))
        return WARN("%zu bytes for rank %u, which has room for less", size, e->peer.rank);
    list(e);
    wrong = post_write(e, field(element, 0, 8), (uint32_t)field(element, host.form.rkey_at, 4), data, (uint32_t)size,
                       1);
    *r = (struct request){.end = e, .until = e->sent, .got = (uint32_t)size, .used = 1};
    e->messages++;
    *request = r;
    return wrong;
}

static nccl_result net_receive(void *receiver, int count, void **data, size_t *sizes, int *tags, void **registrations,
                               void **phandles, void **request) {
    struct end *e = receiver;
    struct request *r = free_request(e);
    (void)phandles;
    *request = NULL; /* also where NCCL says that it need not know when data has come: it may, all the same */
    if (count != 1)
        return WARN("%d receives at once: this network said 1", count);
    if (!r)
        return NCCL_SUCCESS;
    uint8_t element[ELEMENT] = {0};
    uint64_t to = (uintptr_t)data[0], size = sizes[0], index = e->messages + 1;
    uint32_t key = (uint32_t)(uintptr_t)registrations[0], one = 1;
    memcpy(element, &to, 8);
    memcpy(element + host.form.size_at, &size, host.form.size_width);
    memcpy(element + host.form.rkey_at, &key, 4);
    memcpy(element + host.form.nreqs_at, &one, 4);
    memcpy(element + host.form.tag_at, &tags[0], 4);
    memcpy(element + host.form.idx_at, &index, 8);
    *r = (struct request){.end = e, .at = data[0], .room = size, .key = key, .used = 1};
    list(e);
    nccl_result wrong = post_write(e, e->peer.fifo + e->messages % FIFO_SLOTS * STRIDE, e->peer.fifo_key, element,
                                   ELEMENT, 0);
    e->messages++;
    *request = r;
    return wrong;
}

static nccl_result net_flush(void *receiver, int count, void **data, int *sizes, void **registrations, void **request) {
    (void)receiver, (void)count, (void)data, (void)sizes, (void)registrations;
    *request = NULL; /* data is in the host's memory before `test` says so */
    return NCCL_SUCCESS;
}

static nccl_result net_test(void *request, int *done, int *sizes) {
    struct request *r = request;
    nccl_result wrong = progress(r->end);
    *done = r->end->outbound ? r->end->acknowledged >= r->until : r->done;
    if (*done) {
        if (sizes)
            sizes[0] = (int)r->got;
        r->used = 0;
    }
    return wrong;
}

static nccl_result close_end(void *end) {
    struct end *e = end;
    /* The last acknowledgement may still be on its way; a peer that is gone leaves nothing to wait for. */
    for (struct pollfd p = {.fd = e->socket, .events = POLLIN}; e->outbound && e->acknowledged < e->sent;)
        if (flush(e) || poll(&p, 1, CLOSE_MS) <= 0 || progress(e))
            break;
    if (!e->outbound)
        flush(e);
    pthread_mutex_lock(&host.lock);
    if (host.capture)
        fflush(host.capture);
    pthread_mutex_unlock(&host.lock);
    drop_end(e);
    return NCCL_SUCCESS;
}

static nccl_result close_listener(void *listener) {
    struct listener *l = listener;
    if (l->coming)
        drop_end(l->coming);
    close(l->socket);
    free(l);
    return NCCL_SUCCESS;
}

/* -- the device --------------------------------------------------------------------------------------------------- */

static nccl_result net_init(nccl_logger logger, void *profiler) {
    const char *rank = getenv("FLOWCHECK_NET_RANK"), *version = getenv("FLOWCHECK_NET_NCCL");
    const char *port = getenv("FLOWCHECK_NET_PORT"), *flows = getenv("FLOWCHECK_NET_FLOWS");
    unsigned major = 0, minor = 0;
    (void)profiler;
    host.logger = logger;
    if (!rank || !version || sscanf(rank, "%u", &host.rank) != 1 || sscanf(version, "%u.%u", &major, &minor) != 2 ||
        host.rank > 200 || major != 2 || minor < 26)
        return WARN("FLOWCHECK_NET_RANK and FLOWCHECK_NET_NCCL (2.26 or later) have to be set");
    host.form = minor < 30 ? (struct form){8, 8, 16, 32, 36, 40} : (struct form){8, 8, 16, 48, 52, 56};
    host.big_endian = minor >= 29;
    if (port && !host.capture && host.mirror < 0 && open_port(port))
        return WARN("%s: %s", port, strerror(errno));
    if (flows && !host.flows && !(host.flows = fopen(flows, "we")))
        return WARN("%s: %s", flows, strerror(errno));
    return NCCL_SUCCESS;
}

static nccl_result net_devices(int *count) {
    *count = 1;
    return NCCL_SUCCESS;
}

static nccl_result net_properties(int device, nccl_net_properties *properties) {
    *properties = (nccl_net_properties){
        .name = "flowcheck0", .guid = host.rank, .ptrSupport = NCCL_PTR_HOST, .speed = 10000, .port = 1,
        .maxComms = 65536, .maxRecvs = 1, .vProps = {1, {device}}, .maxP2pBytes = 1 << 30, .maxCollBytes = 1 << 30,
    };
    return NCCL_SUCCESS;
}

EXPORT nccl_net ncclNetPlugin_v10 = {
    .name = "flowcheck", .init = net_init, .devices = net_devices, .getProperties = net_properties,
    .listen = net_listen, .connect = net_connect, .accept = net_accept, .regMr = net_register,
    .deregMr = net_deregister, .isend = net_send, .irecv = net_receive, .iflush = net_flush, .test = net_test,
    .closeSend = close_end,
    .closeRecv = close_end, .closeListen = close_listener,
};
