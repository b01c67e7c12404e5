"""The same training in one process: every rank's gradients, summed in the order that synth says NCCL sums in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import train
from torch import nn

from lab.softroce.settings import Settings
from lab.synth.chunk_layout import Operation
from lab.synth.values import Stages


def reduce(settings: Settings, ranks: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """AllReduce of one flat float32 tensor per rank."""
    op = Operation(
        "AllReduce", settings.algorithm, settings.protocol.lower(), parts[0].numel(), 4, 0, ranks, settings.channels,
        tuple(settings.ring(channel, ranks) for channel in range(settings.channels)), settings.threads,
        settings.buffers, settings.wire_family,
    )
    return torch.from_numpy(np.array(Stages(op, "float32", [part.numpy() for part in parts]).result))


Iterations = list[dict[str, dict[str, torch.Tensor]]]


def train_alone(settings: Settings, ranks: int, options: dict[str, Any]) -> tuple[Iterations, list[list[list[str]]]]:
    """Gradients and parameters of each iteration, and DDP's buckets in the first and the later ones. On one thread,
    like the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(settings, ranks, options)
    finally:
        torch.set_num_threads(threads)


def _train(settings: Settings, ranks: int, options: dict[str, Any]) -> tuple[Iterations, list[list[list[str]]]]:
    model = train.model_of(options)
    optimizer = train.optimizer_of(options, model.parameters())
    named = dict(model.named_parameters())
    ready: list[str] = []
    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    parts = options.get("accumulate", 1)
    layout = [list(named)]
    layouts: list[list[list[str]]] = [layout]
    out: Iterations = []
    for iteration in range(options.get("iterations", train.ITERATIONS)):
        local = []
        for rank in range(ranks):
            model.zero_grad()
            for part in range(parts):
                ready.clear()
                x, y = train.batch(options, iteration, part, rank)
                nn.functional.mse_loss(model(x), y).backward()
            local.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        for bucket in layout:
            flat = [torch.cat([grads[name].reshape(-1) for name in bucket]) * (1.0 / ranks) for grads in local]
            total, offset = reduce(settings, ranks, flat), 0
            for name in bucket:
                size = named[name].numel()
                named[name].grad = total[offset : offset + size].view(named[name].shape).clone()
                offset += size
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        optimizer.step()
        out.append({"gradients": gradients, "parameters": {n: p.detach().clone() for n, p in named.items()}})
        if iteration == 0:
            layout = _buckets(ready, named, options.get("cap_mb", train.CAP_MB))
            layouts.append(layout)
    return out, layouts


def _buckets(ready: list[str], named: dict[str, nn.Parameter], cap_mb: float) -> list[list[str]]:
    """DDP's rebuilt buckets: in the order in which gradients became ready, each closed when it reaches the cap."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name in ready:
        buckets[-1].append(name)
        size += named[name].numel() * 4
        if size >= int(cap_mb * (1 << 20)):
            buckets.append([])
            size = 0
    return [bucket for bucket in buckets if bucket]
