"""What one AllReduce puts on the wire at one port: messages, packets, bytes. Exact, and without listing messages.

    call = Call(Protocol.LL, ranks=8, elements=6_553_600, element_bytes=4)
    traffic_at(call, position=0, mtu=4096)      -> Traffic, out and in together
    iteration_of(call, mtu, direction="both")   -> Traffic of all buckets of an iteration, at the busiest port

The layout of chunks is the parser's own (parser/wire.py): what the planner counts is what the node will place, for
every version of NCCL that it reads. Counted are data packets, their headers, and one clear-to-send and one
acknowledgement per message; a NIC may acknowledge more or less often. Pure functions, any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flowcheck.errors import UserError
from flowcheck.plan.answers.answer import need, need_at_most
from flowcheck.plan.traffic.loss_law import Direction
from parser.chunk_layout import Protocol, Segment, Topology
from parser.nccl import WireError, of
from parser.trees import tree_of, tree_parent
from parser.wire import CallPlan, edge_lane, plan_call

__all__ = ["HEADERS", "Call", "Traffic", "iteration_of", "message_bytes", "reduced_packets", "traffic_at"]

# Ethernet, IPv4, UDP, BTH, ICRC; then the frame's checksum, preamble and gap
HEADERS = 14 + 20 + 8 + 12 + 4 + 4 + 20
RETH, IMMEDIATE, AETH = 16, 4, 4
MTUS = (256, 512, 1024, 2048, 4096)
MOST_CHANNELS = 64


class Traffic(NamedTuple):
    """messages, packets: of data. payload: their wire bytes behind the headers. frames: bytes that they occupy on a
    link. final_packets, final_payload: of those, with reduced data; final_data: gradient bytes in them. control:
    clear-to-sends and acknowledgements; control_frames: bytes of these."""

    messages: float = 0
    packets: float = 0
    payload: float = 0
    frames: float = 0
    final_packets: float = 0
    final_payload: float = 0
    final_data: float = 0
    control: float = 0
    control_frames: float = 0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Traffic:
        return Traffic(*(value * factor for value in self))

    @property
    def all_frames(self) -> float:
        return self.frames + self.control_frames


@dataclass(frozen=True)
class Call:
    """One AllReduce of `elements` elements. channels: of the communicator; a small call uses fewer."""

    protocol: Protocol
    ranks: int
    elements: int
    element_bytes: int
    algorithm: str = "ring"
    channels: int = 1
    version: str = "2.27.7"

    def __post_init__(self) -> None:
        """Raises UserError for what cannot be, and for what the wire model does not have."""
        need(self.ranks >= 2, f"{self.ranks} ranks reduce nothing over a network", "--dp", "at least 2 replicas")
        need(self.elements >= 1, "a call of no elements", "--parameters", "at least one element per group")
        need(self.channels >= 1, f"{self.channels} channels carry nothing", "--channels", "at least 1")
        need_at_most(self.channels, MOST_CHANNELS, "--channels", "NCCL has no more (MAXCHANNELS)")
        where, remedy = "--nccl-version", "one that the wire model has (docs/understand/wire.md)"
        try:
            of(self.version)
            where, remedy = "--channels", "1, or an even number of channels"
            if self.algorithm == "tree":
                tree_of(self.channels, 0)
        except WireError as error:
            raise UserError(str(error), where=where, remedy=remedy) from None

    def plan(self) -> CallPlan:
        """With the ranks in their own order on every ring. Raises UserError where the layout is not known."""
        topology = Topology(self.version, self.ranks, self.channels, (tuple(range(self.ranks)),))
        try:
            return plan_call(
                topology, "AllReduce", self.protocol, self.elements, self.element_bytes, algorithm=self.algorithm
            )
        except WireError as error:
            raise UserError(str(error), where="--protocol", remedy="another protocol or version of NCCL") from None


def message_bytes(protocol: Protocol, data: int) -> int:
    """Wire bytes of a message with so many bytes of data (nccl-wire 4.1 to 4.3)."""
    if protocol == Protocol.LL:
        return -(-data // 8) * 16
    return -(-data // 1920) * 2048 if protocol == Protocol.LL128 else data


def traffic_at(call: Call, position: int, mtu: int, direction: Direction = "both") -> Traffic:
    """Of the port at this ring position, or node of the trees. ingress: what its NIC sends, egress: what it receives.

    In each direction the clear-to-sends and acknowledgements of the other direction's messages travel too.
    """
    need(mtu in MTUS, f"{mtu} is not an RDMA path MTU", "--mtu", ", ".join(map(str, MTUS)))
    plan = call.plan()
    out, into = Traffic(), Traffic()
    for channel, segments in enumerate(plan.segments):
        if not segments:
            continue
        for source, target, here_sends in _edges(call, channel, position):
            if call.algorithm == "ring":
                carried = _ring_edge(plan, channel, source, target, mtu)
            else:
                carried = _tree_edge(plan, channel, final=_is_parent(call, channel, source, target), mtu=mtu)
            if here_sends:
                out = out.plus(carried)
            else:
                into = into.plus(carried)
    cts = HEADERS + RETH + of(call.version).cts.bytes
    control = HEADERS + AETH
    sent = out._replace(control=2 * into.messages, control_frames=into.messages * (cts + control))
    received = into._replace(control=2 * out.messages, control_frames=out.messages * (cts + control))
    # a clear-to-send is itself acknowledged, by the side that sends the data
    sent = sent._replace(control=sent.control + out.messages, control_frames=sent.control_frames
                         + out.messages * control)
    received = received._replace(control=received.control + into.messages, control_frames=received.control_frames
                                 + into.messages * control)
    return {"ingress": sent, "egress": received, "both": sent.plus(received)}[direction]


def iteration_of(
    call: Call, bucket_elements: int, mtu: int, direction: Direction = "both", position: int | None = None
) -> tuple[Traffic, int]:
    """(traffic of an iteration at one port, number of buckets): call.elements in calls of `bucket_elements`.

    position: default 0 on a ring, where all are nearly alike, and of a tree the node with the most traffic.
    """
    whole, rest = divmod(call.elements, bucket_elements)
    if position is None:
        position = 0 if call.algorithm == "ring" else _busiest(call)
    total = Traffic()
    if whole:
        total = traffic_at(replace(call, elements=bucket_elements), position, mtu, direction).times(whole)
    if rest:
        total = total.plus(traffic_at(replace(call, elements=rest), position, mtu, direction))
    return total, whole + bool(rest)


def reduced_packets(call: Call, bucket_elements: int, mtu: int) -> int:
    """Distinct packets of reduced data in an iteration: one copy of the whole gradient. The law of loss counts these.

    Every chunk of every loop once, whichever edge carries it.
    """
    whole, rest = divmod(call.elements, bucket_elements)
    packets = whole * _one_copy(replace(call, elements=bucket_elements), mtu) if whole else 0
    return packets + (_one_copy(replace(call, elements=rest), mtu) if rest else 0)


def _one_copy(call: Call, mtu: int) -> int:
    plan, ring = call.plan(), call.algorithm == "ring"
    packets = 0
    for channel, segments in enumerate(plan.segments):
        lane = edge_lane(plan, channel, 0, 1) if ring else None
        slices, floor = (lane.slices, lane.slice_floor) if lane else (1, 0)
        for loops, lengths in _chunks(segments, call.ranks if ring else 1):
            messages = (part for length in lengths for part in _slices(length, slices, floor))
            packets += loops * sum(int(_message(plan, part, True, mtu).packets) for part in messages)
    return packets


# -- edges ------------------------------------------------------------------------------------------------------------


def _edges(call: Call, channel: int, position: int) -> Iterator[tuple[int, int, bool]]:
    """(source, target, sent here) of every edge of a channel at this port."""
    if call.algorithm == "ring":
        yield position, (position + 1) % call.ranks, True
        yield (position - 1) % call.ranks, position, False
        return
    parents = _parents(call.ranks, tree_of(call.channels, channel))
    near = [node for node, parent in enumerate(parents) if parent == position]
    near += [] if parents[position] is None else [int(parents[position] or 0)]
    for other in near:
        yield position, other, True
        yield other, position, False


def _parents(ranks: int, tree: int) -> list[int | None]:
    return [tree_parent(ranks, tree, node) for node in range(ranks)]


def _is_parent(call: Call, channel: int, source: int, target: int) -> bool:
    return tree_parent(call.ranks, tree_of(call.channels, channel), target) == source


def _busiest(call: Call) -> int:
    """The node with the most edges over both trees."""
    edges: Counter[int] = Counter()
    for channel in range(call.channels):
        for node, parent in enumerate(_parents(call.ranks, tree_of(call.channels, channel))):
            if parent is not None:
                edges.update((node, parent))
    return max(range(call.ranks), key=lambda node: (edges[node], -node))


def _chunks(segments: tuple[Segment, ...], group: int) -> Iterator[tuple[int, list[int]]]:
    """(loops, elements of each chunk of such a loop): all loops but the last are full."""
    for segment in segments:
        if segment.loops > 1:
            yield segment.loops - 1, [segment.chunk] * group
        base = segment.base + (segment.loops - 1) * segment.loop_stride
        starts = (base + chunk * segment.chunk_stride for chunk in range(group))
        yield 1, [min(segment.chunk, max(0, segment.limit - start)) for start in starts]


def _ring_edge(plan: CallPlan, channel: int, source: int, target: int, mtu: int) -> Traffic:
    """In a loop every chunk passes twice, but the source's own is never sent as a partial sum, and the next one's never
    reduced (nccl-wire 2.2)."""
    lane = edge_lane(plan, channel, source, target)
    assert lane is not None
    total = Traffic()
    for loops, lengths in _chunks(plan.segments[channel], lane.ranks):
        partial = Counter(length for at, length in enumerate(lengths) if at != lane.index)
        final = Counter(length for at, length in enumerate(lengths) if at != (lane.index + 1) % lane.ranks)
        for lengths_of, is_final in ((partial, False), (final, True)):
            for length, times in lengths_of.items():
                for part in _slices(length, lane.slices, lane.slice_floor):
                    total = total.plus(_message(plan, part, is_final, mtu).times(times * loops))
    return total


def _tree_edge(plan: CallPlan, channel: int, *, final: bool, mtu: int) -> Traffic:
    """Every chunk once, in one message (nccl-wire 7.2)."""
    total = Traffic()
    for loops, lengths in _chunks(plan.segments[channel], 1):
        total = total.plus(_message(plan, lengths[0], final, mtu).times(loops))
    return total


def _slices(elements: int, slices: int, floor: int) -> tuple[int, ...]:
    """A chunk as messages (nccl-wire 2.7): one, or of SIMPLE rings two, of which the second may be empty."""
    if slices == 1:
        return (elements,)
    first = min(elements, max(-(-elements // 32) * 16, floor))
    return first, elements - first


def _message(plan: CallPlan, elements: int, final: bool, mtu: int) -> Traffic:
    """One message: RETH in its first packet, the immediate in its last, payload padded to 4 bytes."""
    data = elements * plan.elem_bytes
    payload = message_bytes(plan.protocol, data)
    packets = max(1, -(-payload // mtu))
    frames = packets * HEADERS + RETH + IMMEDIATE + -(-payload // 4) * 4
    counted = Traffic(1, packets, payload, frames)
    return counted._replace(final_packets=packets, final_payload=payload, final_data=data) if final else counted
