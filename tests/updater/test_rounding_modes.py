"""What a rounding mode is, what is known about it, and the constants of one step as each order forms them."""
import ctypes
import math
import os

import numpy as np
import pytest
import torch

from updater import kernels, rounding_modes
from updater.errors import OptimizerError
from updater.rounding_modes import ROUNDING_MODES, RoundingMode, cpu_root, find_root, root_of, rule

ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}


@pytest.fixture
def ruled(monkeypatch):
    """The keywords that the kernels are given."""
    def formed(rounding, name, options, step, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "Rule", lambda **constants: constants)
            return rule(rounding, name, options, step, **kwargs)

    return formed


def f32(value):
    return float(np.float32(value))


def refusal(call, *given, **named):
    with pytest.raises(OptimizerError) as caught:
        call(*given, **named)
    return str(caught.value)


# -- what a rounding mode says of itself -------------------------------------------------------------------------


def test_the_names_and_the_default():
    assert ROUNDING_MODES == ("torch-cpu", "torch-cpu-fused", "torch-cuda-foreach", "torch-cuda-fused")
    assert RoundingMode() == RoundingMode("torch-cuda-foreach", "", "", 0, {})
    assert refusal(RoundingMode, "apex") == (
        "rounding mode 'apex' is not one of torch-cpu, torch-cpu-fused, torch-cuda-foreach, torch-cuda-fused"
    )
    assert [RoundingMode(root=root).root for root in ("", *kernels.ROOTS)] == ["", *kernels.ROOTS]
    assert refusal(RoundingMode, root="fast") == (
        "square root 'fast' is not one of ieee, rsqrt, rsqrt14, rsqrt14-coupled, rsqrt14-newton, call"
    )


@pytest.mark.parametrize(
    ("given", "version"), [("2.13.0+cu130", "2.13"), ("2.7.1", "2.7"), ("10.20", "10.20"), ("3", "3")]
)
def test_the_version_is_major_and_minor_of_the_trainers_torch(given, version):
    assert RoundingMode(torch_version=given).version == version
    assert RoundingMode().version == ".".join(torch.__version__.split(".")[:2])


def test_what_is_proven_and_why_the_rest_is_not():
    for name in ("torch-cpu", "torch-cpu-fused"):
        assert RoundingMode(name, "2.13.1").unproven == ""
        for version in ("2.12.0", "2.14.0", "2.1.3"):
            short = ".".join(version.split(".")[:2])
            why = f"rounding mode {name} is proven for torch 2.13, not for {short}"
            assert RoundingMode(name, version).unproven == why
    for name in ("torch-cuda-foreach", "torch-cuda-fused"):
        assert RoundingMode(name, "2.11.0+cu130", corrections={"0.9": {}}).unproven == ""
        why = f"rounding mode {name} is proven for torch 2.11, not for 2.13"
        assert RoundingMode(name, "2.13.0", corrections={"0.9": {}}).unproven == why
    assert RoundingMode("torch-cuda-foreach", "2.11.1").unproven == ""
    assert RoundingMode("torch-cuda-fused", "2.11.1").unproven == (
        "rounding mode torch-cuda-fused depends on the GPU's powf, of which the manifest has no corrections"
    )


@pytest.mark.parametrize(
    ("name", "cuda", "fused", "odd"),
    [("torch-cpu", False, False, [0, 0, 0, 0]), ("torch-cpu-fused", False, True, [0, 1, 7, 0]),
     ("torch-cuda-foreach", True, False, [0, 0, 0, 0]), ("torch-cuda-fused", True, True, [0, 0, 0, 0])],
)
def test_what_follows_from_the_name(name, cuda, fused, odd):
    rounding = RoundingMode(name)
    assert (rounding.cuda, rounding.fused) == (cuda, fused)
    assert [rounding.tail(size) for size in (0, 1, 15, 16)] == odd


def test_fused_sgd_on_cuda_has_no_kernel_and_everything_else_has():
    for name in ROUNDING_MODES:
        for optimizer in ("sgd", "adam", "adamw"):
            if (name, optimizer) == ("torch-cuda-fused", "sgd"):
                why = "fused SGD on CUDA multiplies in double precision; there is no kernel for that"
                assert refusal(RoundingMode(name).check, optimizer) == why
                assert refusal(rule, RoundingMode(name), optimizer, {"lr": 1}, 1) == why
            else:
                RoundingMode(name).check(optimizer)


# -- the constants of SGD ----------------------------------------------------------------------------------


def test_sgds_constants(ruled):
    plain = ruled(RoundingMode("torch-cpu"), "sgd", {"lr": 0.5}, 3)
    assert plain == {
        "sgd": True, "order": "torch-cpu", "grad": "float32", "low": "", "held": "float32",
        "divisor": 1, "divisor_times": False,
        "clip": None, "maximize": False, "step": -0.5, "decay": 0, "weight_decay": 0.0, "momentum": 0.0,
        "momentum_state": 0, "undamped": 1.0, "nesterov": False,
    }
    full = ruled(
        RoundingMode("torch-cuda-foreach"), "sgd",
        {"lr": 0.5, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1, "nesterov": True, "maximize": True}, 3,
        grad="bfloat16", low="float16", divisor=4, clip=0.5,
    )
    assert full == {
        "sgd": True, "order": "torch-cuda-foreach", "grad": "bfloat16", "low": "float16", "held": "float32",
        "divisor": 4,
        "divisor_times": True, "clip": 0.5, "maximize": True, "step": -0.5, "decay": 1, "weight_decay": 0.1,
        "momentum": 0.9, "momentum_state": 2, "undamped": 0.75, "nesterov": True,
    }


def test_the_first_step_of_momentum_has_no_buffer_yet(ruled):
    for momentum, first, state in ((0.9, True, 1), (0.9, False, 2), (0.0, True, 0), (0.0, False, 0)):
        constants = ruled(RoundingMode("torch-cpu"), "sgd", {"lr": 1, "momentum": momentum}, 1, first=first)
        assert constants["momentum_state"] == state


# -- the constants of Adam and AdamW -----------------------------------------------------------------------


def test_adams_constants_are_formed_in_double_precision(ruled):
    constants = ruled(RoundingMode("torch-cuda-foreach"), "adam", ADAM, 3)
    assert constants == {
        "order": "torch-cuda-foreach", "grad": "float32", "low": "", "held": "float32",
        "divisor": 1, "divisor_times": True, "clip": None,
        "maximize": False, "amsgrad": False, "decay": 0, "eps": 1e-6, "root": "ieee", "weight_decay": 0.0,
        "lerp_far": False, "w1": 1 - 0.9, "beta2": 0.99, "omb2": 1 - 0.99, "omb2_is_one": False,
        "bc2_sqrt": (1 - 0.99**3) ** 0.5, "step": -(0.1 / (1 - 0.9**3)),
    }


def test_what_torch_takes_if_nothing_is_said(ruled):
    for name in ("adam", "adamw"):
        constants = ruled(RoundingMode("torch-cuda-foreach"), name, {"lr": 0.5}, 2)
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
    for rounding in ("torch-cpu-fused", "torch-cuda-foreach"):
        constants = ruled(RoundingMode(rounding), name, {**ADAM, **options}, 1)
        assert (constants["decay"], constants["weight_decay"]) == (decay, weight)
    if decay == 1:
        assert "fused Adam on CUDA" in refusal(rule, RoundingMode("torch-cuda-fused"), name, {**ADAM, **options}, 1)
        return
    constants = ruled(RoundingMode("torch-cuda-fused"), name, {**ADAM, **options}, 1)
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
        constants = ruled(RoundingMode(name, root="ieee"), "adam", {**ADAM, "betas": (beta1, 0.99)}, 1)
        assert (constants["lerp_far"], constants["w1"]) == (far, weight)
        assert math.copysign(1, constants["w1"]) == math.copysign(1, weight)


def test_a_second_beta_of_zero_is_a_case_of_its_own(ruled):
    for beta2, is_one in ((0.0, True), (1e-9, True), (1e-3, False), (0.999, False)):
        constants = ruled(RoundingMode("torch-cuda-foreach"), "adam", {**ADAM, "betas": (0.9, beta2)}, 1)
        assert constants["omb2_is_one"] is is_one, "asked of the float"


def test_flags_and_what_comes_before_the_optimizer_reach_the_kernel(ruled):
    constants = ruled(RoundingMode("torch-cpu-fused"), "adamw", {**ADAM, "amsgrad": True, "maximize": True}, 1,
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
    with_scale = ruled(RoundingMode(name, root="ieee"), "adam", ADAM, 1, loss_scale=777.0)
    assert {key: with_scale[key] for key in about if key in with_scale} == constants
    assert not set(about) & set(ruled(RoundingMode(name, root="ieee"), "adam", ADAM, 1))


def test_the_reciprocal_of_a_loss_scale_is_that_of_its_float(ruled):
    found = ruled(RoundingMode("torch-cuda-foreach"), "adam", ADAM, 1, loss_scale=0.1)
    assert found["scale"] == 1 / f32(0.1) != 1 / 0.1


def test_fused_on_a_gpu_forms_its_constants_from_floats(ruled):
    constants = ruled(RoundingMode("torch-cuda-fused"), "adam", {**ADAM, "amsgrad": True}, 3)
    one, b1, b2 = np.float32(1), np.float32(0.9), np.float32(0.99)
    first = one - np.float32(float(b1) ** 3)
    second = np.sqrt(one - np.float32(float(b2) ** 3))
    assert constants == {
        "order": "torch-cuda-fused", "grad": "float32", "low": "", "held": "float32",
        "divisor": 1, "divisor_times": True, "clip": None,
        "maximize": False, "amsgrad": True, "decay": 0, "eps": 1e-6, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99,
        "bc2_sqrt": float(second), "step": float(np.float32(0.1) / first),
    }


def test_a_gpus_own_powers_are_taken_where_the_manifest_has_them(ruled):
    rounding = RoundingMode("torch-cuda-fused", corrections={"0.9": {"7": 0.25}, "0.99": {"7": 0.0625, "70": 0.5}})
    constants = ruled(rounding, "adam", {**ADAM, "lr": 0.5}, 7)
    assert (constants["step"], constants["bc2_sqrt"]) == (2.0, 0.25)
    for step in (1, 6, 8):
        plain = ruled(RoundingMode("torch-cuda-fused"), "adam", {**ADAM, "lr": 0.5}, step)
        assert ruled(rounding, "adam", {**ADAM, "lr": 0.5}, step) == plain
    assert ruled(RoundingMode("torch-cuda-fused", corrections={"0.9": {"7": 0.0}, "0.99": {}}), "adam", ADAM, 8)
    assert ruled(rounding, "adam", ADAM, 70)["bc2_sqrt"] == float(np.sqrt(np.float32(0.5)))


def test_a_beta_that_the_manifest_has_no_powers_of_is_refused():
    rounding = RoundingMode("torch-cuda-fused", corrections={"0.9": {}, "0.999": {}})
    for betas in ((0.9, 0.95), (0.8, 0.999)):
        odd = next(beta for beta in betas if beta not in (0.9, 0.999))
        assert refusal(rule, rounding, "adamw", {"lr": 1.0, "betas": betas}, 1) == (
            f"the manifest has no corrections of the GPU's powf for a beta of {odd}, and has some for others"
        )
    rule(rounding, "adamw", {"lr": 1.0}, 1)  # torch's own betas
    rounding.check("adamw", options=[{"lr": 1.0, "weight_decay": 0.1}, {"betas": [0.999, 0.9]}])
    RoundingMode("torch-cuda-foreach", corrections={"0.9": {}}).check("adamw", options=[{"betas": (0.5, 0.5)}])


def test_fused_adam_with_decay_in_the_gradient_has_no_kernel():
    check, decay = RoundingMode("torch-cuda-fused").check, {"lr": 1.0, "weight_decay": 0.1}
    assert refusal(check, "adam", options=[{"lr": 1.0}, decay]) == (
        "fused Adam on CUDA rounds the product of weight_decay for some elements and not for others, as the compiler"
        " arranged it (decision 0033); there is no kernel for that"
    )
    check("adam", options=[{**decay, "decoupled_weight_decay": True}, {**decay, "weight_decay": 0.0}])
    check("adamw", options=[decay])
    for name in ("torch-cpu", "torch-cpu-fused", "torch-cuda-foreach"):
        RoundingMode(name).check("adam", options=[decay])


# -- the square root ---------------------------------------------------------------------------------------


def test_the_root_that_was_named_is_taken_and_only_torch_cpu_has_one(ruled):
    for root in kernels.ROOTS:
        assert ruled(RoundingMode("torch-cpu", root=root), "adam", ADAM, 1)["root"] == root
        assert ruled(RoundingMode("torch-cpu-fused", root=root), "adam", ADAM, 1)["root"] == "ieee"
        assert ruled(RoundingMode("torch-cuda-foreach", root=root), "adam", ADAM, 1)["root"] == "ieee"


def test_the_root_of_this_processor_is_looked_for_once(monkeypatch):
    looked = []
    monkeypatch.setattr(rounding_modes, "_found", [])
    monkeypatch.setattr(rounding_modes, "find_root", lambda library: looked.append(library) or "call")
    assert [cpu_root(), cpu_root()] == ["call", "call"] and looked == [torch.sqrt]
    assert rounding_modes._found == ["call"]


def test_torchs_root_here_is_found_without_a_call():
    """On the processors met so far: Zen 5 (rsqrt), Cascade Lake (0.59 % off by one ulp, which rsqrt14 is)."""
    assert cpu_root() in kernels.ROOTS
    if cpu_root() == "call":
        pytest.skip("torch.sqrt of this processor is none of the sequences: it is called")


SEQUENCES = [root for root in kernels.ROOTS if root != "call" and kernels.has_root(root)]


@pytest.mark.parametrize("root", SEQUENCES)
def test_a_library_that_takes_roots_by_a_sequence_is_seen_through(root):
    assert find_root(lambda values: root_of(values, root)) == root


def off_at(bits):
    """A library that is off by one bit, at one number."""
    def library(values):
        out = root_of(values, "rsqrt")
        out.view(torch.int32)[values.view(torch.int32) == bits] ^= 1
        return out

    return library


@pytest.mark.skipif("rsqrt" not in SEQUENCES, reason="a processor without rsqrtps")
@pytest.mark.parametrize("bits", [0x3F800001, 0x40000000, 0x407FFFFF, 0x3FC12345, 0x7F7FFFFF, 1, 0x007FFFFF])
def test_no_sequence_is_taken_for_a_library_that_differs_in_one_bit(bits):
    assert refusal(find_root, off_at(bits)) == (
        "torch.sqrt on this machine is none of the known sequences: rounding mode torch-cpu cannot be exact here"
    )


def test_every_mantissa_and_the_borders_are_compared(monkeypatch):
    """Ranges of fp32 bits, (first, how many): two of mantissas, with an even and an odd exponent, in sixteen parts."""
    compared = []

    def exact(values, how):
        compared.append((int(values[:1].view(torch.int32)), values.numel()))
        return torch.sqrt(values)

    monkeypatch.setattr(rounding_modes, "root_of", exact)
    assert find_root(torch.sqrt) == "ieee"
    half = 1 << 15
    borders = [(0, half), (0x7F7FF000 - half, 0x1001 + half), (0x7F800000 - half, half + 1)]
    inner = (0x00010000, 0x00800000, 0x01000000, 0x0F800000, 0x3F800000, 0x7F000000)
    borders += [(edge - half, 2 * half) for edge in inner]
    assert sorted(compared) == sorted(borders + [(0x3F800000 + (i << 20), 1 << 20) for i in range(16)])


@pytest.mark.skipif("rsqrt" not in SEQUENCES, reason="a processor without rsqrtps")
def test_a_library_that_is_no_sequence_is_called(monkeypatch):
    """Only its own root gives its bits; the function that is called is a C one, made here."""
    library = off_at(0x3FC12345)
    signature = ctypes.CFUNCTYPE(
        None, ctypes.c_longlong, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_float), ctypes.c_longlong
    )

    @signature
    def vendors(n, source, out, mode):
        values = torch.from_numpy(np.ctypeslib.as_array(source, (n,)).copy())
        np.ctypeslib.as_array(out, (n,))[:] = library(values).numpy()

    kernels.set_root(ctypes.cast(vendors, ctypes.c_void_p).value)
    try:
        assert find_root(library) == "call"
        kernels.set_root(0)
        assert "none of the known sequences" in refusal(find_root, library)
        with pytest.raises(ValueError, match="no vendor's square root"):
            rule(RoundingMode("torch-cpu", root="call"), "adam", ADAM, 1)
    finally:
        kernels.set_root(rounding_modes._vendor_address())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_float_has_torchs_root():
    root = cpu_root()
    for first in range(0, 0x7F800000, 1 << 24):
        values = torch.arange(first, min(first + (1 << 24), 0x7F800001), dtype=torch.int32).view(torch.float32)
        assert torch.equal(root_of(values, root).view(torch.int32), torch.sqrt(values).view(torch.int32)), hex(first)


def test_torchs_own_root_is_found_in_its_library():
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    wanted = ctypes.cast(library.vmsSqrt, ctypes.c_void_p).value if hasattr(library, "vmsSqrt") else 0
    assert rounding_modes._vendor_address() == wanted


def test_a_torch_without_mkl_has_no_root_to_call(monkeypatch):
    for error in (OSError, AttributeError):
        def load(*_, error=error):
            raise error

        monkeypatch.setattr(rounding_modes.ctypes, "CDLL", load)
        assert rounding_modes._vendor_address() == 0
