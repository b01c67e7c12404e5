/* NCCL's clear-to-send write (nccl-wire.md 5.4), read by the forms that parser/nccl.py describes: observer and state
 * machine share this. Thread rule: pure functions. */
#ifndef FLOWCHECK_CTS_H
#define FLOWCHECK_CTS_H

#include <stdint.h>

#define FC_CTS_ELEMENTS_MAX 8
#define FC_CTS_REQUESTS 8 /* a place of NCCL's FIFO has room for so many elements */

/* One form: its bytes, where each field begins, and the width of the size. Address and number have 8 bytes, the others
 * 4, all of them little-endian. Every field lies within the bytes: parser/nccl.py has checked. */
typedef struct fc_cts_element {
    uint8_t bytes, address_at, size_at, size_width, rkey_at, requests_at, tag_at, number_at;
} fc_cts_element;

typedef struct fc_cts {
    uint64_t address, size, number;
    uint32_t rkey, requests, tag;
} fc_cts;

static inline uint64_t fc_cts_field(const uint8_t *at, uint32_t width)
{
    uint64_t value = 0;
    while (width--)
        value = value << 8 | at[width];
    return value;
}

/* Read `length` payload bytes as form `e`. 1 if it has that length and every field is plausible, otherwise 0. */
static inline int fc_cts_read(const fc_cts_element *e, const uint8_t *p, uint32_t length, fc_cts *c)
{
    if (length != e->bytes)
        return 0;
    c->address = fc_cts_field(p + e->address_at, 8);
    c->size = fc_cts_field(p + e->size_at, e->size_width);
    c->number = fc_cts_field(p + e->number_at, 8);
    c->rkey = (uint32_t)fc_cts_field(p + e->rkey_at, 4);
    c->requests = (uint32_t)fc_cts_field(p + e->requests_at, 4);
    c->tag = (uint32_t)fc_cts_field(p + e->tag_at, 4);
    return 1 <= c->requests && c->requests <= FC_CTS_REQUESTS && 1 <= c->number && c->number < 1ull << 48 && 1 <= c->size
           && c->size < 1ull << 34 && c->address != 0 && c->rkey != 0 && c->tag < 1 << 24;
}

#endif
