"""What a version is, wherever it lies: one description for a replica's slot, a checkpoint directory and an answer.

    version = Version(run_id, epoch, step, shard, status, unproven, optimizer, rounding, files)
    document = version.document(...)            the manifest: JSON, with a hash over itself
    Version.of(document, where)                 read from anybody, checked

The manifest of a checkpoint directory is this description on disk (flowcheck/checkpoint/directory.py), a slot of a
replica has it in memory (flowcheck/node/versions/holdings.py), and both are asked for with the same requests.
Torch and the standard library: trainers read it. Any thread.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowcheck.control.tensors import DTYPES, TensorSpec, is_shape
from flowcheck.errors import UserError
from flowcheck.job.version_status import UNVERIFIED, VERIFIED, VersionStatus

__all__ = [
    "HEAD", "MODEL", "OPTIMIZER", "SCHEMA", "SCHEMAS", "Digest", "Version", "check_fields", "digests", "is_sealed",
    "odd_optimizer", "seal", "self_hash", "status_of",
]

SCHEMA = "flowcheck/checkpoint/3"
# That are read. The first has no shard. The first two say `verified` of every version after a checksum that matched.
SCHEMAS = ("flowcheck/checkpoint/1", "flowcheck/checkpoint/2", SCHEMA)
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
OPTIMIZERS = ("sgd", "adam", "adamw")
NO_OPTIONS = {"params", "param_names"}  # which torch has in a group beside its options
_FIELDS: dict[str, type] = {
    "run_id": str, "epoch": int, "step": int, "shard": str, "status": str, "unproven": list, "optimizer": dict,
    "rounding": str, "matches": int, "start": str, "files": dict,
}
HEAD = ("run_id", "epoch", "step", "status", "unproven")  # of a manifest of parameters alone, too
_STATE = re.compile(r"state\..+\.[^.]+", re.DOTALL)  # parameter and key, which can be told apart in one way
_NAMES = {name for name, _ in DTYPES.values()}


@dataclass(frozen=True)
class Digest:
    """One tensor: what it must be, and SHA-256 over its little-endian elements in row-major order, in hexadecimal."""

    spec: TensorSpec
    sha256: str


@dataclass(frozen=True)
class Version:
    """The complete state of one shard after `step` updates.

    run_id, epoch: which run, and which start of it.
    step: updates since the start of the job.
    shard: name of the group of ranks that hold it in common (attach's `group`); "" where a job has one.
    status: how far it is known to be the trainer's (flowcheck/job/version_status.py).
    unproven: what nothing has shown; empty if nothing is left open.
    optimizer: name and groups as in the job manifest, with the options of the step that made this version; {}: none.
    rounding: the order of roundings that its updates were computed in.
    files: MODEL and OPTIMIZER, each tensor name -> Digest, in the model's order; of the optimizer
        `state.<parameter>.<key>`.
    matches: checksums of the trainer that had matched when it was made.
    start: of which start of the job's trainers it is (flowcheck/control/start.py); "": not said.
    attached: what a node that knows the nodes' token says of run and epoch: trainers have attached with them there
        (proof.voucher); "": nobody says it.
    """

    run_id: str
    epoch: int
    step: int
    shard: str
    status: str
    unproven: tuple[str, ...]
    optimizer: Mapping[str, Any]
    rounding: str
    files: Mapping[str, Mapping[str, Digest]]
    matches: int = 0
    start: str = ""
    attached: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(digest.spec.nbytes for tensors in self.files.values() for digest in tensors.values())

    def document(self) -> dict[str, Any]:
        """The manifest, sealed."""
        files = {
            file: {
                "bytes": sum(digest.spec.nbytes for digest in tensors.values()),
                "tensors": {
                    name: {"dtype": one.spec.dtype, "shape": list(one.spec.shape), "sha256": one.sha256}
                    for name, one in tensors.items()
                },
            }
            for file, tensors in self.files.items()
        }
        return seal({
            "schema": SCHEMA, "run_id": self.run_id, "epoch": self.epoch, "step": self.step, "shard": self.shard,
            "status": self.status, "unproven": list(self.unproven), "optimizer": dict(self.optimizer),
            "rounding": self.rounding, "matches": self.matches, **({"start": self.start} if self.start else {}),
            **({"attached": self.attached} if self.attached else {}), "files": files,
        })

    @classmethod
    def of(cls, document: Any, where: str) -> Version:
        """Raises UserError: not such a manifest, of a schema that is not read, changed since, or a field that is not
        what it must be."""
        if not isinstance(document, dict) or document.get("schema") not in SCHEMAS:
            raise _refuse(f"is not a {SCHEMA} manifest", where)
        if not is_sealed(document):
            raise _refuse("was changed after it was written (its own hash does not match)", where)
        # Those that are older do not say it.
        document = {"shard": "", "matches": int(document.get("status") == VERIFIED), "start": "", **document}
        check_fields(document, _FIELDS, where)
        if not isinstance(document.get("attached", ""), str):
            raise _refuse("attached is not a text", where)
        if set(document["files"]) != {MODEL, OPTIMIZER}:
            raise _refuse(f"files are not {MODEL} and {OPTIMIZER}", where)
        files = {file: digests(document["files"][file], f"{where}: {file}") for file in (MODEL, OPTIMIZER)}
        if odd := [name for name in files[OPTIMIZER] if not _STATE.fullmatch(name)]:
            raise _refuse(f"tensor {odd[0][:80]!r} is no state of a parameter", f"{where}: {OPTIMIZER}")
        if why := odd_optimizer(document["optimizer"]):
            raise _refuse(f"optimizer {why}", where)
        return cls(
            document["run_id"], document["epoch"], document["step"], document["shard"], status_of(document),
            tuple(document["unproven"]), document["optimizer"], document["rounding"], files, document["matches"],
            document["start"], document.get("attached", ""),
        )


def check_fields(document: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Are these fields of a manifest what they must be in every one of ours? Raises UserError."""
    names = tuple(names)
    for name in names:
        if type(document.get(name)) is not _FIELDS[name]:
            raise _refuse(f"{name} is not what every version has", where)
    if min(document[name] for name in names if _FIELDS[name] is int) < 0:
        raise _refuse("epoch, step or matches is not what every version has", where)
    if not all(isinstance(mark, str) for mark in document["unproven"]):
        raise _refuse("unproven is not what every version has", where)


def status_of(document: Mapping[str, Any]) -> str:
    """What a checked manifest says of its version. `verified` was said of later ones too, before each had its own:
    nobody knows whether it was that version that was compared."""
    status = VersionStatus.of(document["status"], document["step"])
    return UNVERIFIED if status.verified and document["schema"] in SCHEMAS[:-1] else str(status)


def seal(document: dict[str, Any]) -> dict[str, Any]:
    """The same with a hash over itself as the last field."""
    return {**document, "manifest_sha256": self_hash(document)}


def self_hash(document: Mapping[str, Any]) -> str:
    """Over the JSON without `manifest_sha256`, keys sorted, no spaces: a flipped bit in the manifest shows too."""
    body = {key: value for key, value in document.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_sealed(document: Mapping[str, Any]) -> bool:
    """Does the hash that it says of itself fit? That shows damage. It proves nobody's word: anybody can seal."""
    try:
        return bool(document.get("manifest_sha256") == self_hash(document))
    except RecursionError:  # nested almost too deeply to be read
        return False


def odd_optimizer(said: Mapping[str, Any]) -> str:
    """Why it is not in the job manifest's form; "": it is, or the version has none."""
    if not said:
        return ""
    if said.get("name") not in OPTIMIZERS:
        return f"is not one of {', '.join(OPTIMIZERS)}"
    groups = said.get("groups")
    if not isinstance(groups, list) or not all(
        isinstance(one, dict) and isinstance(one.get("options"), dict) and isinstance(one.get("params"), list)
        and all(isinstance(name, str) for name in one["params"]) for one in groups
    ):
        return "has groups that are none"
    for one in groups:
        if odd := sorted(NO_OPTIONS & one["options"].keys()):  # torch would take it for the group's parameters
            return f"has {odd[0]!r} among its options"
    names = [name for one in groups for name in one["params"]]
    return "has a parameter twice" if len(set(names)) < len(names) else ""


def digests(entry: Any, where: str) -> dict[str, Digest]:
    """Of a file's entry in a manifest. Raises UserError."""
    tensors = entry.get("tensors") if isinstance(entry, dict) else None
    if not isinstance(tensors, dict):
        raise _refuse("lists no tensors", where)
    return {name: _digest(tensor, f"{where}: tensor {name!r}") for name, tensor in tensors.items()}


def _digest(tensor: Any, where: str) -> Digest:
    if not isinstance(tensor, dict):
        raise _refuse("is not described", where)
    dtype, shape, sha256 = tensor.get("dtype"), tensor.get("shape"), tensor.get("sha256")
    if not isinstance(dtype, str) or dtype not in _NAMES or not is_shape(shape):
        raise _refuse("has no proper dtype and shape", where)
    if not isinstance(sha256, str) or len(sha256) != 64:
        raise _refuse("has no SHA-256", where)
    return Digest(TensorSpec(dtype, tuple(shape)), sha256)


def _refuse(what: str, where: str) -> UserError:
    return UserError(what, where=where, remedy="use another version of the run; this one is damaged, or not ours")
