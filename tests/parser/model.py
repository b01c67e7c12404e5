"""The state machine as a specification: plain Python, one packet after another, no thought of speed.

    model = Model(plan.engine)
    model.feed(stream, time_ns, frame) -> "placed", "released", ...      the one counter that the packet ends in
    model.finish()
    model.outcomes, model.regions, model.differ, model.flows             what Engine must say as well

Written from the design's section on placing a packet and from the reference on NCCL's wire format, whose sections are
named as (4.2). Only the list of a call's messages is the product's (parser.wire, parser.lane: proven by NCCL's own
code). Where those texts are silent, a rule below says what holds. `Engine` is compared with all of it in test_model.py.

A write is looked at in this order: where is it, may its iteration be placed, is its ICRC right, does a witness
contradict, where do its bytes go.

COUNTED FROM 0   A flow's first packet has PSN 0; or it is young (PSN below 65,536) and some connection was seen to
                 begin. Example: the first packet of the second connection was lost; that of the first one was seen.
                 A flow of which an older PSN came first is in mid-stream: its PSN 0 is a wrap.
                 A packet whose ICRC is wrong says nothing of a place: `icrc` if it reads young, else `unanchored`.
FOUND            Else a packet with a right ICRC says the place: all its LL or LL128 flags name the message at its PSN,
                 or its address is where one of the newest 4 clear-to-sends within 1 MiB wants that message, and another
                 clear-to-send has a number less than 256 from that one's. (Numbers that are laps of the PSN apart lead
                 to the same PSN: one alone cannot say the lap.) Its length has to fit. What lies before it is
                 `unanchored`. An empty piece of a message that is spread over several queue pairs has no address that
                 counts.
ELSEWHERE        Where no clear-to-send of the own stream says the place, those of the other streams are asked: each
                 stream's by itself, in the same way, but only what came within `outage_ns` of the packet, before or
                 after. If any stream wants that message at another address, nobody is believed.
OUTAGE           After a silence of `outage_ns`, any PSN but the one due means that the place is not known any more.
                 If a later packet names a place that was reached already, what waits aside goes on waiting.
BEFORE           A PSN before the flow's history is `unanchored`, whatever its ICRC.
DAMAGED          A wrong ICRC is a loss (`icrc`): the packet is not counted, its right copy may still come. It is looked
                 at for all that may be placed, that has an address or an immediate, that has another PSN than the one
                 due, or that does not fit. Example: a MIDDLE of a partial sum that comes in order is not looked at.
LOST             A witness that disagrees ends its flow: what waits aside is `unanchored`, whatever else of that packet
                 agrees. The flow is counted on, and its packets are `not_synced`.
MADE ANEW        PSN 0 with other contents, when more than 8 messages were reached: another run. The flow is lost. What
                 PSN 0 brought first counts, if that was not after so many messages.
OPENED           Where no connection was seen to begin, the first iteration is that of the first gradient packet.
                 Another stream may open earlier ones as long as nothing was closed.
BLOCKED          An iteration that has no arena yet: the packet is not taken, whatever it carries.
FLAGS            Every line of what may be placed is looked at. Of what nobody keeps, a message's first 128 bytes.
ASIDE            SIMPLE bytes that nothing vouches for wait. They are placed when the first packet of their message
                 agrees, or when a witness agrees at a later PSN and one agreed at an earlier one. Example: FIRST lost,
                 MIDDLE aside, LAST with its immediate agrees: placed if a message before it had agreed. A copy of what
                 waits is `repeated`. When something agrees, what waits of messages more than 64 ago is `unanchored`; so
                 is what still waits at the end.
DIFFERING        A copy of a cell that differs from what came first makes the cell void: it is missing for the rest of
                 its iteration, also if a later copy agrees with one of the two.
EMPTY            Of a final message, what has no byte of the tensor is `released` each time that it comes.

Not covered. Raises: other frames than plain IPv4, unchecked ICRCs, slots that LL cleans, a schedule that ends.
Left out by test_model.py: a second lap of the PSN (connections are too short), packets that come more than 64 messages
late, more than 64 places that were sought in vain, contents that repeat the loop before, forged PSNs, and damage after
which a packet reads PSN 0. Flows that are trusted again have a test of their own (test_trusted_again.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from parser.chunk_layout import Protocol
from parser.engine_config import EdgeSpec, EngineConfig, Target
from parser.nccl import CTS_ELEMENTS

from .model_wire import ACK, FIRST, ONLY, ONLY_IMM, Message, Packet, cells, decode, flags, schedule

WRITES = range(FIRST, ONLY_IMM + 1)
LAP = 1 << 24  # PSNs
YOUNG = 1 << 16
REACH = 1 << 20
IN_FLIGHT = 8  # messages: NCCL's slots
FIFO_SLOTS = 256
REMEMBERED = 64  # messages of a queue pair


@dataclass
class Flow:
    """One data flow as one stream sees it."""

    edge: EdgeSpec
    edge_number: int
    coming: Iterator[Message]
    walked: list[Message] = field(default_factory=list)
    found: bool = False  # the place in the schedule is known: COUNTED FROM 0, or FOUND
    first_anchor: int | None = None  # the lowest PSN where a witness agreed
    lost: bool = False
    in_mid_stream: bool = False
    packets: int = 0
    begin: int = 0  # PSN where its history begins
    due: int = 0  # PSN behind the highest seen
    newest_ns: int | None = None
    seen: set[int] = field(default_factory=set)
    agreed: set[int] = field(default_factory=set)  # messages whose first packet agreed, by number
    bases: dict[Protocol, int] = field(default_factory=dict)  # address of step 0's slot
    aside: list[Final] = field(default_factory=list)
    first_icrc: int | None = None  # of PSN 0, if little came before it
    reached: int = 0  # messages of the connection up to the furthest that was seen
    walked_to: int = 0  # ... and of this queue pair

    def at(self, psn: int) -> Message:
        while not self.walked or self.walked[-1].end <= psn:
            self.walked.append(next(self.coming))
        return next(message for message in reversed(self.walked) if message.psn <= psn)


@dataclass
class Final:
    """The final bytes of a packet: (region byte, up to 8 bytes) each."""

    message: Message
    psn: int
    cells: list[tuple[int, bytes]]


class Model:
    """outcomes: by stream. regions: (target, iteration) -> {cell: its bytes}. differ: cells whose copies differed:
    void (DIFFERING)."""

    def __init__(self, config: EngineConfig) -> None:
        if not config.check_icrc:
            raise NotImplementedError("the model checks every ICRC")
        self.config = config
        self.from_start = False
        self.oldest = 0
        self.begun = -1
        self.outcomes = [Counter[str]() for _ in range(config.streams)]
        self.regions: dict[tuple[Target, int], dict[int, bytes]] = {}
        self.differ: dict[tuple[Target, int], Counter[int]] = {}
        self.flows: dict[tuple[int, int], Flow] = {}
        self._opened, self._opener = 0, -1
        self._announced: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
        self._table = {(spec.src_addr, spec.dst_addr, spec.qpn): i for i, spec in enumerate(config.flows)}

    def look_ahead(self, frames: list[bytes]) -> None:
        """COUNTED FROM 0, of what a capture begins with."""
        psns: dict[int, set[int]] = {}
        for packet in map(decode, frames):
            flow = self._table.get((*packet.ends, packet.qpn))
            if flow is not None and self.config.flows[flow].data and packet.opcode in WRITES and packet.intact:
                psns.setdefault(flow, set()).add(packet.psn)
        self.from_start |= any(0 in seen and max(seen) < YOUNG for seen in psns.values())

    def feed(self, stream: int, time_ns: int, frame: bytes) -> str | None:
        """The packet's counter; None: blocked, its iteration has no arena yet."""
        outcome = self._outcome(stream, time_ns, decode(frame))
        if outcome is not None:
            self.outcomes[stream][outcome] += 1
        return outcome

    def retire(self) -> None:
        self.oldest += 1

    def finish(self) -> None:
        for (stream, _), flow in self.flows.items():
            self._give_up(stream, flow)

    # -- whose packet ----------------------------------------------------------------------------------

    def _outcome(self, stream: int, time_ns: int, packet: Packet) -> str | None:
        index = self._table.get((*packet.ends, packet.qpn))
        if index is None:
            return "other_roce"
        if packet.opcode == ACK:
            return "control"
        spec = self.config.flows[index]
        if not spec.data:
            return self._clear_to_send(stream, spec.edge, time_ns, packet)
        if packet.opcode not in WRITES:
            return "other_roce"
        if (stream, index) not in self.flows:
            edge = self.config.edges[spec.edge]
            self.flows[stream, index] = Flow(edge, spec.edge, schedule(edge, spec.qp, self.config.mtu))
        return self._write(stream, self.flows[stream, index], time_ns, packet)

    def _clear_to_send(self, stream: int, edge: int, time_ns: int, packet: Packet) -> str:
        """5.4: the address of a message to come, and that message's number + 1."""
        if packet.opcode != ONLY or len(packet.payload) not in {element.bytes for element in CTS_ELEMENTS}:
            return "other_roce"
        if not packet.intact:
            return "icrc"
        form = self.config.cts
        if len(packet.payload) == form.bytes:
            address, size, index, key, requests, tag = (
                int.from_bytes(packet.payload[at : at + width], "little")
                for at, width in (
                    (form.address_at, 8), (form.size_at, form.size_width), (form.number_at, 8), (form.rkey_at, 4),
                    (form.requests_at, 4), (form.tag_at, 4),
                )
            )
            if address and key and 0 < size < 1 << 34 and 0 < index < 1 << 48 and 0 < requests <= 8 and tag < 1 << 24:
                self._announced.setdefault((stream, edge), {})[index % FIFO_SLOTS] = index, address, time_ns
        return "control"

    # -- one write: where is it, may it, does anything contradict, where do its bytes go ----------------

    def _write(self, stream: int, flow: Flow, time_ns: int, packet: Packet) -> str | None:
        psn = self._unwrapped(flow, packet)
        silent = flow.newest_ns is not None and time_ns > flow.newest_ns + self.config.outage_ns
        if silent and psn != flow.due:
            if packet.psn == 0 and flow.found and self._made_anew(flow, packet):
                return self._lose(stream, flow)
            flow.found = False
        if not flow.found:
            if not packet.intact:
                young = flow.packets == 0 and not flow.in_mid_stream and packet.psn < YOUNG
                return "icrc" if young else "unanchored"
            if not self._counts_from_0(flow, packet) and not self._find(stream, flow, time_ns, packet):
                flow.in_mid_stream |= packet.intact and packet.psn >= YOUNG
                return "unanchored"
            psn = self._unwrapped(flow, packet)
        if psn < flow.begin:
            return "unanchored"
        if psn != flow.due and not packet.intact:
            return "icrc"
        if flow.lost:
            self._count(flow, psn)
            return "not_synced"
        if psn == 0 and self._made_anew(flow, packet):
            return self._lose(stream, flow)
        message = flow.at(psn)
        flow.reached = max(flow.reached, message.number + 1)
        flow.walked_to = max(flow.walked_to, flow.walked.index(message) + 1)
        if message.target == Target.GRADIENT and not self._opens(stream, message.iteration):
            return None
        index = psn - message.psn
        wanted = message.final and message.target != Target.NOTHING and index < message.packets
        plain = packet.address is None and packet.immediate is None and self._fits(message, index, packet)
        if (wanted or not plain) and not packet.intact:
            return "icrc"
        flow.newest_ns = time_ns
        self.from_start |= psn == 0
        again = self._count(flow, psn)
        if message.target == Target.GRADIENT:
            self.begun = max(self.begun, message.iteration)
        agrees = self._witnesses(stream, flow, message, index, packet, wanted)
        if agrees is None:
            return self._lose(stream, flow)
        if agrees:
            self._settle(stream, flow, psn)
        if not wanted:
            return "repeated" if again else "released"
        start = message.piece + index * self.config.mtu
        final = Final(message, psn, [
            (message.start + data, eight[: message.data - data])
            for data, eight in cells(message.protocol, start, packet.payload) if data < message.data
        ])
        if agrees or message.number in flow.agreed:
            return self._place(final)
        if again:
            return "repeated"
        flow.aside.append(final)
        return "aside"

    # -- where is it -----------------------------------------------------------------------------------

    def _unwrapped(self, flow: Flow, packet: Packet) -> int:
        return flow.due + (packet.psn - flow.due + LAP // 2) % LAP - LAP // 2

    def _count(self, flow: Flow, psn: int) -> bool:
        """Was it seen before?"""
        again = psn in flow.seen
        flow.seen.add(psn)
        flow.packets += 1
        flow.due = max(flow.due, psn + 1)
        return again

    def _counts_from_0(self, flow: Flow, packet: Packet) -> bool:
        begins = packet.psn == 0 or (self.from_start and packet.psn < YOUNG)
        flow.found = flow.packets == 0 and not flow.in_mid_stream and begins
        return flow.found

    def _find(self, stream: int, flow: Flow, time_ns: int, packet: Packet) -> bool:
        """FOUND."""
        if not packet.intact:
            return False
        message = flow.at(packet.psn)
        index = packet.psn - message.psn
        offset = message.piece + index * self.config.mtu
        said = flags(message.protocol, packet.payload)
        by_flag = bool(said) and all(flag == message.step + 1 for flag in said)
        by_address = packet.address is not None and (
            self._announces(stream, flow, time_ns, packet.address, message.number + 1, packet.address - offset)
        )
        fits = index < message.packets and len(packet.payload) == message.length(index, self.config.mtu)
        if not fits or not (by_flag or by_address):
            return False
        flow.found = True
        if not (flow.packets and message.number < flow.reached and packet.psn <= flow.due):
            self._give_up(stream, flow)
            flow.seen.clear()
            flow.agreed.clear()
            flow.begin = flow.due = packet.psn
            flow.reached = message.number + 1
            flow.walked_to = flow.walked.index(message) + 1
            flow.first_anchor = packet.psn
        return True

    def _announces(self, stream: int, flow: Flow, time_ns: int, address: int, index: int, buffer: int) -> bool:
        """FOUND, ELSEWHERE."""
        own = {i: at for i, at, _ in self._announced.get((stream, flow.edge_number), {}).values()}
        if (index, buffer) in self._near(own, address):
            return True
        others = [
            {i: at for i, at, time in table.values() if abs(time - time_ns) <= self.config.outage_ns}
            for (other, edge), table in self._announced.items() if edge == flow.edge_number and other != stream
        ]
        said = any((index, buffer) in self._near(table, address) for table in others)
        return said and all(table.get(index, buffer) == buffer for table in [own, *others])

    def _near(self, announced: dict[int, int], address: int) -> list[tuple[int, int]]:
        near = sorted((i, at) for i, at in announced.items() if at <= address < at + REACH)[-4:]
        return [one for one in near if any(0 < abs(other - one[0]) < FIFO_SLOTS for other in announced)]

    def _made_anew(self, flow: Flow, packet: Packet) -> bool:
        if not packet.intact:
            return False
        early = flow.reached <= IN_FLIGHT + flow.edge.qps
        if flow.packets == 0 or (flow.first_icrc is None and early):
            flow.first_icrc = packet.icrc
        return flow.first_icrc not in (None, packet.icrc) and not early

    # -- may it ----------------------------------------------------------------------------------------

    def _opens(self, stream: int, iteration: int) -> bool:
        """OPENED, BLOCKED."""
        if iteration > self.oldest:
            if self.begun < 0 and not self.from_start:
                self.oldest = self._opened = iteration
                self._opener = stream
            return iteration < self.oldest + self.config.arenas
        earlier = iteration < self._opened and stream != self._opener
        if earlier and self.oldest == self._opened and self.begun < iteration + self.config.arenas:
            self.oldest = self._opened = iteration
        return True

    # -- does anything contradict ----------------------------------------------------------------------

    def _fits(self, message: Message, index: int, packet: Packet) -> bool:
        return packet.opcode in message.opcodes(index) and len(packet.payload) == message.length(index, self.config.mtu)

    def _witnesses(
        self, stream: int, flow: Flow, message: Message, index: int, packet: Packet, wanted: bool
    ) -> bool | None:
        """None: one disagrees. True: one agrees. False: the packet carries none."""
        if not self._fits(message, index, packet):
            return None
        agrees = False
        if packet.immediate is not None:
            order: Any = "big" if flow.edge.imm_big_endian else "little"
            if int.from_bytes(packet.immediate, order) != message.total:
                return None
            agrees = True
        if packet.address is not None:
            offset = index * self.config.mtu
            rest = message.size - offset if index < message.packets else 0
            if packet.length != rest and (packet.opcode != ONLY or packet.length != len(packet.payload)):
                return None
            if index < message.packets and (message.size or flow.edge.used == 1):
                slot = packet.address - message.piece - offset
                base = slot - message.step % 8 * message.slot_bytes
                table = self._announced.get((stream, flow.edge_number), {})
                said, announced, _ = table.get((message.number + 1) % FIFO_SLOTS, (0, 0, 0))
                if flow.bases.setdefault(message.protocol, base) != base:
                    return None
                if said == message.number + 1 and announced != slot:
                    return None
                if index == 0:
                    flow.agreed.add(message.number)
            agrees = True
        shown = packet.payload if wanted else packet.payload[:128] if index == 0 else b""
        said_steps = flags(message.protocol, shown)
        if any(flag != message.step + 1 for flag in said_steps):
            return None
        return agrees or bool(said_steps)

    def _lose(self, stream: int, flow: Flow) -> str:
        self._give_up(stream, flow)
        flow.lost = True
        return "disagreed"

    # -- where do its bytes go -------------------------------------------------------------------------

    def _place(self, final: Final) -> str:
        message, new = final.message, False
        when = (message.target, message.iteration if message.target == Target.GRADIENT else 0)
        if message.target == Target.GRADIENT and message.iteration < self.oldest:
            return "late"
        if not final.cells:
            return "released"
        region = self.regions.setdefault(when, {})
        for byte, data in final.cells:
            if byte % 8:
                raise NotImplementedError("the model places whole cells")
            new |= byte // 8 not in region
            if region.setdefault(byte // 8, data) != data:
                self.differ.setdefault(when, Counter())[byte // 8] += 1
        return "placed" if new else "compared"

    def _settle(self, stream: int, flow: Flow, psn: int) -> None:
        """ASIDE: a witness agreed at `psn`."""
        flow.first_anchor = psn if flow.first_anchor is None else min(psn, flow.first_anchor)
        waiting, flow.aside = flow.aside, []
        for final in waiting:
            if final.message.number in flow.agreed or flow.first_anchor < final.psn <= psn:
                outcome = self._place(final)
            elif flow.walked.index(final.message) + REMEMBERED < flow.walked_to:
                outcome = "unanchored"
            else:
                flow.aside.append(final)
                continue
            self.outcomes[stream]["aside"] -= 1
            self.outcomes[stream][outcome] += 1

    def _give_up(self, stream: int, flow: Flow) -> None:
        self.outcomes[stream]["aside"] -= len(flow.aside)
        self.outcomes[stream]["unanchored"] += len(flow.aside)
        flow.aside.clear()
