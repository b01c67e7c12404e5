"""Parts of a base as bytes: a safetensors file each, whose metadata has the structure. No pickle.

    packed(part) -> bytearray             of a BaseHead or BasePiece with copies in this machine's memory
    unpacked(data, where) -> part         from anybody: UserError for anything but such a file, whole
    record_tree(record)                   a StepRecord as JSON, its few tensors in it: for the step record of a trainer
    record_of(tree, where)                and back

    metadata    sum (of the whole file with zeros in the sum's own place) | flowcheck: the form | tree: JSON (values.py)
    tensors     "0", "1", ...: elements in row-major order, each number that is repeated once
    a tensor    {"tensor": [name, dtype, shape, strides or null, place]}
                {"sparse": [indices, values, shape, is it coalesced, place]}

The sum is the node's (control/checksum.py) over words of 8 bytes and over the bytes that are left: it shows damage, and
does not sign anything. A reader needs memory by the size of the data, whatever that says. Torch and the standard
library. Any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from flowcheck.control.checksum import begin_checksums
from flowcheck.control.tensors import DTYPES, HEADER_LIMIT, MOST_ELEMENTS, header, is_shape, memory, specs_of, unpack
from flowcheck.control.values import tree_of, value_of
from flowcheck.errors import UserError
from flowcheck.trainer.log.base import BaseHead, BasePiece, Made
from flowcheck.trainer.log.copies import Place, TensorCopy, once, refuse, spans_of, strided
from flowcheck.trainer.log.record import Opaque, StepRecord

__all__ = ["packed", "record_of", "record_tree", "unpacked"]

Part = BaseHead | BasePiece
FORMS: dict[type, str] = {BaseHead: "base-head/1", BasePiece: "base-piece/1"}
_OPENS = b'{"__metadata__":{"sum":"'
_SUM = slice(8 + len(_OPENS), 8 + len(_OPENS) + 32)
_NONE = "0" * 32
_LARGEST = 1 << 62  # of a number of steps
_TYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values()
          if isinstance(one, torch.dtype) and not str(one).startswith(("torch.q", "torch.bits"))}


def packed(part: Part) -> bytearray:
    """Raises UserError: more names than a header has room for."""
    held: dict[str, torch.Tensor] = {}
    where = _called(part)
    tree = json.dumps(tree_of(_fields(part), partial(_written, partial(_apart, held)), where), separators=(",", ":"))
    head, order = header(held, {"sum": _NONE, "flowcheck": FORMS[type(part)], "tree": tree})
    if len(head) - 8 > HEADER_LIMIT:
        raise UserError(f"has a header of {len(head):,} bytes, at most {HEADER_LIMIT:,} can be read", where=where,
                        remedy="fewer or shorter names")
    data = bytearray(head)
    for name in order:
        data += memory(held[name])
    data[_SUM] = _sum(data).encode()
    return data


def unpacked(data: bytes | bytearray, where: str) -> Part:
    """where: what the bytes are, for a message."""
    held = bytearray(data)
    length = int.from_bytes(held[:8], "little")
    if length > min(HEADER_LIMIT, len(held) - 8) or held[8 : _SUM.start] != _OPENS or length < _SUM.stop:
        raise _bad("is not a part of a log", where)
    said = bytes(held[_SUM])
    held[_SUM] = _NONE.encode()
    if _sum(held).encode() != said:
        raise _bad("has other bytes than those written (the sums differ)", where)
    try:
        entries = json.loads(bytes(held[8 : 8 + length]))
        about = entries.pop("__metadata__")
        form, tree = about["flowcheck"], json.loads(about["tree"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise _bad("has no structure", where) from None
    tensors = unpack(held, specs_of(entries, where), where)
    fields = value_of(tree, partial(_read, tensors, where), where)
    for kind, name in FORMS.items():
        if form == name:
            return _MADE[kind](_Fields(fields, where))
    raise _bad("is of another form than those known here", where)


def record_tree(record: StepRecord) -> Any:
    return tree_of(_record_fields(record), partial(_written, _inline), "step record")


def record_of(tree: Any, where: str) -> StepRecord:
    """Raises UserError: the JSON is not one of `record_tree`."""
    return _record(_Fields(value_of(tree, partial(_read, {}, where), where), where))


def _sum(data: bytearray) -> str:
    whole = len(data) // 8
    parts = {"words": torch.frombuffer(data, dtype=torch.int64, count=whole),
             "rest": torch.frombuffer(data[8 * whole :] + b"\0", dtype=torch.uint8)}
    return "".join(f"{one:016x}" for one in begin_checksums(parts).get().values())


def _bad(what: str, where: str) -> UserError:
    return UserError(what, where=where, remedy="another copy of it, or an older base")


# -- values that are neither numbers, texts nor containers -------------------------------------------------------


def _written(put: Callable[[torch.Tensor], str], value: Any, path: str) -> Any:
    if isinstance(value, TensorCopy):
        held = value.tensor
        if held.layout is torch.sparse_coo:
            parts = [_dense(put, one) for one in (held._indices(), held._values())]
            return {"sparse": [*parts, list(held.shape), held.is_coalesced(), value.place.value]}
        return {"tensor": [*_dense(put, held), value.place.value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Opaque):
        return {"opaque": value.kind}
    return refuse(value, path)


def _dense(put: Callable[[torch.Tensor], str], held: torch.Tensor) -> list[Any]:
    """Its place in the file, dtype, shape, strides."""
    plain = held.is_contiguous()
    bits = (held if plain else once(held, held.stride())).detach().contiguous()
    dtype = str(held.dtype).removeprefix("torch.")
    if held.dtype not in DTYPES:
        bits = bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    return [put(bits), dtype, list(held.shape), None if plain else list(held.stride())]


def _apart(held: dict[str, torch.Tensor], bits: torch.Tensor) -> str:
    name = str(len(held))
    held[name] = bits
    return name


def _inline(bits: torch.Tensor) -> str:
    return "=" + bytes(memory(bits.cpu())).hex()


def _read(tensors: Mapping[str, torch.Tensor], where: str, kind: str, held: Any) -> Any:
    if kind == "dtype" and isinstance(held, str) and held in _TYPES:
        return _TYPES[held]
    if kind == "bytes" and isinstance(held, str) and re.fullmatch("([0-9a-f]{2})*", held):
        return bytes.fromhex(held)
    if kind == "opaque" and isinstance(held, str):
        return Opaque(held)
    places: dict[Any, Place] = {place.value: place for place in Place}
    if kind not in ("tensor", "sparse") or not isinstance(held, list) or len(held) != 5 or (
            not isinstance(held[4], str) or held[4] not in places):
        return NotImplemented
    if kind == "tensor":
        return TensorCopy(_dense_of(tensors, held[:4], where), places[held[4]])
    return TensorCopy(_sparse_of(tensors, held, where), places[held[4]])


def _dense_of(tensors: Mapping[str, torch.Tensor], said: Any, where: str) -> torch.Tensor:
    wrong = _bad("has a tensor that is not described", where)
    if not isinstance(said, list) or len(said) != 4:
        raise wrong
    name, short, shape, strides = said
    if not isinstance(name, str) or not isinstance(short, str) or short not in _TYPES or not is_shape(shape):
        raise wrong
    dtype, stored = _TYPES[short], shape
    if strides is not None:
        if not isinstance(strides, list) or len(strides) != len(shape) or not all(
                type(one) is int and 0 <= one <= MOST_ELEMENTS for one in strides) or (
                spans_of(shape, strides, dtype.itemsize) < 0):
            raise wrong
        stored = [extent if stride or extent < 2 else 1 for extent, stride in zip(shape, strides, strict=True)]
    bits = _bits(tensors, name, dtype, where)
    if bits.numel() != torch.Size(stored).numel() or (dtype in DTYPES and bits.dtype != dtype):
        raise wrong
    bits = bits.reshape(stored)
    if strides is None:
        return bits
    return strided(bits.expand(shape), strides)


def _bits(tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Of that type, whatever the shape."""
    found = tensors.get(name)
    if found is None and re.fullmatch("=([0-9a-f]{2})*", name):
        data = bytearray.fromhex(name[1:])
        found = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    elif found is None:
        raise _bad("has a tensor that is not there", where)
    elif dtype in DTYPES:
        return found
    if found.dtype != torch.uint8 or found.numel() % dtype.itemsize:
        raise _bad("has a tensor of another size than described", where)
    return found.reshape(-1).view(dtype)


def _sparse_of(tensors: Mapping[str, torch.Tensor], held: list[Any], where: str) -> torch.Tensor:
    indices, values = _dense_of(tensors, held[0], where), _dense_of(tensors, held[1], where)
    shape, coalesced = held[2], held[3]
    if not is_shape(shape) or type(coalesced) is not bool or indices.dtype != torch.int64:
        raise _bad("has a sparse tensor that is not described", where)
    try:
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
    except (RuntimeError, ValueError):
        raise _bad("has a sparse tensor whose indices lie outside it", where) from None


# -- the parts as values, and back -------------------------------------------------------------------------------


def _called(part: Part) -> str:
    return f"base of {part.name}" if isinstance(part, BasePiece) else "base"


def _fields(part: Part) -> dict[str, Any]:
    if isinstance(part, BasePiece):
        return {"name": part.name, "step": part.step, "value": part.value, "state": part.state}
    return {"made": asdict(part.made), "names": part.names, "groups": part.groups, "others": part.others}


def _record_fields(record: StepRecord) -> dict[str, Any]:
    return {"options": record.options, "grad_scale": record.grad_scale, "found_inf": record.found_inf}


class _Fields:
    """A stranger's dict. Each `get` raises UserError for what is not there, or not of the kind."""

    def __init__(self, held: Any, where: str) -> None:
        if type(held) is not dict or not all(type(key) is str for key in held):
            raise _bad("has no fields", where)
        self._held, self.where = held, where

    def get(self, name: str, sound: Callable[[Any], bool]) -> Any:
        if name not in self._held or not sound(self._held[name]):
            raise _bad(f"has no proper {name}", self.where)
        return self._held[name]


def _names(value: Any) -> bool:
    return type(value) is list and all(type(one) is str for one in value) and len(set(value)) == len(value)


def _named(value: Any) -> bool:
    return type(value) is dict and all(type(key) is str for key in value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _copy(value: Any) -> bool:
    return isinstance(value, TensorCopy)


def _copy_or_none(value: Any) -> bool:
    return value is None or _copy(value)


def _text(value: Any) -> bool:
    return type(value) is str


def _head(of: _Fields) -> BaseHead:
    made = _Fields(of.get("made", _named), of.where)
    by = Made(**{name: made.get(name, _text) for name in ("optimizer", "module", "version", "device", "matmul")},
              threads=made.get("threads", _count))
    groups = of.get("groups", lambda one: type(one) is list and all(map(_names, one)))
    return BaseHead(by, of.get("names", _names), groups, of.get("others", _named))


def _piece(of: _Fields) -> BasePiece:
    state = of.get("state", lambda one: one is None or type(one) is dict)
    return BasePiece(of.get("name", _text), of.get("step", _count), of.get("value", _copy), state)


def _record(of: _Fields) -> StepRecord:
    options = of.get("options", lambda one: type(one) is list and all(map(_named, one)))
    return StepRecord(options, of.get("grad_scale", _copy_or_none), of.get("found_inf", _copy_or_none))


_MADE: dict[type, Callable[[_Fields], Part]] = {BaseHead: _head, BasePiece: _piece}
