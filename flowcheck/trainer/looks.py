"""What a boundary asks of tensors and of an optimizer: in Python, which is the reference of what C does (boundary.py).

    looks = looks_at(tensors)           C, where it is there and knows such tensors; else this module
    looks.gradients(parameters)         (gradients, versions, all there): objects or None; how often each was written to
    looks.same_gradients(parameters, gradients, versions)
    looks.versions(tensors)             bytes, equal if none was written to between
    looks.look(groups, members)         (versions of all members added up, a byte for each: does an optimizer step it);
                                        None: the optimizer's groups have other members; of C, or these in no list
    looks.same_options(groups, options_of(groups))      by identity, keys and their order, too
    looks.window(state, parameters, places)             what these parameters and their state in the optimizer are
    looks.same_window(state, parameters, places, *window)       SAME, MOVED, OTHERS, WRITTEN
    looks.same_memory(address, bytes, ...)              of each pair: are these bytes there?

A version is torch's `_version`, -1 of None; of shards (DTensor) both the whole's and the shard's count. The training
thread.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowcheck.trainer import boundary
from flowcheck.trainer.describe.parts import stepped

__all__ = [
    "MOVED", "OTHERS", "SAME", "WRITTEN", "gradients", "look", "looks_at", "options_of", "same_gradients",
    "same_memory", "same_options", "same_window", "versions", "window",
]

SAME, MOVED, OTHERS, WRITTEN = range(4)
Window = tuple[list[Any], Any]  # objects, and numbers
_version, _gradient = attrgetter("_version"), attrgetter("grad")


def looks_at(tensors: Iterable[Any] = ()) -> Any:
    """Of these, and of groups that have them. C knows what torch's own classes are alone."""
    library = boundary.library()
    return library if library is not None and boundary.suits(tensors) else sys.modules[__name__]


def gradients(parameters: Sequence[Any]) -> tuple[list[Any], bytes, bool]:
    held = list(map(_gradient, parameters))
    return held, versions(held), not any(one is None for one in held)


def same_gradients(parameters: Sequence[Any], held: Sequence[Any], before: bytes) -> bool:
    now = list(map(_gradient, parameters))
    return len(now) == len(held) and all(map(is_, now, held)) and versions(now) == before


def versions(tensors: Sequence[Any]) -> bytes:
    found = [-1 if one is None else one._version for one in tensors]
    found += [one._local_tensor._version for one in tensors if isinstance(one, DTensor)]
    return array("q", found).tobytes()


def look(groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Any]]) -> tuple[int, bytes] | None:
    if len(groups) != len(members) or not all(map(_same_members, groups, members)):
        return None
    mine = [one for each in members for one in each]
    return sum(memoryview(versions(mine)).cast("q")), bytes(map(stepped, mine))


def _same_members(group: Mapping[str, Any], before: Sequence[Any]) -> bool:
    now = group["params"]
    return len(now) == len(before) and all(map(is_, now, before))


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """What an optimizer's groups say besides their parameters: keys and values of all, one after the other."""
    return [one for group in groups for pair in group.items() if pair[0] != "params" for one in pair]


def same_options(groups: Iterable[Mapping[str, Any]], before: Sequence[Any]) -> bool:
    now = options_of(groups)
    return len(now) == len(before) and all(map(is_, now, before))


def window(state: Mapping[Any, Any], parameters: Sequence[Any], places: bytearray) -> Window:
    """A parameter without state has None in place of it, and whatever it gets is looked at the next time."""
    entries = [entry if (entry := state.get(one)) else None for one in parameters]
    objects = [None if entry is None else (entry, tuple(entry.values())) for entry in entries]
    return objects, (_places(parameters), _written(objects))


def same_window(
    state: Mapping[Any, Any], parameters: Sequence[Any], places: bytearray, objects: Sequence[Any],
    numbers: tuple[list[int], bytes],
) -> int:
    if _places(parameters) != numbers[0]:
        return MOVED
    for one, before in zip(parameters, objects, strict=True):
        if before is not None:
            entry, values = state.get(one), before[1]
            if entry is not before[0] or len(entry) != len(values) or not all(map(is_, entry.values(), values)):
                return OTHERS
    return SAME if _written(objects) == numbers[1] else WRITTEN


def _written(objects: Sequence[Any]) -> bytes:
    return versions([value for one in objects if one is not None for value in one[1]
                     if isinstance(value, torch.Tensor)])


def _places(tensors: Sequence[Any]) -> list[int]:
    return [(one._local_tensor if isinstance(one, DTensor) else one).data_ptr() for one in tensors]


def same_memory(*pairs: Any) -> bool:
    return all(ctypes.string_at(address, len(held)) == held
               for address, held in zip(pairs[::2], pairs[1::2], strict=True))
