"""Loss scales."""

from __future__ import annotations

from typing import Any

import torch

from ..run import Run
from ..table import Expected, scenario


def _scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 5, **settings})


@scenario(Expected.EQUAL, at=None)
def scaler_given(run: Run) -> None:
    """GradScaler as attach knows it, with overflows, unscale_ and clipping."""
    ddp = run.ddp()
    optimizer, scaler = torch.optim.AdamW(ddp.parameters(), 1e-3), _scaler()
    attachment = run.attach(ddp, optimizer, scaler=scaler)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            scaler.scale(run.loss(ddp, i) * (float("inf") if i in (7, 12) else 1.0)).backward()
            scaler.unscale_(optimizer)
            attachment.clip_grad_norm_(ddp.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()


@scenario(Expected.NAMED, at=None)
def scaler_not_given(run: Run) -> None:
    """GradScaler of which attach is not told."""
    ddp, optimizer, attachment = run.usual()
    scaler = _scaler()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            scaler.scale(run.loss(ddp, i)).backward()
            scaler.step(optimizer)
            scaler.update()


@scenario(Expected.NAMED)
def scaler_begins_later(run: Run) -> None:
    """Mixed precision from a step on."""
    ddp, optimizer, attachment = run.usual()
    scaler = _scaler()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            if run.since(i):
                scaler.scale(run.loss(ddp, i)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                run.loss(ddp, i).backward()
                optimizer.step()


def _two(run: Run, first_overflows: bool) -> None:
    """PyTorch's recipe for several models, losses and optimizers; the second model is each rank's own."""
    ddp, other = run.ddp(), run.model()
    optimizer, second = torch.optim.AdamW(ddp.parameters(), 1e-3), torch.optim.SGD(other.parameters(), 0.1)
    scaler = _scaler(growth_interval=1000)
    attachment = run.attach(ddp, optimizer, scaler=scaler)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            second.zero_grad()
            odd = [float("inf") if run.now(i) and mine else 1.0 for mine in (first_overflows, not first_overflows)]
            scaler.scale(run.loss(ddp, i) * odd[0]).backward()
            scaler.scale(run.loss(other, i) * odd[1]).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.step(second)
            scaler.update()


@scenario(Expected.NAMED, quick=True)
def scaler_of_two_optimizers(run: Run) -> None:
    """One GradScaler for two optimizers: the other one overflows, and its scale falls although ours stepped."""
    _two(run, first_overflows=False)


@scenario(Expected.EQUAL)
def scaler_of_two_optimizers_ours(run: Run) -> None:
    """The same: ours overflows, and the other one steps."""
    _two(run, first_overflows=True)


@scenario(Expected.NAMED)
def scaler_overflow_of_the_first(run: Run) -> None:
    """No hysteresis: an overflow in which the scale is at its least and cannot fall (backoff_factor near 1)."""
    ddp = run.ddp()
    optimizer, scaler = torch.optim.AdamW(ddp.parameters(), 1e-3), _scaler(backoff_factor=1.0 - 1e-9)
    attachment = run.attach(ddp, optimizer, scaler=scaler)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            scaler.scale(run.loss(ddp, i) * (float("inf") if run.now(i) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()


@scenario(Expected.NAMED)
def scale_set_by_hand(run: Run) -> None:
    """scaler.update(new_scale) makes the scale smaller, and nothing was skipped."""
    ddp = run.ddp()
    optimizer, scaler = torch.optim.AdamW(ddp.parameters(), 1e-3), _scaler()
    attachment = run.attach(ddp, optimizer, scaler=scaler)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            scaler.scale(run.loss(ddp, i)).backward()
            scaler.step(optimizer)
            if run.now(i):
                scaler.update(16.0)
            else:
                scaler.update()


@scenario(Expected.NAMED)
def scaled_by_hand(run: Run) -> None:
    """loss * 128, and p.grad /= 128 before the step."""
    ddp, optimizer, attachment = run.usual()
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            scale = 100.0 if run.since(i) else 1.0
            (run.loss(ddp, i) * scale).backward()
            if scale != 1.0:
                for parameter in ddp.parameters():
                    parameter.grad /= scale
            optimizer.step()


@scenario(Expected.EQUAL, at=None)
def scaler_that_is_off(run: Run) -> None:
    """GradScaler(enabled=False), as scripts have it for bfloat16."""
    ddp = run.ddp()
    optimizer, scaler = torch.optim.AdamW(ddp.parameters(), 1e-3), _scaler(enabled=False)
    attachment = run.attach(ddp, optimizer, scaler=scaler)
    for i in run.iterations():
        with attachment.iteration():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = run.loss(ddp, i)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
