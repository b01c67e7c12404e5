"""Ethernet ports: virtual devices by name and arguments, receive side only.

Call order: Port(...) -> configure -> rx_queue for each queue -> start -> { stop -> start }* -> close.
Nothing is ever transmitted: no tx queue exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import check
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.mempool import Mempool
from dataplane.pydpdk.resource import Resource

__all__ = ["Port", "PortStats"]


@dataclass(frozen=True, slots=True)
class PortStats:
    """The port's own counters since start."""

    received: int
    bytes: int
    missed: int
    errors: int
    no_mbuf: int


class Port(Resource):
    """A virtual device, hot-plugged: `Port(eal, "net_pcap0", "rx_pcap=/tmp/a.pcap")`.

    The name begins with the driver's; arguments go to the driver as they are, so no value in them may hold
    a comma or a space.

    Raises:
        DpdkError: no such driver, or it refused its arguments.
    """

    def __init__(self, eal: Eal, name: str, arguments: str = "") -> None:
        eal.require_open()
        self.name = name
        self.started = False
        check(
            lib.rte_eal_hotplug_add(b"vdev", name.encode(), arguments.encode()),
            f"device {name},{arguments}",
            "a name that begins with its driver's (net_pcap, net_ring, ...), arguments that driver knows, "
            "and at most 32 ports at a time; the EAL lines above say which",
        )
        number = ffi.new("uint16_t *")
        rc = lib.rte_eth_dev_get_port_by_name(name.encode(), number)
        if rc != 0:
            lib.rte_eal_hotplug_remove(b"vdev", name.encode())
            check(rc, f"device {name}: its port")
        self.number = int(number[0])
        super().__init__(eal)

    def configure(self, *, rx_queues: int = 1, mtu: int = 0) -> None:
        """mtu: bytes of an IP packet, 0 leaves the driver's own."""
        self.require_open()
        check(
            lib.fc_port_configure(self.number, rx_queues, mtu),
            f"port {self.name}: configuring {rx_queues} rx queues, MTU {mtu or 'unchanged'}",
        )

    def rx_queue(self, queue: int, pool: Mempool, *, descriptors: int = 1024) -> None:
        self.require_open()
        pool.require_open()
        check(
            lib.fc_port_rx_queue(self.number, queue, descriptors, pool.pointer),
            f"port {self.name}: rx queue {queue} with {descriptors} descriptors on {pool!r}",
        )
        self._depend_on(pool)

    def start(self) -> None:
        self.require_open()
        check(lib.rte_eth_dev_start(self.number), f"port {self.name}: start")
        self.started = True
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
            gone = lib.rte_eal_hotplug_remove(b"vdev", self.name.encode())
        check(rc, f"port {self.name}: close")
        check(gone, f"device {self.name}: unplug")

    def __repr__(self) -> str:
        return f"Port({self.name!r})"
