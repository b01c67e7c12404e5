"""One rank of `make gpu-demo`: torch's own DDP on NCCL, with `prepare` and `attach` as any training script has them.
A job that is kept as a log recovers, when it is over, into a model and an optimizer of its own.

    python -P -m lab.gpu.rank '{"rank": 0, "ranks": 2, ...}'

What is not a training script's: `topology`, because the network is the lab's and no RDMA device is listed anywhere, and
the hashes of all state after each iteration (OUT/rankR.jsonl, as lab.compare reads them). Needs torch and the
trainers' side of FlowCheck, no compiled part of it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from lab.gpu.plugin import PROTOCOLS, read_flows
from lab.wrapping import hashes

__all__ = ["Told", "main", "run"]

WIDTH, CLASSES, BATCH = 192, 16, 32
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer] | None, dict[str, Any]]] = {
    # lr is a power of two: lr * gradient is exact, so that any order of rounding gives the same bits, and a difference
    # is the wire's.
    "sgd": (torch.optim.SGD, {"lr": 2.0**-6}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    # 0.95: a beta of which a GPU's powf is not correctly rounded in the steps that are run here (decision 0033).
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "fused": True}),
    # No kernel of the node's has their bits: these are kept as a log.
    "adam-fused-decay": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "fused": True}),
    "muon": (getattr(torch.optim, "Muon", None), {"lr": 1e-2, "weight_decay": 0.1}),  # torch 2.9 and later
}


@dataclass(frozen=True)
class Told:
    """rank, ranks: obvious. iterations: after the first version, or where none comes in `seconds`. backend, device:
    nccl and cuda. optimizer: one of OPTIMIZERS. protocol, nccl: what NCCL was told, and its version. master: HOST:PORT
    of torch's rendezvous. out: where hashes go. seconds: how long versions are waited for. api: of the node, where the
    job is kept as a log; otherwise ""."""

    rank: int
    ranks: int
    iterations: int
    optimizer: str
    protocol: str
    nccl: str
    master: str
    out: str
    backend: str = "nccl"
    device: str = "cuda"
    seconds: float = 20.0
    api: str = ""

    def topology(self) -> dict[str, Any]:
        """For `attach`: the network's own list, and what NCCL was told by its variables."""
        flows = read_flows(Path(self.out) / f"flows{self.rank}.jsonl")
        return {"flows": flows, "communicator": {
            "ranks": self.ranks, "nccl_version": self.nccl, "protocol": PROTOCOLS[self.protocol], "algorithm": "ring",
            "channels": 1, "mtu": 4096,
        }}


def make(told: Told) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same in every process: weights are drawn on the CPU. Muon takes matrices alone."""
    torch.manual_seed(1)
    sizes, layers = (64, WIDTH, WIDTH, CLASSES), list[nn.Module]()
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer, bias=told.optimizer != "muon"), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).to(told.device)
    kind, options = OPTIMIZERS[told.optimizer]
    if kind is None:
        sys.exit(f"torch {torch.__version__} has no {told.optimizer}")
    return model, kind(model.parameters(), **options)


class End:
    """Of a training: rank 0 decides, and says so in torch's store, which is not the network that is followed."""

    def __init__(self, told: Told, attachment: flowcheck.Attachment) -> None:
        self._told, self._attachment = told, attachment
        self._store = dist.distributed_c10d._get_default_store()
        self._limit = time.monotonic() + told.seconds
        self._last = -1  # not decided

    def after(self, iteration: int) -> bool:
        """Is there this one?"""
        if self._told.rank == 0:
            begun = self._attachment.published[0] >= 0 or self._attachment.state == "refused"
            if self._last < 0 and (begun or time.monotonic() > self._limit):
                self._last = iteration + self._told.iterations
            self._store.set(f"last after {iteration}", str(self._last))
        else:
            self._last = int(self._store.get(f"last after {iteration}"))
        return self._last < 0 or iteration < self._last


def run(told: Told) -> None:
    prepared = flowcheck.prepare()
    for problem in prepared.problems:
        print(f"prepare: {problem}", file=sys.stderr)
    dist.init_process_group(told.backend, init_method=f"tcp://{told.master}", rank=told.rank, world_size=told.ranks)
    cuda = told.device == "cuda"
    module, optimizer = make(told)
    model = DistributedDataParallel(module, device_ids=[0] if cuda else None, bucket_cap_mb=0.1)
    attachment = flowcheck.attach(model, optimizer, checksum_every=1, topology=told.topology,
                                  kind="log" if told.api else "replica")
    known: list[dict[str, Any]] = []
    torch.manual_seed(100 + told.rank)
    with (Path(told.out) / f"rank{told.rank}.jsonl").open("w") as out:
        end = End(told, attachment)
        for iteration in itertools.takewhile(end.after, itertools.count()):
            x, y = torch.randn(BATCH, 64), torch.randint(CLASSES, (BATCH,))
            with attachment.iteration():
                optimizer.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(model(x.to(told.device)), y.to(told.device)).backward()
                optimizer.step()
            mine = hashes(module, optimizer)
            known.append(mine)
            out.write(json.dumps({"stage": 0, "rank": told.rank, "iteration": iteration, "buffers": [], **mine}) + "\n")
            out.flush()
    limit = time.monotonic() + told.seconds
    while attachment.published[0] < len(known) - 1 and attachment.state != "refused" and time.monotonic() < limit:
        time.sleep(0.05)
    said = {"rank": told.rank, "iterations": len(known), "state": str(attachment.state), "why": attachment.why,
            "published": attachment.published}
    attachment.close()
    dist.destroy_process_group()
    if told.api:
        said["redone"] = redone(told, known)
    print(json.dumps(said), flush=True)


def redone(told: Told, known: list[dict[str, Any]]) -> dict[str, Any]:
    """What the node's log gives: its step and status, and the first tensor that is not as it was after that step."""
    token = Path(os.environ["FLOWCHECK_TOKEN_FILE"]).read_text().strip()
    recovered = flowcheck.recover(told.api, token=token)
    model, optimizer = make(told)
    recovered.load(model, optimizer)
    mine, then = hashes(model, optimizer), known[recovered.step - 1]
    differs = [f"{kind} {name}" for kind in mine for name in sorted(mine[kind].keys() | then[kind].keys())
               if mine[kind].get(name) != then[kind].get(name)]
    return {"step": recovered.step, "status": recovered.status, "differs": (differs or [""])[0]}


def main() -> int:
    told = Told(**json.loads(sys.argv[1]))
    run(told)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # torch's and NCCL's own threads have nothing more to say, and some of them do not end
