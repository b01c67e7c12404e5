/* What an event costs NCCL with FlowCheck's profiler plugin: ns of the thread that makes it.
 *
 *     gcc -O2 -Iflowcheck/trainer/include benchmarks/profiler_event.c -ldl -lpthread -o profiler_event
 *     ./profiler_event flowcheck/trainer/nccl_profiler.plugin.so
 *
 * Interface 6, as NCCL 2.30 calls it: a collective, a proxy operation, an event the plugin leaves out, and a collective
 * while the ring is full; the same by 2 and 4 threads at once, which is worse than NCCL does. Bursts of 16384 events,
 * between which the ring is emptied outside the clock. Prints the median and the worst of 41 bursts.
 */
#include "nccl_interface.h"
#include "nccl_profiler.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BURST = 16384, ROUNDS = 41 };
static nccl_profiler_v6 *plugin;
static uint64_t (*take)(struct flowcheck_record *, uint64_t);
static void *context;
static int mask, burst;
static nccl_event_v6 event;
static struct flowcheck_record out[FLOWCHECK_PROFILER_RECORDS];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * t.tv_sec + t.tv_nsec;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void *make(void *unused)
{
    for (int i = 0; i < burst; i++) {
        void *handle;
        plugin->startEvent(context, &handle, &event);
    }
    return NULL;
}

static void measure(const char *what, int threads, int empty)
{
    double all[ROUNDS];
    burst = BURST / threads;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t others[8];
        while (empty && take(out, FLOWCHECK_PROFILER_RECORDS))
            ;
        double begin = now();
        for (int i = 1; i < threads; i++)
            pthread_create(&others[i], NULL, make, NULL);
        make(NULL);
        for (int i = 1; i < threads; i++)
            pthread_join(others[i], NULL);
        all[round] = (now() - begin) / burst;
    }
    qsort(all, ROUNDS, sizeof *all, order);
    printf("%-28s %d threads: %6.1f ns (worst burst %6.1f)\n", what, threads, all[ROUNDS / 2], all[ROUNDS - 1]);
}

int main(int argc, char **argv)
{
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library || !(plugin = dlsym(library, "ncclProfiler_v6"))) {
        fprintf(stderr, "no plugin: %s\n", argc > 1 ? dlerror() : "give its path");
        return 3;
    }
    *(void **)&take = dlsym(library, "flowcheck_profiler_read");
    plugin->init(&context, 7, &mask, "benchmark", 2, 16, 3, NULL);
    event.type = NCCL_COLL;
    event.coll.func = "AllReduce";
    event.coll.datatype = "ncclBfloat16";
    event.coll.algo = "RING";
    event.coll.proto = "SIMPLE";
    for (int threads = 1; threads <= 4; threads *= 2)
        measure("collective", threads, 1);
    for (int i = 0; i < FLOWCHECK_PROFILER_RECORDS; i++)
        plugin->startEvent(context, &(void *){ NULL }, &event);
    measure("collective, ring full", 1, 0);
    event.type = NCCL_PROXY_OP;
    event.proxyOp.pid = getpid();
    for (int threads = 1; threads <= 4; threads *= 2)
        measure("proxy operation", threads, 1);
    event.type = NCCL_COLL_API;
    measure("an event that is left out", 1, 1);
    return 0;
}
