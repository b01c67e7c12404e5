/* The plugin: what NCCL calls, where it goes and with what choices, into a ring in this process's own memory.
 *
 *     NCCL_PROFILER_PLUGIN=/path/of/nccl_profiler.plugin.so
 *
 * NCCL calls startEvent from the threads that launch collectives and from its proxy threads. A record is claimed by
 * one compare-and-swap, filled, and published by its serial number. Where the ring is full the event is dropped and
 * counted: training never waits for a reader. An event's handle is its record's serial number, never a pointer: NCCL
 * gives a call's handle back as the parent of its proxy operations, and none has to be kept.
 *
 * After fork() the child has a copy of its own, which it empties when it makes a communicator.
 */
#include "nccl_interface.h"
#include "nccl_profiler.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define EVENTS (NCCL_COLL | NCCL_P2P | NCCL_PROXY_OP)
#define COMMUNICATORS 256
#define NOT_SAID (-1)

_Static_assert(sizeof(struct flowcheck_record) == 128, "the reader's layout");

typedef struct { /* NCCL's context; number 0: free */
    _Atomic uint32_t number;
    int32_t rank;
    uint64_t hash;
} communicator;

static struct flowcheck_record ring[FLOWCHECK_PROFILER_RECORDS];
static communicator communicators[COMMUNICATORS];
static _Atomic uint64_t claimed, taken, dropped, strangers;
static _Atomic uint32_t numbers, alive;
static _Atomic int wanted = EVENTS;
static int *_Atomic mask_of_nccl;
static _Atomic pid_t process;

/* -- the ring -- */

static struct flowcheck_record *claim(uint64_t *serial)
{
    uint64_t at = atomic_load_explicit(&claimed, memory_order_relaxed);
    do { /* `at` may be older than `taken`: then the exchange fails */
        if ((int64_t)(at - atomic_load_explicit(&taken, memory_order_acquire)) >= FLOWCHECK_PROFILER_RECORDS) {
            atomic_fetch_add_explicit(&dropped, 1, memory_order_relaxed);
            *serial = FLOWCHECK_LOST;
            return NULL;
        }
    } while (!atomic_compare_exchange_weak_explicit(&claimed, &at, at + 1, memory_order_relaxed,
                                                    memory_order_relaxed));
    *serial = at + 1;
    return &ring[at % FLOWCHECK_PROFILER_RECORDS];
}

static void publish(struct flowcheck_record *record, uint64_t serial)
{
    __atomic_store_n(&record->serial, serial, __ATOMIC_RELEASE);
}

static struct flowcheck_record *begin(uint64_t *serial, const communicator *of, int kind, int interface)
{
    struct flowcheck_record *record = claim(serial);
    if (!record)
        return NULL;
    memset(&record->parent, 0, sizeof *record - sizeof record->serial);
    record->communicator = atomic_load_explicit(&of->number, memory_order_relaxed);
    record->hash = of->hash;
    record->rank = of->rank;
    record->kind = (uint8_t)kind;
    record->interface = (uint8_t)interface;
    record->reduction = NOT_SAID;
    return record;
}

static void text(char *to, size_t room, const char *from)
{
    for (size_t i = 0; from && i < room && from[i]; i++)
        to[i] = from[i];
}

EXPORT uint64_t flowcheck_profiler_layout(void)
{
    return FLOWCHECK_PROFILER_LAYOUT;
}

EXPORT uint64_t flowcheck_profiler_read(struct flowcheck_record *to, uint64_t most)
{
    uint64_t at = atomic_load_explicit(&taken, memory_order_relaxed), read = 0;
    for (; read < most; read++, at++) {
        const struct flowcheck_record *record = &ring[at % FLOWCHECK_PROFILER_RECORDS];
        if (__atomic_load_n(&record->serial, __ATOMIC_ACQUIRE) != at + 1)
            break; /* not there, or claimed and still being written */
        to[read] = *record;
    }
    atomic_store_explicit(&taken, at, memory_order_release);
    return read;
}

/* -- how much NCCL says -- */

static void apply(void)
{
    int *mask = atomic_load(&mask_of_nccl), now;
    if (!mask)
        return;
    do { /* whoever changes `wanted` meanwhile: the newest stands in the end */
        now = atomic_load(&wanted);
        __atomic_store_n(mask, now, __ATOMIC_RELAXED);
    } while (now != atomic_load(&wanted));
}

EXPORT void flowcheck_profiler_record(int events)
{
    atomic_store(&wanted, events ? EVENTS : 0);
    apply();
}

EXPORT void flowcheck_profiler_counts(uint64_t counts[FLOWCHECK_COUNTS])
{
    counts[FLOWCHECK_CLAIMED] = atomic_load(&claimed);
    counts[FLOWCHECK_TAKEN] = atomic_load(&taken);
    counts[FLOWCHECK_DROPPED] = atomic_load(&dropped);
    counts[FLOWCHECK_STRANGERS] = atomic_load(&strangers);
    counts[FLOWCHECK_ALIVE] = atomic_load(&alive);
    counts[FLOWCHECK_PROCESS] = (uint64_t)atomic_load(&process);
    counts[FLOWCHECK_MASK] = (uint64_t)atomic_load(&wanted);
}

/* -- communicators -- */

static void begin_process(void)
{
    pid_t here = getpid(), before = atomic_exchange(&process, here);
    if (before == here || before == 0)
        return;
    for (int i = 0; i < COMMUNICATORS; i++) /* what was recorded is the parent's */
        atomic_store(&communicators[i].number, 0);
    for (size_t i = 0; i < FLOWCHECK_PROFILER_RECORDS; i++)
        ring[i].serial = 0;
    atomic_store(&claimed, 0);
    atomic_store(&taken, 0);
    atomic_store(&dropped, 0);
    atomic_store(&strangers, 0);
    atomic_store(&numbers, 0);
    atomic_store(&alive, 0);
    atomic_store(&wanted, EVENTS);
}

static int started(void **context, int *mask, int interface, const char *name, uint64_t hash, int nodes, int ranks,
                   int rank)
{
    uint64_t serial;
    begin_process();
    *context = NULL; /* no room: its events are counted as a stranger's */
    for (int i = 0; i < COMMUNICATORS && !*context; i++) {
        uint32_t free_one = 0;
        communicator *one = &communicators[i];
        if (atomic_load(&one->number) || !atomic_compare_exchange_strong(&one->number, &free_one, UINT32_MAX))
            continue;
        one->hash = hash;
        one->rank = rank;
        atomic_store(&one->number, atomic_fetch_add(&numbers, 1) + 1);
        *context = one;
    }
    atomic_store(&mask_of_nccl, mask);
    apply();
    if (!*context) {
        atomic_fetch_add(&strangers, 1);
        return 0;
    }
    atomic_fetch_add(&alive, 1);
    struct flowcheck_record *record = begin(&serial, *context, FLOWCHECK_COMMUNICATOR, interface);
    if (record) {
        record->other = ranks;
        record->steps = nodes;
        text(record->name, sizeof record->name, name);
        publish(record, serial);
    }
    return 0;
}

static int finalize(void *context)
{
    uint64_t serial;
    if (!context)
        return 0;
    struct flowcheck_record *record = begin(&serial, context, FLOWCHECK_FINALIZED, 0);
    if (record)
        publish(record, serial);
    atomic_store(&((communicator *)context)->number, 0);
    if (atomic_fetch_sub(&alive, 1) == 1)
        atomic_store(&mask_of_nccl, NULL); /* NCCL itself may be unloaded from here on */
    return 0;
}

/* Of interfaces 1 to 3: each event says whose it is. */
#define INIT_SHORT(version)                                                                  \
    static int init_v##version(void **context, int *mask)                                    \
    {                                                                                        \
        return started(context, mask, version, NULL, 0, NOT_SAID, NOT_SAID, NOT_SAID);       \
    }
INIT_SHORT(1)
INIT_SHORT(2)
INIT_SHORT(3)

static int init_v4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank,
                   void (*log)(void))
{
    return started(context, mask, 4, name, hash, nodes, ranks, rank);
}

#define INIT_LONG(version)                                                                                        \
    static int init_v##version(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, \
                               int rank, void (*log)(void))                                                      \
    {                                                                                                             \
        return started(context, mask, version, name, hash, nodes, ranks, rank);                                  \
    }
INIT_LONG(5)
INIT_LONG(6)

/* -- events -- */

static void *handle_of(uint64_t serial)
{
    return (void *)(uintptr_t)serial;
}

static void proxy_op(const communicator *of, int interface, int rank, void *parent, const nccl_proxy_op *op)
{
    uint64_t serial;
    struct flowcheck_record *record = begin(&serial, of, FLOWCHECK_PROXY_OP, interface);
    if (!record)
        return;
    bool ours = op->pid == atomic_load_explicit(&process, memory_order_relaxed);
    record->parent = ours ? (uint64_t)(uintptr_t)parent : 0; /* another process's number says nothing here */
    record->rank = rank;
    record->other = op->peer;
    record->steps = op->nSteps;
    record->chunk = op->chunkSize;
    record->process = op->pid;
    record->channels = op->channelId;
    record->width = op->isSend != 0;
    publish(record, serial);
}

struct call { /* a collective or point-to-point call, of any interface */
    uint64_t hash, sequence, count;
    const char *function, *type, *algorithm, *protocol;
    int rank, other, reduction;
    uint8_t channels, warps;
};

static void *call(const communicator *of, int kind, int interface, const struct call *said)
{
    uint64_t serial;
    struct flowcheck_record *record = begin(&serial, of, kind, interface);
    if (!record)
        return handle_of(serial);
    record->count = said->count;
    record->sequence = said->sequence;
    record->hash = said->hash;
    record->rank = said->rank;
    record->other = said->other;
    record->channels = said->channels;
    record->width = said->warps;
    record->reduction = said->reduction;
    text(record->function, sizeof record->function, said->function);
    text(record->type, sizeof record->type, said->type);
    text(record->algorithm, sizeof record->algorithm, said->algorithm);
    text(record->protocol, sizeof record->protocol, said->protocol);
    publish(record, serial);
    return handle_of(serial);
}

/* Interface 1 has numbers, of NCCL 2.23's ncclFunc_t, ncclDataType_t, NCCL_ALGO_* and NCCL_PROTO_*. */
static const char *const FUNCTIONS[] = { "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv",
                                         "Send", "Recv" };
static const char *const TYPES[] = { "ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64",
                                     "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16" };
static const char *const ALGORITHMS[] = { "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE",
                                          "PAT" };
static const char *const PROTOCOLS[] = { "LL", "LL128", "SIMPLE" };
#define NAME(names, number) ((number) < sizeof names / sizeof *names ? names[number] : "Unknown")
#define SAME(names, said) (said)

/* What of an event is ours. A group has a handle, without which NCCL up to 2.27 makes no events of its calls; all else
 * has none, and NCCL then neither stops it nor tells its states. */
#define START_EVENT(version, of_hash, of_channels, of_op, TEXT)                                                    \
    static int start_v##version(void *context, void **handle, nccl_event_v##version *event)                       \
    {                                                                                                              \
        const communicator *of = context;                                                                          \
        *handle = NULL;                                                                                            \
        if (!of) {                                                                                                 \
            atomic_fetch_add_explicit(&strangers, 1, memory_order_relaxed);                                        \
        } else if (event->type == NCCL_COLL) {                                                                     \
            struct call said = {                                                                                   \
                .hash = of_hash(coll), .sequence = event->coll.seqNumber, .count = event->coll.count,              \
                .function = TEXT(FUNCTIONS, event->coll.func), .type = TEXT(TYPES, event->coll.datatype),          \
                .algorithm = TEXT(ALGORITHMS, event->coll.algo), .protocol = TEXT(PROTOCOLS, event->coll.proto),   \
                .rank = event->rank, .other = event->coll.root, .reduction = of_op,                                \
                .channels = event->coll.of_channels, .warps = event->coll.nWarps,                                  \
            };                                                                                                     \
            *handle = call(of, FLOWCHECK_COLLECTIVE, version, &said);                                              \
        } else if (event->type == NCCL_P2P) {                                                                      \
            struct call said = {                                                                                   \
                .hash = of_hash(p2p), .count = event->p2p.count, .function = TEXT(FUNCTIONS, event->p2p.func),     \
                .type = TEXT(TYPES, event->p2p.datatype), .rank = event->rank, .other = event->p2p.peer,           \
                .reduction = NOT_SAID,                                                                             \
            };                                                                                                     \
            *handle = call(of, FLOWCHECK_P2P, version, &said);                                                     \
        } else if (event->type == NCCL_PROXY_OP) {                                                                 \
            proxy_op(of, version, event->rank, event->parentObj, &event->proxyOp);                                 \
        } else if (event->type == NCCL_GROUP) {                                                                    \
            *handle = ring;                                                                                        \
        }                                                                                                          \
        return 0;                                                                                                  \
    }
#define EVENTS_HASH(part) (event->part.commHash)
#define CONTEXTS_HASH(part) (of->hash)

START_EVENT(1, EVENTS_HASH, nMaxChannels, (int)event->coll.op, NAME)
START_EVENT(2, EVENTS_HASH, nMaxChannels, NOT_SAID, SAME)
START_EVENT(3, EVENTS_HASH, nMaxChannels, NOT_SAID, SAME)
START_EVENT(4, CONTEXTS_HASH, nChannels, NOT_SAID, SAME)
START_EVENT(5, CONTEXTS_HASH, nChannels, NOT_SAID, SAME)
START_EVENT(6, CONTEXTS_HASH, nChannels, NOT_SAID, SAME)

static int stop(void *handle)
{
    return 0;
}

static int state(void *handle, int now, void *arguments)
{
    return 0;
}

#define PLUGIN(version)                                                                                  \
    EXPORT nccl_profiler_v##version ncclProfiler_v##version = { "FlowCheck", init_v##version,            \
                                                                start_v##version, stop, state, finalize }
PLUGIN(1);
PLUGIN(2);
PLUGIN(3);
PLUGIN(4);
PLUGIN(5);
PLUGIN(6);
