"""DPDK from Python: the objects a capture needs, context-managed, closed in dependency order.

    from dataplane import pydpdk

    with pydpdk.Eal.start(memory_mb=64) as eal:
        pool = pydpdk.Mempool(eal, "packets", 1023, room=2176)
        port = pydpdk.Port(eal, "net_pcap0", "rx_pcap=/tmp/a.pcap")
        port.configure()
        port.rx_queue(0, pool)
        port.start()
        print(port.stats())

Packets can be taken by hand, for tests and small tools (examples/pydpdk_loopback.py); at speed that is the
C thread's work (dataplane.rx). dataplane.capture and dataplane.live build on these; nothing here knows
about RoCE.
"""

from __future__ import annotations

from dataplane.pydpdk.dmadev import DmaDevice, DmaFacts
from dataplane.pydpdk.eal import Eal, free_huge_pages
from dataplane.pydpdk.errors import DpdkError, NotEnoughMemory
from dataplane.pydpdk.ethdev import Port, PortFacts, PortStats, Rss
from dataplane.pydpdk.mbuf import Mbuf
from dataplane.pydpdk.mempool import Mempool, mempool_bytes
from dataplane.pydpdk.resource import Resource
from dataplane.pydpdk.ring import Ring

__all__ = [
    "DmaDevice",
    "DmaFacts",
    "DpdkError",
    "Eal",
    "Mbuf",
    "Mempool",
    "NotEnoughMemory",
    "Port",
    "PortFacts",
    "PortStats",
    "Resource",
    "Ring",
    "Rss",
    "free_huge_pages",
    "mempool_bytes",
]
