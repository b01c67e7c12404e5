/* One RC queue pair: both directions, each with its own packet numbers from 0. */
#include "sr_engine.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

enum { ACK_EVERY = 32, SYNDROME_ACK = 0x1F, SYNDROME_SEQUENCE = 0x60, SYNDROME_ACCESS = 0x62 };
#define LONGEST_WAIT_NS 1000000000ull

int sr_qp_room(const struct sr_qp *qp, uint32_t requests) {
    return qp->newest - qp->oldest + requests <= SR_WQES;
}

void sr_qp_post(struct sr_qp *qp, uint32_t mtu, const struct sr_wqe *request) {
    struct sr_wqe *w = &qp->queue[qp->newest % SR_WQES];
    *w = *request;
    w->first_psn = qp->posted;
    w->packets = request->length ? (request->length + mtu - 1) / mtu : 1;
    qp->posted += w->packets;
    qp->newest++;
}

/* -- requester -------------------------------------------------------------------------------------------------- */

static void send_packet(struct sr_engine *e, struct sr_qp *qp, const struct sr_wqe *w, uint32_t mtu, int window_ends) {
    uint32_t k = (uint32_t)(qp->next - w->first_psn), offset = k * mtu, rest = w->length - offset, length = 0;
    int first = k == 0, last = k + 1 == w->packets;
    uint8_t extension[20], opcode;
    if (first) {
        sr_put64(extension, w->address);
        sr_put32(extension + 8, w->rkey);
        sr_put32(extension + 12, w->length);
        length = 16;
    }
    if (last && w->has_immediate) {
        memcpy(extension + length, &w->immediate, 4);
        length += 4;
    }
    if (first)
        opcode = !last ? SR_WRITE_FIRST : w->has_immediate ? SR_WRITE_ONLY_IMM : SR_WRITE_ONLY;
    else
        opcode = !last ? SR_WRITE_MIDDLE : w->has_immediate ? SR_WRITE_LAST_IMM : SR_WRITE_LAST;
    int ack = (last && w->signalled) || k % ACK_EVERY == ACK_EVERY - 1 || window_ends;
    sr_frame_build(sr_queue_frame(e), &qp->path, opcode, qp->remote_qpn, (uint32_t)qp->next, ack, extension, length,
                   w->data + offset, rest < mtu ? rest : mtu);
}

void sr_qp_transmit(struct sr_engine *e, struct sr_qp *qp, uint64_t now) {
    uint32_t mtu = qp->connection->communicator->settings.mtu;
    if (!qp->ready)
        return;
    while (qp->next < qp->posted && qp->next - qp->unacked < e->window) {
        const struct sr_wqe *w = &qp->queue[qp->sending % SR_WQES];
        if (qp->next < qp->sent)
            e->counters.retransmitted++;
        send_packet(e, qp, w, mtu, qp->next - qp->unacked + 1 == e->window);
        qp->next++;
        if (qp->next > qp->sent)
            qp->sent = qp->next;
        if (qp->next == w->first_psn + w->packets)
            qp->sending++;
        if (!qp->deadline) {
            qp->deadline = now + e->retransmit_ns;
            qp->heard = now;
        }
    }
}

/* Continue at `psn`, as a NIC does that goes back. */
static void go_back(struct sr_qp *qp, uint64_t psn) {
    qp->next = psn;
    for (qp->sending = qp->oldest; qp->sending < qp->newest; qp->sending++) {
        const struct sr_wqe *w = &qp->queue[qp->sending % SR_WQES];
        if (psn < w->first_psn + w->packets)
            break;
    }
}

/* Everything before `psn` has arrived. */
static void acknowledged(struct sr_engine *e, struct sr_qp *qp, uint64_t psn, uint64_t now) {
    if (psn <= qp->unacked || psn > qp->sent)
        return;
    qp->unacked = psn;
    while (qp->oldest < qp->newest) {
        const struct sr_wqe *w = &qp->queue[qp->oldest % SR_WQES];
        if (w->first_psn + w->packets > psn)
            break;
        qp->oldest++;
    }
    if (qp->next < psn)
        go_back(qp, psn);
    qp->retries = 0;
    qp->heard = now;
    qp->deadline = qp->unacked < qp->sent ? now + e->retransmit_ns : 0;
}

static void on_ack(struct sr_engine *e, struct sr_qp *qp, const struct sr_packet *p, uint64_t now) {
    int32_t distance = (int32_t)((p->psn - (uint32_t)qp->unacked) << 8) >> 8;
    uint8_t syndrome = p->extension[0];
    uint64_t psn = qp->unacked + distance;
    if (distance < 0 || psn >= qp->sent)
        return;
    if ((syndrome & 0xE0) == 0) {
        acknowledged(e, qp, psn + 1, now);
    } else if (syndrome == SYNDROME_SEQUENCE) {
        e->counters.naks_received++;
        acknowledged(e, qp, psn, now);
        go_back(qp, psn);
        qp->deadline = now + e->retransmit_ns;
    } else {
        struct sr_connection *c = qp->connection;
        sr_fail(e, c->communicator, "rank %u refused a write (NAK syndrome 0x%02x, packet %u of QP %u)",
                c->outbound ? c->receiver : c->sender, syndrome, p->psn, qp->remote_qpn);
    }
}

void sr_qp_timer(struct sr_engine *e, struct sr_qp *qp, uint64_t now) {
    struct sr_communicator *c = qp->connection->communicator;
    if (!qp->deadline || now < qp->deadline || c->error[0])
        return;
    if (now - qp->heard > c->settings.peer_timeout_ns) {
        char text[INET_ADDRSTRLEN];
        struct in_addr address = {qp->peer_address};
        inet_ntop(AF_INET, &address, text, sizeof text);
        sr_fail(e, c, "rank %u (%s) has not acknowledged packet %u of QP %u for %.1f s, %u retransmissions",
                qp->connection->outbound ? qp->connection->receiver : qp->connection->sender, text,
                (uint32_t)qp->unacked & 0xFFFFFF, qp->remote_qpn, (double)(now - qp->heard) / 1e9, qp->retries);
        return;
    }
    e->counters.timeouts++;
    qp->retries++;
    go_back(qp, qp->unacked);
    uint64_t wait = e->retransmit_ns << (qp->retries < 8 ? qp->retries : 8);
    qp->deadline = now + (wait < LONGEST_WAIT_NS ? wait : LONGEST_WAIT_NS);
}

/* -- responder --------------------------------------------------------------------------------------------------- */

static void answer(struct sr_engine *e, struct sr_qp *qp, uint8_t syndrome, uint64_t psn) {
    uint8_t extension[4];
    sr_put32(extension, (uint32_t)syndrome << 24 | (uint32_t)(qp->completed & 0xFFFFFF));
    sr_frame_build(sr_queue_frame(e), &qp->path, SR_ACK, qp->remote_qpn, (uint32_t)psn, 0, extension, 4, NULL, 0);
}

/* Where a write may go: into a registered region, whole. NULL: nowhere. */
static uint8_t *target(const struct sr_engine *e, uint64_t address, uint32_t rkey, uint64_t length) {
    uint32_t index = (rkey >> 8) - 1;
    if (index >= e->region_count || e->regions[index].rkey != rkey)
        return NULL;
    const struct sr_region *r = &e->regions[index];
    if (address < r->base || length > r->length || address - r->base > r->length - length)
        return NULL;
    return (uint8_t *)(uintptr_t)address;
}

static int take(struct sr_engine *e, struct sr_qp *qp, const struct sr_packet *p) {
    int begins = p->opcode == SR_WRITE_FIRST || p->opcode == SR_WRITE_ONLY || p->opcode == SR_WRITE_ONLY_IMM;
    int ends = p->opcode != SR_WRITE_FIRST && p->opcode != SR_WRITE_MIDDLE;
    const uint8_t *after = p->extension;
    if (begins) {
        uint64_t address = sr_get64(after);
        uint32_t rkey = sr_get32(after + 8);
        qp->write_left = sr_get32(after + 12);
        qp->write_at = qp->write_left ? target(e, address, rkey, qp->write_left) : NULL;
        if (qp->write_left && !qp->write_at)
            return -1;
        after += 16;
    }
    if (p->length > qp->write_left || (ends && p->length != qp->write_left))
        return -1;
    if (p->length) {
        memcpy(qp->write_at, p->payload, p->length);
        qp->write_at += p->length;
        qp->write_left -= p->length;
    }
    if (ends)
        qp->completed++;
    if (p->opcode == SR_WRITE_LAST_IMM || p->opcode == SR_WRITE_ONLY_IMM) {
        memcpy(&qp->immediate[qp->immediates % SR_IMMEDIATES], after, 4);
        qp->immediates++;
    }
    return 0;
}

void sr_qp_receive(struct sr_engine *e, struct sr_qp *qp, const struct sr_packet *p, uint64_t now) {
    if (p->source != qp->peer_address) {
        e->counters.strangers++;
        return;
    }
    if (p->opcode == SR_ACK) {
        on_ack(e, qp, p, now);
        return;
    }
    int32_t distance = (int32_t)((p->psn - (uint32_t)qp->expected) << 8) >> 8;
    if (distance < 0) {
        e->counters.duplicates++;
        if (p->ack_request)
            answer(e, qp, SYNDROME_ACK, qp->expected - 1);
        return;
    }
    if (distance > 0) {
        e->counters.out_of_order++;
        if (!qp->nak_sent) {
            e->counters.naks_sent++;
            answer(e, qp, SYNDROME_SEQUENCE, qp->expected);
        }
        qp->nak_sent = 1;
        return;
    }
    if (take(e, qp, p)) {
        answer(e, qp, SYNDROME_ACCESS, qp->expected);
        return;
    }
    qp->nak_sent = 0;
    qp->expected++;
    if (p->ack_request)
        answer(e, qp, SYNDROME_ACK, p->psn);
}
