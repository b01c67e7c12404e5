"""Some elements of the state after each step, for its record: which ones says flowcheck/job/sampling.py.

    sampler = Sampler(part, optimizer, described, run_id, epoch)
    sampler.text(number)                    the sample, of what is in this machine's memory and as it was; "": not so
    taken = sampler.take(number, more)    the training thread, after iteration `number`
    taken.text()                            a sending thread: the record's `sample`; waits for the device, if it has to

What a boundary costs does not grow with the elements of a tensor, and hardly with the number of tensors: one gather
for all tensors of a device and a width of elements together, which is queued on the device and not waited for. Which
elements that are is computed for AHEAD looks at these tensors at once. A gather reads one tensor only, so there is one
over all of the address space (`_memory`): the index of an element is its address. Before each gather every address is
asked of torch again, so that nothing is read but tensors that are there.

torch and the standard library only.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from flowcheck.errors import UserError
from flowcheck.job.form import shown
from flowcheck.job.sampling import (
    KEYS,
    ONCE,
    PICKED,
    UNSAID,
    WHOLE,
    WIDTHS,
    Look,
    Positions,
    Sampling,
    looks,
    pack,
    salt_of,
    state_name,
)
from flowcheck.trainer.boundary import hints, library, places_of, suits
from flowcheck.trainer.copies import Copies
from flowcheck.trainer.describe.described import Model
from flowcheck.trainer.describe.parts import Part, local
from flowcheck.trainer.ranges import BITS

__all__ = ["AHEAD", "OPERATORS", "Sampler", "Taken", "states"]

AHEAD = 8  # looks at the same tensors, whose elements are computed together
OPERATORS = 1  # of torch, for all tensors of one device whose elements have one width; and as often OPERATORS_AHEAD
OPERATORS_AHEAD = 6  # once in AHEAD looks
SPAN, FIRST = 1 << 56, 1 << 12  # bytes of an address space, and where its first page ends
_OWN = (torch.Tensor, torch.nn.Parameter)
_DEVICES = {"cpu": 1, "cuda": 2}  # as DLPack numbers them
_dtype, _address, _elements = attrgetter("dtype"), torch.Tensor.data_ptr, torch.Tensor.numel


class _Array(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("number", ctypes.c_int32),
        ("dimensions", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("array", _Array), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


@cache
def _memory(device: torch.device, width: int) -> torch.Tensor:
    """All memory of a device from FIRST on, as integers of so many bytes. Read nothing of it but what is there."""
    shape, strides = (ctypes.c_int64 * 1)(SPAN // width), (ctypes.c_int64 * 1)(1)
    unsigned = int(width == 1)
    array = _Array(FIRST, _DEVICES[device.type], device.index or 0, 1, unsigned, 8 * width, 1, shape, strides, 0)
    managed = _Managed(array, None, None)
    for one in (managed, shape, strides):  # torch reads them until it ends itself
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    found: torch.Tensor = from_dlpack(make(ctypes.addressof(managed), b"dltensor", None))
    return found


def states(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of the optimizer's state that this rank holds of optimized entries, by their names in a record."""
    out = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = model.names.get(id(parameter))
            for key, value in optimizer.state.get(parameter, {}).items():
                if entry is not None and isinstance(value, torch.Tensor):
                    out[state_name(entry, key)] = local(value.float() if key == ONCE else value)
    return out


class Taken(dict[str, torch.Tensor]):
    """Tensors that go with a record, and its sample, which may still be on a device."""

    def __init__(self, more: Mapping[str, torch.Tensor], salt: bytes, masks: bytes, parts: Sequence[_Part]) -> None:
        super().__init__(more)
        self._salt, self._masks, self._parts = salt, masks, parts
        self.here = all(part.values.is_cpu for part in parts)  # is no device waited for?
        self._copies = None if self.here else Copies({str(at): part.values for at, part in enumerate(parts)}, 0)
        self._lock, self._text = threading.Lock(), ""

    def text(self) -> str:
        """Any thread; several that send it wait once."""
        with self._lock:
            if not self._text:
                here = self._copies.on_host() if self._copies is not None else None
                found = [(part, part.values if here is None else here[str(at)]) for at, part in enumerate(self._parts)]
                self._text = pack(self._salt, self._masks, {width: _section(found, width) for width in WIDTHS})
            return self._text


@dataclass(frozen=True)
class _Part:
    """What one gather brings. places: in the section of its width; None: it is all of that."""

    width: int
    places: torch.Tensor | None
    values: torch.Tensor


def _section(found: Sequence[tuple[_Part, torch.Tensor]], width: int) -> bytes:
    mine = [(part.places, values) for part, values in found if part.width == width]
    if not mine:
        return b""
    places, out = mine[0]
    if places is not None:
        out = torch.empty(sum(len(values) for _, values in mine), dtype=out.dtype, device="cpu")
        for places, values in mine:
            out[places] = values
    return ctypes.string_at(out.data_ptr(), out.nbytes)


@dataclass(frozen=True)
class _Ready:
    """A _Gather, on its device. words: None: nothing is picked."""

    width: int
    source: int
    words: torch.Tensor | None
    elements: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor | None
    memory: torch.Tensor | None

    def ahead(self, words: Sequence[int]) -> Sequence[torch.Tensor]:
        """Indexes for the iterations that have these words."""
        if self.words is None:
            return [self.offsets] * len(words)
        each = _on(self.words.device, [[word] for word in words])
        picked = torch.remainder(torch.bitwise_xor(self.words, each), self.elements)
        return torch.add(picked, self.offsets).unbind()

    def take(self, tensors: Sequence[torch.Tensor], index: torch.Tensor) -> _Part:
        of = self.memory if self.memory is not None else _bits(tensors[self.source])
        return _Part(self.width, self.places, torch.take(of, index))


@dataclass
class _Gather:
    """source: number of the one tensor that is taken from, where its elements lie apart; -1: the memory of `device`.
    The rest: of each element. word, elements: by which it is picked, 0 and 1 where it is fixed; offset: the index of
    element 0, or of the fixed one. place: in the section of its width."""

    device: torch.device
    width: int
    source: int = -1
    word: list[int] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)

    def add(self, look: Look, first: int, place: int, positions: Positions) -> None:
        """first: the index of the tensor's first element."""
        fixed = look.elements <= WHOLE
        self.word += [0] * look.taken if fixed else positions.words(look.name)
        self.elements += [1 if fixed else look.elements] * look.taken
        self.offset += range(first, first + look.taken) if fixed else [first] * look.taken
        self.place += range(place, place + look.taken)

    def ready(self, length: int) -> _Ready:
        """length: of the section. Waits for no device."""
        there = partial(_on, self.device)
        picked = any(count > 1 for count in self.elements)
        return _Ready(
            self.width, self.source, there(self.word) if picked else None, there(self.elements), there(self.offset),
            None if len(self.place) == length else torch.tensor(self.place, device="cpu"),
            _memory(self.device, self.width) if self.source < 0 else None,
        )


def _on(device: torch.device, numbers: list[Any]) -> torch.Tensor:
    """Whole numbers, in a tensor on this device, which is not waited for."""
    made = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    made = made.pin_memory() if device.type == "cuda" else made
    return made if device.type == "cpu" else made.to(device, non_blocking=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(BITS[tensor.element_size()])


class _Turn:
    """Entries that are looked at together. seen: what the gathers were made for; masks: of these, as they are said.
    ahead: by iteration, the index of each gather."""

    def __init__(self, held: Sequence[tuple[torch.Tensor, bool]]) -> None:
        self.held = held
        self.seen: tuple[Any, ...] = ()
        self.masks = b""
        self.gathers: list[_Ready] = []
        self.ahead: dict[int, Sequence[torch.Tensor]] = {}
        self.optimized = bytes(optimized for _, optimized in held)
        self.entries, self.places = [value for value, _ in held], places_of(held)
        self.quick: tuple[bytes, bytes, bytes, bytes] | None = None  # what C looks at, compares with, takes and says


class Sampler:
    """Of one part of a rank. The training thread. Entries that are no buffers stay the same tensors; where their memory
    is, and what the optimizer keeps of them, may change at any time."""

    def __init__(
        self, part: Part, optimizer: torch.optim.Optimizer, described: Model, run_id: str, epoch: int
    ) -> None:
        self._optimizer, self._library = optimizer, library()
        self._sampling = Sampling(described.entries)
        self._positions = Positions(salt_of(run_id, epoch))
        name = described.stepping.name  # "": any of them may be there
        self._keys = tuple((1 << bit, key) for bit, key in enumerate(KEYS)
                           if not name or (key == "momentum_buffer") == (name == "sgd"))
        held = part.state_dict(keep_vars=True)
        self._turns = [
            _Turn([(held[entry.name], entry.kind == "optimized") for entry in self._sampling.entries(number)])
            for number in range(self._sampling.turns)
        ]

    def text(self, number: int) -> str:
        """What `take` would give as text, "": ask that. Of tensors in this machine's memory that are as they were."""
        turn = self._turns[number % len(self._turns)]
        if turn.quick is None or not isinstance(self._optimizer.state, dict):
            return ""
        found, masks, pieces, head = turn.quick
        said: str | None = self._library.sample(
            self._optimizer.state, turn.entries, turn.optimized, self._keys, turn.places, found, masks, pieces,
            self._positions.word(number), head,
        )
        return said or ""

    def take(self, number: int, more: Mapping[str, torch.Tensor]) -> Taken:
        """The sample after iteration `number`. more: what else goes with the record. Raises UserError where an entry
        is not what was described any more."""
        turn = self._turns[number % len(self._turns)]
        tensors, masks = self._find(turn)
        seen = masks, [*map(_address, tensors)], [*map(_elements, tensors)], [*map(_dtype, tensors)]
        if seen != turn.seen:
            self._prepare(turn, number, tensors, masks)
            turn.seen, turn.ahead = seen, {}
            turn.quick = self._quick(turn, seen, number) if self._library is not None else None
        if number not in turn.ahead:
            turn.ahead = self._ahead(turn, number)
        parts = [one.take(tensors, index) for one, index in zip(turn.gathers, turn.ahead.pop(number), strict=True)]
        return Taken(more, self._positions.salt, turn.masks, parts)

    def _ahead(self, turn: _Turn, number: int) -> dict[int, Sequence[torch.Tensor]]:
        """Of the looks from iteration `number` on."""
        numbers = range(number, number + AHEAD * len(self._turns), len(self._turns))
        words = [self._positions.word(one) for one in numbers]
        indexes = [one.ahead(words) for one in turn.gathers]
        return {one: [index[at] for index in indexes] for at, one in enumerate(numbers)}

    def _quick(self, turn: _Turn, seen: tuple[Any, ...], number: int) -> tuple[bytes, bytes, bytes, bytes] | None:
        """For C, which reads what is in this machine's memory, in row-major order."""
        masks, addresses, elements, dtypes = seen
        tensors, _ = self._find(turn)
        if not suits(turn.entries) or not all(
            type(one) in _OWN and one.is_cpu and one.is_contiguous() and address
            for one, address in zip(tensors, addresses, strict=True)
        ):
            return None
        where = zip(*hints(tensors), strict=True)
        found = array("Q", chain.from_iterable(zip(addresses, elements, map(id, dtypes), *where, strict=True)))
        due = looks(self._sampling.entries(number), turn.masks)
        if len(due) != len(tensors):
            return None  # some of it cannot be said
        pieces = array("Q")
        for width in WIDTHS:
            for at, one in enumerate(due):
                if one.width == width:
                    picked = one.elements > WHOLE
                    pieces.extend((at, width, one.taken, one.elements if picked else 0))
                    pieces.extend(self._positions.words(one.name) if picked else [0] * PICKED)
        return found.tobytes(), masks, pieces.tobytes(), self._positions.salt + turn.masks

    def _find(self, turn: _Turn) -> tuple[list[torch.Tensor], bytes]:
        """Tensors in the order of `looks`, as they are now, and which there are."""
        tensors, masks, state_of, keys = [], bytearray(), self._optimizer.state, self._keys
        for value, optimized in turn.held:
            tensors.append(value if value.__class__ is torch.nn.Parameter else local(value))
            mask = 0
            if optimized and (state := state_of.get(value)):
                for bit, key in keys:
                    kept = state.get(key)
                    if kept.__class__ is torch.Tensor:  # most are, and are told so at once
                        mask |= bit
                        tensors.append(kept)
                    elif isinstance(kept, torch.Tensor):
                        mask |= bit
                        tensors.append(local(kept))
            masks.append(mask)
        return tensors, bytes(masks)

    def _prepare(self, turn: _Turn, number: int, tensors: Sequence[torch.Tensor], masks: bytes) -> None:
        """What a state has in another form than it should is not said, and so differs from what the node has."""
        entries = self._sampling.entries(number)
        said = dict(zip((entry.name for entry in entries), masks, strict=True))
        made: dict[tuple[torch.device, int, int], _Gather] = {}
        lengths = dict.fromkeys(WIDTHS, 0)
        for source, (look, tensor) in enumerate(zip(looks(entries, masks), tensors, strict=True)):
            if (tensor.numel(), tensor.element_size()) != (look.elements, look.width) or not tensor.data_ptr():
                if not look.key:
                    raise UserError("is no longer what the manifest says", where=shown(look.name))
                said[look.entry] &= ~(1 << KEYS.index(look.key))
                said[look.entry] |= UNSAID if look.key == ONCE and tensor.dtype == torch.float64 else 0
                continue
            apart = not tensor.is_contiguous() or tensor.device.type not in _DEVICES
            key = tensor.device, look.width, source if apart else -1
            first = 0 if apart else (tensor.data_ptr() - FIRST) // look.width
            made.setdefault(key, _Gather(*key)).add(look, first, lengths[look.width], self._positions)
            lengths[look.width] += look.taken
        turn.gathers = [one.ready(lengths[one.width]) for one in made.values()]
        turn.masks = bytes(said.values())
