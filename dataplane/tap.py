"""A second look at a ring that somebody else empties: for as long as its packets are still there.

    tap = Tap(source.ring_address)
    tap.look(observer.drain)            what has come since the last look, to a reader of rings
    tap.missed                          packets that it came too late for

The ring's own consumer is neither held up nor notified. What that has released the producer fills again when it has
come round, so packets further back than half of the ring are left out, and counted. A packet that is overwritten while
it is looked at is another one, or none at all: who reads RoCE sees that by the ICRC.

x86: eight aligned bytes are read whole, and in the order in which they were written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["Tap"]

AT_ONCE = 4096  # packets before the ring's end is looked at again
_LINE = 64


class _Ring(ctypes.Structure):  # fc_ring of include/packetref.h
    _fields_ = [
        ("head", ctypes.c_uint64), ("tail_seen", ctypes.c_uint64), ("closed", ctypes.c_uint32),
        ("_producer", ctypes.c_char * 44),
        ("tail", ctypes.c_uint64), ("_consumer", ctypes.c_char * 56),
        ("mask", ctypes.c_uint64), ("entries", ctypes.c_void_p), ("_rest", ctypes.c_char * 48),
    ]


class Tap:
    """Begins with what comes from now on. ring_address: of an fc_ring, which outlives the tap. One thread."""

    def __init__(self, ring_address: int) -> None:
        self._ring = _Ring.from_address(ring_address)
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(_Ring) + _LINE)
        address = ctypes.addressof(self._memory)
        self._own = _Ring.from_address(address + -address % _LINE)
        self._own.mask, self._own.entries = self._ring.mask, self._ring.entries
        self._own.head = self._own.tail = self._ring.head
        self._most = (self._ring.mask + 1) // 2
        self.missed = 0

    def look(self, read: Callable[[int, int], int]) -> int:
        """read(ring address, packets at most): consumes from the ring at this address. Returns how many packets were
        read, of what had come by now."""
        end, total = self._ring.head, 0
        while self._own.tail < end:
            late = self._ring.head - self._own.tail - self._most
            if late > 0:
                self.missed += late
                self._own.tail += late
            self._own.head = min(max(end, self._own.tail), self._own.tail + AT_ONCE)
            total += read(ctypes.addressof(self._own), AT_ONCE)
        return total
