"""What a dialect is, what is known about it, and the constants of one step as each order forms them."""
import ctypes
import math
import os

import numpy as np
import pytest
import torch

from updater import dialects, kernels
from updater.dialects import DIALECTS, Dialect, cpu_root, rule
from updater.errors import OptimizerError

ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}


@pytest.fixture
def ruled(monkeypatch):
    """The keywords that the kernels are given."""
    def formed(dialect, name, options, step, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "Rule", lambda **constants: constants)
            return rule(dialect, name, options, step, **kwargs)

    return formed


def f32(value):
    return float(np.float32(value))


def refusal(call, *given, **named):
    with pytest.raises(OptimizerError) as caught:
        call(*given, **named)
    return str(caught.value)


# -- what a dialect says of itself -------------------------------------------------------------------------


def test_the_names_and_the_default():
    assert DIALECTS == ("torch-cpu", "torch-cpu-fused", "torch-cuda-foreach", "torch-cuda-fused")
    assert Dialect() == Dialect("torch-cuda-foreach", "", "", None)
    assert refusal(Dialect, "apex") == (
        "rounding dialect 'apex' is not one of torch-cpu, torch-cpu-fused, torch-cuda-foreach, torch-cuda-fused"
    )
    assert [Dialect(root=root).root for root in ("", "ieee", "mkl-ex", "call")] == ["", "ieee", "mkl-ex", "call"]
    assert refusal(Dialect, root="fast") == "square root 'fast' is not one of ieee, mkl-ex, call"


@pytest.mark.parametrize(
    ("given", "version"), [("2.13.0+cu130", "2.13"), ("2.7.1", "2.7"), ("10.20", "10.20"), ("3", "3")]
)
def test_the_version_is_major_and_minor_of_the_trainers_torch(given, version):
    assert Dialect(torch_version=given).version == version
    assert Dialect().version == ".".join(torch.__version__.split(".")[:2])


def test_what_is_proven_and_why_the_rest_is_not():
    for name in ("torch-cpu", "torch-cpu-fused"):
        assert Dialect(name, "2.13.1").unproven == ""
        for version in ("2.12.0", "2.14.0", "2.1.3"):
            short = ".".join(version.split(".")[:2])
            assert Dialect(name, version).unproven == f"dialect {name} is proven for torch 2.13, not for {short}"
    for name in ("torch-cuda-foreach", "torch-cuda-fused"):
        assert Dialect(name, "2.13.0").unproven == (
            f"dialect {name} is unproven: its order of roundings was read in the sources of torch 2.13"
            " and was never compared with a GPU"
        )


@pytest.mark.parametrize(
    ("name", "cuda", "fused", "odd"),
    [("torch-cpu", False, False, [0, 0, 0, 0]), ("torch-cpu-fused", False, True, [0, 1, 7, 0]),
     ("torch-cuda-foreach", True, False, [0, 0, 0, 0]), ("torch-cuda-fused", True, True, [0, 0, 0, 0])],
)
def test_what_follows_from_the_name(name, cuda, fused, odd):
    dialect = Dialect(name)
    assert (dialect.cuda, dialect.fused) == (cuda, fused)
    assert [dialect.odd(size) for size in (0, 1, 15, 16)] == odd


def test_fused_sgd_on_cuda_has_no_kernel_and_everything_else_has():
    for name in DIALECTS:
        for optimizer in ("sgd", "adam", "adamw"):
            if (name, optimizer) == ("torch-cuda-fused", "sgd"):
                why = "fused SGD on CUDA multiplies in double precision; there is no kernel for that"
                assert refusal(Dialect(name).check, optimizer) == why
                assert refusal(rule, Dialect(name), optimizer, {"lr": 1}, 1) == why
            else:
                Dialect(name).check(optimizer)


# -- the constants of SGD ----------------------------------------------------------------------------------


def test_sgds_constants(ruled):
    plain = ruled(Dialect("torch-cpu"), "sgd", {"lr": 0.5}, 3)
    assert plain == {
        "sgd": True, "order": "torch-cpu", "grad": "float32", "low": "", "divisor": 1, "divisor_times": False,
        "clip": None, "maximize": False, "step": -0.5, "decay": 0, "weight_decay": 0.0, "momentum": 0.0,
        "momentum_state": 0, "undamped": 1.0, "nesterov": False,
    }
    full = ruled(
        Dialect("torch-cuda-foreach"), "sgd",
        {"lr": 0.5, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1, "nesterov": True, "maximize": True}, 3,
        grad="bfloat16", low="float16", divisor=4, clip=0.5,
    )
    assert full == {
        "sgd": True, "order": "torch-cuda-foreach", "grad": "bfloat16", "low": "float16", "divisor": 4,
        "divisor_times": True, "clip": 0.5, "maximize": True, "step": -0.5, "decay": 1, "weight_decay": 0.1,
        "momentum": 0.9, "momentum_state": 2, "undamped": 0.75, "nesterov": True,
    }


def test_the_first_step_of_momentum_has_no_buffer_yet(ruled):
    for momentum, first, state in ((0.9, True, 1), (0.9, False, 2), (0.0, True, 0), (0.0, False, 0)):
        constants = ruled(Dialect("torch-cpu"), "sgd", {"lr": 1, "momentum": momentum}, 1, first=first)
        assert constants["momentum_state"] == state


# -- the constants of Adam and AdamW -----------------------------------------------------------------------


def test_adams_constants_are_formed_in_double_precision(ruled):
    constants = ruled(Dialect("torch-cuda-foreach"), "adam", ADAM, 3)
    assert constants == {
        "order": "torch-cuda-foreach", "grad": "float32", "low": "", "divisor": 1, "divisor_times": True, "clip": None,
        "maximize": False, "amsgrad": False, "decay": 0, "eps": 1e-6, "root": "ieee", "weight_decay": 0.0,
        "lerp_far": False, "w1": 1 - 0.9, "beta2": 0.99, "omb2": 1 - 0.99, "omb2_is_one": False,
        "bc2_sqrt": (1 - 0.99**3) ** 0.5, "step": -(0.1 / (1 - 0.9**3)),
    }


def test_what_torch_takes_if_nothing_is_said(ruled):
    for name in ("adam", "adamw"):
        constants = ruled(Dialect("torch-cuda-foreach"), name, {"lr": 0.5}, 2)
        assert (constants["eps"], constants["beta2"], constants["w1"]) == (1e-8, 0.999, 1 - 0.9)
        assert (constants["amsgrad"], constants["maximize"]) == (False, False)
        assert (constants["decay"], constants["weight_decay"]) == ((0, 0.0) if name == "adam" else (2, 1 - 0.5 * 0.01))


@pytest.mark.parametrize(
    ("name", "options", "decay", "weight"),
    [
        ("adam", {"weight_decay": 0.0}, 0, 0.0), ("adam", {"weight_decay": 0.2}, 1, 0.2),
        ("adam", {"weight_decay": 0.2, "decoupled_weight_decay": False}, 1, 0.2),
        ("adam", {"weight_decay": 0.2, "decoupled_weight_decay": True}, 2, 1 - 0.1 * 0.2),
        ("adamw", {"weight_decay": 0.0}, 0, 0.0), ("adamw", {"weight_decay": 0.2}, 2, 1 - 0.1 * 0.2),
    ],
)
def test_where_the_decay_goes(ruled, name, options, decay, weight):
    for dialect in ("torch-cpu-fused", "torch-cuda-foreach"):
        constants = ruled(Dialect(dialect), name, {**ADAM, **options}, 1)
        assert (constants["decay"], constants["weight_decay"]) == (decay, weight)
    constants = ruled(Dialect("torch-cuda-fused"), name, {**ADAM, **options}, 1)
    fused = float(np.float32(0.1) * np.float32(0.2)) if decay == 2 else weight
    assert (constants["decay"], constants["weight_decay"]) == (decay, fused)


@pytest.mark.parametrize(
    ("beta1", "far", "cpu", "cuda"),
    [
        (0.9, False, 1 - 0.9, 1 - 0.9), (0.500001, False, 1 - 0.500001, 1 - 0.500001),
        (0.5, True, -0.5, -0.5), (0.3, True, f32(0.7) - 1, -(1 - f32(0.7))), (0.0, True, 0.0, -0.0),
        (1 - 0.49999999999, True, -0.5, -0.5),  # the weight is 0.5 once it is a float
    ],
)
def test_from_which_end_lerp_counts(ruled, beta1, far, cpu, cuda):
    for name, weight in (("torch-cpu", cpu), ("torch-cpu-fused", cpu), ("torch-cuda-foreach", cuda)):
        constants = ruled(Dialect(name, root="ieee"), "adam", {**ADAM, "betas": (beta1, 0.99)}, 1)
        assert (constants["lerp_far"], constants["w1"]) == (far, weight)
        assert math.copysign(1, constants["w1"]) == math.copysign(1, weight)


def test_a_second_beta_of_zero_is_a_case_of_its_own(ruled):
    for beta2, is_one in ((0.0, True), (1e-9, True), (1e-3, False), (0.999, False)):
        constants = ruled(Dialect("torch-cuda-foreach"), "adam", {**ADAM, "betas": (0.9, beta2)}, 1)
        assert constants["omb2_is_one"] is is_one, "asked of the float"


def test_flags_and_what_comes_before_the_optimizer_reach_the_kernel(ruled):
    constants = ruled(Dialect("torch-cpu-fused"), "adamw", {**ADAM, "amsgrad": True, "maximize": True}, 1,
                      grad="float16", low="bfloat16", divisor=8, clip=0.25)
    assert {key: constants[key] for key in ("amsgrad", "maximize", "grad", "low", "divisor", "clip")} == {
        "amsgrad": True, "maximize": True, "grad": "float16", "low": "bfloat16", "divisor": 8, "clip": 0.25
    }
    assert constants["divisor_times"] is False and constants["order"] == "torch-cpu-fused"


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("torch-cpu", {"unscale": True, "scale": 1 / 777}), ("torch-cuda-foreach", {"unscale": True, "scale": 1 / 777}),
        ("torch-cpu-fused", {"unscale": True, "scale_divides": True, "scale": 777.0}),
        ("torch-cuda-fused", {"unscale": True, "scale_divides": True, "scale": 777.0}),
    ],
)
def test_how_a_loss_scale_is_taken_back(ruled, name, constants):
    about = ("unscale", "scale", "scale_divides")
    with_scale = ruled(Dialect(name, root="ieee"), "adam", ADAM, 1, loss_scale=777.0)
    assert {key: with_scale[key] for key in about if key in with_scale} == constants
    assert not set(about) & set(ruled(Dialect(name, root="ieee"), "adam", ADAM, 1))


def test_the_reciprocal_of_a_loss_scale_is_that_of_its_float(ruled):
    found = ruled(Dialect("torch-cuda-foreach"), "adam", ADAM, 1, loss_scale=0.1)
    assert found["scale"] == 1 / f32(0.1) != 1 / 0.1


def test_fused_on_a_gpu_forms_its_constants_from_floats(ruled):
    constants = ruled(Dialect("torch-cuda-fused"), "adam", {**ADAM, "amsgrad": True}, 3)
    one, b1, b2 = np.float32(1), np.float32(0.9), np.float32(0.99)
    first = one - np.float32(float(b1) ** 3)
    second = np.sqrt(one - np.float32(float(b2) ** 3))
    assert constants == {
        "order": "torch-cuda-fused", "grad": "float32", "low": "", "divisor": 1, "divisor_times": True, "clip": None,
        "maximize": False, "amsgrad": True, "decay": 0, "eps": 1e-6, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99,
        "bc2_sqrt": float(second), "step": float(np.float32(0.1) / first),
    }


def test_a_devices_own_powers_are_asked_for_each_beta_and_step(ruled):
    asked = []

    def power(beta, step):
        asked.append((beta, step))
        return 0.75 if beta == 0.9 else 0.9375

    constants = ruled(Dialect("torch-cuda-fused", device_powf=power), "adam", {**ADAM, "lr": 0.5}, 7)
    assert asked == [(0.9, 7), (0.99, 7)]
    assert (constants["step"], constants["bc2_sqrt"]) == (2.0, 0.25)


# -- the square root ---------------------------------------------------------------------------------------


def test_the_root_that_was_named_is_taken_and_only_torch_cpu_has_one(ruled):
    for root in ("ieee", "mkl-ex", "call"):
        assert ruled(Dialect("torch-cpu", root=root), "adam", ADAM, 1)["root"] == root
        assert ruled(Dialect("torch-cpu-fused", root=root), "adam", ADAM, 1)["root"] == "ieee"
        assert ruled(Dialect("torch-cuda-foreach", root=root), "adam", ADAM, 1)["root"] == "ieee"


@pytest.fixture
def search(monkeypatch):
    """The search for this processor's root, over its few thousand borders and not over every mantissa."""
    real = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda a, b, **how: real(a, min(b, a + 4096), **how) if b - a > 65536 else real(a, b, **how)
    )
    monkeypatch.setattr(dialects, "_found", [])
    yield dialects._find_root
    kernels.set_root(dialects._vendor_address())


def test_the_root_of_this_processor_is_looked_for_once(monkeypatch):
    looked = []
    monkeypatch.setattr(dialects, "_found", [])
    monkeypatch.setattr(dialects, "_find_root", lambda: looked.append(1) or "call")
    assert [cpu_root(), cpu_root()] == ["call", "call"] and looked == [1]
    assert dialects._found == ["call"]


def roots_of(monkeypatch, exact):
    """Ways to a root that are exact or off by one bit in the last row; which of them are right is given."""
    def fake(how, values):
        out = torch.sqrt(values)
        if how not in exact:
            out.view(torch.int32)[-1] ^= 1
        return out

    monkeypatch.setattr(dialects, "_root", fake)


@pytest.mark.parametrize(
    ("exact", "has_ex", "address", "found"),
    [
        ({"ieee", "mkl-ex", "call"}, True, 1, "ieee"), ({"mkl-ex", "call"}, True, 1, "mkl-ex"),
        ({"call"}, True, 1, "call"), ({"mkl-ex", "call"}, False, 1, "call"), ({"mkl-ex"}, True, 0, "mkl-ex"),
        ({"call"}, True, 0, None), (set(), True, 1, None), ({"mkl-ex"}, False, 0, None), ({"ieee"}, False, 0, "ieee"),
    ],
)
def test_the_first_way_that_gives_torchs_bits_is_taken(search, monkeypatch, exact, has_ex, address, found):
    roots_of(monkeypatch, exact)
    monkeypatch.setattr(kernels, "has_sqrt_ex", lambda *_: has_ex)
    monkeypatch.setattr(dialects, "_vendor_address", lambda: address)
    given = []
    monkeypatch.setattr(kernels, "set_root", given.append)
    if found is None:
        assert refusal(search) == (
            "torch.sqrt on this machine is neither IEEE nor MKL's: dialect torch-cpu cannot be exact here"
        )
    else:
        assert search() == found
    assert given == [address]


def test_every_mantissa_and_the_borders_of_the_exponent_are_compared(monkeypatch):
    """A range of fp32 bits each: (first, how many). The last is all mantissas with an even and an odd exponent."""
    compared = []

    def exact(how, values):
        compared.append((int(values[:1].view(torch.int32)), values.numel()))
        return torch.sqrt(values)

    monkeypatch.setattr(dialects, "_root", exact)
    assert dialects._find_root() == "ieee"
    assert sorted(compared) == [
        (0x00000000, 65536), (0x00010000, 65536), (0x00800000, 65536), (0x01000000, 65536), (0x3F800000, 65536),
        (0x3F800000, 16777216), (0x7F000000, 65536), (0x7F7EF000, 65536),
    ]


def test_each_way_to_a_root_is_its_own():
    values = torch.tensor([0.0, 1.0, 2.25, 4.0, 1e-40, 3e38])
    exact = np.sqrt(values.numpy())
    assert torch.equal(dialects._root("ieee", values), torch.from_numpy(exact))
    if kernels.has_sqrt_ex():
        assert dialects._root("mkl-ex", values).tolist() == pytest.approx(exact.tolist(), rel=1e-6)
    if address := dialects._vendor_address():
        kernels.set_root(address)
        assert dialects._root("call", values).tolist() == torch.sqrt(values).tolist()


def test_torchs_own_root_is_found_in_its_library():
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    wanted = ctypes.cast(library.vmsSqrt, ctypes.c_void_p).value if hasattr(library, "vmsSqrt") else 0
    assert dialects._vendor_address() == wanted


def test_a_torch_without_mkl_has_no_root_to_call(monkeypatch):
    for error in (OSError, AttributeError):
        def load(*_, error=error):
            raise error

        monkeypatch.setattr(dialects.ctypes, "CDLL", load)
        assert dialects._vendor_address() == 0
