"""The reader of a journal: in any process, also while another one writes it.

    reader = RingReader(directory)
    reader.entries                      what is whole: number, head, nbytes
    reader.numbers                      the same, by their first blocks alone
    reader.read(number)                 its head and spans, all sums checked
    reader.following(numbers)           of one after the other, each read while the one before it is used
    reader.damaged                      what is not used, and why

What it returns is what was offered, or it raises: an entry that is being overwritten is gone, and one of which a bit
differs is damaged. It remembers where entries are, and their heads: `read` looks for one that is not there any more,
`entries` reads what was written since, and what `read` has failed at; `damaged` reads all again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from flowcheck.durable import reporting
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.journal.files import found_files, opened_to_read
from flowcheck.journal.format import BLOCK, LINE, Descriptor, Geometry, NotOurs, Torn, aligned
from updater.memory import anonymous
from updater.ring import file_system, sum_of

__all__ = ["Damaged", "Entry", "Followed", "Memory", "Place", "RingReader", "geometry_of", "places_in", "spans_in"]

REMEDY = "an older step, or one that is made without it"
_Read = TypeVar("_Read")
LOOKS = 3  # at a block that does not fit: it may have been written meanwhile


class Entry(NamedTuple):
    """number: of the iteration. head: as it was offered. nbytes: that it takes in its file."""

    number: int
    head: bytes
    nbytes: int


class Followed(NamedTuple):
    """One of several entries. check(): call it when the spans were used; raises UserError: they were overwritten
    meanwhile, and what was made of them is nothing."""

    head: bytes
    spans: list[np.ndarray]
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Place:
    """Of a whole entry. at: its first byte in the file."""

    path: Path
    at: int
    one: Descriptor

    @property
    def name(self) -> str:
        return f"{self.path} at byte {self.at}"

    def having(self, read: Callable[[int, Place], _Read]) -> _Read:
        """What `read` makes of an open file and this. Raises _Gone: the entry is another one by now; Damaged, NotOurs,
        OSError."""
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(opened_to_read(self.path))
            except FileNotFoundError:
                raise _Gone from None
            try:
                return read(descriptor, self)
            except Damaged:
                if os.pread(descriptor, 8, self.at) != self.one.word.to_bytes(8, "little"):
                    raise _Gone from None
                raise


class Damaged(Exception):
    """What differs."""


class _Gone(Exception):
    """It was overwritten, or its file replaced."""


class RingReader:
    """Raises UserError: nothing of a journal is in `directory`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._places: dict[int, Place] = {}  # by number, as of the last look
        self._heads: dict[Place, Entry] = {}
        if not self._files():
            raise UserError("there is no journal", where=str(directory), remedy="the directory of one run's journal")

    @property
    def entries(self) -> list[Entry]:
        """Whole ones by number. Heads and tables are checked, spans are when they are read."""
        return self._look(self._heads)[0]

    @property
    def damaged(self) -> list[str]:
        """What is never used: files, places and heads that are not as they were written. Spans are looked at by `read`
        alone."""
        return self._look({})[1]

    @property
    def numbers(self) -> list[int]:
        """Iterations whose entries are there: heads and spans are looked at by others."""
        return [place.one.number for place in self._whole([], [*self._places.values()])]

    def read(self, number: int, memory: Memory | None = None) -> tuple[bytes, list[np.ndarray]]:
        """Head and spans (uint8, in the order offered) of an iteration. memory: in which they lie, and those that were
        read into it before do not any more. Raises UserError: it is not there, or was overwritten meanwhile;
        EnvironmentProblem: it is damaged, or cannot be read."""
        return self._read(number, (memory or Memory()).image)[1:]

    def part(self, number: int, sizes: Sequence[int], span: int, first: int, count: int) -> bytes:
        """Bytes of one span of an iteration that was read: its sums were looked at then. sizes: of its spans. Raises
        UserError: it was overwritten meanwhile; EnvironmentProblem: it cannot be read."""
        place = self._places.get(number)
        if place is None:
            raise UserError(f"iteration {number} is not in the journal", where=str(self._directory), remedy=REMEDY)
        at = place.one.first_span + sum(aligned(size, LINE) for size in sizes[:span]) + first
        try:
            return place.having(partial(_some, at=at, count=count))
        except _Gone:
            raise UserError(f"iteration {number} was overwritten", where=place.name, remedy=REMEDY) from None
        except (Damaged, OSError) as error:
            raise EnvironmentProblem(f"iteration {number} cannot be read: {error}", where=place.name,
                                     remedy=REMEDY) from None

    def following(self, numbers: Sequence[int]) -> Iterator[Followed]:
        """As `read` of each: spans hold until the next are asked for. Where the file system is memory they are those of
        the file and not copied, for a step is made as fast as memory can be read; a file that is cut short meanwhile
        then ends this process (SIGBUS). Raises as `read` does, when the one that cannot be read is asked for."""
        mapped = self._in_memory()
        images = [_Mapped().image] if mapped else [Memory().image, Memory().image]
        with ThreadPoolExecutor(1, "flowcheck journal reader") as thread:
            coming = [thread.submit(self._read, number, images[0]) for number in numbers[:1]]
            for at in range(1, len(numbers) + 1):
                place, head, spans = coming.pop().result()
                if at < len(numbers):
                    coming.append(thread.submit(self._read, numbers[at], images[at % len(images)]))
                yield Followed(head, spans, partial(_check, place)) if mapped else Followed(head, spans)

    # -- inside ------------------------------------------------------------------------------------------------

    def _in_memory(self) -> bool:
        with reporting(self._directory, "a directory that can be read"):
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return bool(file_system(descriptor))
            finally:
                os.close(descriptor)

    def _read(self, number: int, image: _Image) -> tuple[Place, bytes, list[np.ndarray]]:
        """As `read`, and where it lies."""
        if (known := self._places.get(number)) is not None:
            with contextlib.suppress(_Gone, Damaged, NotOurs, OSError):  # what is wrong is said below
                return known, *known.having(partial(_unchanged, image=image))
            self._heads.pop(known, None)
        said: list[str] = []
        for place in self._whole(said, {}):
            if place.one.number == number:
                try:
                    return place, *place.having(partial(spans_in, image=image))
                except _Gone:
                    raise _overwritten(place) from None
                except (Damaged, NotOurs, OSError) as error:
                    raise EnvironmentProblem(
                        f"iteration {number} cannot be used: {error}", where=place.name, remedy=REMEDY
                    ) from None
        more = f"; not used are {'; '.join(said)}" if said else ""
        raise UserError(f"iteration {number} is not in the journal{more}", where=str(self._directory), remedy=REMEDY)

    def _files(self) -> list[Path]:
        with reporting(self._directory, "a directory that can be read"):
            return found_files(self._directory)

    def _whole(self, said: list[str], known: Collection[Place]) -> list[Place]:
        """By number; of two with one number the newer. said: what is damaged is added. known: these are believed to be
        there as long as their words are."""
        found: dict[int, Place] = {}
        at = {(place.path, place.at): place for place in known}
        for path in self._files():
            try:
                with opened_to_read(path) as descriptor:
                    for place in places_in(descriptor, path, geometry_of(descriptor), said, at):
                        other = found.get(place.one.number)
                        if other is None or other.one.ticket < place.one.ticket:
                            found[place.one.number] = place
            except FileNotFoundError:
                continue  # replaced just now
            except (OSError, NotOurs, Torn) as error:
                said.append(f"{path}: {error}")
        self._places = found
        return [found[number] for number in sorted(found)]

    def _look(self, heads: Mapping[Place, Entry]) -> tuple[list[Entry], list[str]]:
        """heads: those that are not read again."""
        there: dict[Place, Entry] = {}
        said: list[str] = []
        for place in self._whole(said, heads.keys()):
            try:
                there[place] = heads.get(place) or Entry(
                    place.one.number, place.having(_front)[0], place.one.nbytes)
            except _Gone:
                continue
            except (Damaged, NotOurs, OSError) as error:
                said.append(f"{place.name}: iteration {place.one.number}: {error}")
        self._heads = there
        return list(there.values()), said


def geometry_of(descriptor: int, at: int = 0) -> Geometry:
    """Of an open file, or of one whose bytes begin there in it. Raises OSError, NotOurs, Torn."""
    return Geometry.read(os.pread(descriptor, BLOCK, at))[0]


def places_in(
    descriptor: int, path: Path, geometry: Geometry, said: list[str],
    known: Mapping[tuple[Path, int], Place] | None = None,
) -> Iterator[Place]:
    """Those of a file that have whole entries. said: what is damaged is added. known: of which the word alone is read,
    as long as it stays, by path and first byte."""
    whole = min(geometry.places, (os.fstat(descriptor).st_size - BLOCK) // geometry.place_bytes)
    if whole < geometry.places:
        said.append(f"{path}: it was cut short")
    for number in range(whole):
        at = geometry.at(number)[1]
        before = known.get((path, at)) if known else None
        if before is not None and os.pread(descriptor, 8, at) == before.one.word.to_bytes(8, "little"):
            yield before
            continue
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
                yield Place(path, at, one)
            break


class Memory:
    """What one entry after the other is read into: it begins at a page, grows, and is not faulted in again."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def of(self, count: int) -> memoryview:
        if self._map is None or len(self._map) < count:
            self._map = anonymous(count)
        return memoryview(self._map)[:count]

    def image(self, descriptor: int, at: int, count: int) -> np.ndarray:
        """As an _Image."""
        view, done = self.of(count), 0
        while done < count:
            got = os.preadv(descriptor, [view[done:]], at + done)
            if not got:
                raise Damaged("the file was cut short")
            done += got
        return np.frombuffer(view, np.uint8)


class _Image(Protocol):
    """So many bytes of an open file, from one on. Raises Damaged: it ends before; OSError."""

    def __call__(self, descriptor: int, at: int, count: int) -> np.ndarray: ...


class _Mapped:
    """Files where they lie: what is in them at any time, and not copied. A file is mapped once, for to map and to let
    go takes longer than to read it."""

    def __init__(self) -> None:
        self._files: dict[int, np.ndarray] = {}  # by inode

    def image(self, descriptor: int, at: int, count: int) -> np.ndarray:
        """As an _Image."""
        found = os.fstat(descriptor)
        if found.st_size < at + count:
            raise Damaged("the file was cut short")
        if found.st_ino not in self._files:
            memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            self._files[found.st_ino] = np.frombuffer(memory, np.uint8)
        return self._files[found.st_ino][at : at + count]


def _check(place: Place) -> None:
    """Of spans that were used where they lie. Raises UserError."""
    try:
        place.having(_unspoilt)
    except _Gone:
        raise _overwritten(place) from None
    except (NotOurs, OSError) as error:
        raise EnvironmentProblem(f"iteration {place.one.number} cannot be used: {error}", where=place.name,
                                 remedy=REMEDY) from None


def _unspoilt(descriptor: int, place: Place) -> None:
    """Raises _Gone: its word goes before anything else of it is written."""
    if os.pread(descriptor, 8, place.at) != place.one.word.to_bytes(8, "little"):
        raise _Gone


def _overwritten(place: Place) -> UserError:
    return UserError(
        f"iteration {place.one.number} was overwritten while it was read", where=place.name, remedy=REMEDY)


def _front(descriptor: int, place: Place) -> tuple[bytes, np.ndarray]:
    """Head and table. Raises Damaged, OSError."""
    return _checked(Memory().image(descriptor, place.at, place.one.first_span)[BLOCK:], place.one)


def _checked(front: np.ndarray, one: Descriptor) -> tuple[bytes, np.ndarray]:
    """Head and table, (n, 2) uint64, from what lies between the first block and the spans. Raises Damaged."""
    split = one.table_at - BLOCK
    if sum_of(front[:split]) != one.head_sum:
        raise Damaged("the sum of its head differs")
    if sum_of(front[split:]) != one.table_sum:
        raise Damaged("the sum of its table differs")
    table = front[split : split + 16 * one.spans].view(np.uint64).reshape(-1, 2)
    if one.first_span + sum(aligned(int(size), LINE) for size in table[:, 0]) > one.nbytes:
        raise Damaged("its table is of more than it has")
    return front[: one.head_bytes].tobytes(), table


def _some(descriptor: int, place: Place, at: int, count: int) -> bytes:
    """Raises _Gone, Damaged, OSError."""
    data = os.pread(descriptor, count, place.at + at)
    _unspoilt(descriptor, place)
    if len(data) < count:
        raise Damaged("the file was cut short")
    return data


def _unchanged(descriptor: int, place: Place, image: _Image) -> tuple[bytes, list[np.ndarray]]:
    """As `spans_in`. Raises _Gone, too: its first block is another one by now, or damaged."""
    if os.pread(descriptor, BLOCK, place.at) != place.one.block():
        raise _Gone
    return spans_in(descriptor, place, image)


def spans_in(descriptor: int, place: Place, image: _Image | None = None) -> tuple[bytes, list[np.ndarray]]:
    """Head and spans, all sums checked. image: what reads them; None: into memory of their own. Raises Damaged,
    OSError."""
    one = place.one
    found = (image or Memory().image)(descriptor, place.at, one.nbytes)
    head, table = _checked(found[BLOCK : one.first_span], one)
    at, spans = one.first_span, []
    for number, (size, wanted) in enumerate(table.tolist()):
        end = at + aligned(size, LINE)
        if sum_of(found[at:end]) != wanted:
            raise Damaged(f"the sum of span {number} differs")
        spans.append(found[at : at + size])
        at = end
    return head, spans
