/* FlowCheck's profiler plugin for NCCL, as flowcheck/trainer/nccl/profiler.py sees it (which repeats this layout).
 *
 * One instance per process: NCCL and the reader open the same file, and the dynamic loader gives both the same memory.
 * Any number of threads of NCCL write, one reader takes. Nothing here waits, and nothing is allocated.
 */
#ifndef FLOWCHECK_NCCL_PROFILER_H
#define FLOWCHECK_NCCL_PROFILER_H

#include <stdint.h>

#define FLOWCHECK_PROFILER_LAYOUT UINT64_C(0x46435052004e0001) /* of the record and of the counts */
#define FLOWCHECK_PROFILER_RECORDS 32768

enum { /* what a record is of */
    FLOWCHECK_COMMUNICATOR = 1, /* other: ranks; steps: nodes; name */
    FLOWCHECK_COLLECTIVE = 2,   /* other: root */
    FLOWCHECK_P2P = 3,          /* other: peer */
    FLOWCHECK_PROXY_OP = 4,     /* other: peer; width: 1 sends, 0 receives; channels: its channel */
    FLOWCHECK_FINALIZED = 5,    /* the communicator is gone */
};
#define FLOWCHECK_LOST UINT64_MAX /* parent: a call whose record was dropped */

struct flowcheck_record { /* 128 bytes */
    uint64_t serial;      /* 1, 2, ...; written last */
    uint64_t parent;      /* of a proxy operation: serial of its call; 0: of another process or none */
    uint64_t count;       /* elements of `type` as NCCL has them by then: bytes for AllGather and Broadcast */
    uint64_t sequence;    /* NCCL's number of the call, per function */
    uint64_t hash;        /* the communicator's, the same on all its ranks */
    uint32_t communicator; /* 1, 2, ...: this process's number of it */
    int32_t rank, other, steps, chunk, process;
    uint8_t kind, interface, channels, width; /* width: warps per channel */
    int32_t reduction;    /* ncclRedOp_t where the interface says it (v1), else -1 */
    union {
        struct {
            char function[16], type[16], algorithm[16], protocol[8];
        };
        char name[56];
    };
};

enum { /* what flowcheck_profiler_counts fills in */
    FLOWCHECK_CLAIMED, FLOWCHECK_TAKEN, FLOWCHECK_DROPPED, FLOWCHECK_STRANGERS, FLOWCHECK_ALIVE, FLOWCHECK_PROCESS,
    FLOWCHECK_MASK, FLOWCHECK_COUNTS,
};

uint64_t flowcheck_profiler_layout(void);
/* Copies up to `most` records in order and frees them. One thread at a time. */
uint64_t flowcheck_profiler_read(struct flowcheck_record *to, uint64_t most);
/* events 1: record (as at the start); 0: have NCCL make no events, now and for communicators to come. */
void flowcheck_profiler_record(int events);
void flowcheck_profiler_counts(uint64_t counts[FLOWCHECK_COUNTS]);

#endif
