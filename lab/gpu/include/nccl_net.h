/* What NCCL and a network plugin say to each other, interface version 10: NCCL 2.26 and 2.27 load it as it is,
 * 2.28 to 2.30 through a wrapper of their own.
 *
 * Declared from NCCL's sources: src/include/plugin/net/net_v10.h, src/include/net_device.h, src/include/nccl_common.h
 * and src/include/plugin/nccl_net.h of 2.27.7. Members keep NCCL's names, so that one program prints the places of the
 * members of both (tests/lab/gpu/net_places.c).
 *
 * NCCL looks the symbols ncclNetPlugin_v12 .. v6 up, the newest that it knows first, and uses the first it finds
 * (src/plugin/net.cc). */
#ifndef FLOWCHECK_NCCL_NET_H
#define FLOWCHECK_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

typedef enum { NCCL_SUCCESS = 0, NCCL_SYSTEM_ERROR = 2, NCCL_INTERNAL_ERROR = 3 } nccl_result;

enum { NCCL_PTR_HOST = 1, NCCL_NET_HANDLE_MAXSIZE = 128, NCCL_NET_MAX_REQUESTS = 32, NCCL_LOG_WARN = 2 };
#define NCCL_SUBSYS_NET 0x10ul

typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

typedef struct {
    int ndevs;
    int devs[4];
} nccl_net_devices;

typedef struct {
    char *name;
    char *pciPath;
    uint64_t guid;
    int ptrSupport;
    int regIsGlobal;
    int forceFlush;
    int speed; /* Mb/s */
    int port;
    float latency;
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
    nccl_net_devices vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
} nccl_net_properties;

typedef struct {
    const char *name;
    nccl_result (*init)(nccl_logger logger, void *profiler);
    nccl_result (*devices)(int *count);
    nccl_result (*getProperties)(int device, nccl_net_properties *properties);
    nccl_result (*listen)(int device, void *handle, void **listener);
    /* Neither blocks: without a peer both succeed and give NULL, and are called again with the same handle. */
    nccl_result (*connect)(int device, void *config, void *handle, void **sender, void **of_device);
    nccl_result (*accept)(void *listener, void **receiver, void **of_device);
    nccl_result (*regMr)(void *end, void *data, size_t size, int type, void **registration);
    nccl_result (*regMrDmaBuf)(void *end, void *data, size_t size, int type, uint64_t offset, int fd,
                               void **registration);
    nccl_result (*deregMr)(void *end, void *registration);
    /* A request of NULL: not now, call again. For LL and LL128 irecv finds the value 1 in *request: then it need not
     * say when the data has come. */
    nccl_result (*isend)(void *sender, void *data, size_t size, int tag, void *registration, void *phandle,
                         void **request);
    nccl_result (*irecv)(void *receiver, int count, void **data, size_t *sizes, int *tags, void **registrations,
                         void **phandles, void **request);
    nccl_result (*iflush)(void *receiver, int count, void **data, int *sizes, void **registrations, void **request);
    nccl_result (*test)(void *request, int *done, int *sizes);
    nccl_result (*closeSend)(void *sender);
    nccl_result (*closeRecv)(void *receiver);
    nccl_result (*closeListen)(void *listener);
    nccl_result (*getDeviceMr)(void *end, void *registration, void **of_device);
    nccl_result (*irecvConsumed)(void *receiver, int count, void *request);
    nccl_result (*makeVDevice)(int *device, nccl_net_devices *properties);
} nccl_net;

#endif
