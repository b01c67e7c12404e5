"""DMA engines: one channel each, memory to memory.

    dma_skeleton     no hardware: a thread of DPDK's own copies. For tests; slower than copying ourselves
    dma_ioat         I/OAT (CBDMA) of Xeon servers: bound to vfio-pci, named by PCI address, one channel each
    dma_idxd         DSA of newer Xeons: bound to vfio-pci and named by PCI address, or a work queue of the
                     kernel's idxd driver (accel-config: dedicated, type user, name beginning dpdk_), named wqD.Q

An engine that takes any address (SVA: the kernel's idxd, the skeleton) needs nothing more. Others see only
memory that EAL mapped for them, which means huge pages.
Thread rule: a channel has no lock; one thread submits and collects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import DpdkError, check
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.resource import Resource

__all__ = ["DmaDevice", "DmaFacts"]

PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
DEPTH = 1024


@dataclass(frozen=True, slots=True)
class DmaFacts:
    """max_depth: descriptors. any_address: takes any address of this process. socket: NUMA node."""

    max_channels: int
    min_depth: int
    max_depth: int
    any_address: bool
    socket: int


class DmaDevice(Resource):
    """`DmaDevice(eal, "dma_skeleton0")`, `DmaDevice(eal, "0000:00:01.0")`, `DmaDevice(eal, "wq0.0")`.

    A PCI address must have been named to Eal.start(devices=...). The device is configured with one channel
    (number 0) of `depth` descriptors, and started.

    Raises:
        DpdkError: no such engine, it cannot copy, or it cannot reach this process's memory.
    """

    def __init__(self, eal: Eal, name: str, *, depth: int = DEPTH, arguments: str = "") -> None:
        eal.require_open()
        self.name, self._plugged, self._open = name, False, False
        self.device = lib.rte_dma_get_dev_id_by_name(name.encode())
        if self.device < 0:
            self._plug(arguments)
        try:
            self.facts = self._facts()
            self.depth = max(self.facts.min_depth, min(depth, self.facts.max_depth))
            if not (self.facts.any_address or eal.huge):
                raise DpdkError(0, f"DMA engine {name}: it needs memory in huge pages", "huge pages (flowcheck doctor)")
            check(lib.fc_dma_open(self.device, self.depth), f"DMA engine {name}: start with {self.depth} descriptors")
            self._open = True
        except BaseException:
            self._unplug()
            raise
        super().__init__(eal)

    def _plug(self, arguments: str) -> None:
        bus = "pci" if PCI_ADDRESS.fullmatch(self.name) else "vdev"
        check(
            lib.rte_eal_hotplug_add(bus.encode(), self.name.encode(), arguments.encode()),
            f"DMA engine {self.name}",
            "the name of an engine: dma_skeleton0, a PCI address bound to vfio-pci, or a work queue wqD.Q; "
            "the EAL lines above say more",
        )
        self._plugged = True
        self._bus = bus
        self.device = check(
            lib.rte_dma_get_dev_id_by_name(self.name.encode()), f"DMA engine {self.name}: its device number"
        )

    def _facts(self) -> DmaFacts:
        raw = ffi.new("fc_dma_facts *")
        check(lib.fc_dma_facts_get(self.device, raw), f"DMA engine {self.name}: what it can do")
        if not raw.copies:
            raise DpdkError(0, f"DMA engine {self.name} cannot copy memory to memory", "another engine")
        return DmaFacts(raw.max_channels, raw.min_depth, raw.max_depth, bool(raw.any_address), raw.socket)

    def copy(self, source: Any, target: Any, length: int) -> None:
        """Queues one copy; it begins with submit. Addresses as cffi pointers. DpdkError when the queue is full."""
        self.require_open()
        check(lib.fc_dma_copy(self.device, source, target, length), f"DMA engine {self.name}: queueing a copy")

    def submit(self) -> None:
        self.require_open()
        check(lib.fc_dma_submit(self.device), f"DMA engine {self.name}: submit")

    def completed(self, most: int = 64) -> int:
        """Copies completed since the last call, in the order of queueing.

        Raises:
            DpdkError: the engine failed on one.
        """
        self.require_open()
        failed = ffi.new("int *")
        count = int(lib.fc_dma_completed(self.device, most, failed))
        if failed[0]:
            raise DpdkError(0, f"DMA engine {self.name}: a copy failed", "memory that the engine can reach")
        return count

    @property
    def capacity(self) -> int:
        """Copies that can be queued right now."""
        self.require_open()
        return int(lib.fc_dma_capacity(self.device))

    def _unplug(self) -> None:
        if self._open:
            lib.rte_dma_stop(self.device)
        if self._plugged:
            check(lib.rte_eal_hotplug_remove(self._bus.encode(), self.name.encode()), f"DMA engine {self.name}: unplug")

    def _release(self) -> None:
        self._unplug()

    def __repr__(self) -> str:
        return f"DmaDevice({self.name!r})"
