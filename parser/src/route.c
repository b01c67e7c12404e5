/* Tables of flows for placing threads: serve.h. Made by one thread, shown to another, and not written after that. */
#include "serve.h"

#include <stdlib.h>
#include <string.h>

static void *zeroed(size_t count, size_t size)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (count ? count : 1) * size) != 0)
        return NULL;
    return memset(memory, 0, (count ? count : 1) * size);
}

static int is_same(const fc_route *r, const fc_flow_key *key)
{
    return r->number == key->number && memcmp(r->ends, key->ends, sizeof r->ends) == 0;
}

/* Enter what a seat claims. The table has room. */
static void enter(fc_table *t, fc_seat *s, const fc_flow_key *key, uint32_t *claims)
{
    uint32_t i = fc_key_hash(key->ends[0], (uint32_t)key->number) & t->mask;
    while (t->routes[i].number && !is_same(&t->routes[i], key))
        i = (i + 1) & t->mask;
    fc_route *r = &t->routes[i], *before = NULL;
    if (r->number) {
        before = &t->more[(*claims)++];
        *before = *r;
    }
    *r = (fc_route){.number = key->number, .flow = &s->M->states[s->stream * s->M->flows + (uint32_t)key->flow],
                    .seat = s, .also = before};
    memcpy(r->ends, key->ends, sizeof r->ends);
}

/* The flow of a key that the machine itself would find: it may be listed twice. */
static int is_found(const fc_machine *M, const fc_flow_key *key)
{
    return key->number && fc_find_flow(M, (const uint8_t *)key->ends, (uint32_t)(key->number >> 32),
                                       (uint32_t)key->number) == key;
}

fc_table *fc_table_make(fc_seat *const *seats, uint32_t n)
{
    fc_table *t = zeroed(1, sizeof *t);
    size_t flows = 0, size = 16;
    uint32_t claims = 0;
    if (t == NULL)
        return NULL;
    for (uint32_t s = 0; s < n; s++)
        flows += seats[s]->M->flows;
    while (size < 4 * flows)
        size *= 2;
    t->mask = (uint32_t)size - 1;
    t->header_lines = 1;
    t->routes = zeroed(size, sizeof(fc_route));
    t->more = zeroed(flows, sizeof(fc_route));
    if (t->routes == NULL || t->more == NULL) {
        fc_table_free(t);
        return NULL;
    }
    for (t->n = 0; t->n < n; t->n++) {
        const fc_machine *M = seats[t->n]->M;
        t->seats[t->n] = seats[t->n];
        t->header_lines = M->header_lines > t->header_lines ? M->header_lines : t->header_lines;
        for (uint32_t i = 0; i <= M->table_mask; i++)
            if (is_found(M, &M->table[i]))
                enter(t, seats[t->n], &M->table[i], &claims);
    }
    return t;
}

void fc_table_free(fc_table *table)
{
    if (table == NULL)
        return;
    free(table->routes);
    free(table->more);
    free(table);
}
