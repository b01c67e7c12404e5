"""From flows to connections: which flows carry one connection's messages, in which order, and which are its cts flows.

    connections(flows, starts) -> [Connection]

Flows belong together where they write into the slots of one buffer: those that a single cts flow announces, or, where
none was captured, those under one memory key and no further apart than a buffer is long. Both that and the pairing by
port are parser.pairing's, as in `inspect`. How messages go round the flows is flow_order.py's. What the evidence leaves
open stands in `unsure` (refused where it matters) or in `doubt`. Pure. Section numbers: nccl-wire.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flowcheck.learning.flow_order import FlowOrder, arrange, arrange_devices, devices_of, pieces
from flowcheck.learning.messages import P2P_SIZE, CtsFlow, Flow, Message, head_flags, observed_flows
from parser.pairing import Announced, port_partners

__all__ = ["Connection", "PlacedConnection", "connections"]

# bytes by the flags that show (pieces of LL128 messages need not show theirs); other sizes show in clear-to-send writes
BUFFERS = {"ll": 8 * 65536, "ll128": 8 * 614400, "": 8 * 614400}


@dataclass
class Connection(FlowOrder):
    """Data src -> dst over `flows`, and what comes back on cts_flows (none: not captured).

    devices: ports of a merged NIC; flow i is on port i modulo devices. cts_flows: one of each port. cts_sizes, tags: of
    the clear-to-send writes; posted, slots: size and address by number of the message announced."""

    devices: int = 1
    cts_flows: tuple[CtsFlow, ...] = ()
    paired_by: str = ""
    cts_sizes: Counter[int] = field(default_factory=Counter)
    tags: Counter[int] = field(default_factory=Counter)
    posted: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)

    @property
    def src(self) -> str:
        return self.flows[0].src

    @property
    def dst(self) -> str:
        return self.flows[0].dst

    @property
    def cts_qpns(self) -> tuple[int, ...]:
        """Where clear-to-send comes in, one QP of each port."""
        return tuple(flow.qpn for flow in self.cts_flows)

    @property
    def layout(self) -> str:
        """NCCL versions by the form of the clear-to-send writes, "" if there are none."""
        return self.cts_flows[0].layout if self.cts_flows else ""

    @property
    def tag(self) -> int | None:
        """Rank of the sender by CTS tag."""
        return next(iter(self.tags)) if len(self.tags) == 1 else None

    @property
    def point_to_point(self) -> bool:
        return bool(self.cts_sizes) and set(self.cts_sizes) == {P2P_SIZE}

    @property
    def dropped(self) -> int:
        return sum(q.dropped for q in self.flows)

    @property
    def gaps(self) -> bool:
        """Is something missing before the last message of a flow?"""
        return any(q.whole < len(q.messages) for q in self.flows)

    @cached_property
    def total(self) -> int:
        """Messages of all flows, pieces counted one by one."""
        return sum(len(q.messages) for q in self.flows)

    @cached_property
    def mtus(self) -> set[int]:
        """Path MTU, as far as packets tell."""
        return {q.mtu for q in self.flows if q.mtu}

    @cached_property
    def flagged(self) -> int:
        """Messages whose first bytes have flags, small enough for the steps taken since PSN 0 (at most 4 a message)."""
        return sum(0 < head_flags(m.head, m.size)[1] <= 4 * (i + 1) for i, m in enumerate(self.messages))

    @cached_property
    def pairs(self) -> int:
        """Messages (pieces) that left as adaptive-routing pairs."""
        return sum(m.pair for m in self.pieces())

    def pieces(self) -> Iterator[Message]:
        """What was seen on any flow."""
        for flow in self.flows:
            yield from flow.messages

    @cached_property
    def messages(self) -> list[Message]:
        """All messages, joined as if none were missing."""
        return self.first(self.total)

    def first(self, most: int) -> list[Message]:
        """The first messages, joined likewise."""
        return self.ahead([0] * len(self.flows), 0, most)

    def ahead(self, at: Sequence[int], number: int, most: int) -> list[Message]:
        """The next messages from message `number` on, joined as if none were missing, at most `most`. at: the next one
        of each flow."""
        if len(self.flows) == 1:
            return self.flows[0].messages[at[0] : at[0] + most]
        places = list(at)
        out: list[Message] = []
        while len(out) < most:
            turn = [(number * self.used + i) % len(self.flows) for i in range(self.used)]
            if any(places[q] >= len(self.flows[q].messages) for q in turn):
                break
            parts = [self.flows[q].messages[places[q]] for q in turn]
            out.append(parts[0] if len(parts) == 1 else replace(parts[0], size=sum(m.size for m in parts)))
            for q in turn:
                places[q] += 1
            number += 1
        return out

    def due(self, number: int, size: int) -> list[tuple[int, int, int]]:
        """(flow, offset, bytes) of each piece of message `number` (5.3)."""
        n = len(self.flows)
        return [((number * self.used + i) % n, *part) for i, part in enumerate(pieces(size, self.used))]

    @property
    def empty_part(self) -> bool:
        """Nothing but empty pieces of messages that travel elsewhere?"""
        return bool(self.unsure) and all(not m.size and m.imm for m in self.pieces())

    def name(self) -> str:
        if len(self.flows) == 1:
            return self.flows[0].name()
        return f"{self.src} -> {self.dst} QPs {', '.join(f'{q.qpn:#x}' for q in self.flows)}"


@dataclass(frozen=True)
class PlacedConnection:
    """A connection with its meaning: data of rank src to rank dst on a channel."""

    channel: int
    src: int
    dst: int
    connection: Connection


def connections(flows: list[dict[str, Any]], starts: np.ndarray) -> list[Connection]:
    """Every connection with data, in order of appearance. flows, starts: of an Observer of messages."""
    data, cts_flows = observed_flows(flows, starts)
    place = {id(flow): i for i, flow in enumerate(data)}
    found = list(_striped(data, cts_flows))
    taken = {id(flow) for c in found for flow in c.flows} | {id(f) for c in found for f in c.cts_flows}
    by_ends: dict[tuple[str, str], tuple[list[Flow], list[CtsFlow]]] = defaultdict(lambda: ([], []))
    for flow in data:
        if id(flow) not in taken:
            by_ends[flow.src, flow.dst][0].append(flow)
    for cts_flow in cts_flows:
        if id(cts_flow) not in taken:
            by_ends[cts_flow.dst, cts_flow.src][1].append(cts_flow)
    every: list[Flow | CtsFlow] = [*data, *cts_flows]
    partners = port_partners({id(flow): (flow.src, flow.dst, flow.qpn, flow.sport) for flow in every})
    found += [c for together, there in by_ends.values() for c in _between(together, there, partners)]
    return sorted(found, key=lambda c: min(place[id(flow)] for flow in c.flows))


def _striped(data: Sequence[Flow], cts_flows: Sequence[CtsFlow]) -> Iterator[Connection]:
    """Connections over several ports of merged NICs."""
    by_ends: dict[tuple[str, str], list[Flow]] = defaultdict(list)
    for flow in data:
        by_ends[flow.src, flow.dst].append(flow)
    taken: set[int] = set()
    for group in devices_of(cts_flows):
        elements = sorted((c for cts_flow in group for c in cts_flow.elements), key=lambda c: c.index)
        slots = Announced((0, key, c.address, c.size) for c in elements for key in {*c.keys, c.rkey} if key)
        by_device = [
            [f for f in by_ends[cts_flow.dst, cts_flow.src] if id(f) not in taken and slots.by(_writes(f))]
            for cts_flow in group
        ]
        if all(by_device):
            connection = Connection(**vars(arrange_devices(by_device, elements)))
            _join(connection, replace(group[0], elements=elements), "clear-to-send address")
            connection.cts_flows, connection.devices = tuple(group), len(group)
            taken |= {id(flow) for flow in connection.flows}
            yield connection


def _writes(flow: Flow) -> list[tuple[int, int, int]]:
    return [(m.rkey, m.va, m.size) for m in flow.messages]


def _between(data: list[Flow], cts_flows: list[CtsFlow], partners: dict[int, int]) -> list[Connection]:
    """The connections of one pair of hosts, in one direction. partners: by UDP source port, by identity."""
    slots = Announced((i, c.rkey, c.address, c.size) for i, flow in enumerate(cts_flows) for c in flow.elements)
    announced: dict[int, list[Flow]] = {}
    alone: list[Flow] = []
    contested: set[int] = set()
    for flow in data:
        numbers = slots.by(_writes(flow))
        if len(numbers) == 1:
            announced.setdefault(numbers.pop(), []).append(flow)
        else:
            alone.append(flow)
            contested |= {id(flow)} if numbers else set()
    if len(announced) == 1:  # nothing but empty pieces: of the only connection there is, if it splits its messages
        ((number, members),) = announced.items()
        empty = [f for f in alone if f.messages and not any(m.size for m in f.messages)]
        if empty and arrange(members + empty, cts_flows[number].elements).used > 1:
            members += empty
            alone = [f for f in alone if f not in empty]
    out: list[Connection] = []
    for number, members in announced.items():
        out.append(Connection(**vars(arrange(members, cts_flows[number].elements))))
        _join(out[-1], cts_flows[number], "clear-to-send address")
    spare = {id(flow): flow for i, flow in enumerate(cts_flows) if i not in announced}
    for members, unsure in _unannounced(alone):
        out.append(Connection(**vars(arrange(members, []))))
        if any(id(flow) in contested for flow in members):
            unsure = "several flows of clear-to-send writes announce the addresses it writes to"
        out[-1].unsure = unsure or out[-1].unsure
        partner = spare.get(partners.get(id(out[-1].flows[0]), 0))
        if partner is not None:
            _join(out[-1], partner, "UDP source port")
    return out


def _join(connection: Connection, cts_flow: CtsFlow, how: str) -> None:
    connection.cts_flows = (cts_flow,)
    connection.paired_by = how
    connection.cts_sizes = Counter(c.size for c in cts_flow.elements)
    connection.tags = Counter(c.tag for c in cts_flow.elements)
    connection.posted = {c.index - 1: c.size for c in cts_flow.elements}
    connection.slots = {c.index - 1: c.address for c in cts_flow.elements}


def _unannounced(flows: list[Flow]) -> Iterator[tuple[list[Flow], str]]:
    """(flows of one connection, why that is not sure) where no clear-to-send write tells: those that write under one
    key within the length of one buffer."""
    regions: dict[int, list[tuple[int, int, int, str]]] = defaultdict(list)  # by key: (first, last address, flow, kind)
    for number, flow in enumerate(flows):
        reach: dict[int, tuple[int, int, str]] = {}
        for m in flow.messages:
            if m.va:  # empty pieces have an address too
                low, high, kind = reach.get(m.rkey, (m.va, m.va, ""))
                reach[m.rkey] = min(low, m.va), max(high, m.va), kind or head_flags(m.head, m.size)[0]
        for rkey, (low, high, kind) in reach.items():
            regions[rkey].append((low, high, number, kind))
    root = list(range(len(flows)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    too_long = set()
    for region in regions.values():
        region.sort()
        begin, end, first, kind = region[0]
        for low, high, number, other in region[1:]:
            kind = kind or other
            if low - end < BUFFERS[kind] // 8 * 7 and max(high, end) - begin < BUFFERS[kind]:
                root[find(number)] = find(first)
                end = max(high, end)
            else:
                if low <= end:  # it reaches into what would be another's buffer
                    too_long |= {number, first}
                begin, end, first, kind = low, high, number, other
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(flows)):
        groups[find(number)].append(number)
    for members in groups.values():
        unsure = ""
        if too_long & set(members):
            unsure = "no clear-to-send write was captured, and they write to one stretch that is longer than a buffer"
        yield [flows[i] for i in members], unsure
