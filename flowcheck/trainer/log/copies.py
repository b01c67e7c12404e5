"""Copies of tensors as an optimizer had them: their bits, their type, their order in memory, and where they lay.

    copy_of(value, like)          nested values, with a TensorCopy in the place of each tensor
    live(value, like)             the same with new tensors, each where it lay: `like` is its parameter
    on_host(values)               the same with what lies on devices in this machine's memory

A kernel may round otherwise where elements lie otherwise (columns first, a view with gaps, one number repeated), so a
copy has the strides of what it is a copy of. Of a DTensor it has the shard that this rank holds. torch and the standard
library.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowcheck.control.numbers import is_numpy, plain
from flowcheck.errors import UserError
from flowcheck.trainer.copies import Copies
from flowcheck.trainer.describe.parts import local

__all__ = [
    "GAPS", "Place", "TensorCopy", "copy_of", "live", "nbytes_of", "on_host", "once", "refuse", "spans_of",
    "strided", "tensors_of",
]

GAPS = 16  # times what its elements take is what a tensor with gaps may span
_SMALL = 4096  # bytes: what it may span in any case
_FIXED = {bool, int, float, str, bytes, torch.dtype}  # nobody can change them
_OWN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor}


def refuse(value: Any, where: str) -> Any:
    """Raises UserError: it is nothing that a file can have."""
    raise UserError(f"is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written", where=where,
                    remedy="numbers, str, tensors, and list, tuple or dict of them")


class Place(StrEnum):
    """Where a tensor lay: in this machine's memory, on the device of its parameter, or as a shard of a DTensor."""

    HOST = "host"
    DEVICE = "device"
    SHARD = "shard"


@dataclass(frozen=True, eq=False)
class TensorCopy:
    """tensor: dense or sparse (COO), on any device; of a DTensor this rank's shard."""

    tensor: torch.Tensor
    place: Place


def copy_of(
    value: Any, like: torch.Tensor | None, where: str, other: Callable[[Any, str], Any] = refuse
) -> Any:
    """like: the parameter that it is of; None: of none. where: what the value is called. other: what stands for
    anything but a plain value. A copy is made on the device that has the tensor, in the order of its stream.
    Raises UserError for what could not be given back as it was."""
    if isinstance(value, torch.Tensor):
        return _tensor_copy(value, like, where)
    kind = type(value)
    if value is None or kind in _FIXED:
        return value
    if kind in (list, tuple):
        return kind(copy_of(one, like, f"{where}[{at}]", other) for at, one in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        return kind({key: copy_of(one, like, f"{where}[{key!r}]", other) for key, one in value.items()})
    if is_numpy(value):
        if kind.__name__ in ("float64", "bool"):  # these compute as Python's own do
            return plain(value)
        raise UserError(f"is a {kind.__name__} of numpy's, which computes otherwise than Python's numbers", where=where,
                        remedy="float(), int()")
    return other(value, where)


def _tensor_copy(value: torch.Tensor, like: torch.Tensor | None, where: str) -> TensorCopy:
    if type(value) not in _OWN:
        raise UserError(f"is a {type(value).__module__}.{type(value).__qualname__}, whose parts are not known",
                        where=where, remedy="plain tensors")
    if isinstance(value, DTensor) and not (
        isinstance(like, DTensor) and value.shape == like.shape and value.placements == like.placements
        and value.device_mesh == like.device_mesh
    ):
        raise UserError("is a DTensor that is not laid out as its parameter", where=where, remedy="plain tensors")
    place = Place.SHARD if isinstance(value, DTensor) else Place.HOST if value.is_cpu else Place.DEVICE
    if place is Place.DEVICE and like is not None and value.device != local(like).device:
        raise UserError(f"is on {value.device}, and its parameter on {local(like).device}", where=where,
                        remedy="state on the parameter's device, or on the CPU")
    held = local(value).detach()
    if held.layout is torch.sparse_coo:
        return TensorCopy(held.clone(), place)
    if held.layout is not torch.strided or held.is_quantized or held.is_meta:
        raise UserError(f"is a tensor of {held.dtype}, {held.layout}, on {held.device}", where=where,
                        remedy="a dense tensor")
    held = held.resolve_conj().resolve_neg()
    if spans_of(held.shape, held.stride(), held.element_size()) < 0:
        raise UserError(f"is a view with strides {list(held.stride())} of {list(held.shape)} elements, which lie over"
                        " each other or far apart", where=where, remedy="contiguous()")
    return TensorCopy(strided(held, held.stride()), place)


def spans_of(shape: Sequence[int], strides: Sequence[int], width: int) -> int:
    """Elements from the first one to the last one in memory; negative: they lie over each other (other than one that
    is repeated, with a stride of 0), or too far apart."""
    reach, count = 1, 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent < 2 or not stride:
            continue
        if stride < reach:
            return -1
        reach += stride * (extent - 1)
        count *= extent
    return reach if reach * width <= max(GAPS * count * width, _SMALL) else -1


def strided(source: torch.Tensor, strides: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """A copy of a dense tensor that has these strides, where they make a difference. device: None: where it is."""
    out = torch.empty_strided(source.shape, strides, dtype=source.dtype, device=device or source.device)
    with torch.no_grad():
        once(out, strides).copy_(once(source, strides))
    return out


def once(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Without the repetitions that strides of 0 make."""
    for dimension, stride in enumerate(strides):
        if not stride and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def live(value: Any, like: torch.Tensor) -> Any:
    """Nobody else holds these tensors. like: the parameter that they are of. Raises UserError: a shard where
    that is not sharded."""
    return _mapped(value, lambda one: _live(one, like))


def _live(one: TensorCopy, like: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if one.place is Place.HOST else local(like).device
    held = one.tensor
    made = strided(held, held.stride(), device) if held.layout is torch.strided else held.to(device, copy=True)
    if one.place is not Place.SHARD:
        return made
    if not isinstance(like, DTensor):
        raise UserError("is a shard, and its parameter here is whole", where="redo",
                        remedy="fully_shard the model as it was")
    return DTensor.from_local(made, like.device_mesh, like.placements, run_check=False, shape=like.shape,
                              stride=like.stride())


def on_host(values: Sequence[Any]) -> Callable[[], list[Any]]:
    """Call at the boundary, and on any thread what it returns, which waits for the copies and brings them to this
    machine's memory. Strides stay."""
    found = [one for value in values for one in tensors_of(value)]
    away = {str(at): one.tensor for at, one in enumerate(found) if not one.tensor.is_cpu}
    copies = Copies(away, sum(tensor.nbytes for tensor in away.values()))

    def bring() -> list[Any]:
        here = copies.on_host() if away else {}
        numbers = iter(range(len(found)))

        def moved(one: TensorCopy) -> TensorCopy:
            brought = here.get(str(next(numbers)))
            if brought is None:
                return one
            if brought.layout is torch.strided and brought.stride() != one.tensor.stride():
                brought = strided(brought, one.tensor.stride())
            return TensorCopy(brought, one.place)

        return [_mapped(value, moved) for value in values]

    return bring


def tensors_of(value: Any) -> Iterator[TensorCopy]:
    if isinstance(value, TensorCopy):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)


def nbytes_of(value: Any) -> int:
    """Bytes of all tensors in a nested value, live ones or copies."""
    if isinstance(value, TensorCopy):
        value = value.tensor
    if isinstance(value, torch.Tensor):
        held = local(value)
        return held.nbytes if held.layout is torch.strided else held._values().nbytes + held._indices().nbytes
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(nbytes_of, value))


def _mapped(value: Any, each: Callable[[TensorCopy], Any]) -> Any:
    """In the order of `tensors_of`."""
    if isinstance(value, TensorCopy):
        return each(value)
    kind = type(value)
    if kind in (list, tuple):
        return kind(_mapped(one, each) for one in value)
    if kind in (dict, OrderedDict, Counter):
        return kind({key: _mapped(one, each) for key, one in value.items()})
    return value
