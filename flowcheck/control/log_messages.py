"""Messages of the records protocol about the base of a log (design 15): asked for by a node, given by rank 0.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowcheck.control.message_fields import SUM, check_count, check_iteration
from flowcheck.errors import UserError
from flowcheck.job.form import shown

__all__ = ["Base", "BaseWanted"]


@dataclass
class BaseWanted:
    """Node, of a job that it keeps a log of: it needs a base, from its first piece on, and from the next boundary on.
    steps: boundaries that it may be spread over. again: it was asked for before, and nothing has come for long: one
    that is on its way goes on."""

    steps: int
    again: bool = False

    def __post_init__(self) -> None:
        check_count(self.steps - 1, "basewanted: steps")


@dataclass
class Base:
    """Rank 0, after its Record of an iteration, if the node has asked for a base: one parameter and all that the
    optimizer keeps of it, as they are before iteration `iteration`, in parts. number, of: which of the base's pieces,
    counted from 0, and how many there are. total: bytes of the piece (flowcheck/trainer/log/codec.py). sum: their
    checksum (flowcheck/control/checksum.py), 16 hexadecimal digits. first: place of the payload in it. Parts of a piece
    come in order, and so do pieces."""

    iteration: int
    number: int
    of: int
    total: int
    sum: str
    first: int

    def __post_init__(self) -> None:
        check_iteration(self.iteration, "base: iteration")
        for name in ("number", "of", "total", "first"):
            check_count(getattr(self, name), f"base: {name}")
        if self.number >= self.of or self.first >= self.total:
            raise UserError(f"piece {self.number} of {self.of}, byte {self.first} of {self.total}", where="base")
        if not SUM.fullmatch(self.sum):
            raise UserError(f"{shown(self.sum)} is no checksum", where="base: sum")
