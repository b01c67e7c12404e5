"""What the ranks of the DDP tests run: RANK RANKS OUT OPTIONS. Also imported for the arithmetic without a network.

Writes OUT/rank-R.pt: per iteration the gradients after backward and the parameters after the step, and at the end the
buffers; OUT/describe-R.json: what softroce says of itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ITERATIONS = 4
CAP_MB = 0.01


class Net(nn.Module):
    """An MLP; `norm` adds batch norm, `unused` a layer that no loss reaches."""

    def __init__(self, width: int, norm: bool, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.middle = nn.Linear(width, width)
        self.spare = nn.Linear(7, 3) if unused else None
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(self.norm(torch.relu(self.first(x))))))


def model_of(options: dict[str, Any]) -> Net:
    torch.manual_seed(7)
    return Net(options.get("width", 64), options.get("norm", False), options.get("unused", False))


def batch(iteration: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * iteration + 10 * rank + part)
    return torch.randn(16, 20, generator=generator), torch.randn(16, 10, generator=generator)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def main() -> None:
    import flowcheck.lab.softroce as softroce

    rank, ranks, out, options = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("softroce", rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    (out / f"describe-{rank}.json").write_text(json.dumps(softroce.describe()))
    model = model_of(options)
    if rank:  # DDP must bring rank 0's parameters here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=options.get("cap_mb", CAP_MB), find_unused_parameters=options.get("unused", False))
    optimizer = optimizer_of(ddp.parameters())
    saved: list[dict[str, Any]] = []
    parts = options.get("accumulate", 1)
    for iteration in range(options.get("iterations", ITERATIONS)):
        optimizer.zero_grad()
        for part in range(parts):
            with contextlib.ExitStack() as stack:
                if part < parts - 1:
                    stack.enter_context(ddp.no_sync())
                x, y = batch(iteration, part, rank)
                nn.functional.mse_loss(ddp(x), y).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        saved.append({"gradients": gradients, "parameters": parameters})
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    counters = dist.group.WORLD.communicator.counters()
    torch.save({"iterations": saved, "buffers": buffers, "counters": counters}, out / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
