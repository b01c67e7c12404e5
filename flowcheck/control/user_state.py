"""What a rank gives beside model and optimizer, as bytes: nested values and tensors in one safetensors file, no pickle.

    data = pack({"loader": {"seed": 7, "at": 3}}, step=20, rank=3, ranks=4)      Refused: a value that cannot be kept
    Packer().pack(...)                                                           the same, again and again
    UserState.of(data, where)                                                    read from anybody, checked

Kept are None, bool, int, float, str, bytes, tensors, and list, tuple, dict (also OrderedDict and Counter, which torch's
schedulers use) of them, with keys that are str or int. Each of exactly that type: a subclass could not be given back.
A scalar of numpy's is kept as the Python number that it is, in either place.
The file's metadata has the structure as JSON, and SHA-256 over the whole file with zeros in the hash's own place. So
one name, one file, and any loader of safetensors shows what is in it. A tensor is copied to memory when it is packed.
Torch and the standard library. Any thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import marshal
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowcheck.control.numbers import plain
from flowcheck.control.tensors import DTYPES, HEADER_LIMIT, TensorSpec, is_shape, pieces, unpack
from flowcheck.errors import UserError

__all__ = ["USER_BYTES", "Packer", "Refused", "UserState", "pack", "seal_of", "tail_of"]

USER_BYTES = 1 << 20  # of one rank's state, the whole file
MOST_BITS = 4096  # of a whole number; Python itself reads some thousand digits
MOST_DEEP = 32  # containers in containers
FORM = "user/1"
_OPENS = b'{"__metadata__":{"sha256":"'  # what every header begins with; the hash follows
_HASH = slice(8 + len(_OPENS), 8 + len(_OPENS) + 64)
_Held = dict[str, torch.Tensor | bytes]  # by name in the file; bytes are a tensor of one dimension there
_PLAIN = {bool, str, type(None)}
_dumps = json.JSONEncoder(separators=(",", ":")).encode
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


class Refused(UserError):
    """A value that cannot be kept. where: its path."""


@dataclass(frozen=True)
class UserState:
    """One rank's state. step: of the version that it belongs to: updates done. rank, ranks: of the whole job."""

    step: int
    rank: int
    ranks: int
    state: Any

    @classmethod
    def of(cls, data: bytes | bytearray, where: str) -> UserState:
        """Raises UserError: not such a file, or not whole."""
        seal_of(data, where)
        length = int.from_bytes(data[:8], "little")
        try:
            entries = json.loads(bytes(data[8 : 8 + length]))
            about = entries.pop("__metadata__")
            sound = about["flowcheck"] == FORM
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise _bad("is not a user state", where)
        tensors = unpack(bytearray(data), _specs(entries, where), where)
        numbers = [_number(about.get(name), name, where) for name in ("step", "rank", "ranks")]
        try:
            tree = json.loads(about["tree"])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise _bad("has no structure", where) from None
        step, rank, ranks = numbers
        return cls(step, rank, ranks, _value(tree, tensors, where, 0))


def pack(state: Any, *, step: int, rank: int, ranks: int, most: int = USER_BYTES) -> bytes:
    """One file. Raises Refused: a value of a type that is not kept, or more than `most` bytes in all."""
    return Packer().pack(state, step=step, rank=rank, ranks=ranks, most=most)


class Packer:
    """What a rank gives at each boundary, most of which is as it was: what has not changed is not written as JSON
    again. One thread."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[bytes, str]] = {}  # by key: a value as marshal writes it, and as JSON
        self._about: tuple[Any, ...] = ()  # of the file below: its marks, and what else it has beside the step
        self._file = b"", b""  # before the step, and after it

    def pack(
        self, state: Any, *, step: int, rank: int, ranks: int, most: int = USER_BYTES, exact: Collection[str] = ()
    ) -> bytes:
        """As the function. exact: keys whose values have bytes, but nothing else that is not plain."""
        plain = type(state) is dict and all(type(key) is str for key in state)
        marks = [(key, _mark(value)) for key, value in state.items()] if plain else []
        about = (marks, len(str(step)), rank, ranks, most)
        if not plain or about != self._about:
            self._about = ()
            data, repeats = self._written(state, dict(marks), step, rank, ranks, most, exact)
            if not repeats:
                return _sealed(data)
            said = f'"step":"{step}"'.encode()
            before, _, after = data.partition(said)  # the header has no other: quotes in the tree are escaped
            self._about, self._file = about, (before + b'"step":"', b'"' + after)
        return _sealed(str(step).encode().join(self._file))

    def _written(
        self, state: Any, marks: Mapping[str, bytes], step: int, rank: int, ranks: int, most: int,
        exact: Collection[str],
    ) -> tuple[bytes, bool]:
        """The file without its hash. May it be taken again while all marks are the same?"""
        held: _Held = {}
        repeats = bool(marks)
        if marks:
            parts = []
            for key, value in state.items():
                text, same = self._text(key, value, marks[key], held, key in exact)
                parts.append(f"[{_dumps(key)},{text}]")
                repeats &= same
            tree = f'{{"dict":[{",".join(parts)}]}}'
        else:
            tree = _dumps(_tree(state, held, "", 0))
        nbytes = sum(len(one) if isinstance(one, bytes) else one.nbytes for one in held.values())
        if nbytes > most:  # before anything is copied
            raise _too_large(nbytes, most)
        about = {"sha256": "0" * 64, "flowcheck": FORM, "format": "pt", "step": str(step), "rank": str(rank),
                 "ranks": str(ranks), "tree": tree}
        data = b"".join(_pieces(about, held))
        if len(data) > most:
            raise _too_large(len(data), most)
        return data, repeats

    def _text(self, key: str, value: Any, mark: bytes, held: _Held, exact: bool) -> tuple[str, bool]:
        """A value as JSON, and whether its mark says all of it. marshal tells apart what JSON does, 1 from True and 0.0
        from -0.0, too; but what is not plain it writes as bytes, or not at all."""
        known = self._texts.get(key)
        if known is not None and mark and known[0] == mark:
            return known[1], True
        before, others = len(held), _Held()
        text = _dumps(_tree(value, held, f"[{key!r}]", 1))
        if exact:
            return text, bool(mark)
        if b"s" in mark:  # bytes among them, perhaps
            _tree(marshal.loads(mark), others, "", 1)
        same = bool(mark) and len(held) == before and not others
        if same:
            self._texts[key] = mark, text
        return text, same


def _mark(value: Any) -> bytes:
    """Equal for equal values alone, if they are plain; b"": it has none."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return b""


def _sealed(data: bytes) -> bytes:
    return b"".join((data[: _HASH.start], hashlib.sha256(data).hexdigest().encode(), data[_HASH.stop :]))


def _pieces(about: Mapping[str, str], held: _Held) -> list[bytes]:
    """A safetensors file, piece by piece; the widest elements come first, as in `tensors.header`."""
    entries: dict[str, Any] = {"__metadata__": about}
    data: list[bytes] = []
    end = 0
    for name in sorted(held, key=lambda name: -_width(held[name])):
        one = held[name]
        if isinstance(one, bytes):
            dtype, shape, written = "U8", [len(one)], one
        else:
            dtype, shape, written = DTYPES[one.dtype][1], list(one.shape), _bytes(one)
        start, end = end, end + len(written)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        data.append(written)
    text = _dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *data]


def _width(one: torch.Tensor | bytes) -> int:
    return 1 if isinstance(one, bytes) else one.element_size()


def _bytes(tensor: torch.Tensor) -> bytes:
    """In row-major order."""
    if tensor.is_cpu and tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    return b"".join(pieces(tensor))


def tail_of(data: bytes) -> bytes:
    """What of a file follows its header: all tensors and bytes of the state, as they are."""
    return data[8 + int.from_bytes(data[:8], "little") :]


def seal_of(data: bytes | bytearray, where: str) -> str:
    """The hash that a file carries. Raises UserError: it is no such file, or another byte than those written."""
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER_LIMIT, len(data) - 8) or bytes(data[8 : _HASH.start]) != _OPENS:
        raise _bad("is not a user state", where)
    said = bytes(data[_HASH])
    zeroed = bytearray(data)
    zeroed[_HASH] = b"0" * 64
    if hashlib.sha256(zeroed).hexdigest().encode() != said:
        raise _bad("has other bytes than those written (SHA-256 differs)", where)
    return said.decode()


# -- a value as JSON, its tensors apart ------------------------------------------------------------------------


def _tree(value: Any, tensors: _Held, path: str, deep: int) -> Any:
    value = plain(value)
    kind = type(value)
    if kind is int and value.bit_length() > MOST_BITS:
        raise Refused(f"a number of {value.bit_length()} bits cannot be kept", where=_shown(path), remedy="bytes")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": value.hex()}
    if kind is bytes:
        return {"bytes": _held(tensors, value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _held(tensors, _kept(value, path))}
    if deep == MOST_DEEP:
        raise Refused(f"lies more than {MOST_DEEP} containers deep", where=_shown(path), remedy="a flatter value")
    if kind in (list, tuple):
        if kind is list and set(map(type, value)) <= _PLAIN:
            return value
        items = [_tree(item, tensors, f"{path}[{at}]", deep + 1) for at, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _DICTS:
        pairs = []
        for key, item in ((plain(key), item) for key, item in value.items()):
            if type(key) not in (str, int):
                raise Refused(f"a key that is a {type(key).__name__} cannot be kept", where=_shown(path),
                              remedy="keys that are str or int")
            pairs.append([key, _tree(item, tensors, f"{path}[{key!r}]", deep + 1)])
        return {_DICTS[kind]: pairs}
    raise Refused(f"a {kind.__module__}.{kind.__qualname__} cannot be kept", where=_shown(path),
                  remedy="numbers, str, bytes, tensors, and list, tuple or dict of them")


def _kept(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.layout != torch.strided or value.is_quantized or value.dtype not in DTYPES or value.is_meta:
        raise Refused(f"a tensor of {value.dtype}, {value.layout}, on {value.device} cannot be kept",
                      where=_shown(path), remedy="a dense tensor of a plain type")
    return value.detach()


def _held(tensors: _Held, tensor: torch.Tensor | bytes) -> str:
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def _shown(path: str) -> str:
    return f"user state{path}"


def _too_large(nbytes: int, most: int) -> Refused:
    return Refused(f"has {nbytes:,} bytes, at most {most:,} are kept", where="user state",
                   remedy="what says how to make it again, such as a seed and a position")


# -- and back --------------------------------------------------------------------------------------------------


def _value(tree: Any, tensors: Mapping[str, torch.Tensor], where: str, deep: int) -> Any:
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if deep > MOST_DEEP:
        raise _bad("is nested too deeply", where)
    if isinstance(tree, list):
        return [_value(item, tensors, where, deep + 1) for item in tree]
    if len(tree) != 1:
        raise _bad("has a value of no known kind", where)
    ((kind, held),) = tree.items()
    if kind in ("tensor", "bytes") and isinstance(held, str) and held in tensors:
        found = tensors[held]
        if kind == "tensor":
            return found
        if found.dtype != torch.uint8 or found.dim() != 1:
            raise _bad("has bytes that are none", where)
        return bytes(found.tolist())
    if kind == "float" and held in ("inf", "-inf", "nan"):
        return float(held)
    if kind == "tuple" and isinstance(held, list):
        return tuple(_value(item, tensors, where, deep + 1) for item in held)
    for made, name in _DICTS.items():
        if kind == name and isinstance(held, list) and all(_is_pair(pair) for pair in held):
            pairs = {key: _value(item, tensors, where, deep + 1) for key, item in held}
            if len(pairs) < len(held):
                raise _bad("has a key twice", where)
            return made(pairs)
    raise _bad("has a value of no known kind", where)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)


def _specs(entries: Mapping[str, Any], where: str) -> dict[str, TensorSpec]:
    """What the header says that there is; `unpack` holds the bytes against it."""
    names: dict[str, str] = {short: name for name, short in DTYPES.values()}
    out = {}
    for name, entry in entries.items():
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(dtype, str) or dtype not in names or not is_shape(shape):
            raise _bad(f"tensor {name[:40]!r} is not described", where)
        out[name] = TensorSpec(names[dtype], tuple(shape))
    return out


def _number(said: Any, name: str, where: str) -> int:
    if not isinstance(said, str) or not re.fullmatch("[0-9]{1,18}", said):
        raise _bad(f"{name} is not a number", where)
    return int(said)


def _bad(what: str, where: str) -> UserError:
    return UserError(what, where=where, remedy="another copy of this version, or another version")
