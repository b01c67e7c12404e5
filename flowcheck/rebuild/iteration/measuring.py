"""One pass over what an iteration brought: norms, extremes and counts of gradients, and how far its step moved weights.

    measuring = Measuring(job, places, due, threads)
    measuring.wants(judged)                    is this iteration due, and is a gradient of it whole?
    measuring.begin(judged, region, versions)  its bytes and both versions stay as they are meanwhile
    measuring.ended(seconds)                   Measured, once it is; None: not yet
    measuring.close()

Workers of its own do it. A tensor is measured if all of its elements are there. Gradients are as they went over the
wire: sums over the ranks, before averaging, unscaling and clipping. Costs: one read of the gradients, and one of both
versions' weights, at memory speed.

One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.collector import Judged
from flowcheck.rebuild.plan import BucketPlace
from updater.measure import Found, Measurer, Parts

__all__ = ["Measured", "Measuring", "Passes", "Versions"]

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Versions(Protocol):
    """Of a replica: the weights before a step and after it, fp32 masters where there are any."""

    @property
    def before(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def after(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def whole(self) -> bool:
        """Are both still the versions that they were?"""


@dataclass(frozen=True)
class Passes:
    """due(iteration): is it measured? threads: workers."""

    due: Callable[[int], bool]
    threads: int = 1


@dataclass(frozen=True)
class Measured:
    """names: of the job's optimized tensors, in the manifest's order. gradients: of each. weights: of each; elements 0:
    the version before is not here. seconds: that the pass took, as far as one saw."""

    iteration: int
    names: tuple[str, ...]
    gradients: tuple[Found, ...]
    weights: tuple[Found, ...]
    seconds: float


class Measuring:
    """places: buckets of iteration 0, and of later ones."""

    def __init__(
        self, job: Job, places: tuple[Sequence[BucketPlace], Sequence[BucketPlace]], passes: Passes,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._passes, self._now = passes, now
        sliced = {piece.name for layout in map(job.bucket_layout, (0, 1)) for one in layout for piece in one.slices}
        self.names = tuple(entry.name for entry in job.model if entry.name in sliced)
        self._numbers = {name: i for i, name in enumerate(self.names)}
        layouts = [[[(self._numbers[piece.name], piece) for piece in bucket.slices]
                    for bucket in job.bucket_layout(iteration)] for iteration in (0, 1)]
        self._inside = [[{number for number, _ in bucket} for bucket in layout] for layout in layouts]
        self._parts = []
        for layout, of in zip(layouts, places, strict=True):
            spans = [
                (number, place.dtype, place.offset + piece.offset * (place.nbytes // place.elements), piece.start,
                 piece.length)
                for place in of if place.elements and place.dtype in TYPES.values()
                for number, piece in layout[place.index]
            ]
            self._parts.append(Parts(sorted(spans, key=lambda span: (span[0], span[3])), len(self.names)))
        self._weights: Parts | None = None  # made of the first versions that come
        self._measurer = Measurer(passes.threads)
        self._ticket = 0
        self._under_way: tuple[int, Parts, Versions | None, float] | None = None

    def wants(self, judged: Judged) -> bool:
        return self._passes.due(judged.verdict.iteration) and any(
            bucket.complete and bucket.place.elements for bucket in judged.buckets)

    @property
    def busy(self) -> bool:
        return self._under_way is not None

    def begin(self, judged: Judged, region: np.ndarray, versions: Versions | None) -> None:
        """region: the iteration's bytes, uint8. versions: None: of weights nothing is measured."""
        iteration, later = judged.verdict.iteration, int(judged.verdict.iteration > 0)
        inside = self._inside[later]
        lacking = {number for bucket in judged.buckets if not bucket.complete for number in inside[bucket.place.index]}
        parts = self._parts[later]
        parts.gradients(region.ctypes.data, lacking)
        self._ticket = self._measurer.begin(parts, region)
        if versions is not None:
            self._begin_weights(versions)
        self._under_way = iteration, parts, versions, self._now()

    def _begin_weights(self, versions: Versions) -> None:
        before, after = ([of.get(name) for name in self.names] for of in (versions.before, versions.after))
        if self._weights is None:
            spans = [(i, TYPES[tensor.dtype], 0, 0, tensor.numel()) for i, tensor in enumerate(after)
                     if tensor is not None and tensor.dtype in TYPES]
            self._weights = Parts(spans, len(self.names))
        self._weights.weights(*([0 if one is None else one.data_ptr() for one in of] for of in (before, after)))
        self._ticket = self._measurer.begin(self._weights, (before, after))

    def ended(self, seconds: float = 0) -> Measured | None:
        """Waits at most so long; negative: until it has ended."""
        if self._under_way is None or not self._measurer.wait(self._ticket, seconds):
            return None
        (iteration, parts, versions, begun), self._under_way = self._under_way, None
        weights = (Found(0, 0.0, 0.0, 0.0, 0, 0, 0, -1, -1),) * len(self.names)
        if versions is not None and self._weights is not None and versions.whole:
            weights = tuple(self._weights.found())
        return Measured(iteration, self.names, tuple(parts.found()), weights, self._now() - begun)

    def close(self) -> None:
        """What is under way is finished. May be called twice."""
        self._measurer.close()
