"""The trainer's torch expression and the C checksum are one function, and it sees what it must see."""
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowcheck.control.checksum import checksum as trainers
from flowcheck.control.checksum import checksums
from updater import kernels
from updater.verify import Comparison, checksum

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


# -- kernels -----------------------------------------------------------------------------------------------------

EVERY = pytest.mark.parametrize("kernel", kernels.names())
SIZES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
BLOCK = 1 << 16


def bits(size, n, seed=1):
    """n elements that are full of ones, where products are longest, and of noise; one element into their memory."""
    generator = np.random.default_rng(seed)
    found = generator.integers(0, 2 ** (8 * size), n + 1, SIZES[size], endpoint=False)
    found[generator.random(n + 1) < 0.3] = 2 ** (8 * size) - 1
    return found[1:]


@EVERY
@pytest.mark.parametrize("size", SIZES)
@given(n=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_every_kernel_sums_as_the_definition_does(kernel, size, n, seed):
    values = bits(size, n, seed)
    assert kernels.checksum(values.ctypes.data, n, size, kernel) == by_hand(torch.from_numpy(values.copy()))


@EVERY
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK + 17, 4 * BLOCK, 4 * BLOCK + 1, 9 * BLOCK - 3, 8 * BLOCK])
def test_every_kernel_sums_blocks_alone_and_abreast(kernel, size, n):
    values = bits(size, n)
    assert kernels.checksum(values.ctypes.data, n, size, kernel) == trainers(torch.from_numpy(values.copy()))


def test_other_elements_have_no_checksum():
    for size in (0, 3, 16):
        with pytest.raises(ValueError, match=f"elements of {size} bytes have no checksum"):
            kernels.checksum(0, 0, size)
        with pytest.raises(ValueError, match=f"elements of {size} bytes have no checksum"):
            kernels.Pool(0).checksums([(0, 0, size)])


# -- workers -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("threads", [0, 1, 3])
def test_workers_give_the_sums_of_all_tensors_in_order(threads):
    tensors = [torch.from_numpy(bits(4, n, n).view(np.int32).copy()) for n in (5, 0, 20 * BLOCK + 7, BLOCK, 1)]
    pool = kernels.Pool(threads)
    places = [(t.data_ptr(), t.numel(), t.element_size()) for t in tensors]
    sums, none, again = pool.checksums(places, tensors), pool.checksums([]), pool.checksums(places[::-1])
    right = [trainers(tensor) for tensor in tensors]
    assert (sums.get(), none.get(), again.get()) == (right, [], right[::-1])
    assert sums.get(0) == right
    pool.close()
    assert sums.get() == right
    with pytest.raises(ValueError, match="closed"):
        pool.checksums(places)


def test_sums_of_a_pool_that_was_closed_are_there():
    tensor = torch.arange(10 * BLOCK)
    pool = kernels.Pool(2)
    sums = pool.checksums([(tensor.data_ptr(), tensor.numel(), 8)] * 3, tensor)
    pool.close()
    assert sums.get() == [trainers(tensor)] * 3


def test_a_sum_that_is_not_there_yet_is_none():
    """Behind so much work that a look without waiting comes before its end."""
    tensor = torch.ones(64 * BLOCK)
    pool = kernels.Pool(1)
    sums = pool.checksums([(tensor.data_ptr(), tensor.numel(), 4)] * 50, tensor)
    assert sums.get(0) is None
    assert set(sums.get()) == {trainers(tensor)}


# -- comparison --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("threads", [0, 2])
def test_the_first_tensor_that_differs_is_named(threads):
    pool = kernels.Pool(threads)
    state = {"a": torch.randn(5), "b": torch.randn(70_000).view(7, -1).T, "c": torch.tensor(True)}
    theirs = checksums(state)
    assert Comparison(pool, state, theirs).differing() == ""
    assert Comparison(pool, state, {}).differing() == ""
    assert Comparison(pool, state, {"c": theirs["c"]}).differing() == ""
    assert Comparison(pool, state, {"d": 0, **theirs}).differing() == "d"
    for name in state:
        assert Comparison(pool, state, theirs | {name: theirs[name] ^ 1 << 63}).differing() == name
    state["b"].view(torch.int32)[3, 6] ^= 1
    assert Comparison(pool, state, theirs).differing() == "b"
    wrong = {name: value ^ 1 for name, value in theirs.items()}
    assert Comparison(pool, state, dict(reversed(wrong.items()))).differing() == "c"


def test_the_trainers_side_needs_torch_alone():
    code = (
        "import sys\nsys.modules['numpy'] = None\nimport flowcheck.control.checksum\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('updater', 'parser', 'dataplane')]\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
