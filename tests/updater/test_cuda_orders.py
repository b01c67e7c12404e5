"""The CUDA orders against exact arithmetic: rational numbers, rounded only where torch's CUDA kernels round.

The formulas are those of torch 2.13's headers: fused_adam_utils.cuh, DeviceAddCmulCdiv.cuh, Lerp.h. Nothing here is
taken from the kernels or from updater/rounding_modes.py.
"""
from fractions import Fraction
from math import floor, log2

import numpy as np
import pytest
import torch

from updater import kernels
from updater.rounding_modes import RoundingMode

from .test_kernels import Ours

N = 41  # two vectors of 16 and a rest; five of 8 and one


def rn(x):
    """To the nearest fp32, ties to even."""
    x = Fraction(x)
    if not x:
        return x
    exponent = floor(log2(abs(x)))
    exponent += (abs(x) >= Fraction(2) ** (exponent + 1)) - (abs(x) < Fraction(2) ** exponent)
    unit = Fraction(2) ** max(exponent - 23, -149)
    return round(x / unit) * unit


def root(x):
    """The fp32 square root: that of a double, rounded once more, is always the nearest."""
    return rn(Fraction(float(np.sqrt(np.float64(float(x))))))


def fma(a, b, c):
    return rn(a * b + c)


def foreach(p, m, v, x, g, step, o):
    """torch._foreach_*: constants are doubles that are rounded once, when a kernel takes them."""
    lr, (b1, b2), eps, decay = o["lr"], o["betas"], rn(o["eps"]), o["weight_decay"]
    if o["decoupled"]:
        p = rn(p * rn(1 - lr * decay))
    elif decay:
        g = fma(p, rn(decay), g)
    w = rn(1 - b1)
    m = fma(w, rn(g - m), m) if abs(w) < Fraction(1, 2) else fma(-rn(1 - w), rn(g - m), g)
    w = rn(1 - b2)  # a factor of one has a case of its own in addcmul: the square is not rounded before it is added
    v = fma(g, g, rn(v * rn(b2))) if w == 1 else fma(w, rn(g * g), rn(v * rn(b2)))
    x = max(x, v)
    d = rn(rn(root(x if o["amsgrad"] else v) / rn((1 - b2**step) ** 0.5)) + eps)
    return fma(rn(-(lr / (1 - b1**step))), rn(m / d), p), m, v, x


def fused(p, m, v, x, g, step, o):
    """adam_math: every argument is a float before anything is computed with it."""
    lr, b1, b2 = rn(o["lr"]), *map(rn, o["betas"])
    eps, decay = rn(o["eps"]), rn(o["weight_decay"])
    if o["decoupled"]:
        p = fma(-rn(lr * decay), p, p)
    elif decay:
        g = fma(p, decay, g)
    m = fma(b1, m, fma(-b1, g, g))
    q = rn(g * g)
    v = fma(b2, v, fma(-b2, q, q))
    size = rn(lr / rn(1 - rn(b1**step)))
    x = max(x, v)
    d = rn(rn(root(x if o["amsgrad"] else v) / root(rn(1 - rn(b2**step)))) + eps)
    return rn(p - rn(rn(size * m) / d)), m, v, x


ORDERS = {"torch-cuda-foreach": foreach, "torch-cuda-fused": fused}
OPTIONS = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1},
    {"lr": 0.1, "betas": (0.3, 0.7), "eps": 1e-3, "weight_decay": 0.01},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.25, "weight_decay": 0.5},
    {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    {"lr": 1e-3, "betas": (0.9, 1e-9), "eps": 1e-8, "weight_decay": 0.0},  # 1 - 1e-9 is 1 in fp32
]


def exact(tensor):
    return [Fraction(x) for x in tensor.double().tolist()]


def differing(mine, theirs):
    return [i for i, (a, b) in enumerate(zip(exact(mine), theirs, strict=True)) if a != b]


@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize(("order", "name", "options"), [
    (order, name, options) for order in ORDERS for name in ("adam", "adamw") for options in OPTIONS
    if not (order == "torch-cuda-fused" and name == "adam" and options["weight_decay"])  # refused
])
def test_three_steps_are_those_of_exact_arithmetic(order, name, options, kernel):
    """Parameters and all moments: gradients of four decades and both signs, larger in the second step than after it."""
    generator = torch.Generator().manual_seed(17)
    start = torch.randn(N, generator=generator)
    mine = Ours(start, name, options, RoundingMode(order), kernel)
    state = [exact(start), *([Fraction(0)] * N for _ in range(3))]
    asked = {"amsgrad": False, **options, "decoupled": name == "adamw" and options["weight_decay"] > 0}
    sign = -1 if options.get("maximize") else 1
    for step, scale in ((1, 1.0), (2, 3.0), (3, 1e-3)):
        g = torch.randn(N, generator=generator) * 10.0 ** torch.randint(-3, 1, (N,), generator=generator) * scale
        mine.update(g)
        rows = zip(*state, exact(sign * g), strict=True)
        state = list(zip(*(ORDERS[order](*row, step, asked) for row in rows), strict=True))
        known = {"parameters": 0, "exp_avg": 1, "exp_avg_sq": 2} | ({"max_exp_avg_sq": 3} if asked["amsgrad"] else {})
        for what, i in known.items():
            assert not differing(mine.now[i], state[i]), f"{what} at step {step}"


# -- gradients in 16 bits ----------------------------------------------------------------------------------


def divided(g, divisor):
    """torch on CUDA: 16-bit elements times the fp32 reciprocal in fp32, then rounded to their own 16 bits."""
    reciprocal = np.float64(np.float32(1) / np.float32(divisor))
    return (g.double() * reciprocal).float().to(g.dtype)


def sixteen_bits(dtype, n=1003):
    generator = torch.Generator().manual_seed(23)
    return (torch.randn(n, generator=generator) * 10.0 ** torch.randint(-3, 3, (n,), generator=generator)).to(dtype)


@pytest.mark.parametrize("kernel", kernels.names())
@pytest.mark.parametrize(
    ("order", "name"), [("torch-cuda-foreach", "adam"), ("torch-cuda-foreach", "sgd"), ("torch-cuda-fused", "adam")]
)
@pytest.mark.parametrize("divisor", [3, 7, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_divided_gradient_is_rounded_to_its_own_sixteen_bits(dtype, divisor, order, name, kernel):
    """Seen where nothing else rounds: a momentum that has no past, a parameter of zero at a rate of one."""
    g = sixteen_bits(dtype)
    wanted = divided(g, divisor).float()
    unrounded = (g.double() * np.float64(np.float32(1) / np.float32(divisor))).float()
    assert not torch.equal(wanted, unrounded), "the case shows nothing"
    options = {"lr": 1.0} if name == "sgd" else {"lr": 1e-3, "betas": (0.0, 0.9)}
    mine = Ours(torch.zeros(1003), name, options, RoundingMode(order), kernel)
    mine.update(g, parts=3, divisor=divisor)
    assert torch.equal(-mine.now[0] if name == "sgd" else mine.now[1], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reciprocal_is_not_a_division(dtype):
    """The CPU's order divides; for some elements that is another number."""
    g = sixteen_bits(dtype)
    found = {}
    for order in ("torch-cpu", "torch-cuda-foreach"):
        mine = Ours(torch.zeros(1003), "sgd", {"lr": 1.0}, RoundingMode(order), "")
        mine.update(g.float(), divisor=7)
        found[order] = -mine.now[0]
    assert torch.equal(found["torch-cpu"], g.float() / 7)
    assert torch.equal(found["torch-cuda-foreach"], (g.double() * np.float64(np.float32(1) / np.float32(7))).float())
    assert not torch.equal(found["torch-cpu"], found["torch-cuda-foreach"])


@pytest.mark.parametrize(("order", "divides"), [("torch-cuda-foreach", False), ("torch-cuda-fused", True)])
def test_a_loss_scale_is_taken_back_as_the_order_does_it(order, divides):
    """GradScaler multiplies by the reciprocal of the scale; a fused optimizer divides by the scale. Then the clip."""
    g = sixteen_bits(torch.float32)
    mine = Ours(torch.zeros(1003), "adam", {"lr": 1e-3, "betas": (0.0, 0.9)}, RoundingMode(order), "")
    mine.update(g, loss_scale=777.0, clip=0.37)
    unscaled = (g.double() / 777).float() if divides else (g.double() * np.float64(np.float32(1 / 777))).float()
    assert torch.equal(mine.now[1], (unscaled.double() * np.float64(np.float32(0.37))).float())
