"""Checkpoints on disk: one directory per step, safetensors and hashes, no pickle, whole or not there.

    DIR/step-000020/model.safetensors        every model entry by its state_dict name
                    optimizer.safetensors    state.<parameter>.<key>: exp_avg, momentum_buffer, step, ...
                    user/rank-00003.safetensors   what rank 3 gave of itself, where ranks do
                    manifest.json            what this is, hashes of every tensor and file; written last

    DIR/parameters-000020/parameters.safetensors   parameters alone, in the precision of the wire
                          manifest.json            kind "parameters": no optimizer state, no full checkpoint

`write_step` writes aside in DIR/.step-000020.partial-<pid> and renames when every byte is on the disk, so
a directory named step-* is always whole; a step that exists is swapped for the new one. `load_step`
believes nothing: it checks every hash, and refuses a directory that is still written aside, or that holds
parameters alone. `write_parameters` and `load_parameters` do the same for those.
docs/reference/checkpoint.md describes the format and how to load it without this project. files.py: the single files.

Threads: any; two writers of the same DIR must be two processes or take turns.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowcheck import __version__
from flowcheck.checkpoint.files import load_file, tensor_sha256, write_file
from flowcheck.checkpoint.paths import path_of, read_small, refuse
from flowcheck.checkpoint.users import write_users
from flowcheck.control.divergence import Divergence
from flowcheck.control.tensors import DTYPES
from flowcheck.control.version import (
    HEAD,
    MODEL,
    OPTIMIZER,
    SCHEMA,
    SCHEMAS,
    Version,
    check_fields,
    digests,
    is_sealed,
    seal,
    status_of,
)
from flowcheck.durable import (
    adopt,
    fsync_directory,
    make_directory,
    new_directory,
    partial_name,
    remove_left,
    remove_tree,
    reporting,
    write_atomic,
    write_synced,
)
from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.job.model import ModelEntry
from flowcheck.job.version_status import DIVERGED

__all__ = [
    "MANIFEST", "PARAMETERS_SCHEMA", "Loaded", "Meta", "check_replaceable", "load_init", "load_parameters", "load_step",
    "mark_diverged", "parameters_path", "read_step_manifest", "step_manifest", "step_path", "tensor_sha256",
    "write_parameters", "write_step",
]

PARAMETERS_SCHEMA = "flowcheck/parameters/1"
MANIFEST, PARAMETERS = "manifest.json", "parameters.safetensors"
MANIFEST_BYTES = 256 << 20  # that one may have: each tensor takes some hundred
Check = Callable[[Path], None]


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says about itself beyond its tensors.

    status: how far it is known to be the trainer's (flowcheck/job/version_status.py). unproven: marks of the verdict
    (see flowcheck.rebuild.iteration.verdict); empty if every packet was checked. optimizer: name and groups in the
    job manifest's form, {} if the job has none. rounding: the rounding order the updates were computed in. shard: name
    of the group of ranks whose state it is. matches: trainer checksums that had matched when it was made. start and
    attached: as of flowcheck.control.version.Version.
    """

    run_id: str = ""
    epoch: int = 0
    status: str = "unverified"
    unproven: tuple[str, ...] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    rounding: str = ""
    shard: str = ""
    matches: int = 0
    start: str = ""
    attached: str = ""

    @classmethod
    def of(cls, version: Version) -> Meta:
        """What a version says of itself, to be written again."""
        return cls(version.run_id, version.epoch, version.status, version.unproven, version.optimizer,
                   version.rounding, version.shard, version.matches, version.start,
                   version.attached)


@dataclass(frozen=True)
class Loaded:
    """A checked checkpoint. parameters in state_dict order; optimizer_state: parameter -> key -> tensor.

    A plain safetensors file has step 0, no optimizer state and an empty manifest.
    """

    step: int
    parameters: dict[str, torch.Tensor]
    optimizer_state: dict[str, dict[str, torch.Tensor]]
    manifest: dict[str, Any]


def step_path(out: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(out) / f"step-{step:06d}"


def parameters_path(out: str | os.PathLike[str], step: int) -> Path:
    """Where the parameters of a step lie that were gathered without their optimizer state."""
    return Path(out) / f"parameters-{step:06d}"


def write_step(
    out: str | os.PathLike[str],
    step: int,
    parameters: Mapping[str, torch.Tensor],
    optimizer_state: Mapping[str, Mapping[str, torch.Tensor | float | int]],
    meta: Meta,
    users: Callable[[], Mapping[int, bytes]] | None = None,
    check: Check | None = None, several: bool = False,
) -> Path:
    """Write one step and return its directory. Raises EnvironmentProblem; then the old one, if any, stands.

    parameters: every model entry in state_dict order. optimizer_state: parameter -> key -> tensor or number
    (an int becomes an int64 scalar, a float a float64 one). users: called when all of that is written: by rank, a
    file of flowcheck/control/user_state.py. check: called with the directory before anything is written and before its
    name is taken; raises if what lies there must stay. None: any checkpoint of this project may be replaced. several:
    others may write the same step at once.
    """
    flat = {
        f"state.{name}.{key}": _as_tensor(value)
        for name, state in optimizer_state.items() for key, value in state.items()
    }
    files = {MODEL: dict(parameters), OPTIMIZER: flat}
    return _write_directory(Path(out), step_path(out, step), files, _about(step, meta), users, check, several)


def write_parameters(
    out: str | os.PathLike[str], step: int, parameters: Mapping[str, torch.Tensor], absent: Sequence[str],
    meta: Meta,
) -> Path:
    """Write gathered parameters and return their directory; atomic and replaced as a step is.

    parameters: as they were on the wire, in compute precision. absent: model entries that are not gathered.
    Raises EnvironmentProblem. meta.optimizer and meta.rounding do not apply.
    """
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters.values()})
    about = {
        "kind": "parameters", "dtype": dtypes[0] if len(dtypes) == 1 else "mixed", "absent": list(absent),
        "status": meta.status, "unproven": list(meta.unproven),
    }
    head = _head(PARAMETERS_SCHEMA, step, meta) | about
    return _write_directory(Path(out), parameters_path(out, step), {PARAMETERS: dict(parameters)}, head)


def mark_diverged(out: str | os.PathLike[str], divergence: Divergence) -> list[int]:
    """Say in the manifests of a run's steps that these versions may be wrong. Returns the steps, the newest first.
    Raises EnvironmentProblem: some cannot be written to; the others were.

    What is damaged, or was removed meanwhile, is left as it is.
    """
    marked: list[int] = []
    failed: EnvironmentProblem | None = None
    paths = {step_path(out, int(m[1])) for path in Path(out).glob("step-*")
             if (m := re.fullmatch(r"step-(\d{1,15})", path.name))}
    for path in sorted(paths, reverse=True):
        try:
            said = read_step_manifest(path)
        except UserError:
            continue
        of = said["run_id"], said["epoch"], said.get("shard", ""), said["step"], status_of(said)
        if not divergence.covers(*of) or said["status"] == DIVERGED:
            continue
        try:
            came = (path / MANIFEST).stat().st_mtime_ns
            write_atomic(path / MANIFEST, json.dumps(seal({**said, "status": DIVERGED}), indent=1).encode() + b"\n")
            os.utime(path / MANIFEST, ns=(came, came))  # by which copies are ordered
            marked.append(said["step"])
        except (OSError, EnvironmentProblem) as error:
            failed = error if isinstance(error, EnvironmentProblem) else EnvironmentProblem(
                f"cannot be marked as diverged: {error.strerror}", where=str(path), remedy="remove it by hand")
    if failed is not None:
        raise failed
    return marked


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises UserError if what lies there, if anything, is not a checkpoint."""
    path = Path(path)
    if path.exists() and not (path / MANIFEST).is_file():
        raise UserError(
            "exists and is not a checkpoint of this project; it is left alone", where=str(path),
            remedy="move it away, or use another directory",
        )


def _write_directory(
    out: Path, path: Path, files: Mapping[str, Mapping[str, torch.Tensor]], about: dict[str, Any],
    users: Callable[[], Mapping[int, bytes]] | None = None, check: Check | None = None, several: bool = False,
) -> Path:
    """The files and their manifest under `path`, all or nothing."""
    aside, check = partial_name(path, several), check or check_replaceable
    for tensors in files.values():
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise UserError(f"tensor {name!r} is {tensor.dtype}, which no checkpoint holds", where=str(path))
    with reporting(path):
        check(path)
        try:
            make_directory(out)
            remove_left(out, path.name.partition("-")[0] + "-")
            remove_tree(aside)  # of an earlier process that had our pid
            new_directory(aside)
            written = {name: write_file(aside / name, tensors) for name, tensors in files.items()}
            given = users() if users is not None else {}
            if given:
                about = about | {"user": write_users(aside, given)}
            manifest = _manifest(about, written)
            write_synced(aside / MANIFEST, [json.dumps(manifest, indent=1).encode() + b"\n"])
            fsync_directory(aside)
            check(path)  # writing may have taken minutes
            adopt(aside, path)
        finally:
            # What is left aside is half of the new step, or all of the one that it replaced.
            remove_tree(aside)
    return path


def load_step(path: str | os.PathLike[str]) -> Loaded:
    """Read a step directory, checking every hash. Raises UserError naming file and tensor."""
    path = path_of(path)
    manifest = read_step_manifest(path)
    found = {name: load_file(path / name, manifest["files"][name]) for name in (MODEL, OPTIMIZER)}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in found[OPTIMIZER].items():
        parameter, _, key = name.removeprefix("state.").rpartition(".")
        state.setdefault(parameter, {})[key] = tensor
    return Loaded(manifest["step"], found[MODEL], state, manifest)


def read_step_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a step directory, which no tensor was held against yet. Raises UserError."""
    return _read_manifest(path_of(path), SCHEMAS, "step", (MODEL, OPTIMIZER))


def load_parameters(path: str | os.PathLike[str]) -> Loaded:
    """Read a directory of gathered parameters, checking every hash; no optimizer state. Raises UserError."""
    path = path_of(path)
    manifest = _read_manifest(path, (PARAMETERS_SCHEMA,), "parameters", (PARAMETERS,))
    return Loaded(manifest["step"], load_file(path / PARAMETERS, manifest["files"][PARAMETERS]), {}, manifest)


def load_init(path: str | os.PathLike[str], model: Sequence[ModelEntry]) -> Loaded:
    """Initial weights from FILE.safetensors or a step directory, checked against the manifest's model.

    Raises UserError naming the file and the tensor if anything is missing, extra, or of another dtype or
    shape: a replica that starts from other weights than the trainer's is wrong for ever.
    """
    path = path_of(path)
    loaded = load_step(path) if path.is_dir() else Loaded(0, load_file(path, None), {}, {})
    if loaded.manifest.get("status") == DIVERGED:
        raise UserError(
            f"step {loaded.step} has diverged: a checksum of its trainer did not match after it was made",
            where=str(path), remedy="an older step of that run, one that is verified",
        )
    wrong = _differences(loaded.parameters, model)
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(
            "does not hold the job's model: " + "; ".join(wrong[:3]) + more, where=str(path),
            remedy="give the weights this job started from, or correct `model` in the job manifest",
        )
    ordered = {entry.name: loaded.parameters[entry.name] for entry in model}
    return Loaded(loaded.step, ordered, loaded.optimizer_state, loaded.manifest)


# -- writing ----------------------------------------------------------------------------------------


def _as_tensor(value: torch.Tensor | float | int) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _head(schema: str, step: int, meta: Meta) -> dict[str, Any]:
    return {"schema": schema, "run_id": meta.run_id, "epoch": meta.epoch, "step": step}


def _about(step: int, meta: Meta) -> dict[str, Any]:
    """What a step's manifest says besides its files."""
    return _head(SCHEMA, step, meta) | {
        "shard": meta.shard, "status": meta.status, "unproven": list(meta.unproven), "optimizer": dict(meta.optimizer),
        "rounding": meta.rounding, "matches": meta.matches,
        **({"start": meta.start} if meta.start else {}),
        **({"attached": meta.attached} if meta.attached else {}),
    }


def step_manifest(
    step: int, meta: Meta, files: dict[str, Any], users: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Of a step that lies elsewhere than in a directory. files, users: their entries. more: what else is said of it."""
    return _manifest(_about(step, meta) | ({"user": dict(users)} if users else {}) | more, files)


def _manifest(about: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    by = {"flowcheck": __version__, "torch": str(torch.__version__)}
    return seal({**about, "written_by": by, "files": files})


# -- reading ----------------------------------------------------------------------------------------


def _read_manifest(path: Path, schemas: tuple[str, ...], name: str, files: tuple[str, ...]) -> dict[str, Any]:
    foreign = f"give a directory named {name}-NNNNNN that this project wrote"
    if ".partial-" in path.name:
        raise refuse(path, "is a step that was not finished or was replaced", foreign)
    text = read_small(path / MANIFEST, MANIFEST_BYTES)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise refuse(path / MANIFEST, "is not JSON") from None
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found not in schemas and found == PARAMETERS_SCHEMA:
        raise refuse(path, "holds gathered parameters alone, in compute precision, and no optimizer state", foreign)
    if not isinstance(manifest, dict) or found not in schemas:
        raise refuse(path / MANIFEST, f"is not a {schemas[-1]} manifest", foreign)
    if not is_sealed(manifest):
        raise refuse(path / MANIFEST, "was changed after it was written (its own hash does not match)")
    if not _well_formed(manifest, files):
        raise refuse(path / MANIFEST, "lacks a field that every checkpoint has", foreign)
    _check_fields(manifest, files, str(path / MANIFEST))
    named = re.fullmatch(rf"{name}-(\d+)", path.name)
    if named and int(named[1]) != manifest["step"]:
        raise refuse(path, f"holds step {manifest['step']}", "give the directory its own name back")
    return manifest


def _check_fields(manifest: dict[str, Any], files: tuple[str, ...], where: str) -> None:
    """Is each field what it must be? Its hash is right, and says nothing of that. Raises UserError."""
    if manifest["schema"] in SCHEMAS:
        Version.of(manifest, where)
        return
    check_fields(manifest, HEAD, where)
    for file in files:
        digests(manifest["files"][file], f"{where}: {file}")


def _well_formed(manifest: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """The fields that reading relies on, with their types."""
    files = manifest.get("files")
    if not isinstance(manifest.get("step"), int) or not isinstance(files, dict):
        return False
    for name in names:
        entry = files.get(name)
        if not isinstance(entry, dict) or not {"bytes", "sha256", "tensors"} <= set(entry):
            return False
        tensors = entry["tensors"]
        if not isinstance(tensors, dict):
            return False
        if not all(isinstance(tensor, dict) and "sha256" in tensor for tensor in tensors.values()):
            return False
    return True


def _differences(tensors: Mapping[str, torch.Tensor], model: Sequence[ModelEntry]) -> list[str]:
    wrong = []
    for entry in model:
        tensor = tensors.get(entry.name)
        if tensor is None:
            wrong.append(f"tensor {entry.name!r} is missing")
        elif list(tensor.shape) != entry.shape:
            wrong.append(f"tensor {entry.name!r} has shape {list(tensor.shape)}, not {entry.shape}")
        elif tensor.dtype not in DTYPES or DTYPES[tensor.dtype][0] != entry.dtype:
            found = str(tensor.dtype).removeprefix("torch.")
            wrong.append(f"tensor {entry.name!r} is {found}, not {entry.dtype}")
    names = {entry.name for entry in model}
    return wrong + [f"tensor {name!r} is not in the job's model" for name in tensors if name not in names]
