"""Where a node's journals lie.

    DIRECTORY/flowcheck-NODE.journal/GROUP/RUN/epoch-E/job.json                  the job that it is of
                                                       ring/ring-00000 ...       gradients (flowcheck/journal)
                                                       bases/LINE/step-000100/   states to begin with: checkpoints
                                                       bases/LINE/ends.json      steps after this one may be wrong
                                                       made/LINE/step-000123/    steps that were made again

    DIRECTORY/flowcheck-NODE.journal/GROUP/RUN/epoch-E.before/...                what the same start of a log had before
                                                                                 it joined again

A line is one unbroken chain of versions: what one base and the entries of its own line make is what the node had. Each
beginning (a trainer's state, ranges, a version of a peer, another process of the node) has another line. Everything is
this user's alone (0700, 0600).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from flowcheck.durable import remove_tree, write_atomic
from flowcheck.node.versions.runs import run_folder

__all__ = ["Folder", "Place", "folder_of", "folders_in", "new_line"]

NOBODY = "%"  # a group without a name


@dataclass(frozen=True)
class Place:
    """Of a checkpoint in a journal."""

    line: str
    step: int
    path: Path


@dataclass(frozen=True)
class Folder:
    """Of one run of a group."""

    path: Path

    @property
    def group(self) -> str:
        name = unquote(self.path.parents[1].name)
        return "" if name == NOBODY else name

    @property
    def ring(self) -> Path:
        return self.path / "ring"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def before(self) -> Folder:
        """Where it is kept as long as no steps can be made of what is written since."""
        return Folder(self.path.with_name(f"{self.path.name}.before"))

    def set_aside(self) -> None:
        """As `before`, in place of what is there. Raises OSError."""
        remove_tree(self.before.path)
        self.path.rename(self.before.path)

    def base_of(self, line: str) -> Path:
        """In which a base of this line is written."""
        return self.path / "bases" / line

    def made_of(self, line: str) -> Path:
        return self.path / "made" / line

    @property
    def bases(self) -> list[Place]:
        """Those that came first before others."""
        return sorted(_steps(self.path / "bases"), key=lambda one: (_time(one.path), one.step))

    @property
    def made(self) -> list[Place]:
        return sorted(_steps(self.path / "made"), key=lambda one: (_time(one.path), one.step))

    def ends(self, line: str) -> int | None:
        """Steps of this line after that one may be wrong; None: it has not diverged."""
        try:
            said = json.loads((self.base_of(line) / "ends.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return -1  # somebody has said so
        after = said.get("after") if isinstance(said, dict) else None
        return after if type(after) is int else -1

    def end(self, line: str, after: int) -> None:
        """Steps of this line after that one may be wrong: bases and made ones among them go. Raises FlowcheckError,
        OSError."""
        for path in (self.base_of(line).parent, self.base_of(line)):
            path.mkdir(0o700, exist_ok=True)
        write_atomic(self.base_of(line) / "ends.json", json.dumps({"after": after}).encode())
        for one in (*self.bases, *self.made):
            if one.line == line and one.step > after:
                remove_tree(one.path)

    def end_others(self) -> None:
        """Those of the group's other runs and epochs go: this one has a base."""
        for other in folders_in(self.path.parents[2]):
            if other.group == self.group and other.path != self.path:
                remove_tree(other.path)
                with suppress(OSError):
                    other.path.parent.rmdir()  # of a run with one epoch

    def tidy(self, keep: int) -> None:
        """All but the newest `keep` bases go, and folders of lines that have none."""
        for one in self.bases[:-keep]:
            remove_tree(one.path)
        lines = {one.line for one in self.bases}
        for name in ("bases", "made"):
            for path in _entries(self.path / name):
                if path.name not in lines and _time(path) < max((_time(one.path) for one in self.bases), default=0):
                    remove_tree(path)


def folder_of(root: Path, group: str, run_id: str, epoch: int) -> Folder:
    return Folder(root / (quote(group, safe="") or NOBODY) / run_folder(run_id, epoch))


def folders_in(root: Path) -> Iterator[Folder]:
    """Of all groups and runs."""
    for path in sorted(root.glob("*/*/epoch-*")):
        yield Folder(path)


def new_line() -> str:
    return secrets.token_hex(8)


def _steps(folder: Path) -> Iterator[Place]:
    for line in _entries(folder):
        for path in _entries(line):
            digits = path.name.removeprefix("step-")
            if path.name != digits and digits.isascii() and digits.isdecimal():
                yield Place(line.name, int(digits), path)


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
