"""A short sum that multiples and sums keep, and that changes where a byte does."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checkpoint.coding import galois
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.fingerprint import WIDTH, Fingerprint


def of(data: bytes, piece: int) -> bytes:
    one = Fingerprint()
    for at in range(0, len(data), piece):
        one.add(data[at : at + piece])
    return one.value


@given(k=st.integers(1, 6), m=st.integers(1, 4), length=st.integers(0, 3000), piece=st.integers(1, 2000),
       seed=st.integers())
def test_parity_has_the_sum_of_what_it_is_of(k: int, m: int, length: int, piece: int, seed: int) -> None:
    code, dice = Code(k, m), random.Random(seed)
    data = [dice.randbytes(length) for _ in range(k)]
    parity = [bytearray(length) for _ in range(m)]
    code.encode(data, parity)
    for number, row in enumerate(parity):
        wanted = bytearray(WIDTH)
        galois.combine(code.row(k + number), [of(one, piece) for one in data], [wanted])
        assert of(bytes(row), piece) == wanted


@given(length=st.integers(1, 5000), piece=st.integers(1, 5000), bit=st.integers(0, 7), data=st.data())
def test_a_bit_that_differs_shows(length: int, piece: int, bit: int, data: st.DataObject) -> None:
    one = bytearray(random.Random(length).randbytes(length))
    before = of(bytes(one), piece)
    one[data.draw(st.integers(0, length - 1))] ^= 1 << bit
    assert of(bytes(one), piece) != before


def test_what_was_cut_or_exchanged_shows() -> None:
    data = random.Random(1).randbytes(1 << 20)
    whole = of(data, 1 << 16)
    assert whole != of(data[: 1 << 19] + bytes(1 << 19), 1 << 16)  # the second half has not come
    assert whole != of(data[1 << 16 : 1 << 17] + data[: 1 << 16] + data[1 << 17 :], 1 << 16)  # two pieces exchanged
