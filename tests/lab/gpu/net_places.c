/* Prints where the members lie that NCCL and a network plugin share: of nccl_net.h, or with -DREAL of NCCL's headers. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef REAL
typedef int ncclResult_t;
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef void (*ncclDebugLogger_t)(int, unsigned long, const char *, int, const char *, ...);
typedef ncclResult_t (*ncclProfilerCallback_t)(void **, int, void *, int64_t, void *);
#include "net_device.h"
#include "limits.h"
#include "net_v10.h"
#define NET ncclNet_v10_t
#define PROPERTIES ncclNetProperties_v10_t
#else
#include "nccl_net.h"
#define NET nccl_net
#define PROPERTIES nccl_net_properties
#endif

#define PLACE(type, member) printf("%s %zu %zu\n", #member, offsetof(type, member), sizeof(((type *)0)->member));

int main(void)
{
    PLACE(PROPERTIES, name) PLACE(PROPERTIES, pciPath) PLACE(PROPERTIES, guid) PLACE(PROPERTIES, ptrSupport)
    PLACE(PROPERTIES, regIsGlobal) PLACE(PROPERTIES, forceFlush) PLACE(PROPERTIES, speed) PLACE(PROPERTIES, port)
    PLACE(PROPERTIES, latency) PLACE(PROPERTIES, maxComms) PLACE(PROPERTIES, maxRecvs)
    PLACE(PROPERTIES, netDeviceType) PLACE(PROPERTIES, netDeviceVersion) PLACE(PROPERTIES, vProps.ndevs)
    PLACE(PROPERTIES, vProps.devs) PLACE(PROPERTIES, maxP2pBytes) PLACE(PROPERTIES, maxCollBytes)
    PLACE(NET, name) PLACE(NET, init) PLACE(NET, devices) PLACE(NET, getProperties) PLACE(NET, listen)
    PLACE(NET, connect) PLACE(NET, accept) PLACE(NET, regMr) PLACE(NET, regMrDmaBuf) PLACE(NET, deregMr)
    PLACE(NET, isend) PLACE(NET, irecv) PLACE(NET, iflush) PLACE(NET, test) PLACE(NET, closeSend)
    PLACE(NET, closeRecv) PLACE(NET, closeListen) PLACE(NET, getDeviceMr) PLACE(NET, irecvConsumed)
    PLACE(NET, makeVDevice)
    printf("size.properties 0 %zu\nsize.net 0 %zu\n", sizeof(PROPERTIES), sizeof(NET));
    return 0;
}
