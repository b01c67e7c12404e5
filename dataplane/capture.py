"""Capture files as packet sources: a scanned file, a net_pcap port, an rx thread, a ring.

    with Eal.start(memory_mb=memory_needed([info]).total_mb) as eal, PcapSource(eal, path) as source:
        source.start()
        ...                      # consume the ring at source.ring_address until fc_ring_drained
        if source.error: ...     # the file did not deliver what its headers promise
        print(source.summary())

Several sources run side by side in one Eal, each with its own thread. A file waits for a slow consumer, so
nothing is lost to a full ring.

Traps handled here. A comma or a space in a path breaks DPDK's device arguments, and a file can be replaced
between scan and replay: the file is opened once and DPDK gets /proc/self/fd/N. net_pcap takes a packet off
the file before it asks for a buffer, so the pool is sized for a whole burst of the largest frames. It counts
time in microseconds, whatever the file has. It never says that a file has ended: the scan's count decides, and no
packet more is asked for, so a file may grow meanwhile. What libpcap would not read to its end comes through a pipe
(feed.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from dataplane.counterfile import CounterFile
from dataplane.feed import Feed
from dataplane.memory import DATA_ROOMS, MemoryNeed, QueuePlan, plan_queue, room_for, total
from dataplane.pcapfile import CaptureFileError, PcapInfo, scan_fd
from dataplane.pydpdk.dmadev import DEPTH, DmaDevice
from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import DpdkError
from dataplane.pydpdk.ethdev import Port
from dataplane.pydpdk.ffi import lib
from dataplane.pydpdk.mempool import Mempool
from dataplane.rx import DMA_MINIMUM, RingMemory, RxConfig, RxThread
from dataplane.spool import open_capture

__all__ = ["DATA_ROOMS", "MemoryNeed", "PcapSource", "memory_needed", "room_for"]

BURST = 64
RING_SIZE = 4096
STALL_SECONDS = 3.0
MICROSECOND = 1000
_numbers = itertools.count()


def _plan(
    info: PcapInfo, dump: str, ring_size: int, slot: int | None, room: int | None, burst: int, under_way: int
) -> QueuePlan:
    try:
        return plan_queue(
            dump=dump, ring_size=ring_size, frame=info.max_captured, burst=burst, slot=slot, room=room,
            under_way=under_way,
        )
    except ValueError as exc:
        raise ValueError(f"{info.path}: {exc}") from None


def memory_needed(
    files: Iterable[PcapInfo], *, ring_size: int = RING_SIZE, slot_size: int | None = None, burst: int = BURST,
    dump: str = "copy", engines: int = 0,
) -> MemoryNeed:
    """What one PcapSource per file takes, and the sum as text. engines: for each file; else as PcapSource."""
    return total((info.path, _plan(info, dump, ring_size, slot_size, None, burst, engines * DEPTH)) for info in files)


class PcapSource:
    """One capture file as a ring of packet references. Single use: start once.

    stream: index written into every reference. ring_size: a power of two. dump: "copy", "hold", or "dma" with
    `engines` that no other source uses. slot_size: bytes per packet in the dense ring, None for the file's
    largest frame. data_room: bytes per packet buffer, None for the
    smallest usual one. core: CPU of the rx thread. stall_seconds: silence after which the file counts as
    not delivering. info: a scan made earlier; the file must not have changed since.

    Raises:
        CaptureFileError: the file cannot be replayed, or changed since `info`.
        DpdkError: DPDK refused it, or memory is short (NotEnoughMemory, with the sum).
        ValueError: a ring, slot or burst size that cannot be.
    """

    def __init__(
        self, eal: Eal, path: str | os.PathLike[str], *, stream: int = 0, ring_size: int = RING_SIZE,
        dump: str = "copy", slot_size: int | None = None, data_room: int | None = None, burst: int = BURST,
        core: int | None = None, stall_seconds: float = STALL_SECONDS, info: PcapInfo | None = None,
        engines: Sequence[DmaDevice] = (), dma_minimum: int = DMA_MINIMUM,
    ) -> None:
        self.path = os.fspath(path)
        with ExitStack() as undo:
            self._fd, note = open_capture(self.path)
            undo.callback(os.close, self._fd)
            self.info = _checked(self.path, self._fd, note, info)
            under_way = sum(engine.depth for engine in engines)
            plan = _plan(self.info, dump, ring_size, slot_size, data_room, burst, under_way)
            number = next(_numbers)
            self._counters = undo.enter_context(CounterFile(eal, os.path.basename(self.path), 1))
            self._memory = undo.enter_context(RingMemory(eal, ring_size, plan.slot, counters=self._counters))
            pool = undo.enter_context(Mempool(eal, f"fc_pool_{number}", plan.buffers, plan.room))
            file = f"/proc/self/fd/{self._fd}"
            if self.info.parts:
                feed = Feed(self._fd, self.info.parts)
                undo.callback(feed.close)
                file = feed.path
            self._port = undo.enter_context(Port(eal, f"net_pcap{number}", f"rx_pcap={file}"))
            self._port.configure()
            self._port.rx_queue(0, pool)
            config = RxConfig(
                stream=stream, burst=burst, core=core, wait_when_full=True, stall_ms=int(stall_seconds * 1000),
                expected=self.info.packet_count, ns_per_tick=MICROSECOND, dump=dump, engines=tuple(engines),
                dma_minimum=dma_minimum,
            )
            self._rx = undo.enter_context(RxThread(self._port, self._memory, config))
            self._undo = undo.pop_all()

    def start(self) -> None:
        """Packets begin to appear in the ring."""
        self._port.start()
        self._rx.start()

    @property
    def ring_address(self) -> int:
        """Address of the fc_ring, valid until close."""
        return self._memory.ring_address

    @property
    def counter_file(self) -> Path | None:
        """Where other processes read the counters (counters.py), until close."""
        return self._counters.path

    @property
    def finished(self) -> bool:
        """Nothing more will come; the ring may still hold packets."""
        return self._rx.finished

    @property
    def error(self) -> DpdkError | CaptureFileError | None:
        """Set once finished, if not every packet of the file arrived (None too after an early stop)."""
        state = self._rx.state
        if state == lib.FC_RX_FAILED:
            return self._rx.failure()
        if state not in (lib.FC_RX_DONE, lib.FC_RX_STALLED):
            return None
        now = self.counters()
        if now["received"] == self.info.packet_count:
            return None
        silence = ", then nothing more came" if state == lib.FC_RX_STALLED else ""
        return CaptureFileError(
            self.path,
            self.info.size,
            f"{now['received']} of {self.info.packet_count} packets arrived{silence} "
            f"({now['errors']} read errors, {now['no_mbuf']} without a buffer)",
            "copy the file to a disk that holds it, and do not change it during replay",
        )

    def counters(self) -> dict[str, int]:
        """Packets and bytes by cause (include/rx_counters.h); after close the last values."""
        return self._memory.counters()

    def summary(self) -> str:
        """One line that adds up: in the file = received + not delivered; received = published + dropped."""
        c = self.counters()
        silent = self.info.packet_count - c["received"] - c["nic_missed"] - c["errors"] - c["no_mbuf"]
        return (
            f"{self.path}: {self.info.packet_count} in the file = {c['received']} received + "
            f"{c['nic_missed']} missed + {c['errors']} errors + {c['no_mbuf']} without buffer + {silent} not "
            f"read; received = {c['published']} published + {c['ring_full']} ring full + "
            f"{c['oversize']} oversize + {c['unfinished']} unfinished"
        )

    def stop(self) -> None:
        """Ends the thread; what is in the ring stays readable until close. Idempotent."""
        self._rx.stop()

    def close(self) -> None:
        """Gives everything back: thread, port, pool, ring, file. Idempotent."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(path: str, fd: int, note: str, info: PcapInfo | None) -> PcapInfo:
    """A file that has grown since the scan is one that is still written: what the scan saw is there."""
    if info is None:
        return scan_fd(path, fd, note)
    status = os.fstat(fd)
    same = status.st_size == info.size and status.st_mtime_ns == info.mtime_ns
    if not same and status.st_size <= info.size:
        raise CaptureFileError(path, 0, "the file changed since it was scanned", "wait until it is complete")
    return info
