/* What NCCL and a profiler plugin say to each other, interface versions 1 to 6 (NCCL 2.23 to 2.30).
 *
 * Declared from NCCL's sources (src/include/plugin/profiler/profiler_v1.h to profiler_v6.h; 2.23 to 2.25:
 * src/include/nccl_profiler.h): members keep NCCL's names, so that one program prints the places of the members of
 * both (tests/flowcheck/trainer/profiler_places.c). Only what the plugin reads is declared; what it skips is padding
 * that the union has anyway. No version has the fields of a later one in another place than its own header says.
 *
 * NCCL looks the symbols ncclProfiler_v6 .. v1 up, the newest that it knows first, and uses the first it finds.
 */
#ifndef FLOWCHECK_NCCL_INTERFACE_H
#define FLOWCHECK_NCCL_INTERFACE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { /* event types, and bits of the activation mask */
    NCCL_GROUP = 1 << 0, NCCL_COLL = 1 << 1, NCCL_P2P = 1 << 2, NCCL_PROXY_OP = 1 << 3, NCCL_PROXY_STEP = 1 << 4,
    NCCL_PROXY_CTRL = 1 << 5, NCCL_KERNEL_CH = 1 << 6, NCCL_NET_PLUGIN = 1 << 7, NCCL_GROUP_API = 1 << 8,
    NCCL_COLL_API = 1 << 9, NCCL_P2P_API = 1 << 10, NCCL_KERNEL_LAUNCH = 1 << 11,
};

/* An operation of the proxy: one connection of one channel, in all versions alike. chunkSize in bytes. 2.23 gives both
 * nSteps and chunkSize per step, later versions per network transfer. */
typedef struct {
    pid_t pid;
    uint8_t channelId;
    int peer;
    int nSteps;
    int chunkSize;
    int isSend;
} nccl_proxy_op;

typedef struct {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t commHash;
            uint64_t seqNumber;
            uint8_t func;
            void const *sendBuff;
            void *recvBuff;
            size_t count;
            int root;
            uint8_t datatype;
            uint32_t op;
            size_t trafficBytes;
            uint8_t nMaxChannels;
            uint8_t nWarps;
            uint8_t algo;
            uint8_t proto;
            int isCollnet;
            int isNvls;
        } coll;
        struct {
            const char *name;
            uint64_t commHash;
            uint8_t func;
            void *buff;
            uint8_t datatype;
            size_t count;
            int peer;
        } p2p;
        nccl_proxy_op proxyOp;
    };
} nccl_event_v1;

typedef struct {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t commHash;
            uint64_t seqNumber;
            const char *func;
            void const *sendBuff;
            void *recvBuff;
            size_t count;
            int root;
            const char *datatype;
            size_t trafficBytes;
            uint8_t nMaxChannels;
            uint8_t nWarps;
            const char *algo;
            const char *proto;
        } coll;
        struct {
            const char *name;
            uint64_t commHash;
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
        nccl_proxy_op proxyOp;
    };
} nccl_event_v2;

typedef struct {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t commHash;
            uint64_t seqNumber;
            const char *func;
            void const *sendBuff;
            void *recvBuff;
            size_t count;
            int root;
            const char *datatype;
            uint8_t nMaxChannels;
            uint8_t nWarps;
            const char *algo;
            const char *proto;
        } coll;
        struct {
            const char *name;
            uint64_t commHash;
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
        nccl_proxy_op proxyOp;
    };
} nccl_event_v3;

typedef struct {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct {
            uint64_t seqNumber;
            const char *func;
            void const *sendBuff;
            void *recvBuff;
            size_t count;
            int root;
            const char *datatype;
            uint8_t nChannels;
            uint8_t nWarps;
            const char *algo;
            const char *proto;
        } coll;
        struct {
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t nChannels;
        } p2p;
        nccl_proxy_op proxyOp;
    };
} nccl_event_v4;

typedef struct {
    uint64_t type;
    void *parentObj;
    int rank;
    union {
        struct {
            uint64_t seqNumber;
            const char *func;
            void const *sendBuff;
            void *recvBuff;
            size_t count;
            int root;
            const char *datatype;
            uint8_t nChannels;
            uint8_t nWarps;
            const char *algo;
            const char *proto;
            void *parentGroup;
        } coll;
        struct {
            const char *func;
            void *buff;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t nChannels;
            void *parentGroup;
        } p2p;
        nccl_proxy_op proxyOp;
    };
} nccl_event_v5;

typedef nccl_event_v5 nccl_event_v6; /* which adds copy-engine events behind the same members: longer, else the same */

/* Result 0 is success. states and their arguments are not read. */
typedef int (*nccl_stop)(void *handle);
typedef int (*nccl_state)(void *handle, int state, void *arguments);
typedef int (*nccl_finalize)(void *context);
typedef int (*nccl_init_v1)(void **context, int *mask);
typedef int (*nccl_init_v4)(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank,
                            void (*log)(void));
typedef int (*nccl_init_v5)(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank,
                            void (*log)(void));

#define NCCL_PROFILER(version, init_type)                                             \
    typedef struct {                                                                  \
        const char *name;                                                             \
        init_type init;                                                               \
        int (*startEvent)(void *context, void **handle, nccl_event_v##version *event); \
        nccl_stop stopEvent;                                                          \
        nccl_state recordEventState;                                                  \
        nccl_finalize finalize;                                                       \
    } nccl_profiler_v##version

NCCL_PROFILER(1, nccl_init_v1);
NCCL_PROFILER(2, nccl_init_v1);
NCCL_PROFILER(3, nccl_init_v1);
NCCL_PROFILER(4, nccl_init_v4);
NCCL_PROFILER(5, nccl_init_v5);
NCCL_PROFILER(6, nccl_init_v5);

#endif
