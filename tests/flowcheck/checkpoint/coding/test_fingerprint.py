"""A short sum that multiples and sums keep, and that changes where a byte does."""

from __future__ import annotations

import itertools
import random

import pytest
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


@pytest.mark.parametrize("length", [31 * WIDTH, 31 * 31 * WIDTH, 5000])
def test_parts_of_one_piece_that_were_exchanged_show(length: int) -> None:
    """Whichever two, and however long they are: each part counts differently."""
    data = random.Random(2).randbytes(length)
    whole = of(data, length)
    size = -(-length // 31)
    for one, other in itertools.combinations(range(0, length - size + 1, size), 2):
        swapped = bytearray(data)
        swapped[one : one + size], swapped[other : other + size] = data[other:][:size], data[one:][:size]
        assert of(bytes(swapped), length) != whole, (one, other)


@pytest.mark.parametrize(("length", "piece", "value"), [
    (0, 1, "00000000000000000000000000000000"), (5, 5, "457c769f410000000000000000000000"),
    (16, 16, "abc18c5c6ff81e78f4c7007bd565f148"), (17, 17, "3f40e9a11f96c3f4ac7f629f4ed3dcfd"),
    (496, 496, "06a4a801e2b34c0ef4c7a49c050e70df"), (497, 497, "9b481ef116842dc21f4952ed4d3636c4"),
    (1000, 1000, "0e232076797899c9e29cadd42e4855f3"), (5000, 700, "36e7cb116c293887fa63c4bb01821687"),
    (5000, 5000, "ba995ff1ee66a6dd9c771244888a4890"),
])
def test_the_same_bytes_have_the_same_sum_in_every_release(length: int, piece: int, value: str) -> None:
    """A worker of another one would be taken for one that sends what it has not."""
    assert of(random.Random(length).randbytes(length), piece).hex() == value
