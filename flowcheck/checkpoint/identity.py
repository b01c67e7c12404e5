"""Whose version lies under a name: a fetched one replaces the same version again, and nothing else.

    identity = Identity.of(version)          run, epoch, step, shard
    check_directory(path, identity)          a checkpoint directory: as its manifest says
    check_noted(path, identity)              a directory of another form: as the file NOTE in it says
    check_file(path, identity)               a file of torch.save: as its own keys say

Each raises UserError if there is something that is not recognised as that version: a link, too. No code of a file runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowcheck.checkpoint.directory import MANIFEST, read_step_manifest
from flowcheck.control.version import Version
from flowcheck.durable import write_synced
from flowcheck.errors import UserError

__all__ = ["NOTE", "Identity", "check_directory", "check_file", "check_noted", "folder_of", "note"]

NOTE, SCHEMA = "flowcheck.json", "flowcheck/fetched/1"
NOTE_BYTES = 1 << 20


@dataclass(frozen=True)
class Identity:
    """What tells a version from every other one."""

    run_id: str
    epoch: int
    step: int
    shard: str

    @classmethod
    def of(cls, version: Version) -> Identity:
        return cls(version.run_id, version.epoch, version.step, version.shard)

    @classmethod
    def found(cls, said: Any) -> Identity | None:
        """None: that is not one."""
        values: list[Any] = [said.get(name) for name in _KINDS] if isinstance(said, Mapping) else []
        return cls(*values) if [type(value) for value in values] == list(_KINDS.values()) else None

    def __str__(self) -> str:
        shard = f", shard {self.shard!r}" if self.shard else ""
        return f"step {self.step} of run {self.run_id!r}, epoch {self.epoch}{shard}"


_KINDS = {"run_id": str, "epoch": int, "step": int, "shard": str}


def folder_of(out: str | os.PathLike[str]) -> Path:
    """Raises UserError if no file system can have that name."""
    folder = Path(out)
    try:
        usable = b"\0" not in os.fsencode(folder)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise UserError(f"{os.fspath(folder)!r} is not the name of a directory", where="out", remedy="another name")
    return folder


def note(folder: Path, version: Version) -> None:
    """Say in a directory that has no room for it whose it is, and how good."""
    said = {"schema": SCHEMA, **asdict(Identity.of(version)), "status": version.status,
            "unproven": list(version.unproven)}
    write_synced(folder / NOTE, [json.dumps(said, indent=1).encode() + b"\n"])


def check_directory(path: Path, wanted: Identity) -> None:
    said = None
    if _plain(path, path.is_dir()) and (path / MANIFEST).is_file():
        with suppress(UserError):
            said = {"shard": "", **read_step_manifest(path)}  # the first schema has no shard
    _check(path, wanted, said)


def check_noted(path: Path, wanted: Identity) -> None:
    said = None
    if _plain(path, path.is_dir()) and (path / NOTE).is_file():
        with suppress(OSError, ValueError, RecursionError), (path / NOTE).open("rb") as file:
            said = json.loads(file.read(NOTE_BYTES))
    _check(path, wanted, said if isinstance(said, dict) and said.get("schema") == SCHEMA else None)


def check_file(path: Path, wanted: Identity) -> None:
    said = None
    if _plain(path, path.is_file()):
        with suppress(Exception):  # a file that is not one of torch.save fails in any way
            said = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # tensors are not read
    _check(path, wanted, said)


def _plain(path: Path, right: bool) -> bool:
    return right and not path.is_symlink()


def _check(path: Path, wanted: Identity, said: Any) -> None:
    found = Identity.found(said)
    if found == wanted or not os.path.lexists(path):
        return
    unknown = "is a link" if path.is_symlink() else "exists and cannot be recognised as a version of a step"
    raise UserError(f"{f'is {found}' if found else unknown}, and not {wanted}; it is left alone",
                    where=str(path), remedy="move it away, or use another directory")
