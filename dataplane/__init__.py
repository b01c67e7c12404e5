"""From a port to a ring of packet references: DPDK, dump strategies, drop counters."""
