"""A copy of a version that another node has: a checkpoint directory, written while it comes.

    path = take_copy(node, offer, out)              OUT/step-000020, whole, every hash checked; or AskError, and nothing

The bytes are those of the source: model, optimizer, and what ranks gave of themselves. So are status and marks: a copy
never raises a status. No more than a piece of it is in memory besides what is written, so that a copy on tmpfs takes
the state once. The directory appears whole or not at all, and one of that step that is there stays until then. Any
thread; one at a time for a directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import Offer
from flowcheck.checkpoint.directory import MANIFEST, Meta, check_replaceable, step_manifest, step_path
from flowcheck.checkpoint.users import write_users
from flowcheck.control.tensors import header
from flowcheck.control.user_state import pack
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.durable import (
    adopt,
    fsync_directory,
    make_directory,
    new_directory,
    partial_name,
    remove_tree,
    reporting,
    write_synced,
)

__all__ = ["take_copy", "users_at"]


def take_copy(node: NodeClient, offer: Offer, out: Path) -> Path:
    """The version of an offer of that node's. Raises AskError, EnvironmentProblem."""
    version = node.version(offer)
    path = step_path(out, version.step)
    aside = partial_name(path)
    with reporting(path, aside=aside):
        check_replaceable(path)
        make_directory(out)
        remove_tree(aside)  # of an earlier process that had our pid
        try:
            new_directory(aside)
            files = {}
            for file in (MODEL, OPTIMIZER):
                stream = _Stream(node, offer, version, file)
                write_synced(aside / file, stream.pieces())
                files[file] = stream.entry()
            users = users_at(node, offer)
            meta = Meta.of(version)
            said = write_users(aside, users) if users else {}
            manifest = step_manifest(version.step, meta, files, said, copied_from=f"{node.name}, {offer.tier}")
            write_synced(aside / MANIFEST, [json.dumps(manifest, indent=1).encode() + b"\n"])
            fsync_directory(aside)
            adopt(aside, path)
        finally:
            node.close()
            remove_tree(aside)  # half of the new one, or all of the one that it replaced
    return path


def users_at(node: NodeClient, offer: Offer) -> dict[int, bytes]:
    """What ranks gave of themselves with a version, checked, as files of it. Raises AskError."""
    users = {}
    for rank in offer.with_user:
        user = node.user(offer, rank)
        users[rank] = pack(user.state, step=user.step, rank=rank, ranks=user.ranks)
    return users


class _Stream:
    """A safetensors file of ours, whose tensors come from a node; and its manifest entry once they have."""

    def __init__(self, node: NodeClient, offer: Offer, version: Version, file: str) -> None:
        self._node, self._offer, self._version, self._file = node, offer, version, file
        self._whole, self._size = hashlib.sha256(), 0

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Once. Raises AskError, also for a tensor whose hash is not the manifest's."""
        tensors = self._version.files[self._file]
        head, _ = header({
            name: torch.empty(one.spec.shape, dtype=getattr(torch, one.spec.dtype), device="meta")
            for name, one in tensors.items()
        })
        yield self._counted(head)
        for piece in self._node.pieces(self._offer, self._version, self._file):
            yield self._counted(piece)

    def _counted(self, piece: bytes | memoryview) -> bytes | memoryview:
        self._whole.update(piece)
        self._size += len(piece)
        return piece

    def entry(self) -> dict[str, Any]:
        return {
            "bytes": self._size, "sha256": self._whole.hexdigest(),
            "tensors": {
                name: {"dtype": one.spec.dtype, "shape": list(one.spec.shape), "sha256": one.sha256}
                for name, one in self._version.files[self._file].items()
            },
        }
