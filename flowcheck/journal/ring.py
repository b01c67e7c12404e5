"""The writer of a journal: entries are offered, and nobody waits for the disk.

    with RingWriter(directory, nbytes, entry_bytes) as writer:
        writer.offer(number, head, region, spans)          at once; False: a hole
        writer.reads(number)                               may the region not be used again yet?
        writer.taken()                                     what became of those offered: Written or Hole, each once

What a disk that is slow, full or hung costs is holes, which say why. Entries are in the directory when the process is
killed at any point, whole or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from flowcheck.errors import EnvironmentProblem, size_text
from flowcheck.journal.files import RingFiles
from flowcheck.journal.format import Descriptor, Geometry, Torn, file_name
from flowcheck.journal.places import Places
from updater.ring import Ring, nbytes

__all__ = ["Hole", "RingWriter", "Written"]

HUNG_SECONDS = 10.0  # after which a disk that does not answer is called so
STEPS = {1: "clearing its place", 2: "writing it", 3: "completing it"}


@dataclass(frozen=True)
class Written:
    """An entry that is whole in its file. nbytes: of its place. seconds: that writing them took."""

    number: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Hole:
    """An iteration that is not in the journal. cause: "busy" (the disk is slower than iterations come), "hung" (it has
    not answered for HUNG_SECONDS), "large" (the entry is larger than a place), or the name of an errno ("ENOSPC").
    why: one sentence of it."""

    number: int
    cause: str
    why: str


class RingWriter:
    """A journal in `directory`, which this process alone writes. nbytes: of all its files, at most. entry_bytes: of the
    largest entry (format.entry_bytes). found: iterations that are in it from before. replaced: files of it that were,
    and why (files.py has the rule). Raises UserError (the directory has other things, or nbytes hold less than two
    entries) and EnvironmentProblem (no room, no rights, another process writes it). One thread, but for `reads`."""

    def __init__(self, directory: str | os.PathLike[str], nbytes: int, entry_bytes: int) -> None:
        self._files = RingFiles(Path(directory), nbytes, entry_bytes)
        try:
            self._places = Places(self.geometry.places * self.geometry.files)
            self._read_again()
            self.found = self._places.entries
            self._ring = self._started()
        except BaseException:
            self._files.close()
            raise
        self._ticket = self._places.last
        self._oldest = 0
        self._going: dict[int, tuple[int, int]] = {}  # by ticket: number and place
        self._said: list[Written | Hole] = []

    @property
    def geometry(self) -> Geometry:
        return self._files.geometry

    @property
    def replaced(self) -> Sequence[str]:
        return self._files.replaced

    @property
    def how(self) -> str:
        """How files are written: "mapped", "direct" or "cached"."""
        return "mapped" if self._files.addresses else "direct" if self._files.direct else "cached"

    @property
    def entries(self) -> list[int]:
        """Iterations that are whole in it, in order, as far as `taken` has said."""
        return self._places.entries

    def offer(self, number: int, head: bytes, region: Any, spans: Any) -> bool:
        """Give the bytes of an iteration: `spans` ((n, 2) int64, [first byte, bytes]) of `region` (contiguous uint8),
        with `head`. Never waits. The region must stay as it is while `reads(number)`. False: it is a hole, as `taken`
        says, too. Raises ValueError: spans that are not in the region, or a negative number."""
        if number < 0:
            raise ValueError(f"iteration {number}")
        cut = np.array(spans, np.int64).reshape(-1, 2)  # of our own
        data = np.frombuffer(region, np.uint8)
        size = nbytes(len(head), cut, len(data))
        self._settle()
        if size > self.geometry.place_bytes:
            return self._refuse(number, "large", f"{size_text(size)} are more than a place of"
                                f" {size_text(self.geometry.place_bytes)}")
        place = self._places.take(number, self._oldest) if len(self._going) < 2 else None
        if place is None:
            return self._refuse(number, *self._busy())
        index, at = self.geometry.at(place)
        address = self._files.addresses[index] + at if self._files.addresses else 0
        self._ticket += 1
        self._going[self._ticket] = number, place
        return self._ring.offer(number, self._ticket, self._files.descriptors[index], at, address, head, data, cut)

    def reads(self, number: int) -> bool:
        """Is the region of this iteration still read? For as long as copying it in memory takes. Any thread."""
        return self._ring.reads(number)

    def taken(self) -> list[Written | Hole]:
        """What became of iterations since this was asked last: each that was offered, once."""
        self._settle()
        said, self._said = self._said, []
        return said

    def keep(self, oldest: int) -> None:
        """Entries before `oldest` may go first. Others go, too, the first written first, when all places are full."""
        self._oldest = oldest

    def close(self, seconds: float = 5.0) -> list[Written | Hole]:
        """Finish what was offered, if that takes no more than so many seconds; returns what `taken` would. May be
        called twice."""
        if self._ring.end(seconds):
            said = self.taken()
            self._ring.close()
            self._files.close()
            return said
        said = self.taken()
        said += [Hole(number, "hung", "the journal was closed while it was being written")
                 for number, _ in self._going.values()]
        self._going.clear()
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------

    def _started(self) -> Ring:
        most, files = self.geometry.place_bytes, self._files
        try:
            return Ring(most, mapped=bool(files.addresses), direct=files.direct, disk=files.disk, files=files)
        except MemoryError:
            raise EnvironmentProblem(
                f"there is no memory for two entries of {size_text(most)} on their way, or no room for two threads",
                where=str(files.directory), remedy="more memory for this process, or no journal",
            ) from None

    def _settle(self) -> None:
        for number, ticket, size, seconds, step, code in self._ring.taken():
            _, place = self._going.pop(ticket)
            if not step:
                self._places.holds(place, number, ticket)
                self._said.append(Written(number, size, seconds))
                continue
            self._places.failed(place, ticket)
            index, at = self.geometry.at(place)
            where = f"{self._files.directory / file_name(index)} at byte {at}"
            cause = errno.errorcode.get(code, f"errno {code}")
            self._said.append(Hole(number, cause, f"{STEPS[step]} failed: {os.strerror(code)} ({where})"))

    def _refuse(self, number: int, cause: str, why: str) -> bool:
        self._said.append(Hole(number, cause, why))
        return False

    def _busy(self) -> tuple[str, str]:
        writing = self._ring.writing()
        if writing is None:
            return "busy", "two entries are being copied"
        number, seconds = writing
        why = f"iteration {number} has been written for {seconds:.1f} s, and one waits behind it"
        return ("hung" if seconds > HUNG_SECONDS else "busy"), why

    def _read_again(self) -> None:
        found = []
        for place in range(self.geometry.places * self.geometry.files):
            try:
                one = Descriptor.read(self._files.block(*self.geometry.at(place)), self.geometry.place_bytes)
            except (Torn, EnvironmentProblem):
                continue  # a reader names it; here it is a place that is free
            if one is not None:
                found.append((one.ticket, place, one.number))
        for ticket, place, number in sorted(found):
            self._places.holds(place, number, ticket)
