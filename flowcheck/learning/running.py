"""Which connection of a running job is which channel: a process next to a node, which needs no answer and has time.

    python -m flowcheck.learning.running < observed > answer

stdin: a line of JSON, {"job": manifest, "flows": connections without channels, "observed": flows of an Observer of
messages, with hexadecimal addresses, "cores": that it may run on}; behind it the Observer's message starts as they are.

stdout: a line of JSON. {"flows": with channels, "spare": number, "unseen": number, "unproven": text}: the one
assignment that is left. {"early": why}: nothing is decided yet. {"refused": {"what", "where", "remedy"}}: nothing will
be.

A decision needs ITERATIONS whole iterations of every pair of ranks of which anything is seen: from then on what was not
seen is silent, and what fits goes on fitting, because each iteration calls what the last one did.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
from parser.observer import START_DTYPE

from flowcheck.errors import UserError
from flowcheck.job.check import check_connections
from flowcheck.job.form import Place, build
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Flow, Job
from flowcheck.learning.assignment import Assignment, assign, iterations_seen
from flowcheck.learning.connections import Connection, connections

__all__ = ["ITERATIONS", "answer", "settle", "withheld_of"]

ITERATIONS = 2
NICE = 5
UNPROVEN = "channels of the connections: found on the wire, by the sizes and places of their messages"


def settle(job: Job, withheld: Sequence[Flow], found: Sequence[Connection]) -> Assignment | str:
    """The assignment, or why nothing can be said yet. Raises UserError as `assign` of a running job."""
    made: Assignment | None = None
    seen = iterations_seen(job, withheld, found)
    try:
        made = assign(job, withheld, found, running=True)
        seen = iterations_seen(job, made.flows, found)  # without those of others between the same hosts
    except UserError:
        if seen >= ITERATIONS:
            raise
    if made is None or seen < ITERATIONS:
        return f"{seen:.1f} of {ITERATIONS} iterations have been seen on the wire"
    return made


def withheld_of(job: Job, flows: Sequence[dict[str, Any]], place: Place) -> list[Flow]:
    """Connections without channels. Raises UserError for one that cannot be."""
    made = [build(Flow, {**flow, "channel": 0}, place / i) for i, flow in enumerate(flows)]
    check_connections(job.communicator, made, place)
    return made


def answer(settings: dict[str, Any], starts: np.ndarray) -> dict[str, Any]:
    """What stdout gets."""
    try:
        job = job_from_dict({**settings["job"], "flows": []})
        withheld = withheld_of(job, settings["flows"], Place("flows"))
        observed = [
            {**flow, "src": bytes.fromhex(flow["src"]), "dst": bytes.fromhex(flow["dst"])}
            for flow in settings["observed"]
        ]
        made = settle(job, withheld, connections(observed, starts))
    except UserError as error:
        return {"refused": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    if isinstance(made, str):
        if any(flow["dropped"] for flow in observed if not flow["tcp"]):
            return {"refused": {"what": f"{made}, and no more messages are kept ({len(starts):,})",
                                "where": "connections", "remedy": "connections with their channels (`topology=`)"}}
        return {"early": made}
    return {"flows": [asdict(flow) for flow in made.flows], "spare": len(made.spare), "unseen": len(made.unseen),
            "unproven": UNPROVEN}


def main(stream: BinaryIO) -> None:
    settings = json.loads(stream.readline())
    os.nice(NICE)
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    print(json.dumps(answer(settings, np.frombuffer(stream.read(), START_DTYPE))), flush=True)


if __name__ == "__main__":
    main(sys.stdin.buffer)
