"""What a replica file says of itself, and whether it is what somebody wants to go on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from updater.arrays import check_alone, plan
from updater.errors import ReplicaError
from updater.optimizers import OptimizerSpec
from updater.rounding_modes import RoundingMode
from updater.store import Store

__all__ = ["OWN", "check_found", "describe"]

OWN = "own"  # what is said of a version is of that version alone, and not of those before it


def describe(
    tensors: Mapping[str, torch.Tensor], optimizer: OptimizerSpec, rounding: RoundingMode, *, slots: int, divisor: int,
    run_id: str, epoch: int, buffers: frozenset[str], tied: Mapping[str, str], masters: bool, unproven: Sequence[str],
    start: str,
) -> dict[str, Any]:
    """The layout of a replica's file: who it is of, and where each array lies. Of the tensors only shapes and types
    count."""
    identity = {
        "run_id": run_id, "epoch": epoch, "slots": slots, "divisor": divisor, "dialect": rounding.name,
        "torch_version": rounding.torch_version, "threads": rounding.threads,
        "corrections": {beta: dict(steps) for beta, steps in rounding.corrections.items()},
        "optimizer": optimizer.to_dict(), "unproven": list(unproven), "start": start, "statuses": OWN,
    }
    return identity | plan(tensors, optimizer, buffers, tied, masters)


def check_found(
    store: Store, path: Path, run_id: str | None, epoch: int | None, rounding: RoundingMode | None,
    like: Mapping[str, Any] | None = None,
) -> tuple[OptimizerSpec, RoundingMode, int]:
    """The optimizer, the rounding mode, and the slot of the newest complete version. run_id, epoch: of the job that it
    has to be of. like: a layout that has to be its. Raises ReplicaError, OptimizerError."""
    layout = {"corrections": {}, **store.layout}  # files of before there were any have none
    if like is not None and (odd := _differing(layout, json.loads(json.dumps(like)))):
        raise ReplicaError(f"{path}: is of another job or other settings: {odd}")
    for what, wanted in (("run_id", run_id), ("epoch", epoch)):
        if wanted is not None and layout[what] != wanted:
            raise ReplicaError(f"{path}: belongs to {what} {layout[what]!r}, not {wanted!r}")
    said = (layout["dialect"], layout["torch_version"], layout["threads"])
    corrections = layout["corrections"]
    rounding = rounding or RoundingMode(said[0], said[1], threads=said[2], corrections=corrections)
    if (rounding.name, rounding.torch_version, rounding.threads) != said or rounding.corrections != corrections:
        shared = "" if rounding.threads == said[2] else f", with {said[2] or 'an unknown number of'} threads"
        shared += "" if rounding.corrections == corrections else ", with other corrections of the GPU's powf"
        raise ReplicaError(f"{path}: was built with rounding mode {said[0]} of torch {said[1]}{shared}")
    newest = store.newest()
    if newest is None:
        raise ReplicaError(f"{path}: no complete version in it")
    groups = [(group["params"], group["options"]) for group in layout["optimizer"]["groups"]]
    spec = OptimizerSpec.check(layout["optimizer"]["name"], groups, fused=rounding.fused)
    rounding.check(spec.name, options=spec.with_values(()))
    check_alone(layout["arrays"], spec, rounding)
    return spec, rounding, newest


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What two layouts do not say alike."""
    return ", ".join(sorted(key for key in {*one, *other} if one.get(key) != other.get(key)))
