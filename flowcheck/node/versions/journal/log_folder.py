"""Where a log lies next to its journal, and what is said of it once.

    FOLDER/log/log.json          the job and its start
               base-000003/      bases (log_bases.py)
               user.user/        own states of ranks (versions/user_states.py)
    FOLDER/ring/                 gradients and records (flowcheck/journal)

    write_about(folder, about); about = read_about(folder); line_in(folder)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowcheck.control.start import line_of
from flowcheck.durable import make_directory, write_atomic

__all__ = ["About", "line_in", "log_folder", "read_about", "users_of", "write_about"]

FILE = "log.json"


@dataclass(frozen=True)
class About:
    """run_id, epoch, shard, start: as of a version. first: the trainer's number of the manifest's iteration 0. job: the
    manifest with all connections. plan: as of the heads of entries."""

    run_id: str
    epoch: int
    shard: str
    start: str
    first: int
    plan: str
    job: Mapping[str, Any]


def log_folder(folder: Path) -> Path:
    """folder: of one run of a group, in the journal."""
    return folder / "log"


def users_of(folder: Path) -> Path:
    """In place of a replica's file, for the names of own states."""
    return log_folder(folder) / "user.log"


def write_about(folder: Path, about: About) -> None:
    """Raises EnvironmentProblem."""
    make_directory(log_folder(folder))
    write_atomic(log_folder(folder) / FILE, json.dumps(asdict(about)).encode())


def read_about(folder: Path) -> About | None:
    """None: it is not there, or damaged."""
    try:
        said = json.loads((log_folder(folder) / FILE).read_bytes())
        about = About(**said)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = {"run_id": str, "epoch": int, "shard": str, "start": str, "first": int, "plan": str, "job": dict}
    return about if all(type(getattr(about, name)) is kind for name, kind in kinds.items()) else None


def line_in(folder: Path) -> str:
    """The start of the log that lies there; "": there is not one, or it does not say."""
    about = read_about(folder)
    return line_of(about.start) if about is not None else ""
