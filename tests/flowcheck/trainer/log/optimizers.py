"""Optimizers as users write them, and every one of torch.optim that a log serves, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """What they have in common."""

    def __init__(self, groups: Any, **defaults: Any) -> None:
        super().__init__(groups, {"lr": 0.01, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Own):
    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        moment = state["exp_avg"]
        p.mul_(1 - group["lr"] * 0.1).add_(moment.mul(0.9).add(grad, alpha=0.1).sign(), alpha=-group["lr"])
        moment.mul_(0.99).add_(grad, alpha=0.01)


class EightBit(Own):
    """Adam with moments in bytes, a scale for each block of 8, and its count a Python int; also what else a state may
    hold: a text, a tuple, None and a nested dict."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        blocks = -(-p.numel() // 8)
        if not state:
            for name in ("one", "two"):
                state[name] = {"codes": torch.zeros(8 * blocks, dtype=torch.uint8), "largest": torch.zeros(blocks)}
            state |= {"step": 0, "betas": (0.9, 0.99), "kind": "linear", "warm": None, "hot": False}
        state["step"] += 1
        state["warm"], state["hot"] = state["step"] / 7, state["step"] > 3
        moments = []
        for name, beta, what in zip(("one", "two"), state["betas"], (grad, grad * grad), strict=True):
            held = state[name]
            wide = torch.zeros(8 * blocks)
            wide[: p.numel()] = what.reshape(-1).float()
            moment = (held["codes"].view(blocks, 8).float() - 127) * (held["largest"] / 127).view(-1, 1)
            moment = moment.mul(beta).add(wide.view(blocks, 8), alpha=1 - beta)
            held["largest"] = moment.abs().amax(1) if blocks else torch.zeros(0)
            safe = held["largest"].clamp_min(1e-20).view(-1, 1)
            held["codes"] = (moment / safe * 127 + 127).round().to(torch.uint8).view(-1)
            moments.append(moment.reshape(-1)[: p.numel()].view(p.shape))
        p.add_((moments[0] / (moments[1].clamp_min(0).sqrt() + 1e-4)).to(p.dtype), alpha=-group["lr"])


class Muon(Own):
    """Orthogonalised momentum; None counts as zeros, as in Keller Jordan's, and the group counts steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                grad = p.grad if p.grad is not None else torch.zeros_like(p)
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(grad, 0.05)
                update = state["momentum"].float().reshape(p.shape[0] if p.dim() else 1, -1) if p.numel() else p
                for _ in range(3 if p.numel() else 0):
                    update = update / (update.norm() + 1e-7)
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                p.mul_(1 - group["lr"] * 0.01).add_(
                    update.reshape(p.shape).to(p.dtype), alpha=-group["lr"] / (1 + group["step"] % 5))


class Hiding(Own):
    """Counts where no log looks: in an attribute."""

    count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / self.count)


class Normed(Own):
    """Divides by a norm over all parameters."""

    def begin(self, group: dict[str, Any]) -> None:
        self.state["all"]["norm"] = torch.stack(  # type: ignore[index]
            [p.grad.norm() for p in group["params"] if p.grad is not None] or [torch.tensor(1.0)]).norm()

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad / (self.state["all"]["norm"] + 1), alpha=group["lr"])  # type: ignore[index]


class Rounding(Own):
    """Randomly."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad + torch.rand(p.shape), alpha=-group["lr"])


def _torchs() -> Iterator[tuple[str, type, dict[str, Any], tuple[str, ...]]]:
    loops, both, all_three = ("for",), ("for", "foreach"), ("for", "foreach", "fused")
    optim = torch.optim
    yield "sgd", optim.SGD, {}, all_three
    yield "sgd-nesterov", optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, all_three
    yield "sgd-dampening", optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}, both
    for name, kind in (("adam", optim.Adam), ("adamw", optim.AdamW)):
        yield name, kind, {"weight_decay": 0.1}, all_three
        yield f"{name}-amsgrad", kind, {"amsgrad": True}, all_three
    yield "nadam", optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, both
    yield "radam", optim.RAdam, {}, both
    yield "adamax", optim.Adamax, {}, both
    yield "adadelta", optim.Adadelta, {}, both
    yield "rmsprop", optim.RMSprop, {"momentum": 0.9, "centered": True}, both
    yield "rprop", optim.Rprop, {}, both
    yield "adagrad", optim.Adagrad, {"lr_decay": 0.1}, all_three
    yield "asgd", optim.ASGD, {"t0": 3.0}, both
    yield "adafactor", optim.Adafactor, {}, both
    yield "muon", optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}, loops
    yield "sparse-adam", optim.SparseAdam, {}, loops


def made() -> Iterator[tuple[str, Make]]:
    """Name, and how it is made of parameter groups."""
    for name, kind, options, forms in _torchs():
        for form in forms:
            flags = {form: True} if form != "for" else {"foreach": False} if len(forms) > 1 else {}
            yield f"{name}-{form}", lambda groups, k=kind, o=options | flags: k(groups, lr=0.01, **o)  # type: ignore[misc]
    for own in (Lion, EightBit, Muon):
        yield f"own-{own.__name__.lower()}", own


MAKE = dict(made())
