"""Gradients between two versions of a store, so that steps between them can be made again (store.py has the versions).

    RUN/epoch-0/deltas/LINE/job.json                                the job that they are of
                            000000000120-000000000127.3f9a12c4/part-00000 ...
                            000000000120-000000000127.3f9a12c4.json when all of that was read back and found to be right
                            ends.json                               steps after this one may be wrong

    deltas = Deltas(objects, "RUN/epoch-0/deltas/LINE", moving)
    deltas.write(chain, first, entries)     entries of iterations that follow each other, from `first` on: a delta
    deltas.listed()                         which there are, without reading any
    deltas.read(span, chain, file)          its entries, every part held against its hash

A line is one unbroken chain of versions; a version of the line names it. So a delta is applied to a version of its line
and of its first step, or to what was made of one, and to nothing else. A delta without its JSON is an attempt that was
cut. What an entry is its writer knows: here it is bytes. Any call may raise StoreError.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from flowcheck.checkpoint.objects import Missing, Objects
from flowcheck.checkpoint.read_back import CHUNK, ReadBack, hashed, small
from flowcheck.control.version import is_sealed, seal
from flowcheck.errors import UserError

__all__ = ["DELTAS", "LINE", "PART_BYTES", "Chain", "Deltas", "Listed", "Span", "reach", "way"]

DELTAS, SCHEMA, JOB, ENDS = "deltas", "flowcheck/delta/1", "job.json", "ends.json"
PART_BYTES = 64 << 20  # of an object at most, and of the entries of a delta if there is more than one
MOST_TEXT, MOST_JOB = 1 << 24, 256 << 20
LINE = re.compile("[0-9a-f]{16}")
_NAME = re.compile(r"([0-9]{12})-([0-9]{12})\.[0-9a-f]{8}")
REMEDY = "a step that can be made without it"
Entries = Sequence[tuple[int, Iterable[memoryview]]]


@dataclass(frozen=True)
class Chain:
    """Of which versions deltas are. run_id, epoch, shard, start: as of these versions. line: of them. plan: hexadecimal
    digits that stand for the job, and where its bytes lie."""

    run_id: str
    epoch: int
    shard: str
    start: str
    line: str
    plan: str


@dataclass(frozen=True, order=True)
class Span:
    """A delta, of iterations first to last. name: of its folder."""

    first: int
    last: int
    name: str


@dataclass(frozen=True)
class Listed:
    """cut: folders of attempts without a JSON. ends: steps after this one may be wrong; None: nobody says so."""

    spans: tuple[Span, ...]
    cut: tuple[str, ...]
    ends: int | None = None


def reach(step: int, spans: Iterable[Span]) -> int:
    """The newest step that can be made from a version of this one."""
    for one in sorted(spans):
        if one.first <= step:
            step = max(step, one.last + 1)
    return step


def way(step: int, to: int, spans: Iterable[Span]) -> list[Span]:
    """The deltas from a version of `step` to step `to`, in order; []: there is a gap, or nothing to do."""
    out: list[Span] = []
    there = list(spans)
    while step < to:
        fit = [one for one in there if one.first <= step <= one.last]
        if not fit:
            return []
        out.append(max(fit, key=lambda one: one.last))
        step = out[-1].last + 1
    return out


class Deltas:
    """folder: of a line."""

    def __init__(self, objects: Objects, folder: str, moving: Callable[[], None] = lambda: None) -> None:
        self._objects, self._folder, self._moving = objects, folder, moving
        self._sure = ReadBack(objects, moving)

    def say_job(self, job: dict[str, Any]) -> None:
        """Of which job they are. It is there before any of them."""
        text = json.dumps(seal(job)).encode()
        try:
            if small(self._objects, f"{self._folder}/{JOB}", MOST_JOB) == text:
                return
        except (Missing, UserError):
            pass
        self._sure.replace(f"{self._folder}/{JOB}", text)

    def job(self) -> dict[str, Any]:
        """Raises Missing; UserError: it is damaged."""
        return _sealed(self._objects, f"{self._folder}/{JOB}", MOST_JOB)

    def listed(self) -> Listed:
        """As the store lists them. What is listed is believed when it is read, not before."""
        names = set(self._objects.children(self._folder))
        found = {name: match for name in names if (match := _NAME.fullmatch(name.removesuffix(".json")))}
        spans = [Span(int(match[1]), int(match[2]), name.removesuffix(".json")) for name, match in found.items()
                 if name.endswith(".json")]
        cut = [name for name in found if not name.endswith(".json") and f"{name}.json" not in names]
        return Listed(tuple(sorted(one for one in spans if one.first <= one.last)), tuple(sorted(cut)),
                      self._ends() if ENDS in names else None)

    def _ends(self) -> int:
        try:
            after = _sealed(self._objects, f"{self._folder}/{ENDS}", MOST_TEXT).get("after")
        except (Missing, UserError):
            return -1  # somebody has said so
        return after if type(after) is int else -1

    def end(self, after: int) -> None:
        """Steps of this line after that one may be wrong."""
        self._sure.replace(f"{self._folder}/{ENDS}", json.dumps(seal({"after": after})).encode())

    def write(self, chain: Chain, first: int, entries: Entries) -> tuple[Span, int]:
        """entries: bytes of each, and the bytes. Returns what was written, and bytes of all entries."""
        last, sizes = first + len(entries) - 1, [size for size, _ in entries]
        span = Span(first, last, f"{first:012d}-{last:012d}.{secrets.token_hex(4)}")
        stream, parts = _Stream(piece for _, pieces in entries for piece in pieces), []
        for number in range(-(-sum(sizes) // PART_BYTES)):
            digest, name = hashlib.sha256(), self._part(span, number)
            nbytes = min(PART_BYTES, sum(sizes) - number * PART_BYTES)
            self._sure.put(name, stream.part(nbytes, digest))
            parts.append({"bytes": nbytes, "sha256": digest.hexdigest()})
            self._sure.verify(name, parts[-1])
        about = {"schema": SCHEMA, **asdict(chain), "first": first, "last": last, "sizes": sizes, "parts": parts}
        self._sure.replace(f"{self._folder}/{span.name}.json", json.dumps(seal(about)).encode())
        return span, sum(sizes)

    def read(self, span: Span, chain: Chain, file: BinaryIO) -> list[int]:
        """All entries of a delta into a file, from its beginning on; bytes of each. Raises UserError: it is damaged, or
        another's; Missing."""
        name = f"{self._folder}/{span.name}.json"
        said = _sealed(self._objects, name, MOST_TEXT)
        mine = {"schema": SCHEMA, **asdict(chain), "first": span.first, "last": span.last}
        odd = [key for key, value in mine.items() if said.get(key) != value]
        sizes: Any = said.get("sizes")
        parts: Any = said.get("parts")
        if odd or not _are_sizes(sizes, span.last - span.first + 1) or not _are_parts(parts, sum(sizes)):
            raise UserError(f"is of another {odd[0]}" if odd else "contradicts itself", where=name, remedy=REMEDY)
        file.seek(0)
        file.truncate()
        for number, part in enumerate(parts):
            digest, at = hashlib.sha256(), 0
            for piece in hashed(self._objects, self._part(span, number), part["bytes"], digest):
                file.write(piece)
                at += len(piece)
                self._moving()
            if at != part["bytes"] or digest.hexdigest() != part["sha256"]:
                raise UserError("has other bytes than those written", where=self._part(span, number), remedy=REMEDY)
        file.flush()
        return list(sizes)

    def remove(self, span: Span) -> None:
        self._moving()
        self._objects.remove(f"{self._folder}/{span.name}.json")  # first: without it nothing of the rest is a delta
        self.remove_cut(span.name)

    def remove_cut(self, name: str) -> None:
        self._moving()
        self._objects.remove_all(f"{self._folder}/{name}")

    def _part(self, span: Span, number: int) -> str:
        return f"{self._folder}/{span.name}/part-{number:05d}"


class _Stream:
    """Pieces of bytes one after the other, cut again."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def part(self, nbytes: int, digest: Any) -> Iterator[memoryview]:
        while nbytes:
            if not self._left:
                self._left = memoryview(next(self._pieces)).cast("B")
                continue
            most = min(nbytes, CHUNK)
            piece, self._left = self._left[:most], self._left[most:]
            nbytes -= len(piece)
            digest.update(piece)
            yield piece


def _sealed(objects: Objects, name: str, most: int) -> dict[str, Any]:
    try:
        said = json.loads(small(objects, name, most))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not is_sealed(said):
        raise UserError("is damaged: its own hash does not match", where=name, remedy=REMEDY)
    return said


def _are_sizes(said: Any, count: int) -> bool:
    return isinstance(said, list) and len(said) == count and all(type(one) is int and one > 0 for one in said)


def _are_parts(said: Any, nbytes: int) -> bool:
    """Of so many bytes together."""
    if not isinstance(said, list) or not all(isinstance(one, dict) and type(one.get("bytes")) is int for one in said):
        return False
    return all(0 < one["bytes"] <= PART_BYTES for one in said) and sum(one["bytes"] for one in said) == nbytes
