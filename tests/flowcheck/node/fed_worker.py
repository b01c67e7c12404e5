"""One rank of a job whose gradients are sent to a node; prints one JSON line per step. Run by test_fed.py.

    python -P fed_worker.py '{"rank": 0, "ranks": 2, "store": FILE, "node": "HOST:PORT", "api": "HOST:PORT", ...}'

nodes: of each rank; node: of all of them. recover: begin with what they have. until: the step at which it ends. die:
[step, instant] at which it is killed. sharded: by fully_shard, of four ranks with replicas; mixed: without, and in bf16
with float32 parameters. optimizers: of matrices and of all else. instances: of Megatron-Core's distributed optimizer,
0: its DistributedDataParallel alone. experts: each rank has a layer of its own. chunks: of a pipeline. optimizer: two
of three write to gradients in their step. views: gradients are views of DDP's buckets, and are set to zero in place, as
nothing counts it. hold: from this step on a node has kept each step before the next one begins, or has had SECONDS for
it. stop: a file at which it ends.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.trainer.describe.optimizers import members, optimizer_of
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
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=True), "muon": torch.optim.Muon,
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


class Expert(Net):
    """A layer that each rank has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = torch.nn.Linear(16, 16)
        for one in self.expert.parameters():
            one.allreduce = False  # as Megatron-Core marks them

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.head(self.expert(self.embed(tokens).mean(1)))


class Chunks(torch.nn.Module):
    """Chunks of a pipeline, one after the other, as if all were on this rank."""

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__()
        self.chunks = torch.nn.ModuleList(chunks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return sum(chunk(tokens) for chunk in self.chunks)

    def no_sync(self) -> Any:
        ends = contextlib.ExitStack()
        for chunk in self.chunks:
            ends.enter_context(chunk.no_sync())
        return ends

    def finish_grad_sync(self) -> None:
        for chunk in self.chunks:
            chunk.finish_grad_sync()

    def zero_grad_buffer(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def megatron(model: list[torch.nn.Module], rank: int, ranks: int, instances: int, experts: bool) -> tuple[Any, Any]:
    """instances: of its distributed optimizer, whose buckets cut parameters; 0: it has none."""
    each = [dist.new_group([one]) for one in range(ranks)]
    size = ranks // max(instances, 1)
    inside = [dist.new_group(list(range(at, at + size))) for at in range(0, ranks, size)]
    across = [dist.new_group(list(range(at, ranks, size))) for at in range(size)]
    places = Places(across[rank % size], inside[rank // size], dist.group.WORLD, each[rank],
                    each[rank] if experts else None)
    return make(model, places, instances=max(instances, 1), bucket_elements=300, reduce_float32=True, clip=0.5,
                use_distributed_optimizer=bool(instances),
                optimizer={"lr": 0.01, "weight_decay": 0.01, "use_distributed_optimizer": bool(instances)})


def main(given: dict[str, Any]) -> None:
    rank = given["rank"]
    dist.init_process_group("gloo", init_method=f"file://{given['store']}", rank=rank, world_size=given["ranks"])
    torch.set_num_threads(1)
    torch.manual_seed(5)
    net = Expert if given.get("experts") else Net
    nets = [net() for _ in range(given.get("chunks", 1))]
    mesh, model, bare = None, None, nets[0] if len(nets) == 1 else torch.nn.ModuleList(nets)
    sharded = given.get("sharded")
    if sharded:
        if given["ranks"] > 2 and not given.get("mixed"):
            mesh = init_device_mesh("cpu", (2, given["ranks"] // 2), mesh_dim_names=("replicate", "shard"))
        for one in nets:
            if given.get("mixed"):
                one.norm = torch.nn.LayerNorm(16)  # torch's batch norm takes no bf16 beside float32 buffers
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if given.get("mixed") else None
            for module in (one.middle, one):
                fully_shard(module, mesh=mesh, **({"mp_policy": policy} if policy else {}))
    handed: Any = None  # to attach and load
    instances = given.get("instances")
    if instances is not None:
        chunks, handed = megatron([one.to(torch.bfloat16) for one in nets], rank, given["ranks"], instances,
                                  bool(given.get("experts")))
        optimizer, model = optimizer_of(handed), chunks[0] if len(chunks) == 1 else Chunks(chunks)
    elif names := given.get("optimizers"):
        matrices = [one for one in bare.parameters() if one.dim() > 1]
        others = [one for one in bare.parameters() if one.dim() < 2]
        handed = [OPTIMIZERS[name](some, lr=0.01) for name, some in zip(names, (matrices, others), strict=True)]
        optimizer = optimizer_of(handed)
    else:
        handed = optimizer = OPTIMIZERS[given.get("optimizer", "nadam")](bare.parameters(), lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 3, 0.9) for one in members(optimizer)]
    step, epoch, whence = 0, 0, ""
    node = given["nodes"][rank] if given.get("nodes") else given.get("node")
    if given.get("recover"):
        alone = instances == 1 or given.get("experts") or (sharded and not mesh)
        some = instances == 2 or sharded
        recovered = flowcheck.recover(given["api"], token=TOKEN, run_id="fed",
                                      shard=f"rank{rank}" if alone else f"shard{rank % 2}" if some else None)
        recovered.load(nets if sharded and len(nets) > 1 else bare if instances is None
                       else chunks if len(chunks) > 1 else model, handed)
        for schedule, there in zip(schedules, recovered.user["schedules"], strict=True):
            schedule.load_state_dict(there)
        recovered.restore_rng()
        step, epoch, whence = recovered.step, recovered.epoch, recovered.source
    if sharded:
        chunks, model = nets, Chunks(nets) if len(nets) > 1 else bare
    elif instances is None:
        model = DistributedDataParallel(bare, gradient_as_bucket_view=bool(given.get("views")))
    if not given.get("recover"):
        torch.manual_seed(100 + rank)
    attachment = None
    if node:
        attachment = flowcheck.attach(
            chunks if isinstance(model, Chunks) else model, handed, node=node, token=TOKEN, run_id="fed",
            epoch=epoch, iteration=step, checksum_every=5, kind=given.get("kind", "log"),
            source=given.get("source", "feed"), scheduler=None if len(schedules) > 1 else schedules[0])
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
                    for one in nets:
                        one.set_requires_gradient_sync(bool(part))
                loss = model(tokens).float().square().mean()
                at("forward")
                loss.backward()
        at("backward")
        if instances is not None:
            model.finish_grad_sync()
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step % 7 != 6:  # as after an overflow
            for one in handed if isinstance(handed, list) else [handed]:
                one.step()
        at("step")
        for schedule in schedules:
            schedule.step()
        if instances is not None:
            model.zero_grad_buffer()
            handed.zero_grad()
        elif given.get("views"):
            for one in bare.parameters():
                if one.grad is not None:
                    one.grad.data.zero_()
        else:
            for one in members(optimizer):
                one.zero_grad()
        if attachment is not None:
            attachment.step(user={"schedules": [schedule.state_dict() for schedule in schedules]})
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
