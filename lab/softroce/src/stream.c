#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sendmmsg */
#endif
#include "sr_stream.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

enum { BATCH = 64, ROOM_MS = 1 };

struct batch {
    struct sr_frame frames[BATCH];
    struct iovec pieces[BATCH][3];
    struct mmsghdr out[BATCH];
};

static int flush(int socket, struct batch *b, unsigned count) {
    for (unsigned done = 0; done < count;) {
        int n = sendmmsg(socket, b->out + done, count - done, 0);
        if (n > 0) {
            done += (unsigned)n;
        } else if (errno == ENOBUFS || errno == EAGAIN) {
            struct pollfd room = {.fd = socket, .events = POLLOUT};
            poll(&room, 1, ROOM_MS);
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

static void add(struct batch *b, unsigned at, struct sr_stream *s, uint8_t opcode, const uint8_t *extension,
                uint32_t extension_length, const uint8_t *data, uint32_t length, int last) {
    struct sr_frame *f = &b->frames[at];
    sr_frame_build(f, &s->path, opcode, s->qpn, s->psn++, last, extension, extension_length, data, length);
    b->pieces[at][0] = (struct iovec){f->head, f->head_length};
    b->pieces[at][1] = (struct iovec){(void *)f->data, f->data_length};
    b->pieces[at][2] = (struct iovec){f->tail, f->tail_length};
    memset(&b->out[at], 0, sizeof b->out[at]);
    b->out[at].msg_hdr.msg_iov = b->pieces[at];
    b->out[at].msg_hdr.msg_iovlen = 3;
}

int64_t sr_stream_message(struct sr_stream *s, uint64_t address, uint32_t rkey, const uint8_t *data, uint32_t length) {
    struct batch b;
    uint32_t packets = length ? (length + s->mtu - 1) / s->mtu : 1, immediate = length;
    if (s->big_endian_imm)
        immediate = __builtin_bswap32(immediate);
    for (uint32_t first = 0; first < packets;) {
        unsigned count = 0;
        for (; count < BATCH && first + count < packets; count++) {
            uint32_t i = first + count, at = i * s->mtu, n = length - at < s->mtu ? length - at : s->mtu, used = 0;
            uint8_t extension[20];
            int last = i + 1 == packets;
            if (i == 0) {
                sr_put64(extension, address);
                sr_put32(extension + 8, rkey);
                sr_put32(extension + 12, length);
                used = 16;
            }
            if (last) {
                memcpy(extension + used, &immediate, 4);
                used += 4;
            }
            uint8_t opcode = packets == 1 ? SR_WRITE_ONLY_IMM : last ? SR_WRITE_LAST_IMM
                           : i == 0 ? SR_WRITE_FIRST : SR_WRITE_MIDDLE;
            add(&b, count, s, opcode, extension, used, data + at, n, last);
        }
        int wrong = flush(s->socket, &b, count);
        if (wrong)
            return wrong;
        first += count;
    }
    return packets;
}
