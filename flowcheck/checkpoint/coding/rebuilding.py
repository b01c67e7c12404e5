"""A lost shard made again from k other streams, and read while it is made.

    pieces = ask_pieces(node)                     what a node has itself: whole versions, and streams of parity
    places = places_of(kept, asked)               of each stream of one parity: who has it
    made = Rebuilding(kept, lost, places)         a thread decodes into memory
    made.wait(upto, seconds); made.view(first, after); made.close()

Bytes of tensors whose hash is the manifest's are given, and of one that is not whole in time those that are there,
until it proves wrong. A source that fails ends the attempt, and `failed` says which one it was, so that the next
attempt takes another. Any thread reads.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Self

from flowcheck.ask.client import NodeClient, order_of
from flowcheck.ask.offer import MEMORY, Offer
from flowcheck.ask.receiving import SECONDS, AskError
from flowcheck.checkpoint.coding.parity import OTHER, Padded, Protected, bytes_of, decode, pieces_in
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.errors import EnvironmentProblem, FlowcheckError

__all__ = ["PIECES", "STREAM", "Pieces", "Place", "Rebuilding", "Stream", "ask_pieces", "places_of"]

PIECES, STREAM = "/v1/pieces", "stream.bin"


@dataclass(frozen=True)
class Stream:
    """A stream of parity that a node says it has. mark: of what it goes together with (Protected.mark)."""

    id: str
    number: int
    mark: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, said: Any, where: str) -> Self:
        """Raises AskError."""
        kinds = {"id": str, "number": int, "mark": str, "nbytes": int, "sha256": str}
        values: dict[str, Any] = {name: said.get(name) if isinstance(said, dict) else None for name in kinds}
        if not all(type(values[name]) is kind for name, kind in kinds.items()):
            raise AskError("lists a stream of parity that is not described", where=where)
        return cls(**values)


@dataclass(frozen=True)
class Pieces:
    """What a node has itself. node: over a connection of its own."""

    node: NodeClient
    offers: tuple[Offer, ...]
    streams: tuple[Stream, ...]


@dataclass(frozen=True)
class Place:
    """Where a stream is: a whole version, or parity; neither: here."""

    number: int
    node: NodeClient | None = None
    offer: Offer | None = None
    stream: Stream | None = None

    @property
    def name(self) -> str:
        return self.node.name if self.node is not None else ""


def ask_pieces(node: NodeClient) -> Pieces:
    """Raises AskError."""
    try:
        said = node.connection.json(PIECES)
        listed: list[Any] = [said.get(name) if isinstance(said, dict) else None for name in ("versions", "streams")]
        if not all(isinstance(one, list) for one in listed):
            raise AskError("does not list its pieces", where=node.name)
        return Pieces(node, tuple(Offer.of(one, node.name) for one in listed[0]),
                      tuple(Stream.of(one, node.name) for one in listed[1]))
    finally:
        node.close()


def places_of(kept: Protected, asked: Sequence[Pieces]) -> dict[int, list[Place]]:
    """Of each stream that somebody has, who; the parity that is here first."""
    places = {number: [Place(number)] for number in kept.sums}
    for pieces in asked:
        for number, one in enumerate(kept.versions):
            for offer in sorted(pieces.offers, key=lambda offer: offer.tier == MEMORY):  # a slot of the node's: last
                if (offer.run_id, offer.epoch, offer.step, offer.shard) == (
                    one.run_id, one.epoch, one.step, one.shard
                ):
                    places.setdefault(number, []).append(Place(number, pieces.node, offer))
        for stream in pieces.streams:
            if stream.mark == kept.mark and kept.code.data <= stream.number < kept.code.data + kept.code.parity:
                places.setdefault(stream.number, []).append(Place(stream.number, pieces.node, stream=stream))
    return places


class _Ended(Exception):
    """Nobody reads it any more."""


class Rebuilding:
    """kept: parity that is here. lost: number of the shard. places: `places_of`, k at least without that of the shard.

    places: those that are read. failed: of these, the one that failed, if that is known. error: why it ended, if it did
    before its end."""

    def __init__(self, kept: Protected, lost: int, places: Mapping[int, Sequence[Place]]) -> None:
        self.version = kept.versions[lost]
        self.failed: Place | None = None
        self.error: FlowcheckError | None = None
        self._kept, self._lost = kept, lost
        here = [number for number in sorted(places) if number != lost and places[number][0].node is None]
        others = [number for number in sorted(places) if number != lost and number not in here]
        self.places = [places[number][0] for number in [*here, *others][: kept.code.data]]
        self._memory = mmap.mmap(-1, max(1, self.version.nbytes))
        self._ready = self._written = self._early = 0
        self._tensors = deque(_tensors(self.version))
        self._wrong: FlowcheckError | None = None  # of a tensor: a source that lied says so at its own next hash
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="flowcheck rebuild", daemon=True)
        self._thread.start()

    def wait(self, upto: int, seconds: float) -> bool:
        """Whether so many bytes are there, soon. Of a tensor that is not whole within that time they are taken as they
        are. Raises FlowcheckError: they will not be there."""

        def there() -> bool:
            early = self._wrong is None and self._early >= upto and self._written >= upto
            return self._ready >= upto or early

        with self._changed:
            self._changed.wait_for(lambda: there() or self.error is not None, max(0.0, seconds))
            if not there() and self.error is not None:
                raise self.error
            if not there() and self._written >= upto and self._wrong is None:
                self._early = next((end for end, _, _ in self._tensors if end >= upto), upto)
            return there()

    def view(self, first: int, after: int) -> memoryview:
        """Of what is ready. Good as long as somebody has it, also when this is closed."""
        return memoryview(self._memory)[first:after]

    def close(self) -> None:
        """Nobody wants it any more; does not wait."""
        self._ended = True

    # -- its thread --

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                streams = {place.number: Padded(self._named(place, stack)) for place in self.places}
                decode(self._kept, self._lost, streams, self._take)
            if self._wrong is not None:
                raise self._wrong
        except _Ended:
            pass
        except Exception as error:  # whatever it is, readers are told
            with self._changed:
                self.error = error if isinstance(error, FlowcheckError) else EnvironmentProblem(
                    f"{type(error).__name__}: {error}", where="parity", remedy=OTHER)
                self._changed.notify_all()

    def _named(self, place: Place, stack: ExitStack) -> Iterator[memoryview]:
        try:
            yield from self._pieces(place, stack)
        except FlowcheckError:
            self.failed = self.failed or place
            raise

    def _pieces(self, place: Place, stack: ExitStack) -> Iterator[memoryview]:
        kept, number = self._kept, place.number
        if place.node is None:
            with kept.stream(number).open("rb") as file:
                yield from _hashed(pieces_in(file), kept.sums[number], f"stream {number}, here")
            return
        node = stack.enter_context(closing(place.node.again(SECONDS)))
        if place.stream is not None:
            where = f"{node.name}, stream {number}"
            pieces = node.raw(f"{PIECES}/{place.stream.id}/{STREAM}", kept.length, where)
            yield from _hashed(pieces, place.stream.sha256, where)
            return
        assert place.offer is not None
        version = node.version(place.offer)
        if version.files != kept.versions[number].files:
            raise AskError("has other bytes of that step than parity is of", where=node.name)
        yield from bytes_of(node, place.offer, version)

    def _take(self, piece: memoryview) -> None:
        if self._ended:
            raise _Ended
        piece = piece[: self.version.nbytes - self._written]  # zeros follow, if another shard is longer
        self._memory[self._written : self._written + len(piece)] = piece
        with self._changed:
            self._written += len(piece)
            self._changed.notify_all()
        while self._wrong is None and self._tensors and self._tensors[0][0] <= self._written:
            end, name, sha256 = self._tensors[0]
            if hashlib.sha256(self.view(self._ready, end)).hexdigest() != sha256:
                self._wrong = EnvironmentProblem(
                    f"tensor {name!r} of shard {self.version.shard!r} does not come out as its manifest says (SHA-256"
                    " differs)", where=", ".join(place.name or "here" for place in self.places), remedy=OTHER,
                )
                return
            with self._changed:
                self._tensors.popleft()
                self._ready = end
                self._changed.notify_all()


def _tensors(version: Version) -> Iterator[tuple[int, str, str]]:
    """Where each tensor ends in a shard's stream, its name and its hash."""
    end = 0
    for file in (MODEL, OPTIMIZER):
        for name in order_of(version, file):
            digest = version.files[file][name]
            end += digest.spec.nbytes
            yield end, name, digest.sha256


def _hashed(pieces: Iterator[memoryview], sha256: str, where: str) -> Iterator[memoryview]:
    """Raises EnvironmentProblem after the last one, where the hash of all is another."""
    sums = hashlib.sha256()
    for piece in pieces:
        sums.update(piece)
        yield piece
    if sums.hexdigest() != sha256:
        raise EnvironmentProblem("has other bytes than were written (SHA-256 differs)", where=where, remedy=OTHER)
