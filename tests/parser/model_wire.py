"""What the model of the state machine knows of the wire: a packet decoded, a flow's messages listed.

Section numbers: the reference on NCCL's wire format. A call's list of messages is the product's (parser.lane); where
they lie in steps, PSNs and queue pairs is worked out here, and so are the places of a packet's bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from parser.lane import messages

from parser.chunk_layout import Protocol
from parser.engine_config import EdgeSpec, Phase, Target

FIRST, MIDDLE, LAST, LAST_IMM, ONLY, ONLY_IMM, ACK = 6, 7, 8, 9, 10, 11, 17
WITH_RETH, WITH_IMM = (FIRST, ONLY, ONLY_IMM), (LAST_IMM, ONLY_IMM)
CLEANED = 0x7FFFFFF8


# -- a packet ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packet:
    """A RoCEv2 packet over IPv4. address, length: of its RETH; immediate: as on the wire. None: it has none."""

    ends: tuple[bytes, bytes]
    qpn: int
    opcode: int
    psn: int
    payload: bytes
    address: int | None
    length: int | None
    immediate: bytes | None
    icrc: int
    intact: bool  # its ICRC is right


def decode(frame: bytes) -> Packet:
    """Ethernet, IPv4 without options, UDP 4791, BTH; the headers of writes and acknowledgements."""
    ip, at = frame[14:], 54
    if frame[12:14] != b"\x08\x00" or ip[0] != 0x45 or ip[9] != 17 or ip[22:24] != (4791).to_bytes(2, "big"):
        raise NotImplementedError("the model reads plain IPv4 frames of RoCEv2")
    opcode, pad = frame[42], frame[43] >> 4 & 3
    address = length = immediate = None
    if opcode in WITH_RETH:
        address, _, length = struct.unpack_from(">QII", frame, at)
        at += 16
    if opcode in WITH_IMM:
        immediate = frame[at : at + 4]
        at += 4
    if opcode == ACK:
        at += 4
    masked = bytearray(ip[:-4])
    for mutable in (1, 8, 10, 11, 26, 27, 32):  # ToS, TTL, both checksums, a reserved byte of the BTH
        masked[mutable] = 0xFF
    icrc = int.from_bytes(frame[-4:], "little")
    return Packet(
        (ip[12:16], ip[16:20]), int.from_bytes(frame[47:50], "big"), opcode, int.from_bytes(frame[51:54], "big"),
        frame[at : len(frame) - 4 - pad], address, length, immediate, icrc, zlib.crc32(b"\xff" * 8 + masked) == icrc,
    )


def flags(protocol: Protocol, payload: bytes) -> list[int]:
    """Every flag of a packet (4.1, 4.2)."""
    if protocol == Protocol.LL:
        return [flag for at in range(0, len(payload) - 15, 16) for flag in struct.unpack_from("<4xI4xI", payload, at)]
    if protocol == Protocol.LL128:
        return [struct.unpack_from("<Q", payload, at + 120)[0] for at in range(0, len(payload) - 127, 128)]
    return []


def cells(protocol: Protocol, start: int, payload: bytes) -> Iterator[tuple[int, bytes]]:
    """(byte of the message's data, 8 bytes that lie there), of wire bytes that begin at byte `start` of the message."""
    if protocol == Protocol.LL:
        for at in range(0, len(payload), 16):
            yield (start + at) // 2, payload[at : at + 4] + payload[at + 8 : at + 12]
    elif protocol == Protocol.SIMPLE:
        for at in range(0, len(payload), 8):
            yield start + at, payload[at : at + 8]
    else:
        for at in range(0, len(payload), 8):
            half, place = divmod((start + at) // 8, 128)
            line, word = divmod(place, 16)
            if word == 15:
                continue
            if line < 4:
                data = 128 * line + 8 * word
            elif word < 14:
                data = 512 + 112 * (line - 4) + 8 * word
            else:
                data = 128 * (line - 4) + 120
            yield 960 * half + data, payload[at : at + 8]


# -- the schedule --------------------------------------------------------------------------------------


@dataclass
class Message:
    """What one queue pair carries of one message. psn: of its first packet, counted from the connection's beginning."""

    psn: int
    packets: int
    pair: bool  # an empty write with the immediate follows (adaptive routing)
    number: int
    step: int
    protocol: Protocol
    size: int  # wire bytes on this queue pair, ...
    piece: int  # ... which begin at this byte ...
    total: int  # ... of the message's
    slot_bytes: int
    iteration: int
    target: Target
    final: bool
    start: int  # region byte of its first data byte
    data: int  # bytes of data in the whole message

    @property
    def end(self) -> int:
        return self.psn + self.packets + self.pair

    def length(self, index: int, mtu: int) -> int:
        """Payload bytes of packet `index`; the empty write of a pair comes after the others."""
        return min(mtu, self.size - index * mtu) if index < self.packets else 0

    def opcodes(self, index: int) -> set[int]:
        """What packet `index` may be. A sender that goes back may begin again anywhere, under a fresh RETH (5.7)."""
        if index == self.packets:
            return {ONLY_IMM}
        if index == self.packets - 1:
            whole, last = (ONLY, LAST) if self.pair else (ONLY_IMM, LAST_IMM)
            return {whole, last} if index else {whole}
        begins = {FIRST, ONLY} if self.pair else {FIRST}  # a NIC may cut the plain write of a pair (5.2)
        return begins | {MIDDLE} if index else begins


def schedule(edge: EdgeSpec, qp: int, mtu: int) -> Iterator[Message]:
    """All that one queue pair of a connection carries, for ever (1, 5.2, 5.3, 5.6)."""
    step = number = psn = 0
    steady = [call for call in edge.calls if call.phase == Phase.STEADY]
    calls = [(0, call) for call in edge.calls if call.phase <= Phase.ITERATION_0]
    calls += [(1, call) for call in edge.calls if call.phase == Phase.REBUILD]
    iteration, before = 0, -1
    while iteration < 2 or number > before:
        before = number
        for when, call in calls:
            lane = call.lane
            if lane is None:
                continue
            step = -(-step // lane.step_align) * lane.step_align
            for first, count, total, final, _ in messages(lane):
                if lane.protocol == Protocol.LL and step & CLEANED == CLEANED:
                    raise NotImplementedError("the model does not clean slots")
                each = total if edge.used == 1 else -(-total // (edge.used * 128)) * 128
                for i in range(edge.used):
                    if (number * edge.used + i) % edge.qps == qp:
                        piece = min(i * each, total)
                        size = min(each, total - piece)
                        pair = edge.ar_above is not None and total > edge.ar_above
                        message = Message(
                            psn, max(1, -(-size // mtu)), pair, number, step, lane.protocol, size, piece, total,
                            lane.slot_bytes, when, call.target, final, call.base + first * lane.elem_bytes,
                            count * lane.elem_bytes,
                        )
                        yield message
                        psn = message.end
                number += 1
                step += lane.step_inc
        iteration += 1
        calls = [(iteration, call) for call in steady]
    raise NotImplementedError("the model has no end of the schedule")
