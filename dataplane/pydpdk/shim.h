/* DPDK's inline functions, macros and version differences, as functions that cffi can bind. */
#ifndef FLOWCHECK_DPDK_SHIM_H
#define FLOWCHECK_DPDK_SHIM_H

#include <stdint.h>

struct rte_mempool;

/* rte_errno is a per-thread lvalue macro. */
int fc_rte_errno(void);

/* Receive-only configuration: mtu 0 leaves the driver's own; scatter is used where offered. */
int fc_port_configure(uint16_t port, uint16_t rx_queues, uint16_t mtu);
int fc_port_rx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, struct rte_mempool *pool);

#endif
