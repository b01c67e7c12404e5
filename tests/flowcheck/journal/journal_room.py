"""What tests of the journal share: entries, and a writer that is waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowcheck.journal.format import entry_bytes
from flowcheck.journal.ring import Hole, RingWriter, Written

MEMORY = Path("/dev/shm")
SIZES = (1000, 0, 70_001, 64)


def offered(number: int, sizes: Sequence[int] = SIZES) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Head, region and spans of an iteration; they follow from its number. Spans lie apart and at odd places."""
    rng = np.random.default_rng(number)
    firsts = np.cumsum([3, *(size + 5 for size in sizes[:-1])]) if sizes else []
    region = rng.integers(0, 256, sum(sizes) + 5 * len(sizes) + 3, np.uint8)
    spans = np.array([*zip(firsts, sizes, strict=True)], np.int64).reshape(-1, 2)
    return b'{"iteration": %d}' % number, region, spans


def wanted(number: int, sizes: Sequence[int] = SIZES) -> tuple[bytes, list[bytes]]:
    """What a reader has to give of it."""
    head, region, spans = offered(number, sizes)
    return head, [region[first : first + size].tobytes() for first, size in spans.tolist()]


def place_bytes(sizes: Sequence[int] = SIZES) -> int:
    return entry_bytes(32, sizes)


def write(writer: RingWriter, number: int, sizes: Sequence[int] = SIZES) -> Written | Hole:
    """Offer it and wait for what becomes of it."""
    writer.offer(number, *offered(number, sizes))
    return outcome(writer)


def outcome(writer: RingWriter) -> Written | Hole:
    while not (said := writer.taken()):
        time.sleep(0.0005)
    return said[0]

