"""Other traffic beside RoCE, and what is kept of messages and TCP: told apart by all that tells it apart."""

from __future__ import annotations

import random
import struct

import pytest
from parser.observer import Observer
from scapy.all import IP, TCP, Dot1Q, Ether, IPv6, IPv6ExtHdrHopByHop, PadN, Raw

from .test_observer_counts import FIRST, LAST_IMM, ONLY, ONLY_IMM, SEND_ONLY, A, B, frame, imm, noise, reth, survey

MAGIC = (0x564AB9F2FC4B9D6C).to_bytes(8, "little")
C = b"\x0a\0\0\3"


def tcp(data: bytes, **options: object) -> object:
    return TCP(sport=1, dport=2, seq=100, flags="PA", **options) / Raw(data)


def ipv4(payload: object, **options: object) -> bytes:
    return bytes(Ether() / IP(src="10.0.0.1", dst="10.0.0.2", **options) / payload)


# -- other traffic ----------------------------------------------------------------------------------------


TAGGED = bytes(Ether() / Dot1Q(vlan=7) / Dot1Q(vlan=9) / IP(src="10.0.0.1", dst="10.0.0.2") / tcp(b"x"))
LONG = IPv6ExtHdrHopByHop(options=[PadN(optdata=bytes(20))])


@pytest.mark.parametrize(("raw", "kind"), [
    (TAGGED, "tcp"), (ipv4(tcp(b"x"), proto=1), "icmp"), (ipv4(tcp(b"x"), proto=2), "igmp"),
    (bytes(Ether() / IPv6(src="fd00::1", dst="fd00::2") / LONG / tcp(b"x")), "tcp"),
    (bytes(Ether() / IPv6(src="fd00::1", dst="fd00::2", nh=58) / Raw(bytes(40))), "icmpv6"),
], ids=["two tags", "icmp", "igmp", "IPv6 options", "icmpv6"])
def test_traffic_is_of_its_kind_whatever_stands_before_it(raw: bytes, kind: str) -> None:
    assert survey(raw)["noise"] == {kind: 1}


@pytest.mark.parametrize(("raw", "seen"), [
    (ipv4(tcp(MAGIC)), 1), (ipv4(tcp(MAGIC, options=[("NOP", None)] * 4)), 1),
    (ipv4(tcp(MAGIC), options=[b"\x01" * 8]), 1),
    (bytes(Ether() / IPv6(src="fd00::1", dst="fd00::2") / LONG / tcp(MAGIC)), 1),
    (ipv4(tcp(MAGIC[:4] + bytes(4))), 0), (ipv4(tcp(b"\0" + MAGIC)), 0), (ipv4(tcp(MAGIC[:7])), 0),
], ids=["plain", "TCP options", "IP options", "IPv6 options", "half", "later", "cut"])
def test_nccls_bootstrap_is_known_by_its_first_eight_bytes(raw: bytes, seen: int) -> None:
    assert survey(raw)["bootstrap_handshakes"] == seen


# -- TCP that is kept -------------------------------------------------------------------------------------


def segments(*raws: bytes) -> list[bytes]:
    trace = Observer(messages=True)
    for raw in raws:
        trace.add(raw)
    return [data for _, _, _, data in trace.tcp_segments()]


def test_a_segment_ends_where_its_packet_says() -> None:
    assert segments(ipv4(tcp(b"ab")).ljust(64, b"\x55")) == [b"ab"]  # the frame was padded
    assert segments(bytes(Ether() / IPv6(src="fd00::1", dst="fd00::2") / tcp(b"ab")).ljust(90, b"\x55")) == [b"ab"]
    assert segments(ipv4(tcp(bytes(100)))[:-1]) == []  # and here it was cut


def test_what_is_no_segment_is_not_kept() -> None:
    whole = ipv4(tcp(bytes(range(64))))
    for flags in (0x2000, 0x0001, 0x1FFF):  # more fragments follow; not the first one
        assert segments(whole[:20] + struct.pack(">H", flags) + whole[22:]) == []
    assert segments(whole[:20] + b"\x40\0" + whole[22:]) == [bytes(range(64))]
    assert segments(ipv4(TCP(sport=1, dport=2, seq=5, flags="A"))) == []  # an acknowledgement
    assert segments(ipv4(TCP(sport=1, dport=2, seq=5, flags="S"))) == [b""]


# -- flows and messages -----------------------------------------------------------------------------------


def write(psn: int, **ends: object) -> bytes:
    return frame(ONLY_IMM, psn, noise(64, psn), extra=reth(0x1000, 64) + imm(64), **ends)  # type: ignore[arg-type]


def test_a_flow_is_its_source_its_destination_and_its_number() -> None:
    raws = [write(0), write(0, dst=C), write(0, src=C), write(0, qp=0x21)]
    assert [one["packets"] for one in survey(*raws, *raws)["flows"]] == [2] * 4
    trace = Observer(messages=True)
    for raw in (*raws, ipv4(TCP(sport=0, dport=0x20, seq=1, flags="S"))):  # ports that read as a queue pair's number
        trace.add(raw)
    assert sorted((one["tcp"], one["packets"]) for one in trace.flow_list()) == [(False, 1)] * 4 + [(True, 1)]


def test_flows_that_want_one_place_of_the_table_stay_apart() -> None:
    """Thousands that differ in their destination; and TCP ports that read as a queue pair's number between the same
    hosts, for numbers that the table's hash sends to one place with them."""
    hosts = {random.Random(number).randbytes(4) for number in range(8000)}
    found = survey(*(frame(SEND_ONLY, 0, b"data", dst=host) for host in hosts))["flows"]
    assert len(found) == len(hosts) > 7900 and {one["packets"] for one in found} == {1}
    trace = Observer(messages=True)
    syn = ipv4(TCP(sport=0, dport=0, seq=1, flags="S"))
    for number in (778556, 792845, 965159, 1134491):
        trace.add(frame(ONLY, 0, b"data", extra=reth(0x1000, 4), qp=number))
        trace.add(syn[:34] + struct.pack(">I", number) + syn[38:])
    assert [(one["tcp"], one["packets"]) for one in trace.flow_list()] == [(False, 1), (True, 1)] * 4


def test_only_what_is_whole_and_right_begins_a_message() -> None:
    trace = Observer(messages=True)
    trace.add(write(0))
    trace.add(write(1), wire_length=4000)
    trace.add(write(2, damage=1))
    trace.add(frame(FIRST, 3, noise(1024), extra=reth(0x1000, 2000)))
    trace.add(frame(LAST_IMM, 4, noise(976), extra=imm(2000)))
    starts = trace.start_records()
    assert starts["psn"].tolist() == [0, 3, 4]
    assert [int(one).to_bytes(4, "big") for one in starts["imm"]] == [imm(64), bytes(4), imm(2000)]
    assert (trace.counters()["cut"], trace.counters()["wrong_icrc"]) == (1, 1)


def test_messages_are_numbered_over_the_laps_of_the_psn() -> None:
    trace = Observer(messages=True)
    for psn in (0xFFFFFE, 0xFFFFFF, 0, 0xFFFFFD, 1, 0x7FFFFF, 0xFFFFFE, 0):
        trace.add(write(psn))
    lap = 1 << 24
    assert trace.start_records()["psn"].tolist() == [
        lap - 2, lap - 1, lap, lap - 3, lap + 1, lap + 0x7FFFFF, 2 * lap - 2, 2 * lap]


def test_payload_is_kept_of_the_range_of_one_flow() -> None:
    trace = Observer(requests=[(A, B, 0x20, 3, 6)])
    for psn in range(10):
        for raw in (write(psn), write(psn, dst=C), write(psn, src=C), write(psn, qp=0x21)):
            trace.add(raw)
    assert [(psn, data) for _, psn, data in trace.payloads()] == [(psn, noise(64, psn)) for psn in (3, 4, 5)]


def test_messages_that_find_no_room_are_counted() -> None:
    trace = Observer(messages=True)
    raw = frame(ONLY, 0, b"", extra=reth(0x1000, 0))
    while not (dropped := trace.flow_list() and trace.flow_list()[0]["dropped"]):
        before = len(trace.start_records())
        for _ in range(10_000):
            trace.add(raw)
        assert len(trace.start_records()) > before or trace.flow_list()[0]["dropped"], "no end of room"
    (flow,) = trace.flow_list()
    assert flow["packets"] == len(trace.start_records()) + dropped


def test_a_survey_lasts_to_its_latest_packet() -> None:
    one = Observer()
    for psn, ns in enumerate((50, 90, 70)):
        one.add(frame(SEND_ONLY, psn, b"data"), timestamp_ns=ns)
    assert (one.report()["first_ns"], one.report()["last_ns"]) == (50, 90)
