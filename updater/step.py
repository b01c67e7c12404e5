"""What one iteration's step record says about the update: values that the wire does not carry.

Where a manifest declares such a value, an iteration is applied only with its record. Order of what torch does to a
gradient, and so of the kernels: averaging divisor (in the wire's type), AMP unscale, clip, then the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from updater.errors import ReplicaError

__all__ = ["StepValues"]

_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, 2.0**-149  # fp32; below the smallest is a zero


@dataclass(frozen=True)
class StepValues:
    """Values of one step. The defaults are those of a job that declares none.

    groups: per parameter group what differs from its options in this step (lr of a schedule, betas, weight_decay);
        empty: nothing does.
    clip: the factor that clip_grad_norm_ multiplied all gradients with, as fp32. The norm itself cannot be
        recomputed bit for bit on another processor; so a job that clips and does not send it is not exact.
    loss_scale: AMP: gradients arrive multiplied by it. skip: an overflow was found, the optimizer did nothing.
    buffers: new values of buffers, by name.
    """

    groups: tuple[Mapping[str, Any], ...] = ()
    clip: float | None = None
    loss_scale: float | None = None
    skip: bool = False
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value in (("clip coefficient", self.clip), ("loss scale", self.loss_scale)):
            if value is not None and not 0 <= value <= _LARGEST:
                raise ReplicaError(f"the {what} of a step is a finite 32-bit number of at least 0, found {value!r}")
        if self.loss_scale is not None and self.loss_scale < _SMALLEST:
            raise ReplicaError("a loss scale of 0 cannot be undone")

    def updates_as(self, other: StepValues) -> bool:
        """Do both make the same of the same gradients, to the bit? Says no where it cannot tell. Buffers aside."""
        mine, theirs = (_exact((v.groups, v.clip, v.loss_scale, v.skip)) for v in (self, other))
        return bool(mine == theirs)


def _exact(value: Any) -> Any:
    """What is equal for equal bits alone: 0.0 and -0.0 are two numbers, 1, 1.0 and True are three."""
    if isinstance(value, Mapping):
        return {key: _exact(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_exact(one) for one in value]
    if isinstance(value, float):
        return value.hex()
    return repr(value) if value is None or isinstance(value, bool | int | str) else object()
