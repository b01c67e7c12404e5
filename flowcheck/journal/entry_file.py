"""An entry by itself: a ring of one place, for who keeps as many as come and lets go of them one by one.

    write_entry(path, number, head, spans)     the whole file or none; bytes that it has
    read_entry(path)                           number, head, spans; all sums checked
    image_of(number, head, spans)              bytes that it has as a file, and these
    entry_in(descriptor, at, name)             of a file in which the image of one begins there; as read_entry
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flowcheck.durable import write_atomic
from flowcheck.errors import EnvironmentProblem
from flowcheck.journal.files import opened_to_read
from flowcheck.journal.format import BLOCK, LINE, Descriptor, Geometry, NotOurs, Torn, aligned, entry_bytes
from flowcheck.journal.reader import Damaged, Place, geometry_of, spans_in
from updater.ring import sum_of

__all__ = ["entry_in", "image_of", "read_entry", "write_entry"]


def write_entry(path: Path, number: int, head: bytes, spans: Sequence[np.ndarray]) -> int:
    """spans: one-dimensional uint8. Raises EnvironmentProblem; an older file then still stands."""
    size, pieces = image_of(number, head, spans)
    write_atomic(path, pieces)
    return size


def image_of(number: int, head: bytes, spans: Sequence[np.ndarray]) -> tuple[int, Iterator[memoryview]]:
    """As of write_entry."""
    table = np.array([(span.size, sum_of(_padded(span))) for span in spans], np.uint64).reshape(-1, 2)
    front, rows = _padded(np.frombuffer(head, np.uint8)), _padded(table.reshape(-1).view(np.uint8))
    size = entry_bytes(len(head), [span.size for span in spans])
    one = Descriptor(0, number, 1, len(head), len(spans), size, sum_of(front), sum_of(rows))
    blocks = np.frombuffer(Geometry(size, 1, 1).block(0) + one.block(), np.uint8)
    return BLOCK + size, _pieces(size, [blocks, front, rows, *spans])


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
        with opened_to_read(path) as descriptor:
            return _entry_in(descriptor, 0, path)
    except (OSError, NotOurs, Torn, Damaged) as error:
        raise _refused(error, str(path)) from None


def entry_in(descriptor: int, at: int, name: str) -> tuple[int, bytes, list[np.ndarray]]:
    """name: what errors call it. Raises EnvironmentProblem: it is damaged."""
    try:
        return _entry_in(descriptor, at, Path(name))
    except (OSError, NotOurs, Torn, Damaged) as error:
        raise _refused(error, name) from None


def _entry_in(descriptor: int, at: int, path: Path) -> tuple[int, bytes, list[np.ndarray]]:
    geometry, block = geometry_of(descriptor, at), os.pread(descriptor, BLOCK, at + BLOCK)
    one = Descriptor.read(block, geometry.place_bytes) if len(block) == BLOCK else None
    if one is None:
        raise Damaged("it has no entry")
    return one.number, *spans_in(descriptor, Place(path, at + BLOCK, one))


def _refused(error: Exception, where: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"an entry cannot be read: {getattr(error, 'strerror', None) or error}", where=where,
        remedy="an older step, or one that is made without it",
    )
