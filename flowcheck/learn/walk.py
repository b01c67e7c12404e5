"""Holding the wire model against observed messages: one hypothesis, many calls, every message checked.

    Walk(topology, wires, ...).take(call)     raises Mismatch, or moves every wire behind the call

A hypothesis is a topology (version, ranks, rings, channels); a call is an operation with its size. `take` plans
the call and compares message by message: start PSN, size, and the LL or LL128 flag where there is one. Messages
that fell into a gap of the capture are stepped over, never invented; a message that the plan does not have, or
of another size, is a Mismatch. An AllReduce may go round the ring or through the tree: the algorithms that a walk
allows are tried in their order, and a call stays with the one that its first messages fit. Pure; one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from parser.lane import messages

from flowcheck.learn.traffic import Connection, Message, head_flags
from flowcheck.manifest import Collective, dtype_size
from parser.trees import tree_of, tree_parent
from parser.wire import CallPlan, Lane, Protocol, Topology, WireError, edge_lane, plan_call

__all__ = ["Budget", "Mismatch", "Reader", "Seen", "Spent", "Walk", "Wire", "decode", "tree_number"]

#: What fetches wire bytes: (connection, first PSN, end PSN) of each -> bytes, None where packets are missing.
Reader = Callable[[list[tuple[Connection, int, int]]], list[bytes | None]]

AR_THRESHOLD = 8192
CTS_PROTOCOL = {65536: Protocol.LL, 614400: Protocol.LL128, 1048576: Protocol.SIMPLE, 524288: Protocol.SIMPLE}


class Mismatch(Exception):
    """The hypothesis does not explain the traffic. progress: messages that it did explain."""

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress


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
    """A message of a call as observed: its place in the call's tensor."""

    wire: Wire
    message: Message
    first: int
    count: int
    protocol: Protocol
    wire_bytes: int


def tree_number(channels: int, channel: int) -> int:
    """Tree of a channel. With an odd number of channels it cannot be told (parser.trees): then any, for the sizes are
    those of the other one."""
    return tree_of(channels + (channels > 1 and channels % 2), channel)


def _lane(plan: CallPlan, wire: Wire) -> Lane | None:
    channels = plan.topology.channels
    if plan.algorithm == "tree" and channels > 1 and channels % 2:
        plan = replace(plan, topology=replace(plan.topology, channels=channels + 1))
    return edge_lane(plan, wire.channel, wire.src, wire.dst)


@dataclass
class _Position:
    at: int = 0  # next observed message
    psn: int = 0
    step: int = 0
    short: int = 0  # messages of earlier calls that did not come because the capture ends


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
    position: dict[int, _Position] = field(default_factory=dict)
    explained: int = 0
    signature: list[tuple[str, int, int, int, bool]] = field(default_factory=list)
    plans: dict[tuple, tuple[CallPlan, dict[int, _Planned]]] = field(default_factory=dict)
    all_channels: bool = False
    algorithms: tuple[str, ...] = ("ring",)
    budget: Budget = field(default_factory=lambda: Budget(1 << 62))

    def __post_init__(self) -> None:
        if not self.position:
            self.position = {i: _Position() for i in range(len(self.wires))}

    def fork(self) -> Walk:
        """A copy that may go another way. Plans are shared: they depend on the topology alone."""
        places = {i: _Position(p.at, p.psn, p.step, p.short) for i, p in self.position.items()}
        return replace(self, position=places, signature=list(self.signature))

    @property
    def done(self) -> bool:
        """Every observed message is explained."""
        return all(p.at >= len(w.connection.messages) for w, p in self.places())

    @cached_property
    def total(self) -> int:
        """Messages observed."""
        return sum(len(w.connection.messages) for w in self.wires)

    @cached_property
    def channels(self) -> frozenset[int]:
        """Channels that were observed."""
        return frozenset(w.channel for w in self.wires)

    def places(self) -> list[tuple[Wire, _Position]]:
        """Every wire and how far it has come."""
        return list(zip(self.wires, self.position.values(), strict=True))

    def protocol(self) -> Protocol:
        """Of the next call: flags in the payload first, then the size that clear-to-send announced."""
        announced: set[Protocol] = set()
        raw = False
        for wire, place in self.places():
            ahead = wire.connection.messages[place.at : place.at + 2 * self.topology.ranks]
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
            if any(s.message.size for s in seen):
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
            done, name = place.at, wire.connection.name()
            if planned and sliced:
                place.step = -(-place.step // 4) * 4
            for first, count, wire_bytes, final in planned:
                message = self._match(wire, place, wire_bytes, protocol, call)
                if message is not None and protocol == Protocol.SIMPLE:
                    self._check_posted(wire, place.at - 1, sliced, call)
                place.short += message is None and place.at >= len(wire.connection.messages)
                if message is not None:
                    seen.append(Seen(wire, message, first, count, protocol, wire_bytes))
                    self.explained += 1
                pair = self.pairs and wire_bytes > AR_THRESHOLD
                place.psn += max(1, -(-wire_bytes // self.mtu)) + pair
                place.step += 2 if sliced else 1
                placed.append((name, wire.channel, first, count, final))
            taken[wire.channel, wire.src, wire.dst] = place.at - done
        self.budget.spend(len(placed) // 256)  # most calls fail on their first message, some are long
        self._check_order(seen, before, call, algorithm, taken, 2 if protocol == Protocol.SIMPLE else 1)
        if seen:  # a call of which nothing was seen places nothing
            self.signature += placed
        if call.protocol is None and any(s.message.size for s in seen):
            call.protocol = protocol.name.lower()
        return seen

    def _check_order(
        self, seen: list[Seen], before: dict[int, int], call: Collective, algorithm: str,
        taken: dict[tuple[int, int, int], int], ahead: int,
    ) -> None:  # fmt: skip
        """A rank starts a call when it has received all of the call before, and in an AllReduce its message i needs
        the i before it from its neighbour (in a tree of two: the root's needs the leaf's). So what it receives cannot
        end earlier - unless packets are missing, and the end may be too."""
        if any(w.connection.whole < len(w.connection.messages) for w in self.wires):
            return
        sending = {s.wire.src for s in seen}
        for i, wire in enumerate(self.wires):
            if before[i] and wire.dst in sending:
                raise Mismatch(
                    f"rank {wire.dst} sends in {self._called(call)} without having received the call before it from "
                    f"rank {wire.src}", self.explained,
                )  # fmt: skip
        if call.op != "AllReduce" or (algorithm == "tree" and self.topology.ranks > 2):
            return
        received = {(channel, dst): count for (channel, _, dst), count in taken.items()}
        leaves = {(w.channel, w.src) for w in self.wires if algorithm == "tree" and not self._root(w)}
        for (channel, src, _), count in taken.items():
            if (channel, src) not in leaves and count > received.get((channel, src), count) + ahead:
                raise Mismatch(
                    f"rank {src} sends {count} messages of {self._called(call)} and received only "
                    f"{received[channel, src]}", self.explained,
                )  # fmt: skip

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
        posted = wire.connection.posted.get(number) if number < wire.connection.whole else None
        room = self.topology.slot_bytes[Protocol.SIMPLE] * (2 if sliced else 1)
        if posted is not None and posted != room and posted in (room // 2, 2 * room):
            raise Mismatch(
                f"channel {wire.channel}, rank {wire.src} -> {wire.dst}: {self._called(call)} has {room} bytes of room "
                f"a message, the receiver announced {posted}", self.explained,
            )  # fmt: skip

    @staticmethod
    def _called(call: Collective) -> str:
        return f"{call.op} of {call.count} {call.dtype}"

    def _match(
        self, wire: Wire, place: _Position, wire_bytes: int, protocol: Protocol, call: Collective
    ) -> Message | None:
        found = wire.connection.messages
        if place.at >= len(found):
            return None  # the capture ends before it
        message = found[place.at]
        where = f"channel {wire.channel}, rank {wire.src} -> {wire.dst}, PSN {place.psn}"
        if message.psn != place.psn:
            gone = place.psn + max(1, -(-wire_bytes // self.mtu))
            if place.at >= wire.connection.whole and message.psn >= gone:
                return None  # it fell into a gap
            raise Mismatch(
                f"{where}: {self._called(call)} needs a message of {wire_bytes} bytes here, "
                f"one begins at PSN {message.psn}", self.explained,
            )  # fmt: skip
        if message.size != wire_bytes:
            raise Mismatch(
                f"{where}: {self._called(call)} needs a message of {wire_bytes} bytes, {message.size} were sent",
                self.explained,
            )  # fmt: skip
        kind, flag = head_flags(message.head, message.size)
        expected = {"ll": Protocol.LL, "ll128": Protocol.LL128}.get(kind)
        if protocol != Protocol.SIMPLE and expected == protocol and flag != place.step + 1:
            raise Mismatch(f"{where}: flag {place.step + 1} is due, the payload says {flag}", self.explained)
        place.at += 1
        return message
