#include "place.h"

int64_t fc_ll_bad_line(const uint8_t *wire, uint64_t lines, uint32_t flag)
{
    /* One accumulated test over the packet (vectorisable), a search only when it failed. */
    uint32_t wrong = 0;
    for (uint64_t i = 0; i < lines; i++) {
        uint32_t a, b;
        memcpy(&a, wire + 16 * i + 4, 4);
        memcpy(&b, wire + 16 * i + 12, 4);
        wrong |= (a ^ flag) | (b ^ flag);
    }
    if (!wrong)
        return -1;
    for (uint64_t i = 0; i < lines; i++) {
        uint32_t a, b;
        memcpy(&a, wire + 16 * i + 4, 4);
        memcpy(&b, wire + 16 * i + 12, 4);
        if (a != flag || b != flag)
            return (int64_t)i;
    }
    return -1;
}

void fc_ll_unpack(uint8_t *dst, const uint8_t *wire, uint64_t bytes)
{
    uint64_t lines = bytes / 8;
    for (uint64_t i = 0; i < lines; i++) {
        memcpy(dst + 8 * i, wire + 16 * i, 4);
        memcpy(dst + 8 * i + 4, wire + 16 * i + 8, 4);
    }
    uint64_t rest = bytes - 8 * lines;
    if (rest) {
        uint8_t last[8];
        memcpy(last, wire + 16 * lines, 4);
        memcpy(last + 4, wire + 16 * lines + 8, 4);
        memcpy(dst + 8 * lines, last, rest);
    }
}

int64_t fc_ll128_bad_line(const uint8_t *wire, uint64_t lines, uint64_t flag)
{
    for (uint64_t i = 0; i < lines; i++) {
        uint64_t f;
        memcpy(&f, wire + 128 * i + 120, 8);
        if (f != flag)
            return (int64_t)i;
    }
    return -1;
}
