"""An NCCL communicator's calls from what the profiler plugin saw, in the manifest's form, and whether they agree.

    history = History(Plugin())
    ours = history.communicator(ranks=8, rank=3)        refused by name where more than one could be meant
    flowcheck.attach(..., collectives=ours.collectives, topology=...)
    ours.iteration(); ours.steady()                     what each iteration calls, once it repeats
    compare(own, ours.calls())                          what somebody else says of the same calls
    with_choices(own, ours.calls())                     and what the tuner chose for them
    history.quiet()                                     NCCL makes no more events

Raises UserError where the calls contradict, or are such that no manifest can have them: what nobody can say for certain
is not used. Records that were dropped end a history for good: nobody knows what they were.

torch is not needed; the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowcheck.errors import UserError
from flowcheck.job.model import DTYPE_BYTES, OPERATIONS
from flowcheck.trainer.nccl.profiler import Call, Communicator, Finalized, Plugin, ProxyOperation, Record

__all__ = ["Calls", "History", "as_collective", "compare", "same_as", "with_choices"]

KEPT = 65536  # calls of a communicator; where nobody takes them the older half is let go
_TYPES = {
    "ncclInt8": "int8", "ncclUint8": "uint8", "ncclInt32": "int32", "ncclUint32": "uint32", "ncclInt64": "int64",
    "ncclUint64": "uint64", "ncclFloat16": "float16", "ncclBfloat16": "bfloat16", "ncclFloat32": "float32",
    "ncclFloat64": "float64",
}
_ALGORITHMS = {"RING": "ring", "TREE": "tree"}
_PROTOCOLS = {"LL": "ll", "LL128": "ll128", "SIMPLE": "simple"}
_IN_BYTES = ("AllGather", "Broadcast")  # what NCCL has turned into bytes when it says them
_ROOTED = ("Broadcast", "Reduce")


def as_collective(call: Call) -> dict[str, Any]:
    """The call in the manifest's form, with algorithm, protocol and channels. Raises UserError if it has none."""
    where = f"NCCL's call {call.serial}"
    if call.function not in OPERATIONS or not call.collective:
        raise UserError(f"is {_name(call)}, which a manifest cannot have", where=where,
                        remedy="give DDP a process group of its own")
    if call.type not in _TYPES:
        raise UserError(f"reduces {call.type}", where=where, remedy=f"one of {', '.join(DTYPE_BYTES)}")
    if call.algorithm not in _ALGORITHMS or call.protocol not in _PROTOCOLS:
        raise UserError(f"goes by {call.algorithm} and {call.protocol}, which is not followed", where=where,
                        remedy="NCCL_ALGO=Ring or Tree; NCCL_PROTO=LL, LL128 or Simple")
    if call.channels < 1:
        raise UserError("goes by no channel", where=where, remedy="report it with NCCL's version")
    return {
        "op": call.function, "count": call.count, "dtype": _TYPES[call.type],
        "root": call.root if call.function in _ROOTED else 0, "algorithm": _ALGORITHMS[call.algorithm],
        "protocol": _PROTOCOLS[call.protocol], "channels": call.channels,
    }


def _name(call: Call) -> str:
    kind = call.type.removeprefix("nccl").lower()
    if not call.collective:
        return f"{call.function} of {call.count} {kind} with rank {call.root}"
    root = f" from {call.root}" if call.function in _ROOTED else ""
    by = f"{call.algorithm}, {call.protocol}, {call.channels} channels"
    return f"{call.function} of {call.count} {kind}{root} by {by}"


def compare(own: Sequence[Mapping[str, Any]], seen: Sequence[Call], where: str = "NCCL's profiler events") -> None:
    """own: what somebody says that the communicator was asked for, in the manifest's form; seen: what NCCL did.

    Raises UserError naming the first call at which they contradict: function, bytes, type, root, and what `own` says of
    algorithm, protocol and channels. AllGather and Broadcast are compared in bytes, as NCCL has them.
    """
    for number, (said, call) in enumerate(zip(own, seen, strict=False)):
        found = as_collective(call)
        if odd := [key for key in found if not _agree(said, found, key)]:
            what = f"NCCL's call {number} is {_name(call)}, and not {dict(said)}: {', '.join(odd)}"
            raise _contradiction(what, where)
    if len(own) != len(seen):
        raise _contradiction(f"NCCL made {len(seen)} calls, and not {len(own)}", where)


def _agree(said: Mapping[str, Any], found: Mapping[str, Any], key: str) -> bool:
    if key in ("algorithm", "protocol", "channels"):
        return said.get(key) is None or said[key] == found[key]
    if key == "root" and found["op"] not in _ROOTED:
        return True
    if found["op"] in _IN_BYTES and key in ("count", "dtype"):
        return _bytes(said) == _bytes(found)
    return bool(said.get(key, "float32" if key == "dtype" else 0) == found[key])


def same_as(own: Sequence[Mapping[str, Any] | None], seen: Sequence[Call]) -> bool:
    """Could these be the same calls: as many, of the same functions, with as many bytes? None: it is not said what one
    is. Whether a manifest can have them does not matter here, nor what NCCL chose."""
    def alike(said: Mapping[str, Any] | None, call: Call) -> bool:
        if said is None:
            return True
        known = call.type in _TYPES
        return said["op"] == call.function and (not known or _bytes(said) == _bytes(
            {"count": call.count, "dtype": _TYPES[call.type]}))

    return len(own) == len(seen) and all(map(alike, own, seen))


def _bytes(call: Mapping[str, Any]) -> int:
    return int(call["count"] * DTYPE_BYTES[call.get("dtype", "float32")])


def _contradiction(what: str, where: str) -> UserError:
    return UserError(what, where=where, remedy="give DDP a process group of its own, and look at no other's calls")


def with_choices(own: Sequence[Mapping[str, Any]], seen: Sequence[Call]) -> list[dict[str, Any]]:
    """`own`, each with the algorithm, protocol and channels that NCCL chose for it. Raises UserError as `compare`."""
    compare(own, seen)
    return [
        {**said, **{key: as_collective(call)[key] for key in ("algorithm", "protocol", "channels")}}
        for said, call in zip(own, seen, strict=True)
    ]


class Calls:
    """The calls of one communicator since its birth, in the order in which NCCL launched them."""

    def __init__(self, history: History, communicator: Communicator) -> None:
        self.of = communicator
        self._history = history
        self._calls: list[Call] = []
        self._operations: dict[int, list[ProxyOperation]] = {}
        self._gone = 0  # calls that are no longer kept
        self._iterations: list[tuple[dict[str, Any], ...]] = []  # the last two
        self._marked = 0  # calls before the iteration under way
        self.ended = False

    def __str__(self) -> str:
        of, kept = self.of, self._calls
        hashed, rank = (kept[0].hash, kept[0].rank) if of.interface <= 3 and kept else (of.hash, of.rank)
        size = "" if of.ranks < 0 else f" of {of.ranks}"
        return f"{hashed:#x} rank {rank}{size}{f' ({of.name})' if of.name else ''}"

    @property
    def whole(self) -> bool:
        """Are all of its calls kept?"""
        return not self._gone

    @property
    def kept(self) -> Sequence[Call]:
        """Of what was taken by now, and not let go."""
        return self._calls

    def add(self, record: Call | ProxyOperation) -> None:
        """For History: a record of this communicator."""
        if isinstance(record, ProxyOperation):
            if record.call in self._operations:  # another process's, or of a call that is gone: of no use
                self._operations[record.call].append(record)
            return
        self._calls.append(record)
        self._operations[record.serial] = []
        if len(self._calls) > KEPT:
            self._let_go(KEPT // 2)

    def _let_go(self, number: int) -> None:
        for call in self._calls[:number]:
            del self._operations[call.serial]
        del self._calls[:number]
        self._gone += number

    def calls(self, since: int = 0) -> list[Call]:
        """All calls but the first `since`. Raises UserError if some of those are no longer kept."""
        self._history.update()
        if since < self._gone:
            raise UserError(f"calls before number {self._gone} are no longer kept", where="NCCL's profiler events",
                            remedy="ask for them at least once an iteration, from the start")
        return self._calls[since - self._gone:]

    def collectives(self, since: int) -> list[dict[str, Any]]:
        """What `attach(collectives=...)` asks for: the calls without the first `since`, in the manifest's form.
        Those are let go: who asks for calls from a number on has the ones before it. Raises UserError for a call that
        no manifest can have."""
        found = [as_collective(call) for call in self.calls(since)]
        self._let_go(min(since - self._gone, len(self._calls)))
        return found

    def operations(self, call: Call) -> list[ProxyOperation]:
        """What this process's proxy sent and received for the call, by channel; as far as it has begun."""
        self._history.update()
        return sorted(self._operations.get(call.serial, ()), key=lambda one: (one.channel, one.sends, one.serial))

    def iteration(self) -> list[dict[str, Any]]:
        """Call at each boundary of iterations: what the one that has just ended called. Raises UserError if that is not
        known whole any more, or has a call that no manifest can have."""
        found = [as_collective(call) for call in self.calls(self._marked)]
        self._marked = self._gone + len(self._calls)
        self._iterations = [*self._iterations[-1:], tuple(found)]
        return found

    def steady(self) -> list[dict[str, Any]] | None:
        """What the last two iterations both called, choices included; None as long as they differ or called nothing."""
        last = self._iterations
        return list(last[1]) if len(last) == 2 and last[0] == last[1] and last[1] else None


class History:
    """All communicators of this process, from one plugin."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._all: dict[int, Calls] = {}

    def update(self) -> None:
        """Take what NCCL has done by now. Raises UserError once an event was dropped."""
        for record in self._plugin.read():
            self._take(record)
        if dropped := self._plugin.counts().dropped:
            raise UserError(f"{dropped} events were dropped: the ring was full", where="NCCL's profiler events",
                            remedy="attach before training begins, and call step() each iteration")

    def _take(self, record: Record) -> None:
        if isinstance(record, Communicator):
            self._all[record.number] = Calls(self, record)
        elif record.number in self._all:
            if isinstance(record, Finalized):
                self._all[record.number].ended = True
            else:
                self._all[record.number].add(record)

    def communicators(self) -> list[Calls]:
        """Those that there are now, the oldest first."""
        self.update()
        return [calls for _, calls in sorted(self._all.items()) if not calls.ended]

    def candidates(
        self, *, ranks: int, rank: int, hash: int | None = None, name: str | None = None
    ) -> list[Calls]:
        """Those that there are now and that could be it, as `communicator` says."""
        return [calls for calls in self.communicators() if _could_be(calls, ranks, rank, hash, name)]

    def communicator(self, *, ranks: int, rank: int, hash: int | None = None, name: str | None = None) -> Calls:
        """The one communicator of so many ranks in which this process is `rank`; of this hash or name, if given.

        Interfaces 1 to 3 (NCCL 2.23 to 2.26) say a communicator's hash and rank with its calls only, and never how
        many ranks there are: one without calls could be any, and has no hash yet. Raises UserError if none or more
        than one is left.
        """
        left = self.candidates(ranks=ranks, rank=rank, hash=hash, name=name)
        if len(left) == 1:
            return left[0]
        listed = "; ".join(map(str, left or self.communicators())) or "none at all"
        found = f"{len(left)} communicators" if left else "no communicator"
        asked = f"rank {rank} of {ranks}" + (f", hash {hash:#x}" if hash is not None else "") + (
            f", name {name!r}" if name is not None else "")
        raise UserError(f"{found} could be {asked}; there are: {listed}", where="NCCL's profiler events",
                        remedy="hash= or name= of the one that DDP uses; one that exists already, and has been used")

    def quiet(self) -> None:
        """NCCL makes no more events: what repeats each iteration is known."""
        self._plugin.record(False)


def _could_be(calls: Calls, ranks: int, rank: int, hash: int | None, name: str | None) -> bool:
    of, kept = calls.of, calls.kept
    if of.interface > 3:
        return (of.ranks, of.rank) == (ranks, rank) and hash in (None, of.hash) and name in (None, of.name)
    if not kept:
        return name is None and hash is None
    return name is None and kept[0].rank == rank and hash in (None, kept[0].hash)
