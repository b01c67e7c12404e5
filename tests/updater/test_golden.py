"""Our CUDA orders against what a GPU computed (tests/golden/cuda-VERSION.json, by make_cuda.py), where there is one.

The way from vectors to a verdict is tested without a GPU: vectors made on the CPU are compared with the CPU orders.
"""
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from flowcheck.job.model import BucketSlice
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_spec = importlib.util.spec_from_file_location("flowcheck_golden_compare", GOLDEN / "compare.py")
vectors = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(vectors)
golden, compare = vectors.golden, vectors.compare


def test_the_cuda_orders_are_the_gpus():
    files = sorted(GOLDEN.glob("cuda-*.json"))
    if not files:
        pytest.skip("no vectors of a GPU in tests/golden (make_cuda.py makes them): those of CUDA stay unproven")
    for file in files:
        for mode, cases, differ in vectors.compare_file(file):
            assert cases >= 10 and not differ, f"{file.name}, {mode}: {differ}"


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("cuda-*.json")), ids=lambda file: file.stem)
def test_with_powers_that_are_correctly_rounded_the_gpus_bits_are_missed(file):
    """AdamW with a beta of 0.95, as language models have it: at step 6 the GPU's powf is another number."""
    data, modes = vectors.recorded(file)
    (case,) = (one for one in data["cases"] if one["optimizer"] == "adamw" and one["form"] == "fused"
               and one["options"].get("betas") == [0.9, 0.95] and one["dtype"] == "float32")
    assert compare(case, modes["fused"]) == ""
    assert "step 6, parameters" in compare(case, RoundingMode("torch-cuda-fused", data["torch"]))


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("cuda-*.json")), ids=lambda file: file.stem)
def test_why_fused_adam_with_decay_in_the_gradient_is_refused(file):
    """Of the four elements that a thread of the GPU's kernel has, the first one's product is rounded before it is added
    to the gradient (decision 0033). A thread has four neighbours where the size allows that, else every 512th element.
    """
    (case,) = (one for one in vectors.recorded(file)[0]["cases"] if one["optimizer"] == "adam"
               and one["form"] == "fused" and "weight_decay" in one["options"] and one["dtype"] == "float32")
    decay, beta = np.float32(case["options"]["weight_decay"]), np.float32(case["options"]["betas"][0])
    found = {"some": [], "all": [], "none": []}
    for size in golden.SIZES:
        p, g = (golden.inputs(step, size).numpy() for step in (0, 1))
        apart, together = p * decay + g, added(p, decay, g)
        index = np.arange(size)
        first = index % 4 == 0 if size % 4 == 0 else index % 65536 // 512 % 4 == 0
        for how, gradient in (("some", np.where(first, apart, together)), ("all", apart), ("none", together)):
            found[how].append(torch.from_numpy(added(-beta, gradient, gradient)))
    assert [how for how, tensors in found.items() if golden.digest(tensors) == case["steps"][0]["exp_avg"]] == ["some"]


def added(a, b, c):
    """a * b + c, rounded once (long doubles hold the product, and all but one sum in 2^40 as good as exactly)."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)


def test_a_rounding_mode_is_proven_only_where_there_are_vectors():
    """Who adds the vectors of a version marks it as proven, and nobody else does."""
    have = {tuple(f.stem.removeprefix("cuda-").split(".")) for f in GOLDEN.glob("cuda-*.json")}
    for name in ("torch-cuda-foreach", "torch-cuda-fused"):
        for minor in range(20):
            mode = RoundingMode(name, f"2.{minor}.0", corrections={"0.9": {}})
            assert bool(mode.unproven) == (("2", str(minor)) not in have)


@pytest.mark.parametrize(
    ("form", "name"), [("single", "torch-cpu"), ("foreach", "torch-cpu"), ("fused", "torch-cpu-fused")]
)
@pytest.mark.parametrize("optimizer", golden.CLASSES)
def test_vectors_made_here_are_ours(optimizer, form, name):
    for options in golden.OPTIONS[optimizer]:
        for dtype in golden.DTYPES:
            steps = golden.case(optimizer, form, options, dtype, "cpu", 6)
            case = {"optimizer": optimizer, "form": form, "options": options, "dtype": dtype, "steps": steps}
            assert compare(case, RoundingMode(name)) == ""


def test_a_wrong_order_is_seen():
    options = golden.OPTIONS["adamw"][1]
    steps = golden.case("adamw", "single", options, "float32", "cpu", 6)
    case = {"optimizer": "adamw", "form": "single", "options": options, "dtype": "float32", "steps": steps}
    for rounding in (RoundingMode("torch-cuda-foreach"), RoundingMode("torch-cuda-fused")):
        assert "adamw single" in compare(case, rounding)


def test_inputs_are_the_same_everywhere():
    """Eight decades, zeros, both signs; and the bits, which a machine with a GPU has to make alike."""
    values = golden.inputs(3, 65537).numpy()
    assert (values == 0).mean() > 0.05 and (values < 0).mean() > 0.4 and np.isfinite(values).all()
    sizes = np.abs(values[values != 0])
    assert sizes.max() < 2 and sizes.min() < 1e-7
    assert (golden.inputs(0, 1000) != 0).all()
    digest = hashlib.sha256(values.tobytes()).hexdigest()
    assert digest == "8706e5e4c061a50fc57b7c6db6ce7b7fb8c34adf81a1970026d0ad200737d48e"


def test_the_devices_powers_reach_the_kernel():
    """torch-cuda-fused with another power gives other bits: the table of the vectors is really used."""
    case = {"optimizer": "adam", "form": "fused", "options": {"lr": 1e-3}, "dtype": "float32", "steps": []}
    plain = golden_steps(case, RoundingMode("torch-cuda-fused"))
    right, wrong = ({str(b): {"1": float(np.float32(1) - np.float32(b * f))} for b in (0.9, 0.999)} for f in (1, 0.99))
    same = golden_steps(case, RoundingMode("torch-cuda-fused", corrections=right))
    other = golden_steps(case, RoundingMode("torch-cuda-fused", corrections=wrong))
    assert plain == same != other


def golden_steps(case, rounding):
    spec = OptimizerSpec.check(case["optimizer"], [(["p"], case["options"])], fused=True)
    replica = Replica({"p": golden.inputs(0, 1000)}, spec, rounding=rounding, slots=2)
    slot = replica.build(1, Layout([[BucketSlice("p", 0, 1000)]], {"p": (1000,)}, [1000]))
    slot.apply(0, golden.inputs(1, 1000))
    replica.publish(slot)
    return golden.digest([slot.parameters["p"]])
