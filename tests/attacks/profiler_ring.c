/* The profiler plugin with its inside open: what a thread that dies between claiming and publishing leaves behind. */
#include "../../flowcheck/trainer/src/nccl_profiler.c"

EXPORT void attack_torn(void) /* claimed, half filled, never published */
{
    uint64_t serial;
    begin(&serial, &communicators[0], FLOWCHECK_COLLECTIVE, 6);
}

EXPORT void attack_publish_torn(void) /* the newest, after all */
{
    uint64_t serial = atomic_load(&claimed);
    struct flowcheck_record *record = &ring[(serial - 1) % FLOWCHECK_PROFILER_RECORDS];
    text(record->function, sizeof record->function, "AllReduce");
    publish(record, serial);
}

EXPORT void attack_garbage(const struct flowcheck_record *with)
{
    uint64_t serial;
    struct flowcheck_record *record = claim(&serial);
    memcpy(record, with, sizeof *record);
    publish(record, serial);
}

/* A call for which there is no room, and its proxy operation when there is room again. */
EXPORT uint64_t attack_drop(void)
{
    uint64_t serial;
    nccl_event_v6 event = { .type = NCCL_COLL, .coll = { .func = "AllReduce" } };
    void *handle = NULL;
    while (begin(&serial, &communicators[0], FLOWCHECK_FINALIZED, 0))
        publish(&ring[(serial - 1) % FLOWCHECK_PROFILER_RECORDS], serial);
    start_v6(&communicators[0], &handle, &event);
    return (uint64_t)(uintptr_t)handle;
}

EXPORT void attack_proxy_of(uint64_t parent)
{
    void *handle = NULL;
    nccl_event_v6 event = { .type = NCCL_PROXY_OP, .parentObj = (void *)(uintptr_t)parent };
    event.proxyOp.pid = getpid();
    start_v6(&communicators[0], &handle, &event);
}
