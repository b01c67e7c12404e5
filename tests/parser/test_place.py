"""The placing kernels: every SIMD version equals the plain one and numpy, catches every flag, writes nowhere else."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parser import place

GUARD = 0xA5
MARGIN = 256
FLAG = 0x1234_5679
FLAG128 = 0x0123_4567_89AB_CDEF
KERNELS = place.names()
kernel = pytest.mark.parametrize("name", KERNELS)
#: Plain C has one loop for all ways; the others have one each.
WAYS = [(name, way) for name in KERNELS for way in (place.ways() if name != "portable" else ["t0"])]
every_way = pytest.mark.parametrize(("name", "way"), WAYS, ids=["-".join(pair) for pair in WAYS])


def arena(size: int, align: int) -> tuple[np.ndarray, int]:
    """Guarded bytes, and the index of a place inside whose address is `align` modulo 64."""
    raw = np.full(size + 2 * MARGIN + 128, GUARD, np.uint8)
    at = MARGIN + (align - (raw.ctypes.data + MARGIN)) % 64
    return raw, at


def only_written(raw: np.ndarray, at: int, size: int) -> bool:
    return bool((raw[:at] == GUARD).all() and (raw[at + size :] == GUARD).all())


def ll_wire(data: np.ndarray, flag: int = FLAG) -> np.ndarray:
    """Section 4.1: 16-byte lines of data4 flag4 data4 flag4."""
    lines = -(-data.size // 8)
    padded = np.zeros(8 * lines, np.uint8)
    padded[: data.size] = data
    words = np.full((lines, 4), flag, np.uint32)
    words[:, 0::2] = padded.view(np.uint32).reshape(lines, 2)
    return words.view(np.uint8).ravel()


def ll128_wire(data: np.ndarray, halves: int, flag: int = FLAG128) -> np.ndarray:
    """Section 4.2, written as the scatter of data words to (line, word), independently of the kernels' gather."""
    padded = np.zeros(960 * halves, np.uint8)
    padded[: data.size] = data
    source = padded.view(np.uint64).reshape(halves, 120)
    wire = np.full((halves, 8, 16), flag, np.uint64)
    for line in range(4):
        wire[:, line, 0:15] = source[:, 16 * line : 16 * line + 15]
        wire[:, line + 4, 14] = source[:, 16 * line + 15]
        wire[:, line + 4, 0:14] = source[:, 64 + 14 * line : 64 + 14 * line + 14]
    return wire.view(np.uint8).ravel()


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


sizes = st.one_of(st.integers(0, 9000), st.sampled_from([0, 1, 7, 8, 63, 64, 65, 127, 128, 512, 960, 2048, 4096]))


@every_way
@settings(max_examples=100)
@given(size=sizes, align=st.integers(0, 63), shift=st.integers(0, 63), seed=st.integers(0, 99))
def test_copy(name: str, way: str, size: int, align: int, shift: int, seed: int) -> None:
    source, (raw, at) = random_bytes(size + 64, seed), arena(size, align)
    place.copy(name, raw.ctypes.data + at, source.ctypes.data + shift, size, way)
    assert (raw[at : at + size] == source[shift : shift + size]).all()
    assert only_written(raw, at, size)


@every_way
@settings(max_examples=100)
@given(size=sizes, align=st.integers(0, 63), shift=st.integers(0, 63), seed=st.integers(0, 99))
def test_ll(name: str, way: str, size: int, align: int, shift: int, seed: int) -> None:
    """All alignments, not only the multiples of a cell that are promised."""
    data, (raw, at) = random_bytes(size, seed), arena(size, align)
    wire = np.concatenate([np.zeros(shift, np.uint8), ll_wire(data)])
    assert place.ll(name, raw.ctypes.data + at, wire.ctypes.data + shift, size, FLAG, way) == -1
    assert (raw[at : at + size] == data).all()
    assert only_written(raw, at, size)


@every_way
@settings(max_examples=100)
@given(data=st.data(), halves=st.integers(0, 9), align=st.integers(0, 7), shift=st.integers(0, 63))
def test_ll128(name: str, way: str, data: st.DataObject, halves: int, align: int, shift: int) -> None:
    size = data.draw(st.one_of(st.just(960 * halves), st.integers(0, 960 * halves)))
    source, (raw, at) = random_bytes(size, halves), arena(size, 8 * align)
    wire = np.concatenate([np.zeros(shift, np.uint8), ll128_wire(source, halves)])
    assert place.ll128(name, raw.ctypes.data + at, wire.ctypes.data + shift, halves, size, FLAG128, way) == -1
    assert (raw[at : at + size] == source).all()
    assert only_written(raw, at, size)


@every_way
@pytest.mark.parametrize("size", [8, 56, 64, 72, 500, 512])
@pytest.mark.parametrize("align", [0, 8, 40, 56])
def test_ll_catches_every_flag(name: str, way: str, size: int, align: int) -> None:
    """One bit of either flag of any line; the line is named and nothing outside the packet's cells is touched."""
    wire = ll_wire(random_bytes(size, 1))
    words = wire.view(np.uint32)
    rng = np.random.default_rng(2)
    for at_flag in range(1, words.size, 2):
        raw, at = arena(size, align)
        words[at_flag] ^= 1 << int(rng.integers(32))
        assert place.ll(name, raw.ctypes.data + at, wire.ctypes.data, size, FLAG, way) == at_flag // 4
        words[at_flag] = FLAG
        assert only_written(raw, at, size)


@kernel
@pytest.mark.parametrize("bytes_short", [0, 1000])
@pytest.mark.parametrize("align", [0, 8])
def test_ll128_catches_every_flag(name: str, bytes_short: int, align: int) -> None:
    size = 4 * 960 - bytes_short
    wire = ll128_wire(random_bytes(size, 1), 4)
    words = wire.view(np.uint64)
    for bit in range(64):
        for line in range(32):
            raw, at = arena(size, align)
            words[16 * line + 15] ^= np.uint64(1 << bit)
            assert place.ll128(name, raw.ctypes.data + at, wire.ctypes.data, 4, size, FLAG128) == line
            words[16 * line + 15] = FLAG128
            assert only_written(raw, at, size)


@kernel
def test_several_wrong_flags_name_the_first(name: str) -> None:
    wire = ll_wire(random_bytes(1024, 3))
    raw, at = arena(1024, 0)
    for line in (100, 31, 7):
        wire.view(np.uint32)[4 * line + 3] ^= 1
        assert place.ll(name, raw.ctypes.data + at, wire.ctypes.data, 1024, FLAG) == line


@kernel
def test_data_equal_to_the_flag_is_data(name: str) -> None:
    data = np.full(256, FLAG, np.uint32).view(np.uint8)
    raw, at = arena(data.size, 0)
    wire = ll_wire(data)
    assert place.ll(name, raw.ctypes.data + at, wire.ctypes.data, data.size, FLAG) == -1
    assert place.ll(name, raw.ctypes.data + at, wire.ctypes.data, data.size, FLAG + 1) == 0


@kernel
@pytest.mark.parametrize("align", [0, 8])
def test_data_equal_to_the_flag_hides_no_wrong_flag_of_ll(name: str, align: int) -> None:
    """One wrong flag in lines whose data words all equal the right one."""
    data = np.full(256, FLAG, np.uint32).view(np.uint8)
    wire = ll_wire(data)
    words = wire.view(np.uint32)
    for at_flag in range(1, words.size, 2):
        raw, at = arena(data.size, align)
        words[at_flag] ^= 1
        assert place.ll(name, raw.ctypes.data + at, wire.ctypes.data, data.size, FLAG) == at_flag // 4
        words[at_flag] = FLAG


@kernel
@pytest.mark.parametrize("bytes_short", [0, 1000])
@pytest.mark.parametrize("align", [0, 8])
def test_data_equal_to_the_flag_hides_no_wrong_flag_of_ll128(name: str, bytes_short: int, align: int) -> None:
    """One wrong flag in lines whose data words all equal the right one."""
    size = 4 * 960 - bytes_short
    words = np.full(4 * 128, FLAG128, np.uint64)
    for line in range(32):
        raw, at = arena(size, align)
        words[16 * line + 15] ^= np.uint64(1)
        assert place.ll128(name, raw.ctypes.data + at, words.ctypes.data, 4, size, FLAG128) == line
        words[16 * line + 15] = FLAG128


def test_the_environment_chooses_a_lesser_kernel() -> None:
    for name in KERNELS:
        out = subprocess.run(
            [sys.executable, "-P", "-c", "from parser import place; print(place.in_use())"],
            env={**os.environ, "FLOWCHECK_SIMD": name, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True,
        )
        assert out.stdout.strip() == name
    assert place.in_use() == os.environ.get("FLOWCHECK_SIMD", KERNELS[0])


def test_an_unknown_kernel_or_way_is_refused() -> None:
    with pytest.raises(ValueError, match="not a kernel of this processor"):
        place.copy("mmx", 0, 0, 0)
    with pytest.raises(ValueError, match="t0-whole"):
        place.copy(KERNELS[0], 0, 0, 0, "t9")


@every_way
@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_a_sweep_places_every_packet(name: str, way: str, protocol: int) -> None:
    """Of a length that is no multiple of a burst, with the last packets' successors missing."""
    n, length = 133, 1024
    piece = [512, 960, 1024][protocol]
    data = random_bytes(n * piece, 5).reshape(n, piece)
    wires = [ll_wire(row) if protocol == 0 else ll128_wire(row, 1) if protocol == 1 else row for row in data]
    source = np.concatenate(wires)
    raw, at = arena(data.size, 0)
    order = np.random.default_rng(6).permutation(n).astype(np.uint64)
    to = raw.ctypes.data + at + order * np.uint64(piece)
    payloads = source.ctypes.data + np.arange(n, dtype=np.uint64) * np.uint64(length)
    flags = np.full(n, [FLAG, FLAG128, 0][protocol], np.uint64)
    place.flush(to, piece)
    assert place.sweep(name, protocol, way, to, payloads, flags, length, 4) == 0
    assert (raw[at : at + data.size].reshape(n, piece)[order] == data).all()
    assert only_written(raw, at, data.size)
    flags[7] += 1
    assert place.sweep(name, protocol, way, to, payloads, flags, length, 4) == (protocol != 2)
    with pytest.raises(ValueError, match="every place"):
        place.sweep(name, protocol, way, to[1:], payloads, flags, length, 4)
