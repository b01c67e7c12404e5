"""Which elements of a training state a step record has, and in which order: what trainers take and nodes compare.

    sampling = Sampling(job.model)
    sampling.turns                              iterations in which each tensor is looked at once, PERIOD at most
    sampling.entries(number)                    of the model, whose turn it is after iteration `number`
    looks(entries, masks)                       the tensors of these entries, in the order of the sample
    Positions(salt).of(name, elements, number)  elements of one tensor
    pack(...), unpack(text, entries, number)    the sample as the record has it

An entry that is optimized is looked at with all that the optimizer keeps of it, by KEYS. A tensor of WHOLE elements
and fewer is taken whole. Of a larger one PICKED elements are: with 64 bits each of BLAKE2b(name) and of
BLAKE2b(number), both keyed with the salt of the run,

    position[i] = (word[i] of name ^ word of number) mod 2^63 mod elements

so each element is as likely as any other in each iteration, and what two tensors or two iterations take has
nothing to do with each other. Buffers are not sampled: a record has them whole. A tied entry has the elements of
another one.

    sample     base64 of: salt 8 | a mask of each entry | elements of 8 bytes, of 4, of 2, of 1; little-endian
    mask       bit i: KEYS[i] is there. UNSAID: what is kept besides cannot be said, and what lacks is not counted

Standard library, as what is on both sides of the control network. Any thread.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from flowcheck.errors import UserError
from flowcheck.job.model import ModelEntry, dtype_size

__all__ = [
    "AT_ONCE", "KEYS", "PERIOD", "PICKED", "UNSAID", "WHOLE", "WIDTHS", "Look", "Positions", "Sample", "Sampling",
    "looks", "pack", "salt_of", "state_name", "unpack",
]

PERIOD = 16  # iterations within which each tensor is looked at, at most
AT_ONCE = 4  # entries that an iteration looks at, at least, where there are so many
WHOLE = 16  # elements of a tensor that is taken whole
PICKED = 8  # elements of a larger one
KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of an optimizer's state; a mask's bits
ONCE = "step"  # kept once for a tensor, in float32
UNSAID = 0x80
WIDTHS = (8, 4, 2, 1)  # bytes of an element
SALT = 8
_WORDS, _WORD = struct.Struct(f"<{PICKED}Q"), struct.Struct("<Q")
_POSITIVE = (1 << 63) - 1


def salt_of(run_id: str, epoch: int) -> bytes:
    """The same on all ranks of a run."""
    return blake2b(f"{epoch} {run_id}".encode("utf-8", "surrogatepass"), digest_size=SALT).digest()


def state_name(entry: str, key: str) -> str:
    """How a tensor of the optimizer's state is called, among samples and checksums."""
    return f"optimizer.{entry}.{key}"


@dataclass(frozen=True)
class Look:
    """A tensor that is looked at. entry: of the model. key: of the optimizer's state of it, "": the entry itself.
    width: bytes of an element."""

    entry: str
    key: str
    elements: int
    width: int

    @property
    def name(self) -> str:
        return state_name(self.entry, self.key) if self.key else self.entry

    @property
    def taken(self) -> int:
        """How many elements."""
        return self.elements if self.elements <= WHOLE else PICKED


class Sampling:
    """Of one model."""

    def __init__(self, model: Iterable[ModelEntry]) -> None:
        self._entries = [one for one in model if one.kind != "buffer" and not one.tied and one.elements]
        self.turns = min(max(len(self._entries) // AT_ONCE, 1), PERIOD)

    def entries(self, number: int) -> list[ModelEntry]:
        return self._entries[number % self.turns :: self.turns]


def looks(entries: Sequence[ModelEntry], masks: Sequence[int]) -> list[Look]:
    """Entry by entry, the entry itself first. masks: of each."""
    out = []
    for entry, mask in zip(entries, masks, strict=True):
        width = dtype_size(entry.dtype)
        out.append(Look(entry.name, "", entry.elements, width))
        for bit, key in enumerate(KEYS):
            if mask >> bit & 1:
                out.append(Look(entry.name, key, 1, 4) if key == ONCE else Look(entry.name, key, entry.elements, width))
    return out


class Positions:
    """Of one run. Remembers what is the same in all iterations."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self._words: dict[str, tuple[int, ...]] = {}

    def words(self, name: str) -> tuple[int, ...]:
        """PICKED numbers below 2^63."""
        found = self._words.get(name)
        if found is None:
            digest = blake2b(name.encode("utf-8", "surrogatepass"), key=self.salt, digest_size=_WORDS.size).digest()
            found = self._words[name] = tuple(word & _POSITIVE for word in _WORDS.unpack(digest))
        return found

    def word(self, number: int) -> int:
        """Of an iteration, below 2^63."""
        digest = blake2b(_WORD.pack(number), key=self.salt, digest_size=_WORD.size).digest()
        return int(_WORD.unpack(digest)[0]) & _POSITIVE

    def of(self, name: str, elements: int, number: int) -> list[int]:
        if elements <= WHOLE:
            return list(range(elements))
        word = self.word(number)
        return [(one ^ word) % elements for one in self.words(name)]


def pack(salt: bytes, masks: bytes, sections: Mapping[int, bytes]) -> str:
    """sections: elements in the order of `looks`, by their width."""
    return base64.b64encode(b"".join((salt, masks, *(sections.get(width, b"") for width in WIDTHS)))).decode()


@dataclass(frozen=True)
class Sample:
    """What a record has. masks: of the entries whose turn it is. found: of each tensor, in the order of `looks`, its
    elements, one after the other."""

    salt: bytes
    masks: bytes
    found: tuple[tuple[Look, bytes], ...]


def unpack(text: str, entries: Sequence[ModelEntry], where: str) -> Sample:
    """entries: whose turn it is. Raises UserError for what is not a sample of these."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise UserError("a sample that is not base64", where=where) from None
    salt, masks = data[:SALT], data[SALT : SALT + len(entries)]
    if len(masks) < len(entries):
        raise UserError(f"a sample of {len(data)} bytes, of {len(entries)} entries", where=where)
    for entry, mask in zip(entries, masks, strict=True):
        if (mask & ~UNSAID) >> len(KEYS) or (mask and entry.kind != "optimized"):
            raise UserError(f"a sample with {mask:#x} of {entry.name[:80]!r}", where=where)
    due = looks(entries, masks)
    ends = {width: sum(one.width * one.taken for one in due if one.width == width) for width in WIDTHS}
    at, end = {}, SALT + len(entries)
    for width in WIDTHS:
        at[width], end = end, end + ends[width]
    if end != len(data):
        raise UserError(f"a sample of {len(data)} bytes where {end} are due", where=where)
    found = []
    for one in due:
        begin = at[one.width]
        at[one.width] = begin + one.width * one.taken
        found.append((one, data[begin : at[one.width]]))
    return Sample(salt, bytes(masks), tuple(found))
