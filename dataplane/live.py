"""A live capture: one port, a thread and a ring per rx queue.

    config = LiveConfig("af_packet:eth1", path_mtu=4096, dump="copy")
    with start_eal(config) as eal, LiveSource(eal, config) as source:
        source.start()
        ...                           # one consumer per ring in source.ring_addresses
        source.stop()
        print(source.summary())       # adds up to what arrived

A live source does not wait: what finds a ring full is dropped and counted, by cause, in counters that other
processes read (counters.py). The port has no tx queue and never transmits.

Several queues: RSS by UDP source port where the port can (docs/understand/dataplane.md), so that both directions of a
connection come to one queue, and so to one thread. net_af_packet spreads by the kernel's symmetric flow hash.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from dataplane.counterfile import CounterFile
from dataplane.memory import DUMPS, MemoryNeed, QueuePlan, packets_of, plan_queue, room_for, total
from dataplane.ports import PortPlan, numa_node, plan_port
from dataplane.pydpdk.dmadev import DEPTH, PCI_ADDRESS, DmaDevice
from dataplane.pydpdk.eal import Eal, available_bytes, free_huge_pages
from dataplane.pydpdk.errors import DpdkError, NotEnoughMemory
from dataplane.pydpdk.ethdev import Port, Rss
from dataplane.pydpdk.ffi import ffi, lib
from dataplane.pydpdk.mempool import Mempool
from dataplane.rx import DMA_MINIMUM, RingMemory, RxConfig, RxThread
from dataplane.sockets import PacketSockets, closed, promiscuous_socket

__all__ = ["LiveConfig", "LiveSource", "check_cores", "live_memory", "memory_by_node", "start_eal"]

BURST = 64
RING_SIZE = 1 << 14
CACHE = 512  # buffers an rx thread keeps at hand, last used first; the pool behind hands out its coldest
_numbers = itertools.count()


@dataclass(frozen=True)
class LiveConfig:
    """What to capture, and how. Checked when it is made.

    device: see ports.py. path_mtu: RoCE's (1024, 2048, 4096), which decides the slot; 0: whole frames of the
    interface. queues: rx queues, each with a ring and a thread; cores: one for each, or none. ring_size:
    entries per queue, None: what an iteration needs, or 16,384. iteration_bytes: gradient bytes on the wire of one
    iteration and queue, 0: not known. engines: DMA engines for dump="dma", names as for pydpdk.DmaDevice, a
    multiple of queues; engine i serves queue i modulo queues. roce_only: drop at once what cannot hold RoCE.
    streams: index written into each queue's references, by default the queue's number.
    """

    device: str
    path_mtu: int = 0
    queues: int = 1
    cores: tuple[int, ...] = ()
    dump: str = "copy"
    ring_size: int | None = None
    iteration_bytes: int = 0
    engines: tuple[str, ...] = ()
    dma_minimum: int = DMA_MINIMUM
    burst: int = BURST
    rss: Rss = Rss.SOURCE_PORT
    roce_only: bool = False
    streams: tuple[int, ...] = ()
    kernel_frames: int = 4096
    port: PortPlan = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dump not in DUMPS:
            raise ValueError(f"dump strategy {self.dump!r}: one of {', '.join(DUMPS)}")
        if self.path_mtu not in (0, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"path MTU {self.path_mtu}: RoCE has 256, 512, 1024, 2048 and 4096")
        if not 1 <= self.queues <= 64:
            raise ValueError(f"{self.queues} queues: 1 to 64")
        for what, number, least, most in (
            ("burst", self.burst, 1, lib.FC_RX_BURST_MAX),
            ("iteration_bytes", self.iteration_bytes, 0, 1 << 48),
            ("dma_minimum", self.dma_minimum, 0, 1 << 31),
            ("kernel_frames", self.kernel_frames, 16, 1 << 20),
            *(("core", core, 0, 1023) for core in self.cores),
            *(("stream", stream, 0, 0xFFFF) for stream in self.streams),
        ):
            if not least <= number <= most:
                raise ValueError(f"{what} {number}: {least} to {most}")
        for what, given in (("cores", self.cores), ("streams", self.streams)):
            if given and len(given) != self.queues:
                raise ValueError(f"{len(given)} {what} for {self.queues} queues")
        if (self.dump == "dma") != bool(self.engines) or len(self.engines) % self.queues:
            raise ValueError(
                f"{len(self.engines)} DMA engines, {self.queues} queues, dump {self.dump!r}: dma needs the same "
                "number of engines for each queue, other strategies none"
            )
        plan = plan_port(self.device, queues=self.queues, path_mtu=self.path_mtu, frames=self.kernel_frames)
        object.__setattr__(self, "port", plan)

    @property
    def iteration_packets(self) -> int:
        return packets_of(self.iteration_bytes, self.path_mtu or 1024) if self.iteration_bytes else 0

    @property
    def entries(self) -> int:
        """Ring entries of a queue."""
        if self.ring_size is not None:
            return self.ring_size
        if self.iteration_packets:
            return int(1 << (self.iteration_packets - 1).bit_length())
        return RING_SIZE

    @property
    def warning(self) -> str:
        """Why an iteration does not fit into a `hold` ring, or ""."""
        if self.dump != "hold" or self.iteration_packets <= self.entries:
            return ""
        return (
            f"{self.device}: an iteration of {self.iteration_bytes} bytes is up to {self.iteration_packets} packets, "
            f"the ring holds {self.entries}: what the consumer has not released by then is dropped"
        )

    def queue_plan(self) -> QueuePlan:
        frame = room_for(self.path_mtu + 128) if self.path_mtu else self.port.frame
        engines = len(self.engines) // self.queues
        return plan_queue(
            dump=self.dump, ring_size=self.entries, frame=frame, burst=self.burst, room=self.port.room,
            descriptors=self.port.descriptors + (2 * self.port.descriptors if self.port.driver == "af_xdp" else 0),
            under_way=engines * DEPTH, kernel_bytes=self.port.kernel_bytes,
        )


def live_memory(configs: Iterable[LiveConfig]) -> MemoryNeed:
    """What the captures take, and the sum as text."""
    return total(
        (f"{config.device} queue {queue}", config.queue_plan()) for config in configs for queue in range(config.queues)
    )


def start_eal(*configs: LiveConfig, huge: bool | None = None) -> Eal:
    """DPDK with the memory and the devices that these captures need together, reserved now; huge pages on the NUMA
    node of each capture's device.

    Raises:
        NotEnoughMemory: with the arithmetic.
    """
    need = live_memory(configs)
    devices = [c.device for c in configs if c.port.driver == "pci"]
    devices += [name for c in configs for name in c.engines if PCI_ADDRESS.fullmatch(name)]
    if huge is None:
        huge = sum(kb * pages for kb, pages in free_huge_pages().items()) >= need.huge_mb << 10
    try:
        return Eal.start(
            memory_mb=need.huge_mb if huge else need.total_mb, huge=huge, devices=devices,
            nodes=memory_by_node([(config, numa_node(config.device)) for config in configs]),
        )
    except NotEnoughMemory as exc:
        sum_text = need.text.replace("\n", "\n    ")
        raise NotEnoughMemory(f"{exc.what}\n  is needed for: {sum_text}", exc.remedy) from None


def memory_by_node(configs: Sequence[tuple[LiveConfig, int]]) -> dict[int, int]:
    """MB of huge pages by NUMA node, of captures and their devices' nodes (-1: none). What is of no node goes to the
    first of the others; no entries if no device has one."""
    known = sorted({node for _, node in configs} - {-1})
    shares = {node: [config for config, its in configs if its == node] for node in known}
    if known:
        shares[known[0]] += [config for config, its in configs if its == -1]
    return {node: live_memory(share).huge_mb for node, share in shares.items()}


class LiveSource:
    """One port with its queues. Single use: start once.

    Raises:
        DpdkError: the port, an engine or a thread was refused, or memory is short (NotEnoughMemory, with the sum).
    """

    def __init__(self, eal: Eal, config: LiveConfig) -> None:
        self.config = config
        check_cores(config.cores)
        plan, number = config.queue_plan(), next(_numbers)
        with ExitStack() as undo:
            self._counters = undo.enter_context(CounterFile(eal, config.device, config.queues))
            interface = config.port.interface
            # Before the port: it says which privilege is missing, the drivers do not.
            bound = undo.enter_context(promiscuous_socket(interface)) if interface else None
            mine = undo.enter_context(PacketSockets())
            self._port = undo.enter_context(self._open_port(eal))
            self._sockets = mine.find()
            sockets: list[int | None] = [*self._sockets]
            if interface:
                mine.check_alone(interface)
            self._set_up_port()
            facts = self._port.facts
            self._memories, self._threads, self._pools = [], [], []
            sockets += [None] * config.queues
            for queue in range(config.queues):
                pool = undo.enter_context(
                    Mempool(eal, f"fc_live_{number}_{queue}", plan.buffers, plan.room, cache=CACHE, socket=facts.socket)
                )
                self._pools.append(pool)
                self._port.rx_queue(queue, pool, descriptors=config.port.descriptors)
                self._memories.append(
                    undo.enter_context(
                        RingMemory(
                            eal, config.entries, plan.slot, counters=self._counters, queue=queue, socket=facts.socket
                        )
                    )
                )
            for queue in range(config.queues):
                rx = RxConfig(
                    queue=queue, stream=config.streams[queue] if config.streams else queue, burst=config.burst,
                    core=config.cores[queue] if config.cores else None, dump=config.dump, stamp=True,
                    roce_only=config.roce_only, packet_socket=sockets[queue],
                    bound_socket=bound.fileno() if bound else None, source=config.device,
                    engines=self._engines(eal, undo, queue), dma_minimum=config.dma_minimum,
                )
                self._threads.append(undo.enter_context(RxThread(self._port, self._memories[queue], rx)))
            self._undo = undo.pop_all()

    def _open_port(self, eal: Eal) -> Port:
        plan, queues = self.config.port, self.config.queues
        kernel = plan.kernel_bytes * queues
        asked = f"{self.config.device}: {queues} x {plan.kernel_bytes} bytes of rings in the kernel"
        if kernel > (available := available_bytes()):
            raise NotEnoughMemory(f"{asked}, {available} bytes available", "fewer kernel_frames")
        try:
            return Port(eal, plan.name, plan.arguments)
        except DpdkError as exc:
            if not plan.interface:
                raise
            sum_text = f"{asked}; " if kernel else ""
            raise DpdkError(exc.errno or 0, f"{sum_text}{exc.what}", "see the lines above; flowcheck doctor") from None

    def _set_up_port(self) -> None:
        port, config = self._port, self.config
        if config.queues > port.facts.max_rx_queues:
            raise DpdkError(
                0, f"{config.device}: {config.queues} queues, it has {port.facts.max_rx_queues}", "fewer queues"
            )
        port.configure(rx_queues=config.queues, mtu=config.port.mtu, rss=config.rss)
        if config.port.driver == "pci":
            port.promiscuous()

    def _engines(self, eal: Eal, undo: ExitStack, queue: int) -> tuple[DmaDevice, ...]:
        """Engines of one queue. "dma_skeleton" gets a number of its own each time."""
        names = self.config.engines[queue :: self.config.queues]
        return tuple(
            undo.enter_context(DmaDevice(eal, f"{name}_fc{next(_numbers)}" if name == "dma_skeleton" else name))
            for name in names
        )

    def start_port(self) -> None:
        """The part of `start` that needs rights: the drivers of kernel interfaces set flags of theirs. Idempotent."""
        if not self._port.started:
            self._port.start()

    def start(self) -> None:
        """Packets begin to appear in the rings: those that come from now on. What came before is thrown away and not
        counted: between `start_port` and this nobody empties the driver's queues, so most of it was dropped there, and
        that is not a loss. Says in the log if `hold` cannot keep an iteration."""
        if self.config.warning:
            logging.getLogger(__name__).warning("%s", self.config.warning)
        waited = self._port.started
        self.start_port()
        if self._sockets:
            with closed(self._sockets):  # frames of other interfaces are in their rings, too: sockets.py
                self._throw_away()
        elif waited:
            self._throw_away(self.config.port.descriptors)  # once round the queue: nothing stops what comes
        for thread in self._threads:
            thread.start()

    def _throw_away(self, most: int = -1) -> None:
        """Of each queue all that waits, or so many packets; and what the driver has counted."""
        for queue in range(self.config.queues):
            lib.fc_rx_bare(self._port.number, queue, BURST, ffi.cast("uint64_t", most), ffi.NULL, ffi.NULL)
        self._port.forget()

    @property
    def ring_addresses(self) -> list[int]:
        """Addresses of the fc_rings, one per queue, valid until close."""
        return [memory.ring_address for memory in self._memories]

    @property
    def port(self) -> Port:
        return self._port

    @property
    def pools(self) -> list[Mempool]:
        """One per queue."""
        return self._pools

    @property
    def counter_file(self) -> Path | None:
        """Where other processes read the counters (counters.py), until close."""
        return self._counters.path

    @property
    def finished(self) -> bool:
        return all(thread.finished for thread in self._threads)

    @property
    def error(self) -> DpdkError | None:
        """Why a thread could not work, or stopped: the interface is gone, an engine hangs."""
        return next((t.failure() for t in self._threads if t.state == lib.FC_RX_FAILED), None)

    def empty(self) -> list[int | None]:
        """For each queue, RxThread.empty."""
        return [thread.empty for thread in self._threads]

    def counters(self, queue: int | None = None) -> dict[str, int]:
        """By cause (include/rx_counters.h), of a queue or all together; after close the last values."""
        rows = [memory.counters() for memory in self._memories]
        if queue is not None:
            return rows[queue]
        return {name: sum(row[name] for row in rows) for name in rows[0]}

    def summary(self) -> str:
        """One line that adds up to what arrived; meant for after stop."""
        c = self.counters()
        lost = {
            "ring full": c["ring_full"], "oversize": c["oversize"], "not RoCE": c["not_roce"],
            "bad checksum": c["bad_checksum"], "unfinished": c["unfinished"],
        }
        before = {
            "NIC missed": c["nic_missed"], "errors": c["errors"], "no mbuf": c["no_mbuf"],
            "kernel ring full": c["kernel_ring_full"],
        }
        if self.config.port.driver == "af_packet":
            # The kernel counts what it offered to the socket; what nobody took is still in its ring.
            before["left in the kernel"] = max(0, c["kernel_seen"] - c["kernel_ring_full"] - c["received"])
        arrived = c["received"] + sum(before.values())
        return (
            f"{self.config.device}: {arrived} arrived = {c['received']} received"
            + "".join(f" + {count} {name}" for name, count in before.items())
            + f"; received = {c['published']} published"
            + "".join(f" + {count} {name}" for name, count in lost.items())
            + f"; {c['truncated']} of the published truncated"
        )

    def stop(self) -> None:
        """Ends the threads; what is in the rings stays readable until close. Idempotent."""
        for thread in self._threads:
            thread.stop()

    def close(self) -> None:
        """Gives everything back: threads, engines, port, pools, rings, counters. Idempotent."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_cores(cores: Sequence[int]) -> None:
    """Raises DpdkError for a core that a thread could not be bound to: it would find out when it starts. What this
    process may run on says nothing: isolated cores are not among it."""
    if not cores:
        return
    refused: list[tuple[int, int]] = []

    def bind() -> None:
        for core in cores:
            try:
                os.sched_setaffinity(0, {core})  # of this thread alone
            except OSError as error:
                refused.append((core, error.errno or 0))

    probe = threading.Thread(target=bind)
    probe.start()
    probe.join()
    for core, code in refused:
        raise DpdkError(code, f"no thread can be bound to core {core}", "cores that `lscpu -e` lists as online")
