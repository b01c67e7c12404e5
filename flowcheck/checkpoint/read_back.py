"""Objects of a store that are read back as soon as they are written: nothing that a store says is believed.

    sure = ReadBack(objects, moving)
    sure.put(name, pieces)                  and then
    sure.verify(name, {"bytes", "sha256"})  raises StoreError: something else is there
    sure.replace(name, text)                a small one, both at once

moving: called whenever bytes have moved; it may raise, which ends what is under way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flowcheck.checkpoint.objects import Objects, StoreError
from flowcheck.errors import UserError

__all__ = ["CHUNK", "ReadBack", "hashed", "small"]

CHUNK = 8 << 20


class ReadBack:
    def __init__(self, objects: Objects, moving: Callable[[], None]) -> None:
        self._objects, self._moving = objects, moving

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        def watched() -> Iterator[bytes | memoryview]:
            for piece in pieces:
                yield piece
                self._moving()

        self._objects.put(name, watched())
        self._moving()

    def verify(self, name: str, entry: Mapping[str, Any]) -> None:
        """Raises StoreError: what was written is not there."""
        digest, at = hashlib.sha256(), 0
        for piece in hashed(self._objects, name, entry["bytes"], digest):
            at += len(piece)
            self._moving()
        if at != entry["bytes"] or self._objects.size(name) != at or digest.hexdigest() != entry["sha256"]:
            raise StoreError("has other bytes than those written, when it was read back", where=self._at(name),
                             remedy="look after the store: it was not finished, and nothing points to it")

    def replace(self, name: str, text: bytes) -> None:
        self._objects.replace(name, text)
        if self._objects.size(name) != len(text) or self._objects.read(name, 0, len(text)) != text:
            raise StoreError("has other bytes than those written, when it was read back", where=self._at(name),
                             remedy="look after the store")
        self._moving()

    def _at(self, name: str) -> str:
        return f"{self._objects.url.rstrip('/')}/{name}"


def hashed(objects: Objects, name: str, nbytes: int, digest: Any) -> Iterator[bytes]:
    """The bytes of an object, at most so many, which go through a digest of hashlib."""
    at = 0
    while at < nbytes and (piece := objects.read(name, at, min(CHUNK, nbytes - at))):
        digest.update(piece)
        at += len(piece)
        yield piece


def small(objects: Objects, name: str, most: int) -> bytes:
    """All of an object. Raises UserError: it is larger than any of its kind."""
    size = objects.size(name)
    if size > most:
        raise UserError(f"has {size} bytes", where=name)
    return objects.read(name, 0, size)
