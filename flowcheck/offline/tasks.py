"""What a child process does for the public calls: plain JSON values in and out, no terminal.

    TASKS[name](given) -> answer        run by child.py; given is what calls.py has made of its arguments
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from flowcheck.diagnose.inspect import survey_captures
from flowcheck.job.manifest import job_from_dict
from flowcheck.learning.captures import learn
from flowcheck.learning.hints import Hints, parse_optimizer
from flowcheck.offline.replay import ReplayOptions, replay

__all__ = ["TASKS"]


def _hints(given: Mapping[str, Any]) -> Hints:
    """given: what calls.py has made of the arguments of `learn`."""
    return Hints(
        parse_optimizer(given["optimizer"]) if given["optimizer"] else None, given["dtype"], tuple(given["buckets"]),
        {address: int(rank) for address, rank in given["ranks"].items()}, given["nccl_version"], given["algorithm"],
    )


def _inspect(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"document": survey_captures(given["captures"])}


def _learn(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"job": learn(given["captures"], _hints(given["hints"]), given["hints"]["logs"]).job.to_dict()}


def _replay(given: Mapping[str, Any]) -> dict[str, Any]:
    job = given["job"]
    if isinstance(job, dict):
        job = job_from_dict(job, where="the job given")
    elif job is not None:
        job = Path(job)
    options = ReplayOptions(
        [Path(path) for path in given["captures"]], job, Path(given["out"]),
        None if given["init"] is None else Path(given["init"]), given["every"], given["iterations"], given["arenas"],
        given["icrc"], _hints(given["hints"]), [Path(path) for path in given["hints"]["logs"]], given["gradients"],
    )
    report, failure = replay(options, Console(file=io.StringIO()))
    return {"report": report.to_dict(), "failure": failure}


TASKS = {"inspect": _inspect, "learn": _learn, "replay": _replay}
