"""The node's mirror port: one capture that all groups read, and what its counters say of it.

    port = Port(source, groups, name)       name: as the settings call the device
    port.open(reader)                       rings of its own for one group: every group sees every packet
    port.arrived, port.drops                packets so far, and those that the node itself has lost, by cause
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dataplane.live import LiveSource
from flowcheck.node.drops import OWN
from flowcheck.node.ring_fanout import RingFanout
from flowcheck.node.silence import Arrivals

__all__ = ["Port", "Queue"]


class Port(Arrivals):
    """A source's queues, each read by up to `groups` readers."""

    def __init__(self, source: LiveSource, groups: int, name: str) -> None:
        self._source, self.name = source, name
        self._lock = threading.Lock()
        self._fanouts = [RingFanout(address, groups) for address in source.ring_addresses]

    def open(self, reader: int) -> list[Queue]:
        with self._lock:
            return [Queue(self, i, fanout.open(reader)) for i, fanout in enumerate(self._fanouts)]

    def close(self, reader: int) -> None:
        with self._lock:
            for fanout in self._fanouts:
                fanout.close(reader)

    def refresh(self, queue: int) -> None:
        with self._lock:
            self._fanouts[queue].refresh()

    @property
    def error(self) -> Exception | None:
        return self._source.error

    @property
    def arrived(self) -> int:
        return self._source.counters()["received"]

    @property
    def drops(self) -> dict[str, int]:
        counters = self._source.counters()
        return {cause: counters[cause] for cause in OWN if counters[cause]}


@dataclass(frozen=True)
class Queue:
    """One rx queue as a group's source of packets."""

    port: Port
    index: int
    address: int

    @property
    def ring_address(self) -> int:
        """Asked before each look: what has come meanwhile is shown now."""
        self.port.refresh(self.index)
        return self.address

    @property
    def error(self) -> Exception | None:
        return self.port.error
