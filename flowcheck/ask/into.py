"""Tensors of the caller's that a version is received into: may they be, and what of those that share memory.

    into = Into(version, {name: tensor, ...})     raises UserError: one does not fit, or has no memory
    model = node.tensors(..., into.alone)         straight into those that have their memory for themselves
    into.finish(model)                            the others get copies, and have to hold what the version has

Tied parameters share memory and are given the same values. Where values differ, the one that came last would stand in
both, and each was right when its hash was taken. Torch and the standard library. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowcheck.control.tensors import memory
from flowcheck.control.version import MODEL, Version
from flowcheck.errors import UserError

__all__ = ["Into"]


class Into:
    """alone: those that share memory with no other one."""

    def __init__(self, version: Version, given: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in given.items():
            _fits(version, name, tensor)
        shared = _shared(given)
        self.alone = {name: tensor for name, tensor in given.items() if name not in shared}
        self._shared = {name: given[name] for name in sorted(shared)}
        self._step = version.step

    def finish(self, model: dict[str, torch.Tensor]) -> None:
        """model: what came, every hash right. Raises UserError; what was given holds anything then."""
        with torch.no_grad():
            for name, tensor in self._shared.items():
                tensor.copy_(model[name])
        for name, tensor in self._shared.items():
            held = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            if memory(held) != memory(model[name]):
                raise UserError(
                    f"tensor {name!r} shares memory with others, or within itself, and step {self._step} has different"
                    " values there", where="into", remedy="tensors that have memory of their own")
        model.update(self._shared)


def _fits(version: Version, name: str, tensor: torch.Tensor) -> None:
    if why := _no_place(tensor):
        raise UserError(f"tensor {name!r} {why}", where="into", remedy="tensors that have memory of their own")
    digest = version.files[MODEL].get(name)
    is_ = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if digest is None or is_ != (digest.spec.dtype, digest.spec.shape):
        has = "does not have it" if digest is None else f"has {digest.spec.dtype} {list(digest.spec.shape)}"
        raise UserError(f"tensor {name!r} is {is_[0]} {list(is_[1])}, step {version.step} {has}", where="into",
                        remedy="the state_dict of the model that the run trains")


def _no_place(tensor: object) -> str:
    """Why nothing can be received into it; "": it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet"
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"is on {tensor.device}, {tensor.layout}: it has no memory for its elements"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "has elements that share memory (it was expanded)"
    if not _has_memory(tensor):
        return f"is a {type(tensor).__name__} without memory of its own"
    return ""


def _has_memory(tensor: torch.Tensor) -> bool:
    """Is it where it says? A DTensor is made of others, a fake one of none, and a storage may have been freed: what is
    written to the address that they say is written to anything."""
    held = tensor.untyped_storage()
    if not tensor.numel():
        return True
    if held.device != tensor.device or not tensor.data_ptr():
        return False
    return tensor.data_ptr() + _reach(tensor) <= held.data_ptr() + held.nbytes()


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of the one that is farthest from it."""
    farthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (farthest + 1) * tensor.element_size()


def _shared(given: Mapping[str, torch.Tensor]) -> set[str]:
    """Those that may have a byte in common with another one, or within themselves."""
    found = {name for name, tensor in given.items() if not _is_apart(tensor)}
    lie = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _reach(tensor), name)
        for name, tensor in given.items() if tensor.numel()
    )
    before = ("", 0, 0, "")  # of those until here, the one that reaches farthest
    for one in lie:
        if one[0] == before[0] and one[1] < before[2]:
            found |= {before[3], one[3]}
        if (one[0], one[2]) > (before[0], before[2]):
            before = one
    return found


def _is_apart(tensor: torch.Tensor) -> bool:
    """Is each element surely at an address of its own?"""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += max(0, size - 1) * stride
    return True
