"""Rounding modes: the constants of a step as torch forms them, and what is known about each order.

A mode is known by its name and torch's version. `torch-cpu` (single-tensor and foreach: the same bits),
`torch-cpu-fused`, `torch-cuda-foreach` (what torch.optim takes on a GPU if nobody says otherwise) and
`torch-cuda-fused` are the names. A mode is *proven* for a version by a test that compares bits with that torch; any
other works and is marked unproven wherever a result is shown.

Parameters of 16 bits that are updated without fp32 masters have roundings of their own within `torch-cpu`
(updater/sixteen.py); no other order has a kernel for them.

The trap of `torch-cpu` is the square root. torch built with MKL takes vmsSqrt, which is correctly rounded on no
processor met so far, and not the same on AMD's (17 % of all floats are off by one ulp) and Intel's (0.6 %). `cpu_root`
decides once per process how to be exact by construction: it compares torch.sqrt, over every mantissa and both parities
of the exponent, with IEEE and with textbook sequences, and falls back to calling torch's vmsSqrt on blocks in cache.
A replica therefore equals a trainer on the same kind of processor; for another one's, ask for the root by name.

`rule` is pure; `cpu_root` may be called from any thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from updater import kernels
from updater.errors import OptimizerError

__all__ = ["ROUNDING_MODES", "GRAIN", "RoundingMode", "cpu_root", "find_root", "root_of", "rule"]

ROUNDING_MODES = ("torch-cpu", "torch-cpu-fused", "torch-cuda-foreach", "torch-cuda-fused")

#: torch versions (major.minor) whose bits tests compare with ours, by rounding mode.
_PROVEN = {
    "torch-cpu": ("2.13",), "torch-cpu-fused": ("2.13",),
    "torch-cuda-foreach": ("2.11",), "torch-cuda-fused": ("2.11",),
}

#: torch's CPU operators: elements that one thread takes before a second helps, and those of one turn of the vector
#: loop over 16-bit elements (two vectors of AVX2; the additions have no kernel for AVX-512).
GRAIN, LANES = 32768, 32
BETAS = 0.9, 0.999  # torch's own

#: beta -> step -> 1 - powf(beta, step) as the trainer's GPU has it in fp32, keys as JSON has them (job.Optimizer).
Corrections = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class RoundingMode:
    """Whose roundings. torch_version: of the trainer ("2.13.0+cu130"); "" means the one installed here.

    root: how torch-cpu takes square roots, "" to find out (see cpu_root). threads: the trainer's
    torch.get_num_threads(), which tells bits apart where parameters have 16 bits alone (see `parts`); 0: as 1.
    corrections, for torch-cuda-fused: where a GPU's powf is not the correctly rounded power, which is taken for all
    other steps. Empty: nobody says, and equality is not shown.
    """

    name: str = "torch-cuda-foreach"
    torch_version: str = ""
    root: str = ""
    threads: int = 0
    corrections: Corrections = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ROUNDING_MODES:
            raise OptimizerError(f"rounding mode {self.name!r} is not one of {', '.join(ROUNDING_MODES)}")
        if self.root not in ("", *kernels.ROOTS):
            raise OptimizerError(f"square root {self.root!r} is not one of {', '.join(kernels.ROOTS)}")

    @property
    def version(self) -> str:
        """major.minor of the trainer's torch."""
        return ".".join((self.torch_version or torch.__version__).split(".")[:2])

    @property
    def unproven(self) -> str:
        """Why equality with the trainer is not shown for this rounding mode, or ""."""
        known = _PROVEN[self.name]
        if self.version not in known:
            return f"rounding mode {self.name} is proven for torch {', '.join(known)}, not for {self.version}"
        if self.name == "torch-cuda-fused" and not self.corrections:
            return "rounding mode torch-cuda-fused depends on the GPU's powf, of which the manifest has no corrections"
        return ""

    @property
    def cuda(self) -> bool:
        return self.name.startswith("torch-cuda")

    @property
    def fused(self) -> bool:
        return self.name.endswith("fused")

    def tail(self, size: int) -> int:
        """How many last elements of a tensor torch computes in a scalar loop that rounds differently."""
        return size % 8 if self.name == "torch-cpu-fused" else 0

    def parts(self, size: int, held: str = "float32") -> list[tuple[int, int, int]]:
        """(begin, end, odd) of the parts of a tensor whose last `odd` elements torch rounds differently.

        held: what parameters and states are held in. In 16 bits alone every thread's part ends in a scalar loop, in
        which additions with a factor round the product, too (c10's parallel_for shares more than GRAIN elements).
        """
        if held == "float32":
            return [(0, size, self.tail(size))]
        sharing = max(1, min(self.threads, -(-size // GRAIN)))
        each = max(1, -(-size // sharing))
        return [(a, min(a + each, size), (min(a + each, size) - a) % LANES) for a in range(0, size, each)]

    def correction(self, beta: float, step: int) -> float:
        """1 - beta**step as a fused kernel on the trainer's GPU has it, in fp32."""
        said = self.corrections.get(repr(beta), {}).get(str(step))
        return said if said is not None else float(np.float32(1) - np.float32(_f32(beta) ** step))

    def check(self, optimizer: str, held: str = "float32", options: Iterable[Mapping[str, Any]] = ()) -> None:
        """Refuse what has no kernel in this order. options: of every group."""
        if held != "float32" and self.name != "torch-cpu":
            raise OptimizerError(
                f"{held} parameters without fp32 masters have no kernel in the order {self.name}, only in torch-cpu"
            )
        if optimizer == "sgd" and self.name == "torch-cuda-fused":
            raise OptimizerError("fused SGD on CUDA multiplies in double precision; there is no kernel for that")
        if self.name != "torch-cuda-fused":
            return
        for group in options:
            if optimizer == "adam" and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
                raise OptimizerError(
                    "fused Adam on CUDA rounds the product of weight_decay for some elements and not for others, as the"
                    " compiler arranged it (decision 0033); there is no kernel for that"
                )
            for beta in map(float, group.get("betas", BETAS)):
                if self.corrections and repr(beta) not in self.corrections:
                    raise OptimizerError(
                        f"the manifest has no corrections of the GPU's powf for a beta of {beta},"
                        " and has some for others"
                    )


def rule(
    rounding: RoundingMode, name: str, options: Mapping[str, Any], step: int, *, grad: str = "float32", low: str = "",
    divisor: int = 1, loss_scale: float | None = None, clip: float | None = None, first: bool = False,
    held: str = "float32",
) -> kernels.Rule:
    """Constants of one group. step counts from 1. grad: the gradient's type; low: of the low-precision copy; held: of
    parameters and states.

    first: SGD with momentum whose buffer does not exist yet. loss_scale: gradients are unscaled by it.
    """
    rounding.check(name, held, [options])
    common = {
        "order": rounding.name, "grad": grad, "low": low, "held": held,
        "divisor": divisor, "divisor_times": rounding.cuda, "clip": clip,
        "maximize": bool(options.get("maximize", False)), **_unscale(rounding, loss_scale),
    }
    lr, decay = float(options["lr"]), float(options.get("weight_decay", 0.0 if name != "adamw" else 1e-2))
    if name == "sgd":
        momentum = float(options.get("momentum", 0.0))
        return kernels.Rule(
            sgd=True, step=-lr, decay=int(decay != 0), weight_decay=decay, momentum=momentum,
            momentum_state=0 if momentum == 0 else 1 if first else 2,
            undamped=1 - float(options.get("dampening", 0.0)), nesterov=bool(options.get("nesterov", False)), **common,
        )
    beta1, beta2 = (float(beta) for beta in options.get("betas", BETAS))
    decoupled = name == "adamw" or bool(options.get("decoupled_weight_decay", False))
    kind = 0 if decay == 0 else 2 if decoupled else 1
    common |= {"amsgrad": bool(options.get("amsgrad", False)), "decay": kind, "eps": float(options.get("eps", 1e-8))}
    if rounding.name == "torch-cuda-fused":
        return kernels.Rule(**common, **_on_device(rounding, lr, beta1, beta2, decay, kind == 2, step))
    weight = 1 - beta1
    far = abs(_f32(weight)) >= 0.5
    omb2, negative = 1 - beta2, -(lr / (1 - beta1**step))
    return kernels.Rule(
        root=(rounding.root or cpu_root()) if rounding.name == "torch-cpu" and held == "float32" else "ieee",
        weight_decay=1 - lr * decay if kind == 2 else decay,
        # With beta1 = 0 the sign of the zero decides the sign of a moment whose gradient is zero.
        lerp_far=far, w1=weight if not far else -(1 - _f32(weight)) if rounding.cuda else _f32(weight) - 1,
        beta2=beta2, omb2=omb2, omb2_is_one=_f32(omb2) == 1,
        bc2_sqrt=(1 - beta2**step) ** 0.5, step=negative, **common,
    )


def _on_device(
    rounding: RoundingMode, lr: float, beta1: float, beta2: float, decay: float, decoupled: bool, step: int
) -> dict[str, float]:
    """Constants that a fused CUDA kernel forms from fp32 arguments."""
    lr32, correction1 = np.float32(lr), np.float32(rounding.correction(beta1, step))
    root = np.sqrt(np.float32(rounding.correction(beta2, step)))
    return {
        "beta1": beta1, "beta2": beta2, "bc2_sqrt": float(root), "step": float(lr32 / correction1),
        "weight_decay": float(lr32 * np.float32(decay)) if decoupled else decay,
    }


def _unscale(rounding: RoundingMode, loss_scale: float | None) -> dict[str, Any]:
    """GradScaler multiplies by float(1/double(scale)); a fused optimizer divides by the scale itself."""
    if loss_scale is None:
        return {}
    if rounding.fused:
        return {"unscale": True, "scale_divides": True, "scale": loss_scale}
    # A factor of one leaves every bit as it is, so torch's shortcut for it needs no case.
    return {"unscale": True, "scale": 1.0 / _f32(loss_scale)}


def _f32(value: float) -> float:
    return float(np.float32(value))


# -- the square root of torch on this processor --------------------------------------------------------------

_lock = threading.Lock()
_found: list[str] = []


def cpu_root() -> str:
    """How to get torch.sqrt's bits here, one of kernels.ROOTS. Raises OptimizerError if nothing does."""
    with _lock:
        if not _found:
            kernels.set_root(_vendor_address())
            _found.append(find_root(torch.sqrt))
        return _found[0]


#: Bit patterns near which exponents, denormals or ranges of the sequences end.
_EDGES = (0, 0x00010000, 0x00800000, 0x01000000, 0x0F800000, 0x3F800000, 0x7F000000, 0x7F7FF000, 0x7F800000)
_INFINITY = 0x7F800000


def find_root(library: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The first of kernels.ROOTS that gives a library's square roots; "call" is the last of them.

    Compares 2^24 values (every mantissa with an even and an odd exponent: the sequences are invariant under a factor of
    four) and those next to _EDGES.
    """
    spans = [(max(0, edge - (1 << 15)), min(edge + (1 << 15), _INFINITY + 1)) for edge in _EDGES]
    spans += [(first, first + (1 << 20)) for first in range(0x3F800000, 0x40800000, 1 << 20)]
    for root in kernels.ROOTS:
        if kernels.has_root(root) and all(_same(library, root, *span) for span in spans):
            return root
    raise OptimizerError(
        "torch.sqrt on this machine is none of the known sequences: rounding mode torch-cpu cannot be exact here"
    )


def _same(library: Callable[[torch.Tensor], torch.Tensor], root: str, first: int, end: int) -> bool:
    values = torch.arange(first, end, dtype=torch.int32).view(torch.float32)
    return torch.equal(root_of(values, root).view(torch.int32), library(values).view(torch.int32))


def root_of(values: torch.Tensor, root: str, kernel: str = "") -> torch.Tensor:
    """Square roots of contiguous fp32 values by one of kernels.ROOTS."""
    out = torch.empty_like(values)
    kernels.roots(out.data_ptr(), values.data_ptr(), values.numel(), root, kernel)
    return out


def _vendor_address() -> int:
    """Where torch's own vmsSqrt is, or 0 (a torch that was not built with MKL)."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).vmsSqrt
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


