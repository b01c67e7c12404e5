/* Bytes of a packet into the gradient arena: payload codecs. All functions are pure on their arguments.
 *
 * Placing is one pass over a packet: fc_*_place checks every flag while it writes the data, with
 * non-temporal stores where the processor has them. Two rules follow for the caller:
 *   - When a flag was wrong the destination holds anything. So it may only be called for cells that are not
 *     covered yet (cover.h), and coverage is set only after it said that all flags were right.
 *   - Non-temporal stores are ordered by nothing but a fence. fc_place_fence() comes after a burst of packets
 *     and before anything that tells another thread about them (once per burst: one per packet costs 2x).
 * `next` is where as many bytes lie that will be placed soon (any address at all; the packet's own for none):
 * they are fetched while these are placed.
 *
 * Which instructions: AVX-512, AVX2 or portable C is chosen when the library is loaded, FLOWCHECK_SIMD=avx2 or
 * =portable takes a lesser one (tests; a machine whose AVX-512 lowers the clock). How the bytes are fetched and stored
 * is a *way*, one for each protocol, and how far ahead goes with it. Processors disagree about which is best
 * (docs/understand/performance.md), so whoever starts engines may measure and call fc_place_choose() before the first
 * of them; FC_WAY_DEFAULT is sane everywhere. All ways and all instructions give the same bytes and the same answers.
 */
#ifndef FLOWCHECK_PLACE_H
#define FLOWCHECK_PLACE_H

#include "prefetch.h"
#include "protocol.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* -- LL (4.1): 16-byte lines of data4 flag4 data4 flag4 ---------------------------------------- */

/* First of `lines` lines whose two flags are not both `flag`, or -1. */
int64_t fc_ll_bad_line(const uint8_t *wire, uint64_t lines, uint32_t flag);

/* Data of lines into dst: `bytes` data bytes, the last line may be used in part. */
void fc_ll_unpack(uint8_t *dst, const uint8_t *wire, uint64_t bytes);

/* -- LL128 (4.2): 128-byte lines, 15 words of data and a flag, permuted in 960-byte halves ------- */

/* First of `lines` lines whose flag is not `flag`, or -1. */
int64_t fc_ll128_bad_line(const uint8_t *wire, uint64_t lines, uint64_t flag);

/* Data offset (multiple of 8) inside its 960-byte half-slice of word `word` (0..14) of line `line` (0..7). */
static inline uint32_t fc_ll128_offset(uint32_t line, uint32_t word)
{
    if (line < 4)
        return 128 * line + 8 * word;
    return word < 14 ? 512 + 112 * (line - 4) + 8 * word : 128 * (line - 4) + 120;
}

/* -- placing: check and write in one pass -------------------------------------------------------- */

/* How a payload that is placed soon is fetched: not at all; into every cache (prefetcht0); past the outer ones
 * (prefetchnta); line by line while the packet before is placed, or whole in front of it. `+ FC_REGULAR`: stored
 * through the cache instead of past it. */
enum fc_way { FC_NO_FETCH, FC_T0, FC_NTA, FC_T0_WHOLE, FC_NTA_WHOLE, FC_FETCHES, FC_REGULAR = FC_FETCHES };
enum { FC_WAYS = 2 * FC_FETCHES, FC_WAY_DEFAULT = FC_T0, FC_AHEAD_DEFAULT = 4096 };
/* To be raised when a kernel changes: choices measured of another version are worth nothing. */
#define FC_PLACE_VERSION 1

typedef int64_t fc_ll_kernel(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next);
typedef int64_t fc_ll128_kernel(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                                const uint8_t *next);
typedef void fc_copy_kernel(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next);

typedef struct fc_place_kernels {
    const char *name;
    fc_ll_kernel *ll[FC_WAYS];
    fc_ll128_kernel *ll128[FC_WAYS];
    fc_copy_kernel *copy[FC_WAYS];
} fc_place_kernels;

/* Best first, ended by a null pointer; those this processor cannot run are left out. */
extern const fc_place_kernels *fc_place_all[4];
/* Of each fc_way. */
extern const char *const fc_way_names[FC_WAYS];

/* What is in use. Written by the library's constructor and by fc_place_choose(), read-only while engines run. */
typedef struct fc_place_choice {
    fc_ll_kernel *ll;
    fc_ll128_kernel *ll128;
    fc_copy_kernel *copy;
    fc_ll_kernel *ll_near;       /* as ll and ll128 fetch, with stores through the cache */
    fc_ll128_kernel *ll128_near;
    const fc_place_kernels *kernels;
    int way[3];        /* by protocol: 0 LL, 1 LL128, 2 SIMPLE (lane.h) */
    uint32_t ahead[3]; /* payload bytes under way to the cache          */
} fc_place_choice;
extern fc_place_choice fc_placing;

/* From now on packets of this protocol are placed so. Before engines start; not while one runs. */
void fc_place_choose(int protocol, int way, uint32_t ahead);

/* `bytes` data bytes of LL lines to dst (a multiple of 8). Both flags of every line used are checked.
 * Returns -1, or the first wrong line; then dst[0..bytes) is undefined. Never writes elsewhere. */
static inline int64_t fc_ll_place(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next)
{
    return fc_placing.ll(dst, wire, bytes, flag, next);
}

/* `halves` whole half-slices of LL128 (1024 wire bytes each) to dst: the first `bytes` of their 960 * halves
 * data bytes. The flags of all lines are checked, padding included. Returns as fc_ll_place. */
static inline int64_t fc_ll128_place(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                                     const uint8_t *next)
{
    return fc_placing.ll128(dst, wire, halves, bytes, flag, next);
}

/* SIMPLE (4.3): plain bytes. */
static inline void fc_copy_place(uint8_t *dst, const uint8_t *src, uint64_t bytes, const uint8_t *next)
{
    fc_placing.copy(dst, src, bytes, next);
}

/* The same two to bytes that are read next: a copy's, on their way to be compared. dst may hold anything. */
static inline int64_t fc_ll_near(uint8_t *dst, const uint8_t *wire, uint64_t bytes, uint32_t flag, const uint8_t *next)
{
    return fc_placing.ll_near(dst, wire, bytes, flag, next);
}

static inline int64_t fc_ll128_near(uint8_t *dst, const uint8_t *wire, uint64_t halves, uint64_t bytes, uint64_t flag,
                                    const uint8_t *next)
{
    return fc_placing.ll128_near(dst, wire, halves, bytes, flag, next);
}

/* `next` of a packet that was not placed: fetched all the same, as the protocol's way is. */
static inline void fc_place_fetch(int protocol, const uint8_t *next, uint64_t bytes)
{
    int fetch = fc_placing.way[protocol] % FC_FETCHES;
    if (fetch == FC_T0 || fetch == FC_T0_WHOLE)
        fc_prefetch_bytes(next, bytes);
    else if (fetch != FC_NO_FETCH)
        fc_prefetch_bytes_once(next, bytes);
}

/* How many packets ahead of the one that is placed the one to be fetched is; at most `most`. */
static inline uint64_t fc_place_ahead(int protocol, uint64_t mtu, uint64_t most)
{
    uint64_t n = fc_placing.ahead[protocol] / mtu;
    return n < 1 ? 1 : n > most ? most : n;
}

/* Orders what was placed before whatever the caller publishes next. */
static inline void fc_place_fence(void)
{
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#else
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

/* -- measuring (parser/src/sweep.c) -------------------------------------------------------------- */

/* n payloads of `length` wire bytes at addresses `payloads` to addresses `to`, each fetched `ahead` packets before.
 * Returns packets with a wrong flag. */
uint64_t fc_place_sweep(const fc_place_kernels *kernels, int protocol, int way, const uint64_t *to,
                        const uint64_t *payloads, const uint64_t *flags, uint64_t n, uint32_t length, uint64_t ahead);

/* `bytes` from each of n addresses out of every cache. */
void fc_place_flush(const uint64_t *at, uint64_t n, uint64_t bytes);

/* The kernel tables, one per source file; avx2 and avx512 exist on x86-64 only. */
extern const fc_place_kernels fc_place_portable, fc_place_avx2, fc_place_avx512;

#endif
