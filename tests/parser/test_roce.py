"""Header decode against two independent dissectors (tshark, scapy) and the counts in the captures' README."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from parser.roce import Roce, decode, opcode_name
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    PadN,
)
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Raw
from scapy.utils import RawPcapReader

MAC = "02:00:00:00:00:01"
LINK = Ether(src=MAC, dst=MAC)  # named addresses: scapy would resolve the peer's otherwise
CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures"
ALL = sorted(CAPTURES.glob("*/*.pcap*"))

# frames with RoCEv2, other frames, opcodes: from soft-roce/README.md.
README = {
    "01_perftest_ops.pcap": (
        1370,
        0,
        "RC_ACK 60, RC_ATOMIC_ACK 20, RC_CMP_SWAP 10, RC_FETCH_ADD 10, RC_READ_REQ 15, "
        "RC_READ_RESP_FIRST 10, RC_READ_RESP_LAST 10, RC_READ_RESP_MIDDLE 315, RC_READ_RESP_ONLY "
        "5, RC_SEND_FIRST 10, RC_SEND_LAST 10, RC_SEND_MIDDLE 30, RC_WRITE_FIRST 35, "
        "RC_WRITE_LAST 35, RC_WRITE_MIDDLE 700, RC_WRITE_ONLY 15, UC_SEND_FIRST 10, UC_SEND_LAST "
        "10, UC_SEND_MIDDLE 10, UC_WRITE_FIRST 10, UC_WRITE_LAST 10, UC_WRITE_MIDDLE 20, "
        "UD_SEND_ONLY 10",
    ),
    "02_nccl_ring2.pcap": (
        608,
        0,
        "RC_ACK 64, RC_WRITE_FIRST 32, RC_WRITE_LAST_IMM 32, RC_WRITE_MIDDLE 448, RC_WRITE_ONLY 32",
    ),
    "03_nccl_ring4.pcap": (
        912,
        0,
        "RC_ACK 96, RC_WRITE_FIRST 48, RC_WRITE_LAST_IMM 48, RC_WRITE_MIDDLE 672, RC_WRITE_ONLY 48",
    ),
    "05_nccl_ring4_ar_qps4.pcap": (
        1440,
        0,
        "RC_ACK 432, RC_WRITE_FIRST 192, RC_WRITE_LAST 192, RC_WRITE_MIDDLE 384, RC_WRITE_ONLY "
        "48, RC_WRITE_ONLY_IMM 192",
    ),
    "07_nccl_ring4_mtu1024.pcap": (
        2496,
        0,
        "RC_ACK 96, RC_WRITE_FIRST 48, RC_WRITE_LAST_IMM 48, RC_WRITE_MIDDLE 2256, RC_WRITE_ONLY 48",
    ),
    "20_nccl_ring4_loss1.pcap": (
        4349,
        0,
        "RC_ACK 268, RC_WRITE_FIRST 75, RC_WRITE_LAST_IMM 91, RC_WRITE_MIDDLE 3867, RC_WRITE_ONLY 48",
    ),
    "24_nccl_ring4_reorder_dup.pcap": (
        736,
        0,
        "RC_ACK 165, RC_WRITE_FIRST 63, RC_WRITE_LAST_IMM 67, RC_WRITE_MIDDLE 392, RC_WRITE_ONLY 49",
    ),
    "26_rnr_nak.pcap": (
        628,
        0,
        "RC_ACK 112, RC_SEND_FIRST 258, RC_SEND_LAST 258",
    ),
    "30_ipv6.pcap": (
        438,
        6,
        "RC_ACK 11, RC_READ_REQ 5, RC_READ_RESP_FIRST 5, RC_READ_RESP_LAST 5, RC_READ_RESP_MIDDLE"
        " 15, RC_WRITE_FIRST 6, RC_WRITE_LAST 6, RC_WRITE_MIDDLE 372, RC_WRITE_ONLY 5, "
        "UD_SEND_ONLY 8",
    ),
    "40_icrc_probe_v4.pcap": (
        1616,
        3,
        "UD_SEND_ONLY 1616",
    ),
}
PADS = {
    "01_perftest_ops.pcap": {0: 1290, 1: 20, 2: 5, 3: 55},
    "30_ipv6.pcap": {0: 420, 1: 5, 3: 13},
    "40_icrc_probe_v4.pcap": {0: 1011, 1: 169, 2: 178, 3: 258},
}


def frames(path: Path) -> list[bytes]:
    with RawPcapReader(str(path)) as reader:
        return [frame for frame, _ in reader]


def capture(name: str) -> Path:
    found = [path for path in ALL if path.name == name]
    if not found:
        pytest.skip(f"shared capture {name} is not here ({CAPTURES})")
    return found[0]


@pytest.mark.captures
@pytest.mark.parametrize("name", README)
def test_counts_of_the_soft_roce_readme(name: str) -> None:
    roce, other, opcodes = README[name]
    decoded = [decode(frame) for frame in frames(capture(name))]
    packets = [d for d in decoded if isinstance(d, Roce)]
    assert len(packets) == roce
    assert Counter(d for d in decoded if isinstance(d, str)) == Counter({"not_roce": other} if other else {})
    expected = {word.split()[0]: int(word.split()[1]) for word in opcodes.split(", ")}
    assert Counter(opcode_name(p.opcode) for p in packets) == expected
    assert Counter(p.pad for p in packets) == PADS.get(name, {0: roce})


def tshark_rows(path: Path) -> list[list[str]]:
    names = [
        "frame.number", "infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.bth.psn",
        "infiniband.bth.padcnt", "infiniband.bth.a", "infiniband.reth.va", "infiniband.reth.r_key",
        "infiniband.reth.dmalen", "infiniband.immdt", "infiniband.aeth.syndrome", "infiniband.aeth.msn",
        "infiniband.deth.srcqp", "udp.srcport",
    ]
    command = ["tshark", "-n", "-r", str(path), "-Y", "infiniband.bth", "-T", "fields"]
    command += ["--disable-protocol", "openvpn"]  # one source port in 40 is OpenVPN's, and would win
    for name in names:
        command += ["-e", name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 or "cut short" in done.stderr, done.stderr
    text = done.stdout
    return [line.split("\t") for line in text.splitlines()]


@pytest.mark.captures
@pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed")
@pytest.mark.parametrize("path", ALL, ids=lambda p: p.name)
def test_tshark_agrees_on_every_roce_packet(path: Path) -> None:
    def number(text: str) -> int | None:
        return int(text, 0) if text else None

    mine = {i: d for i, f in enumerate(frames(path), 1) if isinstance(d := decode(f), Roce)}
    seen = set()
    for row in tshark_rows(path):
        at, opcode, qp, psn, pad, ack, va, rkey, length, imm, syndrome, msn, src_qp, sport = row
        p = mine[int(at)]
        seen.add(int(at))
        assert (number(opcode), number(qp), number(psn)) == (p.opcode, p.dest_qp, p.psn), at
        assert (number(pad), ack in ("1", "True"), number(sport)) == (p.pad, p.ack_req, p.udp_sport), at
        if p.opcode in (0x13, 0x14):  # tshark files the atomic header's address under reth.*
            assert (number(va), number(rkey), number(length)) == (p.va, p.rkey, None), at
        else:
            assert (number(va), number(rkey), number(length)) == (p.va, p.rkey, p.dma_len), at
        assert (int(imm.split(",")[0], 16) if imm else None) == p.imm, at  # listed twice by tshark
        assert (number(msn), number(src_qp)) == (p.msn, p.src_qp), at
        if syndrome:
            assert number(syndrome) == p.syndrome, at
    assert seen == set(mine)


# -- hand-made frames: what the captures do not hold ------------------------------------------------


def bth(opcode: int, payload: bytes = b"", *, qp: int = 0x1234, psn: int = 0xABCDEF) -> bytes:
    pad = -len(payload) % 4
    head = struct.pack(">BBHII", opcode, 0x40 | pad << 4, 0xFFFF, qp, 0x80000000 | psn)
    return head + payload + bytes(pad) + b"\xde\xad\xbe\xef"


RETH = struct.pack(">QII", 0x1122334455667788, 0x99AABBCC, 64)
WRITE = bth(0x0A, RETH + bytes(64))


def udp(payload: bytes = WRITE, port: int = 4791) -> UDP:
    return UDP(sport=0xC123, dport=port, chksum=0) / Raw(payload)


def v4(**fields: object) -> IP:
    return IP(src="10.0.0.1", dst="10.0.0.2", **fields)


def v6(**fields: object) -> IPv6:
    return IPv6(src="fe80::1", dst="fe80::2", **fields)


def test_every_field_of_a_write_only() -> None:
    p = decode(bytes(LINK / v4(tos=0x6A, ttl=7, id=0x4242) / udp()))
    assert isinstance(p, Roce)
    assert (p.src, p.dst, p.ip_version, p.vlan) == ("10.0.0.1", "10.0.0.2", 4, None)
    assert (p.tclass, p.ttl, p.ip_id, p.udp_sport) == (0x6A, 7, 0x4242, 0xC123)
    assert (p.opcode, p.dest_qp, p.psn, p.ack_req, p.pad) == (0x0A, 0x1234, 0xABCDEF, True, 0)
    assert (p.va, p.rkey, p.dma_len) == (0x1122334455667788, 0x99AABBCC, 64)
    assert (p.imm, p.msn, p.syndrome, p.src_qp) == (None, None, None, None)
    assert (p.payload_offset, p.payload_len) == (14 + 20 + 8 + 12 + 16, 64)


def test_the_traffic_class_of_ipv6_is_not_its_flow_label() -> None:
    p = decode(bytes(LINK / v6(tc=0x6A, fl=0xBCDEF, hlim=7) / udp()))
    assert isinstance(p, Roce)
    assert (p.src, p.dst, p.ip_version, p.tclass, p.ttl) == ("fe80::1", "fe80::2", 6, 0x6A, 7)


@pytest.mark.parametrize(
    ("opcode", "extra", "field", "value"),
    [
        (0x09, b"\0\0\1\0", "imm", 0x100),
        (0x0B, RETH + b"\1\2\3\4", "imm", 0x01020304),
        (0x29, b"\0\0\1\0", "imm", 0x100),
        (0x11, b"\x60\0\1\2", "syndrome", 0x60),
        (0x11, b"\x60\0\1\2", "msn", 0x102),
        (0x12, b"\x1f\0\1\2" + bytes(8), "msn", 0x102),
        (0x13, RETH + bytes(12), "va", 0x1122334455667788),
        (0x64, b"\0\0\0\7\0\xab\xcd\xef", "src_qp", 0xABCDEF),
        (0x65, b"\0\0\0\7\0\xab\xcd\xef\1\2\3\4", "imm", 0x01020304),
    ],
)
def test_extended_headers(opcode: int, extra: bytes, field: str, value: int) -> None:
    p = decode(bytes(LINK / v4() / udp(bth(opcode, extra + b"abc"))))
    assert isinstance(p, Roce)
    assert getattr(p, field) == value
    assert (p.payload_len, p.pad) == (3, 1)
    # One byte short of the announced headers is malformed.
    if len(extra) >= 4:
        assert decode(bytes(LINK / v4() / udp(bth(opcode, extra[:-4])))) == "malformed"


@pytest.mark.parametrize("opcode", [0xAA, 0x81, 0x40, 0xFF])
def test_unknown_opcodes_are_bth_only(opcode: int) -> None:
    p = decode(bytes(LINK / v4() / udp(bth(opcode, bytes(16)))))
    assert isinstance(p, Roce)
    assert (p.opcode, p.payload_len, p.va, p.msn) == (opcode, 16, None, None)


@pytest.mark.parametrize("below", [v4(), v6()], ids=["v4", "v6"])
def test_vlan_tags(below: IP | IPv6) -> None:
    one = decode(bytes(LINK / Dot1Q(vlan=5, prio=3) / below / udp()))
    two = decode(bytes(LINK / Dot1AD(vlan=9) / Dot1Q(vlan=6) / below / udp()))
    assert isinstance(one, Roce) and isinstance(two, Roce)
    assert (one.vlan, two.vlan) == (3 << 13 | 5, 6)
    deep = LINK
    for _ in range(7):
        deep /= Dot1Q(vlan=1)
    assert decode(bytes(deep / below / udp())) == "malformed"


def test_ipv4_options_and_ethernet_padding() -> None:
    p = decode(bytes(LINK / v4(options=b"\x01\x01\x01\x00") / udp()) + bytes(40))
    assert isinstance(p, Roce)
    assert p.payload_offset == 14 + 24 + 8 + 12 + 16
    assert p.payload_len == 64


def test_ipv6_extension_headers() -> None:
    chain = IPv6ExtHdrHopByHop(options=[PadN(optdata=bytes(4))])
    chain = chain / IPv6ExtHdrRouting(addresses=["fe80::9"], segleft=0)
    chain = chain / IPv6ExtHdrDestOpt(options=[PadN(optdata=bytes(12))])
    p = decode(bytes(LINK / v6() / chain / udp()))
    assert isinstance(p, Roce)
    assert (p.src, p.dst, p.dest_qp, p.payload_len) == ("fe80::1", "fe80::2", 0x1234, 64)
    endless = v6()
    for _ in range(9):
        endless /= IPv6ExtHdrDestOpt(options=[PadN(optdata=bytes(4))])
    assert decode(bytes(LINK / endless / udp())) == "malformed"


def test_fragments() -> None:
    assert decode(bytes(LINK / v4(flags="MF") / udp())) == "fragment"
    assert decode(bytes(LINK / v4(frag=3, proto=17) / Raw(bytes(64)))) == "fragment"
    assert decode(bytes(LINK / v4(flags="MF") / udp(port=53))) == "not_roce"
    assert decode(bytes(LINK / v4(frag=3, proto=6) / Raw(bytes(64)))) == "not_roce"
    assert decode(bytes(LINK / v6() / IPv6ExtHdrFragment(m=1) / udp())) == "fragment"
    assert decode(bytes(LINK / v6() / IPv6ExtHdrFragment(m=1) / udp(port=53))) == "not_roce"
    assert decode(bytes(LINK / v6() / IPv6ExtHdrFragment(offset=1, nh=17) / Raw(bytes(64)))) == "fragment"
    assert decode(bytes(LINK / v6() / IPv6ExtHdrFragment(offset=8, nh=17) / Raw(bytes(64)))) == "fragment"
    assert decode(bytes(LINK / v6() / IPv6ExtHdrFragment(m=1) / TCP())) == "not_roce"


def test_other_traffic() -> None:
    for other in (
        LINK / ARP(),
        LINK / v4() / TCP(dport=4791),
        LINK / v6() / TCP(),
        LINK / v4() / udp(port=4792),
        Ether(dst=MAC, src=MAC, type=0x88F7) / Raw(bytes(44)),
        Ether(dst=MAC, src=MAC, type=0x8915) / Raw(bytes(60)),
    ):
        assert decode(bytes(other)) == "not_roce", other.summary()


@pytest.mark.parametrize("below", [v4(), v6()], ids=["v4", "v6"])
def test_lengths_that_contradict_each_other(below: IP | IPv6) -> None:
    good = bytes(LINK / below / udp())
    at = 14 + len(below)
    for udp_len in (0, 7, 8, 23, len(WRITE) + 7, len(WRITE) + 9, 65535):
        frame = bytearray(good)
        frame[at + 4 : at + 6] = udp_len.to_bytes(2, "big")
        assert decode(bytes(frame)) == "malformed", udp_len
    # The IP length alone, shorter or longer than what UDP says: a contradiction, captured or not.
    where = 16 if below.version == 4 else 18
    (ip_len,) = struct.unpack_from(">H", good, where)
    for wrong in (0, ip_len - 1, ip_len + 1, 65535):
        frame = bytearray(good)
        frame[where : where + 2] = wrong.to_bytes(2, "big")
        assert decode(bytes(frame)) == "malformed", wrong


def test_bad_ip_headers() -> None:
    good = bytearray(bytes(LINK / v4() / udp()))
    for first in (0x44, 0x40, 0x65, 0x05):
        frame = bytearray(good)
        frame[14] = first
        assert decode(bytes(frame)) == "malformed"
    six = bytearray(bytes(LINK / v6() / udp()))
    six[14] = 0x45
    assert decode(bytes(six)) == "malformed"
