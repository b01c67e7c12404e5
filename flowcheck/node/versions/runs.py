"""Names of runs: one for a run that has none, that of one start of its trainers, and the folder of its checkpoints."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flowcheck.control.start import start_text

__all__ = ["new_run_id", "run_folder", "start_of"]

LONGEST_NAME = 200  # of a run's folder; file systems take 255


def new_run_id() -> str:
    """A name for a run that has none: when it began, and what nobody else has."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def start_of(body: Mapping[str, Any], run: tuple[str, int, int], first: int, instance: str) -> str:
    """A text that two attachments share only if they are the same one, come back. It ends with 64 hexadecimal digits:
    of the manifest with all connections, id, epoch and ranks of the run, the trainer's number of its first iteration,
    and the instance that rank 0 says it is. Before them stands the line of the start, where the trainers say it
    (control/start.py). "": they say no instance."""
    if not instance:
        return ""
    said = json.dumps([dict(body), list(run), first, instance], sort_keys=True)
    return start_text(hashlib.sha256(said.encode()).hexdigest(), instance)


def run_folder(run_id: str, epoch: int) -> Path:
    """Where a run's checkpoints lie in the output directory: names of runs are any text, those of files are not."""
    name = quote(run_id, safe="+@=,:")
    if name.startswith("."):
        name = f"%2E{name[1:]}"  # neither hidden nor this directory nor the one above
    if len(name) > LONGEST_NAME:
        name = f"{name[:64]}-{hashlib.sha256(run_id.encode()).hexdigest()[:32]}"
    return Path(name or "%") / f"epoch-{epoch}"
