"""Versions in a store, as a node offers them: after those in its memory and on its disk (versions/holdings.py).

    shelf = StoreShelf(url, lambda: open_store(url, options), steps=StoredSteps(...))
    shelf.having(step)                  also what can be made of deltas; the first question for one makes it (made.py)

What the store lists is not believed. A version is offered when its manifest was read, the manifest's own hash is right,
and its objects have the sizes that it says; the bytes are held against its hashes by whoever takes them. What the
pointers name is looked for even where it is not listed. A folder is written once, so a manifest that was read is kept.

Nothing here waits for a store longer than LOOK_SECONDS and READ_SECONDS: calls are made on threads of their own, which
are left behind when they hang, at most MOST_STUCK at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowcheck.ask.offer import spans
from flowcheck.checkpoint.objects import Missing, Objects, StoreError
from flowcheck.checkpoint.store import Entry, Lane, read_entry, user_object
from flowcheck.checkpoint.users import users_of
from flowcheck.control.user_state import USER_BYTES
from flowcheck.errors import UserError
from flowcheck.node.store.made import StoredSteps, offer_of
from flowcheck.node.versions.held import Gone, Held, Holding, OnDisk
from flowcheck.node.versions.holdings import Pressed, Shelf
from flowcheck.node.versions.journal.making import Making

__all__ = ["StoreShelf"]

LOOK_SECONDS = 3.0  # less than the API gives a tier
READ_SECONDS = 8.0  # less than a reader waits for a byte
MOST_STUCK = 4
BLOCK = 16 << 20  # that is read at once: each request takes its time


class StoreShelf(Shelf):
    """open: called once, on a thread. Everything below the URL is offered, whichever node wrote it."""

    def __init__(
        self, url: str, open: Callable[[], Objects], now: Callable[[], float] = time.monotonic, needs: int = 0,
        steps: StoredSteps | None = None,
    ) -> None:
        super().__init__(now, needs)
        self._url, self._open, self._steps = url, open, steps
        self._objects: Objects | None = None
        self._entries: dict[str, Entry] = {}
        self._known: list[Holding] = []
        self._error: Exception | None = None
        self._looking: threading.Thread | None = None
        self._stuck: list[threading.Thread] = []

    def look(self) -> list[Holding]:
        """As of now. Raises StoreError: the store refuses, or has not answered within LOOK_SECONDS."""
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._list, name="flowcheck store list", daemon=True)
            self._looking.start()
        self._looking.join(LOOK_SECONDS)
        if self._looking.is_alive():
            raise StoreError(f"no answer within {LOOK_SECONDS:g} s", where=self._url)
        if self._error is not None:
            raise StoreError(str(self._error).split("\n", 1)[0], where=self._url) from None
        return [*self._known, *(self._steps.made if self._steps is not None else ())]

    def known(self) -> list[Holding]:
        steps = self._steps
        return [*(self._known or self.look()), *([*steps.made, *steps.wanted] if steps is not None else ())]

    def having(self, step: int | None) -> list[Holding]:
        found = self.look()
        if self._steps is None or step is None:
            return found
        there = [one.offer for one in found if one.offer.step == step]
        return [*found, *self._steps.makeable(step, {(one.run_id, one.epoch, one.shard) for one in there})]

    def ranges(self) -> list[dict[str, Any]]:
        return self._steps.ranges() if self._steps is not None else []

    def _pin(self, holding: Holding) -> Held:
        if holding.inode:
            return OnDisk(holding, self._now())
        if self._steps is not None and self._steps.is_wanted(holding):
            if any(isinstance(one, Making) and one.busy for one in self._held.values()):
                raise Pressed("another step is being made again: one at a time", where=f"step {holding.offer.step}")
            return self._steps.begin(holding, self._now, {one.path for one in self._held.values()})
        entry = self._entries.get(str(holding.path))
        if entry is None or self._objects is None:
            raise Gone("is there no more", where=f"step {holding.offer.step}, {holding.offer.tier}")
        return _InStore(holding, self._objects, entry, self._patiently, self._now())

    # -- threads that may hang --

    def _list(self) -> None:
        try:
            if self._objects is None:
                self._objects = self._open()
            found = list(self._found(self._objects))
            if self._steps is not None:
                self._steps.look(self._objects, found)
            self._known = sorted(
                (Holding(offer_of(self._url, one, one.version.step, one.version.status,
                                  spans(users_of(one.document))), Path(one.folder), 0, one.version.attached)
                 for one in found),
                key=lambda one: (-one.offer.epoch, -one.offer.step, str(one.path)),
            )
            self._entries = {one.folder: one for one in found}
            self._error = None
        except Exception as error:  # of whatever library it is
            self._error = error

    def _found(self, objects: Objects) -> Iterator[Entry]:
        """Raises StoreError: it refuses. A version that cannot be read does not hide others of its run and group; where
        it has no other, nobody may take that run for one without versions."""
        refused: list[StoreError] = []
        for node in objects.children(""):
            for group in objects.children(node):
                for run in objects.children(f"{node}/{group}"):
                    lane = Lane(objects, f"{node}/{group}/{run}")
                    read, odd = 0, list[StoreError]()
                    folders = set(lane.folders())
                    if latest := lane.latest():
                        folders.add(latest)  # also where it is not listed
                    for folder in sorted(folders):
                        try:
                            if folder not in self._entries:
                                self._entries[folder] = read_entry(objects, folder)
                            yield self._entries[folder]
                            read += 1
                        except (Missing, UserError):
                            continue  # an attempt that was cut, or is under way; or damaged
                        except StoreError as error:
                            odd.append(error)
                    refused += odd if not read else []
        if refused:
            raise refused[0]

    def _patiently(self, work: Callable[[], bytes]) -> bytes:
        """The answer. Raises StoreError, also where it does not come in time."""
        self._stuck = [one for one in self._stuck if one.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            raise StoreError("does not answer", where=self._url)
        out: list[bytes | StoreError] = []

        def call() -> None:
            try:
                out.append(work())
            except StoreError as error:
                out.append(error)
            except Exception as error:
                out.append(StoreError(f"{type(error).__name__}: {error}", where=self._url))

        thread = threading.Thread(target=call, name="flowcheck store read", daemon=True)
        thread.start()
        thread.join(READ_SECONDS)
        if not out:
            self._stuck.append(thread)
            raise StoreError(f"no answer within {READ_SECONDS:g} s", where=self._url)
        if isinstance(out[0], StoreError):
            raise out[0]
        return out[0]


class _InStore(Held):
    def __init__(
        self, holding: Holding, objects: Objects, entry: Entry, patiently: Callable[[Callable[[], bytes]], bytes],
        now: float,
    ) -> None:
        super().__init__(holding, now)
        self._objects, self._entry, self._patiently = objects, entry, patiently
        self._block: tuple[str, int, bytes] = "", 0, b""

    def is_gone(self) -> bool:
        """Reading says it."""
        return False

    def manifest(self) -> bytes:
        return self._entry.text

    def size(self, file: str) -> int:
        return int(self._entry.document["files"][file]["bytes"])

    def read(self, file: str, first: int, count: int) -> bytes:
        count = min(count, self.size(file) - first)
        held, start, data = self._block
        if held != file or not start <= first or first + count > start + len(data):
            objects, folder, most = self._objects, self._entry.folder, min(BLOCK, self.size(file) - first)
            data = self._patiently(lambda: objects.read(f"{folder}/{file}", first, max(most, count)))
            start, self._block = first, (file, first, data)
        return data[first - start : first - start + count]

    def user(self, rank: int) -> bytes:
        objects, name = self._objects, user_object(self._entry.folder, rank)
        try:
            return self._patiently(lambda: objects.read(name, 0, min(USER_BYTES, objects.size(name))))
        except Missing:
            raise Gone("has no such state of a rank", where=f"step {self.offer.step}, {self.offer.tier}") from None

    def close(self) -> None:
        self._block = "", 0, b""
