"""Ethernet ports, receive side only: virtual devices by name and arguments, physical ones by PCI address.

Call order: Port(...) -> configure -> rx_queue for each queue -> start -> { stop -> start }* -> close.
Nothing is ever transmitted: no tx queue exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import check
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.mbuf import Mbuf
from dataplane.pydpdk.mempool import Mempool
from dataplane.pydpdk.resource import Resource

__all__ = ["Port", "PortFacts", "PortStats", "Rss"]

PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
AF_XDP_ONCE = (
    "buffers of at most 2 KB, and an interface that this process has not captured before: DPDK's af_xdp "
    "driver keeps its queue until the process ends"
)


class Rss(IntEnum):
    """How a port spreads packets over its rx queues (shim.h: fc_rss)."""

    NONE = 0
    SOURCE_PORT = 1
    ADDRESSES = 2


@dataclass(frozen=True, slots=True)
class PortFacts:
    """What the port offers. mtu: now. socket: NUMA node, -1 any. rss_source_port: spreads by the UDP source
    port alone; with rss only, by ports and addresses (both keep a connection on one queue)."""

    driver: str
    max_rx_queues: int
    mtu: int
    max_mtu: int
    socket: int
    scatter: bool
    rx_timestamp: bool
    ip_checksum: bool
    rss: bool
    rss_source_port: bool


@dataclass(frozen=True, slots=True)
class PortStats:
    """The port's own counters since start."""

    received: int
    bytes: int
    missed: int
    errors: int
    no_mbuf: int


class Port(Resource):
    """A device, hot-plugged: `Port(eal, "net_pcap0", "rx_pcap=/tmp/a.pcap")`, `Port(eal, "0000:81:00.0")`.

    A virtual device's name begins with its driver's; arguments go to the driver as they are, so no value in
    them may hold a comma or a space. A PCI address must have been named to Eal.start(devices=...).

    Raises:
        DpdkError: no such driver or device, or it refused its arguments.
    """

    def __init__(self, eal: Eal, name: str, arguments: str = "") -> None:
        eal.require_open()
        self.name = name
        self.started = False
        self._bus = b"pci" if PCI_ADDRESS.fullmatch(name) else b"vdev"
        number = ffi.new("uint16_t *")
        # EAL probes the PCI devices it was started with, so such a port is there already.
        if self._bus == b"vdev" or lib.rte_eth_dev_get_port_by_name(name.encode(), number) != 0:
            self._plug(arguments)
            rc = lib.rte_eth_dev_get_port_by_name(name.encode(), number)
            if rc != 0:
                lib.rte_eal_hotplug_remove(self._bus, name.encode())
                check(rc, f"device {name}: its port")
        self.number = int(number[0])
        super().__init__(eal)

    def _plug(self, arguments: str) -> None:
        remedy = (
            "a name that begins with its driver's (net_pcap, net_ring, ...), arguments that driver knows, "
            "and at most 32 ports at a time; the EAL lines above say which"
        )
        if self._bus == b"pci":
            remedy = "this address in Eal.start(devices=...), and the driver its PMD wants (flowcheck doctor)"
        check(
            lib.rte_eal_hotplug_add(self._bus, self.name.encode(), arguments.encode()),
            f"device {self.name},{arguments}", remedy,
        )

    @property
    def facts(self) -> PortFacts:
        self.require_open()
        raw = ffi.new("fc_port_facts *")
        check(lib.fc_port_facts_get(self.number, raw), f"port {self.name}: what it offers")
        return PortFacts(
            ffi.string(raw.driver).decode(), raw.max_rx_queues, raw.mtu, raw.max_mtu, raw.socket, bool(raw.scatter),
            bool(raw.rx_timestamp), bool(raw.ip_checksum), bool(raw.rss), bool(raw.rss_source_port),
        )

    def configure(self, *, rx_queues: int = 1, mtu: int = 0, rss: Rss = Rss.SOURCE_PORT) -> None:
        """mtu: bytes of an IP packet, 0 leaves the driver's own. rss: as far as the port can."""
        self.require_open()
        check(
            lib.fc_port_configure(self.number, rx_queues, mtu, int(rss)),
            f"port {self.name}: configuring {rx_queues} rx queues, MTU {mtu or 'unchanged'}",
        )

    def promiscuous(self) -> None:
        """Take frames for any address, as a mirror port must."""
        self.require_open()
        check(lib.rte_eth_promiscuous_enable(self.number), f"port {self.name}: promiscuous mode")

    def receive(self, pool: Mempool, *, queue: int = 0, most: int = 32) -> list[Mbuf]:
        """What has arrived, at most `most` packets, without waiting; `pool` is the queue's. One thread per queue."""
        self.require_open()
        mbufs = ffi.new("struct rte_mbuf *[]", most)
        count = lib.fc_port_rx_burst(self.number, queue, mbufs, most)
        return [Mbuf(pool, pointer=mbufs[i]) for i in range(count)]

    def rx_queue(self, queue: int, pool: Mempool, *, descriptors: int = 1024) -> None:
        self.require_open()
        pool.require_open()
        check(
            lib.fc_port_rx_queue(self.number, queue, descriptors, pool.pointer),
            f"port {self.name}: rx queue {queue} with {descriptors} descriptors on {pool!r}",
            AF_XDP_ONCE if self.name.startswith("net_af_xdp") else "",
        )
        self._depend_on(pool)

    def start(self) -> None:
        self.require_open()
        check(lib.rte_eth_dev_start(self.number), f"port {self.name}: start")
        self.started = True
        self.forget()

    def forget(self) -> None:
        """Its counters begin at 0 again."""
        self.require_open()
        check(lib.rte_eth_stats_reset(self.number), f"port {self.name}: clearing its counters")

    def stop(self) -> None:
        if not self.started:
            return
        self.started = False
        check(lib.rte_eth_dev_stop(self.number), f"port {self.name}: stop")

    def stats(self) -> PortStats:
        self.require_open()
        raw = ffi.new("struct rte_eth_stats *")
        check(lib.rte_eth_stats_get(self.number, raw), f"port {self.name}: reading its counters")
        return PortStats(raw.ipackets, raw.ibytes, raw.imissed, raw.ierrors, raw.rx_nombuf)

    def _release(self) -> None:
        try:
            self.stop()
        finally:
            rc = lib.rte_eth_dev_close(self.number)
            gone = lib.rte_eal_hotplug_remove(self._bus, self.name.encode())
        check(rc, f"port {self.name}: close")
        check(gone, f"device {self.name}: unplug")

    def __repr__(self) -> str:
        return f"Port({self.name!r})"
