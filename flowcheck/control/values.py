"""Nested values as JSON, of what is neither a number nor a text as the caller writes it: no pickle.

    tree_of(value, other, path)       JSON; Refused names the path of what cannot be kept
    value_of(tree, other, where)      the same value again, from a stranger's JSON; UserError

Kept are None, bool, int, float, str, and list, tuple, dict (also OrderedDict and Counter, which torch's schedulers use)
of them, with keys that are str or int. Each is of exactly that type: a subclass could not be given back. A scalar of
numpy's is kept as the Python number that it is. Standard library. Any thread.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from flowcheck.control.numbers import plain
from flowcheck.errors import UserError

__all__ = ["Refused", "tree_of", "value_of"]

MOST_BITS = 4096  # of a whole number; Python itself reads some thousand digits
MOST_DEEP = 32  # containers in containers
_PLAIN = {bool, str, type(None)}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_DOUBLE, _NAN = struct.Struct(">d"), struct.pack(">d", math.nan)


class Refused(UserError):
    """A value that cannot be kept. where: its path."""


def tree_of(value: Any, other: Callable[[Any, str], Any], path: str, deep: int = 0) -> Any:
    """other(value, path): JSON of anything else, an object of one key, for `value_of` to know it by; or raises Refused.
    path: what the value is called. deep: containers around it."""
    value = plain(value)
    kind = type(value)
    if kind is int and value.bit_length() > MOST_BITS:
        raise Refused(f"a number of {value.bit_length()} bits cannot be kept", where=path, remedy="bytes")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": _not_finite(value)}
    if kind not in (list, tuple) and kind not in _DICTS:
        return other(value, path)
    if deep == MOST_DEEP:
        raise Refused(f"lies more than {MOST_DEEP} containers deep", where=path, remedy="a flatter value")
    if kind in (list, tuple):
        if kind is list and set(map(type, value)) <= _PLAIN:
            return value
        items = [tree_of(item, other, f"{path}[{at}]", deep + 1) for at, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    pairs = []
    for key, item in ((plain(key), item) for key, item in value.items()):
        if type(key) not in (str, int):
            raise Refused(f"a key that is a {type(key).__name__} cannot be kept", where=path,
                          remedy="keys that are str or int")
        pairs.append([key, tree_of(item, other, f"{path}[{key!r}]", deep + 1)])
    return {_DICTS[kind]: pairs}


def _not_finite(value: float) -> str:
    """A NaN other than Python's own has its bits."""
    bits = _DOUBLE.pack(value)
    return value.hex() if not math.isnan(value) or bits == _NAN else f"0x{bits.hex()}"


def value_of(tree: Any, other: Callable[[str, Any], Any], where: str, deep: int = 0) -> Any:
    """other(kind, held): what `tree_of`'s `other` has written as {kind: held}; NotImplemented: it does not know this
    kind. Raises UserError: the tree is not one of these."""
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if deep > MOST_DEEP:
        raise _bad("is nested too deeply", where)
    if isinstance(tree, list):
        return [value_of(item, other, where, deep + 1) for item in tree]
    if len(tree) != 1:
        raise _bad("has a value of no known kind", where)
    ((kind, held),) = tree.items()
    if kind == "float" and isinstance(held, str) and (found := _read_not_finite(held)) is not None:
        return found
    if kind == "tuple" and isinstance(held, list):
        return tuple(value_of(item, other, where, deep + 1) for item in held)
    for made, name in _DICTS.items():
        if kind == name and isinstance(held, list) and all(_is_pair(pair) for pair in held):
            pairs = {key: value_of(item, other, where, deep + 1) for key, item in held}
            if len(pairs) < len(held):
                raise _bad("has a key twice", where)
            return made(pairs)
    if (value := other(kind, held)) is NotImplemented:
        raise _bad("has a value of no known kind", where)
    return value


def _read_not_finite(text: str) -> float | None:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    try:
        value: float = _DOUBLE.unpack(bytes.fromhex(text.removeprefix("0x")))[0]
    except (ValueError, struct.error):
        return None
    return value if math.isnan(value) else None


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)


def _bad(what: str, where: str) -> UserError:
    return UserError(what, where=where, remedy="another copy of this version, or another version")
