"""Which arrays a replica of a model and its optimizer has, and whether it can have one.

    check_tensors(...)      tensors, states and ties are such as a replica holds
    plan(...)               entries, states and arrays: the part of a file's layout that they decide
    needed(...)             bytes of memory that it takes, before any tensor is here
    check_alone(...)        what is updated in 16 bits alone can be exact here

Pure, but for `check_alone`, which tries torch's operators once per process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from updater.errors import ReplicaError
from updater.optimizers import OptimizerSpec, packed
from updater.rounding_modes import RoundingMode
from updater.sixteen import check_here
from updater.slot import STATES
from updater.store import extent, plan_arrays

__all__ = ["check_alone", "check_tensors", "needed", "plan"]

_LOW = (torch.bfloat16, torch.float16)


def check_tensors(
    tensors: Mapping[str, torch.Tensor], optimizer: OptimizerSpec, state: Mapping[str, Mapping[str, Any]],
    tied: Mapping[str, str], masters: bool,
) -> None:
    """Refuse tensors, states and ties that no replica can hold. Raises ReplicaError naming the tensor."""
    for name in optimizer.params:
        if name not in tensors:
            raise ReplicaError(f"{name!r} is to be optimized and is not in the model")
        if tensors[name].dtype is not torch.float32 and tensors[name].dtype not in _LOW:
            raise ReplicaError(f"{name!r} is to be optimized and is {tensors[name].dtype}; fp32, bf16 or fp16 can be")
    for name, owner in tied.items():
        if owner not in optimizer.params or name in optimizer.params or name not in tensors:
            raise ReplicaError(f"{name!r} cannot be tied to {owner!r}: one model entry, one optimized tensor")
        here = not tensors[name].is_meta
        if tensors[name].shape != tensors[owner].shape or (here and not torch.equal(tensors[name], tensors[owner])):
            raise ReplicaError(f"{name!r} is tied to {owner!r} and differs from it")
    group = {name: group.options for group in optimizer.groups for name in group.params}
    for name in state:
        if name not in group:
            raise ReplicaError(f"optimizer state of {name!r}, which is not optimized")
        known = {*optimizer.states(group[name]), *(["step"] if optimizer.name != "sgd" else [])}
        alone = tensors[name].dtype in _LOW and not masters
        if tensors[name].dtype in _LOW and masters:
            known.add("master")
        for key, value in state[name].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != tensors[name].shape:
                raise ReplicaError(f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}")
            narrow = alone and key in known - {"step"} and isinstance(value, torch.Tensor)
            if narrow and value.dtype != tensors[name].dtype:
                raise ReplicaError(f"optimizer state {key!r} of {name!r} is {value.dtype}, not {tensors[name].dtype}")
            if key not in known and value is not None:
                raise ReplicaError(f"optimizer state {key!r} of {name!r} is not one that {optimizer.name} has here")


def check_alone(arrays: Sequence[Mapping[str, Any]], optimizer: OptimizerSpec, rounding: RoundingMode) -> None:
    """Refuse what is updated in 16 bits alone where that cannot be exact: raises OptimizerError. arrays: of a slot."""
    for held in sorted({array["dtype"] for array in arrays if array["role"] == "p"} - {"float32"}):
        rounding.check(optimizer.name, held)
        check_here(held)


def plan(
    tensors: Mapping[str, torch.Tensor], optimizer: OptimizerSpec, buffers: frozenset[str], tied: Mapping[str, str],
    masters: bool,
) -> dict[str, Any]:
    """The part of the layout that the tensors decide."""
    group = {name: group.options for group in optimizer.groups for name in group.params}
    wanted, fixed, entries = [], [], []
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        role = "raw" if name in buffers else "fixed"
        copied = tensor.dtype in _LOW and masters
        if name in group:
            role = "low" if copied else "p"
            roles = ["p", *(STATES[key] for key in optimizer.states(group[name]))]
            wanted += [(name, each, "float32" if copied else dtype, shape) for each in roles]
            if role == "low":
                wanted.append((name, "low", dtype, shape))
        elif name in tied:
            role = "low" if copied else "p"
        elif role == "raw":
            wanted.append((name, role, dtype, shape))
        else:
            fixed.append((name, role, dtype, shape))
        entries.append({"name": name, "role": role, "tied": tied.get(name, "")})
    wanted.append(("", "steps", "float32", (len(optimizer.params),)))
    wanted.append(("", "options", "float64", (len(optimizer.groups), packed(optimizer.name))))
    return {
        "entries": entries,
        "states": {name: list(optimizer.states(group[name])) for name in optimizer.params},
        "constants": [vars(array) for array in plan_arrays(fixed)[0]],
        "arrays": [vars(array) for array in plan_arrays(wanted)[0]],
    }


def needed(
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]], optimizer: OptimizerSpec, slots: int, *,
    buffers: frozenset[str] = frozenset(), tied: Mapping[str, str] | None = None, masters: bool = True,
) -> int:
    """Bytes of all slots and constants of a replica; its file has its own description as well. shapes: shape and
    dtype of every entry."""
    tensors = {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    planned = plan(tensors, optimizer, buffers, tied or {}, masters)
    return extent(planned["constants"]) + slots * extent(planned["arrays"])
