/* Prints where the members lie that the plugin reads: of nccl_interface.h, or with -DREAL of NCCL's own headers. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#ifdef REAL
typedef int ncclResult_t;
typedef pid_t ncclPid_t;
typedef void (*ncclDebugLogger_t)(void);
#include REAL
#define EVENT_(v) ncclProfilerEventDescr_v##v##_t
#define PROFILER_(v) ncclProfiler_v##v##_t
#else
#include "nccl_interface.h"
#define EVENT_(v) nccl_event_v##v
#define PROFILER_(v) nccl_profiler_v##v
#endif
#define EVENT(v) EVENT_(v)
#define PROFILER(v) PROFILER_(v)

#define PLACE(type, member) \
    printf("%s %zu %zu\n", #member, offsetof(type, member), sizeof(((type *)0)->member));

/* What a plugin's init is given, in order: a wrong one does not compile as C++. */
#ifndef REAL
typedef int ncclResult_t;
typedef void (*ncclDebugLogger_t)(void);
#endif
#if VERSION < 4
static ncclResult_t init(void **, int *) { return (ncclResult_t)0; }
#elif VERSION == 4
static ncclResult_t init(void **, int *, const char *, uint64_t, int, int, int, ncclDebugLogger_t)
{ return (ncclResult_t)0; }
#else
static ncclResult_t init(void **, uint64_t, int *, const char *, int, int, int, ncclDebugLogger_t)
{ return (ncclResult_t)0; }
#endif

int main()
{
    typedef EVENT(VERSION) event;
    typedef PROFILER(VERSION) profiler;
    profiler made;
    made.init = init;
    (void)made;
    PLACE(event, type) PLACE(event, parentObj) PLACE(event, rank)
    PLACE(event, coll.seqNumber) PLACE(event, coll.func) PLACE(event, coll.count) PLACE(event, coll.root)
    PLACE(event, coll.datatype) PLACE(event, coll.nWarps) PLACE(event, coll.algo) PLACE(event, coll.proto)
    PLACE(event, p2p.func) PLACE(event, p2p.datatype) PLACE(event, p2p.count) PLACE(event, p2p.peer)
    PLACE(event, proxyOp.pid) PLACE(event, proxyOp.channelId) PLACE(event, proxyOp.peer)
    PLACE(event, proxyOp.nSteps) PLACE(event, proxyOp.chunkSize) PLACE(event, proxyOp.isSend)
#if VERSION == 1
    PLACE(event, coll.op)
#endif
#if VERSION < 4
    PLACE(event, coll.commHash) PLACE(event, coll.nMaxChannels) PLACE(event, p2p.commHash)
#else
    PLACE(event, coll.nChannels) PLACE(event, p2p.nChannels)
#endif
    PLACE(profiler, name) PLACE(profiler, init) PLACE(profiler, startEvent) PLACE(profiler, stopEvent)
    PLACE(profiler, recordEventState) PLACE(profiler, finalize)
    return 0;
}
