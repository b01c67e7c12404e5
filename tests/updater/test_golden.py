"""Our CUDA orders against what a GPU computed (tests/golden/cuda-VERSION.json, by make_cuda.py), where there is one.

The way from vectors to a verdict is tested without a GPU: vectors made on the CPU are compared with the CPU orders.
"""
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

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
            assert cases > 10 and not differ, f"{file.name}, {mode}: {differ}"


def test_a_rounding_mode_is_proven_only_where_there_are_vectors():
    """Who adds the vectors of a version marks it as proven, and nobody else does."""
    have = {tuple(f.stem.removeprefix("cuda-").split(".")) for f in GOLDEN.glob("cuda-*.json")}
    for name in ("torch-cuda-foreach", "torch-cuda-fused"):
        for minor in range(20):
            assert bool(RoundingMode(name, f"2.{minor}.0").unproven) == (("2", str(minor)) not in have)


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
    right, wrong = ((lambda b, s, f=f: f * float(np.float32(np.float32(b) ** s))) for f in (1, 0.99))
    same = golden_steps(case, RoundingMode("torch-cuda-fused", device_powf=right))
    other = golden_steps(case, RoundingMode("torch-cuda-fused", device_powf=wrong))
    assert plain == same != other


def golden_steps(case, rounding):
    spec = OptimizerSpec.check(case["optimizer"], [(["p"], case["options"])], fused=True)
    replica = Replica({"p": golden.inputs(0, 1000)}, spec, rounding=rounding, slots=2)
    slot = replica.build(1, Layout([[BucketSlice("p", 0, 1000)]], {"p": (1000,)}, [1000]))
    slot.apply(0, golden.inputs(1, 1000))
    replica.publish(slot)
    return golden.digest([slot.parameters["p"]])
