"""The optimizer of a manifest, checked: names, groups and options.

`check_optimizer(job, place)` raises UserError at the first field that cannot be right; a log names none. Which
optimizers of a script a log can have is decided in its trainer (trainer/log/refusals.py). Called by check.py; standard
library only.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from flowcheck.job.form import Place, shown
from flowcheck.job.model import LOG, MASTERS, OPTIMIZERS, ROUNDINGS, Job, Optimizer

__all__ = ["check_optimizer"]

OFF = 2.0**-20  # that a power in fp32 may be off: 16 units in the last place of a number below 1


def check_optimizer(job: Job, place: Place) -> None:
    """Raise UserError if the optimizer contradicts the model or the calls, or is unknown."""
    if job.optimizer is None:
        return
    if job.kind == LOG:
        place.fail("the job is followed as a log, whose trainers step by themselves", "leave it out")
    (place / "name").one_of(job.optimizer.name, OPTIMIZERS)
    (place / "rounding").one_of(job.optimizer.rounding, ROUNDINGS)
    (place / "masters").one_of(job.optimizer.masters, MASTERS)
    if job.optimizer.masters in ("upcast", "state") and not job.narrow:
        (place / "masters").fail("no optimized entry has 16 bits: there is nothing to keep fp32 masters of")
    (place / "threads").between(job.optimizer.threads, 0, 4096)
    _check_corrections(job.optimizer, place / "corrections")
    if job.optimizer.masters == "none":
        for entry in job.model:
            if entry.name in job.narrow and entry.dtype != job.gradients.dtype:
                (place / "masters").fail(
                    f"{shown(entry.name)} is updated in {entry.dtype} alone, and gradients are {job.gradients.dtype}"
                )
        for g, group in enumerate(job.optimizer.groups):
            if job.narrow and group.options.get("foreach"):
                (place / "groups" / g / "options" / "foreach").fail(
                    "foreach rounds 16-bit parameters without fp32 masters in an order of its own on a CPU"
                )
    version = job.optimizer.torch_version
    if version and not re.fullmatch(r"[0-9]+\.[0-9]+[0-9A-Za-z.+-]*", version):
        (place / "torch_version").fail(f"{shown(version)} is not a torch version such as 2.13.0")
    if job.parameter_calls(0) and not job.gradient_calls(0):
        place.fail(
            "the iterations gather parameters and reduce no gradients: nothing would feed an optimizer",
            "leave optimizer out: what is gathered becomes a parameter checkpoint",
        )
    missing = {entry.name for entry in job.model if entry.kind == "optimized" and not entry.tied}
    optimized = frozenset(missing)
    for g, group in enumerate(job.optimizer.groups):
        for p, name in enumerate(group.params):
            here = place / "groups" / g / "params" / p
            if name not in optimized:
                here.fail(f"{shown(name)} is not an optimized model entry")
            if name not in missing:
                here.fail(f"{shown(name)} is in two groups, or twice in one")
            missing.discard(name)
        for key, value in group.options.items():
            _check_option(place / "groups" / g / "options" / key, value)
    for entry in job.model:
        if entry.name in missing:
            (place / "groups").fail(
                f"{shown(entry.name)} is in no group; give it one, or class the entry \"constant\""
            )


def _check_corrections(optimizer: Optimizer, place: Place) -> None:
    """Of every beta, each a number of fp32: what lacks one would take another power, and nobody would know. Nor
    would anybody of one that is the power of another beta or step; a powf is off by a few units in its last place."""
    if optimizer.corrections and optimizer.rounding != "torch-cuda-fused":
        place.fail("only torch-cuda-fused asks a GPU for powers", "leave it out")
    for beta, steps in optimizer.corrections.items():
        here = place / beta
        if not _is_beta(beta):
            here.fail(f"{shown(beta)} is not a beta as Python writes it, such as 0.999")
        for step, value in steps.items():
            if not re.fullmatch(r"[1-9][0-9]{0,17}", step):
                (here / step).fail(f"{shown(step)} is not a step, counted from 1")
            exact = 1 - _single(float(beta)) ** int(step)
            if not 0 <= value <= 1 or _single(value) != value or abs(exact - value) > OFF:
                (here / step).fail(f"{value!r} is not 1 - beta**step in fp32")


def _single(value: float) -> float:
    """In fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _is_beta(text: str) -> bool:
    try:
        return 0 <= float(text) < 1 and repr(float(text)) == text
    except ValueError:
        return False


def _check_option(place: Place, value: Any) -> None:
    """A plain value or a pair of numbers (betas). The optimizer checks names and ranges."""
    if isinstance(value, list):
        if len(value) > 8:
            place.fail(f"a list of {len(value)} values is not an optimizer option")
        for i, item in enumerate(value):
            if isinstance(item, list | dict):
                place.fail("nested values are not an optimizer option")
            _check_option(place / i, item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            place.fail(f"{value!r} is not a finite number")
    elif isinstance(value, int):
        if abs(value) >= 1 << 63:
            place.fail(f"{shown(value)} is out of range")
    elif isinstance(value, str):
        if not value.isprintable():
            place.fail(f"{shown(value)} has unprintable characters")
    elif value is not None:
        place.fail(f"{shown(value)} is not an optimizer option")
