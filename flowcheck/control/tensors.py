"""The safetensors format with torch and the standard library alone: trainers have nothing else.

    head, order = header(tensors)              what a file begins with, and the tensors' order in it
    pieces(tensor)                             a tensor's bytes, a few MiB at a time
    unpack(data, expected) -> {name: tensor}   bytes from a stranger, checked against what must be in them
    places(text, expected, size)               where each tensor lies behind a header from a stranger, checked likewise

Widest elements first keeps every tensor aligned, which loaders that map a file rely on. Both of our targets (x86-64,
aarch64) are little-endian, as the format is. Any thread.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from flowcheck.errors import UserError
from flowcheck.job.model import unwritable

__all__ = [
    "CHUNK", "DTYPES", "HEADER_LIMIT", "MOST_ELEMENTS", "TensorSpec", "header", "in_text", "is_shape", "memory",
    "of_text", "packed", "packed_bytes", "pieces", "places", "specs_of", "unpack",
]

#: torch dtype -> name in manifests, name in safetensors.
DTYPES = {
    torch.float64: ("float64", "F64"), torch.float32: ("float32", "F32"), torch.float16: ("float16", "F16"),
    torch.bfloat16: ("bfloat16", "BF16"), torch.int64: ("int64", "I64"), torch.int32: ("int32", "I32"),
    torch.int16: ("int16", "I16"), torch.int8: ("int8", "I8"), torch.uint64: ("uint64", "U64"),
    torch.uint32: ("uint32", "U32"), torch.uint16: ("uint16", "U16"), torch.uint8: ("uint8", "U8"),
    torch.bool: ("bool", "BOOL"), torch.complex64: ("complex64", "C64"),
}
CHUNK = 8 << 20
HEADER_LIMIT = 16 << 20
MOST_ELEMENTS = 1 << 48  # of a tensor: what can be counted in bytes, and far more than there is


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be: manifest name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(DTYPES[tensor.dtype][0], tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size


def is_shape(said: Any) -> TypeGuard[list[int]]:
    """Is this JSON the shape of a tensor that there could be? A dimension of 0 lets no other be of any size: torch
    multiplies them one after the other."""
    return isinstance(said, list) and all(type(extent) is int and 0 <= extent <= MOST_ELEMENTS for extent in said) and (
        math.prod(extent or 1 for extent in said) <= MOST_ELEMENTS)


def header(
    tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """(length and JSON that the data follows, names in the data's order). about: the file's metadata. Raises UserError
    for a name that makes a file which nobody can read."""
    for name in tensors:
        if name and (why := unwritable(name)):
            raise UserError(f"cannot be written: {why}", where=f"tensor {name!a}", remedy="another name")
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, Any] = {"__metadata__": about or {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        dtype = DTYPES[tensors[name].dtype][1]
        entries[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def packed_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of `header` and all `pieces` together."""
    return len(header(tensors)[0]) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def packed(
    tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file with these, piece by piece. about: as of `header`."""
    head, order = header(tensors, about)
    yield head
    for name in order:
        yield from pieces(tensors[name])


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order."""
    data = memory(tensor.detach().cpu().contiguous())
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of this machine's memory in row-major order, to read or to write. Raises ValueError for one
    that lies elsewhere or otherwise."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}")
    flat = tensor.detach().reshape(-1)
    size = flat.numel() * flat.element_size()
    if not size:
        return memoryview(b"")
    held = (ctypes.c_char * size).from_address(flat.data_ptr())  # not Tensor.numpy(): trainers need not have numpy
    held.tensor = flat  # type: ignore[attr-defined]  # lives as long as any piece of it
    return memoryview(held).cast("B")


def unpack(data: bytearray, expected: Mapping[str, TensorSpec], where: str) -> dict[str, torch.Tensor]:
    """Tensors over `data`, in the order of `expected`. What is missing in the data is missing in the result.

    Raises UserError for anything that is not whole, not expected, of another dtype or shape, or overlapping.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(HEADER_LIMIT, len(data) - 8):
        raise UserError(f"a safetensors header of {length} bytes in {len(data)}", where=where)
    start = 8 + length
    found: dict[str, torch.Tensor] = {}
    for name, (begin, end) in places(data[8:start], expected, len(data) - start, where).items():
        spec = expected[name]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if begin == end:
            found[name] = torch.empty(spec.shape, dtype=dtype, device="cpu")
        elif (start + begin) % dtype.itemsize:
            held = bytearray(memoryview(data)[start + begin : start + end])
            found[name] = torch.frombuffer(held, dtype=dtype).reshape(spec.shape)
        else:
            count = (end - begin) // dtype.itemsize
            found[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).reshape(spec.shape)
    return {name: found[name] for name in expected if name in found}


def places(
    text: bytes | bytearray, expected: Mapping[str, TensorSpec], size: int, where: str
) -> dict[str, tuple[int, int]]:
    """Begin and end of each tensor in the `size` bytes that follow a header, in the data's order.

    text: the header's JSON. Raises UserError as `unpack` does.
    """
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in _entries(text, where).items():
        spec = expected.get(name)
        if spec is None:
            raise UserError(f"tensor {name[:80]!r} is not expected", where=where)
        begin, end = _span(entry, spec, name, where)
        if not 0 <= begin <= end <= size or end - begin != spec.nbytes:
            raise UserError(f"tensor {name!r} lies at {begin}..{end} of {size} bytes", where=where)
        spans[name] = begin, end
    spans = dict(sorted(spans.items(), key=lambda item: item[1]))
    reach = 0
    for begin, end in spans.values():
        if begin != reach:
            raise UserError(f"tensors overlap or leave a gap at byte {reach}", where=where)
        reach = end
    if reach != size:
        raise UserError(f"{size - reach} bytes behind the last tensor", where=where)
    return spans


def specs_of(entries: Mapping[str, Any], where: str) -> dict[str, TensorSpec]:
    """What a stranger's header says that there is, without its metadata; `unpack` holds the bytes against it. Raises
    UserError: a tensor is not described."""
    names: dict[str, str] = {short: name for name, short in DTYPES.values()}
    out = {}
    for name, entry in entries.items():
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(dtype, str) or dtype not in names or not is_shape(shape):
            raise UserError(f"tensor {name[:40]!r} is not described", where=where,
                            remedy="another copy of this version, or another version")
        out[name] = TensorSpec(names[dtype], tuple(shape))
    return out


def _entries(text: bytes | bytearray, where: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("the safetensors header is not JSON", where=where) from None
    if not isinstance(entries, dict):
        raise UserError("the safetensors header is no object", where=where)
    entries.pop("__metadata__", None)
    return entries


def _span(entry: Any, spec: TensorSpec, name: str, where: str) -> tuple[int, int]:
    names = dict(DTYPES.values())
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(number) is int for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole, dtype, shape, begin, end = False, "", [], 0, 0
    if not whole:
        raise UserError(f"tensor {name!r} has no proper header entry", where=where)
    if dtype != names[spec.dtype] or tuple(shape) != spec.shape:
        text = f"{str(dtype)[:16]} {str(list(shape))[:80]}"
        raise UserError(f"tensor {name!r} is {text}, not {names[spec.dtype]} {list(spec.shape)}", where=where)
    return begin, end


def in_text(tensor: torch.Tensor) -> list[Any]:
    """A small tensor within JSON: dtype, shape, its bytes in base64."""
    flat = tensor.contiguous()
    return [str(flat.dtype).removeprefix("torch."), list(flat.shape), base64.b64encode(memory(flat)).decode()]


def of_text(dtype: str, shape: Sequence[int], text: str) -> torch.Tensor:
    """What `in_text` wrote. Raises ValueError, TypeError, AttributeError, RuntimeError for anything else."""
    kind: torch.dtype = getattr(torch, dtype)
    data = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(data, dtype=kind) if data else torch.zeros(0, dtype=kind)
    return flat.reshape(tuple(shape))
