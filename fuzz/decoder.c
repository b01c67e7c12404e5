/* libFuzzer target: fc_roce_decode, fc_icrc and the LL / LL128 kernels on one frame, raw bytes.
 *
 * The frame is copied into memory of exactly its size, so AddressSanitizer sees a read one byte too far. Beyond
 * crashes it holds the decoder to what roce.h promises:
 *   - every pointer and length it returns lies in the frame;
 *   - bytes behind the IP packet (Ethernet padding) change nothing, and one byte less is never FC_ROCE;
 *   - fields a router may rewrite do not change the ICRC, any other bit under the ICRC does;
 *   - the short decode (middle.h) takes a frame for some MTU only if all that it says is what roce.h says.
 */
#include "cover.h"
#include "middle.h"
#include "place.h"
#include "roce.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                                  \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "decoder: broken promise, line %d: %s\n", __LINE__, #condition);                \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

static uint8_t *exact(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy)
        abort();
    if (size)
        memcpy(copy, data, size);
    return copy;
}

static int decode_prefix(const uint8_t *frame, size_t size, fc_roce *out)
{
    uint8_t *copy = exact(frame, size);
    int status = fc_roce_decode(copy, size, out);
    free(copy);
    return status;
}

static void bounds(const uint8_t *frame, size_t size, const fc_roce *p)
{
    const uint8_t *end = frame + size, *ib_end = p->bth + p->ib_len;
    size_t width = p->ip_version == 4 ? 4 : 16;

    REQUIRE(p->frame >= frame && p->ip >= p->frame + (p->tunnel ? 0 : 14) && (p->tunnel || p->frame == frame));
    REQUIRE((p->ip_version == 4 || p->ip_version == 6));
    REQUIRE(p->src >= p->ip && p->src + width <= p->bth && p->dst >= p->ip && p->dst + width <= p->bth);
    REQUIRE(p->bth >= p->ip + (p->ip_version == 4 ? 28 : 48) && ib_end <= end && p->ib_len >= 16);
    REQUIRE(p->payload >= p->bth + 12 && p->payload <= ib_end);
    REQUIRE((size_t)(ib_end - p->payload) == (size_t)p->payload_len + p->pad + 4);
    REQUIRE(p->pad < 4 && p->dest_qp < 1u << 24 && p->psn < 1u << 24 && p->msn < 1u << 24 && p->src_qp < 1u << 24);
}

static void same_fields(const fc_roce *a, const fc_roce *b)
{
    REQUIRE(a->payload_len == b->payload_len && a->ib_len == b->ib_len && a->dest_qp == b->dest_qp);
    REQUIRE(a->psn == b->psn && a->opcode == b->opcode && a->va == b->va && a->dma_len == b->dma_len);
    REQUIRE(a->imm == b->imm && a->headers == b->headers && a->vlan == b->vlan && a->udp_sport == b->udp_sport);
}

/* CRC-32 bit by bit, over the packet as IBTA A17.3.3 masks it: slow, and shares nothing with icrc.c. */
static uint32_t plain_crc(const fc_roce *p)
{
    size_t head = (size_t)(p->bth - p->ip), size = 8 + head + p->ib_len - 4;
    uint8_t *b = malloc(size), *ip = b + 8, *bth = ip + head;
    uint32_t crc = 0xffffffffu;

    if (!b)
        abort();
    memset(b, 0xff, 8);
    memcpy(ip, p->ip, size - 8);
    if (p->ip_version == 4) {
        ip[1] = ip[8] = ip[10] = ip[11] = 0xff;
    } else {
        ip[0] |= 0x0f;
        ip[1] = ip[2] = ip[3] = ip[7] = 0xff;
    }
    bth[-2] = bth[-1] = bth[4] = 0xff;
    for (size_t i = 0; i < size; i++) {
        crc ^= b[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    free(b);
    return ~crc;
}

/* `frame` is ours to change; it is decoded as p and ends with the ICRC. */
static void icrc(uint8_t *frame, size_t size, const fc_roce *p, uint32_t pick)
{
    uint32_t right = fc_icrc(p), carried;
    uint8_t *ip = (uint8_t *)p->ip, *bth = (uint8_t *)p->bth, *tail = bth + p->ib_len - 4;
    fc_roce again;

    REQUIRE(right == plain_crc(p));
    carried = (uint32_t)tail[0] | (uint32_t)tail[1] << 8 | (uint32_t)tail[2] << 16 | (uint32_t)tail[3] << 24;
    REQUIRE(fc_icrc_ok(p) == (carried == right));
    for (int i = 0; i < 4; i++)
        tail[i] = (uint8_t)(right >> 8 * i);
    REQUIRE(fc_icrc_ok(p));
    /* what routers and mirrors rewrite */
    if (p->ip_version == 4) {
        ip[1] ^= (uint8_t)pick;
        ip[8] ^= (uint8_t)(pick >> 8);
        ip[10] ^= 0x5a;
        ip[11] ^= (uint8_t)(pick >> 16);
    } else {
        ip[0] ^= (uint8_t)pick & 0x0f;
        ip[1] ^= (uint8_t)(pick >> 8);
        ip[3] ^= (uint8_t)(pick >> 16);
        ip[7] ^= 0x81;
    }
    bth[-1] ^= (uint8_t)(pick >> 4);
    bth[4] ^= 0x80;
    if (p->frame != p->ip) /* a tunnel may hold an IP packet without an Ethernet header */
        ((uint8_t *)p->frame)[0] ^= 0xff;
    REQUIRE(fc_roce_decode(frame, size, &again) == FC_ROCE && fc_icrc_ok(&again));
    same_fields(p, &again);
    /* and one bit that nobody may */
    size_t place = pick % (p->ib_len - 12 - 4 ? p->ib_len - 12 - 4 : 1);
    if (p->ib_len > 16) {
        bth[12 + place] ^= (uint8_t)(1u << (pick >> 24) % 8);
        REQUIRE(!fc_icrc_ok(&again));
    }
}

/* Every placing kernel of this machine, in one of its ways, on the payload, against the plain ones: same verdict, same
 * bytes, and not a byte beyond the destination (of exact size; it begins at any cell, as regions of the arena do). */
static void kernels(const fc_roce *p, uint32_t pick)
{
    uint64_t lines = p->payload_len / 16, halves = p->payload_len / FC_LL128_WIRE, bytes, skip = pick % 8 * FC_CELL;
    uint32_t flag = 0;
    uint64_t flag128 = 0;
    int way = (int)(pick >> 16) % FC_WAYS;
    uint8_t *wire = exact(p->payload, p->payload_len), *want, *out;

    if (lines)
        memcpy(&flag, wire + 4, 4);
    if (halves)
        memcpy(&flag128, wire + 120, 8);
    for (int i = 0; fc_place_all[i]; i++) {
        const fc_place_kernels *k = fc_place_all[i];
        for (int form = 0; form < 3; form++) {
            int64_t found = -1, expected = -1;
            bytes = form == 0 ? lines * 8 : form == 1 ? halves * FC_LL128_DATA : p->payload_len;
            bytes -= bytes ? pick / 8 % (bytes < 960 ? bytes : 960) : 0;
            want = calloc(1, bytes + 1);
            out = malloc(skip + bytes + !(skip + bytes));
            if (!want || !out)
                abort();
            if (form == 0) {
                expected = fc_place_portable.ll[0](want, wire, bytes, flag, wire);
                found = k->ll[way](out + skip, wire, bytes, flag, wire);
            } else if (form == 1) {
                expected = fc_place_portable.ll128[0](want, wire, halves, bytes, flag128, wire);
                found = k->ll128[way](out + skip, wire, halves, bytes, flag128, wire);
            } else {
                fc_place_portable.copy[0](want, wire, bytes, wire);
                k->copy[way](out + skip, wire, bytes, wire);
            }
            REQUIRE(found == expected && (found >= 0 || !bytes || memcmp(want, out + skip, bytes) == 0));
            free(want);
            free(out);
        }
    }
    for (uint64_t i = 0; lines && fc_ll_bad_line(wire, lines, flag) < 0 && i < 2 * lines; i++)
        REQUIRE(memcmp(wire + 8 * i + 4, &flag, 4) == 0);
    free(wire);
}

/* fc_middle_decode, for the MTU that fits if any does, and for the usual ones. */
static void middle(const uint8_t *frame, size_t size, const fc_roce *p, int status)
{
    const uint32_t mtus[] = {status == FC_ROCE ? p->payload_len : 0, 256, 512, 1024, 2048, 4096};
    fc_middle m;
    for (size_t i = 0; i < sizeof mtus / sizeof *mtus; i++) {
        if (!fc_middle_decode(frame, size, mtus[i], &m))
            continue;
        REQUIRE(status == FC_ROCE && p->opcode == FC_RC_WRITE_MIDDLE && !p->tunnel && p->vlan == 0xffff && !p->pad);
        REQUIRE(p->payload_len == mtus[i] && p->payload == m.bth + 12 && p->bth == m.bth && p->ip == m.ip);
        REQUIRE(p->ip_version == m.version && p->src == m.ends && p->dst == m.ends + (m.version == 4 ? 4 : 16));
        REQUIRE(p->dest_qp == m.dest_qp && p->psn == (m.psn & 0xffffff));
        REQUIRE(fc_middle_icrc_ok(m, mtus[i]) == fc_icrc_ok(p));
    }
    const uint8_t *bth = fc_probable_bth(frame, size);
    REQUIRE(!bth || (bth >= frame && bth + 12 <= frame + size));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *frame = exact(data, size);
    uint32_t pick = 0x9e3779b9u * (uint32_t)(size + 1);
    fc_roce p, cut;
    int status = fc_roce_decode(frame, size, &p);

    REQUIRE(status >= FC_ROCE && status < FC_DECODE_STATUS_COUNT);
    middle(frame, size, &p, status);
    if (status == FC_ROCE) {
        bounds(frame, size, &p);
        size_t end = (size_t)(p.bth + p.ib_len - frame);
        pick ^= p.psn * 0x85ebca6bu ^ p.imm;
        if (!p.tunnel) { /* behind a mirrored frame the tunnel's own lengths must be kept too */
            REQUIRE(decode_prefix(data, end, &cut) == FC_ROCE);
            same_fields(&p, &cut);
        }
        REQUIRE(decode_prefix(data, end - 1, &cut) != FC_ROCE);
        REQUIRE(decode_prefix(data, pick % end, &cut) != FC_ROCE);
        kernels(&p, pick);
        icrc(frame, size, &p, pick);
    }
    free(frame);
    return 0;
}
