/* Connections as NCCL uses them, and operations made of primitives.
 *
 * A primitive runs when all its messages have arrived and all its sends may go: the receiver's CTS is in the FIFO and
 * the slot's last contents are acknowledged. It then sums, copies and encodes in one go. */
#include "sr_engine.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* -- connections ---------------------------------------------------------------------------------------------- */

static uint32_t used_qps(const struct sr_settings *s) {
    return s->split_on_qps ? s->qps : 1;
}

/* Slots of a protocol, made and registered when first used. */
static uint8_t *slot_at(struct sr_engine *e, struct sr_connection *c, uint32_t protocol, uint64_t step) {
    uint64_t slot = c->communicator->settings.slot[protocol];
    if (!c->buffer[protocol]) {
        void *memory = mmap(NULL, slot * SR_STEPS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            sr_fail(e, c->communicator, "no memory for %llu bytes of slots", (unsigned long long)slot * SR_STEPS);
            return NULL;
        }
        c->buffer[protocol] = memory;
        c->rkey[protocol] = sr_register(e, memory, slot * SR_STEPS);
    }
    return c->buffer[protocol] + step % SR_STEPS * slot;
}

static uint8_t *cts_element(const struct sr_connection *c, uint64_t message) {
    return c->fifo + message % SR_FIFO_SLOTS * 8 * c->communicator->settings.cts.bytes;
}

/* Announce what the running operation will receive, as far ahead as there are free slots. */
static int announce(struct sr_engine *e, struct sr_connection *c, const struct sr_plan *plan) {
    const struct sr_settings *s = &c->communicator->settings;
    int moved = 0;
    while (c->announced < c->announce_until && c->announced_step + plan->steps <= c->step + SR_STEPS &&
           sr_qp_room(c->qp[0], 1)) {
        uint8_t *slot = slot_at(e, c, plan->protocol, c->announced_step);
        if (!slot)
            return 0;
        uint8_t *element = c->elements + c->announced % SR_FIFO_SLOTS * s->cts.bytes;
        uint64_t address = (uintptr_t)slot, size = plan->posted, idx = c->announced + 1;
        uint32_t nreqs = 1;
        memset(element, 0, s->cts.bytes);
        memcpy(element, &address, 8); /* little-endian, like the host that this is written for */
        memcpy(element + s->cts.size_at, &size, s->cts.size_width);
        memcpy(element + s->cts.rkey_at, &c->rkey[plan->protocol], 4);
        memcpy(element + s->cts.nreqs_at, &nreqs, 4);
        memcpy(element + s->cts.tag_at, &c->sender, 4);
        memcpy(element + s->cts.idx_at, &idx, 8);
        struct sr_wqe write = {
            .address = c->peer_fifo + c->announced % SR_FIFO_SLOTS * 8 * s->cts.bytes, .rkey = c->peer_fifo_rkey,
            .data = element, .length = s->cts.bytes, .signalled = 1,
        };
        sr_qp_post(c->qp[0], s->mtu, &write);
        c->announced++;
        c->announced_step += plan->steps;
        moved = 1;
    }
    return moved;
}

/* The next message has arrived on all QPs that carry a piece of it. */
static int arrived(const struct sr_connection *c) {
    const struct sr_settings *s = &c->communicator->settings;
    uint32_t used = used_qps(s);
    for (uint32_t i = 0; i < used; i++) {
        uint64_t piece = c->messages * used + i;
        if (c->qp[piece % s->qps]->immediates <= piece / s->qps)
            return 0;
    }
    return 1;
}

static int may_send(const struct sr_connection *c, const struct sr_plan *plan) {
    const struct sr_settings *s = &c->communicator->settings;
    const uint8_t *element = cts_element(c, c->messages);
    uint64_t idx;
    memcpy(&idx, element + s->cts.idx_at, 8);
    if (idx != c->messages + 1)
        return 0;
    for (uint32_t q = 0; q < s->qps; q++) {
        if (!sr_qp_room(c->qp[q], 2))
            return 0;
        for (uint32_t k = 0; k < plan->steps; k++)
            if (c->qp[q]->unacked < c->slot_psn[(c->step + k) % SR_STEPS][q])
                return 0;
    }
    return 1;
}

static uint32_t immediate_of(const struct sr_settings *s, uint32_t size) {
    return s->big_endian_imm ? __builtin_bswap32(size) : size;
}

static void send_message(struct sr_engine *e, struct sr_connection *c, const struct sr_plan *plan,
                         const uint8_t *data, uint32_t bytes) {
    const struct sr_settings *s = &c->communicator->settings;
    uint32_t used = used_qps(s), total = sr_wire_bytes(plan->protocol, bytes);
    uint32_t piece = used > 1 ? (total + used * 128 - 1) / (used * 128) * 128 : total;
    uint8_t *slot = slot_at(e, c, plan->protocol, c->step);
    if (!slot)
        return;
    const uint8_t *element = cts_element(c, c->messages);
    uint64_t address, size = 0;
    uint32_t rkey;
    memcpy(&address, element, 8);
    memcpy(&rkey, element + s->cts.rkey_at, 4);
    memcpy(&size, element + s->cts.size_at, s->cts.size_width);
    if (total > size) {
        sr_fail(e, c->communicator, "rank %u announced room for %llu bytes of message %llu, which has %u: do all ranks "
                "call the same collectives?", c->receiver, (unsigned long long)size, (unsigned long long)c->messages,
                total);
        return;
    }
    sr_encode(plan->protocol, slot, data, bytes, c->step);
    int pair = s->adaptive_routing && total > s->ar_threshold;
    for (uint32_t i = 0; i < used; i++) {
        struct sr_qp *qp = c->qp[(c->messages * used + i) % s->qps];
        uint32_t start = (uint64_t)i * piece < total ? i * piece : total;
        struct sr_wqe write = {
            .address = address + (uint64_t)i * piece, .rkey = rkey, .data = slot + start,
            .length = total - start < piece ? total - start : piece, .immediate = immediate_of(s, total),
            .has_immediate = !pair, .signalled = !pair,
        };
        sr_qp_post(qp, s->mtu, &write);
        if (pair) {
            struct sr_wqe empty = {.immediate = write.immediate, .has_immediate = 1, .signalled = 1};
            sr_qp_post(qp, s->mtu, &empty);
        }
        for (uint32_t k = 0; k < plan->steps; k++)
            c->slot_psn[(c->step + k) % SR_STEPS][(c->messages * used + i) % s->qps] = qp->posted;
    }
    c->step += plan->steps;
    c->messages++;
}

/* The next message's data to `data`. */
static int receive_message(struct sr_engine *e, struct sr_connection *c, const struct sr_plan *plan, uint8_t *data,
                           uint32_t bytes) {
    const struct sr_settings *s = &c->communicator->settings;
    uint64_t piece = c->messages * used_qps(s);
    uint32_t expected = sr_wire_bytes(plan->protocol, bytes);
    uint32_t got = immediate_of(s, c->qp[piece % s->qps]->immediate[piece / s->qps % SR_IMMEDIATES]);
    if (got != expected) {
        sr_fail(e, c->communicator, "rank %u sent message %llu with %u bytes where %u belong: do all ranks call the same "
                "collectives?", c->sender, (unsigned long long)c->messages, got, expected);
        return -1;
    }
    if (sr_decode(plan->protocol, data, slot_at(e, c, plan->protocol, c->step), bytes, c->step)) {
        sr_fail(e, c->communicator, "message %llu of rank %u has lines of another step: a bug of softroce",
                (unsigned long long)c->messages, c->sender);
        return -1;
    }
    c->step += plan->steps;
    c->messages++;
    return 0;
}

/* -- operations ------------------------------------------------------------------------------------------------- */

static int ready(struct sr_engine *e, const struct sr_plan *plan, const struct sr_primitive *p) {
    for (int i = 0; i < SR_MAX_FAN && p->receive[i] >= 0; i++)
        if (!arrived(e->connections[p->receive[i]]))
            return 0;
    for (int i = 0; i < SR_MAX_FAN && p->send[i] >= 0; i++)
        if (!may_send(e->connections[p->send[i]], plan))
            return 0;
    return 1;
}

static void execute(struct sr_engine *e, struct sr_operation *o, const struct sr_primitive *p) {
    const struct sr_plan *plan = &o->plan;
    const uint8_t *value = p->flags & SR_USE_INPUT ? o->input + p->input : NULL;
    uint8_t *result = p->flags & SR_STORE ? o->output + p->output : e->scratch[1];
    for (int i = 0; i < SR_MAX_FAN && p->receive[i] >= 0; i++) {
        uint8_t *to = value ? e->scratch[0] : result;
        if (receive_message(e, e->connections[p->receive[i]], plan, to, p->bytes))
            return;
        if (value)
            sr_add(plan->dtype, result, value, to, p->bytes);
        value = result;
    }
    if (p->flags & SR_STORE && value != result)
        memmove(result, value, p->bytes);
    for (int i = 0; i < SR_MAX_FAN && p->send[i] >= 0 && !o->communicator->error[0]; i++)
        send_message(e, e->connections[p->send[i]], plan, value, p->bytes);
}

static void begin(struct sr_engine *e, struct sr_item *item) {
    const struct sr_plan *plan = &item->operation->plan;
    for (uint32_t i = 0; i < item->part.uses; i++) {
        const struct sr_use *use = &plan->uses[item->part.first_use + i];
        struct sr_connection *c = e->connections[use->connection];
        c->step = (c->step + plan->round_to - 1) / plan->round_to * plan->round_to;
        c->announced_step = c->step;
        c->announce_until = c->announced + use->messages;
    }
    item->begun = 1;
}

int sr_lane_progress(struct sr_engine *e, struct sr_lane *lane, uint64_t now) {
    int moved = 0;
    struct sr_item *item = lane->first;
    if (!item || item->operation->communicator->error[0])
        return 0;
    struct sr_operation *o = item->operation;
    if (!item->begun)
        begin(e, item);
    for (int again = 1; again && !o->communicator->error[0];) {
        again = 0;
        for (uint32_t i = 0; i < item->part.uses; i++) {
            const struct sr_use *use = &o->plan.uses[item->part.first_use + i];
            if (use->messages)
                moved |= announce(e, e->connections[use->connection], &o->plan);
        }
        for (int s = 0; s < 2; s++) {
            if (item->done[s] == item->part.count[s])
                continue;
            const struct sr_primitive *p = &o->plan.primitives[item->part.start[s] + item->done[s]];
            if (!ready(e, &o->plan, p))
                continue;
            execute(e, o, p);
            item->done[s]++;
            moved = again = 1;
        }
    }
    if (moved)
        o->progress_ns = now;
    if (o->communicator->error[0] || item->done[0] < item->part.count[0] || item->done[1] < item->part.count[1])
        return moved;
    lane->first = item->next;
    if (!lane->first)
        lane->last = NULL;
    if (!--o->left)
        sr_complete(e, o);
    return 1;
}

/* Fail an operation in which nothing has moved for too long, naming the peer it waits for. */
void sr_stalled(struct sr_engine *e, struct sr_operation *o, uint64_t now) {
    for (uint32_t k = 0; k < o->plan.part_count; k++) {
        const struct sr_item *item = &o->items[k];
        if (!item->begun)
            continue;
        for (int s = 0; s < 2; s++) {
            if (item->done[s] == item->part.count[s])
                continue;
            const struct sr_primitive *p = &o->plan.primitives[item->part.start[s] + item->done[s]];
            const struct sr_connection *c = NULL;
            int from = 1;
            for (int i = 0; i < SR_MAX_FAN && !c && p->receive[i] >= 0; i++)
                if (!arrived(e->connections[p->receive[i]]))
                    c = e->connections[p->receive[i]];
            for (int i = 0; i < SR_MAX_FAN && !c && p->send[i] >= 0; i++)
                if (!may_send(e->connections[p->send[i]], &o->plan)) {
                    c = e->connections[p->send[i]];
                    from = 0;
                }
            if (!c)
                continue;
            char text[INET_ADDRSTRLEN];
            struct in_addr address = {c->qp[0]->peer_address};
            inet_ntop(AF_INET, &address, text, sizeof text);
            sr_fail(e, o->communicator, "nothing has come from rank %u (%s) for %.1f s: waiting for %s %llu on channel %u",
                    from ? c->sender : c->receiver, text, (double)(now - o->progress_ns) / 1e9,
                    from ? "message" : "clear-to-send of message", (unsigned long long)c->messages, c->channel);
            return;
        }
    }
}
