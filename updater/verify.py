"""Is the replica the trainer's? Checksums of parameter bits, the trainer's against ours.

The checksum is defined in flowcheck/control/checksum.py, where trainers get it from; this is the same in C.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from updater import kernels

__all__ = ["Comparison", "checksum"]


def checksum(tensor: torch.Tensor) -> int:
    """64-bit position-weighted checksum of a CPU tensor's bits in row-major order, formed on this thread."""
    flat = tensor.detach().contiguous()  # kept until the sum is formed
    return kernels.checksum(*_place(flat))


def _place(flat: torch.Tensor) -> tuple[int, int, int]:
    return flat.data_ptr(), flat.numel(), flat.element_size()


class Comparison:
    """A trainer's checksums, compared by the workers of a pool with CPU tensors, which stay as they are meanwhile.

    parameters: of the version, by name. theirs: of some or all of them; a tensor that is not there differs.
    One thread, the pool's.
    """

    def __init__(
        self, pool: kernels.Pool, parameters: Mapping[str, torch.Tensor], theirs: Mapping[str, int]
    ) -> None:
        self._theirs = theirs
        self._names = [name for name in theirs if name in parameters]
        flat = [parameters[name].detach().contiguous() for name in self._names]
        self._sums = pool.checksums([_place(tensor) for tensor in flat], keep=flat)

    def differing(self, seconds: float = -1) -> str | None:
        """The first name of `theirs` whose tensor differs, "" if none does; None: not known after so many seconds."""
        found = self._sums.get(seconds)
        if found is None:
            return None
        mine = dict(zip(self._names, found, strict=True))
        return next((name for name, value in self._theirs.items() if mine.get(name) != value), "")
