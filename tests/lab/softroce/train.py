"""What a rank of the tests runs: RANK, then one case per line on stdin. Also imported for the arithmetic alone.

A case is JSON: number, ranks, port (of the c10d store), settings (of softroce), options (below), out. Answered by a
line: the number, then "done" or why it failed. Saved are OUT/rank-R.pt (per iteration the gradients after backward and
the parameters after the step; at the end buffers and packet counters) and OUT/describe-R.json (what softroce says of
itself).

options: width, norm, unused, linear (the model), cap_mb (of DDP's buckets), iterations, accumulate (parts per step),
stop_at (iteration in which rank 1 leaves without a word), lr, momentum; calls (instead of a training: calls.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
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


def model_of(options: dict[str, Any]) -> nn.Module:
    if "linear" in options:  # the job behind the ConnectX captures
        torch.manual_seed(2024)
        return nn.Linear(options["linear"], 1, bias=False)
    torch.manual_seed(7)
    return Net(options.get("width", 64), options.get("norm", False), options.get("unused", False))


def batch(options: dict[str, Any], iteration: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    if "linear" in options:
        generator = torch.Generator().manual_seed(iteration)
        return torch.randn(1, options["linear"], generator=generator), torch.randn(1, 1, generator=generator)
    generator = torch.Generator().manual_seed(1000 * iteration + 10 * rank + part)
    return torch.randn(16, 20, generator=generator), torch.randn(16, 10, generator=generator)


def optimizer_of(options: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=options.get("lr", 0.05), momentum=options.get("momentum", 0.9))


def train(rank: int, ranks: int, options: dict[str, Any], out: Path) -> None:
    """One training by unmodified DistributedDataParallel on the default group."""
    import lab.softroce as softroce

    said = out / f"describe-{rank}.json"  # a test may read it while ranks train: whole or not at all
    said.with_suffix(".part").write_text(json.dumps(softroce.describe()))
    said.with_suffix(".part").rename(said)
    model = model_of(options)
    if rank:  # DDP must bring rank 0's parameters here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=options.get("cap_mb", CAP_MB), find_unused_parameters=options.get("unused", False))
    optimizer = optimizer_of(options, ddp.parameters())
    saved: list[dict[str, Any]] = []
    parts = options.get("accumulate", 1)
    for iteration in range(options.get("iterations", ITERATIONS)):
        if rank == 1 and iteration == options.get("stop_at"):
            os._exit(0)
        optimizer.zero_grad()
        for part in range(parts):
            with contextlib.ExitStack() as stack:
                if part < parts - 1:
                    stack.enter_context(ddp.no_sync())
                x, y = batch(options, iteration, part, rank)
                nn.functional.mse_loss(ddp(x), y).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        saved.append({"gradients": gradients, "parameters": parameters})
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    counters = dist.group.WORLD.communicator.counters()
    torch.save({"iterations": saved, "buffers": buffers, "counters": counters}, out / f"rank-{rank}.pt")


def main() -> None:
    import calls

    import lab.softroce  # noqa: F401
    from lab.softroce.settings import Settings

    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        os.environ["FLOWCHECK_SOFTROCE"] = json.dumps(case["settings"])
        os.environ.update(MASTER_ADDR="10.78.0.10", MASTER_PORT=str(case["port"]))
        answer = "done"
        try:
            dist.init_process_group(
                "softroce", rank=rank, world_size=case["ranks"], timeout=timedelta(seconds=240))
            if "calls" in case["options"]:
                calls.run(rank, case["ranks"], Settings.from_environment())
            else:
                train(rank, case["ranks"], case["options"], Path(case["out"]))
        except (RuntimeError, AssertionError) as error:
            answer = f"failed: {error}".replace("\n", " ")
            traceback.print_exc()
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):  # not initialised
            dist.destroy_process_group()
        # A group that could not be made is counted all the same, and ranks that were not asked for it count less: they
        # would look for each other under different names from then on.
        dist.distributed_c10d._world.group_count = 0
        print(case["number"], answer, flush=True)


if __name__ == "__main__":
    main()
