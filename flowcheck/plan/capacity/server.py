"""What no server has today: so that a node which does not exist is not called fast enough.

Two processors of AMD's EPYC 9005 (data sheets): 160 PCIe 5.0 lanes, 24 channels of DDR5-6400, 384 cores, 48 DIMMs of
256 GB. One server may well have less; it is the most that is looked for.
"""

from __future__ import annotations

import math

from flowcheck.plan.capacity.capacity import Capacity, Node

__all__ = ["missing"]

LANES, LANES_GBPS = 160, 25  # a PCIe 5.0 lane: 31.5 Gb/s; NICs of 100, 200, 400 Gb/s take 4, 8 and 16
MEMORY_GBS = 1228  # 24 channels x 51.2
CORES, MEMORY_GB = 384, 12_288


def missing(node: Node, found: Capacity, cores: int) -> list[str]:
    """What such a node needs and no server has, in words; empty: there may be one."""
    lanes = node.ports * max(4, 4 * math.ceil(node.monitor_gbps / (4 * LANES_GBPS)))
    # in a burst each byte is written by the NIC, and read; over an iteration the memory carries all stages
    burst = found.peak_gbps / 8 * 2
    moved = max(burst, found.load.nbytes / (found.comm_s + found.gap_s) / 1e9)
    return [
        f"{what} {needed:,.0f}, and a server has {most:,} at most"
        for what, needed, most in (
            (f"PCIe 5.0 lanes for {node.ports} ports of {node.monitor_gbps:g} Gb/s:", lanes, LANES),
            ("GB/s of memory:", moved, MEMORY_GBS), ("cores:", cores, CORES),
            ("GB of memory:", found.memory_most / 1e9, MEMORY_GB),
        )
        if needed > most
    ]
