"""DPDK from Python: the objects a capture needs, context-managed, closed in dependency order.

    from dataplane import pydpdk

    with pydpdk.Eal.start(memory_mb=64) as eal:
        pool = pydpdk.Mempool(eal, "packets", 1023, room=2176)
        port = pydpdk.Port(eal, "net_pcap0", "rx_pcap=/tmp/a.pcap")
        port.configure()
        port.rx_queue(0, pool)
        port.start()
        print(port.stats())

dataplane.capture builds on these; nothing here knows about RoCE.
"""

from __future__ import annotations

from dataplane.pydpdk.eal import Eal, free_huge_pages
from dataplane.pydpdk.errors import DpdkError, NotEnoughMemory
from dataplane.pydpdk.ethdev import Port, PortStats
from dataplane.pydpdk.mempool import Mempool, mempool_bytes
from dataplane.pydpdk.resource import Resource

__all__ = [
    "DpdkError",
    "Eal",
    "Mempool",
    "NotEnoughMemory",
    "Port",
    "PortStats",
    "Resource",
    "free_huge_pages",
    "mempool_bytes",
]
