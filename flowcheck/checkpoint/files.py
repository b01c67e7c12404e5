"""One safetensors file of a checkpoint: written with the hashes of what it holds, and read back against them.

A file's entry in the checkpoint's manifest: {"bytes", "sha256", "tensors": {name: {"dtype", "shape", "sha256"}}}. Every
error of reading is a UserError that names the file, and the tensor where it is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from flowcheck.control.tensors import CHUNK, DTYPES, header, packed_bytes, pieces
from flowcheck.durable import write_synced
from flowcheck.errors import UserError

__all__ = ["FileStream", "load_file", "opened", "path_of", "readable", "refuse", "tensor_sha256", "write_file"]


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


def refuse(path: Path, what: str, remedy: str = "") -> UserError:
    """The error to raise about a path."""
    remedy = remedy or "use another step of the same run; this one is damaged"
    return UserError(what, where=str(path), remedy=remedy)


def path_of(given: object, where: str = "path", kind: str = "file or directory") -> Path:
    """Raises UserError if no file system can have that name. where: the argument. kind: of what it is the name."""
    try:
        text = os.fspath(given)  # type: ignore[call-overload]
        usable = isinstance(text, str) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        usable = False
    if not usable:
        said = str(given) if isinstance(given, Path) else given
        raise UserError(f"{said!r} is not the name of a {kind}", where=where, remedy="another name")
    return Path(text)


@contextlib.contextmanager
def readable(path: Path, *, any_kind: bool = False) -> Iterator[None]:
    """Turn an OSError of reading into a UserError, which is raised at once for what is no file and no directory: a FIFO
    would be waited for. any_kind: it is not opened here, so it may be anything."""
    try:
        if not any_kind and path.exists() and not (path.is_file() or path.is_dir()):
            raise _irregular(path)
        yield
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise refuse(path, what, "give an existing, readable path") from None


def _irregular(path: Path) -> UserError:
    return refuse(path, "is no regular file", "give FILE.safetensors or a step directory")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its length. Raises UserError. A FIFO that has come there since is not waited for, either."""
    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with readable(path), open(path, "rb", opener=without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(path)
        yield file, found.st_size


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
