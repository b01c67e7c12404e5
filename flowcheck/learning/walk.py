"""Holding the wire model against observed messages: one hypothesis, many calls, every message checked.

    Walk(topology, wires, ...).take(call)     raises Mismatch, or moves every wire behind the call

A hypothesis is a topology (version, ranks, rings, channels); a call is an operation with its size. `take` plans
the call and compares message by message: start PSN, size, and the LL or LL128 flag where there is one. Messages
that fell into a gap of the capture are stepped over, never invented; a message that the plan does not have, or
of another size, is a Mismatch. An AllReduce may go round the ring or through the tree: the algorithms that a walk
allows are tried in their order, and a call stays with the one that its first messages fit. Pure; one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from parser.lane import messages

from flowcheck.job.model import Collective, dtype_size
from flowcheck.learning.connections import Connection
from flowcheck.learning.position import Misfit, Mismatch, Position
from flowcheck.learning.traffic import Message, Queue, head_flags
from parser.trees import tree_of, tree_parent
from parser.wire import CallPlan, Lane, Protocol, Topology, WireError, edge_lane, plan_call

__all__ = ["Budget", "Mismatch", "Reader", "Seen", "Spent", "Walk", "Wire", "decode", "tree_number"]

#: What fetches wire bytes: (QP, first PSN, end PSN) of each -> bytes, None where packets are missing.
Reader = Callable[[list[tuple[Queue, int, int]]], list[bytes | None]]

AR_THRESHOLD = 8192
CTS_PROTOCOL = {65536: Protocol.LL, 614400: Protocol.LL128, 1048576: Protocol.SIMPLE, 524288: Protocol.SIMPLE}


class Spent(Exception):
    """The search has used up its budget."""


@dataclass
class Budget:
    """What a search may cost, in calls held against the traffic; shared by all its walks."""

    limit: int
    used: int = 0

    def spend(self, calls: int) -> None:
        self.used += calls
        if self.used > self.limit:
            raise Spent


@dataclass(frozen=True)
class Wire:
    """A connection with its meaning: data of rank src to rank dst on a channel."""

    channel: int
    src: int
    dst: int
    connection: Connection


@dataclass(frozen=True)
class Seen:
    """A message of a call as observed: its pieces by QP, and its place in the call's tensor."""

    wire: Wire
    parts: tuple[tuple[Queue, Message], ...]
    first: int
    count: int
    protocol: Protocol
    wire_bytes: int

    @property
    def whole(self) -> bool:
        """Did every piece of it begin in the capture?"""
        return sum(message.size for _, message in self.parts) == self.wire_bytes


def tree_number(channels: int, channel: int) -> int:
    """Tree of a channel. With an odd number of channels it cannot be told (parser.trees): then any, for the sizes are
    those of the other one."""
    return tree_of(channels + (channels > 1 and channels % 2), channel)


def _lane(plan: CallPlan, wire: Wire) -> Lane | None:
    channels = plan.topology.channels
    if plan.algorithm == "tree" and channels > 1 and channels % 2:
        plan = replace(plan, topology=replace(plan.topology, channels=channels + 1))
    return edge_lane(plan, wire.channel, wire.src, wire.dst)


def decode(protocol: Protocol, wire: bytes, nbytes: int) -> bytes:
    """Data bytes of one message (4.1-4.3)."""
    if protocol == Protocol.SIMPLE:
        return wire[:nbytes]
    if protocol == Protocol.LL:
        words = np.frombuffer(wire, "<u4", len(wire) // 16 * 4).reshape(-1, 4)
        return words[:, [0, 2]].tobytes()[:nbytes]
    out = bytearray()
    for slice_at in range(0, len(wire), 2048):
        for half in (0, 1024):
            lines = [wire[slice_at + half + 128 * i : slice_at + half + 128 * i + 128] for i in range(8)]
            data = bytearray(960)
            for i in range(4):
                data[128 * i : 128 * i + 120] = lines[i][:120]
                data[512 + 112 * i : 512 + 112 * i + 112] = lines[4 + i][:112]
                data[128 * i + 120 : 128 * i + 128] = lines[4 + i][112:120]
            out += data
    return bytes(out[:nbytes])


_Planned = list[tuple[int, int, int, bool]]  # of one wire: (first, count, wire bytes, final) of each message
PLANS_MAX = 4096


@dataclass
class Walk:
    """Where a hypothesis has got to. mtu: path MTU. pairs: messages above the threshold leave as AR pairs.
    all_channels: every channel that carries data is taken to be among the wires (nothing else tells their number).
    algorithms: of AllReduce calls, the preferred one first. signature: what was placed where, so far."""

    topology: Topology
    wires: list[Wire]
    mtu: int
    pairs: bool
    position: dict[int, Position] = field(default_factory=dict)
    explained: int = 0
    signature: list[tuple[str, int, int, int, bool]] = field(default_factory=list)
    plans: dict[tuple, tuple[CallPlan, dict[int, _Planned]]] = field(default_factory=dict)
    all_channels: bool = False
    algorithms: tuple[str, ...] = ("ring",)
    budget: Budget = field(default_factory=lambda: Budget(1 << 62))

    def __post_init__(self) -> None:
        if not self.position:
            self.position = {i: Position.start(wire.connection) for i, wire in enumerate(self.wires)}

    def fork(self) -> Walk:
        """A copy that may go another way. Plans are shared: they depend on the topology alone."""
        places = {i: p.copy() for i, p in self.position.items()}
        return replace(self, position=places, signature=list(self.signature))

    @property
    def done(self) -> bool:
        """Every observed message is explained."""
        return all(
            at >= len(q.messages) for w, p in self.places() for at, q in zip(p.at, w.connection.queues, strict=True)
        )

    @cached_property
    def total(self) -> int:
        """Messages observed, of split ones their pieces."""
        return sum(w.connection.total for w in self.wires)

    @cached_property
    def channels(self) -> frozenset[int]:
        """Channels that were observed."""
        return frozenset(w.channel for w in self.wires)

    def places(self) -> list[tuple[Wire, Position]]:
        """Every wire and how far it has come."""
        return list(zip(self.wires, self.position.values(), strict=True))

    def ahead(self, most: int) -> list[tuple[Wire, list[Message]]]:
        """The next messages of every wire, at most `most`, as if none were missing from here on."""
        return [(wire, wire.connection.ahead(place.at, place.number, most)) for wire, place in self.places()]

    def protocol(self) -> Protocol:
        """Of the next call: flags in the payload first, then the size that clear-to-send announced."""
        announced: set[Protocol] = set()
        raw = False
        for (wire, ahead), place in zip(self.ahead(2 * self.topology.ranks), self.position.values(), strict=True):
            for steps, message in enumerate(ahead, 1):
                if not message.size:  # an empty chunk says nothing, the one behind it does
                    continue
                kind, flag = head_flags(message.head, message.size)
                if kind and flag == place.step + steps:
                    return Protocol.LL if kind == "ll" else Protocol.LL128
                raw |= not kind
                break
            sizes = wire.connection.cts_sizes
            announced |= {CTS_PROTOCOL[s] for s in sizes if s in CTS_PROTOCOL}
        if raw or len(announced) != 1:
            return Protocol.SIMPLE
        return announced.pop()

    def take(self, call: Collective) -> list[Seen]:
        """Explain one call on all wires. Returns the messages of it that were observed. Raises Mismatch."""
        if call.op != "AllReduce":
            return self._take(call, "ring")
        choices = (call.algorithm,) if call.algorithm else self.algorithms
        best: Mismatch | None = None
        for algorithm in choices:
            here = self.fork() if len(choices) > 1 else self
            try:
                seen = here._take(call, algorithm)
            except Mismatch as error:
                best = error if best is None or error.progress > best.progress else best
                continue
            self.position, self.explained, self.signature = here.position, here.explained, here.signature
            if any(s.wire_bytes for s in seen):
                call.algorithm = algorithm  # every later turn of this call has to use it too
            return seen
        assert best is not None
        raise best

    def _take(self, call: Collective, algorithm: str) -> list[Seen]:
        self.budget.spend(1)
        protocol = Protocol[call.protocol.upper()] if call.protocol else self.protocol()
        seen: list[Seen] = []
        placed: list[tuple[str, int, int, int, bool]] = []
        taken: dict[tuple[int, int, int], int] = {}
        before = {i: place.short for i, place in self.position.items()}
        sliced = protocol == Protocol.SIMPLE and call.op != "Broadcast" and algorithm == "ring"
        for i, (wire, place) in enumerate(self.places()):
            planned = self._planned(call, protocol, algorithm, i)  # one by one: most hypotheses fail on the first
            came, name = 0, wire.connection.name()
            if planned and sliced:
                place.step = -(-place.step // 4) * 4
            for first, count, wire_bytes, final in planned:
                pair = self.pairs and wire_bytes > AR_THRESHOLD
                slot = self.topology.slot_bytes[protocol]
                try:
                    parts = place.take(wire.connection, wire_bytes, protocol, slot, self.mtu, pair)
                except Misfit as misfit:
                    raise Mismatch(
                        f"channel {wire.channel}, rank {wire.src} -> {wire.dst}, {misfit.where}: {self._called(call)} "
                        f"needs {misfit.needs}, {misfit.seen}", self.explained,
                    ) from None
                self.explained += len(parts)
                if parts:
                    if protocol == Protocol.SIMPLE:
                        self._check_posted(wire, place.number - 1, sliced, call)
                    came += 1
                    seen.append(Seen(wire, parts, first, count, protocol, wire_bytes))
                place.step += 2 if sliced else 1
                placed.append((name, wire.channel, first, count, final))
            taken[wire.channel, wire.src, wire.dst] = came
        self.budget.spend(len(placed) // 256)  # most calls fail on their first message, some are long
        self._check_order(seen, before, call, algorithm, taken, 2 if protocol == Protocol.SIMPLE else 1)
        if algorithm == "tree" and self.topology.ranks > 2 and call.op == "AllReduce":
            self._check_tree(seen, call)
        if seen:  # a call of which nothing was seen places nothing
            self.signature += placed
        if call.protocol is None and any(s.wire_bytes for s in seen):
            call.protocol = protocol.name.lower()
        return seen

    def _check_order(
        self, seen: list[Seen], before: dict[int, int], call: Collective, algorithm: str,
        taken: dict[tuple[int, int, int], int], ahead: int,
    ) -> None:
        """A rank starts a call when it has received all of the call before, and in an AllReduce its message i needs
        the i before it from its neighbour (in a tree of two: the root's needs the leaf's). So what it receives cannot
        end earlier - unless packets are missing, and the end may be too."""
        if any(w.connection.gaps for w in self.wires):
            return
        sending = {s.wire.src for s in seen}
        for i, wire in enumerate(self.wires):
            if before[i] and wire.dst in sending:
                raise Mismatch(
                    f"rank {wire.dst} sends in {self._called(call)} without having received the call before it from "
                    f"rank {wire.src}", self.explained,
                )
        if call.op != "AllReduce" or (algorithm == "tree" and self.topology.ranks > 2):
            return
        rings = [self.topology.ring(channel) for channel in range(self.topology.channels)]
        received = {  # where larger trees are in use there are more connections than the ring's
            (channel, dst): count for (channel, src, dst), count in taken.items()
            if rings[channel][(rings[channel].index(src) + 1) % len(rings[channel])] == dst
        }
        leaves = {(w.channel, w.src) for w in self.wires if algorithm == "tree" and not self._root(w)}
        for (channel, src, _), count in taken.items():
            if (channel, src) not in leaves and count > received.get((channel, src), count) + ahead:
                raise Mismatch(
                    f"rank {src} sends {count} messages of {self._called(call)} and received only "
                    f"{received[channel, src]}", self.explained,
                )

    def _check_tree(self, seen: list[Seen], call: Collective) -> None:
        """What a parent sends down is made of what the child has sent up, so it comes later: that tells which of two
        ranks is the parent, even if both were named wrongly."""
        came: dict[tuple[int, int, int, int], int] = {}
        for s in seen:
            came[s.wire.channel, s.wire.src, s.wire.dst, s.first] = s.parts[0][1].ns
        early: Counter[tuple[int, int, int]] = Counter()
        for (channel, src, dst, first), ns in came.items():
            up = tree_parent(self.topology.ranks, tree_number(self.topology.channels, channel), dst) == src
            if up and (before := came.get((channel, dst, src, first))) is not None:
                early[channel, src, dst] += 1 if ns < before else -1  # a mirror may swap neighbours
        for (channel, src, dst), balance in early.items():
            if balance > 0:
                raise Mismatch(
                    f"channel {channel}: rank {src} sends rank {dst} results of {self._called(call)} before it has "
                    "what they are made of", self.explained,
                )

    def _root(self, wire: Wire) -> bool:
        """Does the sender stand at the root of this channel's tree of two ranks?"""
        return tree_parent(2, tree_number(self.topology.channels, wire.channel), wire.src) is None

    def _planned(self, call: Collective, protocol: Protocol, algorithm: str, number: int) -> _Planned:
        """The call's messages on one wire."""
        key = (call.op, call.count, call.dtype, call.root, protocol, algorithm)
        if key not in self.plans:
            try:
                plan = plan_call(
                    self.topology, call.op, protocol, call.count, dtype_size(call.dtype), root=call.root,
                    algorithm=algorithm,
                )
            except WireError as error:
                raise Mismatch(str(error), self.explained) from None
            idle = [c for c, s in enumerate(plan.segments) if s and c not in self.channels]
            if self.all_channels and idle:
                raise Mismatch(f"{self._called(call)} would use channel {idle[0]}, not in the captures", self.explained)
            if len(self.plans) >= PLANS_MAX:
                self.plans.clear()
            self.plans[key] = plan, {}
        plan, lanes = self.plans[key]
        if number not in lanes:
            lane = _lane(plan, self.wires[number])
            if lane is not None and lane.messages > 4 * self.total + 65536:
                raise Mismatch(f"{self._called(call)} would take more messages than were captured", self.explained)
            lanes[number] = [] if lane is None else [(f, c, b, final) for f, c, b, final, _ in messages(lane)]
        return lanes[number]

    def _check_posted(self, wire: Wire, number: int, sliced: bool, call: Collective) -> None:
        """The receiver announces room for a slice of two steps (ring) or for one step (tree, Broadcast; 4.4)."""
        posted = wire.connection.posted.get(number)
        room = self.topology.slot_bytes[Protocol.SIMPLE] * (2 if sliced else 1)
        if posted is not None and posted != room and posted in (room // 2, 2 * room):
            raise Mismatch(
                f"channel {wire.channel}, rank {wire.src} -> {wire.dst}: {self._called(call)} has {room} bytes of room "
                f"a message, the receiver announced {posted}", self.explained,
            )

    @staticmethod
    def _called(call: Collective) -> str:
        return f"{call.op} of {call.count} {call.dtype}"
