"""A training script that goes on after a fault, bit for bit: attach, recover, and torchrun starts it anew.

    torchrun --nproc-per-node 8 --max-restarts 3 examples/train.py --iterations 1000 --out out \\
        --control 10.0.0.2:7070 --api 10.0.0.2:7071 --token-file token

With dropout, a loader that shuffles, a schedule, clipping and a loss scale: all of that goes on where it was. What is
FlowCheck's is marked with ##. Without --control the same training runs alone, and ends with the same bits. Each rank
writes OUT/rank-R.jsonl: the loss of each iteration, and at the end SHA-256 over all of its state.
"""

import argparse
import hashlib
import importlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flowcheck


class Loader:
    """Samples in another order in every epoch; its state is a seed and a place."""

    def __init__(self, samples: int, batch: int, rank: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, 20, generator=generator)
        self.targets = self.inputs.sin().sum(1, keepdim=True)
        self.batch, self.rank, self.ranks = batch, rank, ranks
        self.epoch, self.at = 0, 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the next batch."""
        if (self.at + 1) * self.batch * self.ranks > len(self.inputs):
            self.epoch, self.at = self.epoch + 1, 0
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(self.epoch))
        first = (self.at * self.ranks + self.rank) * self.batch
        self.at += 1
        chosen = order[first : first + self.batch]
        return self.inputs[chosen], self.targets[chosen]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over every tensor of both."""
    sums = hashlib.sha256()
    for tensor in model.state_dict().values():
        sums.update(tensor.cpu().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for _, value in sorted(state.items()):
            sums.update(torch.as_tensor(value).cpu().numpy().tobytes())
    return sums.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Training that goes on after a fault.")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--control", help="HOST:PORT of the node's control port")
    parser.add_argument("--api", help="HOST:PORT of its api.listen")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--backend", default="nccl" if torch.cuda.is_available() else "gloo")
    options = parser.parse_args()
    if options.backend == "softroce":  # the lab's: NCCL's wire format without NICs and GPUs
        importlib.import_module("lab.softroce")
    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if options.backend == "nccl" else torch.device("cpu")

    torch.manual_seed(1)  # the same first weights on all ranks
    layers = [torch.nn.Linear(20, 200), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(200, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    ddp = DistributedDataParallel(model, process_group=dist.new_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.iterations)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=50)
    loader = Loader(1000, 16, rank, ranks)

    # DDP orders its buckets anew after the first backward: one that is thrown away, so that a restart sums up alike.
    scaler.scale(ddp(loader.inputs[:4].to(device)).sum()).backward()
    optimizer.zero_grad()
    torch.manual_seed(100 + rank)
    start, attachment = 0, None
    if options.control:
        token = options.token_file.read_text().split("\n", 1)[0]
        recovered = flowcheck.recover(options.api, token=token, run_id="example")                                  ##
        if recovered:                                                                                              ##
            model.load_state_dict(recovered.model)                                                                 ##
            optimizer.load_state_dict(recovered.optimizer)                                                         ##
            scheduler.load_state_dict(recovered.scheduler)                                                         ##
            scaler.load_state_dict(recovered.scaler)                                                               ##
            loader.load_state_dict(recovered.user["loader"])                                                       ##
            recovered.restore_rng()                                                                                ##
        print(f"rank {rank}: {recovered}", flush=True)
        start = recovered.step
        attachment = flowcheck.attach(                                                                             ##
            ddp, optimizer, node=options.control, token=token, checksum_every=10, run_id="example",                   ##
            epoch=recovered.epoch, iteration=recovered.step, scheduler=scheduler, scaler=scaler,                   ##
        )                                                                                                          ##

    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"rank-{rank}.jsonl").open("a") as told:
        def tell(**said: object) -> None:
            told.write(json.dumps(said) + "\n")
            told.flush()

        for number in range(start, options.iterations):
            inputs, targets = loader.next()
            loss = torch.nn.functional.mse_loss(ddp(inputs.to(device)), targets.to(device))
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            tell(iteration=number, loss=loss.item().hex())
            if attachment is not None:
                attachment.step(                                                                                   ##
                    clip=float(torch.clamp(1.0 / (norm + 1e-6), max=1.0)), scale=scale,                            ##
                    skipped=scaler.get_scale() < scale, user={"loader": loader.state_dict()},                      ##
                )                                                                                                  ##
        tell(sha256=digest(model, optimizer))
    if attachment is not None:
        attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
