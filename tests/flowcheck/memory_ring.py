"""A ring of packets in the memory of a test: what a capture gives to an engine, without DPDK.

It has the layout of dataplane/include/packetref.h, so the compiled engine reads it as it reads a live queue. The test
is the producer; the engine, on the same thread, is the consumer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

SIZE = 1 << 14


class _Reference(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("timestamp_ns", ctypes.c_uint64), ("length", ctypes.c_uint32),
        ("stream", ctypes.c_uint16), ("flags", ctypes.c_uint16),
    ]


class _Ring(ctypes.Structure):
    _fields_ = [
        ("head", ctypes.c_uint64), ("tail_seen", ctypes.c_uint64), ("closed", ctypes.c_uint32),
        ("_producer", ctypes.c_char * 44),
        ("tail", ctypes.c_uint64), ("_consumer", ctypes.c_char * 56),
        ("mask", ctypes.c_uint64), ("entries", ctypes.c_void_p), ("_rest", ctypes.c_char * 48),
    ]


assert (_Ring.tail.offset, _Ring.mask.offset, ctypes.sizeof(_Reference)) == (64, 128, 24)


def unread(ring_address: int) -> list[bytes]:
    """The bytes of every packet that was published and not released, oldest first. Releases nothing."""
    ring = _Ring.from_address(ring_address)
    entries = (_Reference * (ring.mask + 1)).from_address(ring.entries)
    waiting = (entries[number & ring.mask] for number in range(ring.tail, ring.head))
    return [ctypes.string_at(reference.data, reference.length) for reference in waiting]


class MemoryRing:
    """A source of one stream. The frames stay in memory for as long as the ring."""

    def __init__(self, size: int = SIZE) -> None:
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(_Ring) + 64)
        address = ctypes.addressof(self._memory)
        self._ring = _Ring.from_address(address + -address % 64)
        self._entries = (_Reference * size)()
        self._ring.mask, self._ring.entries = size - 1, ctypes.addressof(self._entries)
        self._frames: list[ctypes.Array[ctypes.c_char]] = []
        self.error: Exception | None = None

    @property
    def ring_address(self) -> int:
        return ctypes.addressof(self._ring)

    @property
    def waiting(self) -> int:
        """Packets that nobody has taken yet."""
        return self._ring.head - self._ring.tail

    @property
    def put_so_far(self) -> int:
        return self._ring.head

    def put(self, packets: Sequence[tuple[int, bytes]], stream: int = 0) -> None:
        """packets: (nanoseconds, frame), as lab.synth gives them."""
        assert self.waiting + len(packets) <= self._ring.mask + 1, "the ring of this test is too small"
        for number, (nanoseconds, frame) in enumerate(packets):
            kept = (ctypes.c_char * len(frame)).from_buffer_copy(frame)
            self._frames.append(kept)
            at = self._entries[(self._ring.head + number) & self._ring.mask]
            at.data, at.timestamp_ns, at.length = ctypes.addressof(kept), nanoseconds, len(frame)
            at.stream, at.flags = stream, 0
        self._ring.head += len(packets)

    def repeat(self, count: int) -> None:
        """Once more what was put before, of a ring that was full: `count` packets, from the oldest on."""
        assert self.waiting + count <= self._ring.mask + 1 <= self._ring.head, "the ring of this test was never full"
        self._ring.head += count

    def end(self) -> None:
        """Nothing more will come."""
        self._ring.closed = 1
