"""Do two sources say the same of one communicator: NCCL's log, the profiler plugin, torch's flight recorder.

    log_agrees(log, logged, ours)           NCCL's log and the plugin
    flights_agree(flights, calls)           torch's flight recorder and the plugin
    could_be(flights, calls)                the same as a question, to tell communicators apart

The first two raise UserError, which names both sources and the first thing in which they differ. Nobody guesses which
is right.
torch is not needed; the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from flowcheck.errors import UserError
from flowcheck.trainer.nccl.flight_recorder import Flight
from flowcheck.trainer.nccl.log import Log, LoggedCommunicator
from flowcheck.trainer.nccl.profiler import Call
from flowcheck.trainer.nccl.profiler_calls import Calls, compare, same_as

__all__ = ["could_be", "flights_agree", "log_agrees"]

# The oldest and newest 2.x that take this interface of a plugin that has all of them (docs/use/nccl.md).
MINORS = {1: (23, 23), 2: (24, 25), 3: (26, 26), 4: (27, 27), 5: (28, 28), 6: (29, 1 << 30)}


def log_agrees(log: Log, logged: LoggedCommunicator, ours: Calls) -> None:
    """Raises UserError, naming both, if the log and the profiler plugin contradict each other about a communicator:
    rank, ranks, nodes, hash, version, or a call on channels or with peers that the log does not have."""
    of, where = ours.of, f"{log.where} and the profiler plugin"

    def same(what: str, says: object, plugin: object, said: bool = True) -> None:
        if said and says != plugin:
            _contradict(f"the log says {what} {says}, and the plugin {plugin}", where)

    told = of.interface > 3
    same("rank", logged.rank, of.rank, told)
    same("ranks", logged.ranks, of.ranks, told)
    same("nodes", logged.nodes, of.nodes, told and logged.nodes > 0)
    same("commId", f"{logged.hash:#x}", f"{of.hash:#x}", told and logged.hash > 0)  # the same number from 2.26 on
    if log.version:
        minor = int(log.version.split(".")[1])
        first, last = MINORS[of.interface]
        if not first <= minor <= last:
            _contradict(f"the log says NCCL {log.version}, and the plugin was loaded by its interface {of.interface}",
                        where)
    for call in ours.kept:
        same("rank", logged.rank, call.rank)
        if logged.channels and call.channels > logged.channels:
            _contradict(f"the log says {logged.channels} channels, and call {call.serial} went by {call.channels}",
                        where)
        for operation in ours.operations(call) if call.collective else ():
            peers = _peers(logged, operation.channel)
            if peers is not None and operation.peer not in peers:
                _contradict(f"the log has no connection with rank {operation.peer} on channel {operation.channel},"
                            f" and call {call.serial} used one", where)


def _peers(logged: LoggedCommunicator, channel: int) -> set[int] | None:
    """Ranks next to this one on a channel, in ring and tree; None where the log does not have both."""
    if channel not in logged.rings or channel not in logged.trees:
        return None
    tree = logged.trees[channel]
    return {*logged.rings[channel], tree.up, *tree.down} - {-1}


def _contradict(what: str, where: str) -> NoReturn:
    raise UserError(what, where=where, remedy="the log and the plugin of this very process, from its start")


def flights_agree(flights: Sequence[Flight], calls: Sequence[Call]) -> None:
    """Raises UserError, naming both, if torch's flight recorder and the plugin have different calls of one
    communicator: function, bytes or type, or their number. Both from the communicator's birth on."""
    own = [{"root": call.root, **flight.collective()} for flight, call in zip(flights, calls, strict=False)]
    own += [flight.collective() for flight in flights[len(calls):]]
    compare(own, calls, "torch's flight recorder and NCCL's profiler events")


def could_be(flights: Sequence[Flight], calls: Sequence[Call]) -> bool:
    """May these be the calls of one communicator? Both from its birth on."""
    return same_as([_collective(flight) for flight in flights], calls)


def _collective(flight: Flight) -> dict[str, Any] | None:
    try:
        return flight.collective()
    except UserError:
        return None  # of several tensors, or one that no manifest can have
