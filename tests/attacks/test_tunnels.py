"""Hostile encapsulations: every tunnel header cut at every byte, damaged, nested, under guard pages."""

from __future__ import annotations

import ctypes
import mmap
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.observer import Observer
from parser.roce import REFUSAL_NAMES, STATUS_NAMES, TUNNEL_NAMES, Roce, decode, decode_at, refusal_of
from scapy.contrib.erspan import ERSPAN_II, ERSPAN_III
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrHopByHop
from scapy.layers.l2 import GRE, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
MAC = "02:00:00:00:00:01"
LINK = Ether(src=MAC, dst=MAC)
BTH = struct.pack(">BBHII", 0x0B, 0x40, 0xFFFF, 0x1234, 9) + bytes(20) + bytes(range(64)) + bytes(4)
INNER = LINK / IP(src="10.0.0.1", dst="10.0.0.2") / UDP(sport=49152, dport=4791, chksum=0) / Raw(BTH)
V4, V6 = IP(src="172.16.0.1", dst="172.16.0.2"), IPv6(src="fd00::1", dst="fd00::2")
# Numbers of sessions with high bits set: GRE's key has 32 bits, ERSPAN's session 10, VXLAN's network 24.
SESSIONS = {"GRE key": 0xA1B2C3D4, "GRE all": 0x5E4D3C2B, "ERSPAN II": 0x255, "ERSPAN III": 0x3AA, "VXLAN": 0xABCDEF}
TUNNELS: dict[str, Packet] = {
    "GRE": GRE(proto=0x6558),
    "GRE key": GRE(proto=0x6558, key_present=1, key=SESSIONS["GRE key"]),
    "GRE all": GRE(
        proto=0x6558, chksum_present=1, key_present=1, key=SESSIONS["GRE all"], seqnum_present=1, seqence_number=3
    ),
    "ERSPAN I": GRE(proto=0x88BE, seqnum_present=0),
    "ERSPAN II": GRE(proto=0x88BE, seqnum_present=1, seqence_number=3) / ERSPAN_II(session_id=SESSIONS["ERSPAN II"]),
    "ERSPAN III": GRE(proto=0x22EB, seqnum_present=1, seqence_number=3) / ERSPAN_III(session_id=SESSIONS["ERSPAN III"]),
    "VXLAN": UDP(sport=50000, dport=4789, chksum=0) / VXLAN(vni=SESSIONS["VXLAN"], flags=8),
}


class Guarded:
    """Memory followed by a page that must not be touched."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.memory = mmap.mmap(-1, SIZE + PAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if libc.mprotect(ctypes.c_void_p(self.base + SIZE), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def decode(self, data: bytes) -> Roce | str:
        self.memory[SIZE - len(data) : SIZE] = data
        return decode_at(self.base + SIZE - len(data), len(data))


GUARDED = Guarded()


def wrap(name: str, below: Packet = V4, inner: Packet = INNER, tags: int = 0) -> bytes:
    link: Packet = LINK.copy()
    for _ in range(tags):
        link /= Dot1Q(vlan=5)
    return bytes(link / below / TUNNELS[name] / inner)


def survey_of(frame: bytes) -> dict:
    survey = Observer()
    survey.add(frame)
    return survey.report()


@pytest.mark.parametrize("below", [V4, V6, V6 / IPv6ExtHdrHopByHop()], ids=["v4", "v6", "v6+options"])
@pytest.mark.parametrize("name", TUNNELS)
def test_unpacked_and_cut_at_every_byte(name: str, below: Packet) -> None:
    plain = decode(bytes(INNER))
    assert isinstance(plain, Roce)
    for tags in (0, 2):
        frame = wrap(name, below, tags=tags)
        found = GUARDED.decode(frame)
        assert isinstance(found, Roce)
        assert (found.src, found.dest_qp, found.psn, found.payload_len) == ("10.0.0.1", 0x1234, 9, plain.payload_len)
        assert (found.icrc, found.payload_offset) == (plain.icrc, plain.payload_offset)
        assert found.tunnel == " ".join(name.split()[:2] if "ERSPAN" in name else name.split()[:1])
        assert found.session == SESSIONS.get(name, 0)
        assert frame[found.frame_offset :] == bytes(INNER)
        for length in range(len(frame)):
            assert GUARDED.decode(frame[:length]) == "truncated", length
        assert GUARDED.decode(frame + bytes(10)) == found  # Ethernet padding


@pytest.mark.parametrize("name", TUNNELS)
def test_frame_cut_by_the_mirror_under_consistent_outer_lengths(name: str) -> None:
    whole = bytes(INNER)
    for length in range(len(whole)):
        assert GUARDED.decode(wrap(name, inner=Raw(whole[:length]))) == "truncated", length


def test_truncated_bit_and_bad_frame() -> None:
    cut = GRE(proto=0x88BE, seqnum_present=1) / ERSPAN_II(session_id=1, t=1)
    assert decode(bytes(LINK / V4 / cut / INNER)) == "truncated"
    cut = GRE(proto=0x22EB, seqnum_present=1) / ERSPAN_III(session_id=1, t=1)
    assert decode(bytes(LINK / V4 / cut / INNER)) == "truncated"
    assert decode(bytes(LINK / V4 / cut / LINK / IP() / UDP(dport=53))) == "not_roce"
    bad = GRE(proto=0x22EB, seqnum_present=1) / ERSPAN_III(session_id=1, bso=3)
    assert decode(bytes(LINK / V4 / bad / INNER)) == "malformed"


def test_platform_subheader_of_type_3() -> None:
    head = bytearray(bytes(ERSPAN_III(session_id=77)))
    head[-1] |= 1
    for extra, expected in ((bytes(8), "roce"), (b"", "anything but a wrong packet")):
        frame = bytes(LINK / V4 / GRE(proto=0x22EB, seqnum_present=1) / Raw(bytes(head) + extra + bytes(INNER)))
        found = GUARDED.decode(frame)
        assert isinstance(found, Roce) == (expected == "roce")


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("GRE carrying MPLS", LINK / V4 / GRE(proto=0x8847) / Raw(bytes(60))),
        ("GRE carrying another protocol", LINK / V4 / GRE(proto=0x1234) / Raw(bytes(60))),
        ("GRE with a vendor's mirror header (0x8949)", LINK / V4 / GRE(proto=0x8949) / Raw(bytes(22)) / INNER),
        ("GRE with source routing", LINK / V4 / GRE(proto=0x6558, routing_present=1) / INNER),
        ("GRE version 1", LINK / V4 / Raw(b"\x30\x01\x88\x0b" + bytes(40))),
        ("unknown ERSPAN version", LINK / V4 / GRE(proto=0x88BE, seqnum_present=1) / Raw(b"\x20" + bytes(60))),
        ("unknown ERSPAN version", LINK / V4 / GRE(proto=0x22EB, seqnum_present=1) / Raw(b"\x10" + bytes(60))),
        (
            "ERSPAN payload is not Ethernet",
            LINK / V4 / GRE(proto=0x22EB, seqnum_present=1) / ERSPAN_III(session_id=1, ft=1) / INNER[IP],
        ),
        ("VXLAN without a plain Ethernet payload", LINK / V4 / UDP(dport=4789) / Raw(bytes(60))),
        ("VXLAN without a plain Ethernet payload", LINK / V4 / UDP(dport=4790) / Raw(bytes(60))),
        ("GENEVE", LINK / V4 / UDP(dport=6081) / Raw(b"\x40" + bytes(60))),
        ("L2TP or EtherIP", LINK / IP(src="1.1.1.1", dst="2.2.2.2", proto=97) / Raw(bytes(60))),
        ("encrypted (IPsec or MACsec)", LINK / IP(src="1.1.1.1", dst="2.2.2.2", proto=50) / Raw(bytes(60))),
        ("encrypted (IPsec or MACsec)", Ether(src=MAC, dst=MAC, type=0x88E5) / Raw(b"\x0c" + bytes(60))),
        ("encapsulated twice", LINK / V4 / TUNNELS["ERSPAN II"] / LINK / V4 / TUNNELS["VXLAN"] / INNER),
    ],
)
def test_refused_by_name(name: str, frame: Packet) -> None:
    raw = bytes(frame)
    if name == "GRE version 1":
        raw = raw[:23] + b"\x2f" + raw[24:]
    assert GUARDED.decode(raw) == "encapsulated"
    assert refusal_of(raw) == name
    report = survey_of(raw)
    assert report["encapsulated"] == {name: 1} and report["packets"]["encapsulated"] == 1 and not report["noise"]


def test_fragments_of_tunnels() -> None:
    for below in (IP(src="1.1.1.1", dst="2.2.2.2", flags="MF"), IP(src="1.1.1.1", dst="2.2.2.2", frag=9, proto=47)):
        assert decode(bytes(LINK / below / TUNNELS["ERSPAN II"] / INNER)) == "fragment"
    assert decode(bytes(LINK / IP(src="1.1.1.1", dst="2.2.2.2", flags="MF") / TUNNELS["VXLAN"] / INNER)) == "fragment"


def test_other_traffic_inside_is_noise_of_its_own_kind() -> None:
    for name in TUNNELS:
        report = survey_of(wrap(name, inner=LINK / IP(src="1.1.1.1", dst="2.2.2.2") / UDP(dport=53)))
        assert report["noise"] == {"udp": 1} and report["packets"]["not_roce"] == 1
    report = survey_of(wrap("ERSPAN II"))
    assert report["flows"][0]["mirrors"] == {"ERSPAN II session 597": 1}


@settings(max_examples=4000)
@given(
    st.sampled_from(list(TUNNELS)),
    st.booleans(),
    st.lists(st.tuples(st.integers(12, 130), st.binary(min_size=1, max_size=4)), max_size=4),
    st.integers(0, 160),
)
def test_damaged(name: str, six: bool, damage: list[tuple[int, bytes]], cut: int) -> None:
    data = bytearray(FRAMES[name, six])
    for at, patch in damage:
        data[at : at + len(patch)] = patch
    raw = bytes(data[: max(0, len(data) - cut)])
    found = GUARDED.decode(raw)
    if isinstance(found, Roce):
        assert found.frame_offset + found.payload_offset + found.payload_len + found.pad + 4 <= len(raw)
        assert found.tunnel in TUNNEL_NAMES
    else:
        assert found in STATUS_NAMES
        assert (refusal_of(raw) in REFUSAL_NAMES[1:]) == (found == "encapsulated")
    survey_of(raw)


FRAMES = {(name, six): wrap(name, V6 if six else V4) for name in TUNNELS for six in (False, True)}
