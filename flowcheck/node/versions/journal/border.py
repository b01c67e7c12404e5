"""What the process that makes a step again is given, and what it says."""

from __future__ import annotations

from pathlib import Path

from flowcheck.node.process.lines import Line, Settings

__all__ = ["MODULE", "RemakeSettings", "Said"]

MODULE = "flowcheck.node.versions.journal.worker"


class RemakeSettings(Settings):
    """folder: of the journal. line, base, path: of the base that is begun with; path: its directory. step: that is
    wanted. threads: of the updater."""

    folder: Path
    line: str
    base: int
    path: Path
    step: int
    threads: int


class Said(Line):
    """steps: so many are made. path: where the one that is wanted is. seconds: that all of it took. why: it cannot be
    made."""

    steps: int = 0
    path: Path | None = None
    seconds: float = 0.0
    why: str = ""
