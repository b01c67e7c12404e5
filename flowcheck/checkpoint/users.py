"""What ranks gave of themselves, in a checkpoint directory: a file for each, in its folder `user`.

    entries = write_users(directory, {rank: data})       what the manifest says of them
    users_of(manifest) -> {rank: entry}                  of one that was read
    load_user(directory, manifest, rank) -> UserState    checked against it

The files' form: flowcheck/control/user_state.py. Any thread.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowcheck.checkpoint.paths import readable, refuse
from flowcheck.control.messages import MOST_RANKS
from flowcheck.control.user_state import USER_BYTES, UserState
from flowcheck.durable import fsync_directory, new_directory, write_synced

__all__ = ["FOLDER", "file_of", "load_user", "read_user", "users_of", "write_users"]

FOLDER = "user"


def file_of(directory: Path, rank: int) -> Path:
    return directory / FOLDER / f"rank-{rank:05d}.safetensors"


def read_user(path: Path) -> bytes:
    """The bytes of such a file; a pipe or a link in its place is not followed, nor waited for. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        return file.read(USER_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""


def write_users(directory: Path, users: Mapping[int, bytes]) -> dict[str, Any]:
    """On the disk when this returns, but for the directory's own entry. Raises OSError."""
    new_directory(directory / FOLDER)
    for rank, data in users.items():
        write_synced(file_of(directory, rank), [data])
    fsync_directory(directory / FOLDER)
    return {str(rank): {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for rank, data in sorted(users.items())}


def users_of(manifest: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """By rank. What is not an entry is left out: the manifest's own hash was checked."""
    found = manifest.get("user")
    out = {}
    for rank, entry in found.items() if isinstance(found, dict) else ():
        sound = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
        if sound and rank.isdecimal() and rank.isascii() and len(rank) < 6 and int(rank) < MOST_RANKS:
            out[int(rank)] = entry
    return dict(sorted(out.items()))


def load_user(directory: Path, manifest: Mapping[str, Any], rank: int) -> UserState:
    """Raises UserError: that rank has none, or it is not what was written."""
    entry, path = users_of(manifest).get(rank), file_of(directory, rank)
    if entry is None:
        raise refuse(directory, f"has no state of rank {rank}", "another step, or a rank that gave one")
    with readable(path):
        data = read_user(path)
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise refuse(path, "has other bytes than those written (SHA-256 does not match its manifest)")
    found = UserState.of(data, str(path))
    if (found.step, found.rank) != (manifest["step"], rank):
        raise refuse(path, f"is of step {found.step} and rank {found.rank}")
    return found
