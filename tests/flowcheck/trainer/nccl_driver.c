/* NCCL's side of the profiler interface, without NCCL: what it loads, calls, in which order and on which thread.
 *
 * From NCCL's sources: 2.23 to 2.25 src/misc/profiler.cc, later src/plugin/profiler.cc and src/plugin/profiler/ (symbols,
 * newest first; masks; which event needs which handle); src/enqueue.cc hostStreamPlanTask (group, calls, proxy operations
 * to the proxy thread, stops); src/transport/net.cc and, from 2.27, src/proxy.cc (a proxy operation's event).
 */
#include "nccl_interface.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { CHANNELS = 64, COMMUNICATORS = 512, FUNCTIONS = 8 };

typedef struct {
    const char *function, *type, *algorithm, *protocol;
    uint64_t count;
    int root, channels, warps, next, previous, steps, chunk, foreign; /* foreign: another process's proxy operation */
} job_call;

static void *library;
static int interface, minor, references;
static int mask, group_mask; /* ncclProfilerEventMask; 2.23 to 2.25: cached when a group starts */
static void *plugin;
static struct {
    void *context;
    uint64_t hash, sequence[FUNCTIONS];
    const char *name;
    int nodes, ranks, rank;
} communicators[COMMUNICATORS];
static int made;
uint64_t driver_events, driver_kept; /* calls of startEvent; handles given for proxy operations */

static const char *const FUNCTION_NAMES[] = { "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce",
                                              "SendRecv", "Send", "Recv", NULL };
static const char *const TYPE_NAMES[] = { "ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64",
                                          "ncclUint64", "ncclFloat16", "ncclFloat32", "ncclFloat64",
                                          "ncclBfloat16", NULL };
static const char *const ALGORITHM_NAMES[] = { "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE",
                                               "PAT", NULL };
static const char *const PROTOCOL_NAMES[] = { "LL", "LL128", "SIMPLE", NULL };

static uint8_t number_of(const char *const *names, const char *name)
{
    for (int i = 0; names[i]; i++)
        if (!strcmp(names[i], name))
            return (uint8_t)i;
    return 255;
}

/* The interface that NCCL 2.`version` finds in the library, 0: none. */
int driver_load(const char *path, int version)
{
    static const int newest[] = { [23] = 1, [24] = 2, [25] = 2, [26] = 3, [27] = 4, [28] = 5, [29] = 6, [30] = 6 };
    if (references++)
        return interface;
    minor = version;
    mask = interface = 0;
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (int v = newest[minor]; library && v >= 1; v--) {
        char name[32];
        snprintf(name, sizeof name, "ncclProfiler_v%d", v);
        plugin = dlsym(library, name);
        if (plugin)
            return interface = v;
    }
    return 0;
}

void driver_unload(void)
{
    if (--references)
        return;
    dlclose(library);
    plugin = NULL;
}

int driver_mask(void)
{
    return __atomic_load_n(&mask, __ATOMIC_RELAXED);
}

static void no_log(void)
{
}

int driver_init(uint64_t hash, const char *name, int nodes, int ranks, int rank)
{
    int c = made++, bad;
    communicators[c].hash = hash;
    communicators[c].name = name;
    communicators[c].nodes = nodes;
    communicators[c].ranks = ranks;
    communicators[c].rank = rank;
    memset(communicators[c].sequence, 0, sizeof communicators[c].sequence);
    void **context = &communicators[c].context;
    if (interface <= 3)
        bad = ((nccl_profiler_v1 *)plugin)->init(context, &mask);
    else if (interface == 4)
        bad = ((nccl_profiler_v4 *)plugin)->init(context, &mask, name, hash, nodes, ranks, rank, no_log);
    else
        bad = ((nccl_profiler_v5 *)plugin)->init(context, hash, &mask, name, nodes, ranks, rank, no_log);
    return bad ? -1 : c;
}

/* startEvent, stopEvent, recordEventState and finalize lie alike in all versions. */
#define PLUGIN ((nccl_profiler_v1 *)plugin)

static void start(int c, void **handle, void *event)
{
    __atomic_fetch_add(&driver_events, 1, __ATOMIC_RELAXED);
    PLUGIN->startEvent(communicators[c].context, handle, event);
}

void driver_finalize(int c)
{
    if (minor < 29 || communicators[c].context)
        PLUGIN->finalize(communicators[c].context);
    driver_unload();
}

/* -- events of each version, filled in as NCCL does -- */

#define SIMPLE_EVENT(version)                                                             \
    static void plain_v##version(int c, void **handle, uint64_t type)                     \
    {                                                                                     \
        nccl_event_v##version e;                                                          \
        memset(&e, 0, sizeof e);                                                          \
        e.type = type;                                                                    \
        start(c, handle, &e);                                                             \
    }                                                                                     \
    static void proxy_v##version(int c, void **handle, void *parent, const nccl_proxy_op *op) \
    {                                                                                     \
        nccl_event_v##version e;                                                          \
        memset(&e, 0, sizeof e);                                                          \
        e.type = NCCL_PROXY_OP;                                                           \
        e.parentObj = parent;                                                             \
        e.rank = communicators[c].rank;                                                   \
        e.proxyOp = *op;                                                                  \
        start(c, handle, &e);                                                             \
    }                                                                                     \
    static void call_v##version(int c, void **handle, void *parent, const job_call *said, uint64_t sequence, bool p2p) \
    {                                                                                     \
        nccl_event_v##version e;                                                          \
        memset(&e, 0, sizeof e);                                                          \
        e.parentObj = parent;                                                             \
        e.rank = communicators[c].rank;                                                   \
        if (p2p) {                                                                        \
            e.type = NCCL_P2P;                                                            \
            e.p2p.func = NUMBER(FUNCTION_NAMES, said->function);                          \
            e.p2p.datatype = NUMBER(TYPE_NAMES, said->type);                              \
            e.p2p.count = said->count;                                                    \
            e.p2p.peer = said->root;                                                      \
            P2P_OF(e)                                                                     \
        } else {                                                                          \
            e.type = NCCL_COLL;                                                           \
            e.coll.seqNumber = sequence;                                                  \
            e.coll.func = NUMBER(FUNCTION_NAMES, said->function);                         \
            e.coll.count = said->count;                                                   \
            e.coll.root = said->root;                                                     \
            e.coll.datatype = NUMBER(TYPE_NAMES, said->type);                             \
            e.coll.algo = NUMBER(ALGORITHM_NAMES, said->algorithm);                       \
            e.coll.proto = NUMBER(PROTOCOL_NAMES, said->protocol);                        \
            e.coll.nWarps = (uint8_t)said->warps;                                         \
            COLL_OF(e)                                                                    \
        }                                                                                 \
        start(c, handle, &e);                                                             \
    }

#define NUMBER(names, name) number_of(names, name)
#define P2P_OF(e) e.p2p.commHash = communicators[c].hash;
#define COLL_OF(e) e.coll.commHash = communicators[c].hash; e.coll.nMaxChannels = (uint8_t)said->channels; e.coll.op = 4;
SIMPLE_EVENT(1)
#undef NUMBER
#undef COLL_OF
#define NUMBER(names, name) (name)
#define COLL_OF(e) e.coll.commHash = communicators[c].hash; e.coll.nMaxChannels = (uint8_t)said->channels;
SIMPLE_EVENT(2)
SIMPLE_EVENT(3)
#undef P2P_OF
#undef COLL_OF
#define P2P_OF(e) e.p2p.nChannels = (uint8_t)said->channels;
#define COLL_OF(e) e.coll.nChannels = (uint8_t)said->channels;
SIMPLE_EVENT(4)
SIMPLE_EVENT(5)
SIMPLE_EVENT(6)

#define EACH(what, ...)                                                                                    \
    switch (interface) {                                                                                   \
    case 1: what##_v1(__VA_ARGS__); break;                                                                 \
    case 2: what##_v2(__VA_ARGS__); break;                                                                 \
    case 3: what##_v3(__VA_ARGS__); break;                                                                 \
    case 4: what##_v4(__VA_ARGS__); break;                                                                 \
    case 5: what##_v5(__VA_ARGS__); break;                                                                 \
    case 6: what##_v6(__VA_ARGS__); break;                                                                 \
    }

/* -- the proxy thread -- */

typedef struct {
    int c, mask;
    void *task;
    job_call said;
} posted;

static void *progress(void *argument)
{
    const posted *op = argument;
    if (!(op->mask & (NCCL_PROXY_OP | NCCL_PROXY_STEP)))
        return NULL;
    for (int channel = 0; channel < op->said.channels; channel++) {
        for (int sends = 0; sends < 2; sends++) {
            void *handle = (void *)1; /* not cleared by NCCL: the plugin has to */
            nccl_proxy_op one = {
                .pid = op->said.foreign ? 1 : getpid(), .channelId = (uint8_t)channel,
                .peer = sends ? op->said.next : op->said.previous, .nSteps = op->said.steps,
                .chunkSize = op->said.chunk, .isSend = sends,
            };
            EACH(proxy, op->c, &handle, op->task, &one)
            if (handle) {
                __atomic_fetch_add(&driver_kept, 1, __ATOMIC_RELAXED);
                PLUGIN->recordEventState(handle, 0, NULL);
                PLUGIN->stopEvent(handle);
            }
        }
    }
    return NULL;
}

/* -- a call of one collective or of one send or receive, outside of a group -- */

void driver_call(int c, const job_call *said)
{
    bool p2p = !strcmp(said->function, "Send") || !strcmp(said->function, "Recv");
    uint64_t *sequence = &communicators[c].sequence[number_of(FUNCTION_NAMES, said->function)];
    void *group = NULL, *task = NULL, *api = NULL, *call_api = NULL;
    int task_mask = driver_mask();
    const int any = NCCL_GROUP | NCCL_COLL | NCCL_P2P | NCCL_PROXY_OP | NCCL_PROXY_STEP;
    if (minor >= 28) {
        if (task_mask & (any | NCCL_GROUP_API | NCCL_P2P_API | NCCL_COLL_API | NCCL_KERNEL_LAUNCH))
            EACH(plain, c, &api, NCCL_GROUP_API)
        if (!p2p && (task_mask & (NCCL_COLL_API | NCCL_COLL | NCCL_PROXY_OP | NCCL_PROXY_STEP)))
            EACH(plain, c, &call_api, NCCL_COLL_API)
        if (p2p && (task_mask & (NCCL_P2P_API | NCCL_P2P | NCCL_PROXY_OP | NCCL_PROXY_STEP)))
            EACH(plain, c, &call_api, NCCL_P2P_API)
    }
    if (minor <= 25)
        task_mask = group_mask = driver_mask();
    if (task_mask & (minor <= 25 ? any & ~NCCL_GROUP : any))
        EACH(plain, c, &group, NCCL_GROUP)
    int enable = minor <= 25 ? NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_COLL
                             : (p2p ? NCCL_P2P : NCCL_COLL) | NCCL_PROXY_OP | NCCL_PROXY_STEP;
    bool told = (task_mask & enable) && (group || minor >= 28);
    if (told)
        EACH(call, c, &task, minor >= 28 ? call_api : group, said, *sequence, p2p)
    if (!p2p && (told || minor >= 26))
        *sequence += 1;
    if (minor <= 25 && !told)
        task_mask = 0;
    posted op = { c, task_mask, task, *said };
    pthread_t proxy;
    pthread_create(&proxy, NULL, progress, &op);
    if (told && (task || minor <= 25))
        PLUGIN->stopEvent(task);
    if (group)
        PLUGIN->stopEvent(group);
    pthread_join(proxy, NULL);
    if (call_api)
        PLUGIN->stopEvent(call_api);
    if (api)
        PLUGIN->stopEvent(api);
}

/* `count` calls on each of `threads` threads at once, each thread on its own communicator. */
typedef struct {
    int c, count;
    job_call said;
} burst;

static void *many(void *argument)
{
    burst *mine = argument;
    for (int i = 0; i < mine->count; i++) {
        mine->said.count = (uint64_t)i + 1;
        void *handle = NULL;
        EACH(call, mine->c, &handle, NULL, &mine->said, (uint64_t)i, false)
        nccl_proxy_op one = { .pid = getpid(), .channelId = (uint8_t)mine->c, .nSteps = i, .chunkSize = mine->c };
        void *none = NULL;
        EACH(proxy, mine->c, &none, handle, &one)
    }
    return NULL;
}

void driver_burst(int first, int threads, int count, const job_call *said)
{
    pthread_t all[64];
    burst bursts[64];
    for (int i = 0; i < threads; i++) {
        bursts[i] = (burst){ first + i, count, *said };
        pthread_create(&all[i], NULL, many, &bursts[i]);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
}
