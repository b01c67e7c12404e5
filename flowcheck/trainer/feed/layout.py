"""Where gradients that are sent lie: buckets of whole parameters, of each optimizer in the order of the state_dict.

    read = read_by(described, optimizer)        right before its step
    layout = feed_layout([read, ...], ranks)
    layout.buckets                  [[(name, parameter), ...], ...]
    layout.of                       which optimizer reads each bucket
    layout.job(described, ...)      the manifest
    layout.share(rank, ranks)       what this rank sends of it, where several have the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.givers import givers
from flowcheck.job.model import FEED, Bucket, BucketSlice, Collective, Collectives, Communicator, Gradients, Job
from flowcheck.trainer.describe.described import Model, named
from flowcheck.trainer.describe.description import live_job, stepped_by
from flowcheck.trainer.describe.parts import local

__all__ = ["FeedLayout", "Read", "feed_layout", "gradient_of", "read_by"]

BUCKET_BYTES = 32 << 20  # from which on a bucket takes no further parameter; less where all of it is less for each rank
NO_NCCL = "0.0"


class Read(NamedTuple):
    """A parameter with a gradient, and what that is."""

    name: str
    parameter: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class FeedLayout:
    """dtype, device: of all gradients. numbers: of the buckets, in the manifest. of: of each bucket the number of the
    optimizer that reads it."""

    buckets: list[list[tuple[str, torch.Tensor]]]
    of: list[int]
    dtype: torch.dtype
    device: torch.device
    numbers: Sequence[int]

    @property
    def elements(self) -> list[int]:
        return [sum(local(one).numel() for _, one in bucket) for bucket in self.buckets]

    def share(self, rank: int, ranks: int) -> FeedLayout:
        given = givers([count * self.dtype.itemsize for count in self.elements], ranks)
        mine = [number for number, giver in zip(self.numbers, given, strict=True) if giver == rank]
        return replace(self, buckets=[self.buckets[number] for number in mine], of=[self.of[number] for number in mine],
                       numbers=mine)

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


def read_by(described: Model, optimizer: torch.optim.Optimizer) -> list[Read]:
    """As its gradients are now. Raises UserError: they cannot be sent."""
    parameters = named(optimizer, described.names)
    found = []
    for name in (entry.name for entry in described.entries
                 if entry.name in parameters and entry.kind == "optimized" and not entry.tied):
        grad = gradient_of(name, parameters[name])
        found.append(Read(name, parameters[name], grad.dtype, grad.device, grad.nbytes))
    return found


def feed_layout(read: Sequence[Sequence[Read]], ranks: int) -> FeedLayout:
    """read: by each optimizer. ranks: that share the gradients. Raises UserError: they cannot be sent together."""
    everything = [one for each in read for one in each]
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    of: list[int] = []
    full = min(BUCKET_BYTES, sum(one.nbytes for one in everything) // ranks)
    room, held = 0, 0
    for which, one in ((which, one) for which, each in enumerate(read) for one in each):
        # A bucket without elements would never come: those that have none go with others.
        if not buckets or (one.nbytes and held and (room <= 0 or of[-1] != which)):
            buckets.append([])
            of.append(which)
            room, held = full, 0
        if one.nbytes:
            of[-1] = which
        buckets[-1].append((one.name, one.parameter))
        room, held = room - one.nbytes, held + one.nbytes
    dtypes, devices = {one.dtype for one in everything}, {one.device for one in everything}
    if len(dtypes) != 1:
        raise UserError(f"has gradients of {', '.join(sorted(map(str, dtypes))) or 'no type'}", where="optimizer",
                        remedy="one type for all of them")
    if len(devices) != 1 or (device := devices.pop()).type not in ("cpu", "cuda"):
        raise UserError("has gradients on several devices, or on one that is neither a CPU nor a GPU of CUDA",
                        where="optimizer", remedy="one device for a rank")
    return FeedLayout(buckets, of, dtypes.pop(), device, range(len(buckets)))
