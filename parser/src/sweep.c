/* The kernels without the parser, packet after packet: what calibration and benchmarks time. */
#include "place.h"

uint64_t fc_place_sweep(const fc_place_kernels *kernels, int protocol, int way, const uint64_t *to,
                        const uint64_t *payloads, const uint64_t *flags, uint64_t n, uint32_t length, uint64_t ahead)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint8_t *wire = (const uint8_t *)payloads[i];
        const uint8_t *next = (const uint8_t *)payloads[i + ahead < n ? i + ahead : i];
        uint8_t *dst = (uint8_t *)to[i];
        if (protocol == 0)
            wrong += kernels->ll[way](dst, wire, length / 2, (uint32_t)flags[i], next) >= 0;
        else if (protocol == 1)
            wrong += kernels->ll128[way](dst, wire, length / 1024, length / 1024 * 960, flags[i], next) >= 0;
        else
            kernels->copy[way](dst, wire, length, next);
        if ((i & 63) == 63) /* as the engine: once per burst */
            fc_place_fence();
    }
    fc_place_fence();
    return wrong;
}

void fc_place_flush(const uint64_t *at, uint64_t n, uint64_t bytes)
{
#if defined(__x86_64__)
    for (uint64_t i = 0; i < n; i++) {
        for (uint64_t line = at[i] & ~63ull; line < at[i] + bytes; line += 64)
            __builtin_ia32_clflush((const void *)line);
    }
    __builtin_ia32_mfence();
#endif
}
