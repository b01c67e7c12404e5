"""Where gradients that are sent lie: buckets of whole parameters, in the order of the state_dict.

    layout = feed_layout(described, optimizer, ranks)
    layout.buckets                  [[(name, parameter), ...], ...]
    layout.job(described, ...)      the manifest
    layout.share(rank, ranks)       what this rank sends of it, where several have the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.givers import givers
from flowcheck.job.model import FEED, Bucket, BucketSlice, Collective, Collectives, Communicator, Gradients, Job
from flowcheck.trainer.describe.described import Model, named
from flowcheck.trainer.describe.description import live_job, stepped_by
from flowcheck.trainer.describe.parts import local

__all__ = ["FeedLayout", "feed_layout", "gradient_of"]

BUCKET_BYTES = 32 << 20  # from which on a bucket takes no further parameter; less where all of it is less for each rank
NO_NCCL = "0.0"


@dataclass(frozen=True)
class FeedLayout:
    """dtype, device: of all gradients. numbers: of the buckets, in the manifest."""

    buckets: list[list[tuple[str, torch.Tensor]]]
    dtype: torch.dtype
    device: torch.device
    numbers: Sequence[int]

    @property
    def elements(self) -> list[int]:
        return [sum(local(one).numel() for _, one in bucket) for bucket in self.buckets]

    def share(self, rank: int, ranks: int) -> FeedLayout:
        given = givers([count * self.dtype.itemsize for count in self.elements], ranks)
        mine = [number for number, giver in zip(self.numbers, given, strict=True) if giver == rank]
        return replace(self, buckets=[self.buckets[number] for number in mine], numbers=mine)

    def job(
        self, described: Model, identity: tuple[str, int], ranks: int, optimizer: torch.optim.Optimizer
    ) -> Job:
        """identity: run and epoch."""
        dtype = DTYPES[self.dtype][0]
        calls = [Collective("AllReduce", count, dtype, carries="gradient", bucket=number)
                 for number, count in enumerate(self.elements)]
        return live_job(described, identity, Communicator(ranks, NO_NCCL), Collectives([], calls, [], calls),
                        [Bucket(_slices(bucket)) for bucket in self.buckets], Gradients(dtype),
                        stepped_by(described, optimizer), source=FEED)


def _slices(bucket: list[tuple[str, torch.Tensor]]) -> list[BucketSlice]:
    out, at = [], 0
    for name, parameter in bucket:
        count = local(parameter).numel()
        out.append(BucketSlice(name, at, count))
        at += count
    return out


def gradient_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of it. Raises UserError: it cannot be sent."""
    grad = local(parameter.grad) if parameter.grad is not None else None
    if grad is None or grad.layout != torch.strided or grad.dtype not in DTYPES:
        what = "has no gradient" if grad is None else f"has a gradient of {grad.dtype}, {grad.layout}"
        raise UserError(f"parameter {name} {what}", where="optimizer",
                        remedy="give the optimizer the parameters that every iteration trains; dense gradients")
    return grad


def feed_layout(described: Model, optimizer: torch.optim.Optimizer, ranks: int) -> FeedLayout:
    """As the gradients of the optimizer are now. ranks: that share them. Raises UserError: they cannot be sent."""
    parameters = named(optimizer, described.names)
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    dtypes: set[torch.dtype] = set()
    devices: set[torch.device] = set()
    names = [entry.name for entry in described.entries
             if entry.name in parameters and entry.kind == "optimized" and not entry.tied]
    sizes = {}
    for name in names:
        grad = gradient_of(name, parameters[name])
        dtypes.add(grad.dtype)
        devices.add(grad.device)
        sizes[name] = grad.nbytes
    room, full = 0, min(BUCKET_BYTES, sum(sizes.values()) // ranks)
    for name in names:
        if not buckets or (room <= 0 and sizes[name]):  # a bucket without elements would never come
            buckets.append([])
            room = full
        buckets[-1].append((name, parameters[name]))
        room -= sizes[name]
    if len(dtypes) != 1:
        raise UserError(f"has gradients of {', '.join(sorted(map(str, dtypes))) or 'no type'}", where="optimizer",
                        remedy="one type for all of them")
    if len(devices) != 1 or (device := devices.pop()).type not in ("cpu", "cuda"):
        raise UserError("has gradients on several devices, or on one that is neither a CPU nor a GPU of CUDA",
                        where="optimizer", remedy="one device for a rank")
    return FeedLayout(buckets, dtypes.pop(), device, range(len(buckets)))
