"""What a journal says of the job that it is of, so that its steps can be made again: its manifest, and where bytes lie.

    JobText.of(text), job.text()      read, written; JobText.read(path): of a file
    planned(job)                      its plan
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flowcheck.errors import FlowcheckError
from flowcheck.job.clock import Clock
from flowcheck.job.manifest import job_from_dict
from flowcheck.rebuild.plan import JobPlan, digest_of, plan_job

__all__ = ["JobText", "planned"]


@dataclass(frozen=True)
class JobText:
    """What a source says of the job that it follows. body: its manifest with all connections. run: id, epoch and ranks
    as trainers say hello. first: the trainer's number of the manifest's iteration 0. plan: 64 hexadecimal digits that
    stand for all of it, and where bytes lie."""

    body: Mapping[str, Any]
    run: tuple[str, int, int]
    first: int
    plan: str

    def text(self) -> str:
        return json.dumps(self.said)

    @property
    def said(self) -> dict[str, Any]:
        return {"body": dict(self.body), "run": list(self.run), "first": self.first, "plan": self.plan}

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises ValueError, KeyError, TypeError."""
        return cls.of_said(json.loads(text))

    @classmethod
    def of_said(cls, said: Mapping[str, Any]) -> Self:
        """As of `of`."""
        run_id, epoch, ranks = said["run"]
        return cls(said["body"], (run_id, epoch, ranks), said["first"], said["plan"])

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None: it is not there, or not such a text."""
        try:
            return cls.of(path.read_text())
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def planned(job: JobText) -> JobPlan:
    """Raises FlowcheckError: the source lays its bytes out in another way."""
    made = job_from_dict(dict(job.body), where="journal")
    plan = plan_job(made)
    run_id, epoch, ranks = job.run  # the epoch is the one that the source gave the start, and its digest's the job's
    runs = [(run_id, epoch, ranks), (run_id, made.epoch, ranks)]
    if job.plan not in [digest_of(job.body, plan, run, Clock(job.first)) for run in runs]:
        raise FlowcheckError("its source lays gradients out in another way: it is of another release", where="journal")
    return plan
