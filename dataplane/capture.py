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
time in microseconds, whatever the file has. It never says that a file has ended: the scan's count decides.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dataplane.pcapfile import CaptureFileError, PcapInfo, scan_fd
from dataplane.pydpdk.eal import Eal
from dataplane.pydpdk.errors import DpdkError
from dataplane.pydpdk.ethdev import Port
from dataplane.pydpdk.ffi import lib
from dataplane.pydpdk.mempool import Mempool, mempool_bytes
from dataplane.rx import RingMemory, RxConfig, RxThread, ring_bytes, slot_for

__all__ = ["DATA_ROOMS", "MemoryNeed", "PcapSource", "memory_needed", "room_for"]

DATA_ROOMS = (1152, 2176, 4352)  # RoCE path MTU 1024, 2048, 4096 with all headers, VLAN and ICRC
BURST = 64
RING_SIZE = 4096
STALL_SECONDS = 3.0
MICROSECOND = 1000
_numbers = itertools.count()


def room_for(frame: int) -> int:
    """Smallest usual data room that holds `frame` bytes; larger frames take several buffers."""
    return next((room for room in DATA_ROOMS if frame <= room), DATA_ROOMS[-1])


def _pool_size(frame: int, room: int, burst: int) -> int:
    """Buffers so that a burst of the largest frames never finds the pool empty; 2^n - 1 packs best."""
    need = 2 * burst * -(-max(frame, 1) // room)
    return int(max(512, 1 << (need - 1).bit_length())) - 1


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes to reserve: pool_bytes in DPDK's memory, ring_bytes there too with huge pages."""

    pool_bytes: int
    ring_bytes: int
    text: str

    @property
    def total_mb(self) -> int:
        """For Eal.start(memory_mb=...), with room for DPDK's own tables."""
        return -(-(self.pool_bytes + self.ring_bytes) // (1 << 20)) + 32


def memory_needed(
    files: Iterable[PcapInfo], *, ring_size: int = RING_SIZE, slot_size: int | None = None, burst: int = BURST
) -> MemoryNeed:
    """What one PcapSource per file takes, and the sum as text. Arguments as for PcapSource."""
    pools = rings = 0
    lines = []
    for info in files:
        room = room_for(info.max_captured)
        count = _pool_size(info.max_captured, room, burst)
        slot = slot_size or slot_for(info.max_captured)
        pools += mempool_bytes(count, room)
        rings += ring_bytes(ring_size, slot)
        lines.append(f"{info.path}: {count} buffers x {room} bytes + {ring_size} slots x {slot} bytes")
    lines.append(f"pools {pools >> 20} MB + rings {rings >> 20} MB")
    return MemoryNeed(pools, rings, "\n".join(lines))


class PcapSource:
    """One capture file as a ring of packet references. Single use: start once.

    stream: index written into every reference. ring_size: a power of two. slot_size: bytes per packet in
    the dense ring, None for the file's largest frame. data_room: bytes per packet buffer, None for the
    smallest usual one. core: CPU of the rx thread. stall_seconds: silence after which the file counts as
    not delivering. info: a scan made earlier; the file must not have changed since.

    Raises:
        CaptureFileError: the file cannot be replayed, or changed since `info`.
        DpdkError: DPDK refused it, or memory is short (NotEnoughMemory, with the sum).
        ValueError: a ring, slot or burst size that cannot be.
    """

    def __init__(
        self,
        eal: Eal,
        path: str | os.PathLike[str],
        *,
        stream: int = 0,
        ring_size: int = RING_SIZE,
        dump: str = "copy",
        slot_size: int | None = None,
        data_room: int | None = None,
        burst: int = BURST,
        core: int | None = None,
        stall_seconds: float = STALL_SECONDS,
        info: PcapInfo | None = None,
    ) -> None:
        self.path = os.fspath(path)
        with ExitStack() as undo:
            self._fd = _open(self.path)
            undo.callback(os.close, self._fd)
            self.info = _checked(self.path, self._fd, info)
            frame = self.info.max_captured
            slot = slot_size or slot_for(frame)
            if slot < frame:
                raise ValueError(f"{self.path}: slots of {slot} bytes, its largest frame has {frame}")
            room = data_room or room_for(frame)
            number = next(_numbers)
            self._memory = undo.enter_context(RingMemory(eal, ring_size, slot))
            pool = undo.enter_context(Mempool(eal, f"fc_pool_{number}", _pool_size(frame, room, burst), room))
            self._port = undo.enter_context(
                Port(eal, f"net_pcap{number}", f"rx_pcap=/proc/self/fd/{self._fd}")
            )
            self._port.configure()
            self._port.rx_queue(0, pool)
            config = RxConfig(
                stream=stream,
                burst=burst,
                core=core,
                wait_when_full=True,
                stall_ms=int(stall_seconds * 1000),
                expected=self.info.packet_count,
                ns_per_tick=MICROSECOND,
                dump=dump,
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
            "do not write to the file during replay; else convert it: editcap -F pcap IN OUT",
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
            f"{c['oversize']} oversize"
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


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise CaptureFileError(path, 0, f"cannot be opened: {reason}", "check path and permissions") from None


def _checked(path: str, fd: int, info: PcapInfo | None) -> PcapInfo:
    if info is None:
        return scan_fd(path, fd)
    status = os.fstat(fd)
    if (status.st_size, status.st_mtime_ns) != (info.size, info.mtime_ns):
        raise CaptureFileError(path, 0, "the file changed since it was scanned", "wait until it is complete")
    return info
