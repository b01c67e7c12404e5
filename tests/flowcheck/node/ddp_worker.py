"""One rank of a gloo DDP job with an attachment; prints one JSON line per step. Run by test_attachment.py.

    python -P ddp_worker.py RANK RANKS STORE NODES TOKEN JOB STEPS WAIT [STEP=WHAT ...]

NODES: one or several with commas between, attached to one after the other for STEPS each. JOB: manifest whose
communicator and flows stand for those that gloo has not. What may happen at a step: "nan", clipping by no number;
"skipped", so after an overflow; "twice", the attachment is told twice; "extra", one more reduction, as long as a
bucket; "unused", a parameter without a gradient; "bf16" (step 0), parameters and buffers of 16 bits.
"""

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.checkpoint.directory import tensor_sha256


class Net(torch.nn.Module):
    """Tied weights, a frozen tensor, a batch norm: every kind of entry."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.middle = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(self.norm(self.embed(tokens).mean(1)))))


def main() -> None:
    rank, ranks, store, nodes, token, job_path, steps, wait = sys.argv[1:9]
    odd = {int(step): what for step, _, what in (word.partition("=") for word in sys.argv[9:])}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    torch.manual_seed(5)
    wide = torch.bfloat16 if odd.get(0) == "bf16" else torch.float32
    model = DistributedDataParallel(Net().to(wide))
    dtype = str(wide).removeprefix("torch.")
    decay = [model.module.embed.weight, model.module.middle.weight]
    rest = [model.module.middle.bias, model.module.norm.weight, model.module.norm.bias, model.module.frozen]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    said: list[dict[str, Any]] = [{"op": "AllGather", "count": 1, "dtype": "int64"}]
    job = json.loads(Path(job_path).read_text())
    mine = [flow for flow in job["flows"] if int(rank) in (flow["src"], flow["dst"])]
    sizes = lambda: [b.buffer().numel() for b in model.reducer._get_zeros_like_grad_buckets()]  # noqa: E731
    torch.manual_seed(int(rank))
    step = 0
    for node in nodes.split(","):
        attachment = flowcheck.attach(
            model, optimizer, node=node, token=token, checksum_every=2, run_id="gloo", iteration=step,
            max_stall_s=float(wait), topology=lambda: {"communicator": job["communicator"], "flows": mine},
            collectives=lambda since: said[since:],
        )
        for _ in range(int(steps)):
            loss = model(torch.randint(50, (8, 4))).square().mean()
            if step == 1:
                said.append({"op": "Broadcast", "count": 7, "dtype": "int32"})
            said.append({"op": "Broadcast", "count": 32, "dtype": dtype})
            loss.backward()
            said.extend({"op": "AllReduce", "count": count, "dtype": dtype} for count in sizes())
            if odd.get(step) == "extra":
                said.append(dict(said[-1]))
            if odd.get(step) == "unused":
                model.module.middle.bias.grad = None
            if odd.get(step) != "skipped":
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            trained = time.monotonic()
            clip = float("nan") if odd.get(step) in ("nan", "skipped") else None
            attachment.step(clip=clip, skipped=odd.get(step) == "skipped")
            if odd.get(step) == "twice":
                attachment.step()
            took = time.monotonic() - trained
            state = {name: tensor_sha256(tensor) for name, tensor in model.module.state_dict().items()}
            state |= {
                f"{name}.{key}": tensor_sha256(value) for name, parameter in model.module.named_parameters()
                for key, value in optimizer.state.get(parameter, {}).items() if key != "step"
            }
            print(json.dumps({"node": node, "step": step, "state": attachment.state, "why": attachment.why,
                              "took": took, "hashes": state}), flush=True)
            step += 1
        dist.barrier()  # what a rank has said of itself is from before another's goodbye
        attachment.close(float(wait))
        print(json.dumps({"node": node, "closed": attachment.state}), flush=True)
    dist.destroy_process_group()


main()
# In order, as far as it is ours: after that gloo's threads may still let go of a tensor of Python's, and torch then
# aborts the process (pytorch#190489). The groups that DDP holds are never destroyed.
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
