"""Reading a ring from Python: for inspection and tests, at moderate speed. The fast consumer is the parser.

A ring has one consumer: either this or the parser.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from dataplane.pydpdk.ffi import ffi, lib

__all__ = ["Packet", "RingReader"]

BATCH = 256
BUFFER = 4 << 20  # at least one frame of the largest kind
NAP_SECONDS = 0.0002


@dataclass(frozen=True, slots=True)
class Packet:
    """data: captured bytes from the Ethernet header on. timestamp_ns: since the epoch, 0: no clock.
    truncated: the capture cut the packet."""

    data: bytes
    timestamp_ns: int
    stream: int
    truncated: bool


class RingReader:
    """The consumer of the fc_ring at `address`."""

    def __init__(self, address: int) -> None:
        self._ring = ffi.cast("fc_ring *", address)
        self._refs = ffi.new("fc_packetref[]", BATCH)
        self._bytes = ffi.new("uint8_t[]", BUFFER)

    @property
    def drained(self) -> bool:
        """The producer is done and everything was read."""
        return bool(lib.fc_ring_drained(self._ring))

    @property
    def ready(self) -> int:
        """Packets that can be read now, at most the ring's size."""
        return int(lib.fc_ring_peek(self._ring, self._ring.mask + 1))

    def take(self, want: int = BATCH) -> list[Packet]:
        """Up to `want` packets (at most 256), in order, without waiting. Releases them."""
        count = lib.fc_reader_take(self._ring, self._refs, min(want, BATCH), self._bytes, BUFFER)
        return [
            Packet(
                bytes(ffi.buffer(ref.data, ref.length)), int(ref.timestamp_ns), int(ref.stream),
                bool(ref.flags & lib.FC_REF_TRUNCATED),
            )
            for ref in (self._refs[i] for i in range(count))
        ]

    def __iter__(self) -> Iterator[Packet]:
        """All packets until the producer closes the ring; waits in short naps."""
        while True:
            packets = self.take()
            yield from packets
            if not packets:
                if self.drained:
                    return
                time.sleep(NAP_SECONDS)
