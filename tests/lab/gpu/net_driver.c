/* NCCL's side of a network plugin: one rank of a ring that allreduces known numbers, as NCCL's host code drives it.
 *
 *   net_driver PLUGIN MINOR RANK RANKS FOLDER PROTOCOL COUNT...     LL, LL128, SIMPLE; an AllReduce of fp32 per COUNT
 *   driver_open, driver_allreduce..., driver_close                   the same from another program (ring_backend.py)
 *
 * FOLDER/handle-R: the handle of R's listener, for the rank before it. FOLDER/out-R-I: what the I-th AllReduce gave.
 * An error ends the process.
 * Order of symbols: src/plugin/net.cc of NCCL 2.MINOR. Calls: recvProxySetup, sendProxyConnect, recvProxyConnect,
 * sendProxyProgress, recvProxyProgress and the frees of src/transport/net.cc (2.28.9). Who fills and empties slots is
 * NCCL's kernel: runRing of src/device/all_reduce.h, in one loop with both proxies, by chunks as reference nccl-wire.md
 * 2.2, 2.6 and 2.7 has them for one channel. Payloads are softroce's; nothing here is the parser's. */
#define _GNU_SOURCE
#include "nccl_net.h"
#include "sr_codec.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call) do { nccl_result r_ = (call); if (r_) fail("%s: %d", #call, r_); } while (0)
enum { STEPS = 8, SECONDS = 60 };

static nccl_net *net;
static int rank, ranks, protocol;
static const char *folder;
static uint32_t slot_bytes, full, slice_steps, chunk_steps, parts; /* of the protocol; full: elements of a chunk */
static time_t moved; /* when the last operation began: against a hang */

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    fprintf(stderr, "rank %d: ", rank);
    vfprintf(stderr, format, rest);
    fputc('\n', stderr);
    exit(1);
}

static void logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    fprintf(stderr, "rank %d: %d %lx %s:%d ", rank, level, flags, file, line);
    vfprintf(stderr, format, rest);
    fputc('\n', stderr);
}

static void rest_a_little(void) {
    if (time(NULL) - moved > SECONDS)
        fail("nothing has moved for %d s", SECONDS);
    sched_yield();
}

/* One direction of the ring connection: NCCL's buffers, FIFO of sizes and the proxy's counters. */
struct side {
    void *end, *registration, *requests[STEPS];
    uint8_t *buffer;
    int sizes[STEPS];                                  /* connFifo: -1 is nothing */
    uint64_t step, base, steps, posted, moved, done;   /* resources->step; of the operation: as in net.cc */
    uint64_t tail, head;                               /* steps that the kernel has filled, or emptied */
} to, from;

static void begin(struct side *s, uint64_t steps) {
    s->base = (s->step + chunk_steps - 1) / chunk_steps * chunk_steps;
    s->step = s->base + steps;
    s->steps = steps;
    s->posted = s->moved = s->done = s->tail = s->head = 0;
    for (int i = 0; i < STEPS; i++)
        s->sizes[i] = -1;
}

static void send_progress(void) {
    struct side *s = &to;
    if (s->done == s->steps)
        return;
    if (s->posted < s->steps && s->posted < s->done + STEPS) {
        s->posted += slice_steps;
        return;
    }
    int slot = (int)((s->base + s->moved) % STEPS);
    if (s->moved < s->posted && s->moved < s->done + STEPS && s->sizes[slot] != -1 && s->tail > s->moved) {
        CHECK(net->isend(s->end, s->buffer + (size_t)slot * slot_bytes, (size_t)s->sizes[slot], rank, s->registration,
                         NULL, &s->requests[slot]));
        if (s->requests[slot]) {
            s->moved += slice_steps;
            return;
        }
    }
    if (s->done < s->moved) {
        int done, size = -1;
        slot = (int)((s->base + s->done) % STEPS);
        CHECK(net->test(s->requests[slot], &done, &size));
        if (done) {
            if (size != s->sizes[slot])
                fail("%d bytes sent and %d said", s->sizes[slot], size);
            s->sizes[slot] = -1;
            s->done += slice_steps;
        }
    }
}

static void receive_progress(void) {
    struct side *s = &from;
    if (s->posted < s->steps && s->posted < s->head + STEPS) {
        int slot = (int)((s->base + s->posted) % STEPS), tag = (rank + ranks - 1) % ranks;
        void *data = s->buffer + (size_t)slot * slot_bytes, **request = &s->requests[s->posted % STEPS];
        size_t size = (size_t)slot_bytes * slice_steps;
        *request = protocol == SR_SIMPLE ? NULL : (void *)1; /* NCCL_NET_OPTIONAL_RECV_COMPLETION */
        CHECK(net->irecv(s->end, 1, &data, &size, &tag, &s->registration, NULL, request));
        if (*request) {
            s->posted += slice_steps;
            return;
        }
    }
    if (s->posted > s->done) {
        int done, size = -1;
        CHECK(net->test(s->requests[s->done % STEPS], &done, &size));
        if (done) {
            void *request = NULL, *data = s->buffer;
            CHECK(net->iflush(s->end, 1, &data, &size, &s->registration, &request));
            if (request)
                fail("a flush of the host's memory");
            s->sizes[(s->base + s->done) % STEPS] = size;
            s->done += slice_steps;
        }
    }
}

/* Waits until a message has come, and takes `bytes` of data out of it. */
static void take(uint8_t *data, uint32_t bytes) {
    while (from.done <= from.head) {
        send_progress();
        receive_progress();
        rest_a_little();
    }
    uint64_t step = from.base + from.head;
    int slot = (int)(step % STEPS), size = from.sizes[slot];
    if (size != (int)sr_wire_bytes((enum sr_protocol)protocol, bytes))
        fail("%d bytes have come for %u of data", size, bytes);
    if (sr_decode((enum sr_protocol)protocol, data, from.buffer + (size_t)slot * slot_bytes, bytes, step))
        fail("step %llu: another message's flags", (unsigned long long)step);
    from.head += slice_steps;
}

static void give(const uint8_t *data, uint32_t bytes) {
    while (to.tail + slice_steps > to.done + STEPS || to.posted <= to.tail) {
        send_progress();
        receive_progress();
        rest_a_little();
    }
    uint64_t step = to.base + to.tail;
    int slot = (int)(step % STEPS);
    sr_encode((enum sr_protocol)protocol, to.buffer + (size_t)slot * slot_bytes, data, bytes, step);
    to.sizes[slot] = (int)sr_wire_bytes((enum sr_protocol)protocol, bytes);
    to.tail += slice_steps;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void allreduce(float *mine, float *out, uint32_t count) {
    float *sum = malloc((size_t)full * 4);
    uint64_t loops = (count + (uint64_t)ranks * full - 1) / ((uint64_t)ranks * full);
    uint64_t steps = loops * (uint64_t)(2 * ranks - 2) * parts * slice_steps;
    begin(&to, steps);
    begin(&from, steps);
    for (uint32_t e = 0; e < count; e += (uint32_t)ranks * full) {
        uint32_t left = count - e, n = (uint32_t)ranks;
        uint32_t chunk = left >= n * full ? full : ((left + n - 1) / n + 3) / 4 * 4;
        for (uint32_t k = 0; k <= 2 * n - 2; k++) {
            uint32_t back = k < n ? k + 1 : k - (n - 1), which = ((uint32_t)rank + 2 * n - back) % n;
            uint32_t start = least(which * chunk, left), elements = least(chunk, left - start);
            uint32_t slice = elements;
            if (parts == 2) {
                uint32_t even = (elements + 31) / 32 * 16, floor = 2 * slot_bytes / 4 / 32;
                slice = least(even > floor ? even : floor, elements);
            }
            for (uint32_t p = 0; p < parts; p++) {
                uint32_t at = e + start + (p ? slice : 0), size = p ? elements - slice : slice;
                const uint8_t *next = (uint8_t *)(mine + at);
                if (k) {
                    take((uint8_t *)sum, size * 4);
                    if (k < n)
                        sr_add(SR_F32, (uint8_t *)sum, (uint8_t *)sum, next, (uint64_t)size * 4);
                    if (k >= n - 1)
                        memcpy(out + at, sum, (size_t)size * 4);
                    next = (uint8_t *)sum;
                }
                if (k < 2 * n - 2)
                    give(next, size * 4);
            }
        }
    }
    while (to.done < to.steps || from.done < from.steps) {
        send_progress();
        receive_progress();
        rest_a_little();
    }
    free(sum);
}

static void load(const char *plugin, int minor) {
    void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail("%s", dlerror());
    for (int version = minor >= 30 ? 12 : minor >= 28 ? 11 : 10; version >= 6 && !net; version--) {
        char symbol[32];
        snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
        net = dlsym(library, symbol);
        if (net && version != 10)
            fail("%s is there, and this driver calls version 10", symbol);
    }
    if (!net)
        fail("no interface was found");
    int devices = 0;
    nccl_net_properties properties;
    CHECK(net->init(logger, NULL));
    CHECK(net->devices(&devices));
    CHECK(net->getProperties(0, &properties));
    if (devices != 1 || properties.ptrSupport != NCCL_PTR_HOST || properties.netDeviceType || properties.maxRecvs != 1)
        fail("properties");
}

static void connect_ring(void) {
    char handle[NCCL_NET_HANDLE_MAXSIZE], path[2][4096];
    void *listener = NULL;
    CHECK(net->listen(0, handle, &listener));
    snprintf(path[0], sizeof path[0], "%s/.handle-%d", folder, rank);
    snprintf(path[1], sizeof path[1], "%s/handle-%d", folder, rank);
    FILE *f = fopen(path[0], "w");
    if (!f || fwrite(handle, sizeof handle, 1, f) != 1 || fclose(f) || rename(path[0], path[1]))
        fail("%s", path[1]);
    snprintf(path[0], sizeof path[0], "%s/handle-%d", folder, (rank + 1) % ranks);
    while (!(f = fopen(path[0], "r")))
        rest_a_little();
    if (fread(handle, sizeof handle, 1, f) != 1 || fclose(f))
        fail("%s", path[0]);
    for (int config = 0; !to.end || !from.end; rest_a_little()) {
        if (!to.end)
            CHECK(net->connect(0, &config, handle, &to.end, NULL));
        if (!from.end)
            CHECK(net->accept(listener, &from.end, NULL));
    }
    CHECK(net->closeListen(listener));
    for (int i = 0; i < 2; i++) {
        struct side *s = i ? &from : &to;
        s->buffer = aligned_alloc(4096, (size_t)slot_bytes * STEPS);
        CHECK(net->regMr(s->end, s->buffer, (size_t)slot_bytes * STEPS, NCCL_PTR_HOST, &s->registration));
    }
    if (!net->regMr(to.end, to.buffer, 8, 2, &listener))
        fail("memory of a GPU was taken");
}

void driver_open(const char *plugin, int minor, int mine, int count, const char *where, const char *name) {
    rank = mine;
    ranks = count;
    folder = strdup(where);
    protocol = !strcmp(name, "LL") ? SR_LL : !strcmp(name, "LL128") ? SR_LL128 : SR_SIMPLE;
    slot_bytes = protocol == SR_LL ? 65536 : protocol == SR_LL128 ? 614400 : 524288;
    full = protocol == SR_LL ? 8192 : protocol == SR_LL128 ? 144000 : 524288;
    slice_steps = parts = protocol == SR_SIMPLE ? 2 : 1;
    chunk_steps = protocol == SR_SIMPLE ? 4 : 1;
    moved = time(NULL);
    load(plugin, minor);
    connect_ring();
}

void driver_allreduce(float *mine, float *out, uint32_t count) {
    moved = time(NULL);
    allreduce(mine, out, count);
}

void driver_close(void) {
    CHECK(net->deregMr(to.end, to.registration));
    CHECK(net->deregMr(from.end, from.registration));
    CHECK(net->closeSend(to.end));
    CHECK(net->closeRecv(from.end));
}

int main(int count, char **words) {
    if (count < 8)
        return 2;
    driver_open(words[1], atoi(words[2]), atoi(words[3]), atoi(words[4]), words[5], words[6]);
    for (int i = 7; i < count; i++) {
        uint32_t elements = (uint32_t)atoi(words[i]);
        float *mine = calloc(elements, 4), *out = calloc(elements, 4);
        for (uint32_t k = 0; k < elements; k++) /* of every sign and many sizes: sums round, in the order of the ring */
            mine[k] = (float)(int32_t)(k * 2654435761u + (uint32_t)(rank * 40503 + i * 9973)) / 65536.0f /
                      (float)(1 + k % 7);
        driver_allreduce(mine, out, elements);
        char path[4096];
        snprintf(path, sizeof path, "%s/out-%d-%d", folder, rank, i - 7);
        FILE *f = fopen(path, "w");
        if (!f || fwrite(out, 4, elements, f) != elements || fclose(f))
            fail("%s", path);
        free(mine);
        free(out);
    }
    driver_close();
    return 0;
}
