"""One rank of a job whose gradients are sent to a node; prints one JSON line per step. Run by test_fed.py.

    python -P fed_worker.py '{"rank": 0, "ranks": 2, "store": FILE, "node": "HOST:PORT", "api": "HOST:PORT", ...}'

recover: begin with what nodes have. until: the step at which it ends. die: [step, instant] at which it is killed.
sharded: by fully_shard, of four ranks with replicas. instances: of Megatron-Core's distributed optimizer, 0: its
DistributedDataParallel alone. optimizer: two of three write to gradients in their step. views: gradients are views of
DDP's buckets, and are set to zero in place, as nothing counts it. hold: from this step on a node has kept each step
before the next one begins, or has had SECONDS for it. stop: a file at which it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.trainer.describe.megatron_pieces import torch_optimizer
from lab.megatron import Places, as_cuda, make

TOKEN = "a token that only tests have"
SECONDS = 5.0


class Net(torch.nn.Module):
    """Tied weights, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.middle = torch.nn.Linear(16, 16)
        self.drop = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.middle(self.norm(self.embed(tokens).mean(1))))))


class Old(torch.optim.Optimizer):
    """As many wrote them once: decay is added to the gradient itself, also where nothing counts it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                grad = one.grad.data if one.dim() > 1 else one.grad
                state = self.state[one]
                grad.add_(one.data, alpha=0.1)
                state["sum"] = state.get("sum", torch.zeros_like(one.data)).mul_(0.9).add_(grad)
                one.data.add_(state["sum"], alpha=-group["lr"])


OPTIMIZERS = {
    "nadam": torch.optim.NAdam, "old": Old, "adamw": torch.optim.AdamW,
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True),
}


def bits(tensor: torch.Tensor) -> bytes:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def hashed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that the next step begins with."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + bits(tensor))
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        found.update(bits(parameter))
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                found.update(key.encode() + bits(value))
    return found.hexdigest()


def megatron(model: torch.nn.Module, rank: int, ranks: int, instances: int) -> tuple[Any, Any]:
    """instances: of its distributed optimizer, whose buckets cut parameters; 0: it has none."""
    each = [dist.new_group([one]) for one in range(ranks)]
    size = ranks // max(instances, 1)
    inside = [dist.new_group(list(range(at, at + size))) for at in range(0, ranks, size)]
    across = [dist.new_group(list(range(at, ranks, size))) for at in range(size)]
    places = Places(across[rank % size], inside[rank // size], dist.group.WORLD, each[rank])
    return make(model, places, instances=max(instances, 1), bucket_elements=300, reduce_float32=True, clip=0.5,
                use_distributed_optimizer=bool(instances),
                optimizer={"lr": 0.01, "weight_decay": 0.01, "use_distributed_optimizer": bool(instances)})


def main(given: dict[str, Any]) -> None:
    rank = given["rank"]
    dist.init_process_group("gloo", init_method=f"file://{given['store']}", rank=rank, world_size=given["ranks"])
    torch.set_num_threads(1)
    torch.manual_seed(5)
    bare, mesh, model = Net(), None, None
    sharded = given.get("sharded")
    if sharded:
        if given["ranks"] > 2:
            mesh = init_device_mesh("cpu", (2, given["ranks"] // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(bare.middle, mesh=mesh)
        fully_shard(bare, mesh=mesh)
    stepping: Any = None
    instances = given.get("instances")
    if instances is not None:
        model, stepping = megatron(bare.to(torch.bfloat16), rank, given["ranks"], instances)
        optimizer = torch_optimizer(stepping)
    else:
        optimizer = OPTIMIZERS[given.get("optimizer", "nadam")](bare.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    step, epoch, whence = 0, 0, ""
    if given.get("recover"):
        alone, some = instances == 1 or (sharded and not mesh), instances == 2 or sharded
        recovered = flowcheck.recover(given["api"], token=TOKEN, run_id="fed",
                                      shard=f"rank{rank}" if alone else f"shard{rank % 2}" if some else None)
        recovered.load(model if stepping else bare, stepping or optimizer)
        schedule.load_state_dict(recovered.scheduler)
        recovered.restore_rng()
        step, epoch, whence = recovered.step, recovered.epoch, recovered.source
    if not stepping:
        model = bare if sharded else DistributedDataParallel(bare, gradient_as_bucket_view=bool(given.get("views")))
    if not given.get("recover"):
        torch.manual_seed(100 + rank)
    attachment = None
    if given.get("node"):
        attachment = flowcheck.attach(
            model, stepping or optimizer, node=given["node"], token=TOKEN, run_id="fed", epoch=epoch, iteration=step,
            checksum_every=5, kind=given.get("kind", "log"), source="feed", scheduler=schedule)
    die, instant = given.get("die") or (-1, "")
    print(json.dumps({"step": step, "whence": str(whence), "hash": hashed(bare, optimizer)}), flush=True)
    while step < given["until"]:
        def at(where: str, now: int = step) -> None:
            if (now, where) == (die, instant):
                os.kill(os.getpid(), signal.SIGKILL)

        data = torch.Generator().manual_seed(1000 * step + rank)
        for part in range(2):  # micro-batches
            tokens = torch.randint(37, (8, 4), generator=data)
            with model.no_sync() if not (part or sharded) else torch.enable_grad():
                if sharded:
                    bare.set_requires_gradient_sync(bool(part))
                loss = model(tokens).float().square().mean()
                at("forward")
                loss.backward()
        at("backward")
        if stepping:
            model.finish_grad_sync()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step % 7 != 6:  # as after an overflow
            (stepping or optimizer).step()
        at("step")
        schedule.step()
        if stepping:
            model.zero_grad_buffer()
            stepping.zero_grad()
        elif given.get("views"):
            for one in bare.parameters():
                if one.grad is not None:
                    one.grad.data.zero_()
        else:
            optimizer.zero_grad()
        if attachment is not None:
            attachment.step()
        step += 1
        state = str(attachment.state) if attachment is not None else ""
        print(json.dumps({"step": step, "hash": hashed(bare, optimizer), "state": state,
                          "why": attachment.why if attachment is not None else "",
                          "published": attachment.published[0] if attachment is not None else -1}), flush=True)
        at("boundary")
        if given.get("stop"):
            stops = torch.tensor(float(os.path.exists(given["stop"])))
            dist.all_reduce(stops)
            if stops:
                break
        if attachment is not None and not rank and step >= given.get("hold", 1 << 60):
            late = time.monotonic() + SECONDS
            while attachment.published[0] < step - 1 and time.monotonic() < late:
                time.sleep(0.002)
    if attachment is not None:
        attachment.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with as_cuda() if asked.get("instances") is not None else contextlib.nullcontext():
        main(asked)
