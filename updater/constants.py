"""What a replica holds besides parameters and optimizer state: constants, once for all versions, and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from updater.errors import ReplicaError
from updater.store import Store

__all__ = ["check_buffers", "fill"]


def check_buffers(store: Store, buffers: Mapping[str, torch.Tensor]) -> None:
    """Raises ReplicaError for what is not a buffer, or not of its shape and type."""
    raw = {array.name: array for array in store.arrays if array.role == "raw"}
    for name, tensor in buffers.items():
        if name not in raw:
            raise ReplicaError(f"{name!r} is not a buffer")
        if (raw[name].dtype, raw[name].shape) != (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)):
            raise ReplicaError(f"buffer {name!r} is {raw[name].dtype} {raw[name].shape}, given {tensor.dtype}"
                               f" {tuple(tensor.shape)}")


def fill(store: Store, ranges: Sequence[tuple[str, int, int]], values: Mapping[str, torch.Tensor]) -> None:
    """Write elements of constants. ranges: (constant, first element, elements), disjoint. values: of these elements
    alone, 1-D, the ranges of a constant one behind the other. Raises ReplicaError for what does not fit; nothing is
    written then."""
    held = {name: tensor.reshape(-1) for (name, _), tensor in store.tensors(None).items()}
    at = dict.fromkeys(values, 0)
    pieces = []
    for name, start, length in ranges:
        if name not in held or not 0 <= start < start + length <= held[name].numel():
            raise ReplicaError(f"elements [{start}, {start + length}) of {name!r} are none of a constant")
        if name not in values:
            raise ReplicaError(f"elements of the constant {name!r} without their values")
        pieces.append((held[name][start : start + length], values[name][at[name] : at[name] + length]))
        at[name] += length
    for name, count in at.items():
        if values[name].shape != (count,) or values[name].dtype != held[name].dtype:
            raise ReplicaError(
                f"{count} elements of the constant {name!r} come as {values[name].dtype} {tuple(values[name].shape)},"
                f" and it is {held[name].dtype}"
            )
    for place, piece in pieces:
        place.copy_(piece)
