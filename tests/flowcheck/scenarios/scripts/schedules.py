"""Learning rates of torch's schedules, which have to be followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as schedules

from ..run import Run
from ..table import Expected, scenario


def _usual(run: Run, make: Callable[[torch.optim.Optimizer], Any], before: bool = False, loss: bool = False) -> None:
    """before: the schedule steps before the optimizer does. loss: it is told the loss."""
    ddp = run.ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    schedule = make(optimizer)
    attachment = run.attach(ddp, optimizer, scheduler=schedule)
    for i in run.iterations():
        with attachment.iteration():
            value = run.backward(ddp, optimizer, i)
            if before:
                schedule.step()
            optimizer.step()
            if not before:
                schedule.step(*([value] if loss else []))


@scenario(Expected.EQUAL, at=None)
def one_cycle(run: Run) -> None:
    """OneCycleLR, which changes betas, too."""
    _usual(run, lambda optimizer: schedules.OneCycleLR(optimizer, 1e-2, total_steps=40))


@scenario(Expected.EQUAL, at=None)
def warm_restarts(run: Run) -> None:
    """CosineAnnealingWarmRestarts, before the optimizer's step."""
    _usual(run, lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 5), before=True)


@scenario(Expected.EQUAL, at=None)
def plateau(run: Run) -> None:
    """ReduceLROnPlateau, by the loss of rank 0 (in each rank the same, as people make it)."""
    _usual(run, lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9), loss=True)


@scenario(Expected.EQUAL, at=None)
def chained(run: Run) -> None:
    """Three schedules, one after the other."""
    _usual(run, lambda optimizer: schedules.SequentialLR(optimizer, [
        schedules.LinearLR(optimizer, 0.1, total_iters=5), schedules.PolynomialLR(optimizer, 10),
        schedules.ExponentialLR(optimizer, 0.9),
    ], [5, 12]))


@scenario(Expected.EQUAL, at=None)
def by_a_function(run: Run) -> None:
    """LambdaLR and CyclicLR's momentum."""
    _usual(run, lambda optimizer: schedules.ChainedScheduler([
        schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        schedules.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=4, cycle_momentum=True),
    ]))


@scenario(Expected.EQUAL)
def exchanged(run: Run) -> None:
    """Another schedule in mid-run."""
    ddp, optimizer, attachment = run.usual()
    schedule: Any = schedules.ExponentialLR(optimizer, 0.9)
    for i in run.iterations():
        run.plain(ddp, optimizer, attachment, i)
        if run.now(i):
            schedule = schedules.CosineAnnealingLR(optimizer, 10)
        schedule.step()
