"""What a node says of versions that turned out not to be the trainer's: a checksum did not match.

    one = Divergence(run_id, epoch, shard, after=96, last=99)
    one.covers(run_id, epoch, shard, step, status)       is this version one of them?
    Divergence.of(said)                                  read from anybody; None: it is not one

Versions of a run between the last one that was verified and the mismatch may all be wrong, and none of them is offered.
One that was verified itself is not among them. Who keeps copies of a node's versions hears it where that node lists
them (`/v1/versions`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flowcheck.job.form import INTEGER_LIMIT
from flowcheck.job.version_status import VersionStatus

__all__ = ["MOST_DIVERGENCES", "Divergence"]

MOST_DIVERGENCES = 64  # of a node that are remembered, and read


@dataclass(frozen=True)
class Divergence:
    """run_id, epoch, shard: whose versions.
    after: step of the last one that was verified; -1: none was.
    last: the newest step that was made since then."""

    run_id: str
    epoch: int
    shard: str
    after: int
    last: int

    @classmethod
    def of(cls, said: Any) -> Divergence | None:
        kinds = {"run_id": str, "epoch": int, "shard": str, "after": int, "last": int}
        if not isinstance(said, dict) or any(type(said.get(name)) is not kind for name, kind in kinds.items()):
            return None
        numbers = said["epoch"], said["after"] + 1, said["last"]
        if not all(0 <= number < INTEGER_LIMIT for number in numbers):
            return None
        return cls(**{name: said[name] for name in kinds})

    @classmethod
    def all_of(cls, said: Any) -> list[Divergence]:
        """What is one of a list, the newest MOST_DIVERGENCES."""
        rows = said[-MOST_DIVERGENCES:] if isinstance(said, list) else []
        return [one for one in map(cls.of, rows) if one is not None]

    def covers(self, run_id: str, epoch: int, shard: str, step: int, status: str) -> bool:
        of = run_id, epoch, shard
        return of == (self.run_id, self.epoch, self.shard) and self.after < step <= self.last and not (
            VersionStatus.of(status).verified)

    @staticmethod
    def any_covers(
        found: Iterable[Divergence], run_id: str, epoch: int, shard: str, step: int, status: str
    ) -> bool:
        return any(one.covers(run_id, epoch, shard, step, status) for one in found)
