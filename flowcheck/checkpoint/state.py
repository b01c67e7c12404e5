"""A checkpoint directory as one object, and versions in the form that torch's own loaders take.

    checkpoint = flowcheck.load_checkpoint("out")          the newest step in it; or name a step: "out/step-000020"
    model.load_state_dict(checkpoint.state_dict())
    optimizer.load_state_dict(checkpoint.optimizer_state_dict())

Every hash is checked while it is read. replica.py has the same two calls for a replica in shared memory. Any thread.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowcheck.ask.torch_state import torch_state
from flowcheck.checkpoint.directory import MANIFEST, load_parameters, load_step, read_step_manifest
from flowcheck.checkpoint.paths import path_of, readable, refuse
from flowcheck.checkpoint.users import load_user, users_of
from flowcheck.control.version import status_of
from flowcheck.errors import UserError
from flowcheck.job.version_status import DIVERGED

__all__ = ["Checkpoint", "load_checkpoint"]


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """One version of a job, read and checked.

    path: the directory it was read from.
    step: updates applied since the start of the job; step 20 is the state after iterations 0 to 19.
    run_id, epoch: which run.
    status: "verified": its own checksums matched. "follows 96": those of step 96 did, and it was made from that without
        a gap. "unverified": nothing was compared since it was begun. "diverged": a later checksum did not match, and it
        may be wrong.
    unproven: what was not checked when it was rebuilt; empty if nothing is left open.
    parameters: every entry of the model in `state_dict` order, {name: tensor}.
    optimizer_state: {parameter: {torch's key: tensor}}.
    optimizer: name and groups (`params`, `options`) as in the job manifest; empty for parameters alone.
    rounding: the order of roundings that the updates were computed in.
    users: ranks whose own states it has, for `user`.
    manifest_sha256: which version it is, of all that its directory may have had; "": it was read from none.
    """

    path: Path
    step: int
    run_id: str
    epoch: int
    status: str
    unproven: tuple[str, ...]
    parameters: dict[str, torch.Tensor]
    optimizer_state: dict[str, dict[str, torch.Tensor]]
    optimizer: dict[str, Any]
    rounding: str
    users: tuple[int, ...] = ()
    manifest_sha256: str = ""

    def user(self, rank: int) -> dict[str, Any]:
        """What a rank gave of itself where iteration `step` begins: `user`, `scheduler`, `scaler`, `rng`, `groups`.

        It is read now. Raises UserError: there is nothing of that rank, it is damaged, or the directory has another
        version by now, whose ranks are not those of these tensors.
        """
        if type(rank) is not int or rank < 0:
            raise UserError(f"{rank!r} is not a rank", where="rank", remedy="a whole number, 0 or more")
        manifest = self._manifest()
        try:
            found: dict[str, Any] = load_user(self.path, manifest, rank).state
        except UserError:
            self._manifest()  # the reason may be that it was replaced just now
            raise
        return found

    def _manifest(self) -> dict[str, Any]:
        """Of the version whose tensors these are."""
        manifest = read_step_manifest(self.path)
        if self.manifest_sha256 not in ("", manifest["manifest_sha256"]):
            raise refuse(self.path, "was replaced by another version after its tensors were read",
                         "load_checkpoint once more, and take tensors and user states from that")
        return manifest

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For `model.load_state_dict`. The tensors are the checkpoint's own, not copies."""
        return dict(self.parameters)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """For `load_state_dict` of an optimizer made with the same groups in the same order as the trainer's.

        Raises UserError if the checkpoint has no optimizer: parameters alone were on the wire, or the job names none.
        """
        return torch_state(self.optimizer, self.optimizer_state, self.rounding, str(self.path))

    def __repr__(self) -> str:
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.parameters.values())
        optimizer = self.optimizer.get("name") or "no optimizer state"
        open_ = f", unproven: {'; '.join(self.unproven)}" if self.unproven else ""
        return (
            f"Checkpoint(step {self.step} of run {self.run_id!r}, epoch {self.epoch}, {self.status}{open_}:"
            f" {len(self.parameters)} tensors, {size:,} bytes, {optimizer}; {self.path})"
        )


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint and check every hash of it.

    path: a directory `step-NNNNNN` or `parameters-NNNNNN`, or the directory that holds them: then the newest step that
    has not diverged, or without one the newest parameters. A step that has is read if it is named.

    Raises UserError that names file and tensor.
    """
    path = path_of(path)
    with readable(path, any_kind=True):
        path = _newest(path)
    alone = path.name.startswith("parameters-")
    loaded = load_parameters(path) if alone else load_step(path)
    about = loaded.manifest
    return Checkpoint(
        path, loaded.step, about["run_id"], about["epoch"], status_of(about), tuple(about["unproven"]),
        loaded.parameters, loaded.optimizer_state, {} if alone else about["optimizer"],
        "" if alone else about["rounding"], () if alone else tuple(users_of(about)), about["manifest_sha256"],
    )


def _newest(path: Path) -> Path:
    """The checkpoint that `path` is or holds."""
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    for kind in ("step", "parameters"):
        names = ((child, re.fullmatch(rf"{kind}-(\d+)(?:\.[0-9a-f]{{8}})?", child.name)) for child in path.iterdir())
        found = {int(m[1]): child for child, m in names if m and (child / MANIFEST).exists()}
        for step in sorted(found, reverse=True):
            if kind == "parameters" or not _diverged(found[step]):
                return found[step]
    raise UserError(
        "holds no checkpoint", where=str(path), remedy="give a directory step-NNNNNN, or one that holds some directly"
    )


def _diverged(path: Path) -> bool:
    """What cannot be read is said when it is."""
    try:
        return bool(read_step_manifest(path)["status"] == DIVERGED)
    except UserError:
        return False
