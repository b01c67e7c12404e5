"""What every rank of the lab runs: torch's own DistributedDataParallel, optimizer, clipping and GradScaler, unmodified.

    python -P -m flowcheck.lab.trainer --job job.json --rank R --out DIR     (started by run.py in the rank's namespace)

    stdin     one JSON object per line: {"iterations": N, "attach": {...} or null, "fresh": bool}; its end ends the rank
    stdout    {"event": "ready"}, after every step {"event": "iteration", ...}, {"event": "segment"}: nothing in flight
    DIR/rankR.jsonl    per iteration the SHA-256 of every tensor of this rank's own state: what the replica must equal

A segment is N iterations; `fresh` begins it with a new communicator and a new DDP, to which a node can attach
("iteration" counts from there). No collective but DDP's own and the pipeline's send and recv is ever issued; ranks
are brought together by run.py, which sends the next segment when all have finished the last.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowcheck
from flowcheck.checkpoint import tensor_sha256
from flowcheck.lab.jobs import Text, Training, loss_of, make_optimizer, make_schedule, stage_of

__all__ = ["Rank", "hashes", "main"]

PORT = 29500


def hashes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
    """SHA-256 of every state_dict entry and of every tensor of the optimizer's state ("NAME.exp_avg") but its counter
    of steps, which is a number."""
    state: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[f"{name}.{key}"] = tensor_sha256(value)
    return {"tensors": {name: tensor_sha256(value) for name, value in model.state_dict().items()}, "optimizer": state}


class Rank:
    """One rank's state over all segments: model, optimizer, schedule, scaler, and the DDP of the current segment."""

    def __init__(self, job: Training, rank: int, out: TextIO) -> None:
        self.job, self.rank, self._out = job, rank, out
        self.stage, self.data_rank = divmod(rank, job.data_ranks)
        self.model, self._shape = stage_of(job, self.stage)
        self.model.train()
        self.optimizer = make_optimizer(job, self.model)
        self.schedule = make_schedule(job, self.optimizer)
        self.scaler = None
        if job.loss_scale is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=job.loss_scale, growth_interval=4)
            self.scaler.scale(torch.zeros(()))  # it is made by the first loss, and only the last stage has losses
        self._text = Text(job)
        self._steps = self._iteration = 0  # since the start; since DDP was made
        self._segment = -1
        self._ddp: DistributedDataParallel | None = None
        self._group: Any = None
        self._attachment: Any = None
        # Pipes between neighbouring stages have communicators of their own, as Megatron's have.
        self._pipes = [
            dist.new_group([job.group(stage)[i], job.group(stage + 1)[i]])
            for stage in range(job.stages - 1) for i in range(job.data_ranks)
        ]  # fmt: skip

    def segment(self, order: dict[str, Any]) -> None:
        if order.get("fresh") or self._ddp is None:
            self._begin(order.get("attach"))
        for _ in range(order["iterations"]):
            self._step()
        if order.get("last"):
            self._end()
        say({"event": "segment", "rank": self.rank})

    def _begin(self, attach: dict[str, Any] | None) -> None:
        self._end()
        groups = [dist.new_group(self.job.group(stage)) for stage in range(self.job.stages)]
        self._group = groups[self.stage]
        self._iteration, self._segment = 0, self._segment + 1
        self._ddp = DistributedDataParallel(self.model, process_group=self._group, bucket_cap_mb=self.job.bucket_mb)
        if attach is not None:
            self._attachment = flowcheck.attach(self._ddp, self.optimizer, **attach[str(self.stage)])

    def _end(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
        self._ddp = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    # -- one step -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro in range(self.job.accumulate):
            with self._synchronised(micro == self.job.accumulate - 1):
                loss += self._micro(micro) / self.job.accumulate
        scale = self.scaler.get_scale() if self.scaler is not None else None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        coefficient = self._clip()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        # GradScaler says that it skipped by making its scale smaller. The norm of such gradients is no number.
        skipped = self.scaler is not None and self.scaler.get_scale() < (scale or 0.0)
        if skipped and coefficient is not None:
            coefficient = 1.0
        if self._attachment is not None:
            self._attachment.step(clip=coefficient, scale=scale, skipped=skipped)
        if self.schedule is not None:
            self.schedule.step()
        seconds = time.perf_counter() - begin
        line = {
            "segment": self._segment, "iteration": self._iteration, "step": self._steps, "rank": self.rank,
            "stage": self.stage, "seconds": seconds, "loss": loss, "skipped": skipped, "clip": coefficient,
            "scale": scale, "buffers": [name for name, _ in self.model.named_buffers()],
        }  # fmt: skip
        self._out.write(json.dumps({**line, **hashes(self.model, self.optimizer)}) + "\n")
        self._out.flush()
        say({"event": "iteration", **line})
        self._iteration += 1
        self._steps += 1

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        assert self._ddp is not None
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield

    def _micro(self, micro: int) -> float:
        """Forward and backward of one micro-batch through this stage; the loss where it is known, else 0."""
        assert self._ddp is not None
        job = self.job
        inputs, targets = self._text.batch(self.data_rank, self._steps, micro)
        if self.stage:
            inputs = torch.empty(self._shape)
            dist.recv(inputs, self.rank - job.data_ranks, group=self._pipe(self.stage - 1))
            inputs.requires_grad_()
        output = self._ddp(inputs)
        if self.stage < job.stages - 1:
            dist.send(output.detach().contiguous(), self.rank + job.data_ranks, group=self._pipe(self.stage))
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + job.data_ranks, group=self._pipe(self.stage))
            output.backward(gradient)
            value = 0.0
        else:
            loss = loss_of(output, targets)
            value = loss.item()
            scaled = self.scaler.scale(loss) if self.scaler is not None else loss
            if self._steps in job.overflow_at:
                scaled = scaled * torch.inf
            (scaled / job.accumulate).backward()
        if self.stage:
            assert inputs.grad is not None
            dist.send(inputs.grad.contiguous(), self.rank - job.data_ranks, group=self._pipe(self.stage - 1))
        return value

    def _pipe(self, stage: int) -> Any:
        """Between a stage and the next, at this rank's place."""
        return self._pipes[stage * self.job.data_ranks + self.data_rank]

    def _clip(self) -> float | None:
        """Clip as torch does; what it multiplied by, in the precision it used."""
        if self.job.clip is None:
            return None
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)
        return float(torch.clamp(self.job.clip / (norm + 1e-6), max=1.0))

    def close(self) -> None:
        self._end()


def say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of a lab run; run.py starts it.")
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--master", default="10.78.0.10")
    options = parser.parse_args()
    job = Training.from_dict(json.loads(options.job.read_text()))
    torch.set_num_threads(1)
    if job.backend == "softroce":
        importlib.import_module("flowcheck.lab.softroce")  # registers itself with torch.distributed
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "fab0")
    dist.init_process_group(job.backend, init_method=f"tcp://{options.master}:{PORT}", rank=options.rank,
                            world_size=job.ranks)  # fmt: skip
    with (options.out / f"rank{options.rank}.jsonl").open("w") as out:
        rank = Rank(job, options.rank, out)
        say({"event": "ready", "rank": options.rank, "parameters": sum(p.numel() for p in rank.model.parameters())})
        try:
            for line in sys.stdin:
                rank.segment(json.loads(line))
        finally:
            rank.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
