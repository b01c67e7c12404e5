"""Several changes in one run, drawn by chance: whatever comes after one another, nothing wrong is silent."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..run import Run
from ..table import CHANGES_AT, Expected, scenario

CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "rate": lambda ddp, optimizer: optimizer.param_groups[0].update(lr=3e-3),
    "betas": lambda ddp, optimizer: optimizer.param_groups[0].update(betas=(0.8, 0.95), weight_decay=0.2),
    "maximize": lambda ddp, optimizer: optimizer.param_groups[0].update(maximize=True),
    "foreach": lambda ddp, optimizer: optimizer.param_groups[0].update(foreach=False, fused=True),
    "moments": lambda ddp, optimizer: [state["exp_avg"].zero_() for state in optimizer.state.values()],
    "counts": lambda ddp, optimizer: [state["step"].zero_() for state in optimizer.state.values()],
    "cleared": lambda ddp, optimizer: optimizer.state.clear(),
    "itself": lambda ddp, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "weights": lambda ddp, optimizer: [p.data.mul_(0.99) for p in ddp.parameters()],
    "one weight": lambda ddp, optimizer: ddp.module.middle.weight.data[3, 3].fill_(0.5),
    "gradients": lambda ddp, optimizer: [p.grad.data.mul_(0.5) for p in ddp.parameters() if p.grad is not None],
    "clipped": lambda ddp, optimizer: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01),
    "storage": lambda ddp, optimizer: [setattr(p, "data", p.data.clone()) for p in ddp.parameters()],
    "reset": lambda ddp, optimizer: torch.nn.init.constant_(ddp.module.last.bias, 0.1),
}
PLACES = ("top", "backward", "step", "end")


def _mixture(run: Run, seed: int) -> None:
    """Three changes at iterations and places that the seed says."""
    chosen = random.Random(seed)
    plan = {(chosen.randrange(CHANGES_AT, CHANGES_AT + 4), chosen.choice(PLACES)): chosen.choice(list(CHANGES))
            for _ in range(3)}
    ddp, optimizer, attachment = run.usual()

    def at(i: int, place: str) -> None:
        if (i, place) in plan:
            torch.manual_seed(seed)
            with torch.no_grad():
                CHANGES[plan[i, place]](ddp, optimizer)

    for i in run.iterations():
        at(i, "top")
        with attachment.iteration():
            run.backward(ddp, optimizer, i)
            at(i, "backward")
            optimizer.step()
            at(i, "step")
        at(i, "end")


for _seed in range(12):
    _script = partial(_mixture, seed=_seed)
    _script.__name__, _script.__doc__ = f"mixture_{_seed}", _mixture.__doc__  # type: ignore[attr-defined]
    scenario(Expected.CAUGHT, at=None, iterations=CHANGES_AT + 12, sums=5)(_script)
