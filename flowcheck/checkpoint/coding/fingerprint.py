"""A short sum of many bytes that multiples and sums keep: of e_1 D_1 + e_2 D_2 it is e_1 f(D_1) + e_2 f(D_2).

    one = Fingerprint(); one.add(piece); one.add(piece); one.value       WIDTH bytes

So who has a row of parity can hold it against what those say that had the data, without the data. Pieces have to be cut
alike on both sides. It finds what was lost, mixed up, or changed by accident (one such change in 256^WIDTH is not
found). Who wants to deceive can find bytes with the same sum: a shard that is made again is held against SHA-256.
"""

from __future__ import annotations

import random

from flowcheck.checkpoint.coding import galois

__all__ = ["WIDTH", "Fingerprint"]

WIDTH = 16
_SLICES = 31  # so many at once fit into one pass over the bytes
_NEXT = 2  # a piece counts this many times what the one after it does
# No two alike: parts of a piece that were exchanged would not show.
_FACTORS = bytes(random.Random("flowcheck fingerprint").sample(range(1, 256), _SLICES))


class Fingerprint:
    def __init__(self) -> None:
        self.value = bytes(WIDTH)

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """The next one."""
        rest = memoryview(piece).cast("B")
        while len(rest) > WIDTH:
            width = max(WIDTH, -(-len(rest) // _SLICES))
            whole = len(rest) // width
            slices: list[memoryview | bytes] = [rest[at * width : (at + 1) * width] for at in range(whole)]
            if tail := rest[whole * width :]:
                slices.append(bytes(tail).ljust(width, b"\0"))
            out = bytearray(width)
            galois.combine(_FACTORS[: len(slices)], slices, [out])
            rest = memoryview(out)
        value = bytearray(WIDTH)
        galois.combine(bytes([_NEXT, 1]), [self.value, bytes(rest).ljust(WIDTH, b"\0")], [value])
        self.value = bytes(value)
