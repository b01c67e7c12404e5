"""Asking a node for versions: the client's side of its HTTP API, and the key that opens it.

    node = NodeClient(("10.0.0.2", 7071), reader_key(token))
    offers = node.offers()                           what it has: memory, copies, disk, parity, store, newest first
    node.silent                                      of these, what did not say in time what it has
    node.withheld                                    why it does not offer others that it has
    node.diverged                                    of which versions it has found that they may be wrong
    version = node.version(offers[0])                the manifest; a version in memory stays as it is from here on
    tensors = node.tensors(offers[0], version, MODEL, into={})
    for piece in node.pieces(offers[0], version, MODEL): ...      the same as bytes, a few MiB at a time
    state = node.user(offers[0], rank=3)             what that rank gave of itself

A node hashes a version in memory when its manifest is first asked for, and says how far it is: it is asked again as
long as that grows, and fast enough. Nothing that a node sends is believed: sizes are checked before memory is taken,
every wait has a deadline, and every tensor is hashed while the next ones arrive and held against the manifest, whose
own hash is checked first. A connection that breaks is made again and goes on where it was. AskError says which node,
what of it, and why. Torch and the standard library (http.client). A NodeClient belongs to one
thread; several may be used at once.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from flowcheck.ask.connection import Connection
from flowcheck.ask.offer import LOG, MOST_EPOCHS, OWN, TIERS, Offer
from flowcheck.ask.pace import Pace
from flowcheck.ask.receiving import SECONDS, AskError, Hashing, Received, Stream
from flowcheck.ask.refusals import HashingProgress, UnhashedError
from flowcheck.control.divergence import Divergence
from flowcheck.control.tensors import CHUNK, HEADER_LIMIT, memory, places
from flowcheck.control.user_state import USER_BYTES, UserState
from flowcheck.control.version import Digest, Version
from flowcheck.errors import UserError
from flowcheck.job.version_status import UNVERIFIED, VersionStatus

__all__ = ["MOST_FAILED", "NodeClient", "order_of", "reader_key", "split"]

MOST_FAILED = 3  # versions of a tier that proved bad, until it is asked no more
MOST_WHY = 400  # characters
AGAIN_SECONDS = 0.25  # between two questions for a manifest whose tensors are being hashed


def reader_key(token: bytes) -> str:
    """What a reader shows a node: derived from the token, so that the token itself, which lets trainers speak, never
    travels."""
    return hmac.new(token, b"flowcheck reader 1", hashlib.sha256).hexdigest()


def order_of(version: Version, file: str) -> list[str]:
    """The order in which a safetensors file of ours has its tensors: the widest elements first."""
    tensors = version.files[file]
    return sorted(tensors, key=lambda name: -getattr(torch, tensors[name].spec.dtype).itemsize)


class NodeClient:
    """address: host and port of a node's API. key: of `reader_key`, or one that is proven (proof.py). seconds: that
    it may be silent. tls: None: not encrypted. pace: at which files are read; None: as they come.

    silent: tiers that did not say in time what they have. withheld: reasons.
    misasked: it is there, and was asked wrongly: what to do about that.
    failed: by tier, how many versions proved bad, or could not be had.
    busy: it had no slot for a reader for as long as that is waited for.
    gone: versions that were refused as if they had made room.
    epochs: the newest of each run of which it has anything, withheld or not. attached: of these, the newest that a node
    vouches for.
    """

    def __init__(
        self, address: tuple[str, int], key: str, seconds: float = SECONDS, tls: ssl.SSLContext | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.connection = Connection(address, key, seconds, tls, pace)
        self.silent: list[str] = []
        self.withheld: list[str] = []
        self.diverged: list[Divergence] = []
        self.misasked = ""
        self.failed: Counter[str] = Counter()
        self.busy = False
        self.gone: set[str] = set()
        self.epochs: dict[str, int] = {}
        self.attached: dict[str, int] = {}

    @property
    def name(self) -> str:
        """The node's, for people: host and port."""
        return self.connection.name

    def again(self, seconds: float | None = None) -> NodeClient:
        """The same node, over a connection of its own. seconds: that it may be silent there."""
        one = self.connection
        return NodeClient(one.address, one.key, one.seconds if seconds is None else seconds, one.tls, one.pace)

    def close(self) -> None:
        """Let the connection go; may be called twice."""
        self.connection.close()

    def offers(self, step: int | None = None) -> list[Offer]:
        """All that the node has now, and what it can make of a step. Raises AskError."""
        said = self.connection.json("/v1/versions" if step is None else f"/v1/versions?step={step}")
        listed = said.get("versions") if isinstance(said, dict) else None
        if not isinstance(listed, list):
            raise AskError("does not list versions", where=self.name)
        absent = said.get("absent", [])
        self.silent = [tier for tier in TIERS if isinstance(absent, list) and tier in absent]
        withheld = said.get("withheld", [])
        whys = [one.get("why") for one in withheld if isinstance(one, dict)] if isinstance(withheld, list) else []
        self.withheld = [" ".join(why[:MOST_WHY].split()) for why in whys[:1] if isinstance(why, str)]
        self.diverged = Divergence.all_of(said.get("diverged"))
        self.epochs, self.attached = {}, {}
        later = said.get("later", [])  # of tiers that the first release does not know
        later = later if isinstance(later, list) else []
        for one in [*listed, *later, *(withheld if isinstance(withheld, list) else [])]:
            run_id, epoch = (one.get("run_id"), one.get("epoch")) if isinstance(one, dict) else (None, None)
            if isinstance(run_id, str) and type(epoch) is int and epoch >= 0:
                if epoch >= MOST_EPOCHS:
                    raise AskError(f"lists an epoch that is none: {str(epoch)[:20]}", where=self.name)
                self.epochs[run_id] = max(epoch, self.epochs.get(run_id, 0))
                if one.get("attached") is True:
                    self.attached[run_id] = max(epoch, self.attached.get(run_id, 0))
        offers = [Offer.of(one, self.name) for one in listed]
        offers += [each for one in later for each in Offer.of(one, self.name).each]
        if said.get("statuses") == OWN:
            return offers
        # A release that says `verified` of every version once a checksum has matched.
        return [replace(one, status=UNVERIFIED) if VersionStatus.of(one.status).verified else one for one in offers]

    def version(self, offer: Offer, release: bool = False) -> Version:
        """The manifest of what was offered. release: nothing else of it is wanted. Raises AskError."""
        where = f"{self.name}, {offer.tier}"
        try:
            path = f"/v1/versions/{offer.id}/manifest.json{'?release' if release else ''}"
            version = Version.of(self._hashed(path, offer, where), where)
        except UserError as error:
            raise AskError(f"its manifest {error.what}", where=where) from None
        said = ("run_id", "epoch", "step", "shard", *(["start"] if version.start else []))
        for name in said:
            if getattr(version, name) != getattr(offer, name):
                raise AskError(f"offered {name} {getattr(offer, name)!r} and sent {getattr(version, name)!r}",
                               where=where)
        return version

    def _hashed(self, path: str, offer: Offer, where: str) -> Any:
        """A manifest, as soon as its tensors are hashed. Raises AskError."""
        progress = HashingProgress(self.connection.seconds, offer.nbytes, where)
        while True:
            try:
                return self.connection.json(path)
            except UnhashedError as error:
                progress.take(error.hashed, error.making)
            time.sleep(AGAIN_SECONDS)

    def tensors(
        self, offer: Offer, version: Version, file: str, into: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One file's tensors in the manifest's order, every hash checked.

        into: tensors to receive into, of the right dtype and shape; for others memory is taken. Those on another device
        or not in row-major order are written once their hash agreed; the rest is written as it arrives, so after an
        AskError it holds anything.
        """
        try:
            return self._tensors(offer, version, file, into)
        finally:
            self.close()

    def _tensors(
        self, offer: Offer, version: Version, file: str, into: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        stream, lie, where = self._opened(offer, version, file)
        digests, found = version.files[file], dict[str, torch.Tensor]()
        with Hashing(where) as hashing:
            for names in _together(lie):
                come = [_place(name, digests[name], into.get(name)) for name in names]
                stream.fill([memory(one.tensor) for one in come])
                hashing.add(come)
                found |= {one.name: one.tensor if one.into is None else one.into for one in come}
        return {name: found[name] for name in digests}

    def pieces(self, offer: Offer, version: Version, file: str) -> Iterator[memoryview]:
        """The bytes of one file's tensors, in the order of `order_of`, each tensor's hash checked when its last byte
        has come: what was yielded of it before may be wrong. A piece is good until the next. Raises AskError."""
        stream, lie, where = self._opened(offer, version, file)
        buffer = memoryview(bytearray(CHUNK))
        try:
            if list(lie) != order_of(version, file):
                raise AskError("has its tensors in another order than their widths", where=where)
            for name in lie:
                digest, left, sums = version.files[file][name], version.files[file][name].spec.nbytes, hashlib.sha256()
                while left:
                    piece = buffer[: min(left, len(buffer))]
                    stream.fill([piece])
                    sums.update(piece)
                    left -= len(piece)
                    yield piece
                if sums.hexdigest() != digest.sha256:
                    raise AskError(f"tensor {name!r} has other bytes than its manifest says (SHA-256 differs)",
                                   where=where)
        finally:
            self.close()

    def _opened(self, offer: Offer, version: Version, file: str) -> tuple[Stream, dict[str, tuple[int, int]], str]:
        """A file's bytes from its first tensor on, where each tensor lies in them, and words for where that is."""
        where = f"{self.name}, {offer.tier}: {file}"
        expected = {name: digest.spec for name, digest in version.files[file].items()}
        most = 8 + HEADER_LIMIT + sum(spec.nbytes for spec in expected.values())
        stream = Stream(self.connection, f"/v1/versions/{offer.id}/{file}", where, most)
        head = stream.take(8)
        length = int.from_bytes(head, "little")
        if length > HEADER_LIMIT or 8 + length > stream.size:
            raise AskError(f"a safetensors header of {length} bytes in {stream.size}", where=where)
        try:
            lie = places(stream.take(length), expected, stream.size - 8 - length, where)
        except UserError as error:
            raise AskError(error.what, where=where) from None
        if missing := expected.keys() - lie.keys():
            raise AskError(f"lacks tensor {min(missing)!r}, which its manifest lists", where=where)
        return stream, lie, where

    def raw(self, path: str, size: int, where: str) -> Iterator[memoryview]:
        """The bytes of a file of which nothing but its size is known. A piece is good until the next. Raises AskError.
        """
        stream = Stream(self.connection, path, where, size)
        if stream.size != size:
            raise AskError(f"has {stream.size} bytes, not {size}", where=where)
        buffer = memoryview(bytearray(CHUNK))
        try:
            for at in range(0, size, CHUNK):
                piece = buffer[: min(CHUNK, size - at)]
                stream.fill([piece])
                yield piece
        finally:
            self.close()

    def user(self, offer: Offer, rank: int) -> UserState:
        """What a rank gave of itself with that version, checked. Raises AskError."""
        where = f"{self.name}, {offer.tier}: state of rank {rank}"
        try:
            step = f"?step={offer.step}" if offer.tier == LOG else ""
            path = f"/v1/versions/{offer.id}/user/{rank}{step}"
            found = UserState.of(self.connection.read(path, USER_BYTES), where)
        except UserError as error:
            raise AskError(error.what, where=where) from None
        if (found.step, found.rank) != (offer.step, rank):
            raise AskError(f"is of step {found.step} and rank {found.rank}", where=where)
        return found


def _together(lie: Mapping[str, tuple[int, int]]) -> Iterator[list[str]]:
    """Names of tensors that follow each other, CHUNK bytes of them or a larger one: received in one go, and hashed by
    one thread."""
    names: list[str] = []
    begin = 0
    for name, (first, end) in lie.items():
        if names and end - begin > CHUNK:
            yield names
            names = []
        begin = begin if names else first
        names.append(name)
    if names:
        yield names


def _place(name: str, digest: Digest, given: torch.Tensor | None) -> Received:
    """Where a tensor is received: where it is wanted, if its memory is as its bytes come."""
    if given is not None and given.device.type == "cpu" and given.is_contiguous() and not (
            given.is_neg() or given.is_conj()):  # views whose memory is not what they say
        return Received(name, given, digest.sha256, None)
    try:
        tensor = torch.empty(digest.spec.shape, dtype=getattr(torch, digest.spec.dtype), device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise AskError(f"no memory for tensor {name!r}, {list(digest.spec.shape)}: {str(error).splitlines()[0][:200]}"
                       ) from None
    return Received(name, tensor, digest.sha256, given)


def split(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of the file OPTIMIZER as parameter -> key -> tensor."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.removeprefix("state.").rpartition(".")
        state.setdefault(parameter, {})[key] = tensor
    return state
