"""How the versions of a job are computed: its optimizer, the order of roundings, and where elements lie in buckets.

    recipe = recipe_of(plan)               None: the manifest names no optimizer
    recipe.spec, rounding, layouts         as updater.replica.Replica takes them
    recipe.unproven(buffers=False)         marks of what it rests on and nothing has shown
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.rebuild.plan import JobPlan
from updater.arrays import needed
from updater.errors import UpdaterError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.rounding_modes import GRAIN, RoundingMode
from updater.sixteen import threads_matter

__all__ = ["Recipe", "kinds_of", "recipe_of", "replica_bytes", "shapes_of"]


@dataclass(frozen=True)
class Recipe:
    """layouts[True]: of iteration 0; layouts[False]: of every later one."""

    job: Job
    spec: OptimizerSpec
    rounding: RoundingMode
    layouts: dict[bool, Layout] = field(default_factory=dict)

    def unproven(self, *, buffers: bool) -> list[str]:
        """The manifest's own marks, and those of what it leaves open. buffers: each step brings new ones."""
        old = [entry.name for entry in self.job.model if entry.kind == "buffer"]
        marks = list(self.job.unproven)
        if self.job.narrow and self.job.optimizer is not None and not self.job.optimizer.masters:
            marks.append(
                "masters: the manifest does not say what the optimizer holds of 16-bit parameters; fp32 masters that"
                " begin as the first parameters were taken"
            )
        if shared := self._shared():
            marks.append(
                f"threads: {shared!r} is updated in 16 bits alone and may have been shared by threads of the trainer,"
                " which round other elements; the manifest does not say how many (optimizer.threads), one was taken"
            )
        marks += [f"buffers are as at the start: {', '.join(old)}"] if old and not buffers else []
        return marks + ([self.rounding.unproven] if self.rounding.unproven else [])

    def _shared(self) -> str:
        """The first entry whose bits depend on a number of threads that nobody said, or ""."""
        job, alone = self.job, _alone(self.job)
        if job.optimizer is None or job.optimizer.threads:
            return ""
        sizes = {entry.name: entry.elements for entry in job.model}
        for group in job.optimizer.groups:
            # A record may bring a decay where there was none.
            options = group.options | ({"weight_decay": 1.0} if job.step_values else {})
            shared = [name for name in group.params if name in alone and sizes[name] > GRAIN]
            if shared and threads_matter(job.optimizer.name, options):
                return shared[0]
        return ""


def recipe_of(plan: JobPlan) -> Recipe | None:
    """Raises UserError: the updater cannot follow what the manifest says."""
    said = plan.job.optimizer
    if said is None:
        return None
    try:
        rounding = RoundingMode(said.rounding, said.torch_version, threads=said.threads, corrections=said.corrections)
        recipe = Recipe(plan.job, _spec(plan.job, rounding), rounding)
        for held in ("float32", *_alone(plan.job).values()):
            rounding.check(said.name, held, recipe.spec.with_values(()))
        for first in (True, False):
            recipe.layouts[first] = _layout(plan, recipe, 0 if first else 1)
    except UpdaterError as error:
        raise UserError(str(error), where="job manifest", remedy="correct optimizer, model or buckets") from None
    return recipe


def _layout(plan: JobPlan, recipe: Recipe, iteration: int) -> Layout:
    """An absent bucket description is allowed where it is obvious: one bucket, one tensor."""
    places = plan.iteration_buckets(iteration)
    shapes = {entry.name: entry.shape for entry in plan.job.model if entry.name in recipe.spec.params}
    described = [bucket.slices for bucket in plan.job.bucket_layout(iteration)]
    if iteration and not places:  # the job has no later iteration
        return recipe.layouts[True]
    return Layout(described, shapes, [place.elements for place in places])


def replica_bytes(job: Job, slots: int) -> int:
    """Memory that a job's replica takes. Raises UserError: it can have none."""
    assert job.optimizer is not None
    try:
        spec = _spec(job, RoundingMode(job.optimizer.rounding, job.optimizer.torch_version))
    except UpdaterError as error:
        raise UserError(str(error), where="job manifest", remedy="correct the optimizer") from None
    shapes = {entry.name: (entry.shape, getattr(torch, entry.dtype)) for entry in job.model}
    return needed(shapes, spec, slots, **kinds_of(job))


def shapes_of(job: Job) -> dict[str, torch.Tensor]:
    """Entry -> a tensor of its shape and dtype, without memory."""
    return {
        entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta") for entry in job.model
    }


def kinds_of(job: Job) -> dict[str, Any]:
    """What updater.replica.Replica has to know of a job's entries besides shapes."""
    assert job.optimizer is not None
    return {
        "buffers": frozenset(entry.name for entry in job.model if entry.kind == "buffer"),
        "tied": {entry.name: entry.tied for entry in job.model if entry.tied},
        "masters": job.optimizer.masters != "none",
    }


def _spec(job: Job, rounding: RoundingMode) -> OptimizerSpec:
    assert job.optimizer is not None
    return OptimizerSpec.check(
        job.optimizer.name, [(group.params, group.options) for group in job.optimizer.groups], fused=rounding.fused,
    )


def _alone(job: Job) -> dict[str, str]:
    """Entry -> its type, of those that are updated in 16 bits alone."""
    if job.optimizer is None or job.optimizer.masters != "none":
        return {}
    return {entry.name: entry.dtype for entry in job.model if entry.name in job.narrow}
