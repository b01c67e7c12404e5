"""Elements of the training state that a node asks for: found in the background, copied at a boundary, packed after it.

    source = Source(module, optimizer, described)
    wish = source.prepare(message, room)          a listening thread: what lies where; whether it can be given at all
    patch, copies = source.answer(wish, n)        the training thread, at the boundary after iteration n
    copies.on_host()                              a sending thread: what goes on the wire

A boundary copies the elements that were asked for, on the device that has them and in the order of its stream, so
that the next step may change them at once. What it costs grows with what was asked for and not with the model. It
waits for no device: the sending thread does, on a stream of its own, and for these copies alone.

torch and the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowcheck.control.messages import Patch, Ranges
from flowcheck.errors import UserError
from flowcheck.job.form import shown
from flowcheck.trainer.copies import Copies
from flowcheck.trainer.describe.described import Model
from flowcheck.trainer.describe.parts import Part, local

__all__ = ["Source", "Wish"]

FEW = 8  # ranges of an entry that are copied as slices; of more there is an index
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # copied as such: a NaN keeps its bits
ONCE = "step"  # what Adam keeps per tensor, whatever the tensor's shape
KEPT = {"sgd": 1, "adam": 3, "adamw": 3}  # at most: tensors of an entry's shape beside the parameter


def _refusal(what: str, entry: str) -> UserError:
    return UserError(what, where=shown(entry))


@dataclass(frozen=True)
class _Part:
    """What of one entry. index: of the elements, on the entry's device; None: `ranges` are few, and are sliced."""

    entry: str
    ranges: list[tuple[int, int]]
    index: torch.Tensor | None

    def of(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """A copy, in one dimension."""
        bits = tensor.detach().view(BITS[tensor.element_size()])
        if self.index is not None:
            if self.index.device != tensor.device:
                raise _refusal(f"{what} is on {tensor.device}, not on {self.index.device}", self.entry)
            taken = torch.take(bits, self.index)  # the device is not asked whether the index fits: `Source` knows
        elif tensor.is_contiguous():
            flat = bits.view(-1)
            taken = torch.cat([flat[start : start + length] for start, length in self.ranges])
        else:
            raise _refusal(f"{what} is not in row-major order", self.entry)
        return taken.view(tensor.dtype)


@dataclass
class Wish:
    """A request, ready to be answered. patch: the answer but for its iteration. nbytes: of its payload, about."""

    patch: Patch
    parts: list[_Part] = field(default_factory=list)
    nbytes: int = 0


class Source:
    """The state of one rank, by elements. described: of this module (or part) and optimizer. `prepare`: any one thread;
    `answer`: the training thread."""

    def __init__(self, module: torch.nn.Module | Part, optimizer: torch.optim.Optimizer, described: Model) -> None:
        self._module, self._optimizer, self._kind = module, optimizer, described.stepping.name
        self._entries = {entry.name: entry for entry in described.entries}
        held = module.state_dict(keep_vars=True)
        self._parameters = {name: value for name, value in held.items()
                            if isinstance(value, torch.nn.Parameter) or id(value) in described.names}
        self._empty = {name: value for name, value in self._parameters.items()
                       if name in self._entries and self._entries[name].kind == "optimized"
                       and not self._entries[name].tied and not self._entries[name].elements}
        self._places = {name: (value.device, local(value).is_contiguous()) for name, value in held.items()}
        self._groups = {  # which of the optimizer's groups; the groups themselves may be made anew
            described.names[id(parameter)]: number for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"] if id(parameter) in described.names
        }

    # -- a listening thread --

    def prepare(self, message: Ranges, room: int) -> Wish:
        """room: bytes of state that may be given. Nothing is raised: what cannot be is in the Wish."""
        try:
            asked: dict[str, list[tuple[int, int]]] = {}
            for name, start, length in message.ranges:
                self._check(name, start, length)
                asked.setdefault(name, []).append((start, length))
            nbytes = sum(self._size(name, ranges) for name, ranges in asked.items())
            if nbytes > room:
                raise UserError(f"{nbytes} bytes of state, at most {room} are given now", where="request")
            parts = [_Part(name, ranges, self._index(name, ranges)) for name, ranges in asked.items()]
        except (UserError, RuntimeError) as error:
            return Wish(Patch(message.request, 0, refused=_text(error)))
        return Wish(Patch(message.request, 0, message.ranges), parts, nbytes)

    def _check(self, name: str, start: int, length: int) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise _refusal("is not an entry of this model", name)
        if entry.tied:
            raise _refusal(f"is tied to {entry.tied}: ask for that", name)
        size = math.prod(entry.shape)
        if start + length > size:
            raise _refusal(f"has {size} elements, not {length} from {start} on", name)

    def _size(self, name: str, ranges: list[tuple[int, int]]) -> int:
        entry = self._entries[name]
        tensors = 1 + (KEPT[self._kind] if entry.kind == "optimized" else 0)
        return sum(length for _, length in ranges) * getattr(torch, entry.dtype).itemsize * tensors

    def _index(self, name: str, ranges: list[tuple[int, int]]) -> torch.Tensor | None:
        device, contiguous = self._places[name]
        if contiguous and len(ranges) <= FEW:
            return None
        starts, lengths = torch.tensor(ranges).unbind(1)
        ends = lengths.cumsum(0)
        index = torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - (ends - lengths), lengths)
        if device.type == "cpu":
            return index
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            index = index.to(device)
        side.synchronize()
        return index

    # -- the training thread --

    def answer(self, wish: Wish, iteration: int) -> tuple[Patch, Copies | None]:
        """The state as it is now, which is the one after `iteration`. What does not fit is refused, and not raised."""
        patch = wish.patch
        patch.iteration = iteration
        if patch.refused:
            return patch, None
        try:
            return patch, Copies(self._gather(wish), wish.nbytes)
        except (UserError, RuntimeError) as error:  # no memory left for it, among others
            return Patch(patch.request, iteration, refused=_text(error)), None

    def _gather(self, wish: Wish) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = {}
        others: Mapping[str, Any] = {}
        for part in wish.parts:
            name = part.entry
            parameter = self._parameters.get(name)
            tensor = local(parameter) if parameter is not None else None
            if tensor is None:  # a buffer: a module may have put another tensor in its place
                others = others or self._module.state_dict()
                tensor = others.get(name)
            entry = self._entries[name]
            if tensor is None or list(tensor.shape) != entry.shape or tensor.dtype != getattr(torch, entry.dtype):
                raise _refusal("is no longer what the manifest says", name)
            if part.index is not None and part.index.is_cuda:
                part.index.record_stream(torch.cuda.current_stream(part.index.device))
            out[f"model.{name}"] = part.of(tensor, "it")
            if entry.kind == "optimized" and parameter is not None:
                out |= self._state(name, parameter, part.of)
        for name, parameter in self._empty.items():  # a shard may have none: no range brings how many steps there were
            out |= self._state(name, parameter, lambda value, _: value.detach().reshape(-1))
        return out

    def _state(
        self, name: str, parameter: torch.Tensor, of: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Of the optimizer. of: what is given of a tensor. Raises UserError if it is not element by element, or not all
        there."""
        state = {
            key: local(value) for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        for key in self._needed(name):
            if key not in state:
                raise _refusal(f"the optimizer has no {key} of it on this rank", name)
        out: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            if key == ONCE:
                copy = value.detach().clone()
            elif value.shape != local(parameter).shape:
                raise _refusal(f"{key} has the shape {list(value.shape)}: it is not element by element, or not all on"
                               " this rank", name)
            else:
                copy = of(value, key)
            out[f"optimizer.{name}.{key}"] = copy
        return out

    def _needed(self, name: str) -> list[str]:
        """What the optimizer keeps of an entry once it has stepped."""
        group = self._optimizer.param_groups[self._groups[name]]
        if self._kind == "sgd":
            return ["momentum_buffer"] if group["momentum"] else []
        return [ONCE, "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _text(error: Exception) -> str:
    """One printable line, whatever it is: the text of a message."""
    text = error.message() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:1000]
