"""The safetensors format with torch and the standard library alone: trainers have nothing else.

    head, order = header(tensors)              what a file begins with, and the tensors' order in it
    pieces(tensor)                             a tensor's bytes, a few MiB at a time
    unpack(data, expected) -> {name: tensor}   bytes from a stranger, checked against what must be in them

Widest elements first keeps every tensor aligned, which loaders that map a file rely on. Both of our targets (x86-64,
aarch64) are little-endian, as the format is. Any thread.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowcheck.errors import UserError

__all__ = ["DTYPES", "TensorSpec", "header", "packed_bytes", "pieces", "unpack"]

#: torch dtype -> name in manifests, name in safetensors.
DTYPES = {
    torch.float64: ("float64", "F64"), torch.float32: ("float32", "F32"), torch.float16: ("float16", "F16"),
    torch.bfloat16: ("bfloat16", "BF16"), torch.int64: ("int64", "I64"), torch.int32: ("int32", "I32"),
    torch.int16: ("int16", "I16"), torch.int8: ("int8", "I8"), torch.uint64: ("uint64", "U64"),
    torch.uint32: ("uint32", "U32"), torch.uint16: ("uint16", "U16"), torch.uint8: ("uint8", "U8"),
    torch.bool: ("bool", "BOOL"),
}
CHUNK = 8 << 20
HEADER_LIMIT = 16 << 20


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


def header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """(length and JSON that the data follows, names in the data's order)."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    size = flat.numel() * flat.element_size()
    if not size:
        return
    memory = (ctypes.c_char * size).from_address(flat.data_ptr())  # not Tensor.numpy(): trainers need not have numpy
    memory.tensor = flat  # type: ignore[attr-defined]  # lives as long as any piece of it
    data = memoryview(memory).cast("B")
    for start in range(0, size, CHUNK):
        yield data[start : start + CHUNK]


def unpack(data: bytearray, expected: Mapping[str, TensorSpec], where: str) -> dict[str, torch.Tensor]:
    """Tensors over `data`, in the order of `expected`. What is missing in the data is missing in the result.

    Raises UserError for anything that is not whole, not expected, of another dtype or shape, or overlapping.
    """
    entries, start = _entries(data, where)
    found: dict[str, torch.Tensor] = {}
    spans = []
    for name, entry in entries.items():
        spec = expected.get(name)
        if spec is None:
            raise UserError(f"tensor {name[:80]!r} is not expected", where=where)
        begin, end = _span(entry, spec, name, where)
        if not 0 <= begin <= end <= len(data) - start or end - begin != spec.nbytes:
            raise UserError(f"tensor {name!r} lies at {begin}..{end} of {len(data) - start} bytes", where=where)
        spans.append((begin, end))
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if begin == end:
            found[name] = torch.empty(spec.shape, dtype=dtype)
        elif (start + begin) % dtype.itemsize:
            held = bytearray(memoryview(data)[start + begin : start + end])
            found[name] = torch.frombuffer(held, dtype=dtype).reshape(spec.shape)
        else:
            count = (end - begin) // dtype.itemsize
            found[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).reshape(spec.shape)
    reach = 0
    for begin, end in sorted(spans):
        if begin != reach:
            raise UserError(f"tensors overlap or leave a gap at byte {reach}", where=where)
        reach = end
    if reach != len(data) - start:
        raise UserError(f"{len(data) - start - reach} bytes behind the last tensor", where=where)
    return {name: found[name] for name in expected if name in found}


def _entries(data: bytearray, where: str) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(HEADER_LIMIT, len(data) - 8):
        raise UserError(f"a safetensors header of {length} bytes in {len(data)}", where=where)
    try:
        entries = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        raise UserError("the safetensors header is not JSON", where=where) from None
    if not isinstance(entries, dict):
        raise UserError("the safetensors header is no object", where=where)
    entries.pop("__metadata__", None)
    return entries, 8 + length


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
