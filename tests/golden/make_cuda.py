"""Golden vectors of torch's optimizers on this machine's GPU: run it there, put the file into tests/golden/.

    python -P tests/golden/make_cuda.py [--out DIR]        writes DIR/cuda-VERSION.json

Needs torch with CUDA and nothing else. Inputs are not stored: `inputs` makes them from integers that every machine
computes alike. For every case (optimizer, form, options, type of the gradients) and step the SHA-256 of the bits of
parameters and states, all tensors one after the other, of which the first 16 digits; and for `fused` the powers
beta**step in the device's fp32.

For another torch version run it in an environment that has that version (`pip install --target`, then PYTHONPATH).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

SIZES = (1, 2, 7, 16, 31, 33, 1000, 4099, 65537)
STEPS = 20
FORMS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False, "fused": False}}
OPTIONS = {
    "adam": [
        {"lr": 1e-3}, {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
        {"lr": 0.1, "amsgrad": True, "maximize": True},
    ],
    "adamw": [
        {"lr": 1e-3, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.01}, {"lr": 1e-2, "betas": [0.3, 0.9]},
        {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1},
    ],
    "sgd": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}],
}
CLASSES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def inputs(step: int, size: int) -> torch.Tensor:
    """Values of eight decades, with zeros, from a multiplicative hash: exact in fp32 on every machine. On the CPU.

    step 0: the parameters; later ones: the gradients of that step.
    """
    index = torch.arange(size, dtype=torch.int64) + 1_000_003 * step
    h = (index * 0x9E3779B1 + 0x7F4A7C15) % (1 << 32)
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) % (1 << 32)
    h = h ^ (h >> 12)
    mantissa = (h % (1 << 23)) + (1 << 23)
    exponent = 127 - (h >> 23) % (1 if step == 0 else 27)  # 2^-26 is 1.5e-8
    raw = ((h >> 31) << 31) | (exponent << 23) | (mantissa % (1 << 23))
    raw = torch.where((h >> 24) % 13 == 0, torch.zeros_like(raw), raw) if step else raw
    return torch.where(raw >= 1 << 31, raw - (1 << 32), raw).to(torch.int32).view(torch.float32)


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def states(name: str, options: dict[str, object]) -> list[str]:
    if name == "sgd":
        return ["momentum_buffer"] if options.get("momentum") else []
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])]


def case(
    name: str, form: str, options: dict[str, object], dtype: str, device: str, steps: int = STEPS
) -> list[dict[str, str]]:
    """Digests of every step. bfloat16: fp32 parameters whose gradients have passed through bfloat16."""
    parameters = [inputs(0, size).clone().to(device).requires_grad_(True) for size in SIZES]
    given = {key: tuple(value) if key == "betas" else value for key, value in options.items()}
    optimizer = CLASSES[name](parameters, **given, **FORMS[form])
    out = []
    for step in range(1, steps + 1):
        for parameter in parameters:
            parameter.grad = inputs(step, parameter.numel()).to(DTYPES[dtype]).float().to(device)
        optimizer.step()
        row = {"parameters": digest(parameters)}
        for key in states(name, options):
            row[key] = digest([optimizer.state[parameter][key] for parameter in parameters])
        out.append(row)
    return out


def powers(device: str) -> dict[str, list[float]]:
    """beta -> beta**1 .. beta**STEPS as the device's fp32 gives them, exactly representable as doubles."""
    betas = {0.9, 0.999, *(b for rows in OPTIONS.values() for o in rows for b in o.get("betas", ()))}  # type: ignore[attr-defined]
    steps = torch.arange(1, STEPS + 1, dtype=torch.float32, device=device)
    return {repr(b): torch.pow(torch.full_like(steps, b), steps).cpu().double().tolist() for b in sorted(betas)}


def record(device: str) -> dict[str, Any]:
    cases = []
    for name, rows in OPTIONS.items():
        for form in FORMS:
            for options in rows:
                for dtype in DTYPES:
                    steps = case(name, form, options, dtype, device)
                    cases.append({"optimizer": name, "form": form, "options": options, "dtype": dtype, "steps": steps})
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    found = {"torch": torch.__version__, "device": device, "name": gpu, "sizes": SIZES}
    return {**found, "powers": powers(device), "cases": cases}


def shown(found: dict[str, Any]) -> str:
    """A line for each member, and for each case."""
    cases = ",\n".join(json.dumps(case) for case in found.pop("cases"))
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    return f'{{{head},\n"cases": [\n{cases}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Golden vectors of torch's optimizers on a GPU.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: golden vectors can only be made where there is one")
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    path = arguments.out / f"cuda-{version}.json"
    aside = path.with_suffix(".partial")
    aside.write_text(shown(record("cuda")))
    aside.rename(path)
    print(path)


if __name__ == "__main__":
    main()
