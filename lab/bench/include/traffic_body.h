/* fcb_traffic, written once over one cache line of the including file (baseline.c): TRAFFIC its name, TARGET its
 * attributes, LINE a line in registers, load(at), mix(x, y), store(at, line). It undefines all of them at its end. */
TARGET __attribute__((always_inline)) static inline void TRAFFIC(loop)(const uint64_t *to, const uint64_t *payloads,
                                                                       uint64_t n, uint32_t length, uint32_t bytes,
                                                                       uint64_t ahead, const int per, const int fetch)
{
    LINE sum = load((const uint8_t *)(payloads[n - 1] & ~63ull));
    for (uint64_t i = 0; i < n; i++) {
        const uint8_t *at = (const uint8_t *)(payloads[i] & ~63ull), *end = (const uint8_t *)payloads[i] + length;
        const uint8_t *next = (const uint8_t *)payloads[i + ahead < n ? i + ahead : i];
        uint8_t *dst = (uint8_t *)to[i], *last = dst + bytes;
        for (; dst < last; dst += 64) {
            for (int k = 0; k < per; k++, at += 64, next += 64) {
                if (fetch)
                    __builtin_prefetch(next);
                sum = mix(sum, load(at));
            }
            store(dst, sum);
        }
        for (; at < end; at += 64, next += 64) { /* what has no store of its own */
            if (fetch)
                __builtin_prefetch(next);
            sum = mix(sum, load(at));
        }
    }
    store((uint8_t *)to[n - 1], sum); /* so that the last loads are needed, too */
}

/* Loads for each store, and whether anything is fetched, are constants of the loop. */
TARGET static void TRAFFIC(choose)(const uint64_t *to, const uint64_t *payloads, uint64_t n, uint32_t length,
                                   uint32_t bytes, uint64_t ahead)
{
    if (length >= 2 * bytes && ahead)
        TRAFFIC(loop)(to, payloads, n, length, bytes, ahead, 2, 1);
    else if (length >= 2 * bytes)
        TRAFFIC(loop)(to, payloads, n, length, bytes, ahead, 2, 0);
    else if (ahead)
        TRAFFIC(loop)(to, payloads, n, length, bytes, ahead, 1, 1);
    else
        TRAFFIC(loop)(to, payloads, n, length, bytes, ahead, 1, 0);
}

#undef TRAFFIC
#undef TARGET
#undef LINE
#undef load
#undef mix
#undef store
