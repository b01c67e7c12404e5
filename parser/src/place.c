/* Codecs in plain C - the reference that the SIMD versions must equal byte for byte - and the choice of one. */
#include "place.h"

#include <stdlib.h>

/* -- reference ------------------------------------------------------------------------------------ */

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
        memcpy(&f, wire + FC_LL128_LINE * i + 120, 8);
        if (f != flag)
            return (int64_t)i;
    }
    return -1;
}

static int64_t ll_portable(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next)
{
    int64_t bad = fc_ll_bad_line(wire, (bytes + 7) / 8, flag);
    if (bad < 0)
        fc_ll_unpack(dst, wire, bytes);
    return bad;
}

static int64_t ll128_portable(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                              const uint8_t *next)
{
    int64_t bad = fc_ll128_bad_line(wire, 8 * halves, flag);
    if (bad >= 0)
        return bad;
    for (uint64_t word = 0; word < 120 * halves; word++) {
        uint32_t line = (uint32_t)(word / 15 % 8), at = (uint32_t)(word % 15);
        uint64_t to = word / 120 * FC_LL128_DATA + fc_ll128_offset(line, at);
        if (to >= bytes)
            continue;
        memcpy(dst + to, wire + word / 15 * FC_LL128_LINE + 8 * at, bytes - to < 8 ? bytes - to : 8);
    }
    return -1;
}

static void copy_portable(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next)
{
    memcpy(dst, src, bytes);
}

#define EVERY_WAY 0 ... FC_WAYS - 1 /* the compiler's loads and stores, whatever way is asked for */
const fc_place_kernels fc_place_portable = {
    "portable", {[EVERY_WAY] = ll_portable}, {[EVERY_WAY] = ll128_portable}, {[EVERY_WAY] = copy_portable},
};

/* -- choice --------------------------------------------------------------------------------------- */

const char *const fc_way_names[FC_WAYS] = {
    "none",         "t0",         "nta",         "t0-whole",         "nta-whole",
    "none-regular", "t0-regular", "nta-regular", "t0-whole-regular", "nta-whole-regular",
};
const fc_place_kernels *fc_place_all[4] = {&fc_place_portable};
fc_place_choice fc_placing;

void fc_place_choose(int protocol, int way, uint32_t ahead)
{
    int near = way % FC_FETCHES + FC_REGULAR;
    if (protocol == 0)
        fc_placing.ll = fc_placing.kernels->ll[way], fc_placing.ll_near = fc_placing.kernels->ll[near];
    else if (protocol == 1)
        fc_placing.ll128 = fc_placing.kernels->ll128[way], fc_placing.ll128_near = fc_placing.kernels->ll128[near];
    else
        fc_placing.copy = fc_placing.kernels->copy[way];
    fc_placing.way[protocol] = way;
    fc_placing.ahead[protocol] = ahead;
}

/* Every extension carries its own copy of this file, so each makes the same choice for itself. */
__attribute__((constructor)) static void choose(void)
{
    const char *wanted = getenv("FLOWCHECK_SIMD");
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        fc_place_all[n++] = &fc_place_avx512;
    if (__builtin_cpu_supports("avx2"))
        fc_place_all[n++] = &fc_place_avx2;
#endif
    fc_place_all[n++] = &fc_place_portable;
    fc_place_all[n] = NULL;
    fc_placing.kernels = fc_place_all[0];
    for (int i = 0; wanted && i < n; i++)
        if (strcmp(wanted, fc_place_all[i]->name) == 0)
            fc_placing.kernels = fc_place_all[i];
    for (int protocol = 0; protocol < 3; protocol++)
        fc_place_choose(protocol, FC_WAY_DEFAULT, FC_AHEAD_DEFAULT);
}
