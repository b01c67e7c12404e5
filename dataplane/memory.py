"""Sizes of everything a capture keeps, computed before anything is reserved.

    slots   one per ring entry, dense by path MTU: 1152, 2176, 4352 bytes for 1024, 2048, 4096
    pool    packet buffers of a queue: what the port's descriptors hold, bursts under way, and by strategy
              copy   nothing more
              dma    what the engines have under way
              hold   the ring itself: every entry keeps its buffer until the consumer releases it
    kernel  net_af_packet's own ring, in kernel memory

`hold` is sized by the iteration: `packets_of(bytes)` says how many packets its gradients are on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dataplane.pydpdk.mempool import HEADROOM, mempool_bytes
from dataplane.rx import ring_bytes, slot_for

__all__ = ["DATA_ROOMS", "DUMPS", "MemoryNeed", "QueuePlan", "packets_of", "plan_queue", "room_for", "total"]

DATA_ROOMS = (1152, 2176, 4352)  # RoCE path MTU 1024, 2048, 4096 with all headers, VLAN and ICRC
LARGEST_ROOM = 0xFFFF - HEADROOM  # an mbuf's lengths have 16 bits
DUMPS = ("copy", "hold", "dma")
EAL_TABLES_MB = 32
HUGE_PAGE = 2 << 20


def room_for(frame: int) -> int:
    """Smallest usual data room that holds `frame` bytes; larger frames take several buffers."""
    return next((room for room in DATA_ROOMS if frame <= room), DATA_ROOMS[-1])


def packets_of(nbytes: int, path_mtu: int) -> int:
    """Packets that `nbytes` on the wire are, at most: messages end with a short packet, 1 in 16 is generous."""
    return -(-nbytes // path_mtu) * 17 // 16 + 1


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """What one rx queue keeps. room: bytes per packet buffer. slot: bytes per slot, 0: no slots."""

    ring_size: int
    slot: int
    buffers: int
    room: int
    kernel_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """In ordinary pages."""
        return mempool_bytes(self.buffers, self.room)

    @property
    def huge_pool_bytes(self) -> int:
        return mempool_bytes(self.buffers, self.room, page=HUGE_PAGE)

    @property
    def ring_bytes(self) -> int:
        return ring_bytes(self.ring_size, self.slot)

    def text(self, name: str) -> str:
        slots = f" + {self.ring_size} slots x {self.slot} bytes" if self.slot else f" + {self.ring_size} entries"
        kernel = f" + {self.kernel_bytes} bytes in the kernel" if self.kernel_bytes else ""
        return f"{name}: {self.buffers} buffers x {self.room} bytes{slots}{kernel}"


def plan_queue(
    *, dump: str, ring_size: int, frame: int, burst: int, slot: int | None = None, room: int | None = None,
    descriptors: int = 0, under_way: int = 0, kernel_bytes: int = 0,
) -> QueuePlan:
    """frame: bytes of the largest one. descriptors: buffers the port keeps. under_way: pieces the engines
    keep. slot, room: None for what fits.

    Raises:
        ValueError: a slot that does not hold the frame.
    """
    if slot is not None and slot < frame:
        raise ValueError(f"slots of {slot} bytes, the largest frame has {frame}")
    if room is None:
        room = room_for(frame)
        if dump == "hold" and frame > room:
            room = min(slot_for(frame), LARGEST_ROOM)
    pieces = -(-max(frame, 1) // room)  # buffers of the largest frame
    need = 2 * burst * pieces + descriptors
    if dump == "hold":
        # A frame of several buffers is copied and given back at once, so an entry keeps one at most.
        return QueuePlan(
            ring_size, 0 if pieces == 1 else slot or slot_for(frame), max(512, need + ring_size), room, kernel_bytes
        )
    need += min(under_way, ring_size * pieces)
    buffers = max(512, 1 << (need - 1).bit_length()) - 1  # 2^n - 1 packs best
    return QueuePlan(ring_size, slot or slot_for(frame), buffers, room, kernel_bytes)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes to reserve. pool_bytes: in DPDK's memory, ordinary pages; huge_pool_bytes: the same in huge pages.
    ring_bytes: in DPDK's memory with huge pages, else outside it."""

    pool_bytes: int
    huge_pool_bytes: int
    ring_bytes: int
    text: str

    @property
    def total_mb(self) -> int:
        """For Eal.start(memory_mb=...) whatever the pages, with room for DPDK's own tables."""
        return -(-(self.pool_bytes + self.ring_bytes) // (1 << 20)) + EAL_TABLES_MB

    @property
    def huge_mb(self) -> int:
        """The same if all of it lies in huge pages."""
        return -(-(self.huge_pool_bytes + self.ring_bytes) // (1 << 20)) + EAL_TABLES_MB


def total(plans: Iterable[tuple[str, QueuePlan]]) -> MemoryNeed:
    """The sum over named queues, with the arithmetic as text."""
    pools = huge = rings = 0
    lines = []
    for name, plan in plans:
        pools += plan.pool_bytes
        huge += plan.huge_pool_bytes
        rings += plan.ring_bytes
        lines.append(plan.text(name))
    lines.append(f"pools {huge >> 20} MB ({pools >> 20} MB without huge pages) + rings {rings >> 20} MB")
    return MemoryNeed(pools, huge, rings, "\n".join(lines))
