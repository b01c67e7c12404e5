"""What every rank of the lab runs: torch's own DDP or fully_shard (wrapping.py), optimizer, clipping and GradScaler.

    python -P -m lab.trainer --rank R --ranks N --backend softroce --out DIR     (starter.py forks it)

    stdin     one JSON object per line, below; its end ends the rank
    stdout    {"event": "ready"}, after every step {"event": "iteration", ...}, {"event": "done"}: nothing in flight;
              at the end of a job {"event": "communicator", ...}: connections and calls as a job manifest has them
    DIR/rankR.jsonl    per iteration the SHA-256 of every tensor of this rank's own state: what the replica must equal

    {"begin": {"number": K, "job": {...}, "softroce": {...}, "attach": {...} or null}}    a job, with new communicators;
                                with "recover": {...}, arguments of flowcheck.recover, it goes on from what nodes have
    {"iterations": N}           so many steps of it; with "die": {"rank": R, "iteration": I, "at": one of INSTANTS}
                                that rank kills itself there
    {"end": true}               let the node and the communicators go

A job may have fewer ranks than the lab: the rest is idle. "iteration" counts from the beginning of the job. No
collective but DDP's own and the pipeline's send and recv is ever issued; ranks are brought together by run.py, which
gives the next order when all have done the last.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist
from torch import nn

import flowcheck
from flowcheck.job.model import LOG
from lab.jobs import BACKENDS, VOCABULARY, Text, Training, loss_of, make_optimizer, make_schedule
from lab.saving import SAVERS, Saver
from lab.wrapping import make_groups, wrap

__all__ = ["INSTANTS", "Groups", "Rank", "Worker", "main"]

INSTANTS = ("forward", "backward", "allreduce", "optimizer", "boundary")  # of an iteration, in order
PORT = 29500
SETTINGS = "FLOWCHECK_SOFTROCE"


@dataclass(frozen=True)
class Groups:
    """Process groups of a job: every rank of the lab makes all of them, in the same order, and is in some."""

    data: tuple[list[Any], list[Any]]  # wrapping.make_groups
    pipes: list[Any]  # between neighbouring stages, per place: communicators of their own, as Megatron's have
    beside: list[Any]  # of each stage, for what is no gradient

    @classmethod
    def make(cls, job: Training) -> Self:
        data = make_groups(job)
        pairs = [(job.group(stage)[i], job.group(stage + 1)[i])
                 for stage in range(job.stages - 1) for i in range(job.data_ranks)]
        beside = [dist.new_group(job.group(stage)) for stage in range(job.stages)] if job.beside else []
        return cls(data, [dist.new_group(list(pair)) for pair in pairs], beside)

    def destroy(self) -> None:
        for group in [*self.data[0], *self.data[1], *self.pipes, *self.beside]:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


class Rank:
    """One rank's part of one job: its model in torch's wrappers (a pipeline stage in DDP, most of all), its optimizer,
    schedule and scaler."""

    def __init__(self, job: Training, rank: int, number: int, groups: Groups, out: TextIO) -> None:
        self.job, self.rank, self._number, self._groups, self._out = job, rank, number, groups, out
        self.stage, self.data_rank = divmod(rank, job.data_ranks)
        self._wrapped = wrap(job, rank, groups.data)
        self.model, self._shape = self._wrapped.model, self._wrapped.shape
        if self._wrapped.optimizer is not None:
            self.optimizer, stepping = self._wrapped.optimizer
        else:
            self.optimizer = stepping = make_optimizer(job, self.model)
        self.schedule = make_schedule(job, stepping)
        self.scaler = None
        if job.loss_scale is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=job.loss_scale, growth_interval=4)
            self.scaler.scale(torch.zeros(()))  # it is made by the first loss, and only the last stage has losses
        self._text = Text(job)
        self._iteration = 0
        self._seen = 0  # samples; with the generators, all that this rank has beside model and optimizer
        torch.manual_seed(job.seed * 1000 + rank)
        random.seed(job.seed * 1000 + rank)
        self._group = self._wrapped.group
        self._wire: Any = sys.modules.get("lab.softroce")
        self._attachment: Any = None
        self._saver: Saver | None = None
        self._death = -1, ""

    @property
    def name(self) -> str:
        """Of this rank's first group."""
        return self.job.names[self._wrapped.views[0].number]

    def attach(self, settings: dict[str, Any]) -> None:
        self._attachment = flowcheck.attach(
            self._wrapped.given, self.optimizer, scheduler=self.schedule, scaler=self.scaler, kind=self.job.kind,
            **settings
        )

    def save(self, how: str, every: int, folder: str) -> None:
        """The first rank of each stage writes checkpoints itself."""
        if self.data_rank == 0:
            self._saver = SAVERS[how](Path(folder) / f"stage{self.stage}", every)

    def recover(self, settings: dict[str, Any]) -> flowcheck.Recovered:
        """Go on from what the nodes have.

        A backward before that, whose gradients are thrown away: DDP puts its buckets in another order after the first
        one, and in a ring of more than two ranks the place of an element decides in which order it is summed up.
        """
        with self._wrapped.within():
            self._micro(0)
            self.optimizer.zero_grad(set_to_none=True)
        recovered = flowcheck.recover(**settings)
        if recovered:
            if self.job.shards > 1:
                with self._wrapped.within():
                    recovered.load(self._wrapped.given, self.optimizer)
            elif self.job.kind == LOG:
                recovered.load(self.model, self.optimizer)
            else:
                self.model.load_state_dict(recovered.model)
                self.optimizer.load_state_dict(recovered.optimizer)
            if self.schedule is not None:
                self.schedule.load_state_dict(recovered.scheduler)
            if self.scaler is not None:
                self.scaler.load_state_dict(recovered.scaler)
            self._seen = recovered.user["seen"]
            recovered.restore_rng()
        self._iteration = recovered.step
        say({"event": "recovered", "rank": self.rank, "step": recovered.step, "source": recovered.source,
             "passed": recovered.passed, "text": repr(recovered)})
        return recovered

    def die_at(self, iteration: int, at: str) -> None:
        """Let this process be killed at an instant of an iteration, as a fault would."""
        self._death = iteration, at
        parameters = list(self.model.parameters())
        for instant, parameter in (("backward", parameters[-1]), ("allreduce", parameters[0])):
            # The last layer's gradient is the first that is there; when the first layer's is, others are on the wire.
            # Of shards gradients come from fully_shard, with each AllReduce, and no backward of theirs.
            add = parameter.register_hook if self.job.shards == 1 else parameter.register_post_accumulate_grad_hook
            add(lambda _, instant=instant: self._reached(instant))

    def _reached(self, instant: str) -> None:
        if self._death == (self._iteration, instant):
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None
        if self._saver is not None:
            self._saver.close()
        if self._wire is not None:  # for those who want to know what each packet was
            calls, described = self._wire.calls(self._group), self._wire.describe(self._group)
            say({"event": "communicator", "rank": self.rank, "stage": self.stage, "calls": calls, **described})

    # -- one step -------------------------------------------------------------------------------------------

    def step(self) -> None:
        with self._wrapped.within():
            self._step()

    def _step(self) -> None:
        begin = time.perf_counter()
        self._wrapped.begin()
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro in range(self.job.accumulate):
            last = micro == self.job.accumulate - 1
            with self._wrapped.reduces(last):
                loss += self._micro(micro) / self.job.accumulate
        self._wrapped.finish()
        scale = self.scaler.get_scale() if self.scaler is not None else None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        coefficient = self._clip()
        if self._saver is not None:
            self._saver.before_update()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self._reached("optimizer")  # also where the scaler has skipped it
        # GradScaler says that it skipped by making its scale smaller. The norm of such gradients is no number.
        skipped = self.scaler is not None and self.scaler.get_scale() < (scale or 0.0)
        if skipped and coefficient is not None:
            coefficient = 1.0
        if self.schedule is not None:
            self.schedule.step()
        self._seen += self.job.batch * self.job.accumulate
        self._measure(self.job.metric_every, 1)
        if self._attachment is not None:
            self._attachment.step(clip=coefficient, scale=scale, skipped=skipped, user={"seen": self._seen})
        if self._saver is not None:
            self._saver.after_step(self._iteration, self.model, self.optimizer)
        self._reached("boundary")
        seconds = time.perf_counter() - begin
        line = {
            "job": self._number, "iteration": self._iteration, "rank": self.rank, "stage": self.stage,
            "seconds": seconds, "loss": loss, "skipped": skipped, "clip": coefficient, "scale": scale,
            "calls": len(self._wire.calls(self._group)) if self._wire is not None else 0,
            "buffers": [name for name, _ in self.model.named_buffers()],
        }
        for view in self._wrapped.views:
            mine = {"stage": view.number, "buffers": view.buffers, **view.hashes(self.optimizer)}
            self._out.write(json.dumps({**line, **mine}) + "\n")
        self._out.flush()
        say({"event": "iteration", **line})
        self._measure(self.job.evaluate_every, 3)
        self._iteration += 1

    def _measure(self, every: int, times: int) -> None:
        """A number of all ranks, as a metric or an evaluation has it, behind each `every`-th step."""
        if every and (self._iteration + 1) % every == 0:
            group = self._groups.beside[self.stage] if self._groups.beside else self._group
            for part in range(times):
                dist.all_reduce(torch.full((part + 1,), float(self._iteration)), group=group)

    def _micro(self, micro: int) -> float:
        """Forward and backward of one micro-batch through this stage; the loss where it is known, else 0."""
        job = self.job
        inputs, targets = self._text.batch(self.data_rank, self._iteration, micro)
        if job.noise:
            inputs = (inputs + random.randrange(VOCABULARY) + self._seen) % VOCABULARY
        if self.stage:
            inputs = torch.empty(self._shape)
            dist.recv(inputs, self.rank - job.data_ranks, group=self._pipe(self.stage - 1))
            inputs.requires_grad_()
        output = self._wrapped.call(inputs)
        self._reached("forward")
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
            if self._iteration in job.overflow_at:
                scaled = scaled * torch.inf
            (scaled / job.accumulate).backward()
        if self.stage:
            assert inputs.grad is not None
            dist.send(inputs.grad.contiguous(), self.rank - job.data_ranks, group=self._pipe(self.stage - 1))
        return value

    def _pipe(self, stage: int) -> Any:
        """Between a stage and the next, at this rank's place."""
        return self._groups.pipes[stage * self.job.data_ranks + self.data_rank]

    def _clip(self) -> float | None:
        """Clip as torch does; what it multiplied by, in the precision it used."""
        if self.job.clip is None or self.job.megatron:  # whose optimizer clips itself
            return None
        if self.job.shards > 1 and self._attachment is not None:  # who knows what the norm of shards is
            self._attachment.clip_grad_norm_(self.model.parameters(), self.job.clip)
            return None
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)
        return float(torch.clamp(self.job.clip / (norm + 1e-6), max=1.0))


class Worker:
    """The process: jobs one after the other."""

    def __init__(self, rank: int, out: TextIO) -> None:
        self._rank, self._out = rank, out
        self._place = json.loads(os.environ[SETTINGS])  # interface and address; the rest is the job's
        self._groups: Groups | None = None
        self._member: Rank | None = None

    def obey(self, order: dict[str, Any]) -> None:
        if "begin" in order:
            self._begin(**order["begin"])
        die = order.get("die")
        if die is not None and die["rank"] == self._rank and self._member is not None:
            self._member.die_at(die["iteration"], die["at"])
        for _ in range(order.get("iterations", 0)):
            if self._member is not None:
                self._member.step()
        if order.get("end"):
            self.end()
        say({"event": "done", "rank": self._rank})

    def _begin(
        self, number: int, job: dict[str, Any], softroce: dict[str, Any], attach: dict[str, Any] | None,
        recover: dict[str, Any] | None = None, saving: tuple[str, int, str] | None = None,
    ) -> None:
        self.end()
        training = Training.from_dict(job)
        os.environ[SETTINGS] = json.dumps(self._place | softroce)
        self._groups = Groups.make(training)
        if self._rank < training.ranks:
            self._member = Rank(training, self._rank, number, self._groups, self._out)
            since: dict[str, Any] = {}
            if recover is not None:
                shard = {"shard": self._member.name} if len(training.names) > 1 else {}
                recovered = self._member.recover(recover | shard)
                since = {"epoch": recovered.epoch, "iteration": recovered.step}
            if attach is not None:
                self._member.attach(attach[str(self._member.stage)] | since)
            if saving is not None:
                self._member.save(*saving)

    def end(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None
        if self._groups is not None:
            self._groups.destroy()
            self._groups = None


def say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One rank of a lab run; run.py starts it.")
    for name in ("--rank", "--ranks"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--master", default="10.78.0.10")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # run.py asks a silent rank where it stands
    if options.backend == "softroce":
        importlib.import_module("lab.softroce")  # registers itself with torch.distributed
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "ctl0")  # between the shards of a replica
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "fab0")
    dist.init_process_group(options.backend, init_method=f"tcp://{options.master}:{PORT}", rank=options.rank,
                            world_size=options.ranks)
    with (options.out / f"rank{options.rank}.jsonl").open("w") as out:
        worker = Worker(options.rank, out)
        say({"event": "ready", "rank": options.rank})
        try:
            for line in sys.stdin:
                worker.obey(json.loads(line))
        finally:
            worker.end()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
