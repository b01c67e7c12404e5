/* Parts, blocks and tails, and the plain version that the vector versions must equal bit for bit. */
#include "measure.h"

#include <string.h>

#define INF_BITS 0x7f800000u

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static float widened(const void *data, int type, uint64_t i)
{
    uint16_t half;
    float x;
    if (type == FCU_F32) {
        memcpy(&x, (const char *)data + 4 * i, 4);
        return x;
    }
    memcpy(&half, (const char *)data + 2 * i, 2);
    if (type == FCU_BF16)
        return of_bits((uint32_t)half << 16);
    _Float16 narrow;
    memcpy(&narrow, &half, 2);
    return (float)narrow;
}

static inline void gradient_at(const void *data, int type, uint64_t i, fcm_lanes *sums)
{
    float x = widened(data, type, i);
    uint32_t size = bits_of(x) & INT32_MAX;
    if (size >= INF_BITS) {
        sums->nans += size > INF_BITS, sums->infs += size == INF_BITS;
        return;
    }
    sums->zeros += !size;
    if (size > sums->largest)
        sums->largest = size;
    sums->squares[i % FCM_LANES] += (double)x * (double)x;
}

static inline void weight_at(const void *before, const void *after, int type, uint64_t i, fcm_lanes *sums)
{
    double was = widened(before, type, i), moved = (double)widened(after, type, i) - was;
    sums->squares[i % FCM_LANES] += was * was;
    sums->change[i % FCM_LANES] += moved * moved;
}

static void gradient(const void *data, int type, uint64_t n, fcm_lanes *sums)
{
    for (uint64_t i = 0; i < n; i++)
        gradient_at(data, type, i, sums);
}

static void weights(const void *before, const void *after, int type, uint64_t n, fcm_lanes *sums)
{
    for (uint64_t i = 0; i < n; i++)
        weight_at(before, after, type, i, sums);
}

const fcm_kernels fcm_portable = { "portable", gradient, weights };

const fcm_kernels *fcm_of(const fcu_kernels *kernels)
{
#if defined(__x86_64__)
    if (!strcmp(kernels->name, fcm_avx512.name))
        return &fcm_avx512;
    if (!strcmp(kernels->name, fcm_avx2.name))
        return &fcm_avx2;
#endif
    return &fcm_portable;
}

static double tree(double *lane)
{
    for (int apart = FCM_LANES / 2; apart; apart /= 2)
        for (int i = 0; i < apart; i++)
            lane[i] += lane[i + apart];
    return lane[0];
}

/* The first element of a block that is not finite, NaN or infinite as `nan` says, if none was found before. */
static void find(fcm_part *part, const void *data, uint64_t done, uint64_t n, int nan)
{
    uint64_t *found = nan ? &part->first_nan : &part->first_inf;
    for (uint64_t i = 0; i < n && *found == UINT64_MAX; i++) {
        uint32_t size = bits_of(widened(data, part->type, i)) & INT32_MAX;
        if (nan ? size > INF_BITS : size == INF_BITS)
            *found = part->first + done + i;
    }
}

static void block(const fcm_kernels *kernels, fcm_part *part, uint64_t done, uint64_t n)
{
    uint64_t whole = n / FCM_LANES * FCM_LANES, skip = done * fcm_size(part->type);
    const char *data = (const char *)part->data + skip;
    fcm_lanes sums = { .largest = 0 };
    if (part->before) {
        const char *before = (const char *)part->before + skip;
        kernels->weights(before, data, part->type, whole, &sums);
        for (uint64_t i = whole; i < n; i++)
            weight_at(before, data, part->type, i, &sums);
        part->change += tree(sums.change);
    } else {
        kernels->gradient(data, part->type, whole, &sums);
        for (uint64_t i = whole; i < n; i++)
            gradient_at(data, part->type, i, &sums);
        float largest = of_bits(sums.largest);
        if (largest > part->largest)
            part->largest = largest;
        part->zeros += sums.zeros, part->nans += sums.nans, part->infs += sums.infs;
        if (sums.nans)
            find(part, data, done, n, 1);
        if (sums.infs)
            find(part, data, done, n, 0);
    }
    part->squares += tree(sums.squares);
}

void fcm_measure(const fcm_kernels *kernels, fcm_part *part)
{
    part->squares = part->change = 0, part->largest = 0;
    part->zeros = part->nans = part->infs = 0;
    part->first_nan = part->first_inf = UINT64_MAX;
    if (!part->data)
        return;
    for (uint64_t done = 0; done < part->n; done += FCM_BLOCK) {
        uint64_t left = part->n - done;
        block(kernels, part, done, left < FCM_BLOCK ? left : FCM_BLOCK);
    }
}

void fcm_call(void *of, uint32_t i)
{
    const fcm_pass *pass = of;
    fcm_measure(pass->kernels, &pass->parts[i]);
}

void fcm_fold(fcm_part *sum, const fcm_part *part)
{
    sum->squares += part->squares, sum->change += part->change;
    sum->zeros += part->zeros, sum->nans += part->nans, sum->infs += part->infs;
    if (part->largest > sum->largest)
        sum->largest = part->largest;
    if (part->first_nan < sum->first_nan)
        sum->first_nan = part->first_nan;
    if (part->first_inf < sum->first_inf)
        sum->first_inf = part->first_inf;
}
