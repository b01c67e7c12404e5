"""Parameters and states in 16 bits alone: what torch.optim does with them on a CPU, and whether it does so here.

A loop over single tensors (what torch takes on a CPU unless set otherwise) calls one operator after the other. Each
computes in fp32 and rounds what it stores. What an addition takes as a number (alpha, eps) is rounded to 16 bits first,
a factor or divisor is not. An addition with alpha is one fused multiply-add in the vector loop; in the scalar loop,
which takes the last elements of every thread's part (`RoundingMode.parts`), it rounds the product to 16 bits as well.
The square root is IEEE's. update_body.h computes that; docs/understand/updater.md has it as formulas.

`check_here` compares the kernels with the operators of the torch that is installed: one that was built without fused
multiply-adds, or for vectors of another length, rounds in an order that has no kernel. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from updater import kernels
from updater.errors import OptimizerError
from updater.rounding_modes import RoundingMode, rule

__all__ = ["check_here", "threads_matter"]

_lock = threading.Lock()
_checked: set[str] = set()
#: What is compared: every operator that an optimizer calls, two steps, vectors and a scalar loop.
_ELEMENTS = 2048 + 29
_ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
_SGD = {"lr": 0.03, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": True}


def threads_matter(name: str, options: Mapping[str, Any]) -> bool:
    """Whether these options add with a factor: what threads share a tensor then tells the bits of its elements."""
    if name == "sgd":
        return True
    return name == "adam" and bool(options.get("weight_decay")) and not options.get("decoupled_weight_decay")


def check_here(held: str) -> None:
    """Raises OptimizerError if torch does not round here as the kernels do. held: "bfloat16" or "float16".

    Takes some milliseconds, once per process and type.
    """
    with _lock:
        if held in _checked:
            return
        for name, options in (("adam", _ADAM), ("sgd", _SGD)):
            if not _same(name, options, held):
                raise OptimizerError(
                    f"torch {torch.__version__} on this machine rounds {name} on {held} parameters in an order that"
                    " has no kernel: a replica could not be exact"
                )
        _checked.add(held)


def _same(name: str, options: Mapping[str, Any], held: str) -> bool:
    dtype: torch.dtype = getattr(torch, held)
    generator = torch.Generator().manual_seed(1)

    def numbers() -> torch.Tensor:
        size = 10.0 ** torch.randint(-4, 1, (_ELEMENTS,), generator=generator)
        return (torch.randn(_ELEMENTS, generator=generator) * size).to(dtype)

    rounding = RoundingMode("torch-cpu", threads=1)
    theirs = [numbers(), *(torch.zeros(_ELEMENTS, dtype=dtype) for _ in range(2))]
    ours, pool = [tensor.clone() for tensor in theirs], kernels.Pool(0)
    (part,) = rounding.parts(_ELEMENTS, held)
    for step in (1, 2):
        gradient, after = numbers(), [torch.zeros_like(tensor) for tensor in ours]
        p, m, v = theirs
        (_adam if name == "adam" else _sgd)(p, m, v, gradient, options, step)
        constants = rule(rounding, name, options, step, grad=held, first=step == 1, held=held)
        arrays = [[*(tensor.data_ptr() for tensor in version), 0] for version in (ours, after)]
        pool.submit([constants], [(0, _ELEMENTS, gradient.data_ptr(), *arrays[0], *arrays[1], 0, part[2])])
        ours = after
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(ours, theirs, strict=True))


def _adam(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, o: Mapping[str, Any], step: int) -> None:
    """The operators of torch.optim.Adam on one tensor."""
    beta1, beta2 = o["betas"]
    g = g.add(p, alpha=o["weight_decay"])
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(o["eps"])
    p.addcdiv_(m, denominator, value=-(o["lr"] / (1 - beta1**step)))


def _sgd(p: torch.Tensor, m: torch.Tensor, _: torch.Tensor, g: torch.Tensor, o: Mapping[str, Any], step: int) -> None:
    """The operators of torch.optim.SGD on one tensor, with Nesterov's momentum."""
    g = g.add(p, alpha=o["weight_decay"])
    if step == 1:
        m.copy_(g)
    else:
        m.mul_(o["momentum"]).add_(g, alpha=1 - o["dampening"])
    p.add_(g.add(m, alpha=o["momentum"]), alpha=-o["lr"])
