"""Holding the wire model against observed messages: one hypothesis, many calls, every message checked.

    Walk(topology, wires, ...).take(call)     raises Mismatch, or moves every wire behind the call

A hypothesis is a topology (version, ranks, rings, channels); a call is an operation with its size. `take` plans
the call and compares message by message: start PSN, size, and the LL or LL128 flag where there is one. Messages
that fell into a gap of the capture are stepped over, never invented; a message that the plan does not have, or
of another size, is a Mismatch. Pure; one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from parser.lane import messages

from flowcheck.learn.traffic import Connection, Message, head_flags
from flowcheck.manifest import Collective, dtype_size
from parser.wire import Protocol, Topology, WireError, edge_lane, plan_call

__all__ = ["Mismatch", "Reader", "Seen", "Walk", "Wire", "decode"]

#: What fetches wire bytes: (connection, first PSN, end PSN) of each -> bytes, None where packets are missing.
Reader = Callable[[list[tuple[Connection, int, int]]], list[bytes | None]]

AR_THRESHOLD = 8192
CTS_PROTOCOL = {65536: Protocol.LL, 614400: Protocol.LL128, 1048576: Protocol.SIMPLE, 524288: Protocol.SIMPLE}


class Mismatch(Exception):
    """The hypothesis does not explain the traffic. progress: messages that it did explain."""

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress


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


@dataclass
class Walk:
    """Where a hypothesis has got to. mtu: path MTU. pairs: messages above the threshold leave as AR pairs.
    all_channels: every channel that carries data is taken to be among the wires (nothing else tells their number)."""

    topology: Topology
    wires: list[Wire]
    mtu: int
    pairs: bool
    position: dict[int, _Position] = field(default_factory=dict)
    explained: int = 0
    signature: list[tuple[str, int, int, int, bool]] = field(default_factory=list)
    plans: dict[tuple, list[list[tuple[int, int, int, bool]]]] = field(default_factory=dict)
    all_channels: bool = False

    def __post_init__(self) -> None:
        if not self.position:
            self.position = {i: _Position() for i in range(len(self.wires))}

    def fork(self) -> Walk:
        """A copy that may go another way. Plans are shared: they depend on the topology alone."""
        places = {i: _Position(p.at, p.psn, p.step, p.short) for i, p in self.position.items()}
        return Walk(
            self.topology, self.wires, self.mtu, self.pairs, places, self.explained, list(self.signature), self.plans,
            self.all_channels,
        )  # fmt: skip

    @property
    def done(self) -> bool:
        """Every observed message is explained."""
        return all(p.at >= len(w.connection.messages) for w, p in self._places())

    @property
    def total(self) -> int:
        return sum(len(w.connection.messages) for w in self.wires)

    def _places(self) -> list[tuple[Wire, _Position]]:
        return [(wire, self.position[i]) for i, wire in enumerate(self.wires)]

    def next_messages(self, wire: Wire) -> list[Message]:
        """What was observed on a wire from here on."""
        return wire.connection.messages[self.position[self.wires.index(wire)].at :]

    def protocol(self) -> Protocol:
        """Of the next call: flags in the payload first, then the size that clear-to-send announced."""
        announced: set[Protocol] = set()
        raw = False
        for wire, place in self._places():
            for message in wire.connection.messages[place.at : place.at + 1]:
                kind, flag = head_flags(message.head, message.size)
                if kind and flag == place.step + 1:
                    return Protocol.LL if kind == "ll" else Protocol.LL128
                raw |= message.size > 0 and not kind
            sizes = wire.connection.cts_sizes
            announced |= {CTS_PROTOCOL[s] for s in sizes if s in CTS_PROTOCOL}
        if raw or len(announced) != 1:
            return Protocol.SIMPLE
        return announced.pop()

    def take(self, call: Collective) -> list[Seen]:
        """Explain one call on all wires. Returns the messages of it that were observed. Raises Mismatch."""
        protocol = Protocol[call.protocol.upper()] if call.protocol else self.protocol()
        seen: list[Seen] = []
        taken: dict[tuple[int, int, int], int] = {}
        before = {i: place.short for i, place in self.position.items()}
        for wire, place, planned in zip(
            self.wires, self.position.values(), self._planned(call, protocol), strict=True
        ):
            sliced = protocol == Protocol.SIMPLE and call.op != "Broadcast"
            done, name = place.at, wire.connection.name()
            if planned and sliced:
                place.step = -(-place.step // 4) * 4
            for first, count, wire_bytes, final in planned:
                message = self._match(wire, place, wire_bytes, protocol, call)
                place.short += message is None and place.at >= len(wire.connection.messages)
                if message is not None:
                    seen.append(Seen(wire, message, first, count, protocol, wire_bytes))
                    self.explained += 1
                pair = self.pairs and wire_bytes > AR_THRESHOLD
                place.psn += max(1, -(-wire_bytes // self.mtu)) + pair
                place.step += 2 if sliced else 1
                self.signature.append((name, wire.channel, first, count, final))
            taken[wire.channel, wire.src, wire.dst] = place.at - done
        self._check_order(seen, before, call, taken, 2 if protocol == Protocol.SIMPLE else 1)
        if call.protocol is None and any(s.message.size for s in seen):
            call.protocol = protocol.name.lower()  # every later turn of this call has to use it too
        return seen

    def _check_order(
        self, seen: list[Seen], before: dict[int, int], call: Collective, taken: dict[tuple[int, int, int], int],
        ahead: int,
    ) -> None:  # fmt: skip
        """A rank starts a call when it has received all of the call before, and in an AllReduce its message i needs
        the i before it from its neighbour. So what it receives cannot end earlier - unless packets are missing, and
        the end may be too."""
        if any(w.connection.whole < len(w.connection.messages) for w in self.wires):
            return
        sending = {s.wire.src for s in seen}
        for i, wire in enumerate(self.wires):
            if before[i] and wire.dst in sending:
                raise Mismatch(
                    f"rank {wire.dst} sends in {self._called(call)} without having received the call before it from "
                    f"rank {wire.src}", self.explained,
                )  # fmt: skip
        if call.op != "AllReduce":
            return
        received = {(channel, dst): count for (channel, _, dst), count in taken.items()}
        for (channel, src, _), count in taken.items():
            if count > received.get((channel, src), count) + ahead:
                raise Mismatch(
                    f"rank {src} sends {count} messages of {self._called(call)} and received only "
                    f"{received[channel, src]}", self.explained,
                )  # fmt: skip

    def _planned(self, call: Collective, protocol: Protocol) -> list[list[tuple[int, int, int, bool]]]:
        """Per wire the call's messages: (first, count, wire bytes, final)."""
        key = (call.op, call.count, call.dtype, call.root, protocol)
        if key not in self.plans:
            try:
                plan = plan_call(
                    self.topology, call.op, protocol, call.count, dtype_size(call.dtype), root=call.root
                )
                lanes = [edge_lane(plan, w.channel, w.src, w.dst) for w in self.wires]
            except WireError as error:
                raise Mismatch(str(error), self.explained) from None
            idle = [c for c, s in enumerate(plan.segments) if s and all(w.channel != c for w in self.wires)]
            if self.all_channels and idle:
                raise Mismatch(f"{self._called(call)} would use channel {idle[0]}, not in the captures", self.explained)
            if sum(lane.messages for lane in lanes if lane is not None) > 4 * self.total + 65536:
                raise Mismatch(f"{self._called(call)} would take more messages than were captured", self.explained)
            self.plans[key] = [
                [] if lane is None else [(f, c, b, final) for f, c, b, final, _ in messages(lane)] for lane in lanes
            ]
        return self.plans[key]

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
