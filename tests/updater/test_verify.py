"""The trainer's torch expression and the C checksum are one function, and it sees what it must see."""
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.checksum import checksum as trainers
from flowcheck.checksum import checksums
from updater.errors import ReplicaError
from updater.verify import Status, Verification, checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
M64 = (1 << 64) - 1


def mix(k):
    h = (k + 1) * 0x9E3779B97F4A7C15 & M64
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93 & M64
    return h ^ h >> 32


def by_hand(tensor):
    """The definition with Python's integers."""
    size = tensor.element_size()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
    weighted = ((mix((i >> 16) + 65536) | 1) * (mix(i & 0xFFFF) | 1) * b for i, b in enumerate(words))
    return (mix(len(words)) + sum(weighted)) & M64


@given(st.integers(0, 300), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_three_ways_to_the_same_number(n, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype is not torch.bool else raw > 127
    assert trainers(tensor) == checksum(tensor) == by_hand(tensor)


@pytest.mark.parametrize("n", [65535, 65536, 65537, 200_001, (1 << 24) + 70_000])
def test_blocks_and_parts(n):
    tensor = torch.randn(n)
    assert trainers(tensor) == checksum(tensor)
    if n < 10**6:
        assert checksum(tensor) == by_hand(tensor)
    assert trainers(tensor[: n - n % 5].view(5, -1).T) == checksum(tensor[: n - n % 5].view(5, -1).T)


def test_one_bit_an_exchange_a_shift_and_cancelling_errors_show():
    tensor = torch.randn(70_000)
    seen = {checksum(tensor)}
    for where in (0, 1, 65_535, 65_536, 69_999):
        for bit in (0, 15, 31):
            other = tensor.clone()
            other.view(torch.int32)[where] ^= -(1 << 31) if bit == 31 else 1 << bit
            seen.add(checksum(other))
    for a, b in [(0, 1), (5, 65_536 + 5), (3, 69_999)]:
        other = tensor.clone()
        other[[a, b]] = tensor[[b, a]]
        seen.add(checksum(other))
    seen.add(checksum(tensor.roll(1)))
    other = tensor.clone().view(torch.int32)
    other[:4] += torch.tensor([1, -1, -1, 1], dtype=torch.int32)
    seen.add(checksum(other))
    seen.add(checksum(tensor[:-1]))
    assert len(seen) == 1 + 15 + 3 + 1 + 1 + 1
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))


def test_verified_after_n_matches_and_diverged_for_good():
    state = {"a": torch.randn(5), "b": torch.randn(7)}
    check = Verification(needed=2)
    assert check.status is Status.UNVERIFIED
    assert check.compare(1, state, checksums(state)) is Status.UNVERIFIED
    assert check.compare(3, state, checksums(state)) is Status.VERIFIED
    theirs = checksums(state)
    state["b"].view(torch.int32)[6] ^= 1
    assert check.compare(4, state, theirs) is Status.DIVERGED
    assert check.reason == "'b' differs from the trainer's at step 4"
    assert check.compare(5, state, checksums(state)) is Status.DIVERGED and check.first == (4, "b")
    for wrong in ({"a": theirs["a"]}, {**checksums(state), "c": 1}):
        assert Verification().compare(1, state, wrong) is Status.DIVERGED
    with pytest.raises(ReplicaError, match="at least 1"):
        Verification(0)


def test_the_trainers_side_needs_torch_alone():
    code = (
        "import sys\nsys.modules['numpy'] = None\nimport flowcheck.checksum\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('updater', 'parser', 'dataplane')]\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
