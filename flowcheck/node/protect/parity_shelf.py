"""What a holder of parity offers: lost shards, made again from its stream and those of others; and its streams.

    shelf = ParityShelf(directory, others, most)      others(): the other members of its group, as they are asked now
    streams = StreamShelf(directory)                  its own streams of parity, for those others
    Placed(path, "holder1")()                         where those are, if a registry's root decides it

A shard is offered as long as k other streams of its step are there: each look asks the members what they have
themselves (`/v1/pieces`), and so never about what they would have to ask for. The first question for its bytes begins
to make it (checkpoint/coding/rebuilding.py), in this process's memory, and it is let go like anything that nobody
reads. A member that fails, or of which a byte is wrong, is left for another one. What is sent was hashed before, but
for tensors that take longer to come than a reader waits: who reads these checks them, as he checks all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import PARITY, Offer, spans
from flowcheck.ask.receiving import AskError
from flowcheck.ask.sources import addresses
from flowcheck.checkpoint.coding.parity import Protected
from flowcheck.checkpoint.coding.rebuilding import STREAM, Pieces, Place, Rebuilding, ask_pieces, places_of
from flowcheck.checkpoint.users import file_of, read_user
from flowcheck.control.tensors import header
from flowcheck.control.version import MODEL, OPTIMIZER
from flowcheck.errors import FlowcheckError, UserError, size_text
from flowcheck.node.protect.parity_rounds import kept_in
from flowcheck.node.protect.placement import Decided
from flowcheck.node.versions.held import Gone, Held, Holding, inode_of
from flowcheck.node.versions.holdings import Pressed, Shelf, id_of

__all__ = ["OTHERS_SECONDS", "ROW", "ParityShelf", "Placed", "StreamShelf"]

ROW = "row"  # of streams of parity: their ids begin with its letter
OTHERS_SECONDS = 3.0  # that another member may be silent: less than the API gives a tier, and than a reader waits
MOST_OTHERS = 32
FRESH_SECONDS = 1.0  # that an answer of the others is good for
READ_SECONDS = 8.0  # less than a reader waits for a byte
BAD_SECONDS = 30.0  # that a member is not asked again for a stream that was wrong, or did not come


@dataclass(frozen=True)
class _Lost:
    kept: Protected
    number: int
    places: dict[int, list[Place]]


class ParityShelf(Shelf):
    """directory: of Rounds. others: nodes that are silent for OTHERS_SECONDS at most. most: bytes of all that is made
    at once."""

    def __init__(
        self, directory: Path, others: Callable[[], Sequence[NodeClient]], most: int,
        now: Callable[[], float] = time.monotonic, needs: int = 0,
    ) -> None:
        super().__init__(now, needs)
        self._directory, self._others, self._most = directory, others, most
        self._pool = ThreadPoolExecutor(MOST_OTHERS, "flowcheck parity")
        self._asking: dict[str, Future[Pieces | None]] = {}  # by member; one that trickles is not asked twice
        self._asked: tuple[float, list[Pieces]] | None = None
        self._bad: dict[tuple[str, int, str], tuple[float, str]] = {}  # member, stream and mark: until when, and why
        self._offered: dict[str, _Lost] = {}

    def look(self) -> list[Holding]:
        self._offered = {}
        found = []
        kept = kept_in(self._directory)
        for one in kept:
            places = self.good(one, places_of(one, self._ask()))
            inode = inode_of(one.path)
            for number, version in enumerate(one.versions):
                if inode and len(places.keys() - {number}) >= one.code.data:
                    id = id_of(PARITY, one.path, inode, number)
                    self._offered[id] = _Lost(one, number, places)
                    found.append(Holding(Offer(
                        id, PARITY, version.run_id, version.epoch, version.step, version.shard, version.status,
                        version.nbytes, spans(one.users[number]), matches=version.matches, start=version.start,
                    ), one.path, inode, version.attached))
        return sorted(found, key=lambda one: (-one.offer.epoch, -one.offer.step, one.offer.shard))

    def _ask(self) -> list[Pieces]:
        """What the others have, those that answer in time."""
        if self._asked is None or self._now() - self._asked[0] > FRESH_SECONDS:
            for node in self._others():
                if node.name not in self._asking:
                    self._asking[node.name] = self._pool.submit(_pieces, node)
            done, _ = wait(self._asking.values(), OTHERS_SECONDS)
            answers = {name: one.result() for name, one in self._asking.items() if one in done}
            self._asking = {name: one for name, one in self._asking.items() if one not in done}
            self._asked = self._now(), [one for _, one in sorted(answers.items()) if one is not None]
        return self._asked[1]

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def good(self, kept: Protected, places: dict[int, list[Place]]) -> dict[int, list[Place]]:
        """Those that have not failed lately."""
        self._bad = {key: one for key, one in self._bad.items() if one[0] > self._now()}
        good = {number: [one for one in some if (one.name, number, kept.mark) not in self._bad]
                for number, some in places.items()}
        return {number: some for number, some in good.items() if some}

    def fail(self, made: Rebuilding, mark: str, why: str) -> None:
        """Whoever failed is asked for that no more, for a while; all of them, where nobody knows who it was."""
        for place in made.places if made.failed is None else [made.failed]:
            self._bad[place.name, place.number, mark] = self._now() + BAD_SECONDS, why

    def hold(self, id: str) -> Held:
        try:
            return super().hold(id)
        except Gone as error:
            why = "; ".join(sorted({one[1] for one in self._bad.values()}))
            raise Gone(f"{error.what}{f': {why}' if why else ''}", where=error.where) from None

    def _pin(self, holding: Holding) -> Held:
        taken = sum(held.offer.nbytes for held in self._held.values())
        if taken and taken + holding.offer.nbytes > self._most:
            raise Pressed(f"{size_text(taken, binary=True)} are being made again", where="protect.memory_mb")
        return _Made(holding, self._offered[holding.offer.id], self)


def _pieces(node: NodeClient) -> Pieces | None:
    try:
        return ask_pieces(node)
    except AskError:
        return None


class _Made(Held):
    def __init__(self, holding: Holding, lost: _Lost, shelf: ParityShelf) -> None:
        super().__init__(holding, shelf._now())
        self._lost, self._shelf, self._over = lost, shelf, False
        version = lost.kept.versions[lost.number]
        self._version, self._heads, at = version, dict[str, tuple[bytes, int]](), 0
        for file in (MODEL, OPTIMIZER):
            tensors = version.files[file]
            head, _ = header({name: torch.empty(one.spec.shape, dtype=getattr(torch, one.spec.dtype), device="meta")
                              for name, one in tensors.items()})
            self._heads[file] = head, at
            at += sum(one.spec.nbytes for one in tensors.values())
        self.made: Rebuilding | None = None

    def is_gone(self) -> bool:
        """Also where it cannot be made any more: whoever asks again hears why."""
        return super().is_gone() or self._over

    def manifest(self) -> bytes:
        return json.dumps(self._version.document()).encode()

    def size(self, file: str) -> int:
        if file not in self._heads:
            raise Gone("has no such file", where=file[:64])
        return len(self._heads[file][0]) + sum(one.spec.nbytes for one in self._version.files[file].values())

    def read(self, file: str, first: int, count: int) -> bytes:
        return b"".join(self.views(file, first, count))

    def views(self, file: str, first: int, count: int) -> list[memoryview]:
        """Waits for what is not made yet, READ_SECONDS at most."""
        head, at = self._heads[file]
        after = min(first + count, self.size(file))
        out = [memoryview(head)[first:after]] if first < len(head) else []
        begin, end = at + max(0, first - len(head)), at + after - len(head)
        if end > begin:
            out.append(self._made(end).view(begin, end))
        return out

    def _made(self, end: int) -> Rebuilding:
        """With so many bytes. A source that fails is left for another one, from the beginning on: what was given is
        the same again."""
        kept, number, until = self._lost.kept, self._lost.number, time.monotonic() + READ_SECONDS
        while True:
            made = self.made
            if made is None:
                places = self._shelf.good(kept, self._lost.places)
                if len(places.keys() - {number}) < kept.code.data:
                    self._over = True
                    raise Gone("too few of the other streams are good", where=f"step {self.offer.step}, {PARITY}")
                made = self.made = Rebuilding(kept, number, places)
            try:
                if made.wait(end, until - time.monotonic()):
                    return made
            except FlowcheckError as error:
                self._shelf.fail(made, kept.mark, error.message())
                self.made = None
                continue
            raise Gone("is made again too slowly", where=f"step {self.offer.step}, {PARITY}")

    def user(self, rank: int) -> bytes:
        data = self._user(lambda: read_user(file_of(self._lost.kept.of_shard(self._lost.number), rank)))
        self.check()
        return data

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
            self.made = None


class Placed:
    """path: of the last decision, which the process that sits in the registry leaves there (registry_member.py). name:
    of this node. One thread."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._changed, self._others = 0, list[tuple[str, int]]()

    def __call__(self) -> list[tuple[str, int]]:
        try:
            if (changed := self._path.stat().st_mtime_ns) != self._changed:
                found = Decided.of(self._path.read_text()).grouped(self._name)
                self._changed, self._others = changed, addresses(found) if found else []
        except (OSError, UnicodeDecodeError, UserError):
            return []  # nothing was decided, or it was meant for nobody
        return self._others


# -- for other members -------------------------------------------------------------------------------------


class StreamShelf(Shelf):
    """directory: of Rounds."""

    def __init__(self, directory: Path, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self._directory = directory

    def streams(self) -> list[dict[str, Any]]:
        """As JSON: control of rebuilding.Stream."""
        return [{"id": id, "number": number, "mark": kept.mark, "nbytes": kept.length, "sha256": kept.sums[number]}
                for id, number, kept in self._each()]

    def _each(self) -> Iterator[tuple[str, int, Protected]]:
        for kept in reversed(kept_in(self._directory)):
            for number in sorted(kept.sums):
                if inode := inode_of(kept.stream(number)):
                    yield id_of(ROW, kept.stream(number), inode, kept.step), number, kept

    def look(self) -> list[Holding]:
        return [Holding(Offer(id, ROW, kept.versions[0].run_id, *kept.key, "", "unverified", kept.length),
                        kept.stream(number), inode_of(kept.stream(number))) for id, number, kept in self._each()]

    def _pin(self, holding: Holding) -> Held:
        return _Stream(holding, self._now())


class _Stream(Held):
    def __init__(self, holding: Holding, now: float) -> None:
        super().__init__(holding, now)
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Gone(f"cannot be read: {error.strerror}", where=str(self.path)) from None

    def size(self, file: str) -> int:
        if file != STREAM:
            raise Gone("has no such file", where=file[:64])
        return self.offer.nbytes

    def read(self, file: str, first: int, count: int) -> bytes:
        try:
            return os.pread(self._file, min(count, self.size(file) - first), first)
        except OSError as error:
            raise Gone(f"cannot be read: {error.strerror}", where=str(self.path)) from None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
