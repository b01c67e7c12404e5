"""Parameters that an iteration gathers (FSDP, ZeRO, Megatron's distributed optimizer): the parameter checkpoint.

    ShardedParameters(plan)  ->  take(iteration, groups) per complete iteration  ->  write(out, unproven)

What passes the wire is what every rank computes with: parameters in compute precision (often bfloat16), no
fp32 masters, no optimizer state. So it is written under a name and a schema of its own and is never a step.
The number is the count of updates that the parameters have seen: an iteration that gathers before its update
brings the state of as many updates as its own number. One thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from flowcheck.checkpoint.directory import Meta, write_parameters
from flowcheck.job.clock import Clock
from flowcheck.rebuild.evidence import BucketCoverage
from flowcheck.rebuild.plan import JobPlan

__all__ = ["ShardedParameters"]


class ShardedParameters:
    """The newest complete set of gathered parameters. step: updates it has seen, -1 before the first set."""

    def __init__(self, plan: JobPlan) -> None:
        self._job, self._clock = plan.job, Clock()
        self._tensors: dict[str, torch.Tensor] = {}
        self._written = -1
        self.step = -1

    @property
    def due(self) -> bool:
        """Is there a set that was not written?"""
        return bool(self._tensors) and self._written != self.step

    @property
    def dtype(self) -> str:
        names = {str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors.values()}
        return names.pop() if len(names) == 1 else "mixed"

    def take(self, iteration: int, groups: Sequence[BucketCoverage]) -> None:
        """Copy an iteration's parameters out of the arena; every group must be complete."""
        calls = dict(self._job.parameter_calls(iteration))
        shapes = {entry.name: entry.shape for entry in self._job.model}
        tensors: dict[str, torch.Tensor] = {}
        for group in groups:
            assert group.complete, f"parameter group {group.place.index} of iteration {iteration} has gaps"
            call = calls[group.place.index]
            flat = group.tensor()
            for piece in self._job.parameter_slices(call):
                if piece.name not in tensors:
                    tensors[piece.name] = torch.empty(shapes[piece.name], dtype=flat.dtype)
                target = tensors[piece.name].view(-1)[piece.start : piece.start + piece.length]
                target.copy_(flat[piece.offset : piece.offset + piece.length])
        if tensors:
            self._tensors = {entry.name: tensors[entry.name] for entry in self._job.model if entry.name in tensors}
            updated = any(call.after_update for call in calls.values())
            self.step = self._clock.after(iteration) if updated else self._clock.before(iteration)

    def write(self, out: str | os.PathLike[str], unproven: Sequence[str]) -> Path:
        """Write the newest set; returns its directory. Raises EnvironmentProblem."""
        job = self._job
        absent = [entry.name for entry in job.model if entry.name not in self._tensors]
        meta = Meta(job.run_id, job.epoch, "unverified", tuple(unproven))
        path = write_parameters(out, self.step, self._tensors, absent, meta)
        self._written = self.step
        return path
