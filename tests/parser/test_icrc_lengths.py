"""The ICRC of every length and header form against zlib, and by every kernel: the wide one has no tail to get wrong,
but a front that takes one block or two."""

import os
import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.roce import Roce, decode

VARIANT4, VARIANT6 = (1, 8, 10, 11, 26, 27, 32), (1, 2, 3, 7, 46, 47, 52)


def frame(version: int, payload: bytes, opcode: int, reth: bytes, noise: int) -> bytes:
    """A frame whose variant fields hold `noise`, with the ICRC that zlib says."""
    pad = -len(payload) % 4
    rest = reth + payload + bytes(pad)
    udp_len = 8 + 12 + len(rest) + 4
    if version == 4:
        fields = 0x45, noise, 20 + udp_len, 77, 0, noise, 17, noise << 8 | noise
        ip = struct.pack(">BBHHHBBH4s4s", *fields, b"1234", b"abcd")
    else:
        fields6 = 6 << 28 | noise << 12, udp_len, 17, noise
        ip = struct.pack(">IHBB16s16s", *fields6, bytes(range(16)), bytes(range(16, 32)))
    udp = struct.pack(">HHHH", 0xC123, 4791, udp_len, noise)
    bth = struct.pack(">BBHII", opcode, 0x40 | pad << 4, 0xFFFF, noise << 24 | 0x000321, 0x00ABCDEF)
    masked = bytearray(ip + udp + bth)
    for at in VARIANT4 if version == 4 else VARIANT6:
        masked[at] = 0xFF
    if version == 6:
        masked[0] |= 0x0F
    crc = zlib.crc32(b"\xff" * 8 + bytes(masked) + rest)
    kind = b"\x08\x00" if version == 4 else b"\x86\xdd"
    return bytes(12) + kind + ip + udp + bth + rest + crc.to_bytes(4, "little")


def verdict(raw: bytes) -> bool:
    packet = decode(raw)
    assert isinstance(packet, Roce)
    return packet.icrc_ok


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("reth", [b"", bytes(range(16))])
def test_every_length(version: int, reth: bytes) -> None:
    data = bytes((7 * i * i + i) & 0xFF for i in range(4200))
    for size in [*range(700), *range(1000, 1100), *range(4090, 4100)]:
        assert verdict(frame(version, data[:size], 6 if reth else 7, reth, size & 0xFF))


@settings(max_examples=300)
@given(st.sampled_from([4, 6]), st.binary(max_size=1500), st.integers(0, 255), st.data())
def test_one_bit_is_enough(version: int, payload: bytes, noise: int, data: st.DataObject) -> None:
    raw = bytearray(frame(version, payload, 7, b"", noise))
    at = data.draw(st.integers(14 + (28 if version == 4 else 48) + 5, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    packet = decode(bytes(raw))
    assert not isinstance(packet, Roce) or not packet.icrc_ok


@pytest.mark.parametrize("kernels", ["avx2", "portable"])
def test_the_other_kernels_agree(kernels: str) -> None:
    """PCLMULQDQ 16 bytes at a time, and isa-l."""
    if os.environ.get("FLOWCHECK_SIMD"):
        pytest.skip("FLOWCHECK_SIMD already chooses the kernel of this run")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "every_length or one_bit", __file__],
        env={**os.environ, "FLOWCHECK_SIMD": kernels}, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
