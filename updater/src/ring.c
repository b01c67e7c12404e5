#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "update.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define MAGIC 0x31305952544e4346u /* "FCNTRY01" */

/* SUMMED: bytes that are summed up while they are in the cache that they were copied through; four blocks of sums. */
enum { WIDTH = 4, SUMMED = 4 * FCS_BLOCK * WIDTH, AT_ONCE = 64 << 20, HUGE_PAGE = 2 << 20 };

typedef struct slot {
    _Atomic int state;
    _Atomic int64_t number, began; /* began: when the writer took it; 0: it has not */
    fcj_entry entry;
    uint8_t *memory;
    fcj_outcome outcome;
} slot;

struct fcj_ring {
    slot slots[FCJ_SLOTS];
    sem_t given, copied;
    uint64_t offered, taken, bytes;
    fcs_blocks *blocks_of;
    int how;
    uint8_t *nothing; /* a block of zeros, where direct I/O takes it from */
    pthread_t copier, writer;
};

static uint64_t up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

static int64_t now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static void wait_for(sem_t *sem)
{
    while (sem_wait(sem) && errno == EINTR) {
    }
}

uint64_t fcj_bytes(uint64_t head_bytes, const int64_t *spans, uint64_t count)
{
    uint64_t bytes = FCJ_BLOCK + up(head_bytes, FCJ_LINE) + up(16 * count, FCJ_LINE);
    for (uint64_t i = 0; i < count; i++)
        bytes += up((uint64_t)spans[2 * i + 1], FCJ_LINE);
    return up(bytes, FCJ_BLOCK);
}

uint64_t fcj_block_sum(fcs_blocks *blocks_of, const void *block)
{
    uint64_t n = FCJ_BLOCK / 8 - 1, sum = fcs_begin(n) + fcs_part(blocks_of, (const uint8_t *)block + 8, 0, n, 8);
    return sum ? sum : 1; /* 0 is what no entry has */
}

/* -- the copier ---------------------------------------------------------------------------------------------- */

/* n bytes and zeros up to a whole line; the sum of both. What is summed is what was copied: whole blocks of sums from
 * the source, which the cache has, and the last one from where it is now, because of its zeros. */
static uint64_t copied(uint8_t *to, const uint8_t *from, uint64_t n, fcs_blocks *blocks_of)
{
    uint64_t padded = up(n, FCJ_LINE), whole = n / (FCS_BLOCK * WIDTH) * (FCS_BLOCK * WIDTH), sum, bytes;
    sum = fcs_begin(padded / WIDTH);
    for (uint64_t at = 0; at < whole; at += bytes) {
        bytes = whole - at < SUMMED ? whole - at : SUMMED;
        fcu_copy(to + at, from + at, bytes);
        sum += fcs_part(blocks_of, from, at / WIDTH, bytes / WIDTH, WIDTH);
    }
    if (padded > whole) {
        memcpy(to + whole, from + whole, n - whole);
        memset(to + n, 0, padded - n);
        sum += fcs_part(blocks_of, to, whole / WIDTH, (padded - whole) / WIDTH, WIDTH);
    }
    return sum;
}

/* All of an entry but its word. */
static void copy(const fcj_ring *ring, slot *s)
{
    const fcj_entry *e = &s->entry;
    uint8_t *image = e->place ? e->place : s->memory;
    uint64_t table_bytes = 16 * e->count, bytes = fcj_bytes(e->head_bytes, e->spans, e->count);
    fcj_block *block = (fcj_block *)image;
    atomic_store((_Atomic uint64_t *)&block->word, 0);
    fcu_fence();
    uint64_t *table = (uint64_t *)(image + FCJ_BLOCK + up(e->head_bytes, FCJ_LINE));
    uint8_t *to = (uint8_t *)table + up(table_bytes, FCJ_LINE);
    for (uint64_t i = 0; i < e->count; i++) {
        uint64_t n = (uint64_t)e->spans[2 * i + 1];
        table[2 * i] = n;
        table[2 * i + 1] = copied(to, e->region + e->spans[2 * i], n, ring->blocks_of);
        to += up(n, FCJ_LINE);
    }
    memset(to, 0, (size_t)(image + bytes - to));
    memset((uint8_t *)table + table_bytes, 0, up(table_bytes, FCJ_LINE) - table_bytes);
    memset(&block->magic, 0, FCJ_BLOCK - 8);
    block->magic = MAGIC, block->number = e->number, block->ticket = e->ticket;
    block->head_bytes = e->head_bytes, block->spans = e->count, block->bytes = bytes;
    block->head_sum = copied(image + FCJ_BLOCK, e->head, e->head_bytes, ring->blocks_of);
    uint64_t n = up(table_bytes, FCJ_LINE) / WIDTH;
    block->table_sum = fcs_begin(n) + fcs_part(ring->blocks_of, table, 0, n, WIDTH);
    s->outcome = (fcj_outcome){ .number = e->number, .ticket = e->ticket, .bytes = bytes };
}

static void *copier(void *argument)
{
    fcj_ring *ring = argument;
    pthread_setname_np(pthread_self(), "fc-journal-copy");
    for (uint64_t turn = 0;; turn++) {
        wait_for(&ring->given);
        slot *s = &ring->slots[turn % FCJ_SLOTS];
        if (atomic_load(&s->state) != FCJ_GIVEN) { /* fcj_stop */
            sem_post(&ring->copied);
            return NULL;
        }
        int64_t began = now();
        copy(ring, s);
        fcu_fence();
        s->outcome.nanoseconds = s->entry.place ? now() - began : 0;
        atomic_store(&s->state, FCJ_COPIED);
        sem_post(&ring->copied);
    }
}

/* -- the writer ---------------------------------------------------------------------------------------------- */

/* Direct I/O goes on at whole blocks alone. */
static int put(const fcj_ring *ring, int fd, const uint8_t *data, uint64_t bytes, uint64_t at)
{
    while (bytes) {
        ssize_t done = pwrite(fd, data, bytes < AT_ONCE ? bytes : AT_ONCE, (off_t)at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return errno;
        if (ring->how & FCJ_DIRECT && (uint64_t)done < bytes)
            done = done / FCJ_BLOCK * FCJ_BLOCK;
        if (!done)
            return EIO;
        data += done, at += (uint64_t)done, bytes -= (uint64_t)done;
    }
    return 0;
}

static int settle(const fcj_ring *ring, int fd)
{
    if (!(ring->how & FCJ_DISK))
        return 0;
    while (fdatasync(fd))
        if (errno != EINTR)
            return errno;
    return 0;
}

static int put_and_settle(const fcj_ring *ring, const fcj_entry *e, const uint8_t *data, uint64_t bytes)
{
    int error = put(ring, e->fd, data, bytes, e->at);
    return error ? error : settle(ring, e->fd);
}

static void write_out(const fcj_ring *ring, slot *s)
{
    const fcj_entry *e = &s->entry;
    fcj_outcome *o = &s->outcome;
    fcj_block *block = (fcj_block *)(e->place ? e->place : s->memory);
    uint64_t word = fcj_block_sum(ring->blocks_of, block);
    if (e->place) {
        atomic_store((_Atomic uint64_t *)&block->word, word);
        return;
    }
    o->step = FCJ_CLEARING;
    if ((o->error = put_and_settle(ring, e, ring->nothing, FCJ_BLOCK)))
        return;
    o->step = FCJ_WRITING;
    if ((o->error = put_and_settle(ring, e, s->memory, o->bytes)))
        return;
    o->step = FCJ_COMPLETING;
    block->word = word; /* alone differs in the block that direct I/O writes again */
    if ((o->error = put_and_settle(ring, e, s->memory, ring->how & FCJ_DIRECT ? FCJ_BLOCK : 8)))
        return;
    o->step = 0;
}

static void *writer(void *argument)
{
    fcj_ring *ring = argument;
    pthread_setname_np(pthread_self(), "fc-journal");
    for (uint64_t turn = 0;; turn++) {
        wait_for(&ring->copied);
        slot *s = &ring->slots[turn % FCJ_SLOTS];
        if (atomic_load(&s->state) != FCJ_COPIED)
            return NULL;
        int64_t began = now();
        atomic_store(&s->began, began);
        write_out(ring, s);
        s->outcome.nanoseconds += now() - began;
        atomic_store(&s->began, 0);
        atomic_store(&s->state, FCJ_DONE);
    }
}

/* -- the caller ---------------------------------------------------------------------------------------------- */

/* Memory that is there: the first entries are copied as fast as later ones. NULL: there is not so much. */
static void *memory_of(uint64_t bytes)
{
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED)
        return NULL;
    if (bytes >= HUGE_PAGE)
        madvise(found, bytes, MADV_HUGEPAGE);
    if (!madvise(found, bytes, MADV_POPULATE_WRITE))
        return found;
    if (errno != EINVAL) {
        munmap(found, bytes);
        return NULL;
    }
    for (uint64_t at = 0; at < bytes; at += FCJ_BLOCK) /* Linux before 5.14 */
        ((volatile uint8_t *)found)[at] = 0;
    return found;
}

void fcj_free(fcj_ring *ring)
{
    for (int i = 0; i < FCJ_SLOTS; i++)
        if (ring->slots[i].memory)
            munmap(ring->slots[i].memory, ring->bytes);
    if (ring->nothing)
        munmap(ring->nothing, FCJ_BLOCK);
    sem_destroy(&ring->given);
    sem_destroy(&ring->copied);
    free(ring);
}

static int begin(fcj_ring *ring)
{
    if (!(ring->how & FCJ_MAPPED)) {
        if (!(ring->nothing = memory_of(FCJ_BLOCK)))
            return 0;
        for (int i = 0; i < FCJ_SLOTS; i++)
            if (!(ring->slots[i].memory = memory_of(ring->bytes)))
                return 0;
    }
    if (pthread_create(&ring->copier, NULL, copier, ring))
        return 0;
    if (!pthread_create(&ring->writer, NULL, writer, ring))
        return 1;
    sem_post(&ring->given);
    pthread_join(ring->copier, NULL);
    return 0;
}

fcj_ring *fcj_start(uint64_t slot_bytes, int how, fcs_blocks *blocks_of)
{
    fcj_ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return NULL;
    ring->bytes = up(slot_bytes, FCJ_BLOCK), ring->how = how, ring->blocks_of = blocks_of;
    sem_init(&ring->given, 0, 0);
    sem_init(&ring->copied, 0, 0);
    sigset_t all, before; /* signals are for threads that know of them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int begun = begin(ring);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!begun) {
        fcj_free(ring);
        return NULL;
    }
    return ring;
}

int fcj_offer(fcj_ring *ring, const fcj_entry *entry)
{
    slot *s = &ring->slots[ring->offered % FCJ_SLOTS];
    if (atomic_load(&s->state) != FCJ_FREE)
        return 0;
    s->entry = *entry;
    atomic_store(&s->number, entry->number);
    atomic_store(&s->state, FCJ_GIVEN);
    ring->offered++;
    sem_post(&ring->given);
    return 1;
}

int fcj_reads(const fcj_ring *ring, int64_t number)
{
    for (const slot *s = ring->slots; s < ring->slots + FCJ_SLOTS; s++)
        if (atomic_load(&s->state) == FCJ_GIVEN && atomic_load(&s->number) == number)
            return 1;
    return 0;
}

int fcj_taken(fcj_ring *ring, fcj_outcome *outcome)
{
    slot *s = &ring->slots[ring->taken % FCJ_SLOTS];
    if (atomic_load(&s->state) != FCJ_DONE)
        return 0;
    *outcome = s->outcome;
    ring->taken++;
    atomic_store(&s->state, FCJ_FREE);
    return 1;
}

int64_t fcj_writing(const fcj_ring *ring, int64_t *number)
{
    for (const slot *s = ring->slots; s < ring->slots + FCJ_SLOTS; s++) {
        int64_t began = atomic_load(&s->began);
        if (began) {
            *number = atomic_load(&s->number);
            return now() - began;
        }
    }
    return -1;
}

int fcj_stop(fcj_ring *ring, int64_t nanoseconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (until.tv_nsec + nanoseconds) / 1000000000;
    until.tv_nsec = (until.tv_nsec + nanoseconds) % 1000000000;
    sem_post(&ring->given);
    pthread_join(ring->copier, NULL);
    if (ring->how & FCJ_MAPPED) { /* a word is all that is left to write */
        pthread_join(ring->writer, NULL);
    } else if (pthread_clockjoin_np(ring->writer, NULL, CLOCK_MONOTONIC, &until)) {
        pthread_detach(ring->writer);
        return 0;
    }
    return 1;
}
