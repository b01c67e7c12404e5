"""Who says what a communicator is and was asked for: the caller, its process group, or what `prepare` has set up.

    topology, collectives = sources_of(group, topology, collectives)

On NCCL, after `flowcheck.prepare()`, the calls come from the profiler plugin. In the first iterations torch's flight
recorder is held against them, where it has all calls of the group, and NCCL's log when the job is known; what
contradicts is refused, naming both. Which queue pair is which channel no source in this process says, so connections
are still given by hand (docs/use/nccl.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.agreement import flights_agree, log_agrees
from flowcheck.trainer.flight_recorder import Recorder
from flowcheck.trainer.nccl_log import read_log
from flowcheck.trainer.prepare import Prepared, prepared
from flowcheck.trainer.profiler import Call
from flowcheck.trainer.profiler_calls import Calls, as_collective

__all__ = ["Sources", "sources_of"]

Topology = Callable[[], dict[str, Any]]
Collectives = Callable[[int], list[dict[str, Any]]]
HELD = 8  # times that the calls are held against torch's: attach, and the first iterations


def sources_of(
    group: dist.ProcessGroup, topology: Topology | None, collectives: Collectives | None
) -> tuple[Topology, Collectives]:
    """Of one process group. Raises UserError if nobody says one of the two, or if several communicators could be it."""
    topology = topology or getattr(group, "flowcheck_topology", None)
    collectives = collectives or getattr(group, "flowcheck_collectives", None)
    known, backend = prepared(), dist.get_backend(group)
    if known is not None and backend == "nccl" and (topology is None or collectives is None):
        sources = Sources(
            known, ranks=dist.get_world_size(group), rank=dist.get_rank(group), group=group.group_name
        )
        topology, collectives = topology or sources.topology, collectives or sources.collectives
    if topology is not None and collectives is not None:
        return topology, collectives
    raise UserError(
        f"the {backend} backend does not tell torch its connections (addresses, queue pairs) and past calls",
        where="attach",
        remedy="flowcheck.prepare() before init_process_group says the calls of NCCL (docs/use/nccl.md); or give"
               " topology= and collectives=",
    )


class Sources:
    """Of one NCCL communicator: that of `ranks` ranks in which this process is `rank`. group: torch's name of its
    process group. Raises UserError if prepare() has set up no plugin, or if several communicators could be meant."""

    def __init__(self, prepared: Prepared, *, ranks: int, rank: int, group: str) -> None:
        if prepared.history is None:
            raise UserError("NCCL's calls are not seen: " + ("; ".join(prepared.problems) or "without a plugin"),
                            where="attach", remedy="give collectives=, or correct what prepare() said")
        self._prepared, self._group = prepared, group
        self._ranks, self._rank = ranks, rank
        self._ours: Calls = prepared.history.communicator(ranks=ranks, rank=rank)
        self._calls: list[Call] = []  # all since the birth, while they are held against torch's
        self._held = 0
        try:
            self._recorder: Recorder | None = Recorder()
        except EnvironmentProblem:
            self._recorder = None

    def collectives(self, since: int) -> list[dict[str, Any]]:
        """For `attach`. Raises UserError for a call that no manifest can have, and where torch's list contradicts."""
        if self._recorder is None or self._held >= HELD:
            self._calls = []
            return self._ours.collectives(since)
        self._held += 1
        self._calls += self._ours.calls(len(self._calls))
        flights = self._recorder.read()
        if self._group in flights.groups and not flights.entries[0].record:  # it records, and has let nothing go
            flights_agree(flights.group(self._group), self._calls)
        return [as_collective(call) for call in self._calls[since:]]

    def topology(self) -> NoReturn:
        """For `attach`, when the job is known. Raises UserError: a contradiction of the log's, or what is missing."""
        if self._prepared.log:
            log = read_log(self._prepared.log)
            hashed = self._ours.of.hash if self._ours.of.interface > 3 else None
            log_agrees(log, log.communicator(ranks=self._ranks, rank=self._rank, hash=hashed), self._ours)
        raise UserError(
            "the calls are known, and the connections are not: which queue pair is which channel no source here says",
            where="attach", remedy="topology= (docs/use/nccl.md)",
        )
