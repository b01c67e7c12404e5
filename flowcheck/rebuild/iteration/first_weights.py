"""The parameters that rank 0 broadcast before the first iteration, as the captures have them."""

from __future__ import annotations

import numpy as np
import torch
from parser.machine import Engine

from flowcheck.rebuild.iteration.evidence import parameter_bytes
from flowcheck.rebuild.plan import JobPlan

__all__ = ["first_weights"]


def first_weights(plan: JobPlan, engine: Engine) -> dict[str, torch.Tensor] | str:
    """By entry, of its shape and dtype, in memory of their own; or why they are not there."""
    differ, offset, _ = engine.copies(None)
    if differ:
        return f"copies of the broadcast parameters differ, first at byte {offset}"
    found = parameter_bytes(plan, engine)
    tensors = {}
    for entry in plan.job.model:
        data, complete = found.get(entry.tied or entry.name, (np.zeros(0, np.uint8), False))
        if not complete:
            return f"{entry.name!r} is in no complete broadcast"
        dtype: torch.dtype = getattr(torch, entry.dtype)
        tensors[entry.name] = torch.frombuffer(bytearray(data.tobytes()), dtype=dtype).reshape(entry.shape)
    return tensors
