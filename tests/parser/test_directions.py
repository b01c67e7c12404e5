"""Which flows are one connection, and what is said of those whose other direction is not known or not there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parser.observer import Observer
from parser.roce import Roce, decode

from parser.findings import interpret

RING = Path(__file__).parents[2] / "pcaps" / "ring2-ll.pcap"
#: Destination queue pair of a flow -> its sender's, which is where the other direction goes.
SENDER = {0x44AAFF: 0x5FCB32, 0x5FCB32: 0x44AAFF, 0x5FCB34: 0x44AB01, 0x44AB01: 0x5FCB34}


def frames() -> Iterator[tuple[bytes, Roce]]:
    raw, at = RING.read_bytes(), 24
    while at < len(raw):
        end = at + 16 + struct.unpack_from("<I", raw, at + 8)[0]
        packet = decode(raw[at + 16 : end])
        assert isinstance(packet, Roce)
        yield raw[at + 16 : end], packet
        at = end


def with_port(frame: bytes, port: int) -> bytes:
    changed = frame[:34] + port.to_bytes(2, "big") + frame[36:]
    packet = decode(changed)
    assert isinstance(packet, Roce)
    return changed[:-4] + packet.icrc.to_bytes(4, "little")


def survey(port: Callable[[int], int], keep: Callable[[Roce], bool] = lambda packet: True) -> dict[str, Any]:
    observer = Observer()
    for frame, packet in frames():
        if keep(packet):
            observer.add(with_port(frame, port(packet.dest_qp)))
    return interpret(observer.report())


@pytest.mark.parametrize("port", [
    lambda qp: SENDER[qp] & 0x3FFF | 0xC000, lambda qp: SENDER[qp] & 0xFFFF,
], ids=["14 bits", "16 bits"])
def test_a_port_that_is_the_senders_queue_pair_pairs_both_directions(port: Callable[[int], int]) -> None:
    found = survey(port)
    assert {(c["data_qp"], c["back_qp"]) for c in found["connections"]} == {(0x44AAFF, 0x5FCB32), (0x5FCB34, 0x44AB01)}
    assert {c["paired_by"] for c in found["connections"]} == {"UDP source port"}
    assert {flow["partner"] for flow in found["flows"]} == {"captured"}
    assert not any("direction" in note["text"] for note in found["notes"])


def test_ports_that_say_nothing_leave_the_partner_unknown() -> None:
    """Without a clear-to-send there is no address either: two flows each way, and nothing says which is whose."""
    answers = (0x44AB01, 0x5FCB32)
    found = survey(lambda qp: 50000 + qp % 7, lambda packet: packet.dest_qp not in answers or packet.opcode == 0x11)
    assert not found["connections"] and {flow["partner"] for flow in found["flows"]} == {"unknown"}
    assert not any(note["level"] == "warning" and "not captured" in note["text"] for note in found["notes"])


def test_a_direction_that_is_not_there_is_said() -> None:
    found = survey(lambda qp: 50000, lambda packet: packet.src == "10.0.0.1")
    assert {flow["partner"] for flow in found["flows"]} == {"absent"}
    assert any(note["level"] == "warning" and "was not captured" in note["text"] for note in found["notes"])


def test_packets_that_could_not_be_read_may_be_the_other_direction() -> None:
    observer = Observer()
    for frame, packet in frames():
        observer.add(frame if packet.src == "10.0.0.1" else frame[:60])
    assert {flow["partner"] for flow in interpret(observer.report())["flows"]} == {"unknown"}
