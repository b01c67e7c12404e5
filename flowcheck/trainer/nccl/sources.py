"""Who says what a communicator is and was asked for: the caller, its process group, or what `prepare` has set up.

    topology, collectives = sources_of(group, topology, collectives)

On NCCL, after `flowcheck.prepare()`, the calls come from the profiler plugin. Which of this process's communicators is
the group's: the only one of its ranks, where torch has no other group like it. Else NCCL's log says it, of the pointer
that torch names (2.9 and later), or torch's flight recorder, of the calls that no other communicator has had. NCCL
makes a communicator with its group's first call, so that may be known after the first iteration only.

In the first iterations the flight recorder is held against the calls, where it has all of the group's, and NCCL's log
when the job is known; what contradicts is refused, naming both. Connections come from the log and the kernel's list of
queue pairs. Which of them is which channel no source in this process says: the node finds that on the wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flowcheck.errors import EnvironmentProblem, UserError
from flowcheck.trainer.nccl.agreement import could_be, flights_agree, log_agrees
from flowcheck.trainer.nccl.connections import describe
from flowcheck.trainer.nccl.flight_recorder import Flight, Recorder
from flowcheck.trainer.nccl.log import Log, read_log
from flowcheck.trainer.nccl.prepare import Prepared, prepared
from flowcheck.trainer.nccl.profiler import Call
from flowcheck.trainer.nccl.profiler_calls import Calls, as_collective
from flowcheck.trainer.nccl.rdma import addresses, queue_pairs

__all__ = ["Sources", "others_like", "pointer_of", "sources_of"]

Topology = Callable[[], dict[str, Any]]
Collectives = Callable[[int], list[dict[str, Any]]]
HELD = 8  # times that the calls are held against torch's: attach, and the first iterations
PATIENCE = 2  # times that the communicator may be unknown yet: attach, and the first iteration


def sources_of(
    group: dist.ProcessGroup, topology: Topology | None, collectives: Collectives | None
) -> tuple[Topology, Collectives]:
    """Of one process group. Raises UserError if nobody says one of the two."""
    topology = topology or getattr(group, "flowcheck_topology", None)
    collectives = collectives or getattr(group, "flowcheck_collectives", None)
    known, backend = prepared(), dist.get_backend(group)
    if known is not None and backend == "nccl" and (topology is None or collectives is None):
        sources = Sources(
            known, ranks=dist.get_world_size(group), rank=dist.get_rank(group), group=group.group_name,
            pointer=lambda: pointer_of(group), others=lambda: others_like(group),
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


def pointer_of(group: dist.ProcessGroup) -> int:
    """NCCL's communicator of the group, as NCCL's log names it; 0: none exists yet on this thread's device, or this
    torch does not say (before 2.9)."""
    try:
        return int(group._get_backend(torch.device("cuda"))._comm_ptr())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return 0


def others_like(group: dist.ProcessGroup) -> int:
    """Other groups of this process on NCCL that have as many ranks, and this process in the same place."""
    def shape(one: dist.ProcessGroup) -> tuple[str, int, int]:
        return dist.get_backend(one), dist.get_world_size(one), dist.get_rank(one)

    known = dist.distributed_c10d._world.pg_map
    return sum(1 for one in known if one is not group and shape(one) == shape(group))


def _version() -> str:
    """NCCL's, of this torch; "": it has none."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    except (AttributeError, RuntimeError):
        return ""


class Sources:
    """Of one NCCL communicator: that of `ranks` ranks in which this process is `rank`. group: torch's name of its
    process group. pointer, others: of that, as above. Raises UserError if prepare() has set up no plugin."""

    def __init__(
        self, prepared: Prepared, *, ranks: int, rank: int, group: str, pointer: Callable[[], int] = lambda: 0,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        if prepared.history is None:
            raise UserError("NCCL's calls are not seen: " + ("; ".join(prepared.problems) or "without a plugin"),
                            where="attach", remedy="give collectives=, or correct what prepare() said")
        self._prepared, self._history, self._group = prepared, prepared.history, group
        self._ranks, self._rank = ranks, rank
        self._pointer, self._others = pointer, others
        self._ours: Calls | None = None
        self._asked = 0  # times that it was not known
        self._calls: list[Call] = []  # all since the birth, while they are held against torch's
        self._held = 0
        try:
            self._recorder: Recorder | None = Recorder()
        except EnvironmentProblem:
            self._recorder = None

    def collectives(self, since: int) -> list[dict[str, Any]]:
        """For `attach`. [] while it is not known which communicator it is. Raises UserError for a call that no manifest
        can have, where torch's list contradicts, and where the communicator stays unknown."""
        ours = self._ours or self._find()
        if ours is None:
            return []
        if self._recorder is None or self._held >= HELD:
            self._calls = []
            return ours.collectives(since)
        self._held += 1
        self._calls += ours.calls(len(self._calls))
        flights = self._flights()
        if flights is not None:
            flights_agree(flights, self._calls)
        return [as_collective(call) for call in self._calls[since:]]

    def topology(self) -> dict[str, Any]:
        """For `attach`, when the job is known: all but the channels. Raises UserError: a contradiction of the log's, or
        what is missing."""
        log, ours = self._log(), self._ours or self._find()
        if log is None or ours is None:
            why = "NCCL's log is not read: " + ("; ".join(self._prepared.problems) or "prepare() has set none")
            raise UserError(f"the calls are known, and the connections are not; {why}", where="attach",
                            remedy="topology= (docs/use/nccl.md)")
        hashed = ours.of.hash if ours.of.interface > 3 else None  # before, the log's may be another number
        logged = log.communicator(ranks=self._ranks, rank=self._rank, hash=hashed)
        log_agrees(log, logged, ours)
        try:
            kernel, gids = queue_pairs(os.getpid()), addresses()
        except EnvironmentProblem as error:
            raise UserError(f"the kernel's queue pairs are not known: {error.what}", where=error.where,
                            remedy=f"{error.remedy}; or topology= (docs/use/nccl.md)") from None
        return describe(log, logged, kernel, gids, _version())

    def _log(self) -> Log | None:
        return read_log(self._prepared.log) if self._prepared.log else None

    def _flights(self) -> list[Flight] | None:
        """The group's calls as torch has them; None: it does not record, or has let some go, or there were none."""
        if self._recorder is None:
            return None
        flights = self._recorder.read()
        if self._group not in flights.groups or flights.entries[0].record:
            return None
        return flights.group(self._group)

    def _find(self) -> Calls | None:
        """The communicator, if it is known by now. Raises UserError if it should be."""
        could = self._history.candidates(ranks=self._ranks, rank=self._rank)
        named = self._named(could)
        if named is None and len(could) == 1 and not self._others():
            named = could
        elif named is None and (flights := self._flights()) is not None:
            named = [one for one in could if one.whole and could_be(flights, one.calls())]
        if named is not None and len(named) == 1:
            self._ours = named[0]
            return self._ours
        self._asked += 1
        if self._asked > PATIENCE:
            self._refuse(could, named)
        return None

    def _named(self, could: list[Calls]) -> list[Calls] | None:
        """By the pointer that torch and the log have, and the hash that the log and the plugin have. None: one of them
        does not say it (a communicator that was split off has no hash in the log)."""
        pointer, log = self._pointer(), self._log()
        if not pointer or log is None:
            return None
        logged = [one for one in log.communicators if int(one.pointer, 16) == pointer and not one.ended]
        if not logged or not logged[-1].hash:
            return None
        one = logged[-1]
        if (one.ranks, one.rank) != (self._ranks, self._rank):
            raise UserError(
                f"torch's process group {self._group!r} has rank {self._rank} of {self._ranks}, and its communicator"
                f" {one.pointer} rank {one.rank} of {one.ranks}", where=log.where,
                remedy="NCCL_DEBUG_FILE of this process alone, a new one for each start",
            )
        told = [calls for calls in could if calls.of.interface > 3]
        return [calls for calls in told if calls.of.hash == one.hash] if told else None

    def _refuse(self, could: list[Calls], named: list[Calls] | None) -> NoReturn:
        listed = "; ".join(map(str, could)) or "none at all"
        if named is not None and not named:
            why = "no communicator has had the calls that torch has recorded of it, or the hash that NCCL's log says"
            remedy = "report it, with NCCL's log and torch's version; or give collectives="
        elif named is not None:
            why = "several communicators have had the same calls"
            remedy = "torch 2.9, which names a group's communicator, and NCCL's log (NCCL_DEBUG=INFO with INIT)"
        else:
            why = "nothing says which communicator it is"
            remedy = "TORCH_FR_BUFFER_SIZE, large enough for all calls since the start; or torch 2.9 and NCCL's log"
        raise UserError(
            f"process group {self._group!r}, rank {self._rank} of {self._ranks}: {why}; there are: {listed}",
            where="NCCL's profiler events", remedy=remedy,
        )
