"""Is the replica the trainer's? Checksums of parameter bits, the trainer's against ours (design section 6).

    UNVERIFIED --N steps matched--> VERIFIED          any mismatch --> DIVERGED, for good: not served

The checksum is defined in flowcheck/checksum.py, where trainers get it from; this is the same in C.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch

from updater import kernels
from updater.errors import ReplicaError

__all__ = ["Status", "Verification", "checksum"]


class Status(enum.Enum):
    UNVERIFIED = "unverified"
    VERIFIED = "verified"
    DIVERGED = "diverged"


def checksum(tensor: torch.Tensor) -> int:
    """64-bit position-weighted checksum of a CPU tensor's bits in row-major order."""
    flat = tensor.detach().contiguous()
    return kernels.checksum(flat.data_ptr(), flat.numel(), flat.element_size())


class Verification:
    """Counts matches. needed: steps whose checksums must have agreed. One thread."""

    def __init__(self, needed: int = 1) -> None:
        if needed < 1:
            raise ReplicaError(f"{needed} matching steps asked for; at least 1 says anything")
        self.needed, self.matched = needed, 0
        self.status = Status.UNVERIFIED
        self.first: tuple[int, str] | None = None  # step and tensor of the first mismatch

    def compare(self, step: int, parameters: Mapping[str, torch.Tensor], theirs: Mapping[str, int]) -> Status:
        """Compare a published version with what the trainer says of the same step.

        parameters: of that version, in state_dict order; the first that differs is named. A tensor that only one
        side has is a mismatch too. Steps may come in any order and not all of them.
        """
        for name, tensor in parameters.items():
            if self.first is None and theirs.get(name) != checksum(tensor):
                self.first = (step, name)
        for name in theirs:
            if self.first is None and name not in parameters:
                self.first = (step, name)
        if self.first is None:
            self.matched += 1
        if self.first is not None:
            self.status = Status.DIVERGED
        elif self.matched >= self.needed:
            self.status = Status.VERIFIED
        return self.status

    @property
    def reason(self) -> str:
        """Why it is not served, or ""."""
        return f"{self.first[1]!r} differs from the trainer's at step {self.first[0]}" if self.first else ""
