"""An entry in a file of its own: a ring of one place, for who keeps as many as come and lets go of them one by one.

    write_entry(path, number, head, spans)     the whole file or none; bytes that it has
    read_entry(path)                           number, head, spans; all sums checked
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flowcheck.durable import write_atomic
from flowcheck.errors import EnvironmentProblem
from flowcheck.journal.files import opened_to_read
from flowcheck.journal.format import BLOCK, LINE, Descriptor, Geometry, NotOurs, Torn, aligned, entry_bytes
from flowcheck.journal.reader import Damaged, geometry_of, places_in, spans_in
from updater.ring import sum_of

__all__ = ["read_entry", "write_entry"]


def write_entry(path: Path, number: int, head: bytes, spans: Sequence[np.ndarray]) -> int:
    """spans: one-dimensional uint8. Raises EnvironmentProblem; an older file then still stands."""
    table = np.array([(span.size, sum_of(_padded(span))) for span in spans], np.uint64).reshape(-1, 2)
    front, rows = _padded(np.frombuffer(head, np.uint8)), _padded(table.reshape(-1).view(np.uint8))
    size = entry_bytes(len(head), [span.size for span in spans])
    one = Descriptor(0, number, 1, len(head), len(spans), size, sum_of(front), sum_of(rows))
    blocks = np.frombuffer(Geometry(size, 1, 1).block(0) + one.block(), np.uint8)
    write_atomic(path, _pieces(size, [blocks, front, rows, *spans]))
    return BLOCK + size


def _padded(data: np.ndarray) -> np.ndarray:
    """With zeros up to a whole line; itself where it ends at one."""
    left = -data.size % LINE
    return np.concatenate([data, np.zeros(left, np.uint8)]) if left else data


def _pieces(size: int, parts: Sequence[np.ndarray]) -> Iterator[memoryview]:
    """Each with zeros up to a whole line, and all up to a whole block."""
    done = 0
    for part in parts:
        yield part.data
        yield memoryview(bytes(-part.size % LINE))
        done += aligned(part.size, LINE)
    yield memoryview(bytes(BLOCK + size - done))


def read_entry(path: Path) -> tuple[int, bytes, list[np.ndarray]]:
    """Raises EnvironmentProblem: it is not there, or damaged."""
    try:
        said: list[str] = []
        with opened_to_read(path) as descriptor:
            for place in places_in(descriptor, path, geometry_of(descriptor), said):
                return place.one.number, *spans_in(descriptor, place)
        raise Damaged("; ".join(said) or "it has no entry")
    except (OSError, NotOurs, Torn, Damaged) as error:
        raise EnvironmentProblem(
            f"an entry cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path),
            remedy="an older step, or one that is made without it",
        ) from None
