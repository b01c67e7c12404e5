"""The gradients of a replay as files: what the wire carried after reduction, one safetensors file per iteration.

    GradientFiles(plan, out).take(iteration, buckets)      once per closed iteration; then withdraw() if it was refuted
    read_gradients(path) -> {name: tensor}

DIR/gradients-000003.safetensors holds `gradient.NAME` of each tensor whose every element was placed, in the tensor's
shape, or `bucket.K` where the manifest does not say what lies in bucket K. Values and dtype are those of the wire: the
optimizer divides them by the manifest's `gradients.divisor`. What lacks an element is left out whole. Main thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from flowcheck.checkpoint.files import load_file, write_file
from flowcheck.durable import make_directory, partial_name, reporting
from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.evidence import BucketCoverage

__all__ = ["GradientFiles", "gradients_of", "gradients_path", "read_gradients"]


def gradients_path(out: str | os.PathLike[str], iteration: int) -> Path:
    """Where the gradients of an iteration lie."""
    return Path(out) / f"gradients-{iteration:06d}.safetensors"


class GradientFiles:
    """Those of one replay. The first iteration taken removes what an earlier replay has left."""

    def __init__(self, job: Job, out: str | os.PathLike[str]) -> None:
        self._job, self._out = job, Path(out)
        self._cleared = False

    def take(self, iteration: int, buckets: Sequence[BucketCoverage]) -> None:
        """Write an iteration's file. Raises EnvironmentProblem."""
        with reporting(self._out):
            make_directory(self._out)
            if not self._cleared:
                self.withdraw()
            self._cleared = True
            path = gradients_path(self._out, iteration)
            aside = partial_name(path)
            try:
                write_file(aside, gradients_of(self._job, iteration, buckets))
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove the files: the traffic is not what the manifest says."""
        for path in self._out.glob("gradients-*.safetensors"):
            path.unlink(missing_ok=True)


def gradients_of(job: Job, iteration: int, buckets: Sequence[BucketCoverage]) -> dict[str, torch.Tensor]:
    """Tensors without a missing element, by the names that the file has."""
    shapes = {entry.name: entry.shape for entry in job.model}
    described = job.bucket_layout(iteration)
    out: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}
    left: dict[str, int] = {}  # elements that are not there yet
    for bucket in buckets:
        index, values = bucket.place.index, bucket.tensor()
        slices = described[index].slices if index < len(described) else []
        if not slices or any(piece.name not in shapes for piece in slices):
            if bucket.complete:
                out[f"bucket.{index}"] = values
            continue
        for piece in slices:
            end = piece.offset + piece.length
            if piece.name not in parts:
                parts[piece.name] = torch.zeros(shapes[piece.name], dtype=values.dtype).reshape(-1)
                left[piece.name] = parts[piece.name].numel()
            if any(first <= piece.offset and end <= last for first, last in bucket.placed):
                parts[piece.name][piece.start : piece.start + piece.length] = values[piece.offset : end]
                left[piece.name] -= piece.length
    whole = {f"gradient.{name}": flat.reshape(shapes[name]) for name, flat in parts.items() if not left[name]}
    return whole | out


def read_gradients(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """{parameter name, or bucket.K: tensor}. Raises UserError."""
    return {name.removeprefix("gradient."): tensor for name, tensor in load_file(Path(path), None).items()}
