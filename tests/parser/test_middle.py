"""The short decode of full MIDDLE packets says what the whole decode says, and takes nothing that is not one."""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from parser.roce import Roce, decode

from parser import place

MTU = 256


def frame(version: int = 4, opcode: int = 7, payload: int = MTU, pad: int = 0, tail: bytes = b"") -> bytes:
    udp_len = 8 + 12 + payload + pad + 4
    if version == 4:
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 2, 20 + udp_len, 7, 0x4000, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
        kind = b"\x08\x00"
    else:
        ip = struct.pack(">IHBB16s16s", 6 << 28 | 0x12345, udp_len, 17, 64, bytes(range(16)), bytes(range(16, 32)))
        kind = b"\x86\xdd"
    udp = struct.pack(">HHHH", 0xC001, 4791, udp_len, 0)
    bth = struct.pack(">BBHII", opcode, 0x40 | pad << 4, 0xFFFF, 0xFF123456, 0x80ABCDEF)
    return bytes(12) + kind + ip + udp + bth + bytes(payload + pad + 4) + tail


def agrees(raw: bytes) -> bool:
    """True if the short decode took the frame; then every field is what the whole decode says."""
    short, whole = place.middle(raw, MTU), decode(raw)
    if short is None:
        return False
    assert isinstance(whole, Roce)
    version, ends, qpn, psn = short
    assert (whole.ip_version, whole.dest_qp, whole.psn, whole.payload_len, whole.opcode) == (version, qpn, psn, MTU, 7)
    start = 26 if version == 4 else 22
    assert ends == raw[start : start + len(ends)] and whole.vlan is None and not whole.tunnel
    assert whole.payload_offset == (54 if version == 4 else 74)
    return True


def test_full_middles_are_taken() -> None:
    assert agrees(frame(4)) and agrees(frame(6))
    assert agrees(frame(4, tail=bytes(9))) and agrees(frame(6, tail=bytes(9)))  # Ethernet padding


def test_others_are_not() -> None:
    for version in (4, 6):
        for opcode in range(256):
            assert agrees(frame(version, opcode)) == (opcode == 7)
        assert not agrees(frame(version, payload=MTU - 4)) and not agrees(frame(version, payload=MTU - 1, pad=1))
        whole = frame(version)
        assert not any(agrees(whole[:size]) for size in range(len(whole)))


@settings(max_examples=2000)
@given(st.sampled_from([4, 6]), st.lists(st.tuples(st.integers(0, 77), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes(version: int, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(frame(version))
    for at, value in changes:
        raw[at] = value
    agrees(bytes(raw))
