"""What a node has to recover from: versions in its replica files, and those that it wrote to disk.

    shelf = MemoryShelf(directory, node) or DiskShelf(directory)
    for holding in shelf.look(): holding.offer           what there is at this moment
    held = shelf.hold(id)                                pinned; the same again while it is
    held.begin()                                         the manifest, as a Future: hashed once, by all cores, and kept
    held.manifest()                                      the same, waited for
    held.size(file), held.read(file, first, count)       a safetensors file, whole or in ranges
    held.user(rank)                                      what a rank gave of itself
    shelf.expire()                                       again and again: lets go of what nobody reads any more
    shelf.withheld(offer)                                why it cannot be pinned although it is there: shadow.py

It reads the files that the node's process writes and nothing else, so it may live in another process and outlive that
one. A version in memory is pinned from the first question about it on, because its slot is needed again. A pin can hold
up updates (never the capture), so there are at most as many as leave a replica two slots, each ends HOLD_SECONDS after
the last byte that was read, and none lasts longer than its bytes take at RATE. A replica that its node has removed,
because it found it to be wrong, is served no more, not even its rest.

A shelf and what it holds belong to one thread, but for `manifest`, which takes long and may run in any. Hashing goes on
in threads of its own (hashing.py) until it is done, or until the version is let go.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flowcheck.checkpoint.directory import MANIFEST, read_step_manifest
from flowcheck.checkpoint.users import file_of, read_user, users_of
from flowcheck.control.ask import DISK, MEMORY, Offer, spans
from flowcheck.control.tensors import TensorSpec, header, memory
from flowcheck.control.version import MODEL, OPTIMIZER, Digest, Version
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.version_status import DIVERGED, VersionStatus
from flowcheck.node.versions.divergences import Notices
from flowcheck.node.versions.hashing import Hashers, Work
from flowcheck.node.versions.shadow import withheld
from flowcheck.node.versions.user_states import ranks_in, user_folder, user_in
from updater.errors import UpdaterError
from updater.reader import PinnedVersion, Reader
from updater.slot import Version as Tensors

__all__ = ["DiskShelf", "Gone", "Held", "Holding", "MemoryShelf", "Pressed", "Shelf", "Withheld", "files_of",
           "id_of", "inode_of"]

HOLD_SECONDS = 20.0
RATE = 4e6  # bytes per second that whoever reads a pinned version must have
GROUP = r"[A-Za-z0-9_.]{0,32}"
Vouch = Callable[[str, int], str]  # of tokens.Access
KEPT = 16  # manifests of versions in memory


class Gone(FlowcheckError):
    """There is no such version, or no longer."""

    exit_code = 3


class Withheld(FlowcheckError):
    """There is such a version, and it is not offered yet."""

    exit_code = 3


class Pressed(FlowcheckError):
    """As many versions are being read as may be."""

    exit_code = 3


@dataclass(frozen=True)
class Holding:
    """A version that could be held. path: the replica's file, or the step's directory. inode: the file's."""

    offer: Offer
    path: Path
    inode: int
    attached: str = ""  # as of Version


class Held:
    """A version that stays as it is until it is let go."""

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


class _InMemory(Held):
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


class _OnDisk(Held):
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


class Shelf:
    """Versions of one tier. now: a clock. needs: checksums that must have matched before one of them is offered. piece:
    bytes that are read at once, 0: as many as usual."""

    piece = 0
    notices: Notices | None = None  # of versions that have diverged

    def __init__(self, now: Callable[[], float] = time.monotonic, needs: int = 0) -> None:
        self._now, self._needs = now, needs
        self._held: dict[str, Held] = {}

    def look(self) -> list[Holding]:
        """Everything that there is, newest first."""
        raise NotImplementedError

    def known(self) -> list[Holding]:
        """Among which one that is asked for is looked for."""
        return self.look()

    def hold(self, id: str) -> Held:
        """Pin a version, or touch one that is held. Raises Gone, Pressed, Withheld."""
        self.expire()
        if id in self._held and (why := self.withheld(self._held[id].offer)):  # it has been found meanwhile
            self._held.pop(id).close()
            raise Withheld(why)
        if id not in self._held:
            holding = next((one for one in self.known() if one.offer.id == id), None)
            if holding is None:
                raise Gone("there is no such version, or no longer", where=id[:64])
            if why := self.withheld(holding.offer):
                raise Withheld(why)
            self._held[id] = self._pin(holding)
        held = self._held[id]
        held.touch(self._now())
        held.asked += 1
        return held

    def release(self, held: Held) -> None:
        """Let go of what was held for one question, if nobody has asked anything else of it."""
        if held.asked == 1 and not held.busy and self._held.get(held.offer.id) is held:
            held.close()
            del self._held[held.offer.id]
        held.asked -= 1

    def withheld(self, offer: Offer) -> str:
        """Why it is not offered, "": it is."""
        return withheld(self.judged(offer), self._needs)

    def judged(self, offer: Offer) -> Offer:
        """With what has been found of it since it was made."""
        if self.notices is None or not self.notices.cover(
                offer.run_id, offer.epoch, offer.shard, offer.step, offer.status):
            return offer
        return replace(offer, status=DIVERGED)

    def _pin(self, holding: Holding) -> Held:
        raise NotImplementedError

    def expire(self) -> None:
        """Let go of what is due."""
        now = self._now()
        for id, held in list(self._held.items()):
            if held.is_due(now) or held.is_gone():
                held.close()
                del self._held[id]

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        self._held = {}


class MemoryShelf(Shelf):
    """directory: `replica.directory` of the node of this name. reserved: slots that others may pin beside it. vouch:
    gives Version.attached."""

    piece = 16 << 20  # which is no copy; each costs a turn of two threads

    def __init__(
        self, directory: Path, node: str, now: Callable[[], float] = time.monotonic, reserved: int = 0, needs: int = 0,
        vouch: Vouch = lambda run_id, epoch: "",
    ) -> None:
        super().__init__(now, needs)
        self.vouch = vouch
        self._directory, self._reserved = directory, reserved
        self._name = re.compile(rf"flowcheck-{re.escape(node)}-({GROUP})-[0-9]+\.replica")
        self._readers: dict[tuple[Path, int], Reader] = {}
        self._kept: dict[str, bytes] = {}
        self._hashers = Hashers()

    def look(self) -> list[Holding]:
        there: dict[tuple[Path, int], str] = {}
        for path in self._directory.glob("*.replica"):
            if (named := self._name.fullmatch(path.name)) and (inode := inode_of(path)):
                there[path, inode] = named[1]
        for key in self._readers.keys() - there.keys():
            self._readers.pop(key).close()
        found = _sorted(one for key, shard in there.items() for one in self._slots(key, shard))
        for id in self._kept.keys() - self._held.keys() - {one.offer.id for one in found}:
            self._kept.pop(id, None)  # its slot has another version: nobody can ask for this one again
        return found

    def _slots(self, key: tuple[Path, int], shard: str) -> Iterator[Holding]:
        try:
            reader = self._readers[key] = self._readers.get(key) or Reader(key[0], mine=True)
        except (UpdaterError, OSError):
            return  # torn, of another format, or gone meanwhile
        heard, times, matches, now = reader.heard, reader.times, reader.matches, time.time()
        for step, status in reader.statuses.items():
            steps, at = None if heard is None else max(heard - step, 0), times.get(step)
            yield Holding(Offer(
                id_of(MEMORY, *key, step), MEMORY, reader.run_id, reader.epoch, step, shard,
                str(VersionStatus.of(status, step)), reader.nbytes,
                spans(ranks_in(user_folder(key[0], step))), steps, None if at is None else round(max(now - at, 0.0), 3),
                matches.get(step, 0), reader.start,
            ), *key)

    def _pin(self, holding: Holding) -> Held:
        reader = self._readers[holding.path, holding.inode]
        pinned = [held for held in self._held.values() if held.path == holding.path]
        if len(pinned) >= max(1, reader.slots - 2 - self._reserved):
            steps = ", ".join(str(held.offer.step) for held in pinned)
            raise Pressed(f"step {steps} is being read, and no slot is left for another", where=holding.path.name)
        return _InMemory(holding, reader, self._kept, self._hashers, self._now(), self.vouch)

    def expire(self) -> None:
        """Also of replicas that were removed: their memory is free when nobody maps them any more."""
        super().expire()
        for key in [key for key in self._readers if inode_of(key[0]) != key[1]]:
            self._readers.pop(key).close()

    def close(self) -> None:
        super().close()
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._hashers.close()


class DiskShelf(Shelf):
    """directory: `output.directory` of the node: DIR/RUN/epoch-E/step-N, with the group's folder before the run's if
    it has a name. tier: or COPY: copies of other nodes' versions, with the folder of their source before the run's."""

    def __init__(
        self, directory: Path, now: Callable[[], float] = time.monotonic, tier: str = DISK, needs: int = 0
    ) -> None:
        super().__init__(now, needs)
        self._directory, self._tier = directory, tier
        # By what changes when its manifest does: its offer, and what it says of run and epoch.
        self._steps: dict[tuple[Path, int, int], tuple[Offer, str] | None] = {}

    def look(self) -> list[Holding]:
        seen: dict[tuple[Path, int, int], tuple[Offer, str] | None] = {}
        for depth in ("*/epoch-*/step-*", "*/*/epoch-*/step-*"):
            for path in self._directory.glob(depth):
                if inode := inode_of(path):
                    key = path, inode, inode_of(path / MANIFEST)
                    seen[key] = self._steps[key] if key in self._steps else _offered(path, inode, self._tier)
        self._steps = seen
        return _sorted(Holding(one[0], *key[:2], one[1]) for key, one in seen.items() if one is not None)

    def _pin(self, holding: Holding) -> Held:
        return _OnDisk(holding, self._now())


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


def _offered(path: Path, inode: int, tier: str) -> tuple[Offer, str] | None:
    """What a step's directory says of itself, and what is said in it of its run and epoch; None: it cannot be used."""
    try:
        document: dict[str, Any] = read_step_manifest(path)
        version = Version.of(document, str(path))
    except UserError:
        return None
    return Offer(id_of(tier, path, inode, version.step), tier, version.run_id, version.epoch, version.step,
                 version.shard, version.status, version.nbytes, spans(users_of(document)), matches=version.matches,
                 start=version.start), version.attached


def _sorted(found: Iterable[Holding]) -> list[Holding]:
    return sorted(found, key=lambda one: (-one.offer.epoch, -one.offer.step, one.path))


def inode_of(path: Path) -> int:
    """0: it is not there."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def id_of(tier: str, path: Path, inode: int, step: int) -> str:
    """A name from which no path can be made. Its first letter is the tier's."""
    return tier[0] + hashlib.sha256(f"{path} {inode} {step}".encode()).hexdigest()[:31]
