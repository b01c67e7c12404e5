/* Sums of blocks by vectors, written once. sums.c includes it for each width, with
 *
 *   WIDTH NAME(x)          of the width; x for this width (blocks_avx2)
 *   TARGET OP              what to compile for; how its functions are declared
 *   V MM(operation)        vector of NAME(N) elements of 32 bits, and its intrinsic of that name
 *   NAME(load)             NAME(N) elements of 1, 2 or 4 bytes, widened to 32 bits; half as many of 8 bytes
 *   NAME(weights)          NAME(N) halves of weights
 *   NAME(widened)          half as many, each widened to 64 bits
 *   NAME(product)          of elements of 8 bytes and their weights, given as widened halves, modulo 2^64
 *   NAME(sum_64) (sum_32)  of a vector's lanes
 *
 * and takes back what it was given by macros.
 */
OP void NAME(blocks)(const uint8_t *data, const int abreast, uint64_t k, uint64_t *sums, const int size)
{
    const uint64_t stride = (uint64_t)BLOCK * size, n = NAME(N);
    V whole[ABREAST], upper[ABREAST]; /* sums of 64 bits, and of the 32 that belong 32 higher */
    uint64_t i = 0;
    for (int b = 0; b < abreast; b++)
        whole[b] = upper[b] = MM(set1_epi32)(0);
    for (; size == 8 && i + n / 2 <= k; i += n / 2) {
        V lo = NAME(widened)(low + i), hi = NAME(widened)(high + i);
        for (int b = 0; b < abreast; b++) {
            V x = NAME(load)(data + b * stride + i * size, size);
            whole[b] = MM(add_epi64)(whole[b], NAME(product)(x, lo, hi));
        }
    }
    for (; size != 8 && i + n <= k; i += n) {
        V lo = NAME(weights)(low + i), hi = NAME(weights)(high + i), odd = MM(srli_epi64)(lo, 32);
#pragma GCC unroll 4
        for (int b = 0; b < abreast; b++) {
            const uint8_t *at = data + b * stride + i * size;
            _mm_prefetch((const char *)at + 1024, _MM_HINT_T0);
            V x = NAME(load)(at, size);
            whole[b] = MM(add_epi64)(whole[b], MM(mul_epu32)(x, lo));
            whole[b] = MM(add_epi64)(whole[b], MM(mul_epu32)(MM(srli_epi64)(x, 32), odd));
            upper[b] = MM(add_epi32)(upper[b], MM(mullo_epi32)(x, hi));
        }
    }
    for (int b = 0; b < abreast; b++) {
        uint64_t above = NAME(sum_32)(upper[b]);
        sums[b] = NAME(sum_64)(whole[b]) + (above << 32) + plain(data + b * stride, i, k, size);
    }
}

OP void NAME(any)(const uint8_t *data, int abreast, uint64_t k, uint64_t *sums, const int size)
{
    if (abreast == ABREAST)
        NAME(blocks)(data, ABREAST, k, sums, size);
    else
        for (int b = 0; b < abreast; b++)
            NAME(blocks)(data + (uint64_t)b * BLOCK * size, 1, k, sums + b, size);
}

__attribute__((target(TARGET))) void NAME(fcs)(const void *data, int abreast, uint64_t k, int size, uint64_t *sums)
{
    BY_SIZE(NAME(any), data, abreast, k, sums)
}

#undef WIDTH
#undef TARGET
#undef MM
#undef V
