/* The choice of kernels, copies and the workers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif
#include "update.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

const fcu_kernels *fcu_all[4];
const fcu_kernels *fcu_best;

const fcu_kernels *fcu_named(const char *name)
{
    if (!*name)
        return fcu_best;
    for (int i = 0; fcu_all[i]; i++)
        if (!strcmp(fcu_all[i]->name, name))
            return fcu_all[i];
    return NULL;
}

__attribute__((constructor)) static void choose(void)
{
    const char *wanted = getenv("FLOWCHECK_SIMD");
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        fcu_all[n++] = &fcu_avx512;
    if (avx2)
        fcu_all[n++] = &fcu_avx2;
#endif
    fcu_all[n++] = &fcu_portable;
    fcu_best = fcu_all[0];
    const fcu_kernels *found = wanted ? fcu_named(wanted) : NULL;
    if (found)
        fcu_best = found;
}

int fcu_has_root(int how)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return how < FCU_SQRT_RSQRT14 || (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"));
#else
    return how == FCU_SQRT_IEEE;
#endif
}

void fcu_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

void fcu_copy(void *dst, const void *src, size_t bytes)
{
    char *d = dst;
    const char *s = src;
#if defined(__x86_64__)
    size_t head = -(uintptr_t)d & 15;
    if (head > bytes)
        head = bytes;
    memcpy(d, s, head);
    d += head, s += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, d += 64, s += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)s), b = _mm_loadu_si128((const __m128i *)(s + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(s + 32)), e = _mm_loadu_si128((const __m128i *)(s + 48));
        _mm_stream_si128((__m128i *)d, a), _mm_stream_si128((__m128i *)(d + 16), b);
        _mm_stream_si128((__m128i *)(d + 32), c), _mm_stream_si128((__m128i *)(d + 48), e);
    }
#endif
    memcpy(d, s, bytes);
    fcu_fence();
}

static size_t size_of(int type) { return type == FCU_F32 ? 4 : 2; }

static float *past(const float *at, uint64_t bytes) { return (float *)((uintptr_t)at + bytes); }

fcu_piece fcu_part(const fcu_piece *c, const fcu_rule *rule, uint64_t from, uint64_t n)
{
    fcu_piece part = *c;
    uint64_t tail = c->n - c->odd, end = from + n, skip = from * size_of(rule->held);
    part.n = n;
    part.g = (const char *)c->g + from * size_of(rule->grad);
    part.p = past(c->p, skip), part.m = past(c->m, skip), part.v = past(c->v, skip), part.x = past(c->x, skip);
    part.p1 = past(c->p1, skip), part.m1 = past(c->m1, skip);
    part.v1 = past(c->v1, skip), part.x1 = past(c->x1, skip);
    if (part.low)
        part.low += from;
    part.odd = end <= tail ? 0 : end - (from > tail ? from : tail);
    return part;
}

/* -- workers ----------------------------------------------------------------------------------------------- */

enum { CHUNK = 1 << 16, SUM_CHUNK = 8 * FCS_BLOCK, COPY_CHUNK = 1 << 20 };

/* Updates (rules, rule_of, pieces), or sums, or copies, or calls. */
typedef struct batch {
    struct batch *next;
    const fcu_rule *rules;
    const uint32_t *rule_of;
    const fcu_piece *pieces;
    fcu_sum *sums;
    const fcu_block *blocks;
    fcu_call *call;
    void *argument;        /* of calls */
    uint32_t count, piece; /* next piece and element to hand out */
    uint64_t element, ticket, open;
} batch;

/* What a worker does next: a part of a piece by a rule, n elements of a sum, n bytes of a copy, or call `from`. */
typedef struct task {
    batch *of;
    const fcu_rule *rule;
    fcu_piece part;
    fcu_sum *sum;
    const fcu_block *block;
    uint64_t from, n;
} task;

struct fcu_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    const fcu_kernels *kernels;
    fcu_tuning tuning;
    batch *first, *last;  /* not done yet, oldest first */
    batch *hand;          /* the one that chunks are taken from */
    uint64_t tickets, finished;
    int stop, threads;
    pid_t process; /* whose threads they are */
    pthread_t thread[];
};

/* The next chunk of the batch in hand; lock held. */
static int take(fcu_pool *pool, task *next)
{
    for (;;) {
        batch *b = pool->hand;
        if (!b)
            return 0;
        if (b->piece == b->count) {
            pool->hand = b->next;
            continue;
        }
        uint64_t whole, most;
        if (b->sums)
            whole = b->sums[b->piece].n, most = SUM_CHUNK;
        else if (b->blocks)
            whole = b->blocks[b->piece].bytes, most = COPY_CHUNK;
        else if (b->call)
            whole = most = 1;
        else
            whole = b->pieces[b->piece].n, most = CHUNK;
        uint64_t left = whole - b->element, n = left < most ? left : most;
        *next = (task){ .of = b, .from = b->element, .n = n };
        if (b->sums) {
            next->sum = &b->sums[b->piece];
        } else if (b->blocks) {
            next->block = &b->blocks[b->piece];
        } else if (b->call) {
            next->from = b->piece;
        } else {
            next->rule = &b->rules[b->rule_of[b->piece]];
            next->part = fcu_part(&b->pieces[b->piece], next->rule, b->element, n);
        }
        b->open++;
        b->element += n;
        if (b->element == whole)
            b->piece++, b->element = 0;
        return 1;
    }
}

/* Batches end in order: one that is done waits for those before it. Lock held. */
static void retire(fcu_pool *pool)
{
    int any = 0;
    while (pool->first && pool->first->piece == pool->first->count && !pool->first->open) {
        batch *b = pool->first;
        if (pool->hand == b)
            pool->hand = b->next;
        pool->first = b->next;
        if (!pool->first)
            pool->last = NULL;
        pool->finished = b->ticket;
        free(b);
        any = 1;
    }
    if (any)
        pthread_cond_broadcast(&pool->done);
}

static void *worker(void *argument)
{
    fcu_pool *pool = argument;
    task next;
    pthread_setname_np(pthread_self(), "fc-update");
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!take(pool, &next)) {
            if (pool->stop) {
                pthread_mutex_unlock(&pool->lock);
                return NULL;
            }
            pthread_cond_wait(&pool->work, &pool->lock);
        }
        pthread_mutex_unlock(&pool->lock);
        uint64_t found = 0;
        if (next.sum)
            found = fcs_part(pool->kernels->sums, next.sum->data, next.from, next.n, next.sum->size);
        else if (next.block)
            fcu_copy((char *)next.block->to + next.from, (const char *)next.block->from + next.from, next.n);
        else if (next.of->call)
            next.of->call(next.of->argument, (uint32_t)next.from);
        else
            pool->kernels->update(next.rule, &next.part, &pool->tuning);
        fcu_fence(); /* before the count below says that it is there */
        pthread_mutex_lock(&pool->lock);
        if (next.sum)
            next.sum->sum += found;
        next.of->open--;
        retire(pool);
    }
}

fcu_pool *fcu_pool_start(int threads, const fcu_kernels *kernels, fcu_tuning tuning)
{
    fcu_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof(pthread_t));
    if (!pool)
        return NULL;
    pool->kernels = kernels, pool->tuning = tuning, pool->process = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_condattr_t monotonic; /* the clock of fcu_wait */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
    for (; pool->threads < threads; pool->threads++)
        if (pthread_create(&pool->thread[pool->threads], NULL, worker, pool)) {
            fcu_pool_stop(pool);
            return NULL;
        }
    return pool;
}

/* Queue a batch, of which a copy is taken; 0: no memory. */
static uint64_t queue(fcu_pool *pool, const batch *given)
{
    batch *b = malloc(sizeof *b);
    if (!b)
        return 0;
    *b = *given;
    pthread_mutex_lock(&pool->lock);
    b->ticket = ++pool->tickets;
    if (pool->last)
        pool->last->next = b;
    else
        pool->first = b;
    pool->last = b;
    if (!pool->hand)
        pool->hand = b;
    retire(pool); /* an empty batch */
    pthread_cond_broadcast(&pool->work);
    uint64_t ticket = pool->tickets;
    pthread_mutex_unlock(&pool->lock);
    return ticket;
}

uint64_t fcu_submit(fcu_pool *pool, const fcu_rule *rules, const uint32_t *rule_of, const fcu_piece *pieces,
                    uint32_t count)
{
    if (pool->threads)
        return queue(pool, &(batch){ .rules = rules, .rule_of = rule_of, .pieces = pieces, .count = count });
    /* Nobody to wait for: here and now, in the same chunks. */
    for (uint32_t i = 0; i < count; i++)
        for (uint64_t from = 0; from < pieces[i].n; from += CHUNK) {
            const fcu_rule *rule = &rules[rule_of[i]];
            uint64_t left = pieces[i].n - from;
            fcu_piece part = fcu_part(&pieces[i], rule, from, left < CHUNK ? left : CHUNK);
            pool->kernels->update(rule, &part, &pool->tuning);
        }
    fcu_fence();
    return pool->finished = ++pool->tickets;
}

uint64_t fcu_submit_sums(fcu_pool *pool, fcu_sum *sums, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        sums[i].sum = fcs_begin(sums[i].n);
    if (pool->threads)
        return queue(pool, &(batch){ .sums = sums, .count = count });
    for (uint32_t i = 0; i < count; i++)
        sums[i].sum += fcs_part(pool->kernels->sums, sums[i].data, 0, sums[i].n, sums[i].size);
    return pool->finished = ++pool->tickets;
}

uint64_t fcu_submit_copies(fcu_pool *pool, const fcu_block *blocks, uint32_t count)
{
    if (pool->threads)
        return queue(pool, &(batch){ .blocks = blocks, .count = count });
    for (uint32_t i = 0; i < count; i++)
        fcu_copy(blocks[i].to, blocks[i].from, blocks[i].bytes);
    return pool->finished = ++pool->tickets;
}

uint64_t fcu_submit_calls(fcu_pool *pool, fcu_call *call, void *of, uint32_t count)
{
    if (pool->threads)
        return queue(pool, &(batch){ .call = call, .argument = of, .count = count });
    for (uint32_t i = 0; i < count; i++)
        call(of, i);
    return pool->finished = ++pool->tickets;
}

void fcu_cancel(fcu_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    for (batch *b = pool->first; b; b = b->next)
        b->piece = b->count, b->element = 0;
    retire(pool);
    pthread_mutex_unlock(&pool->lock);
}

int fcu_wait(fcu_pool *pool, uint64_t ticket, int64_t nanoseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    if (nanoseconds > 0) {
        until.tv_sec += (until.tv_nsec + nanoseconds) / 1000000000;
        until.tv_nsec = (until.tv_nsec + nanoseconds) % 1000000000;
    }
    pthread_mutex_lock(&pool->lock);
    while (pool->finished < ticket) {
        if (nanoseconds < 0)
            pthread_cond_wait(&pool->done, &pool->lock);
        else if (pthread_cond_timedwait(&pool->done, &pool->lock, &until))
            break;
    }
    int done = pool->finished >= ticket;
    pthread_mutex_unlock(&pool->lock);
    return done;
}

void fcu_pool_stop(fcu_pool *pool)
{
    if (pool->process != getpid()) /* a fork's copy: it has the conditions with their waiters, and not the waiters */
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->threads; i++)
        pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
