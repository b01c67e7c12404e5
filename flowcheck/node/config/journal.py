"""[journal]: gradients of the last iterations on disk or in memory, from which any step of theirs is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from flowcheck.node.config.table import Table

__all__ = ["JournalSettings"]


class JournalSettings(Table):
    """A journal for each group that trainers attach.

    - directory: of all journals; on a disk, on tmpfs or on hugetlbfs.
    - megabytes: MiB of one group, its bases among them. While a run begins, those of the run before stay, too, until
      the new one has a base.
    - keep: steps back that can be had at all times; 0: as many as fit.
    """

    directory: Path
    megabytes: Annotated[int, Field(ge=1, le=1 << 40)]
    keep: Annotated[int, Field(ge=0, le=1 << 30)] = 0
