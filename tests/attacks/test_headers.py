"""Hostile headers: whatever the bytes, decode answers and never reads past the captured length.

Each input is copied so that its last byte is the last byte before an inaccessible page: an over-read of
one byte kills the process instead of passing unseen.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser.observer import Observer
from parser.roce import STATUS_NAMES, Roce, decode, decode_at

from parser.findings import interpret

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
PROT_NONE = 0


class Guarded:
    """Memory followed by a page that must not be touched."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.memory = mmap.mmap(-1, SIZE + PAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if libc.mprotect(ctypes.c_void_p(self.base + SIZE), PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def place(self, data: bytes) -> int:
        """Address of a copy that ends where the guard page begins."""
        at = SIZE - len(data)
        self.memory[at:SIZE] = data
        return self.base + at

    def decode(self, data: bytes) -> Roce | str:
        return decode_at(self.place(data), len(data))

    def survey(self, survey: Observer, data: bytes) -> None:
        """One packet through a ring of one entry (packetref.h: head, closed, tail, mask, entries)."""
        entry = np.array([self.place(data), 0, len(data)], dtype=np.uint64)
        ring = np.zeros(24, dtype=np.uint64)
        ring[0], ring[17] = 1, entry.ctypes.data
        assert survey.drain(ring.ctypes.data) == 1


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    yield Guarded()


def ib(opcode: int, payload: int = 16) -> bytes:
    return struct.pack(">BBHII", opcode, 0, 0xFFFF, 7, 9) + bytes(range(48))[:44] + bytes(payload) + bytes(4)


def ethernet(kind: int, tags: int = 0) -> bytes:
    return bytes(12) + b"\x81\x00\x00\x05" * tags + kind.to_bytes(2, "big")


def over_v4(body: bytes, tags: int = 0, options: int = 0) -> bytes:
    udp = struct.pack(">HHHH", 0xC000, 4791, 8 + len(body), 0) + body
    head = struct.pack(">BBHHHBBH4s4s", 0x45 + options, 0, 20 + 4 * options + len(udp), 1, 0x4000, 64, 17, 0,
                       b"\x0a\0\0\1", b"\x0a\0\0\2")
    return ethernet(0x0800, tags) + head + bytes(4 * options) + udp


def over_v6(body: bytes, tags: int = 0, chain: bytes = b"", first: int = 17) -> bytes:
    udp = struct.pack(">HHHH", 0xC000, 4791, 8 + len(body), 0) + body
    length = len(chain) + len(udp)
    head = struct.pack(">IHBB16s16s", 6 << 28, length, first, 64, bytes(15) + b"\1", bytes(15) + b"\2")
    return ethernet(0x86DD, tags) + head + chain + udp


EXTENSIONS = b"\x2b\x00" + bytes(6) + b"\x3c\x01" + bytes(14) + b"\x11\x00" + bytes(6)
OPCODES = [*range(0x18), *range(0x20, 0x2C), 0x64, 0x65, 0x81, 0xAA]


@pytest.mark.parametrize("opcode", OPCODES)
def test_every_header_cut_at_every_length(guarded: Guarded, opcode: int) -> None:
    body = ib(opcode)
    for whole in (
        over_v4(body), over_v4(body, tags=2), over_v4(body, options=10), over_v6(body), over_v6(body, tags=1),
        over_v6(body, chain=EXTENSIONS, first=0),
    ):
        full = guarded.decode(whole)
        assert isinstance(full, Roce)
        assert full.opcode == opcode
        for length in range(len(whole)):
            assert guarded.decode(whole[:length]) == "truncated", length


@pytest.mark.parametrize("opcode", OPCODES)
def test_every_packet_too_short_for_its_headers(guarded: Guarded, opcode: int) -> None:
    """Not cut by the capture: the lengths agree with each other, the headers just do not fit."""
    whole = ib(opcode)
    seen = set()
    for length in range(len(whole)):
        for frame in (over_v4(whole[:length]), over_v6(whole[:length])):
            found = guarded.decode(frame)
            seen.add(found if isinstance(found, str) else "roce")
            if length < 16:
                assert found == "malformed"
            if isinstance(found, Roce):
                assert found.payload_offset + found.payload_len + found.pad + 4 == len(frame)
    assert seen <= {"malformed", "roce"}


def test_pad_larger_than_the_payload(guarded: Guarded) -> None:
    for pad in (1, 2, 3):
        body = bytearray(ib(0x04, 0)[:12] + bytes(4))
        body[1] |= pad << 4
        assert guarded.decode(over_v4(bytes(body))) == "malformed"


@settings(max_examples=2000)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    found = SHARED.decode(data)
    assert isinstance(found, Roce) or found in STATUS_NAMES
    assert found == decode(data)


@settings(max_examples=3000)
@given(
    st.sampled_from(OPCODES),
    st.booleans(),
    st.lists(st.tuples(st.integers(12, 130), st.binary(min_size=1, max_size=4)), max_size=4),
    st.integers(0, 140),
)
def test_damaged_packets(opcode: int, six: bool, damage: list[tuple[int, bytes]], cut: int) -> None:
    body = ib(opcode)
    data = bytearray(over_v6(body, chain=EXTENSIONS, first=0) if six else over_v4(body, options=1))
    for at, patch in damage:
        data[at : at + len(patch)] = patch
    raw = bytes(data[: max(0, len(data) - cut)])
    found = SHARED.decode(raw)
    if isinstance(found, Roce):
        assert found.payload_offset + found.payload_len + found.pad + 4 <= len(raw)


def other_traffic(kind: int, body: bytes) -> bytes:
    """Headers that are sorted as noise: IPv4 and IPv6 with any protocol, and other Ethernet types."""
    if kind == 0x0800:
        head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, 6, 0, bytes(4), bytes(4))
        return ethernet(kind) + head + body
    if kind == 0x86DD:
        return ethernet(kind) + struct.pack(">IHBB32x", 6 << 28, len(body), 6, 64) + body
    return ethernet(kind, tags=1) + body


@settings(max_examples=2000)
@given(
    st.sampled_from([0x0800, 0x86DD, 0x0806, 0x8100, 0x88A8, 0x0026]),
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(12, 60), st.binary(min_size=1, max_size=3)), max_size=3),
    st.integers(0, 80),
)
def test_survey_of_anything(kind: int, body: bytes, damage: list[tuple[int, bytes]], cut: int) -> None:
    data = bytearray(other_traffic(kind, body))
    for at, patch in damage:
        data[at : at + len(patch)] = patch
    survey = Observer()
    SHARED.survey(survey, bytes(data[: max(0, len(data) - cut)]))
    interpret(survey.report())


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("payload", [0, 1, 8, 16, 32, 64, 128, 256])
def test_survey_reads_no_further_than_the_packet(guarded: Guarded, opcode: int, payload: int) -> None:
    """Payload looks (clear-to-send, LL, LL128) at the sizes where they begin to apply, right ICRC."""
    for six in (False, True):
        frame = bytearray(over_v6(ib(opcode, payload)) if six else over_v4(ib(opcode, payload)))
        found = decode(bytes(frame))
        assert isinstance(found, Roce)
        frame[-4:] = found.icrc.to_bytes(4, "little")
        survey = Observer()
        guarded.survey(survey, bytes(frame))
        assert survey.report()["flows"][0]["icrc"]["ok"] == 1


SHARED = Guarded()
