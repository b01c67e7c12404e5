"""Messages of the records protocol of a job whose ranks send their gradients (design 14).

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowcheck.control.message_fields import SUM, check_count, check_iteration
from flowcheck.errors import UserError
from flowcheck.job.form import shown

__all__ = ["Fed", "Unfed"]


@dataclass
class Fed:
    """Rank 0, of an iteration that is over: gradients of a bucket, as the optimizer has read them, in parts. total:
    bytes of the bucket. sum: their checksum (flowcheck/control/checksum.py), 16 hexadecimal digits. first: place of the
    payload in it. Parts of a bucket come in order, and an iteration's before those of the next one."""

    iteration: int
    bucket: int
    total: int
    sum: str
    first: int

    def __post_init__(self) -> None:
        check_iteration(self.iteration, "fed: iteration")
        for name in ("bucket", "total", "first"):
            check_count(getattr(self, name), f"fed: {name}")
        if self.first >= self.total:
            raise UserError(f"byte {self.first} of {self.total}", where="fed: first")
        if not SUM.fullmatch(self.sum):
            raise UserError(f"{shown(self.sum)} is no checksum", where="fed: sum")


@dataclass
class Unfed:
    """Rank 0, in place of Fed: gradients of this iteration do not come. why: "": the optimizer has used none, because
    its step was skipped."""

    iteration: int
    why: str

    def __post_init__(self) -> None:
        check_iteration(self.iteration, "unfed: iteration")
