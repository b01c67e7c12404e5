"""One safetensors file of a checkpoint: written with the hashes of what it holds, and read back against them.

A file's entry in the checkpoint's manifest: {"bytes", "sha256", "tensors": {name: {"dtype", "shape", "sha256"}}}. Every
error of reading is a UserError that names the file, and the tensor where it is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flowcheck.checkpoint.paths import opened, readable, refuse
from flowcheck.control.tensors import CHUNK, DTYPES, header, packed_bytes, pieces
from flowcheck.durable import write_synced

__all__ = ["FileStream", "load_file", "tensor_sha256", "write_file"]


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 over the elements' little-endian bytes in row-major order."""
    digest = hashlib.sha256()
    for piece in pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


class FileStream:
    """The bytes of one file over tensors, and its manifest entry once they were taken: every byte is read from memory
    once. The library's own writer would need the file read again for its hash."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self._whole = tensors, hashlib.sha256()
        self._hashes: dict[str, str] = {}

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Once."""
        head, order = header(self._tensors)
        self._whole.update(head)
        yield head
        for name in order:
            single = hashlib.sha256()
            for piece in pieces(self._tensors[name]):
                single.update(piece)
                self._whole.update(piece)
                yield piece
            self._hashes[name] = single.hexdigest()

    def entry(self) -> dict[str, Any]:
        """When all pieces were taken."""
        return {
            "bytes": packed_bytes(self._tensors),
            "sha256": self._whole.hexdigest(),
            "tensors": {
                name: {"dtype": DTYPES[one.dtype][0], "shape": list(one.shape), "sha256": self._hashes[name]}
                for name, one in self._tensors.items()
            },
        }


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write one file and return its manifest entry."""
    stream = FileStream(tensors)
    write_synced(path, stream.pieces())
    return stream.entry()


def load_file(path: Path, expected: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, owned by us; checked against its manifest entry if it has one."""
    with opened(path) as (file, size):
        if expected is not None:
            _check_size(path, size, expected)  # before any of it is read: it may be of any size
        magic = file.read(4)
        file.seek(0)
        if expected is not None:
            _check_file(path, file.read, size, expected)
    try:
        with readable(path), safe_open(str(path), framework="pt") as held:
            # Cloned, because the library's tensors are the mapped file, which can change under us.
            tensors = {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118
    except SafetensorError as error:
        # Asked only now: the first bytes of a good file are a length and can be anything.
        if magic == b"PK\x03\x04" or (magic[:1] == b"\x80" and magic[1:2] <= b"\x05"):
            raise refuse(
                path, "is a pickle (torch.save), which can run code when it is loaded and is never read",
                "convert it where you trust it: safetensors.torch.save_file(torch.load(FILE), NEW)",
            ) from None
        what = f"is not a whole safetensors file: {error}"
        raise refuse(path, what, "copy or write the file again") from None
    if expected is None:
        return tensors
    return _check_tensors(path, tensors, expected["tensors"])


def _check_size(path: Path, size: int, expected: Mapping[str, Any]) -> None:
    if size != expected["bytes"]:
        raise refuse(path, f"has {size} bytes, its manifest says {expected['bytes']}")


def _check_file(path: Path, read: Callable[[int], bytes], most: int, expected: Mapping[str, Any]) -> None:
    """most: bytes that it had when it was opened; it may grow while it is read."""
    digest, size = hashlib.sha256(), 0
    while size <= most and (piece := read(CHUNK)):
        digest.update(piece)
        size += len(piece)
    _check_size(path, size, expected)
    if digest.hexdigest() != expected["sha256"]:
        raise refuse(path, "has other bytes than those written (SHA-256 does not match its manifest)")


def _check_tensors(
    path: Path, tensors: dict[str, torch.Tensor], expected: Mapping[str, Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    if set(tensors) != set(expected):
        odd = sorted(set(tensors) ^ set(expected))[0]
        raise refuse(path, f"and its manifest do not list the same tensors ({odd!r})")
    for name, entry in expected.items():
        dtype, shape = str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)
        if (dtype, shape) != (entry["dtype"], entry["shape"]):
            said = f"{entry['dtype']} {entry['shape']}"
            raise refuse(path, f"tensor {name!r} is {dtype} {shape}, its manifest says {said}")
        if tensor_sha256(tensors[name]) != entry["sha256"]:
            raise refuse(path, f"tensor {name!r} has other bytes than those written (SHA-256 differs)")
    return {name: tensors[name] for name in expected}
