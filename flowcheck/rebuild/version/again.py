"""One step once more: the follower's own update of a version, of gradients and values that somebody has kept.

    again(replica, plan, iteration, record, buckets)      written, and neither compared nor published

Equal bits come from the same code: the job is planned from its manifest as the follower has planned it, and the same
replica applies the same bytes with the same values in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowcheck.errors import FlowcheckError
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["Made", "again"]


@dataclass(frozen=True)
class Made:
    """What made a step. record: without checksums. buckets: gradients as they came over the wire, by bucket."""

    record: StepRecord
    buckets: Sequence[torch.Tensor]


def again(
    replica: JobReplica, plan: JobPlan, iteration: int, record: StepRecord, buckets: Sequence[torch.Tensor],
    number: int, where: str,
) -> None:
    """Build the version after the newest one. iteration: as the manifest counts. buckets: by index, as they came over
    the wire. number: the trainer's of the iteration, where: its journal, for errors. Raises FlowcheckError: these are
    not the buckets of the plan; UpdaterError: they cannot be applied."""
    places = plan.iteration_buckets(iteration)
    if len(places) != len(buckets):
        raise FlowcheckError(f"iteration {number} has {len(buckets)} buckets, not {len(places)}", where=where)
    replica.begin(iteration, record.values())
    for place, bucket in zip(places, buckets, strict=True):
        replica.apply(place.index, bucket)
    replica.finish(record.buffers)
    replica.written(-1)
