"""[telemetry]: what is measured of gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from flowcheck.node.config.table import Table

__all__ = ["Telemetry"]


class Telemetry(Table):
    """Off without the table.

    - directory: for CSV files; None: there are none, and what is measured is in the metrics alone.
    - every: of each K-th iteration, as the trainer counts.
    - threads: workers that measure, for each group.
    - series: parts of the model that the metrics have apart, for each group; 0: only the model as a whole.
    - file_mb: MiB of a file, after which the next one begins.
    - files: that are kept of a run, with the one that is written.
    """

    directory: Path | None = None
    every: Annotated[int, Field(ge=1, le=1 << 30)] = 1
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    series: Annotated[int, Field(ge=0, le=64)] = 32
    file_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    files: Annotated[int, Field(ge=2, le=10_000)] = 16
