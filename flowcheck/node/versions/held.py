"""A version that is held for whoever reads it: it stays as it is until it is let go.

    held.begin()                                         the manifest, as a Future: hashed once, by all cores, and kept
    held.manifest()                                      the same, waited for
    held.size(file), held.read(file, first, count)       a safetensors file, whole or in ranges
    held.user(rank)                                      what a rank gave of itself

In memory its slot is pinned; on disk its files are open. It belongs to its shelf's thread (holdings.py), but for
`begin` and `manifest`, which any may call. Hashing goes on in threads of its own (hashing.py) until it is done, or
until the version is let go.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from flowcheck.ask.offer import Offer
from flowcheck.checkpoint.directory import MANIFEST
from flowcheck.checkpoint.users import file_of, read_user
from flowcheck.control.tensors import TensorSpec, header, memory
from flowcheck.control.version import MODEL, OPTIMIZER, Digest, Version
from flowcheck.errors import FlowcheckError
from flowcheck.node.versions.hashing import Hashers, Work
from flowcheck.node.versions.user_states import user_folder, user_in
from updater.errors import UpdaterError
from updater.reader import PinnedVersion, Reader
from updater.slot import Version as Tensors

__all__ = ["Gone", "Held", "Holding", "InMemory", "OnDisk", "Vouch", "files_of", "inode_of"]

HOLD_SECONDS = 20.0
RATE = 4e6  # bytes per second that whoever reads a pinned version must have
KEPT = 16  # manifests of versions in memory
Vouch = Callable[[str, int], str]  # of tokens.Access


class Gone(FlowcheckError):
    """The version does not exist, or not any more."""

    exit_code = 3


@dataclass(frozen=True)
class Holding:
    """A version that could be held. path: the replica's file, or the step's directory. inode: the file's."""

    offer: Offer
    path: Path
    inode: int
    attached: str = ""  # as of Version


class Held:
    """A version that stays as it is until it is let go. making: it is not there yet, and somebody makes it."""

    making = False

    def __init__(self, holding: Holding, now: float) -> None:
        self.offer, self.path, self._inode = holding.offer, holding.path, holding.inode
        self._began = self._read = now
        self.busy = 0  # 1: it is being hashed
        self.asked = 0  # times, less those that were over at once

    def touch(self, now: float) -> None:
        self._read = now

    def is_due(self, now: float) -> bool:
        """Nobody has read from it for a while, or not fast enough."""
        longest = HOLD_SECONDS + self.offer.nbytes / RATE
        return (now - self._read > HOLD_SECONDS and not self.busy) or now - self._began > longest

    def is_gone(self) -> bool:
        """The file was removed or replaced."""
        return inode_of(self.path) != self._inode

    def check(self) -> None:
        """Raises Gone."""
        if self.is_gone():
            raise Gone("the node has removed it", where=f"step {self.offer.step}, {self.offer.tier}")

    def begin(self) -> Future[bytes]:
        """The manifest, as soon as it is there."""
        coming: Future[bytes] = Future()
        try:
            coming.set_result(self.manifest())
        except FlowcheckError as error:
            coming.set_exception(error)
        return coming

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that are hashed, and of how many, while that is under way."""
        return 0, self.offer.nbytes

    @property
    def under_way(self) -> str:
        """The same in words."""
        hashed, total = self.progress
        return f"its tensors are being hashed: {hashed} of {total} bytes so far"

    def manifest(self) -> bytes:
        """Raises FlowcheckError."""
        raise NotImplementedError

    def size(self, file: str) -> int:
        raise NotImplementedError

    def read(self, file: str, first: int, count: int) -> bytes:
        """Bytes of a file from `first` on, at most `count`. Raises Gone."""
        raise NotImplementedError

    def views(self, file: str, first: int, count: int) -> list[memoryview]:
        """The same bytes where they lie: good until it is let go. Raises Gone."""
        return [memoryview(self.read(file, first, count))]

    def user(self, rank: int) -> bytes:
        """A rank's own state, as it gave it: whoever reads it checks it. Raises Gone."""
        raise NotImplementedError

    def _user(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except OSError:
            raise Gone("has no such state of a rank", where=f"step {self.offer.step}, {self.offer.tier}") from None

    def close(self) -> None:
        """Let it go; may be called twice."""


class InMemory(Held):
    def __init__(
        self, holding: Holding, reader: Reader, kept: dict[str, bytes], hashers: Hashers, now: float, vouch: Vouch
    ) -> None:
        super().__init__(holding, now)
        self._vouch = vouch
        self._reader, self._kept, self._hashers = reader, kept, hashers
        self._stack = ExitStack()
        try:
            self._pinned: PinnedVersion | None = self._stack.enter_context(reader.pinned(holding.offer.step))
        except UpdaterError as error:
            raise Gone(str(error)) from None
        files = files_of(self._pinned)
        self._layouts = {file: _Layout(tensors) for file, tensors in files.items()}
        self._files = files
        self._beginning = threading.Lock()
        self._coming: Future[bytes] | None = None
        self._work: Work | None = None

    def begin(self) -> Future[bytes]:
        """Any thread, and it never waits. Whoever else asks for it gets the same."""
        with self._beginning:
            if (kept := self._kept.get(self.offer.id)) is not None:
                self._coming = Future()
                self._coming.set_result(kept)
            elif self._coming is None:
                coming = self._coming = Future()
                version = self._pinned
                if version is None:
                    coming.set_exception(self._let_go())
                    return coming
                named = [(file, name, tensor) for file, tensors in self._files.items()
                         for name, tensor in tensors.items()]
                self.busy = 1
                self._work = self._hashers.begin([tensor for _, _, tensor in named])
                self._work.sums.add_done_callback(lambda sums: self._hashed(coming, version, named, sums))
            return self._coming

    @property
    def progress(self) -> tuple[int, int]:
        work = self._work  # which may be over at any moment
        return (work.hashed, work.total) if work is not None else super().progress

    def manifest(self) -> bytes:
        """Any thread."""
        return self.begin().result()

    def _hashed(
        self, coming: Future[bytes], version: PinnedVersion, named: Sequence[tuple[str, str, torch.Tensor]],
        sums: Future[list[str]],
    ) -> None:
        """On whichever thread was the last."""
        try:
            text = self._text(version, named, sums.result())
        except BaseException as error:
            self.busy = 0
            coming.set_exception(error.with_traceback(None))  # whose frames would keep the tensors
        else:
            self.busy = 0
            coming.set_result(text)
        finally:
            self._work = None  # whose callback is this: a circle that would keep the replica's memory, however large

    def _text(
        self, version: PinnedVersion, named: Sequence[tuple[str, str, torch.Tensor]], sums: Sequence[str]
    ) -> bytes:
        offer = self.offer
        files: dict[str, dict[str, Digest]] = {MODEL: {}, OPTIMIZER: {}}
        for (file, name, tensor), sha256 in zip(named, sums, strict=True):
            files[file][name] = Digest(TensorSpec.of(tensor), sha256)
        if self._pinned is None:  # the slot may have been written to meanwhile
            raise self._let_go()
        document = Version(
            offer.run_id, offer.epoch, offer.step, offer.shard, version.status, version.unproven, version.optimizer,
            self._reader.rounding, files, version.matches, offer.start, self._vouch(offer.run_id, offer.epoch),
        ).document()
        for id in list(self._kept)[: max(0, len(self._kept) - KEPT + 1)]:
            self._kept.pop(id, None)
        self._kept[offer.id] = text = json.dumps(document).encode()
        return text

    def is_gone(self) -> bool:
        """Also a version alone: it has diverged."""
        return super().is_gone() or (self._pinned is not None and not self._pinned.is_there())

    def _let_go(self) -> Gone:
        return Gone("was let go before it was hashed", where=f"step {self.offer.step}")

    def size(self, file: str) -> int:
        return self._layouts[file].size

    def read(self, file: str, first: int, count: int) -> bytes:
        return b"".join(self.views(file, first, count))

    def views(self, file: str, first: int, count: int) -> list[memoryview]:
        self.check()
        if self._pinned is None:
            raise Gone("was let go: it was not read from for too long, or too slowly", where=f"step {self.offer.step}")
        return self._layouts[file].views(first, count)

    def user(self, rank: int) -> bytes:
        data = self._user(lambda: user_in(user_folder(self.path, self.offer.step), rank))
        self.check()  # another replica may have the name by now
        return data

    def close(self) -> None:
        self._pinned = None
        if (work := self._work) is not None:
            work.end(self._let_go())
        self._layouts, self._files = {}, {}
        self._stack.close()


class OnDisk(Held):
    def __init__(self, holding: Holding, now: float) -> None:
        super().__init__(holding, now)
        self._open: dict[str, int] = {}
        try:
            for file in (MANIFEST, MODEL, OPTIMIZER):
                self._open[file] = os.open(self.path / file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise Gone(f"cannot be read: {error.strerror}", where=str(self.path)) from None

    def is_gone(self) -> bool:
        """Also where its manifest says something else by now: it has diverged."""
        opened = self._open.get(MANIFEST)
        return super().is_gone() or (opened is not None and os.fstat(opened).st_ino != inode_of(self.path / MANIFEST))

    def manifest(self) -> bytes:
        return self.read(MANIFEST, 0, self.size(MANIFEST))

    def size(self, file: str) -> int:
        return os.fstat(self._file(file)).st_size

    def read(self, file: str, first: int, count: int) -> bytes:
        try:
            return os.pread(self._file(file), count, first)
        except OSError as error:
            raise Gone(f"cannot be read: {error.strerror}", where=str(self.path / file)) from None

    def user(self, rank: int) -> bytes:
        data = self._user(lambda: read_user(file_of(self.path, rank)))
        self.check()
        return data

    def _file(self, file: str) -> int:
        if file not in self._open:
            raise Gone("was let go", where=str(self.path))
        return self._open[file]

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open = {}


class _Layout:
    """The bytes of a safetensors file over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        head, order = header(tensors)
        self._parts: list[memoryview] = [memoryview(head), *(memory(tensors[name]) for name in order)]
        self._parts = [part for part in self._parts if len(part)]
        self._begins: list[int] = []
        self.size = 0
        for part in self._parts:
            self._begins.append(self.size)
            self.size += len(part)

    def views(self, first: int, count: int) -> list[memoryview]:
        out: list[memoryview] = []
        at, end = first, min(first + count, self.size)
        while at < end:
            index = bisect_right(self._begins, at) - 1
            begin = at - self._begins[index]
            piece = self._parts[index][begin : begin + end - at]
            out.append(piece)
            at += len(piece)
        return out


def files_of(version: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint directory would have of it."""
    state = {
        f"state.{name}.{key}": tensor for name, values in version.optimizer_state.items()
        for key, tensor in values.items()
    }
    return {MODEL: version.parameters, OPTIMIZER: state}


def inode_of(path: Path) -> int:
    """0: it is not there."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
