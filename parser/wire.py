"""NCCL's wire model: what each directed edge sends for one collective call. Pure functions.

    plan_call(topology, call)          -> CallPlan     channels, threads, chunk layout
    edge_lane(plan, channel, src, dst) -> Lane | None  what src sends to dst on a channel

A Lane is a closed form, not a list: loops of equal chunks described by at most two Segments (all loops
but the last, and the last). `parser.lane` turns (lane, message index) into size, element range, step
and contents state; memory never grows with the number of messages.

Chunk layouts are in chunk_layout.py, trees in trees.py, what differs between NCCL's versions in nccl.py.
Sources: reference nccl-wire.md, section numbers in the comments; NCCL files are named there. What is
proven by what: docs/understand/wire.md. Units: elements of the call's dtype unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from parser.chunk_layout import Protocol, Segment, Topology, UnsupportedCall, segments, threads_and_channels
from parser.trees import tree_of, tree_parent

__all__ = ["CallPlan", "Kind", "Lane", "edge_lane", "plan_call"]


class Kind(IntEnum):
    """What an edge carries in a call. The values are shared with parser/include/lane.h."""

    RING_ALLREDUCE = 0
    RING_ALLGATHER = 1
    RING_REDUCESCATTER = 2
    RING_BROADCAST = 3
    TREE_UP = 4
    TREE_DOWN = 5


@dataclass(frozen=True)
class CallPlan:
    """One call as planned by NCCL's host code: who uses which part of the tensor."""

    op: str
    protocol: Protocol
    algorithm: str
    elem_bytes: int
    count: int
    root: int
    channels: int
    threads: int
    topology: Topology
    segments: tuple[tuple[Segment, ...], ...] = field(repr=False)  # by channel; () = channel unused


@dataclass(frozen=True)
class Lane:
    """What one edge sends for one call, in order.

    index: ring index of the sender (rings), unused for trees. slices: messages per chunk. step_inc:
    steps a message consumes; step_align: the connection's step is rounded up to a multiple of it at the
    start of the call. slot_bytes: wire bytes between two steps' slots. slice_floor: smallest first
    slice, elements (2.7). block: elements of one rank's AllGather block. order: ranks in ring order.
    """

    kind: Kind
    protocol: Protocol
    elem_bytes: int
    ranks: int
    index: int
    slices: int
    step_inc: int
    step_align: int
    slot_bytes: int
    slice_floor: int
    block: int
    order: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def sends_per_loop(self) -> int:
        if self.kind == Kind.RING_ALLREDUCE:
            return 2 * (self.ranks - 1)
        if self.kind in (Kind.RING_ALLGATHER, Kind.RING_REDUCESCATTER):
            return self.ranks - 1
        return 1

    @property
    def messages(self) -> int:
        return sum(s.loops for s in self.segments) * self.sends_per_loop * self.slices


# -- planning ---------------------------------------------------------------------------------------


def plan_call(
    topology: Topology,
    op: str,
    protocol: Protocol,
    count: int,
    elem_bytes: int,
    *,
    algorithm: str = "ring",
    root: int = 0,
    channels: int | None = None,
) -> CallPlan:
    """Plan one ungrouped call. count in elements of elem_bytes (AllGather, ReduceScatter: per rank).

    `channels`: plan as if the communicator had this many (3.1 may use fewer). Broadcast and AllGather move bytes:
    NCCL turns their type into int8, and so does this function (the plan's elem_bytes is then 1).
    Raises UnsupportedCall where the layout is not known.
    """
    if algorithm == "tree" and op != "AllReduce":
        raise UnsupportedCall(f"{op} never uses a tree")
    if op in ("Broadcast", "AllGather"):
        count, elem_bytes = count * elem_bytes, 1
    ranks = topology.ranks if op in ("AllGather", "ReduceScatter") else 1
    seen = topology if channels is None else replace(topology, channels=channels)
    used, threads = threads_and_channels(seen, algorithm, protocol, count * elem_bytes * ranks)
    parts = segments(seen, op, algorithm, protocol, count, elem_bytes, used, threads)
    parts += ((),) * (topology.channels - seen.channels)
    return CallPlan(op, protocol, algorithm, elem_bytes, count, root, used, threads, topology, parts)


# -- lanes ------------------------------------------------------------------------------------------


def edge_lane(plan: CallPlan, channel: int, src: int, dst: int) -> Lane | None:
    """What rank src sends to rank dst on `channel` during the call; None if nothing."""
    parts = plan.segments[channel]
    if not parts:
        return None
    topology = plan.topology
    order = topology.ring(channel)
    index = order.index(src)
    kind: Kind
    if plan.algorithm == "tree":
        tree = tree_of(topology.channels, channel)
        if tree_parent(topology.ranks, tree, src) == dst:
            kind = Kind.TREE_UP
        elif tree_parent(topology.ranks, tree, dst) == src:
            kind = Kind.TREE_DOWN
        else:
            return None
    elif order[(index + 1) % len(order)] != dst:
        return None
    elif plan.op == "Broadcast":
        if dst == plan.root:  # the rank before the root in the ring does not send (8.4)
            return None
        kind = Kind.RING_BROADCAST
    else:
        kind = {
            "AllReduce": Kind.RING_ALLREDUCE,
            "AllGather": Kind.RING_ALLGATHER,
            "ReduceScatter": Kind.RING_REDUCESCATTER,
        }[plan.op]
    sliced = plan.protocol == Protocol.SIMPLE and kind <= Kind.RING_REDUCESCATTER
    slot = topology.slot_bytes[plan.protocol]
    return Lane(
        kind=kind,
        protocol=plan.protocol,
        elem_bytes=plan.elem_bytes,
        ranks=topology.ranks,
        index=index,
        slices=2 if sliced else 1,
        step_inc=2 if sliced else 1,
        step_align=4 if sliced else 1,
        slot_bytes=slot,
        slice_floor=2 * slot // plan.elem_bytes // 32,
        block=plan.count,
        order=order,
        segments=parts,
    )
