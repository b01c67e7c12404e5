"""What a job that gathers its parameters has, put together from synth's truth and not by the product."""

from __future__ import annotations

import numpy as np

from flowcheck.job.model import Job
from lab.synth import Synthesis


def expected(job: Job, made: Synthesis, iteration: int) -> dict[str, bytes]:
    """Bytes of every model entry."""
    out: dict[str, np.ndarray] = {}
    for group, call in dict(job.parameter_calls(iteration)).items():
        flat = made.gathered[iteration, group]
        for piece in job.parameter_slices(call):
            entry = next(e for e in job.model if e.name == piece.name)
            held = out.setdefault(piece.name, np.zeros(entry.elements, flat.dtype))
            held[piece.start : piece.start + piece.length] = flat[piece.offset : piece.offset + piece.length]
    return {name: array.tobytes() for name, array in out.items()}
