"""What the lab's trainers step with: torch's own, and three that a script would bring along."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

__all__ = ["KERNELS", "OPTIMIZERS", "Adam8bit", "Lion", "OrthogonalMomentum"]


class Lion(optim.Optimizer):
    """Signs of a momentum."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_((average * one + parameter.grad * (1 - one)).sign_(), alpha=-group["lr"])
                average.mul_(two).add_(parameter.grad, alpha=1 - two)
        return loss


class Adam8bit(optim.Optimizer):
    """Moments in 8 bits, with the largest value of each tensor beside them, and a counter that is a Python number."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._one(parameter, parameter.grad, group)
        return loss

    def _one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["count"] = state.get("count", 0) + 1
        moments = []
        for name, beta, value in (("first", group["betas"][0], gradient), ("second", group["betas"][1],
                                                                          gradient * gradient)):
            kept = state.get(name)
            wide = kept.float().sub_(128).mul_(state[f"{name}_largest"] / 127) if kept is not None else 0.0
            moment = wide * beta + value * (1 - beta)
            largest = moment.abs().max() if moment.numel() else moment.new_zeros(())
            state[f"{name}_largest"] = largest
            state[name] = (moment / largest.clamp_min(1e-30) * 127).round_().add_(128).clamp_(0, 255).to(torch.uint8)
            moments.append(moment)
        first = moments[0] / (1 - group["betas"][0] ** state["count"])
        second = moments[1] / (1 - group["betas"][1] ** state["count"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, second.sqrt_().add_(group["eps"]), value=-group["lr"])


class OrthogonalMomentum(optim.Optimizer):
    """Muon as people write it: the momentum of a matrix is made orthogonal by Newton-Schulz; vectors get signs."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                average.mul_(group["momentum"]).add_(parameter.grad)
                matrix = average.dim() > 1
                change = _orthogonal(average.flatten(1)).view_as(average) if matrix else average.sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])
        return loss


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    wide = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return (wide.T if x.shape[0] > x.shape[1] else wide) * math.sqrt(max(1, x.shape[0] / x.shape[1]))


KERNELS: dict[str, type[optim.Optimizer]] = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}
OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    **KERNELS, "adadelta": optim.Adadelta, "adafactor": optim.Adafactor, "adagrad": optim.Adagrad,
    "adamax": optim.Adamax, "asgd": optim.ASGD, "nadam": optim.NAdam, "radam": optim.RAdam, "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop, "lion": Lion, "adam8bit": Adam8bit, "muon": OrthogonalMomentum,
}
