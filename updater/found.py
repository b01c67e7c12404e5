"""What a replica file says of itself, checked by whoever wants to go on with it."""

from __future__ import annotations

from pathlib import Path

from updater.arrays import check_alone
from updater.errors import ReplicaError
from updater.optimizers import OptimizerSpec
from updater.rounding_modes import RoundingMode
from updater.store import Store

__all__ = ["check_found"]


def check_found(
    store: Store, path: Path, run_id: str | None, epoch: int | None, rounding: RoundingMode | None
) -> tuple[OptimizerSpec, RoundingMode, int]:
    """The optimizer, the rounding mode, and the slot of the newest complete version. run_id, epoch: of the job that it
    has to be of. Raises ReplicaError, OptimizerError."""
    layout = store.layout
    for what, wanted in (("run_id", run_id), ("epoch", epoch)):
        if wanted is not None and layout[what] != wanted:
            raise ReplicaError(f"{path}: belongs to {what} {layout[what]!r}, not {wanted!r}")
    said = (layout["dialect"], layout["torch_version"], layout["threads"])
    rounding = rounding or RoundingMode(said[0], said[1], threads=said[2])
    if (rounding.name, rounding.torch_version, rounding.threads) != said:
        shared = "" if rounding.threads == said[2] else f", with {said[2] or 'an unknown number of'} threads"
        raise ReplicaError(f"{path}: was built with rounding mode {said[0]} of torch {said[1]}{shared}")
    newest = store.newest()
    if newest is None:
        raise ReplicaError(f"{path}: no complete version in it")
    groups = [(group["params"], group["options"]) for group in layout["optimizer"]["groups"]]
    spec = OptimizerSpec.check(layout["optimizer"]["name"], groups, fused=rounding.fused)
    check_alone(layout["arrays"], spec, rounding)
    return spec, rounding, newest
