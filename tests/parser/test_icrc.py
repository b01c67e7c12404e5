"""The invariant CRC: real captures, scapy as a second implementation, and the mask field by field."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from parser.roce import Roce, decode, opcode_name
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, PadN
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw
from scapy.utils import RawPcapReader

LINK = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures"
ALL = sorted(CAPTURES.glob("*/*.pcap*"))


def packets(path: Path) -> list[tuple[bytes, Roce]]:
    with RawPcapReader(str(path)) as reader:
        return [(frame, p) for frame, _ in reader if isinstance(p := decode(frame), Roce)]


@pytest.mark.captures
@pytest.mark.parametrize("path", ALL, ids=lambda p: p.name)
def test_verdict_of_every_captured_packet(path: Path) -> None:
    wrong = [opcode_name(p.opcode) for _, p in packets(path) if not p.icrc_ok]
    expected = {"40_icrc_probe_v4.pcap": ["UD_SEND_ONLY"] * 896, "rdma32.pcapng": ["0xAA"] * 7}
    assert wrong == expected.get(path.name, [])


@pytest.mark.captures
def test_all_standard_opcodes_of_the_connectx_captures_validate() -> None:
    paths = [path for path in ALL if path.parent.name == "nccl-hardware"]
    if not paths:
        pytest.skip(f"no shared captures at {CAPTURES}")
    found = [p for path in paths for _, p in packets(path)]
    assert sum(p.icrc_ok for p in found) == 1889
    assert {p.opcode for p in found if not p.icrc_ok} == {0xAA}


@pytest.mark.captures
@pytest.mark.parametrize(
    "name", ["01_perftest_ops.pcap", "30_ipv6.pcap", "40_icrc_probe_v4.pcap", "rdma32.pcapng"]
)
def test_scapy_computes_the_same_value(name: str) -> None:
    path = next((path for path in ALL if path.name == name), None)
    if path is None:
        pytest.skip(f"shared capture {name} is not here")
    for frame, p in packets(path):
        layer = Ether(frame)
        base = layer[BTH]
        end = p.payload_offset + p.payload_len + p.pad
        raw = frame[p.payload_offset - headers(p) : end + 4]
        assert int.from_bytes(base.compute_icrc(raw), "little") == p.icrc


def headers(p: Roce) -> int:
    """Bytes from the BTH to the payload: by the opcode's optional headers."""
    size = 12
    size += 16 if p.dma_len is not None else 0
    size += 4 if p.imm is not None else 0
    size += 8 if p.src_qp is not None else 0
    size += 28 if p.opcode in (0x13, 0x14) else 0
    size += 4 if p.msn is not None else 0
    return size + (8 if p.opcode == 0x12 else 0)


BTH_WRITE_ONLY = bytes([0x0A, 0x50, 0xFF, 0xFF, 0, 0, 0x12, 0x34, 0x80, 0, 0, 9])
BODY = BTH_WRITE_ONLY + bytes(range(16)) + b"gradient\0\0\0\0"


def reference_icrc(ip: bytearray, body: bytes) -> bytes:
    """A third implementation, from reference text and zlib alone. `ip` ends with the UDP header."""
    masked = bytearray(ip)
    if ip[0] >> 4 == 4:
        masked[1] = masked[8] = masked[10] = masked[11] = 0xFF
    else:
        masked[0], masked[1:4], masked[7] = 0x6F, b"\xff\xff\xff", 0xFF
    masked[-2:] = b"\xff\xff"
    inner = bytearray(body)
    inner[4] = 0xFF
    return zlib.crc32(b"\xff" * 8 + masked + inner).to_bytes(4, "little")


def frame(ip: IP | IPv6, link: Ether = LINK) -> bytearray:
    raw = bytearray(bytes(link / ip / UDP(sport=49152, dport=4791, chksum=0x1234) / Raw(BODY + bytes(4))))
    at = len(raw) - len(BODY) - 4
    raw[-4:] = reference_icrc(raw[len(link) : at], BODY)
    return raw


V4 = IP(src="10.0.0.1", dst="10.0.0.2", id=7)
V4_OPTIONS = IP(src="10.0.0.1", dst="10.0.0.2", options=b"\x01\x01\x01\x01\x01\x01\x01\x00")
V6 = IPv6(src="fe80::1", dst="fe80::2", fl=0x12345, tc=3)
V6_EXTENDED = V6 / IPv6ExtHdrDestOpt(options=[PadN(optdata=bytes(12))])


def verdict(raw: bytes) -> bool:
    p = decode(bytes(raw))
    assert isinstance(p, Roce)
    return p.icrc_ok


@pytest.mark.parametrize(
    "ip", [V4, V4_OPTIONS, V6, V6_EXTENDED], ids=["v4", "v4-options", "v6", "v6-extension"]
)
@pytest.mark.parametrize("tagged", [False, True])
def test_mask_bit_by_bit(ip: IP | IPv6, tagged: bool) -> None:
    """Flip every bit of the frame: exactly the bits the standard masks may change without harm."""
    link = LINK / Dot1Q(vlan=3) if tagged else LINK
    raw = frame(ip, link)
    assert verdict(raw)
    start, udp = len(link), len(raw) - len(BODY) - 12
    if ip.version == 4:
        free = {start + 1, start + 8, start + 10, start + 11}
        lengths = {start, start + 2, start + 3, start + 6, start + 7, start + 9}
        free_nibble = -1
    else:
        free = {start + 1, start + 2, start + 3, start + 7}
        lengths = {start, start + 4, start + 5, start + 6}
        free_nibble = start
        if len(bytes(ip)) > 40:
            lengths |= {start + 40, start + 41}  # next header, extension length
    lengths |= {udp + 2, udp + 3, udp + 4, udp + 5}
    free |= {udp + 6, udp + 7, udp + 8 + 4} | set(range(start))
    structural = set(range(12, start)) | lengths | {udp + 8, udp + 9}
    for at in range(len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            p = decode(bytes(raw))
            if isinstance(p, Roce):
                harmless = at in free or (at == free_nibble and bit < 4)
                assert p.icrc_ok == harmless, (at, bit)
            else:
                assert at in structural, (at, bit, p)
            raw[at] ^= 1 << bit
