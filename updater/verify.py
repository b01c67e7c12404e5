"""Is the replica the trainer's? Checksums of bits of parameters and optimizer state, the trainer's against ours.

The checksum is defined in flowcheck/control/checksum.py, where trainers get it from; this is the same in C.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from updater import kernels

__all__ = ["Comparison", "checksum", "tensors_of"]


def checksum(tensor: torch.Tensor) -> int:
    """64-bit position-weighted checksum of a CPU tensor's bits in row-major order, formed on this thread."""
    flat = tensor.detach().contiguous()  # kept until the sum is formed
    return kernels.checksum(*_place(flat))


def _place(flat: torch.Tensor) -> tuple[int, int, int]:
    return flat.data_ptr(), flat.numel(), flat.element_size()


def tensors_of(
    parameters: Mapping[str, torch.Tensor], states: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """All tensors of a version by the names that checksums have: entries, and `optimizer.ENTRY.KEY`."""
    kept = {f"optimizer.{name}.{key}": tensor for name, state in states.items() for key, tensor in state.items()}
    clash = {f"{name} (the optimizer's)": kept[name] for name in kept.keys() & parameters.keys()}  # nobody sums these
    return kept | clash | dict(parameters)


class Comparison:
    """A trainer's checksums, compared by the workers of a pool with CPU tensors, which stay as they are meanwhile.

    tensors: of the version, by name. theirs: of some or all of them; a tensor that is not there differs. tied: names
    that have the tensor of another one. whole: theirs are of all tensors. One thread, the pool's.
    """

    def __init__(
        self, pool: kernels.Pool, tensors: Mapping[str, torch.Tensor], theirs: Mapping[str, int],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self._theirs = theirs
        self._names = [name for name in theirs if name in tensors]
        self.whole = all((tied or {}).get(name, name) in theirs for name in tensors)
        flat = [tensors[name].detach().contiguous() for name in self._names]
        self._sums = pool.checksums([_place(tensor) for tensor in flat], keep=flat)

    def differing(self, seconds: float = -1) -> str | None:
        """The first name of `theirs` whose tensor differs, "" if none does; None: not known after so many seconds."""
        found = self._sums.get(seconds)
        if found is None:
            return None
        mine = dict(zip(self._names, found, strict=True))
        return next((name for name, value in self._theirs.items() if mine.get(name) != value), "")
