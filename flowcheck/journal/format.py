"""The bytes of a journal's files (docs/understand/journal.md draws them).

    directory/ring-00000 ... a block, then places of one size; a block has 4096 bytes, and all is little endian
    the first block          word magic version place_bytes places files index
    an entry in its place    word magic number ticket head_bytes spans bytes head_sum table_sum | head | table | spans

A word is the sum of the block behind it, so that a block tells by itself whether it is whole. Head, table and each span
begin at a whole line of 64 bytes, and their sums cover the zeros up to the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from updater.ring import BLOCK, nbytes, sum_of_block

__all__ = [
    "BLOCK", "LINE", "Descriptor", "Geometry", "NotOurs", "Torn", "aligned", "entry_bytes", "file_name", "spans_of",
]

LINE = 64
FILE_BYTES = 1 << 30  # of a file that holds more than one place
FILE_MAGIC, ENTRY_MAGIC, VERSION = b"FCRING01", b"FCNTRY01", 1
_FILE, _ENTRY = struct.Struct("<Q8s5Q"), struct.Struct("<Q8sq6Q")


class NotOurs(ValueError):
    """Bytes that are no journal's, or one's of another version."""


class Torn(ValueError):
    """A block whose word is not its sum."""


def aligned(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def file_name(index: int) -> str:
    return f"ring-{index:05d}"


def _worded(fields: bytes) -> bytes:
    """A block that begins with these, of which the first is its word."""
    block = bytearray(fields.ljust(BLOCK, b"\0"))
    block[:8] = sum_of_block(block).to_bytes(8, "little")
    return bytes(block)


def spans_of(sizes: Sequence[int]) -> np.ndarray:
    """(n, 2) int64, [first byte, bytes] of spans that follow each other without a gap."""
    lengths = np.array(sizes, np.int64)
    return np.ascontiguousarray(np.stack([np.cumsum(lengths) - lengths, lengths], axis=1))


def entry_bytes(head_bytes: int, sizes: Sequence[int]) -> int:
    """Bytes of a place that an entry with such a head and spans of such sizes takes; what a ring's `entry_bytes` is."""
    return nbytes(head_bytes, spans_of(sizes), sum(sizes))


@dataclass(frozen=True)
class Geometry:
    """How a ring is cut. place_bytes: of an entry at most, whole blocks. places: in each file. files: how many."""

    place_bytes: int
    places: int
    files: int

    @classmethod
    def of(cls, total: int, entry: int, page: int = BLOCK) -> Self:
        """The most places of entries of at most so many bytes in files of `total` together, whose sizes are multiples
        of `page`. Raises ValueError: that is not even two."""
        place = aligned(max(entry, 1), BLOCK)
        files = max(1, total // max(FILE_BYTES, aligned(BLOCK + place, page)))
        places = (total // files // page * page - BLOCK) // place
        if places * files < 2:
            raise ValueError(f"{total} bytes hold less than two entries of {place} bytes")
        return cls(place, places, files)

    @property
    def used(self) -> int:
        """Bytes of a file that are used."""
        return BLOCK + self.places * self.place_bytes

    def at(self, place: int) -> tuple[int, int]:
        """File and first byte of one of all places."""
        index, number = divmod(place, self.places)
        return index, BLOCK + number * self.place_bytes

    def block(self, index: int) -> bytes:
        """The first block of a file."""
        fields = (0, FILE_MAGIC, VERSION, self.place_bytes, self.places, self.files, index)
        return _worded(_FILE.pack(*fields))

    @classmethod
    def read(cls, block: bytes) -> tuple[Self, int]:
        """A ring and the index of a file in it. Raises NotOurs, Torn."""
        if len(block) < BLOCK:
            raise NotOurs("it is too short to be a journal's")
        word, magic, version, place_bytes, places, files, index = _FILE.unpack_from(block)
        if word != sum_of_block(block):
            if magic != FILE_MAGIC:
                raise NotOurs("it does not begin as a journal's file")
            raise Torn("its first block is damaged: the sum differs")
        if magic != FILE_MAGIC or version != VERSION:
            raise NotOurs(f"it is a journal's of format {version}; this is {VERSION}")
        if place_bytes % BLOCK or not place_bytes or not places or index >= files:
            raise NotOurs("its first block contradicts itself")
        return cls(place_bytes, places, files), index


@dataclass(frozen=True)
class Descriptor:
    """The first block of an entry. ticket: how many entries had been given to the ring with it."""

    word: int
    number: int
    ticket: int
    head_bytes: int
    spans: int
    nbytes: int
    head_sum: int
    table_sum: int

    def block(self) -> bytes:
        """A whole one, with the word that it has to have."""
        fields = (0, ENTRY_MAGIC, self.number, self.ticket, self.head_bytes, self.spans, self.nbytes, self.head_sum,
                  self.table_sum)
        return _worded(_ENTRY.pack(*fields))

    @classmethod
    def read(cls, block: bytes, place_bytes: int) -> Self | None:
        """None: no whole entry is there. Raises Torn: there was, and it is damaged."""
        word, magic, number, ticket, head_bytes, spans, size, head_sum, table_sum = _ENTRY.unpack_from(block)
        if not word:
            return None
        if word != sum_of_block(block):
            raise Torn(f"its first block, of what was iteration {number}, is damaged: the sum differs")
        if magic != ENTRY_MAGIC or size > place_bytes or number < 0 or ticket >> 62:
            raise Torn("its first block contradicts itself")
        one = cls(word, number, ticket, head_bytes, spans, size, head_sum, table_sum)
        if one.first_span > size:
            raise Torn("its first block contradicts itself")
        return one

    @property
    def table_at(self) -> int:
        """First byte, from the beginning of the place, of a table of [bytes, sum] of each span."""
        return BLOCK + aligned(self.head_bytes, LINE)

    @property
    def first_span(self) -> int:
        return self.table_at + aligned(16 * self.spans, LINE)
