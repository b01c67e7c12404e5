"""The reader of a journal: in any process, also while another one writes it.

    reader = RingReader(directory)
    reader.entries                      what is whole: number, head, nbytes
    reader.read(number)                 its head and spans, all sums checked
    reader.damaged                      what is not used, and why

Every call looks at the files anew. What it returns is what was offered, or it raises: an entry that is being overwritten
is gone, and one of which a bit differs is damaged.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowcheck.durable import reporting
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.journal.files import found_files, opened_to_read
from flowcheck.journal.format import BLOCK, LINE, Descriptor, Geometry, NotOurs, Torn, aligned
from updater.ring import sum_of

__all__ = ["Entry", "RingReader"]

REMEDY = "an older step, or one that is made without it"
LOOKS = 3  # at a block that does not fit: it may have been written meanwhile


class Entry(NamedTuple):
    """number: of the iteration. head: as it was offered. nbytes: that it takes in its file."""

    number: int
    head: bytes
    nbytes: int


@dataclass(frozen=True)
class _Place:
    """Of a whole entry. at: its first byte in the file."""

    path: Path
    at: int
    one: Descriptor

    @property
    def name(self) -> str:
        return f"{self.path} at byte {self.at}"


class _Damaged(Exception):
    """What differs."""


class RingReader:
    """Raises UserError: there is no journal in `directory`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        if not self._files():
            raise UserError("there is no journal", where=str(directory), remedy="the directory of one run's journal")

    @property
    def entries(self) -> list[Entry]:
        """Whole ones by number. Heads and tables are checked, spans are when they are read."""
        found = []
        for place in self._whole([]):
            try:
                with opened_to_read(place.path) as descriptor:
                    found.append(Entry(place.one.number, _front(descriptor, place)[0], place.one.nbytes))
            except (_Damaged, NotOurs, OSError):
                continue  # `damaged` names it
        return found

    @property
    def damaged(self) -> list[str]:
        """What is never used: files, places and heads that are not as they were written. Spans are looked at by `read`
        alone."""
        said: list[str] = []
        for place in self._whole(said):
            try:
                with opened_to_read(place.path) as descriptor:
                    _front(descriptor, place)
            except (_Damaged, NotOurs, OSError) as error:
                said.append(f"{place.name}: iteration {place.one.number}: {error}")
        return said

    def read(self, number: int) -> tuple[bytes, list[np.ndarray]]:
        """Head and spans (uint8, in the order offered) of an iteration. Raises UserError: it is not there, or was
        overwritten meanwhile; EnvironmentProblem: it is damaged, or cannot be read."""
        said: list[str] = []
        for place in self._whole(said):
            if place.one.number == number:
                return self._read(place)
        more = f"; not used are {'; '.join(said)}" if said else ""
        raise UserError(f"iteration {number} is not in the journal{more}", where=str(self._directory), remedy=REMEDY)

    # -- inside ------------------------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        with reporting(self._directory, "a directory that can be read"):
            return found_files(self._directory)

    def _whole(self, said: list[str]) -> list[_Place]:
        """By number; of two with one number the newer. said: what is damaged is added."""
        found: dict[int, _Place] = {}
        for path in self._files():
            try:
                with opened_to_read(path) as descriptor:
                    geometry, _ = Geometry.read(os.pread(descriptor, BLOCK, 0))
                    for place in _places(descriptor, path, geometry, said):
                        other = found.get(place.one.number)
                        if other is None or other.one.ticket < place.one.ticket:
                            found[place.one.number] = place
            except FileNotFoundError:
                continue  # replaced just now
            except (OSError, NotOurs, Torn) as error:
                said.append(f"{path}: {error}")
        return [found[number] for number in sorted(found)]

    def _read(self, place: _Place) -> tuple[bytes, list[np.ndarray]]:
        number = place.one.number
        try:
            with opened_to_read(place.path) as descriptor:
                try:
                    return _spans(descriptor, place)
                except _Damaged as error:
                    if os.pread(descriptor, 8, place.at) == place.one.word.to_bytes(8, "little"):
                        raise EnvironmentProblem(
                            f"iteration {number} is damaged: {error}", where=place.name, remedy=REMEDY
                        ) from None
                    raise UserError(
                        f"iteration {number} was overwritten while it was read", where=place.name, remedy=REMEDY
                    ) from None
        except (OSError, NotOurs) as error:
            raise EnvironmentProblem(f"iteration {number} cannot be read: {error}", where=place.name, remedy=REMEDY
                                     ) from None


def _places(descriptor: int, path: Path, geometry: Geometry, said: list[str]) -> Iterator[_Place]:
    for number in range(geometry.places):
        at = geometry.at(number)[1]
        for look in range(LOOKS):
            block = os.pread(descriptor, BLOCK, at)
            try:
                if len(block) < BLOCK:
                    raise Torn("the file was cut short")
                one = Descriptor.read(block, geometry.place_bytes)
            except Torn as error:
                if look == LOOKS - 1:
                    said.append(f"{path} at byte {at}: {error}")
                continue
            if one is not None:
                yield _Place(path, at, one)
            break


def _bytes(descriptor: int, at: int, count: int) -> np.ndarray:
    """Memory of its own, which begins at a page. Raises _Damaged: the file ends before."""
    memory = mmap.mmap(-1, count)
    view, done = memoryview(memory), 0
    while done < count:
        got = os.preadv(descriptor, [view[done:]], at + done)
        if not got:
            raise _Damaged("the file was cut short")
        done += got
    return np.frombuffer(memory, np.uint8)


def _front(descriptor: int, place: _Place) -> tuple[bytes, np.ndarray]:
    """Head and table of an entry, (n, 2) uint64. Raises _Damaged, OSError."""
    one = place.one
    front = _bytes(descriptor, place.at + BLOCK, one.first_span - BLOCK) if one.first_span > BLOCK else np.empty(0, "u1")
    return _checked(front, one)


def _checked(front: np.ndarray, one: Descriptor) -> tuple[bytes, np.ndarray]:
    split = one.table_at - BLOCK
    if sum_of(front[:split]) != one.head_sum:
        raise _Damaged("the sum of its head differs")
    if sum_of(front[split:]) != one.table_sum:
        raise _Damaged("the sum of its table differs")
    table = front[split : split + 16 * one.spans].view(np.uint64).reshape(-1, 2)
    if one.first_span + sum(aligned(int(size), LINE) for size in table[:, 0]) > one.nbytes:
        raise _Damaged("its table is of more than it has")
    return front[: one.head_bytes].tobytes(), table


def _spans(descriptor: int, place: _Place) -> tuple[bytes, list[np.ndarray]]:
    """Raises _Damaged, OSError."""
    one = place.one
    image = _bytes(descriptor, place.at, one.nbytes)
    head, table = _checked(image[BLOCK : one.first_span], one)
    at, spans = one.first_span, []
    for number, (size, wanted) in enumerate(table.tolist()):
        end = at + aligned(size, LINE)
        if sum_of(image[at:end]) != wanted:
            raise _Damaged(f"the sum of span {number} differs")
        spans.append(image[at : at + size])
        at = end
    return head, spans
