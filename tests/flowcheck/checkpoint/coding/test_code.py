"""The erasure code: any k of k + m streams give all others, and one fewer is refused."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowcheck.checkpoint.coding import galois
from flowcheck.checkpoint.coding.code import Code
from flowcheck.errors import UserError


def times(a: int, b: int) -> int:
    """By shifting and adding, polynomial 0x11d: from the definition."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a, b = a << 1, b >> 1
        if a & 0x100:
            a ^= 0x11D
    return product


def stream(seed: object, length: int) -> bytes:
    return random.Random(str(seed)).randbytes(length)


def plain(coefficients: bytes, streams: list[bytes]) -> list[bytes]:
    k = len(streams)
    out = []
    for row in range(len(coefficients) // k):
        total = bytearray(len(streams[0]))
        for j, one in enumerate(streams):
            for at, byte in enumerate(one):
                total[at] ^= times(coefficients[row * k + j], byte)
        out.append(bytes(total))
    return out


def test_the_field() -> None:
    for a, b in itertools.product((0, 1, 2, 3, 29, 128, 142, 255), range(256)):
        assert galois.multiply(a, b) == times(a, b)
    assert all(times(a, galois.reciprocal(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        galois.reciprocal(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 9), st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 191, 300]),
    st.integers(0, 3), st.integers(0, 10**6),
)
def test_every_kernel_is_the_definition(k: int, rows: int, length: int, off: int, seed: int) -> None:
    """Of any length, beginning anywhere; nothing beside the result is written."""
    streams = [stream((seed, j), length) for j in range(k)]
    coefficients = stream(seed, k * rows)
    wanted = plain(coefficients, streams)
    for kernel in galois.kernels():
        memory = [bytearray(b"\xee" * (length + 8)) for _ in range(rows)]
        shifted = [memoryview(b"x" * off + one)[off:] for one in streams]
        galois.combine(coefficients, shifted, [memoryview(one)[off : off + length] for one in memory], kernel)
        for one, right in zip(memory, wanted, strict=True):
            assert bytes(one) == b"\xee" * off + right + b"\xee" * (8 - off)


@pytest.mark.parametrize("off", [0, 8])
@pytest.mark.parametrize("length", [(1 << 20) - 3, 1 << 20, (1 << 20) + 77])
def test_kernels_agree_on_what_bypasses_the_caches(length: int, off: int) -> None:
    import numpy as np

    streams = [stream(j, length) for j in range(3)]
    coefficients = stream("c", 3 * 5)
    found = []
    for kernel in galois.kernels():
        memory = np.zeros((5, length + 128), np.uint8)
        rows = [memoryview(row.data)[-row.ctypes.data % 64 + off :][:length] for row in memory]
        galois.combine(coefficients, streams, rows, kernel)
        found.append([bytes(row) for row in rows])
    assert all(one == found[0] for one in found)
    assert found[0][4][:99] == plain(coefficients[12:], [one[:99] for one in streams])[0]


@pytest.mark.parametrize(("k", "m"), [(k, m) for k in range(1, 7) for m in range(1, 8) if k + m <= 8])
def test_any_k_streams_give_all(k: int, m: int) -> None:
    """Every subset of what is lost, up to m; and of m + 1 none is given back."""
    code = Code(k, m)
    data = [stream(j, 97) for j in range(k)]
    parity = [bytearray(97) for _ in range(m)]
    code.encode(data, parity)
    whole = [*data, *map(bytes, parity)]
    for count in range(m + 2):
        for gone in itertools.combinations(range(k + m), count):
            there = {number: whole[number] for number in range(k + m) if number not in gone}
            lost = {number: bytearray(97) for number in gone}
            if count > m:
                with pytest.raises(UserError, match=f"{k - 1} of {k + m} streams are there, and {k} are needed"):
                    code.rebuild(there, lost)
                assert not any(any(one) for one in lost.values())
            else:
                code.rebuild(there, lost)
                assert all(bytes(one) == whole[number] for number, one in lost.items())


def test_one_parity_is_xor() -> None:
    parity = bytearray(3)
    Code(3, 1).encode([b"abc", b"\0\1\2", b"xyz"], [parity])
    assert parity == bytes(a ^ b ^ c for a, b, c in zip(b"abc", b"\0\1\2", b"xyz", strict=True))


def test_parity_has_cauchys_coefficients() -> None:
    """1 / (x_i + y_j), as isa-l's gf_gen_cauchy1_matrix: written down for 3 + 2."""
    code = Code(3, 2)
    assert [times(number ^ j, code.row(number)[j]) for number in (3, 4) for j in range(3)] == [1] * 6
    assert code.row(1) == bytes([0, 1, 0])


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 0), (31, 2), (-1, 2)])
def test_codes_that_cannot_be(k: int, m: int) -> None:
    with pytest.raises(UserError, match="streams of data and"):
        Code(k, m)


def test_the_largest_code() -> None:
    code = Code(28, 4)
    data, parity = [stream(j, 64) for j in range(28)], [bytearray(64) for _ in range(4)]
    code.encode(data, parity)
    lost = {number: bytearray(64) for number in (0, 9, 27, 30)}
    whole: list[bytes | bytearray] = [*data, *parity]
    code.rebuild({number: whole[number] for number in range(32) if number not in lost}, lost)
    assert all(bytes(one) == bytes(whole[number]) for number, one in lost.items())


@pytest.mark.parametrize("call", [
    lambda: galois.combine(b"\1", [b"ab"], [bytearray(3)]),
    lambda: galois.combine(b"\1\1", [b"ab"], [bytearray(2)]),
    lambda: galois.combine(b"", [], [bytearray(2)]),
    lambda: galois.combine(b"\1" * 33, [b"ab"] * 33, [bytearray(2)]),
    lambda: galois.combine(b"\1", [b"ab"], [bytearray(2)], "none such"),
    lambda: galois.inverse(b"\0", 1),
    lambda: galois.inverse(b"\1", 2),
    lambda: galois.product(b"\1\2\3", b"\1\2", 2),
    lambda: Code(2, 1).encode([b"a"], [bytearray(1)]),
    lambda: Code(2, 1).rebuild({0: b"a", 3: b"b"}, {1: bytearray(1)}),
    lambda: Code(2, 1).coefficients([0], [1]),
])
def test_what_does_not_fit_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        call()


def test_results_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(BufferError):
        galois.combine(b"\1", [b"ab"], [b"cd"])
    galois.combine(b"\1", [b""], [bytearray()])  # nothing to do
