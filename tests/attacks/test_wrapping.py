"""What switches put around a mirrored frame: unpacked where its form is known, counted by name or number elsewhere."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from parser.observer import Observer
from parser.roce import Roce, decode

ROOT = Path(__file__).parents[2]
RECORD = (ROOT / "pcaps" / "ring2-ll.pcap").read_bytes()[24:]
PLAIN = RECORD[16 : 16 + struct.unpack_from("<I", RECORD, 8)[0]]
MACS, REST, PACKET = PLAIN[:12], PLAIN[12:], PLAIN[14:]

TAGS = {
    "Arista, 64 bits, TAI": "d28b 0001 0010 1122334455667788",
    "Arista, 64 bits, UTC, R3": "d28b 0001 0111 1122334455667788",
    "Arista, 48 bits": "d28b 0001 0020 112233445566",
    "E-tag": "893f 112233445566",
    "VN-tag": "8926 11223344",
    "Cisco metadata": "8909 0101 0001 0064",
    "Marvell EDSA": "dada 0000 c0080001",
    "Broadcom": "8874 11223344",
    "signed MACsec": "88e5 0000 00000001",
    "signed MACsec with a channel": "88e5 2000 00000001 0011223344550001",
    "VLAN in an old tag": "9200 0005 8100 0006",
}
V4 = MACS + bytes.fromhex("0800")
V6 = MACS + bytes.fromhex("86dd")


def ip(protocol: int, body: bytes) -> bytes:
    ends = b"\1" * 4, b"\2" * 4
    return V4 + struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0, *ends) + body


def ip6(protocol: int, body: bytes) -> bytes:
    return V6 + struct.pack(">IHBB", 6 << 28, len(body), protocol, 64) + bytes(32) + body


def udp(port: int, body: bytes) -> bytes:
    return struct.pack(">HHHH", 50000, port, 8 + len(body), 0) + body


def of_type(head: str, body: bytes) -> bytes:
    return MACS + bytes.fromhex(head) + body


WRAPPED = {
    "VXLAN": (ip(17, udp(8472, bytes.fromhex("0800000000abcd00") + PLAIN)), 0xABCD),
    "VXLAN with a group": (ip(17, udp(4789, bytes.fromhex("8800000700abcd00") + PLAIN)), 0xABCD),
    "VXLAN with bits that are ignored": (ip(17, udp(4789, bytes.fromhex("ff01d1f200abcdff") + PLAIN)), 0xABCD),
    "VXLAN-GPE": (ip6(17, udp(4790, bytes.fromhex("0c00000300abcd00") + PLAIN)), 0xABCD),
    "VXLAN-GPE of IP": (ip(17, udp(4790, bytes.fromhex("0c00000100abcd00") + PACKET)), 0xABCD),
    "GENEVE": (ip(17, udp(6081, bytes.fromhex("0200655800abcd00") + bytes(8) + PLAIN)), 0xABCD),
    "GENEVE of IP": (ip6(17, udp(6081, bytes.fromhex("0000080000abcd00") + PACKET)), 0xABCD),
    "TZSP": (ip(17, udp(37008, bytes.fromhex("01000001 00 2902 0064 01") + PLAIN)), 0),
    "GRE of IP": (ip(47, bytes.fromhex("00000800") + PACKET), 0),
    "ERSPAN III of IP": (ip(47, bytes.fromhex("1000 22eb 00000000 20000005 00000000 00000800") + PACKET), 5),
    "IP in IP": (ip(4, PACKET), 0),
    "IP in IP, version 6": (ip6(4, PACKET), 0),
    "EtherIP": (ip(97, b"\x30\0" + PLAIN), 0),
    "MPLS": (of_type("8847 00010040 00020140", PACKET), 0),
    "MPLS, pseudo-wire": (of_type("8848 00020140 00000000", PLAIN), 0),
    "MPLS in UDP": (ip(17, udp(6635, bytes.fromhex("00020140") + PACKET)), 0),
    "MPLS in IP": (ip(137, bytes.fromhex("00020140") + PACKET), 0),
    "PPPoE": (of_type("8864 1100 0001", struct.pack(">HH", len(PACKET) + 2, 0x21) + PACKET), 0),
    "PPPoE, short": (of_type("8864 1100 0001", struct.pack(">HB", len(PACKET) + 1, 0x21) + PACKET), 0),
    "NSH": (of_type("894f 0fc6 0103 00000101", bytes(16) + PLAIN), 0),
    "NSH of IP": (of_type("894f 0fc2 0201 00000101", PACKET), 0),
    "PBB": (of_type("88e7 0000abcd", PLAIN), 0xABCD),
    "FabricPath": (of_type("8903 0041", PLAIN), 0),
    "TRILL": (of_type("22f3 0043 0001 0002", bytes(4) + PLAIN), 0),
}


def survey_of(frame: bytes) -> dict:
    survey = Observer()
    survey.add(frame)
    return survey.report()


def same(found: Roce | str) -> bool:
    plain = decode(PLAIN)
    assert isinstance(plain, Roce) and plain.icrc_ok
    return isinstance(found, Roce) and found.icrc_ok and (found.src, found.dest_qp, found.psn, found.payload_len) == (
        plain.src, plain.dest_qp, plain.psn, plain.payload_len)


@pytest.mark.parametrize("name", TAGS)
def test_tags_are_passed(name: str) -> None:
    frame = MACS + bytes.fromhex(TAGS[name]) + REST
    assert same(decode(frame))
    assert {decode(frame[:length]) for length in range(len(frame))} == {"truncated"}
    assert same(decode(MACS + b"\x81\0\0\1" + frame[12:] + bytes(16))), "in a VLAN, with a trailer"
    wrapped = ip(17, udp(4789, bytes.fromhex("0800000000000500") + frame))
    assert same(decode(wrapped)), "inside a tunnel"


def test_the_stamp_is_named_and_others_of_its_type_are_not_guessed() -> None:
    assert survey_of(of_type(TAGS["Arista, 48 bits"], REST))["flows"][0]["mirrors"] == {"Arista time stamp": 1}
    for head in ("d28b 0002 0010 1122334455667788", "d28b 0001 0030 1122334455667788", "8909 0201 0001 0064"):
        assert survey_of(of_type(head, REST))["encapsulated"] == {f"ethertype 0x{head[:4]}": 1}


@pytest.mark.parametrize("name", WRAPPED)
def test_unpacked(name: str) -> None:
    frame, session = WRAPPED[name]
    found = decode(frame)
    assert same(found) and isinstance(found, Roce)
    assert name.replace("-", " ").split()[0].strip(",") == found.tunnel.split()[0]
    assert found.session == session
    for length in range(14, len(frame)):
        assert not isinstance(decode(frame[:length]), Roce), length
    assert survey_of(frame)["packets"]["roce"] == 1


@pytest.mark.parametrize(("frame", "where"), [
    (of_type("1234 0000", PLAIN), "ethertype 0x1234"),
    (of_type("88b5 112233445566", REST), "ethertype 0x88b5"),
    (ip(17, udp(12345, b"?" * 20 + PLAIN)), "UDP port 12345"),
    (ip6(17, udp(8472, b"?" * 9 + PLAIN)), "UDP port 8472"),
    (ip(200, PLAIN), "IP protocol 200"),
    (MACS + b"\0\x40" + PACKET, "IEEE 802.3 length"),
])
def test_what_has_no_name_is_counted_by_its_number(frame: bytes, where: str) -> None:
    report = survey_of(frame)
    assert report["encapsulated"] == {where: 1} and report["packets"]["encapsulated"] == 1
    assert not report["noise"] and not report["unknown"] and not report["flows"]
    damaged = bytearray(frame)
    damaged[-1] ^= 1  # no proof that it is RoCE
    report = survey_of(bytes(damaged))
    assert not report["encapsulated"] and report["packets"]["not_roce"] == 1
    assert report["unknown"] == ({} if "802.3" in where else {where: 1})


@pytest.mark.parametrize(("name", "frame"), [
    ("MPLS", of_type("8847 00020140", b"\x55" * 60)),
    ("MPLS", of_type("8847 00020140", b"\x45" + bytes(60))),
    ("MPLS", of_type("8847 00020040", bytes.fromhex("00020040") * 20)),
    ("NSH", of_type("894f 0fc6 0104 00000101", bytes(60))),
    ("VXLAN without a plain Ethernet payload", ip(17, udp(4789, bytes.fromhex("0c00000100000500") + PACKET))),
    ("VXLAN without a plain Ethernet payload", ip(17, udp(4789, bytes.fromhex("0000000000000500") + PLAIN))),
    ("GENEVE", ip(17, udp(6081, bytes.fromhex("0000123400000500") + bytes(60)))),
    ("GENEVE", ip(17, udp(6081, bytes.fromhex("0080655800000500") + PLAIN))),
    ("encrypted (IPsec or MACsec)", of_type("88e5 0c00 00000001", REST)),
    ("encapsulated twice", of_type("88e7 0000abcd", MACS + bytes.fromhex("8847 00020140") + PACKET)),
])
def test_refused_by_name(name: str, frame: bytes) -> None:
    assert survey_of(frame)["encapsulated"] == {name: 1}


def test_other_traffic_inside_is_noise_of_its_own_kind() -> None:
    inner = ip(17, udp(53, bytes(40)))
    for frame in (of_type("88e7 0000abcd", inner), of_type("8903 0041", inner), ip(4, inner[14:]),
                  of_type(TAGS["E-tag"], inner[12:])):
        report = survey_of(frame)
        assert report["noise"] == {"udp": 1} and report["unknown"] == {"UDP port 53": 1}
