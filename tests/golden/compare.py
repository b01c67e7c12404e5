"""Vectors of a GPU (make_cuda.py) against the replica's kernels, with no test library: for tests and `make gpu-demo`.

    compare(case, rounding)     the first place where the replica's digests differ from the case's, or ""
    compare_file(path)          for each rounding mode of CUDA: its name, how many cases, what differs
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowcheck.job.model import BucketSlice
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica
from updater.rounding_modes import RoundingMode

_spec = importlib.util.spec_from_file_location("flowcheck_golden", Path(__file__).with_name("make_cuda.py"))
assert _spec is not None and _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


def compare(case: dict[str, Any], rounding: RoundingMode) -> str:
    names = [f"p{i}" for i in range(len(golden.SIZES))]
    spec = OptimizerSpec.check(case["optimizer"], [(names, case["options"])], fused=rounding.fused)
    start = {n: golden.inputs(0, size) for n, size in zip(names, golden.SIZES, strict=True)}
    replica = Replica(start, spec, rounding=rounding, slots=2)
    slices, reach = [], 0
    for name, tensor in start.items():
        slices.append(BucketSlice(name, reach, tensor.numel()))
        reach += tensor.numel()
    layout = Layout([slices], {n: t.shape for n, t in start.items()}, [reach])
    for step, wanted in enumerate(case["steps"], start=1):
        slot = replica.build(step, layout)
        data = torch.cat([golden.inputs(step, size) for size in golden.SIZES])
        slot.apply(0, data.to(golden.DTYPES[case["dtype"]]))
        replica.publish(slot)
        for key, digest in wanted.items():
            if key == "parameters":
                mine = [slot.parameters[n] for n in names]
            else:
                mine = [slot.optimizer_state[n][key] for n in names]
            if golden.digest(mine) != digest:
                return f"{case['optimizer']} {case['form']} {case['options']} {case['dtype']}: step {step}, {key}"
    return ""


def recorded(file: Path) -> tuple[dict[str, Any], dict[str, RoundingMode]]:
    """What a file holds, and the rounding mode of each form that a kernel claims, with the device's own powers."""
    data = json.loads(file.read_text())
    corrections = {beta: {str(step): float(np.float32(1) - np.float32(power)) for step, power in enumerate(powers, 1)}
                   for beta, powers in data["powers"].items()}
    return data, {
        "foreach": RoundingMode("torch-cuda-foreach", data["torch"]),
        "fused": RoundingMode("torch-cuda-fused", data["torch"], corrections=corrections),
    }


def refused(case: dict[str, Any]) -> bool:
    """Whether the case is one that no kernel claims: a single tensor at a time, fused SGD, fused Adam with decay in the
    gradient. Their vectors are recorded all the same."""
    decays = case["optimizer"] == "adam" and "weight_decay" in case["options"]
    return case["form"] == "single" or (case["form"] == "fused" and (case["optimizer"] == "sgd" or decays))


def compare_file(file: Path) -> list[tuple[str, int, list[str]]]:
    data, modes = recorded(file)
    found = []
    for form, mode in modes.items():
        cases = [case for case in data["cases"] if case["form"] == form and not refused(case)]
        found.append((mode.name, len(cases), [differs for case in cases if (differs := compare(case, mode))]))
    return found
