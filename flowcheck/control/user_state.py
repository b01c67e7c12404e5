"""What a rank gives besides model and optimizer, as bytes: nested values and tensors in a safetensors file, no pickle.

    data = pack({"loader": {"seed": 7, "at": 3}}, step=20, rank=3, ranks=4)      Refused: a value that cannot be kept
    Packer().pack(...)                                                           the same, again and again
    UserState.of(data, where)                                                    read from anybody, checked

Kept are bytes, tensors, and what values.py keeps.
The file's metadata has the structure as JSON, and SHA-256 over the whole file with zeros in the hash's own place. So
one name, one file, and any loader of safetensors shows what is in it. A tensor is copied to memory when it is packed.
Torch and the standard library. Any thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import marshal
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowcheck.control.tensors import DTYPES, HEADER_LIMIT, pieces, specs_of, unpack
from flowcheck.control.values import Refused, tree_of, value_of
from flowcheck.errors import UserError

__all__ = ["USER_BYTES", "Packer", "Refused", "UserState", "pack", "seal_of", "tail_bytes", "tail_of"]

USER_BYTES = 1 << 20  # of one rank's state, the whole file
FORM = "user/1"
_OPENS = b'{"__metadata__":{"sha256":"'  # what every header begins with; the hash follows
_BEGINS = f'{_OPENS.decode()}{"0" * 64}","flowcheck":"'
_HASH = slice(8 + len(_OPENS), 8 + len(_OPENS) + 64)
_Held = dict[str, torch.Tensor | bytes]  # by name in the file; bytes are a tensor of one dimension there
_dumps = json.JSONEncoder(separators=(",", ":")).encode


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
        tensors = unpack(bytearray(data), specs_of(entries, where), where)
        numbers = [_number(about.get(name), name, where) for name in ("step", "rank", "ranks")]
        try:
            tree = json.loads(about["tree"])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise _bad("has no structure", where) from None
        step, rank, ranks = numbers
        return cls(step, rank, ranks, value_of(tree, partial(_value, tensors, where), where))


def pack(state: Any, *, step: int, rank: int, ranks: int, most: int = USER_BYTES) -> bytes:
    """One file. Raises Refused: a value of a type that is not kept, or more than `most` bytes in all."""
    return Packer().pack(state, step=step, rank=rank, ranks=ranks, most=most)


@dataclass(frozen=True)
class _Written:
    """What of a file is the same as long as `fixed` are the same objects. texts: of these, as the header has them.
    tensors: of the header, behind what it says of the file. data: what follows it."""

    about: tuple[int, int]
    fixed: Mapping[str, Any]
    texts: Mapping[str, str]
    tensors: str
    data: bytes


class Packer:
    """What a rank gives at each boundary, most of which is as it was: what has not changed is not written again. One
    thread."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[bytes, str]] = {}  # by key: a value as marshal writes it, and as JSON
        self._written: _Written | None = None
        self._last = b"", 0  # a file without its hash, and its step
        self._again: tuple[bytes, bytes, Any] | None = None  # of that: before the step, after it, and the former's hash

    def pack(
        self, state: Any, *, step: int, rank: int, ranks: int, most: int = USER_BYTES, fixed: Collection[str] = ()
    ) -> bytes:
        """As the function. fixed: keys whose values nobody writes to, so that the same object is the same value."""
        keys = type(state) is dict and all(type(key) is str for key in state)
        data = self._with_what_is_fixed(state, step, rank, ranks) if keys else None
        if data is None:
            data = self._whole(state, keys, step, rank, ranks, most, fixed)
        elif len(data) > most:
            raise _too_large(len(data), most)
        self._last = data, step
        self._again = None
        seal = hashlib.sha256(data).hexdigest().encode()
        return b"".join((data[: _HASH.start], seal, data[_HASH.stop :]))

    def again(self, step: int) -> bytes | None:
        """The file that was packed last, of another step; None: it has to be packed."""
        data, packed = self._last
        said = str(step).encode()
        if not data or len(said) != len(str(packed)):
            return None
        if self._again is None:
            before, mark, after = data.partition(f'"step":"{packed}'.encode())  # once: quotes in the tree are escaped
            begins = before + mark[: -len(said)]
            self._again = begins, after, hashlib.sha256(begins)
        begins, after, so_far = self._again
        hashed = so_far.copy()
        hashed.update(said)
        hashed.update(after)
        seal = hashed.hexdigest().encode()
        return b"".join((begins[: _HASH.start], seal, begins[_HASH.stop :], said, after))

    def _with_what_is_fixed(self, state: Mapping[str, Any], step: int, rank: int, ranks: int) -> bytes | None:
        """The file without its hash; None: it has to be written as a whole."""
        known = self._written
        if known is None or known.about != (rank, ranks) or not known.fixed.keys() <= state.keys():
            return None
        texts, held = [], _Held()
        for key, value in state.items():
            if key not in known.fixed:
                texts.append(_in_header(key, self._text(key, value, held)))
            elif value is known.fixed[key]:
                texts.append(known.texts[key])
            else:
                return None
        if held:
            return None
        tree = f'{{\\"dict\\":[{",".join(texts)}]}}'
        text = (f'{_BEGINS}{FORM}","format":"pt","step":"{step}","rank":"{rank}","ranks":"{ranks}","tree":"{tree}"}}'
                f'{known.tensors}').encode()
        text += b" " * (-len(text) % 8)
        return b"".join((len(text).to_bytes(8, "little"), text, known.data))

    def _whole(
        self, state: Any, keys: bool, step: int, rank: int, ranks: int, most: int, fixed: Collection[str]
    ) -> bytes:
        """The file without its hash."""
        held: _Held = {}
        texts, others = dict[str, str](), 0  # of others than `fixed`: what they hold
        if keys:
            for key, value in state.items():
                before = len(held)
                texts[key] = self._text(key, value, held)
                others += len(held) - before if key not in fixed else 0
            tree = f'{{"dict":[{",".join(f"[{_dumps(key)},{text}]" for key, text in texts.items())}]}}'
        else:
            tree = _dumps(_tree(state, held, "", 0))
        nbytes = sum(len(one) if isinstance(one, bytes) else one.nbytes for one in held.values())
        if nbytes > most:  # before anything is copied
            raise _too_large(nbytes, most)
        entries, pieces = _pieces(held)
        about = {"sha256": "0" * 64, "flowcheck": FORM, "format": "pt", "step": str(step), "rank": str(rank),
                 "ranks": str(ranks), "tree": tree}
        text = _dumps({"__metadata__": about, **entries}).encode()
        text += b" " * (-len(text) % 8)
        data = b"".join(pieces)
        if 8 + len(text) + len(data) > most:
            raise _too_large(8 + len(text) + len(data), most)
        kept = {key: state[key] for key in fixed if keys and key in state}
        self._written = None if others or not kept or any(isinstance(one, torch.Tensor) for one in held.values()) else (
            _Written((rank, ranks), kept, {key: _in_header(key, texts[key]) for key in kept},
                     "," + _dumps(entries)[1:] if entries else "}", data))
        return b"".join((len(text).to_bytes(8, "little"), text, data))

    def _text(self, key: str, value: Any, held: _Held) -> str:
        """A value as JSON. marshal tells apart what JSON does, 1 from True and 0.0 from -0.0, too; but what is not
        plain it writes as bytes, or not at all."""
        known, mark = self._texts.get(key), _mark(value)
        if known is not None and mark and known[0] == mark:
            return known[1]
        before, others = len(held), _Held()
        text = _dumps(_tree(value, held, f"[{key!r}]", 1))
        if mark and len(held) == before:
            if b"s" in mark:  # bytes among them, perhaps
                _tree(marshal.loads(mark), others, "", 1)
            if not others:
                self._texts[key] = mark, text
        return text


def _in_header(key: str, text: str) -> str:
    """A pair of the tree, which is a text within the header."""
    return _dumps(f"[{_dumps(key)},{text}]")[1:-1]


def _mark(value: Any) -> bytes:
    """Equal for equal values alone, if they are plain; b"": it has none."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return b""


def _pieces(held: _Held) -> tuple[dict[str, Any], list[bytes]]:
    """Of a safetensors file: what its header says of these, and they; the widest first, as in `tensors.header`."""
    entries: dict[str, Any] = {}
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
    return entries, data


def _width(one: torch.Tensor | bytes) -> int:
    return 1 if isinstance(one, bytes) else one.element_size()


def _bytes(tensor: torch.Tensor) -> bytes:
    """In row-major order."""
    if tensor.is_cpu and tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    return b"".join(pieces(tensor))


def tail_of(data: bytes) -> bytes:
    """What of a file follows its header: all tensors and bytes of the state, as they are."""
    return data[len(data) - tail_bytes(data) :]


def tail_bytes(data: bytes) -> int:
    """How many these are."""
    return max(0, len(data) - 8 - int.from_bytes(data[:8], "little"))


def seal_of(data: bytes | bytearray, where: str) -> str:
    """The hash that a file carries. Raises UserError: it is not such a file, or has another byte than those written."""
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
    return tree_of(value, partial(_apart, tensors), f"user state{path}", deep)


def _apart(tensors: _Held, value: Any, path: str) -> Any:
    kind = type(value)
    if kind is bytes:
        return {"bytes": _held(tensors, value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _held(tensors, _kept(value, path))}
    raise Refused(f"a {kind.__module__}.{kind.__qualname__} cannot be kept", where=path,
                  remedy="numbers, str, bytes, tensors, and list, tuple or dict of them")


def _kept(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.layout != torch.strided or value.is_quantized or value.dtype not in DTYPES or value.is_meta:
        raise Refused(f"a tensor of {value.dtype}, {value.layout}, on {value.device} cannot be kept",
                      where=path, remedy="a dense tensor of a plain type")
    return value.detach()


def _held(tensors: _Held, tensor: torch.Tensor | bytes) -> str:
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def _too_large(nbytes: int, most: int) -> Refused:
    return Refused(f"has {nbytes:,} bytes, at most {most:,} are kept", where="user state",
                   remedy="what says how to make it again, such as a seed and a position")


# -- and back --------------------------------------------------------------------------------------------------


def _value(tensors: Mapping[str, torch.Tensor], where: str, kind: str, held: Any) -> Any:
    if kind not in ("tensor", "bytes") or not isinstance(held, str) or held not in tensors:
        return NotImplemented
    found = tensors[held]
    if kind == "tensor":
        return found
    if found.dtype != torch.uint8 or found.dim() != 1:
        raise _bad("has bytes that are none", where)
    return bytes(found.tolist())


def _number(said: Any, name: str, where: str) -> int:
    if not isinstance(said, str) or not re.fullmatch("[0-9]{1,18}", said):
        raise _bad(f"{name} is not a number", where)
    return int(said)


def _bad(what: str, where: str) -> UserError:
    return UserError(what, where=where, remedy="another copy of this version, or another version")
