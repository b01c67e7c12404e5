/* Socket, thread, lock, timers, and the tables behind the numbers that callers hold. */
#include "sr_engine.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CHECK_EVERY_NS 250000000ull /* for operations in which nothing moves */

uint64_t sr_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static uint32_t draw(struct sr_engine *e) { /* xorshift: numbers that only have to look unrelated */
    uint32_t x = e->random;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return e->random = x;
}

/* Room for one more entry of a table that doubles; 0, or -1 without memory. */
static int grow(void *table, uint32_t count, size_t size) {
    if (count & (count - 1))
        return 0;
    void *bigger = realloc(*(void **)table, (count ? 2 * (size_t)count : 1) * size);
    if (!bigger)
        return -1;
    *(void **)table = bigger;
    return 0;
}

uint32_t sr_register(struct sr_engine *e, const void *base, uint64_t length) {
    if (grow(&e->regions, e->region_count, sizeof *e->regions))
        return 0;
    uint32_t rkey = (e->region_count + 1) << 8 | (draw(e) & 0xFF);
    e->regions[e->region_count++] = (struct sr_region){(uintptr_t)base, length, rkey};
    return rkey;
}

/* -- failure and completion ------------------------------------------------------------------------------------- */

void sr_fail(struct sr_engine *e, struct sr_communicator *c, const char *form, ...) {
    if (c->error[0])
        return;
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(c->error, sizeof c->error, form, arguments);
    va_end(arguments);
    pthread_cond_broadcast(&e->changed);
}

void sr_complete(struct sr_engine *e, struct sr_operation *o) {
    for (struct sr_operation **at = &e->operations; *at; at = &(*at)->next)
        if (*at == o) {
            *at = o->next;
            if (!*at)
                e->operations_end = at;
            break;
        }
    o->next = NULL;
    *e->finished_end = o;
    e->finished_end = &o->next;
    pthread_cond_broadcast(&e->changed);
}

/* Take the operations of failed communicators off their lanes. */
static void sweep(struct sr_engine *e) {
    for (struct sr_operation *o = e->operations, *next; o; o = next) {
        next = o->next;
        if (!o->communicator->error[0])
            continue;
        for (uint32_t k = 0; k < o->plan.part_count; k++) {
            struct sr_lane *lane = &e->lanes[o->items[k].part.lane];
            struct sr_item *before = NULL;
            for (struct sr_item *i = lane->first; i; before = i, i = i->next)
                if (i == &o->items[k]) {
                    *(before ? &before->next : &lane->first) = i->next;
                    if (lane->last == i)
                        lane->last = before;
                    break;
                }
        }
        sr_complete(e, o);
    }
}

/* -- socket --------------------------------------------------------------------------------------------------------- */

void sr_flush(struct sr_engine *e) {
    uint32_t done = 0;
    for (uint32_t i = 0; i < e->queued; i++) { /* only now: a frame is built after it is queued */
        struct sr_frame *f = &e->frames[i];
        e->out_pieces[i][0] = (struct iovec){f->head, f->head_length};
        e->out_pieces[i][1] = (struct iovec){(void *)f->data, f->data_length};
        e->out_pieces[i][2] = (struct iovec){f->tail, f->tail_length};
    }
    while (done < e->queued) {
        int n = sendmmsg(e->socket, e->out + done, e->queued - done, 0);
        if (n > 0) {
            done += (uint32_t)n;
            e->counters.sent += (uint32_t)n;
        } else if (errno == EAGAIN || errno == ENOBUFS) {
            struct pollfd out = {e->socket, POLLOUT, 0};
            poll(&out, 1, 1);
        } else if (errno != EINTR) {
            /* A frame that cannot be sent is a lost frame (ENETDOWN: the link may come back); it is repeated. */
            if (errno == EMSGSIZE)
                snprintf(e->error, sizeof e->error, "the interface's MTU is too small for the frames");
            done++;
        }
    }
    e->queued = 0;
}

struct sr_frame *sr_queue_frame(struct sr_engine *e) {
    if (e->queued == SR_BATCH)
        sr_flush(e);
    return &e->frames[e->queued++];
}

static int receive_batch(struct sr_engine *e, uint64_t now) {
    int n = recvmmsg(e->socket, e->in, SR_BATCH, MSG_DONTWAIT | MSG_TRUNC, NULL);
    for (int i = 0; i < n; i++) {
        struct sr_packet packet;
        uint32_t length = e->in[i].msg_len;
        if (length > SR_FRAME_BYTES) {
            e->counters.damaged++;
            continue;
        }
        switch (sr_frame_parse(e->received[i], length, &packet)) {
        case SR_FRAME_OTHER: e->counters.strangers++; continue;
        case SR_FRAME_DAMAGED: e->counters.damaged++; continue;
        case SR_FRAME_OK: break;
        }
        e->counters.received++;
        uint32_t index = packet.qpn - e->first_qpn;
        if (index >= e->qp_count || !e->qps[index]->ready) {
            e->counters.strangers++;
            continue;
        }
        sr_qp_receive(e, e->qps[index], &packet, now);
    }
    return n;
}

/* -- the thread ------------------------------------------------------------------------------------------------------ */

/* One round under the lock; when to look again at the latest, 0: at once. */
static uint64_t round_of(struct sr_engine *e) {
    uint64_t now = sr_now(), look = now + CHECK_EVERY_NS;
    int busy = 0;
    for (int batches = 0; batches < 4; batches++) {
        int n = receive_batch(e, now);
        busy |= n > 0;
        if (n < SR_BATCH)
            break;
    }
    for (uint32_t i = 0; i < e->qp_count; i++)
        sr_qp_timer(e, e->qps[i], now);
    /* Before operations go on: what is queued may still point into slots that an ACK has just freed. */
    sr_flush(e);
    for (int moved = 1; moved;) {
        moved = 0;
        for (uint32_t i = 0; i < e->lane_count; i++)
            moved |= sr_lane_progress(e, &e->lanes[i], now);
        busy |= moved;
    }
    for (uint32_t i = 0; i < e->qp_count; i++) {
        struct sr_qp *qp = e->qps[i];
        if (qp->connection->communicator->error[0])
            continue;
        sr_qp_transmit(e, qp, now);
        if (qp->deadline && qp->deadline < look)
            look = qp->deadline;
    }
    sr_flush(e);
    for (struct sr_operation *o = e->operations, *next; o; o = next) {
        next = o->next;
        if (now - o->progress_ns > o->communicator->settings.peer_timeout_ns)
            sr_stalled(e, o, now);
    }
    for (uint32_t i = 0; e->error[0] && i < e->communicator_count; i++)
        sr_fail(e, e->communicators[i], "%s", e->error);
    sweep(e);
    return busy ? 0 : look;
}

static void *work(void *argument) {
    struct sr_engine *e = argument;
    /* A NIC does not wait for the host's other programs; without the right to it, it does. */
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), -5);
    pthread_mutex_lock(&e->lock);
    while (!e->stop) {
        uint64_t look = round_of(e), now;
        if (e->drainers)
            pthread_cond_broadcast(&e->quiet);
        e->sleeping = look != 0;
        pthread_mutex_unlock(&e->lock);
        if (look && (now = sr_now()) < look) {
            struct pollfd in[2] = {{e->socket, POLLIN, 0}, {e->wake, POLLIN, 0}};
            poll(in, 2, (int)((look - now) / 1000000) + 1);
            uint64_t drained;
            if (in[1].revents && read(e->wake, &drained, sizeof drained) < 0 && errno != EAGAIN)
                abort(); /* an eventfd of our own cannot fail otherwise */
        }
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

static void wake(struct sr_engine *e) {
    uint64_t one = 1;
    if (e->sleeping && write(e->wake, &one, sizeof one) < 0 && errno != EAGAIN)
        abort();
}

/* -- the caller's functions --------------------------------------------------------------------------------------- */

int sr_open(struct sr_engine *e, int socket, uint32_t address, const uint8_t *mac, uint8_t traffic_class,
            uint32_t window, uint64_t retransmit_ns, uint32_t seed) {
    memset(e, 0, sizeof *e);
    e->socket = socket;
    e->address = address;
    memcpy(e->mac, mac, 6);
    e->traffic_class = traffic_class;
    e->window = window;
    e->retransmit_ns = retransmit_ns;
    e->random = seed ? seed : 1;
    e->first_qpn = 0x100 + draw(e) % 0x1000;
    e->operations_end = &e->operations;
    e->finished_end = &e->finished;
    e->next_id = 1;
    e->received = malloc((size_t)SR_BATCH * SR_FRAME_BYTES);
    e->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!e->received || e->wake < 0)
        return -1;
    for (int i = 0; i < SR_BATCH; i++) {
        e->in_pieces[i] = (struct iovec){e->received[i], SR_FRAME_BYTES};
        e->in[i].msg_hdr = (struct msghdr){.msg_iov = &e->in_pieces[i], .msg_iovlen = 1};
        e->out[i].msg_hdr = (struct msghdr){.msg_iov = e->out_pieces[i], .msg_iovlen = 3};
    }
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&e->changed, &clock);
    pthread_cond_init(&e->quiet, &clock);
    pthread_condattr_destroy(&clock);
    errno = pthread_create(&e->thread, NULL, work, e);
    e->running = errno == 0;
    return e->running ? 0 : -1;
}

int sr_communicator(struct sr_engine *e, const struct sr_settings *settings) {
    int number = -1;
    uint64_t scratch = 0;
    for (int p = 0; p < SR_PROTOCOLS; p++)
        if (2 * (uint64_t)settings->slot[p] > scratch)
            scratch = 2 * (uint64_t)settings->slot[p];
    pthread_mutex_lock(&e->lock);
    struct sr_communicator *c = calloc(1, sizeof *c);
    if (c && !grow(&e->communicators, e->communicator_count, sizeof *e->communicators)) {
        c->settings = *settings;
        number = 0;
        for (int i = 0; i < 2 && scratch > e->scratch_bytes; i++) {
            void *bigger = realloc(e->scratch[i], scratch);
            if (bigger)
                e->scratch[i] = bigger;
            else
                number = -1;
        }
        if (number == 0) {
            if (scratch > e->scratch_bytes)
                e->scratch_bytes = scratch;
            number = (int)e->communicator_count++;
            e->communicators[number] = c;
            c = NULL;
        }
    }
    pthread_mutex_unlock(&e->lock);
    free(c);
    return number;
}

int sr_connection(struct sr_engine *e, int communicator, int outbound, uint32_t sender, uint32_t receiver,
                  uint32_t channel, struct sr_side *local) {
    int number = -1;
    pthread_mutex_lock(&e->lock);
    struct sr_communicator *owner = e->communicators[communicator];
    const struct sr_settings *s = &owner->settings;
    struct sr_connection *c = calloc(1, sizeof *c);
    uint64_t fifo = (uint64_t)SR_FIFO_SLOTS * 8 * s->cts.bytes;
    if (!c || grow(&e->connections, e->connection_count, sizeof *e->connections))
        goto failed;
    c->communicator = owner;
    c->outbound = outbound;
    c->sender = sender;
    c->receiver = receiver;
    c->channel = channel;
    c->fifo = calloc(1, fifo); /* of a receiver: the size FIFO, whose address goes into its handshake */
    c->elements = outbound ? NULL : calloc(SR_FIFO_SLOTS, s->cts.bytes);
    if (!c->fifo || (!outbound && !c->elements))
        goto failed;
    memset(local, 0, sizeof *local);
    local->fifo = (uintptr_t)c->fifo;
    local->fifo_rkey = sr_register(e, c->fifo, fifo);
    for (uint32_t q = 0; q < s->qps; q++) {
        struct sr_qp *qp = calloc(1, sizeof *qp);
        if (!qp || grow(&e->qps, e->qp_count, sizeof *e->qps)) {
            free(qp); /* QPs made so far stay in the table, not ready, and go with the engine */
            goto failed;
        }
        qp->qpn = e->first_qpn + e->qp_count;
        qp->connection = c;
        c->qp[q] = qp;
        local->qpns[q] = qp->qpn;
        e->qps[e->qp_count++] = qp;
    }
    number = (int)e->connection_count;
    e->connections[e->connection_count++] = c;
    c = NULL;
failed:
    if (c && !c->qp[0]) {
        free(c->fifo);
        free(c->elements);
        free(c);
    }
    pthread_mutex_unlock(&e->lock);
    return number;
}

void sr_connect(struct sr_engine *e, int connection, const struct sr_side *remote, uint32_t address, const uint8_t *mac) {
    pthread_mutex_lock(&e->lock);
    struct sr_connection *c = e->connections[connection];
    c->peer_fifo = remote->fifo;
    c->peer_fifo_rkey = remote->fifo_rkey;
    for (uint32_t q = 0; q < c->communicator->settings.qps; q++) {
        struct sr_qp *qp = c->qp[q];
        qp->remote_qpn = remote->qpns[q];
        qp->peer_address = address;
        sr_path_init(&qp->path, e->mac, mac, e->address, address, sr_source_port(qp->qpn, qp->remote_qpn),
                     e->traffic_class);
        qp->ready = 1;
    }
    pthread_mutex_unlock(&e->lock);
}

int sr_lane(struct sr_engine *e) {
    int number = -1;
    pthread_mutex_lock(&e->lock);
    if (!grow(&e->lanes, e->lane_count, sizeof *e->lanes)) {
        number = (int)e->lane_count++;
        e->lanes[number] = (struct sr_lane){NULL, NULL};
    }
    pthread_mutex_unlock(&e->lock);
    return number;
}

uint64_t sr_submit(struct sr_engine *e, int communicator, const struct sr_plan *plan, const void *input, void *output) {
    struct sr_operation *o = calloc(1, sizeof *o);
    struct sr_item *items = calloc(plan->part_count ? plan->part_count : 1, sizeof *items);
    if (!o || !items) {
        free(o);
        free(items);
        return 0;
    }
    pthread_mutex_lock(&e->lock);
    o->id = e->next_id++;
    o->communicator = e->communicators[communicator];
    o->plan = *plan;
    o->input = input;
    o->output = output;
    o->items = items;
    o->left = plan->part_count;
    o->progress_ns = sr_now();
    *e->operations_end = o;
    e->operations_end = &o->next;
    for (uint32_t k = 0; k < plan->part_count; k++) {
        struct sr_lane *lane = &e->lanes[plan->parts[k].lane];
        items[k].operation = o;
        items[k].part = plan->parts[k];
        *(lane->last ? &lane->last->next : &lane->first) = &items[k];
        lane->last = &items[k];
    }
    uint64_t id = o->id;
    if (!o->left)
        sr_complete(e, o);
    wake(e);
    pthread_mutex_unlock(&e->lock);
    return id;
}

uint64_t sr_finished(struct sr_engine *e, char error[SR_TEXT]) {
    pthread_mutex_lock(&e->lock);
    while (!e->finished && !e->stop)
        pthread_cond_wait(&e->changed, &e->lock);
    struct sr_operation *o = e->finished;
    uint64_t id = 0;
    if (o) {
        id = o->id;
        e->finished = o->next;
        if (!e->finished)
            e->finished_end = &e->finished;
        if (o->left)
            memcpy(error, o->communicator->error, SR_TEXT);
        else
            error[0] = 0;
        free(o->items);
        free(o);
    }
    pthread_mutex_unlock(&e->lock);
    return id;
}

static int acknowledged(const struct sr_engine *e, const struct sr_communicator *c) {
    for (uint32_t i = 0; i < e->qp_count; i++)
        if (e->qps[i]->connection->communicator == c && e->qps[i]->unacked < e->qps[i]->posted)
            return 0;
    return 1;
}

int sr_drain(struct sr_engine *e, int communicator, uint64_t limit_ns) {
    pthread_mutex_lock(&e->lock);
    const struct sr_communicator *c = e->communicators[communicator];
    uint64_t end = sr_now() + limit_ns;
    struct timespec until = {(time_t)(end / 1000000000ull), (long)(end % 1000000000ull)};
    int done = 0;
    e->drainers++;
    while (!e->stop && !c->error[0] && !(done = acknowledged(e, c)))
        if (pthread_cond_timedwait(&e->quiet, &e->lock, &until))
            break;
    e->drainers--;
    pthread_mutex_unlock(&e->lock);
    return done ? 0 : -1;
}

void sr_abort(struct sr_engine *e, int communicator, const char *why) {
    pthread_mutex_lock(&e->lock);
    sr_fail(e, e->communicators[communicator], "%s", why);
    wake(e);
    pthread_mutex_unlock(&e->lock);
}

void sr_stop(struct sr_engine *e) {
    if (!e->running)
        return;
    pthread_mutex_lock(&e->lock);
    e->stop = 1;
    e->sleeping = 1;
    wake(e);
    pthread_cond_broadcast(&e->changed);
    pthread_cond_broadcast(&e->quiet);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
    e->running = 0;
}

static void free_operations(struct sr_operation *o) {
    while (o) {
        struct sr_operation *next = o->next;
        free(o->items);
        free(o);
        o = next;
    }
}

void sr_close(struct sr_engine *e) {
    sr_stop(e);
    free_operations(e->operations);
    free_operations(e->finished);
    for (uint32_t i = 0; i < e->connection_count; i++) {
        struct sr_connection *c = e->connections[i];
        for (int p = 0; p < SR_PROTOCOLS; p++)
            if (c->buffer[p])
                munmap(c->buffer[p], (size_t)c->communicator->settings.slot[p] * SR_STEPS);
        free(c->fifo);
        free(c->elements);
        free(c);
    }
    for (uint32_t i = 0; i < e->qp_count; i++)
        free(e->qps[i]);
    for (uint32_t i = 0; i < e->communicator_count; i++)
        free(e->communicators[i]);
    free(e->connections);
    free(e->qps);
    free(e->communicators);
    free(e->lanes);
    free(e->regions);
    free(e->scratch[0]);
    free(e->scratch[1]);
    free(e->received);
    if (e->wake > 0)
        close(e->wake);
    close(e->socket);
}

struct sr_counters sr_counted(struct sr_engine *e) {
    pthread_mutex_lock(&e->lock);
    struct sr_counters counters = e->counters;
    pthread_mutex_unlock(&e->lock);
    return counters;
}
