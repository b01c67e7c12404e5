"""An observer of messages, their starts and TCP bytes: what it keeps, what it must not trust."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.observer import START_DTYPE, Observer
from scapy.all import IP, TCP, Dot1Q, Ether, IPv6, Raw

from lab.synth import example_job, generate


@pytest.fixture(scope="module")
def packets() -> list[tuple[int, bytes]]:
    return generate(example_job(count=5000), iterations=2).packets


def test_starts_are_every_message(packets) -> None:
    trace = Observer(messages=True)
    for timestamp, frame in packets:
        trace.add(frame, timestamp)
    starts = trace.start_records()
    assert starts.dtype == START_DTYPE and len(starts) == sum(1 for _ in starts)
    assert trace.counters()["packets"] == len(packets) and trace.counters()["wrong_icrc"] == 0
    assert set(starts["opcode"].tolist()) <= {6, 9, 10, 11}
    firsts = starts[starts["opcode"] == 6]
    assert (firsts["length"] > firsts["payload"]).all() and (np.diff(starts["ns"].astype("i8")) >= 0).all()


def test_requested_payloads_are_the_wire_bytes(packets) -> None:
    trace = Observer(messages=True)
    for _, frame in packets:
        trace.add(frame)
    starts, flows = trace.start_records(), trace.flow_list()
    first = starts[starts["opcode"] == 6][0]
    flow = flows[first["flow"]]
    count = -(-int(first["length"]) // 4096)
    again = Observer(requests=[(flow["src"], flow["dst"], flow["id"], int(first["psn"]), int(first["psn"]) + count)])
    for _, frame in packets:
        again.add(frame)
    pieces = again.payloads()
    assert len(again.start_records()) == 0 and again.tcp_segments() == []
    assert [psn for _, psn, _ in pieces] == list(range(int(first["psn"]), int(first["psn"]) + count))
    wire = b"".join(data for _, _, data in pieces)
    assert len(wire) == first["length"] and wire[:128] == first["head"].tobytes()


def test_a_wrong_icrc_is_not_believed(packets) -> None:
    trace = Observer(messages=True)
    for _, frame in packets:
        trace.add(frame[:-5] + bytes([frame[-5] ^ 1]) + frame[-4:])
    assert len(trace.start_records()) == 0 and trace.counters()["wrong_icrc"] > 0


@pytest.mark.parametrize("build", [
    lambda p: Ether() / IP(src="10.0.0.1", dst="10.0.0.2") / p,
    lambda p: Ether() / Dot1Q(vlan=7) / IP(src="10.0.0.1", dst="10.0.0.2", options=[]) / p,
    lambda p: Ether() / IPv6(src="fd00::1", dst="fd00::2") / p,
])
def test_tcp_payload(build) -> None:
    trace = Observer(messages=True)
    trace.add(bytes(build(TCP(sport=1, dport=2, seq=10, flags="S"))).ljust(60, b"\0"))
    trace.add(bytes(build(TCP(sport=1, dport=2, seq=11, flags="A"))).ljust(60, b"\0"))  # nothing in it
    trace.add(bytes(build(TCP(sport=1, dport=2, seq=11, flags="PA", options=[("NOP", None)] * 4) / Raw(b"hello"))))
    assert [(seq, flags & 2, data) for _, seq, flags, data in trace.tcp_segments()] == [(10, 2, b""), (11, 0, b"hello")]
    (flow,) = trace.flow_list()
    assert flow["tcp"] and flow["id"] == 1 << 16 | 2


def test_tcp_bytes_are_bounded() -> None:
    trace = Observer(messages=True)
    for i in range(900):
        part = TCP(sport=1, dport=2, seq=i * 1400, flags="A") / Raw(bytes(1400))
        trace.add(bytes(Ether() / IP(src="10.0.0.1", dst="10.0.0.2") / part))
    (flow,) = trace.flow_list()
    assert sum(len(data) for _, _, _, data in trace.tcp_segments()) <= 1 << 20 and flow["dropped"] > 0


def test_encryption_is_counted() -> None:
    trace = Observer(messages=True)
    trace.add(bytes(Ether(type=0x88E5) / Raw(bytes([0x0C]) + bytes(59))))
    trace.add(bytes(Ether() / IP(proto=50) / Raw(bytes(60))))
    assert trace.counters()["encrypted"] == 2


def test_requests_are_checked() -> None:
    with pytest.raises(ValueError, match="4 or 16 bytes"):
        Observer(requests=[(b"abc", b"abc", 1, 0, 1)])
    with pytest.raises(ValueError, match="at most"):
        Observer(requests=[(bytes(4), bytes(4), 1, 0, 1)] * 5000)


@settings(max_examples=300)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x08\x00\x45", b"\x86\xdd\x60", b"\x81\x00\x00\x01\x08\x00\x45"]),
)
def test_any_frame(body: bytes, kind: bytes) -> None:
    trace = Observer(messages=True)
    frame = bytes(12) + kind + body
    trace.add(frame)
    trace.add(frame[: len(frame) // 2])
    trace.flow_list(), trace.start_records(), trace.tcp_segments()
    if len(frame) >= 34:
        trace.add(frame[:23] + struct.pack("B", 6) + frame[24:])


def test_an_observer_of_messages_has_no_counts() -> None:
    with pytest.raises(ValueError, match="keeps messages"):
        Observer(messages=True).report()
