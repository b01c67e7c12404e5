"""Parameters that an iteration gathers (FSDP, ZeRO, Megatron's distributed optimizer): the parameter checkpoint.

    ShardedParameters(plan, clock)  ->  take(iteration, groups) per complete iteration  ->  write(out, unproven)
                                        Gathered: a set that nobody changes any more, for who writes it later

What passes the wire is what every rank computes with: parameters in compute precision (often bfloat16), no
fp32 masters, no optimizer state. So it is written under a name and a schema of its own and is never a step.
The number is the count of updates that the parameters have seen: an iteration that gathers before its update
brings the state of as many updates as its own number. One thread; a Gathered: any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flowcheck.checkpoint.directory import Meta, write_parameters
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.plan import JobPlan

__all__ = ["Gathered", "ShardedParameters"]


@dataclass(frozen=True)
class Gathered:
    """A complete set. step: updates that it has seen, -1: no set is here."""

    job: Job
    step: int = -1
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        names = {str(tensor.dtype).removeprefix("torch.") for tensor in self.parameters.values()}
        return names.pop() if len(names) == 1 else "mixed"

    def write(self, out: str | os.PathLike[str], unproven: Sequence[str]) -> Path:
        """Returns its directory. Raises EnvironmentProblem."""
        job = self.job
        absent = [entry.name for entry in job.model if entry.name not in self.parameters]
        meta = Meta(job.run_id, job.epoch, "unverified", tuple(unproven))
        return write_parameters(out, self.step, self.parameters, absent, meta)


class ShardedParameters:
    """newest: the newest complete set. clock: the trainer's; None: iterations count from the first one on."""

    def __init__(self, plan: JobPlan, clock: Clock | None = None) -> None:
        self._job, self._clock = plan.job, clock or Clock()
        self._written = -1
        self.newest = Gathered(plan.job)

    @property
    def step(self) -> int:
        return self.newest.step

    @property
    def due(self) -> bool:
        """Is there a set that was not written?"""
        return bool(self.newest.parameters) and self._written != self.step

    @property
    def dtype(self) -> str:
        return self.newest.dtype

    def take(self, iteration: int, groups: Sequence[BucketCoverage]) -> Gathered:
        """Copy an iteration's parameters out of the arena; every group must be complete. The newest set."""
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
            ordered = {entry.name: tensors[entry.name] for entry in self._job.model if entry.name in tensors}
            self.newest = Gathered(self._job, self.step_of(iteration), ordered)
        return self.newest

    def step_of(self, iteration: int) -> int:
        """How many updates the parameters have seen that an iteration gathers."""
        updated = any(call.after_update for _, call in self._job.parameter_calls(iteration))
        return self._clock.after(iteration) if updated else self._clock.before(iteration)

    def write(self, out: str | os.PathLike[str], unproven: Sequence[str]) -> Path:
        """Write the newest set; returns its directory. Raises EnvironmentProblem."""
        path = self.newest.write(out, unproven)
        self._written = self.step
        return path
