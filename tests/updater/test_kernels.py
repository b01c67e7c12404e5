"""Our kernels against torch.optim on this machine: bits of parameters and of every state, step by step.

The pairwise sample runs in `make test`; the whole grid of the issue (200 steps, sizes 1..100, odd, 2^20+13) is slow.
"""
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from updater import kernels
from updater.errors import OptimizerError
from updater.rounding_modes import ROUNDING_MODES, RoundingMode, cpu_root, rule

CLASSES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
STATES = {"adam": ["exp_avg", "exp_avg_sq"], "adamw": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}
ADAM = [
    {"lr": 1e-3}, {"lr": 1e-3, "weight_decay": 0.01},
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1},
    {"lr": 0.1, "betas": (0.3, 0.9), "eps": 1e-3, "amsgrad": True},
    {"lr": 2e-5, "betas": (0.5, 0.99), "weight_decay": 0.3, "maximize": True, "amsgrad": True},
    {"lr": 1.0, "betas": (0.0, 0.999), "eps": 0.0, "maximize": True},
]
SGD = [
    {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    {"lr": 1e-2, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    {"lr": 1.0, "weight_decay": 0.1, "maximize": True},
]
OPTIONS = {"adam": ADAM, "adamw": ADAM, "sgd": SGD}


def aligned(n, dtype=torch.float32):
    """Zeros at an address that is a multiple of 64."""
    raw = torch.zeros(n * dtype.itemsize + 64, dtype=torch.uint8)
    skip = -raw.data_ptr() % 64
    return raw[skip : skip + n * dtype.itemsize].view(dtype)


def gradients(n, generator, step, special=False, infinite=False):
    """Eight decades, zeros, denormals, both signs; now and then a whole step of zeros.

    special: also of the largest and smallest magnitudes there are; infinite: and infinities and NaN.
    """
    g = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-8, 1, (n,), generator=generator)
    kind = torch.randint(0, 12, (n,), generator=generator)
    g[kind == 0] = 0.0
    g[kind == 1] *= 1e-37
    g[kind == 2] = -0.0
    if special:
        g[kind == 3] *= 1e30
        g[kind == 4] = 1e-45
        g[kind == 5] = -3.4e38
    if infinite:
        g[kind == 6] = float("inf")
        g[kind == 7] = float("nan")
    return g * 0 if step % 17 == 5 else g


class Ours:
    """State of one tensor and its next version, stepped by the kernels."""

    def __init__(self, initial, name, options, rounding, kernel, threads=0, low=""):
        n = initial.numel()
        self.now = [aligned(n) for _ in range(4)]
        self.next = [aligned(n) for _ in range(4)]
        self.now[0].copy_(initial)
        self.name, self.options, self.rounding, self.step = name, options, rounding, 0
        self.low_name, self.low = low, aligned(n, getattr(torch, low)) if low else None
        self.pool = kernels.Pool(threads, kernel)

    def update(self, g, parts=1, **how):
        self.step += 1
        n, grad = g.numel(), str(g.dtype).removeprefix("torch.")
        constants = rule(self.rounding, self.name, self.options, self.step, grad=grad, first=self.step == 1,
                         low=self.low_name, **how)
        odd, cuts, pieces = self.rounding.tail(n), [n * i // parts for i in range(parts + 1)], []
        for a, b in itertools.pairwise(cuts):
            arrays = [t.data_ptr() + 4 * a for t in (*self.now, *self.next)]
            low = self.low.data_ptr() + 2 * a if self.low is not None else 0
            pieces.append((0, b - a, g.data_ptr() + a * g.element_size(), *arrays, low, max(0, b - max(a, n - odd))))
        self.pool.wait(self.pool.submit([constants], pieces, keep=g))
        self.now, self.next = self.next, self.now

    def state(self):
        names = [*STATES[self.name], *(["max_exp_avg_sq"] if self.options.get("amsgrad") else [])]
        if self.name == "sgd" and not self.options.get("momentum"):
            names = []
        return dict(zip(names, ([self.now[1]] if self.name == "sgd" else self.now[1:]), strict=False))


def bits(t):
    """As integers; a NaN is a NaN whatever its sign and payload (the hardware's choice, by order of operands)."""
    flat = t.detach().contiguous()
    return torch.where(flat.isnan(), 0x7FC00000, flat.view(torch.int32))


def assert_equal(ours, theirs, where):
    if not torch.equal(bits(ours), bits(theirs)):
        wrong = (bits(ours) != bits(theirs)).nonzero().flatten()
        i = int(wrong[0])
        raise AssertionError(f"{where}: {len(wrong)} of {ours.numel()} differ, first {i}: {ours[i]} != {theirs[i]}")


MODES = {"single": ({"foreach": False}, "torch-cpu"), "foreach": ({"foreach": True}, "torch-cpu"),
         "fused": ({"fused": True}, "torch-cpu-fused")}


def compare(name, mode, options, sizes, steps, kernel, seed=0, threads=0, grad=torch.float32, parts=1, root="",
            **odd):
    generator = torch.Generator().manual_seed(seed)
    flags, rounding = MODES[mode]
    initial = [torch.randn(n, generator=generator) * 0.1 for n in sizes]
    twins = [t.clone().requires_grad_(True) for t in initial]
    optimizer = CLASSES[name](twins, **options, **flags)
    ours = [Ours(t, name, options, RoundingMode(rounding, root=root), kernel, threads) for t in initial]
    for step in range(1, steps + 1):
        for twin, mine in zip(twins, ours, strict=True):
            g = gradients(twin.numel(), generator, step, **odd).to(grad)
            twin.grad = g.float()
            mine.update(g, parts)
        optimizer.step()
        for twin, mine in zip(twins, ours, strict=True):
            where = f"{name} {mode} {options} {kernel} n={twin.numel()} step {step}"
            for key, value in mine.state().items():
                if key == "exp_avg" and options.get("betas") == (0.0, 0.999):
                    # torch's own sign of a zero depends on how many threads share it (docs/understand/updater.md).
                    assert_equal(value + 0.0, optimizer.state[twin][key] + 0.0, f"{where} {key}")
                else:
                    assert_equal(value, optimizer.state[twin][key], f"{where} {key}")
            assert_equal(mine.now[0], twin.detach(), f"{where} parameters")


def grid():
    """Every option set with every mode; kernels, gradient types and cuts take turns (all pairs are met)."""
    types = itertools.cycle([torch.float32, torch.bfloat16, torch.float32, torch.float16])
    names, turns, cuts = kernels.names(), itertools.count(), itertools.cycle([1, 3, 1, 1, 7])
    for name in CLASSES:
        for mode in MODES:
            for options in OPTIONS[name]:
                for _ in range(2):
                    yield name, mode, options, names[next(turns) % len(names)], next(types), next(cuts)


@pytest.mark.parametrize("case", list(grid()), ids=lambda c: "-".join((c[0], c[1], c[3])))
def test_bits_of_torch_optim(case):
    name, mode, options, kernel, grad, parts = case
    compare(name, mode, options, [*range(1, 36), 63, 65, 100, 1001], 12, kernel, grad=grad, parts=parts)


@pytest.mark.parametrize("kernel", kernels.names())
def test_the_environment_chooses_a_kernel(kernel):
    """When the library is loaded: in a process of its own."""
    environment = {**os.environ, "FLOWCHECK_SIMD": kernel, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", "from updater import kernels; print(kernels.in_use())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{kernel}\n", done.stderr


@pytest.mark.parametrize("kernel", kernels.names())
def test_large_tensors_on_worker_threads(kernel):
    for mode in MODES:
        compare("adamw", mode, OPTIONS["adamw"][2], [200_003], 3, kernel, threads=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_two_hundred_steps(name, mode, kernel):
    for seed, options in enumerate(OPTIONS[name]):
        compare(name, mode, options, range(1, 101), 200, kernel, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CLASSES)
def test_two_hundred_steps_of_a_million(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for mode in MODES:
            for kernel in kernels.names():
                steps = 200 if kernel == kernels.names()[0] else 10
                compare(name, mode, OPTIONS[name][2], [(1 << 20) + 13], steps, kernel, threads=threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", kernels.names())
def test_the_vendors_own_square_root_gives_the_same(kernel):
    cpu_root()
    for options in ADAM:
        compare("adam", "single", options, [1, 7, 16, 33, 2048, 2049, 5000], 4, kernel, root="call")


@pytest.mark.parametrize("kernel", kernels.names())
@given(
    n=st.integers(1, 700), shift=st.integers(0, 15), together=st.sampled_from(kernels.TOGETHER),
    ahead=st.sampled_from([0, 64, 1024, 4096]), options=st.sampled_from(ADAM), rounding=st.sampled_from(ROUNDING_MODES),
    root=st.sampled_from(list(kernels.ROOTS)), grad=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_tuning_and_place_change_no_bit(kernel, n, shift, together, ahead, options, root, grad, rounding):
    """Against the portable kernel with its parameters where they are by default."""
    cpu_root()  # sets what "call" calls
    if rounding != "torch-cpu" or not kernels.has_root(root):
        root = "ieee"
    name = "adamw" if rounding == "torch-cuda-fused" else "adam"  # whose decay in the gradient is refused there
    generator = torch.Generator().manual_seed(n)
    initial = torch.randn(n, generator=generator)
    tuned, plain = (Ours(initial, name, options, RoundingMode(rounding, root=root), k) for k in (kernel, "portable"))
    tuned.pool = kernels.Pool(0, kernel, together, ahead)
    assert (tuned.pool.together, tuned.pool.ahead) == (together, ahead)
    tuned.now, tuned.next = ([moved(t, shift) for t in version] for version in (tuned.now, tuned.next))
    for step in (1, 2):
        g = gradients(n, generator, step).to(grad)
        tuned.update(g), plain.update(g)
        for a, b in zip(tuned.now, plain.now, strict=True):
            assert_equal(a, b, f"{kernel} {together} {ahead} step {step}")


def moved(tensor, shift):
    """The same values, so many elements off a cache line."""
    out = aligned(tensor.numel() + 16, tensor.dtype)[shift : shift + tensor.numel()]
    out.copy_(tensor)
    return out


@pytest.mark.parametrize(("together", "ahead"), [(0, 0), (3, 0), (16, 0), (8, -1), (8, 65537)])
def test_other_tunings_are_refused(together, ahead):
    with pytest.raises(ValueError, match=f"{together} vectors together, {ahead} bytes ahead"):
        kernels.Pool(0, "", together, ahead)


def test_ieee_roots_differ_where_mkl_is_not_exact():
    if cpu_root() == "ieee":
        pytest.skip("torch.sqrt is IEEE on this processor")
    with pytest.raises(AssertionError, match="parameters"):
        compare("adam", "single", ADAM[0], [100_000], 3, "", root="ieee")


@pytest.mark.parametrize("rounding", ["torch-cuda-foreach", "torch-cuda-fused"])
@pytest.mark.parametrize("kernel", kernels.names()[:-1])
def test_cuda_orders_are_the_same_bits_on_every_kernel(rounding, kernel):
    for options in ADAM:
        generator = torch.Generator().manual_seed(3)
        initial = torch.randn(1000, generator=generator)
        both = [Ours(initial, "adamw", options, RoundingMode(rounding), k) for k in (kernel, "portable")]
        for step in range(1, 8):
            g = gradients(1000, generator, step).to(torch.bfloat16)
            for mine in both:
                mine.update(g, divisor=3, clip=0.3, loss_scale=1024.0)
            for a, b in zip(both[0].now, both[1].now, strict=True):
                assert_equal(a, b, f"{rounding} {options} step {step}")


def test_cuda_foreach_order_written_with_float64():
    """One step of the documented formulas, each fused operation exact in float64 and rounded once."""
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    generator = torch.Generator().manual_seed(5)
    p, g = torch.randn(4096, generator=generator), torch.randn(4096, generator=generator)
    mine = Ours(p, "adamw", options, RoundingMode("torch-cuda-foreach"), "")
    f32, f64 = np.float32, np.float64
    q, m, v = p.numpy(), np.zeros(4096, f32), np.zeros(4096, f32)

    def fma(a, b, c):  # the product is exact in double, the sum is rounded twice: enough for these magnitudes
        return (f64(a) * f64(b) + f64(c)).astype(f32)

    for step in (1, 2):
        mine.update(g)
        x = g.numpy()
        q = q * f32(1 - 1e-3 * 0.01)
        m = fma(f32(1 - 0.9), x - m, m)
        v = fma(f32(1 - 0.999), x * x, v * f32(0.999))
        d = np.sqrt(v) / f32((1 - 0.999**step) ** 0.5) + f32(1e-8)
        q = fma(f32(-(1e-3 / (1 - 0.9**step))), m / d, q)
        for ours, theirs in zip(mine.now, (q, m, v), strict=False):
            assert_equal(ours, torch.from_numpy(theirs), f"step {step}")


@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_the_low_precision_copy_is_torchs_rounding(kernel, low):
    generator = torch.Generator().manual_seed(9)
    mine = Ours(torch.randn(1003, generator=generator), "adam", {"lr": 0.1}, RoundingMode("torch-cpu"), kernel, low=low)
    for step in range(3):
        mine.update(gradients(1003, generator, step), parts=3)
        assert torch.equal(mine.low, mine.now[0].to(getattr(torch, low)))


@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
def test_divisor_unscale_and_clip_as_torch_does_them(kernel, grad):
    generator = torch.Generator().manual_seed(2)
    initial = torch.randn(333, generator=generator)
    twin = initial.clone().requires_grad_(True)
    optimizer = torch.optim.SGD([twin], lr=0.1, momentum=0.9)
    mine = Ours(initial, "sgd", {"lr": 0.1, "momentum": 0.9}, RoundingMode("torch-cpu"), kernel)
    for _ in range(3):
        g = torch.randn(333, generator=generator).to(grad)
        mine.update(g, divisor=3, loss_scale=777.0, clip=0.37)
        twin.grad = (g / 3).float()
        inverse = torch.tensor(777.0).double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([twin.grad], torch.zeros(1), inverse)
        twin.grad.mul_(torch.tensor(0.37))
        optimizer.step()
        assert_equal(mine.now[0], twin.detach(), "parameters")


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
@pytest.mark.parametrize(("low", "which"), [*(("", k) for k in "pmvx"), *(("bfloat16", k) for k in (*"pmvx", "low"))])
@pytest.mark.parametrize("kernel", kernels.names())
def test_arrays_that_are_not_aligned_alike_take_the_slow_way_to_the_same_bits(kernel, low, which, shift):
    """One array so many elements off the others: 4 and 8 are half a vector, where a store past the cache traps."""
    generator = torch.Generator().manual_seed(4)
    initial = torch.randn(500, generator=generator)
    straight, odd = (
        Ours(initial, "adam", {"lr": 0.1, "amsgrad": True}, RoundingMode("torch-cpu"), kernel, low=low)
        for _ in range(2)
    )
    for version in (odd.now, odd.next):
        version[:] = [moved(t, shift if name == which else 0) for name, t in zip("pmvx", version, strict=True)]
    if which == "low":
        odd.low = moved(odd.low, shift)
    for step in range(3):
        g = gradients(501, generator, step)[1:]
        straight.update(g)
        odd.update(g)
        for a, b in zip(straight.now, odd.now, strict=True):
            assert_equal(a, b, f"step {step}")
        assert not low or torch.equal(straight.low, odd.low)


def test_batches_and_their_pieces_are_done_in_order_by_any_number_of_workers():
    """Each batch reads what the one before wrote, so a wait per batch is needed; within one they only add up."""
    for threads in (0, 1, 3):
        with_threads = Ours(torch.ones(300_001), "sgd", {"lr": 1.0}, RoundingMode("torch-cpu"), "", threads)
        for _ in range(5):
            with_threads.update(torch.ones(300_001), parts=5)
        assert torch.equal(with_threads.now[0], torch.full((300_001,), -4.0))
        with_threads.pool.close()
        with pytest.raises(ValueError, match="closed"):
            with_threads.update(torch.ones(300_001))


def test_what_is_not_proven_says_so():
    assert not RoundingMode("torch-cpu", "2.13.0").unproven
    assert "not for 2.7" in RoundingMode("torch-cpu", "2.7.1").unproven
    for name in ("torch-cuda-foreach", "torch-cuda-fused"):
        assert "not for 2.13" in RoundingMode(name, "2.13.0+cu130").unproven
    assert "of which the manifest has no corrections" in RoundingMode("torch-cuda-fused", "2.11.0+cu130").unproven
    with pytest.raises(OptimizerError, match="double precision"):
        rule(RoundingMode("torch-cuda-fused"), "sgd", {"lr": 1}, 1)
    with pytest.raises(OptimizerError, match="not one of torch-cpu"):
        RoundingMode("apex")
