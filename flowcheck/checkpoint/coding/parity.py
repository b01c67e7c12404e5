"""Parity of one version of several shards: who pulls them writes it, and with it a lost shard comes back.

    written = encode(sources, Code(2, 2), path, [3])      PATH.parity/, with stream 3 of it
    decode(written, lost, streams, write)                 the stream of a lost shard, from k of the others

A shard's stream is the bytes of its tensors, those of the model and then those of the optimizer, each file's in the
order of its safetensors file, and zeros up to the length of the longest. parity.json names run, epoch and step, has the
manifest of every shard, and is written last; the directory appears whole or not at all. So parity is of one step of all
shards, and a round that fails (a node that dies, stalls or lies) leaves the parity before as it was. What ranks gave of
themselves is small, and lies next to it as it is. A holder keeps one stream of several in its directory (`encode`).

Whatever a node sends is hashed against its manifest while it is encoded, and every tensor that is rebuilt against the
manifest that parity.json has. No more of a version than a piece of each stream is in memory. Any thread; one at a time
for a directory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import Offer
from flowcheck.ask.receiving import AskError
from flowcheck.ask.sources import Found, Key
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.copies import users_at
from flowcheck.checkpoint.directory import MANIFEST_BYTES
from flowcheck.checkpoint.paths import read_small
from flowcheck.checkpoint.users import users_of, write_users
from flowcheck.control.version import MODEL, OPTIMIZER, Version, seal, self_hash
from flowcheck.durable import (
    adopt,
    fsync_directory,
    make_directory,
    new_directory,
    partial_name,
    private,
    remove_tree,
    reporting,
    write_synced,
)
from flowcheck.errors import EnvironmentProblem, UserError

__all__ = ["OTHER", "SCHEMA", "Padded", "Protected", "Source", "bytes_of", "decode", "encode", "pieces_in", "source_of"]

SCHEMA, DESCRIPTION = "flowcheck/parity/1", "parity.json"
PIECE = 4 << 20
OTHER = "protect another step, or see the nodes"


@dataclass(frozen=True)
class Protected:
    """A directory of parity. versions: of each shard, in the order of the streams of data. length: of each stream.
    sums: of the streams of parity that were written into it, SHA-256 by number. users: of each shard, whose own states
    lie next to them."""

    path: Path
    code: Code
    length: int
    versions: tuple[Version, ...]
    sums: Mapping[int, str]
    users: tuple[tuple[int, ...], ...]

    @property
    def step(self) -> int:
        return self.versions[0].step

    @property
    def key(self) -> tuple[int, int]:
        return self.versions[0].epoch, self.step

    @property
    def padded(self) -> int:
        """Bytes of zeros that were encoded, because shards are not equally long."""
        return self.code.data * self.length - sum(version.nbytes for version in self.versions)

    @property
    def mark(self) -> str:
        """The same for all streams that go together: those of this code over these bytes."""
        of = [[one.run_id, one.epoch, one.step, one.shard, *(
            [name, digest.sha256] for file in (MODEL, OPTIMIZER) for name, digest in one.files[file].items()
        )] for one in self.versions]
        return self_hash({"data": self.code.data, "parity": self.code.parity, "of": of})

    def stream(self, number: int) -> Path:
        """Of parity: numbers from `code.data` on."""
        return self.path / f"stream-{number}.bin"

    def of_shard(self, number: int) -> Path:
        """The folder of what ranks of a shard gave of themselves; the form is that of a checkpoint directory."""
        return self.path / f"shard-{number}"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Raises UserError: not such a directory, or changed since."""
        path = Path(path)
        try:
            document = json.loads(read_small(path / DESCRIPTION, MANIFEST_BYTES))
            whole = document["schema"] == SCHEMA and document["manifest_sha256"] == self_hash(document)
            code = Code(document["data"], document["parity"])
            length = int(document["length"])
            versions = tuple(Version.of(one, str(path)) for one in document["versions"])
            sums = {int(number): str(sha256) for number, sha256 in document["streams"].items()}
            users = tuple(tuple(users_of({"user": one})) for one in document["users"])
        except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            whole = False
        if not whole or len(versions) != code.data or max(version.nbytes for version in versions) != length:
            raise UserError("is not a directory of parity, or was changed", where=str(path), remedy=OTHER)
        return cls(path, code, length, versions, sums, users)


# -- sources -----------------------------------------------------------------------------------------------

Source = tuple[NodeClient, Offer, Version]


def source_of(stack: ExitStack, found: Found, key: Key) -> Source:
    """The first one of that step. One that fails ends the round: the next round takes another."""
    node, offer = found.of(key)[0]
    own = stack.enter_context(closing(node.again()))
    try:
        return own, offer, own.version(offer)
    except AskError as error:
        raise EnvironmentProblem(f"shard {found.shard!r}: {error.what}", where=error.where, remedy=OTHER) from None


def bytes_of(node: NodeClient, offer: Offer, version: Version) -> Iterator[memoryview]:
    """A shard's stream, each tensor hashed. Raises EnvironmentProblem."""
    try:
        for file in (MODEL, OPTIMIZER):
            yield from node.pieces(offer, version, file)
    except AskError as error:
        raise EnvironmentProblem(f"shard {version.shard!r}: {error.what}", where=error.where, remedy=OTHER) from None


def pieces_in(file: Any) -> Iterator[memoryview]:
    """A piece is good until the next."""
    buffer = memoryview(bytearray(PIECE))
    while count := file.readinto(buffer):
        yield buffer[:count]


class Padded:
    """Pieces of any size, taken in pieces of another; zeros after the last."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def fill(self, view: memoryview) -> None:
        while view:
            if not self._rest:
                self._rest = next(self._pieces, memoryview(b""))
                if not self._rest:
                    view[:] = bytes(len(view))
                    return
            count = min(len(view), len(self._rest))
            view[:count], self._rest, view = self._rest[:count], self._rest[count:], view[count:]

    def finish(self) -> None:
        """What is left is read: the last hash is checked when its last byte was asked for and once more."""
        if self._rest or next(self._pieces, None) is not None:
            raise EnvironmentProblem("a stream is longer than it said", where="parity", remedy=OTHER)


# -- files -------------------------------------------------------------------------------------------------


def encode(sources: Sequence[Source], code: Code, path: Path, numbers: Sequence[int]) -> Protected:
    """A round: these streams of parity of these shards, in a directory that is whole, or an error and nothing changed.

    numbers: of the streams, from `code.data` on. Raises EnvironmentProblem; UserError: what lies at `path` is not one.
    """
    versions = tuple(version for _, _, version in sources)
    length = max(version.nbytes for version in versions)
    if path.exists():
        Protected.read(path)  # what is somebody else's stays
    aside = partial_name(path)
    data = {number: memoryview(bytearray(PIECE)) for number in range(code.data)}
    parity = {number: memoryview(bytearray(PIECE)) for number in numbers}
    sums = {number: hashlib.sha256() for number in numbers}
    with reporting(path, aside=aside):
        make_directory(path.parent)
        remove_tree(aside)  # of an earlier process that had our pid
        try:
            new_directory(aside)
            with ExitStack() as stack:
                files = {number: stack.enter_context(open(aside / f"stream-{number}.bin", "xb", opener=private))
                         for number in numbers}
                streams = [Padded(bytes_of(*source)) for source in sources]
                for at in range(0, length, PIECE):
                    size = min(PIECE, length - at)
                    for stream, view in zip(streams, data.values(), strict=True):
                        stream.fill(view[:size])
                    code.rebuild({number: view[:size] for number, view in data.items()},
                                 {number: view[:size] for number, view in parity.items()})
                    for number, view in parity.items():
                        files[number].write(view[:size])
                        sums[number].update(view[:size])
                for stream in streams:
                    stream.finish()
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
            users = [_write_users(aside / f"shard-{number}", *source) for number, source in enumerate(sources)]
            document = seal({
                "schema": SCHEMA, "data": code.data, "parity": code.parity, "length": length,
                "streams": {str(number): one.hexdigest() for number, one in sums.items()}, "users": users,
                "versions": [version.document() for version in versions],
            })
            write_synced(aside / DESCRIPTION, [json.dumps(document, indent=1).encode()])
            fsync_directory(aside)
            adopt(aside, path)
        finally:
            remove_tree(aside)  # half of the new one, or all of the one that it replaced
    return Protected.read(path)


def _write_users(folder: Path, node: NodeClient, offer: Offer, version: Version) -> dict[str, Any]:
    """What ranks of a shard gave of themselves, as it is; their entries."""
    try:
        users = users_at(node, offer)
    except AskError as error:
        raise EnvironmentProblem(f"shard {version.shard!r}: {error.what}", where=error.where, remedy=OTHER) from None
    finally:
        node.close()
    if not users:
        return {}
    new_directory(folder)
    said = write_users(folder, users)
    fsync_directory(folder)
    return said


def decode(
    kept: Protected, lost: int, streams: Mapping[int, Padded], write: Callable[[memoryview], object]
) -> None:
    """A lost stream of data, piece after piece, from k of the others."""
    views = {number: memoryview(bytearray(PIECE)) for number in streams}
    out = memoryview(bytearray(PIECE))
    for at in range(0, kept.length, PIECE):
        size = min(PIECE, kept.length - at)
        for number, stream in streams.items():
            stream.fill(views[number][:size])
        kept.code.rebuild({number: view[:size] for number, view in views.items()}, {lost: out[:size]})
        write(out[:size])
    for stream in streams.values():
        stream.finish()
