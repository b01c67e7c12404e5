#define _GNU_SOURCE
#include "block.h"

#include <errno.h>
#include <string.h>
#include <linux/mman.h>
#include <sys/mman.h>

#include <rte_errno.h>
#include <rte_memory.h>
#include <rte_memzone.h>

#define ALIGN(x) (((x) + FC_CACHE_LINE - 1) & ~(uint64_t)(FC_CACHE_LINE - 1))
#define RING_AT ALIGN(sizeof(fc_rx_counters))
#define ENTRIES_AT (RING_AT + ALIGN(sizeof(fc_ring)))

static uint64_t slots_at(uint64_t ring_size)
{
    return ALIGN(ENTRIES_AT + ring_size * sizeof(fc_packetref));
}

uint64_t fc_block_bytes(uint64_t ring_size, uint32_t slot_size)
{
    uint64_t slots;

    if (ring_size == 0 || (ring_size & (ring_size - 1)) != 0 || slot_size % FC_CACHE_LINE != 0
        || ring_size > UINT64_MAX / 128)
        return 0;
    if (__builtin_mul_overflow(ring_size, (uint64_t)slot_size, &slots)
        || slots > INT64_MAX - slots_at(ring_size))
        return 0;
    return slots_at(ring_size) + slots;
}

/* 0 and block->base, or a negative errno. */
static int map(fc_block *block, int flags)
{
    block->base = mmap(NULL, block->mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | flags, -1, 0);
    if (block->base != MAP_FAILED)
        return 0;
    block->base = NULL;
    block->mapped = 0;
    return -errno;
}

static int reserve(fc_block *block, const char *name, int huge, int socket)
{
    int rc;

    if (!huge) {
        block->mapped = block->bytes;
        return map(block, 0);
    }
    block->zone = rte_memzone_reserve_aligned(name, block->bytes, socket, 0, FC_CACHE_LINE);
    if (block->zone != NULL) {
        block->base = ((const struct rte_memzone *)block->zone)->addr;
        return 0;
    }
    rc = -rte_errno;
    if (rc != -ENOMEM && rc != -EINVAL) /* EINVAL: more than its lists can ever hold */
        return rc;
    block->mapped = (block->bytes + FC_HUGE_PAGE - 1) / FC_HUGE_PAGE * FC_HUGE_PAGE;
    /* 2 MB pages whatever the default is: the mapping is rounded to them. */
    rc = map(block, MAP_HUGETLB | 21 << MAP_HUGE_SHIFT);
    if (rc == 0)
        block->external = rte_extmem_register(block->base, block->mapped, NULL, 0, FC_HUGE_PAGE) == 0;
    return rc;
}

int fc_block_create(fc_block *block, const char *name, uint64_t ring_size, uint32_t slot_size, int huge, int socket)
{
    uint8_t *base;
    int rc;

    memset(block, 0, sizeof(*block));
    block->bytes = fc_block_bytes(ring_size, slot_size);
    if (block->bytes == 0)
        return -EINVAL;
    rc = reserve(block, name, huge, socket);
    if (rc != 0)
        return rc;
    base = block->base;
    block->counters = (fc_rx_counters *)base;
    block->ring = (fc_ring *)(base + RING_AT);
    block->slots = slot_size ? base + slots_at(ring_size) : NULL;
    block->slot_size = slot_size;
    memset(block->counters, 0, sizeof(*block->counters));
    fc_ring_init(block->ring, (fc_packetref *)(base + ENTRIES_AT), ring_size);
    return 0;
}

void fc_block_destroy(fc_block *block)
{
    if (block->base == NULL)
        return;
    if (block->external)
        rte_extmem_unregister(block->base, block->mapped);
    if (block->zone != NULL)
        rte_memzone_free(block->zone);
    else
        munmap(block->base, block->mapped);
    memset(block, 0, sizeof(*block));
}
