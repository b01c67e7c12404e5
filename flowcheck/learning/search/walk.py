"""Holding a hypothesis against observed messages: many calls, every message checked.

    Hypothesis.walk(budget) -> Walk           from the first message of every connection on
    Walk.take(call) -> [Observed]             raises Mismatch, or moves every connection past the call

A hypothesis is an assumed structure (ranks, rings, connections, channels, version); a call is an operation with its
size. `take` plans the call and compares message by message: start PSN, size, and the LL or LL128 flag where there is
one. Messages that fell into a gap of the capture are stepped over, never invented; a message that the plan does not
have, or of another size, is a Mismatch. An AllReduce may go round the ring or through the tree: the algorithms that a
walk allows are tried in their order, and a call stays with the one that its first messages fit. Pure; one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from parser.lane import messages

from flowcheck.job.model import Collective, dtype_size
from flowcheck.learning.connections import PlacedConnection
from flowcheck.learning.messages import Flow, Message, head_flags
from flowcheck.learning.search.position import Mismatch, Position
from parser.chunk_layout import Protocol, Topology
from parser.nccl import WireError
from parser.trees import tree_of, tree_parent
from parser.wire import CallPlan, Lane, edge_lane, plan_call

__all__ = [
    "AR_THRESHOLD", "DEFAULT_SLOTS", "Budget", "BudgetExceeded", "Hypothesis", "Observed", "Reader", "Variant", "Walk",
    "tree_number",
]

#: What fetches wire bytes: (flow, first PSN, end PSN) of each -> bytes, None where packets are missing.
Reader = Callable[[list[tuple[Flow, int, int]]], list[bytes | None]]

AR_THRESHOLD = 8192
CTS_PROTOCOL = {65536: Protocol.LL, 614400: Protocol.LL128, 1048576: Protocol.SIMPLE, 524288: Protocol.SIMPLE}
DEFAULT_SLOTS = (65536, 614400, 524288)  # wire bytes of a step: LL, LL128, SIMPLE
PLANS_MAX = 4096

_Planned = list[tuple[int, int, int, bool]]  # on one connection: (first, count, wire bytes, final) of each message


class BudgetExceeded(Exception):
    """The search has used up its budget."""


@dataclass
class Budget:
    """What a search may cost, in calls held against the traffic; shared by all its walks."""

    limit: int = 1 << 62
    used: int = 0

    def spend(self, calls: int) -> None:
        self.used += calls
        if self.used > self.limit:
            raise BudgetExceeded


@dataclass(frozen=True)
class Variant:
    """What is tried of a proposal.

    version: of NCCL, and version_reason: why this one. slot_bytes: of a step, by protocol.
    algorithms: of AllReduce, the preferred one first.
    """

    version: str = ""
    version_reason: str = ""
    channels: int = 0
    slot_bytes: tuple[int, int, int] = DEFAULT_SLOTS
    mtu: int = 4096
    algorithms: tuple[str, ...] = ("ring",)


@dataclass(frozen=True)
class Hypothesis:
    """An assumed structure of one communicator. Proposed as which rank talks to which, then tried in variants.

    group: hypotheses of the same connections have one number; proposal: variants of one proposal have one number.
    rings: one for all channels or one each, rank 0 first. source: "job", "bootstrap" or "traffic". connected: connected
    channels if known, else 0. handshake: versions by QP info, or "". said: (what, value, confidence, reason). about:
    what distinguishes it from its siblings, for refusals. qps: QP numbers and those of clear-to-send by (channel, src,
    dst), where they are named. ranks_by: who names the ranks. split: the tags are taken for numbers of a parent
    communicator. several: nothing says how many ranks there are. tree: AllReduce goes through a tree of more than two.
    """

    ranks: int
    rings: tuple[tuple[int, ...], ...]
    connections: tuple[PlacedConnection, ...]
    source: str
    connected: int = 0
    handshake: str = ""
    said: tuple[tuple[str, str, str, str], ...] = ()
    about: str = ""
    qps: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    ranks_by: str = ""
    split: bool = False
    several: bool = False
    tree: bool = False
    group: int = 0
    proposal: int = 0
    variant: Variant = Variant()

    @cached_property
    def topology(self) -> Topology:
        """Of its variant, as the wire model wants it."""
        one = self.variant
        rings = self.rings * one.channels if len(self.rings) == 1 else self.rings
        return Topology(one.version, self.ranks, one.channels, rings, one.slot_bytes)

    def walk(self, budget: Budget) -> Walk:
        """With no known number of channels, all that carry data are taken to be captured: nothing else tells."""
        return Walk(
            self.topology, [*self.connections], self.variant.mtu, all_channels=not self.connected or self.tree,
            algorithms=self.variant.algorithms, budget=budget,
        )


@dataclass(frozen=True)
class Observed:
    """A message of a call as observed: its pieces by flow, and its place in the call's tensor, in bytes or elements of
    the call's plan."""

    on: PlacedConnection
    parts: tuple[tuple[Flow, Message], ...]
    first: int
    count: int
    protocol: Protocol
    wire_bytes: int

    @property
    def whole(self) -> bool:
        """Did every piece of it begin in the capture?"""
        return sum(message.size for _, message in self.parts) == self.wire_bytes


def tree_number(channels: int, channel: int) -> int:
    """Tree of a channel. With an odd number of channels it does not show (parser.trees): then any, for the sizes are
    those of the other one."""
    return tree_of(channels + (channels > 1 and channels % 2), channel)


def _lane(plan: CallPlan, on: PlacedConnection) -> Lane | None:
    channels = plan.topology.channels
    if plan.algorithm == "tree" and channels > 1 and channels % 2:
        plan = replace(plan, topology=replace(plan.topology, channels=channels + 1))
    return edge_lane(plan, on.channel, on.src, on.dst)


def _called(call: Collective) -> str:
    return f"{call.op} of {call.count} {call.dtype}"


@dataclass
class Walk:
    """How far a hypothesis has got. mtu: path MTU. all_channels: every channel that carries data is among the
    connections. algorithms: of AllReduce calls, the preferred one first. positions: of each connection. signature: what
    was placed where, so far. plans: of calls; they depend on the topology alone."""

    topology: Topology
    connections: list[PlacedConnection]
    mtu: int
    all_channels: bool = False
    algorithms: tuple[str, ...] = ("ring",)
    budget: Budget = field(default_factory=Budget)
    positions: list[Position] = field(default_factory=list)
    explained: int = 0
    signature: list[tuple[str, int, int, int, bool]] = field(default_factory=list)
    plans: dict[tuple, tuple[CallPlan, dict[int, _Planned]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = self.positions or [Position.start(on.connection) for on in self.connections]

    def fork(self) -> Walk:
        """A copy that may go another way. Plans are shared."""
        return replace(self, positions=[p.copy() for p in self.positions], signature=list(self.signature))

    @property
    def done(self) -> bool:
        """Every observed message is explained."""
        return all(
            at >= len(flow.messages) for on, position in self._places()
            for at, flow in zip(position.at, on.connection.flows, strict=True)
        )

    @cached_property
    def total(self) -> int:
        """Messages observed, of split ones their pieces."""
        return sum(on.connection.total for on in self.connections)

    @cached_property
    def pairs(self) -> bool:
        """Do messages above the threshold leave as adaptive-routing pairs?"""
        return any(on.connection.pairs for on in self.connections)

    @cached_property
    def channels(self) -> frozenset[int]:
        """Channels that were observed."""
        return frozenset(on.channel for on in self.connections)

    def _places(self) -> list[tuple[PlacedConnection, Position]]:
        return list(zip(self.connections, self.positions, strict=True))

    def ahead(self, most: int) -> list[tuple[PlacedConnection, list[Message]]]:
        """The next messages of every connection, at most `most`, as if none were missing from here on."""
        return [(on, on.connection.ahead(place.at, place.number, most)) for on, place in self._places()]

    def protocol(self) -> Protocol:
        """Of the next call: flags in the payload first, then the size that clear-to-send announced."""
        announced: set[Protocol] = set()
        raw = False
        for (on, ahead), place in zip(self.ahead(2 * self.topology.ranks), self.positions, strict=True):
            for steps, message in enumerate(ahead, 1):
                if not message.size:  # an empty chunk says nothing, the one after it does
                    continue
                kind, flag = head_flags(message.head, message.size)
                if kind and flag == place.step + steps:
                    return Protocol.LL if kind == "ll" else Protocol.LL128
                raw |= not kind
                break
            announced |= {CTS_PROTOCOL[size] for size in on.connection.cts_sizes if size in CTS_PROTOCOL}
        return Protocol.SIMPLE if raw or len(announced) != 1 else announced.pop()

    def take(self, call: Collective) -> list[Observed]:
        """Explain one call on all connections. Returns the messages of it that were observed. Raises Mismatch."""
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
            self.positions, self.explained, self.signature = here.positions, here.explained, here.signature
            if any(s.wire_bytes for s in seen):
                call.algorithm = algorithm  # every later turn of this call has to use it too
            return seen
        assert best is not None
        raise best

    def _take(self, call: Collective, algorithm: str) -> list[Observed]:
        self.budget.spend(1)
        protocol = Protocol[call.protocol.upper()] if call.protocol else self.protocol()
        seen: list[Observed] = []
        placed: list[tuple[str, int, int, int, bool]] = []
        taken: dict[tuple[int, int, int], int] = {}
        before = [place.short for place in self.positions]
        sliced = protocol == Protocol.SIMPLE and call.op != "Broadcast" and algorithm == "ring"
        slot = self.topology.slot_bytes[protocol]
        for i, (on, place) in enumerate(self._places()):
            planned = self._planned(call, protocol, algorithm, i)  # one by one: most hypotheses fail on the first
            came, name = 0, on.connection.name()
            if planned and sliced:
                place.step = -(-place.step // 4) * 4
            for first, count, wire_bytes, final in planned:
                pair = self.pairs and wire_bytes > AR_THRESHOLD
                try:
                    parts = place.take(on.connection, wire_bytes, protocol, slot, self.mtu, pair)
                except Mismatch as mismatch:
                    where = f"channel {on.channel}, rank {on.src} -> {on.dst}, {mismatch.where}"
                    raise Mismatch(f"{_called(call)} needs {mismatch.text}", self.explained, where) from None
                self.explained += len(parts)
                if parts:
                    if protocol == Protocol.SIMPLE:
                        self._check_posted(on, place.number - 1, sliced, call)
                    came += 1
                    seen.append(Observed(on, parts, first, count, protocol, wire_bytes))
                place.step += 2 if sliced else 1
                placed.append((name, on.channel, first, count, final))
            taken[on.channel, on.src, on.dst] = came
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
        self, seen: list[Observed], before: list[int], call: Collective, algorithm: str,
        taken: dict[tuple[int, int, int], int], ahead: int,
    ) -> None:
        """A rank starts a call when it has received all of the call before, and in an AllReduce its message i needs
        the i before it from its neighbour (in a tree of two: the root's needs the leaf's). So what it receives cannot
        end earlier - unless packets are missing, and the end may be too."""
        if any(on.connection.gaps for on in self.connections):
            return
        sending = {s.on.src for s in seen}
        for short, on in zip(before, self.connections, strict=True):
            if short and on.dst in sending:
                raise Mismatch(
                    f"rank {on.dst} sends in {_called(call)} without having received the call before it from "
                    f"rank {on.src}", self.explained,
                )
        if call.op != "AllReduce" or (algorithm == "tree" and self.topology.ranks > 2):
            return
        rings = [self.topology.ring(channel) for channel in range(self.topology.channels)]
        received = {  # where larger trees are in use there are more connections than the ring's
            (channel, dst): count for (channel, src, dst), count in taken.items()
            if rings[channel][(rings[channel].index(src) + 1) % len(rings[channel])] == dst
        }
        leaves = {(on.channel, on.src) for on in self.connections if algorithm == "tree" and not self._root(on)}
        for (channel, src, _), count in taken.items():
            if (channel, src) not in leaves and count > received.get((channel, src), count) + ahead:
                raise Mismatch(
                    f"rank {src} sends {count} messages of {_called(call)} and received only "
                    f"{received[channel, src]}", self.explained,
                )

    def _check_tree(self, seen: list[Observed], call: Collective) -> None:
        """What a parent sends down is made of what the child has sent up, so it comes later: that tells which of two
        ranks is the parent, even if both were named wrongly."""
        came: dict[tuple[int, int, int, int], int] = {}
        for s in seen:
            came[s.on.channel, s.on.src, s.on.dst, s.first] = s.parts[0][1].ns
        early: Counter[tuple[int, int, int]] = Counter()
        for (channel, src, dst, first), ns in came.items():
            up = tree_parent(self.topology.ranks, tree_number(self.topology.channels, channel), dst) == src
            if up and (before := came.get((channel, dst, src, first))) is not None:
                early[channel, src, dst] += 1 if ns < before else -1  # a mirror may swap neighbours
        for (channel, src, dst), balance in early.items():
            if balance > 0:
                raise Mismatch(
                    f"channel {channel}: rank {src} sends rank {dst} results of {_called(call)} before it has "
                    "what they are made of", self.explained,
                )

    def _root(self, on: PlacedConnection) -> bool:
        """Does the sender stand at the root of this channel's tree of two ranks?"""
        return tree_parent(2, tree_number(self.topology.channels, on.channel), on.src) is None

    def _planned(self, call: Collective, protocol: Protocol, algorithm: str, number: int) -> _Planned:
        """The call's messages on one connection."""
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
                raise Mismatch(f"{_called(call)} would use channel {idle[0]}, not in the captures", self.explained)
            if len(self.plans) >= PLANS_MAX:
                self.plans.clear()
            self.plans[key] = plan, {}
        plan, lanes = self.plans[key]
        if number not in lanes:
            lane = _lane(plan, self.connections[number])
            if lane is not None and lane.messages > 4 * self.total + 65536:
                raise Mismatch(f"{_called(call)} would take more messages than were captured", self.explained)
            lanes[number] = [] if lane is None else [(f, c, b, final) for f, c, b, final, _ in messages(lane)]
        return lanes[number]

    def _check_posted(self, on: PlacedConnection, number: int, sliced: bool, call: Collective) -> None:
        """The receiver announces room for a slice of two steps (ring) or for one step (tree, Broadcast; 4.4)."""
        posted = on.connection.posted.get(number)
        room = self.topology.slot_bytes[Protocol.SIMPLE] * (2 if sliced else 1)
        if posted is not None and posted != room and posted in (room // 2, 2 * room):
            raise Mismatch(
                f"channel {on.channel}, rank {on.src} -> {on.dst}: {_called(call)} has {room} bytes of room "
                f"a message, the receiver announced {posted}", self.explained,
            )
