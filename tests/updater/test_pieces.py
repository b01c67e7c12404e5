"""What the kernels write and where: narrow types, copies, pieces next to each other, parts of large tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from updater import kernels
from updater.rounding_modes import RoundingMode, root_of, rule

EVERY = pytest.mark.parametrize("kernel", kernels.names())
GUARD = 7.25


def guarded(n: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(n elements whose address is a multiple of 64 plus `shift` elements, all of the memory round them)."""
    whole = torch.full((n + 256,), GUARD, dtype=dtype)
    start = 64 + (-(whole.data_ptr() // dtype.itemsize + 64) % (64 // dtype.itemsize)) + shift
    return whole[start : start + n], whole


def untouched(part: torch.Tensor, whole: torch.Tensor) -> bool:
    start = (part.data_ptr() - whole.data_ptr()) // part.element_size()
    return bool((whole[:start] == GUARD).all() and (whole[start + part.numel() :] == GUARD).all())


def piece(of: int, n: int, g: torch.Tensor, arrays: list, low: torch.Tensor | None = None) -> tuple:
    """arrays: p m v x, then the next version's."""
    addresses = [0 if array is None else array.data_ptr() for array in arrays]
    return of, n, g.data_ptr(), *addresses, 0 if low is None else low.data_ptr(), 0


# Of every exponent: the smallest and largest fractions, and those round which bfloat16 and fp16 are decided.
FRACTIONS = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFFFF]
BITS = [sign << 31 | exponent << 23 | fraction for sign in (0, 1) for exponent in range(256) for fraction in FRACTIONS]


@EVERY
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_rounds_to_nearest_even_and_keeps_every_nan(kernel: str, name: str) -> None:
    source = torch.from_numpy(np.array(BITS, np.uint32).view(np.float32))
    kind = getattr(torch, name)
    out = torch.zeros(len(BITS), dtype=kind)
    kernels.narrow(out.data_ptr(), source.data_ptr(), len(BITS), name, kernel)
    right = source.to(kind)
    assert torch.equal(out.isnan(), source.isnan())
    numbers = ~source.isnan()
    assert torch.equal(out.view(torch.int16)[numbers], right.view(torch.int16)[numbers])


@EVERY
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_writes_no_element_more(kernel: str, name: str) -> None:
    source = torch.arange(80, dtype=torch.float32)
    for n in range(80):
        out, whole = guarded(n, getattr(torch, name))
        kernels.narrow(out.data_ptr(), source.data_ptr(), n, name, kernel)
        assert torch.equal(out, source[:n].to(out.dtype)) and untouched(out, whole)


def test_copies_of_any_length_and_alignment() -> None:
    source = np.random.default_rng(1).integers(0, 256, 400, np.uint8)
    for size in [*range(40), 63, 64, 65, 127, 128, 200, 300]:
        for to in range(0, 20, 3):
            target = np.full(512, 0xA5, np.uint8)
            at = 64 + to - target.ctypes.data % 16
            kernels.copy(target.ctypes.data + at, source.ctypes.data + 5, size)
            assert (target[at : at + size] == source[5 : 5 + size]).all()
            assert (target[:at] == 0xA5).all() and (target[at + size :] == 0xA5).all()


@EVERY
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("low", ["", "bfloat16", "float16"])
def test_a_step_writes_its_piece_and_nothing_else(kernel: str, low: str, shift: int) -> None:
    """Every length up to more than two vectors, and one of many; all the arrays that AMSGrad has."""
    options = {"lr": 0.1, "amsgrad": True}
    for n in [*range(1, 40), 127, 128, 129, 300]:
        state = [torch.rand(n) for _ in range(4)]
        g = torch.randn(n)
        made = [guarded(n, shift=shift) for _ in range(4)]
        narrow = guarded(n, getattr(torch, low), shift) if low else None
        constants = rule(RoundingMode("torch-cpu", root="ieee"), "adam", options, 3, low=low)
        arrays = [*state, *(part for part, _ in made)]
        pool = kernels.Pool(0, kernel)
        pool.wait(pool.submit([constants], [piece(0, n, g, arrays, narrow and narrow[0])]))
        m = state[1] + (g - state[1]) * torch.tensor(0.1)
        assert torch.allclose(made[1][0], m, rtol=1e-5, atol=1e-6)  # what cancels has fewer digits
        assert torch.equal(made[3][0], torch.maximum(state[3], made[2][0]))
        assert all(untouched(part, whole) for part, whole in made)
        if narrow:
            assert torch.equal(narrow[0], made[0][0].to(narrow[0].dtype)) and untouched(*narrow)


@EVERY
@pytest.mark.parametrize("odd", range(5), ids=["p", "m", "v", "x", "low"])
def test_arrays_need_not_be_aligned_alike(kernel: str, odd: int) -> None:
    """One of them lies three elements off: the same is written, and nothing else."""
    n = 300  # vectors that are stored eight together, one by one, and a rest
    state, g = [torch.rand(n) for _ in range(4)], torch.randn(n)
    constants = rule(RoundingMode("torch-cpu", root="ieee"), "adam", {"lr": 0.1, "amsgrad": True}, 3, low="bfloat16")
    pool, found = kernels.Pool(0, kernel), []
    for which in (None, odd):
        made = [guarded(n, torch.bfloat16 if k == 4 else torch.float32, 3 if k == which else 0) for k in range(5)]
        arrays = [*state, *(part for part, _ in made[:4])]
        pool.wait(pool.submit([constants], [piece(0, n, g, arrays, made[4][0])]))
        found.append(made)
    for (right, _), (part, whole) in zip(*found, strict=True):
        assert torch.equal(part, right) and untouched(part, whole)


@EVERY
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("grad", ["float32", "bfloat16", "float16"])
def test_large_pieces_are_cut_into_parts(kernel: str, grad: str, threads: int) -> None:
    """More elements than one part has, in one batch of three pieces with two rules: each is done, and once."""
    kind = getattr(torch, grad)
    sizes = [150_001, 7, 65_536]
    rules = [rule(RoundingMode("torch-cpu"), "sgd", {"lr": lr}, 1, grad=grad, low="bfloat16") for lr in (1.0, 0.5)]
    gradients = [torch.arange(n).remainder(101).to(kind) for n in sizes]
    before = [torch.arange(n).remainder(7).float() for n in sizes]
    after = [guarded(n) for n in sizes]
    low = [guarded(n, torch.bfloat16) for n in sizes]
    pool = kernels.Pool(threads, kernel)
    pieces = [
        piece(k % 2, sizes[k], gradients[k], [before[k], None, None, None, after[k][0], None, None, None], low[k][0])
        for k in range(3)
    ]
    pool.wait(pool.submit(rules, pieces))
    for k in range(3):
        right = before[k] - gradients[k].float() * (1.0, 0.5)[k % 2]
        assert torch.equal(after[k][0], right) and torch.equal(low[k][0], right.to(torch.bfloat16))
        assert untouched(*after[k]) and untouched(*low[k])
    pool.close()


def test_a_wait_ends_when_its_batch_is_done() -> None:
    """Twenty batches, each of which reads what the one before wrote."""
    n = 300_000
    states = [torch.zeros(n) for _ in range(21)]
    g = torch.full((n,), -1.0)
    pool = kernels.Pool(2)
    constants = rule(RoundingMode("torch-cpu"), "sgd", {"lr": 1.0}, 1)
    for k in range(20):
        ticket = pool.submit(
            [constants], [piece(0, n, g, [states[k], None, None, None, states[k + 1], None, None, None])])
        pool.wait(ticket)
        assert bool((states[k + 1] == k + 1).all())
    pool.close()


def elements(values: list[int], kind: type) -> int:
    array = np.array(values, kind)
    return kernels.checksum(array.ctypes.data, len(array), array.itemsize)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_the_checksum_sees_length_place_and_block(kind: type) -> None:
    """Zeros more, two elements exchanged, two blocks exchanged, one bit: another sum."""
    values = list(range(100))
    right = elements(values, kind)
    assert elements([*values, 0], kind) != right and elements([0, *values], kind) != right
    assert elements([1, 0, *values[2:]], kind) != right
    assert elements([0x80 + 3, *values[1:]], kind) != right
    blocks = [*[5] * 65_536, *[6] * 65_536]
    assert elements(blocks, kind) != elements(blocks[::-1], kind)


# -- square roots --------------------------------------------------------------------------------------------------

SEQUENCES = [root for root in kernels.ROOTS if root != "call" and kernels.has_root(root)]
BY_SEQUENCE = pytest.mark.parametrize("root", SEQUENCES)
SPECIAL = [0.0, -0.0, 1e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, 1e-29, 1.3e-29, 1.0, 4.0, 3.4e38, float("inf")]


@EVERY
@BY_SEQUENCE
def test_square_roots_where_the_estimate_fails(kernel: str, root: str) -> None:
    """The sequences are for ordinary numbers: zero and infinity have IEEE's roots, and small ones as many bits."""
    for at in range(16):
        source = torch.full((16,), 2.25)
        for value in SPECIAL:
            source[at] = value
            out = root_of(source, root, kernel)
            right = source.double().sqrt().float()
            assert torch.equal(out.signbit(), right.signbit())
            assert torch.allclose(out, right, rtol=2e-7, atol=0)


@EVERY
@BY_SEQUENCE
def test_every_element_has_its_own_root(kernel: str, root: str) -> None:
    source = 10.0 ** torch.linspace(-30, 30, 1000)
    assert torch.allclose(root_of(source, root, kernel), source.double().sqrt().float(), rtol=2e-7, atol=0)


@EVERY
@BY_SEQUENCE
@pytest.mark.parametrize("value", [-1.0, -1e-40, float("-inf"), float("nan")])
def test_what_has_no_root_is_nan(kernel: str, root: str, value: float) -> None:
    assert root_of(torch.tensor([value, 4.0]), root, kernel).isnan().tolist() == [True, False]


@pytest.mark.parametrize("kernel", kernels.names()[:-1])
@BY_SEQUENCE
@given(st.lists(st.integers(0, 0x7F800000), min_size=1, max_size=40))
def test_every_kernel_takes_the_same_roots(kernel: str, root: str, bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found, plain = root_of(values, root, kernel), root_of(values, root, "portable")
    assert torch.equal(found.view(torch.int32), plain.view(torch.int32))


@pytest.mark.skipif("rsqrt14" not in SEQUENCES, reason="this processor has no vrsqrt14ps")
def test_the_residual_step_gives_the_ieee_root_or_seldom_the_number_below() -> None:
    """From an estimate of 14 bits; that is what makes Intel's library differ. The other steps err to both sides."""
    values = torch.arange(0x3F800000, 0x40800000, 977, dtype=torch.int32).view(torch.float32)
    ieee = values.double().sqrt().float().view(torch.int32)
    below = ieee - root_of(values, "rsqrt14").view(torch.int32)
    assert set(below.tolist()) == {0, 1} and 0.003 < below.float().mean() < 0.009
    for other in ("rsqrt14-coupled", "rsqrt14-newton"):
        assert set((ieee - root_of(values, other).view(torch.int32)).tolist()) >= {-1, 0, 1}


@BY_SEQUENCE
def test_a_factor_of_four_changes_no_digit_of_a_root(root: str) -> None:
    """What makes it enough to compare two exponents: down to denormal results of the residual, up to the largest."""
    values = torch.arange(0x3F800000, 0x40800000, 4099, dtype=torch.int32).view(torch.float32)
    middle = root_of(values, root)
    for power in range(-124, 126, 2):
        if root == "rsqrt" and not -98 <= power <= 124:
            continue  # its single operations reach the ends of the range
        found = root_of(values * 2.0**power, root)
        assert torch.equal(found, middle * 2.0 ** (power // 2)), power


@EVERY
@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_stays_in_amsgrads_maximum(kernel: str, fused: bool) -> None:
    """torch.maximum lets a NaN of either side win; std::max, of the scalar tails, keeps the first argument."""
    n, nan = 24, float("nan")
    rounding = RoundingMode("torch-cpu-fused" if fused else "torch-cpu", root="" if fused else "ieee")
    x, g = torch.full((n,), 1.0), torch.ones(n)
    x[::3], g[1::3] = nan, nan
    state = [torch.ones(n), torch.ones(n), torch.ones(n), x]
    out = [torch.zeros(n) for _ in range(4)]
    tail = 7 if fused else 0
    pool = kernels.Pool(0, kernel)
    one = piece(0, n, g, [*state, *out])[:-1]
    pool.wait(pool.submit([rule(rounding, "adam", {"lr": 0.1, "amsgrad": True}, 2)], [(*one, tail)]))
    expected = x.isnan() | g.isnan()
    expected[n - tail :] = x[n - tail :].isnan()
    assert torch.equal(out[3].isnan(), expected)
