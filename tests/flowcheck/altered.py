"""Captures of two mirrors that differ: one payload byte of a packet changed, its ICRC made right again.

    spot = spots(made, "ll", flow.qpns[0], iteration=2)[0]      a message that carries reduced gradients
    other, offset = altered(made.packets, spot, packet=1, byte=4)

Where a byte lies is found from synth's truth: the message's bytes are looked for in the reduced bucket.
Frames are IPv4 without a VLAN tag.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from lab.synth import Synthesis
from lab.synth.encode import positions

Packet = tuple[int, bytes]

FIRST, MIDDLE, LAST, LAST_IMM, ONLY, ONLY_IMM = 6, 7, 8, 9, 10, 11
PAYLOAD_AT = {FIRST: 70, MIDDLE: 54, LAST: 54, LAST_IMM: 58, ONLY: 70, ONLY_IMM: 74}


def opcode(frame: bytes) -> int:
    return frame[42]


def destination(frame: bytes) -> int:
    """QP number."""
    return int.from_bytes(frame[47:50], "big")


def psn(frame: bytes) -> int:
    return int.from_bytes(frame[51:54], "big")


def payload(frame: bytes) -> bytes:
    return frame[PAYLOAD_AT[opcode(frame)] : -4]


def sealed(frame: bytes) -> bytes:
    """The frame with the ICRC that its other bytes ask for."""
    body = bytearray(frame[14:-4])
    for at in (1, 8, 10, 11, 26, 27, 32):  # ToS, TTL, both checksums, BTH's reserved byte
        body[at] = 0xFF
    return frame[:-4] + zlib.crc32(b"\xff" * 8 + bytes(body)).to_bytes(4, "little")


@dataclass(frozen=True)
class Spot:
    """A message that carries reduced bytes. packets: their places in the capture. start: its first byte in the bucket.
    wire: place of each of its data bytes in the message."""

    packets: tuple[int, ...]
    start: int
    wire: np.ndarray


def messages(packets: list[Packet], qpn: int) -> list[list[int]]:
    """Places of the packets of every message to a QP, in order."""
    out: list[list[int]] = []
    for at, (_, frame) in enumerate(packets):
        if destination(frame) == qpn and opcode(frame) in PAYLOAD_AT and len(payload(frame)):
            if opcode(frame) in (FIRST, ONLY, ONLY_IMM):
                out.append([])
            out[-1].append(at)
    return out


def spots(made: Synthesis, protocol: str, qpn: int, iteration: int, bucket: int = 0) -> list[Spot]:
    """The messages of a QP that carry reduced bytes of a bucket."""
    truth, packets, out = made.reduced[iteration, bucket].tobytes(), made.packets, []
    for places in messages(packets, qpn):
        wire = np.frombuffer(b"".join(payload(packets[at][1]) for at in places), np.uint8)
        count = {"ll": len(wire) // 2, "ll128": len(wire) // 16 * 15, "simple": len(wire)}[protocol]
        where = positions(protocol, count)
        data = wire[where].tobytes()
        start = truth.find(data[:48])
        if start >= 0 and len(data) >= 48:
            out.append(Spot(tuple(places), start, where[: len(truth) - start]))
    return out


def altered(
    packets: list[Packet], spot: Spot, packet: int, byte: int, cell: int = 5, flip: int = 1
) -> tuple[list[Packet], int]:
    """The capture with one byte changed, and which byte of the bucket the changed cell begins at.

    packet: of the message. cell: of those that the packet carries. byte: of the cell, 0 to 7. flip: bits to be changed.
    """
    before = sum(len(payload(packets[at][1])) for at in spot.packets[:packet])
    at = spot.packets[packet]
    time, frame = packets[at]
    cells = [c for c, place in enumerate(spot.wire[::8]) if 0 <= place - before < len(payload(frame))]
    place = PAYLOAD_AT[opcode(frame)] + int(spot.wire[8 * cells[cell] + byte]) - before
    changed = sealed(frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :])
    return [*packets[:at], (time, changed), *packets[at + 1 :]], spot.start + 8 * cells[cell]
