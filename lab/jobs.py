"""What the lab trains: small models on real text, and every setting that changes what a replica has to reproduce.

    Training            one job: model, ranks, pipeline stages, optimizer, clipping, accumulation, loss scale, schedule
    whole_model(job)    the model, the same on every rank;  stage_of(job, stage): a pipeline stage of it
    Text(job).batch(data_rank, iteration, micro)     inputs and targets, a pure function of its arguments
    make_optimizer, make_schedule

Models are chains of named blocks, so that a pipeline stage is a part of the chain and keeps its names:
    gpt    a small language model of bytes, about 1.3 million parameters as it comes
    conv   convolutions with batch norm (buffers) over text as 16 x 16 pictures
    mlp    for fast tests
The text is the source of Python's argparse.

A pure function of the job in every process: no rank tells another what it has made. torch and the standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from flowcheck.errors import UserError
from flowcheck.job.model import LOG, REPLICA, VERSIONS
from lab.optimizers import KERNELS, OPTIMIZERS

__all__ = [
    "BACKENDS", "MODELS", "SCHEDULES", "Text", "Training", "loss_of", "make_optimizer", "make_schedule", "stage_of",
    "whole_model",
]

VOCABULARY = 256  # bytes
MODELS = {
    "gpt": {"width": 160, "layers": 4, "context": 64},
    "conv": {"width": 16, "layers": 3, "context": 256},
    "mlp": {"width": 64, "layers": 2, "context": 32},
}
SCHEDULES = ("constant", "step", "cosine", "warmup")
BACKENDS = ("softroce", "gloo")  # gloo tries the trainers without RoCE


@dataclass(frozen=True)
class Training:
    """One job. ranks: all processes; stages: of the pipeline, each a data-parallel group of ranks / stages.

    shards: more than one: torch's fully_shard over a mesh of ranks / shards replicas; reduce: the type in which it
    reduces gradients. megatron: they are those of Megatron-Core's distributed optimizer, in ranks / shards instances;
    the type of the model's parameters. Only with all ranks of the lab: its optimizer asks all of them. experts: more
    than one: the layers of rank r are those of expert r % experts, and are reduced among the ranks that have the same;
    the rest of the model is reduced among all. tied: the first and the last stage share gpt's embedding: each has a
    copy of it, whose gradients they add up.
    size: differences from MODELS. batch: per rank and micro-batch. accumulate: micro-batches per step.
    optimizer: name and torch's options; decay applies to matrices only, so AdamW has two groups. clip: largest norm
    of a stage's gradients, None: not clipped. loss_scale: first scale of torch.amp.GradScaler, None: none;
    overflow_at: iterations whose loss is made infinite, which GradScaler then skips. bucket_mb: DDP's.
    softroce: settings of that backend (softroce/settings.py). dropout: of the mlp, drawn from torch's generator. noise:
    added to what a rank reads, drawn from python's generator: as a loader that shuffles does, it makes an iteration
    depend on how many there were before. metric_every, evaluate_every: a metric of all ranks behind each K-th step, an
    evaluation between two iterations, which is several calls; on a communicator of their own, or with `shared` on that
    of the gradients. kind: of its versions, as of attach; what is no kernel's is kept as a log.
    """

    model: str = "gpt"
    size: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 4
    stages: int = 1
    batch: int = 4
    accumulate: int = 1
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "adamw", "lr": 3e-4})
    clip: float | None = None
    loss_scale: float | None = None
    overflow_at: tuple[int, ...] = ()
    schedule: str = "constant"
    bucket_mb: float = 1.0
    softroce: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    dropout: float = 0.0
    noise: bool = False
    metric_every: int = 0
    evaluate_every: int = 0
    shared: bool = False
    shards: int = 1
    reduce: str = "float32"
    megatron: str = ""
    experts: int = 1
    tied: bool = False
    kind: str = REPLICA

    def __post_init__(self) -> None:
        for name, choices in (("model", MODELS), ("schedule", SCHEDULES), ("kind", VERSIONS)):
            if getattr(self, name) not in choices:
                self._refuse(name, f"{getattr(self, name)!r} is none of {', '.join(choices)}")
        if self.optimizer.get("name") not in OPTIMIZERS or "lr" not in self.optimizer:
            self._refuse("optimizer", f"needs lr and a name of {', '.join(OPTIMIZERS)}")
        for name, value, least in (
            ("optimizer", self.optimizer["lr"], 0.0), ("clip", self.clip, 0.0),
            ("loss_scale", self.loss_scale, 2.0**-126), ("bucket_mb", self.bucket_mb, 1e-6),
        ):
            if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
                self._refuse(name, f"{value!r} is not a finite number of at least {least:g}")
        if not 0 <= self.seed < 1 << 63:
            self._refuse("seed", f"{self.seed} is not between 0 and 2^63 - 1")
        if unknown := sorted(set(self.size) - MODELS[self.model].keys()):
            self._refuse("size", f"{unknown[0]!r} is none of {', '.join(MODELS[self.model])}")
        for name in ("ranks", "stages", "batch", "accumulate", "shards", "experts"):
            if getattr(self, name) < 1:
                self._refuse(name, "must be at least 1")
        if self.ranks % self.stages or self.ranks // self.stages < 2:
            self._refuse("stages", f"{self.ranks} ranks do not make {self.stages} groups of two or more")
        if sum(number > 1 for number in (self.stages, self.shards, self.experts)) > 1:
            self._refuse("shards", "one of stages, shards and experts at a time")
        for name, number in (("shards", self.shards), ("experts", self.experts)):
            if number > 1 and (self.ranks % number or self.ranks // number < 2):
                self._refuse(name, f"{self.ranks} ranks do not make {number} groups of two or more")
            if number > 1 and (self.loss_scale is not None or self.beside or self.shared):
                self._refuse(name, "has no loss scale and no metrics here")
        plain = self.clip is None and self.loss_scale is None
        if self.tied and not (self.stages > 1 and self.model == "gpt" and plain):
            self._refuse("tied", "is of the stages of a gpt, without clipping and loss scale")
        if self.reduce not in ("float32", "bfloat16") or (self.reduce != "float32" and self.shards < 2):
            self._refuse("reduce", f"{self.reduce!r}: float32, or bfloat16 with shards")
        if self.megatron and not (
            self.megatron in ("float32", "bfloat16") and self.shards > 1 and self.model == "gpt"
            and self.optimizer["name"] != "sgd"
        ):
            self._refuse("megatron", "float32 or bfloat16, of a gpt in shards that Adam or AdamW steps")
        if self.kind != LOG and self.optimizer["name"] not in KERNELS:
            self._refuse("optimizer", f"{self.optimizer['name']} is kept as a log: kind")
        if self.kind == LOG and (self.stages > 1 or (self.shards > 1 and not self.megatron) or self.experts > 1):
            self._refuse("kind", "a log is of one group without shards, or of Megatron-Core's")
        if self.experts > 1 and (self.clip is not None or self.model == "conv"):
            self._refuse("experts", "without clipping (a norm of each rank's own), and not of conv")
        if self.stages > len(_blocks(self)):
            self._refuse("stages", f"the model has only {len(_blocks(self))} blocks")
        if self.overflow_at and self.loss_scale is None:
            self._refuse("overflow_at", "only a loss scale skips steps")

    def _refuse(self, name: str, what: str) -> None:
        raise UserError(what, where=f"lab job, {name}", remedy="docs/use/lab.md lists the settings")

    @property
    def beside(self) -> bool:
        """Does it call what is no gradient, on a communicator of its own?"""
        return bool(self.metric_every or self.evaluate_every) and not self.shared

    @property
    def data_ranks(self) -> int:
        """Ranks of one stage."""
        return self.ranks // self.stages

    def extent(self, name: str) -> int:
        return self.size.get(name, MODELS[self.model][name])

    @property
    def names(self) -> list[str]:
        """Under which the node knows the job's groups."""
        if self.stages > 1:
            embeddings = [f"embedding{place}" for place in range(self.data_ranks)] if self.tied else []
            return [*(f"stage{stage}" for stage in range(self.stages)), *embeddings]
        if self.shards > 1:
            return [f"shard{shard}" for shard in range(self.shards)]
        return ["dense", *(f"expert{expert}" for expert in range(self.experts))] if self.experts > 1 else [""]

    def group(self, number: int) -> list[int]:
        """Ranks of a data-parallel group: a stage, a shard, an expert, or all that is no expert; or of an embedding."""
        if self.shards > 1:
            return list(range(number, self.ranks, self.shards))
        if self.experts > 1:
            return list(range(number - 1, self.ranks, self.experts)) if number else list(range(self.ranks))
        if number >= self.stages:  # an embedding's
            return [number - self.stages, number - self.stages + (self.stages - 1) * self.data_ranks]
        return list(range(number * self.data_ranks, (number + 1) * self.data_ranks))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {entry.name for entry in dataclasses.fields(cls)}
        if unknown := sorted(data.keys() - known):
            raise UserError(f"unknown field {unknown[0]}", where="lab job", remedy="docs/use/lab.md lists the settings")
        return cls(**{**data, "overflow_at": tuple(data.get("overflow_at", ()))})


# -- models -----------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Bytes and their places."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.token(x) + self.place[: x.shape[1]]


class Block(nn.Module):
    """One layer of a transformer: causal attention and a feed-forward part, each after a norm, each added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.attend(self.before(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.between(x))))


class Picture(nn.Module):
    """Bytes as a square picture with one channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(x.shape[1])
        return (x.float() / 128 - 1).view(x.shape[0], 1, side, side)


class Numbers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 128 - 1


def _blocks(job: Training) -> list[str]:
    """Names of the chain; the first and the last block belong to the first and the last stage."""
    return ["first", *(f"layer{index}" for index in range(job.extent("layers"))), "last"]


def _make(job: Training, name: str) -> nn.Module:
    width, layers, context = (job.extent(key) for key in ("width", "layers", "context"))
    index = int(name.removeprefix("layer")) if name.startswith("layer") else 0
    if job.model == "gpt":
        if name == "first":
            return Embedding(width, context)
        return Block(width) if name != "last" else nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
    if job.model == "conv":
        if name == "first":
            return Picture()
        if name == "last":
            side = math.isqrt(context) >> layers
            return nn.Sequential(nn.Flatten(), nn.Linear((width << layers - 1) * side * side, VOCABULARY))
        into, out = (1 if index == 0 else width << index - 1), width << index
        return nn.Sequential(nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
                             nn.MaxPool2d(2))
    if name == "first":
        return Numbers()
    if name == "last":
        return nn.Linear(width, VOCABULARY)
    layer = [nn.Linear(context if index == 0 else width, width), nn.Tanh()]
    return nn.Sequential(*layer, nn.Dropout(job.dropout)) if job.dropout else nn.Sequential(*layer)


def whole_model(job: Training, other: int = 0) -> nn.Sequential:
    """All blocks with the job's first weights, the same in every process; other: a number of other weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed + 1000 * other)
        model = nn.Sequential(OrderedDict((name, _make(job, name)) for name in _blocks(job)))
    if job.tied:
        model.get_parameter("last.1.weight").data.copy_(model.get_parameter("first.token.weight").data)
    return model


def stage_of(job: Training, stage: int) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A stage's part of the chain, and the shape of what the stage before sends it (() for the first).

    Blocks without parameters count as little as any other, so each stage has some of the model's weights.
    """
    model = whole_model(job)
    named = list(model.named_children())
    cuts = [round(index * len(named) / job.stages) for index in range(job.stages + 1)]
    shape: tuple[int, ...] = ()
    if stage:
        model.eval()  # the shape is asked for; running means stay as they are
        with torch.no_grad():
            values = Text(job).batch(0, 0, 0)[0]
            for _, block in named[: cuts[stage]]:
                values = block(values)
        model.train()
        shape = tuple(values.shape)
    return nn.Sequential(OrderedDict(named[cuts[stage] : cuts[stage + 1]])), shape


# -- text -------------------------------------------------------------------------------------------------


def _corpus() -> bytes:
    """Nobody edits it while a job runs: a rank that is started again reads what the others have trained on."""
    return Path(argparse.__file__).read_bytes()


class Text:
    """Windows of a text, the source of Python's argparse. Which one depends on seed, data rank, iteration and
    micro-batch alone."""

    def __init__(self, job: Training) -> None:
        self._job = job
        self._bytes = torch.frombuffer(bytearray(_corpus()), dtype=torch.uint8).long()

    def batch(self, data_rank: int, iteration: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets): for gpt the next byte everywhere, otherwise the one after the window."""
        job, context = self._job, self._job.extent("context")
        label = f"{job.seed} {data_rank} {iteration} {micro}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(label).digest()[:7], "big"))
        starts = torch.randint(len(self._bytes) - context - 1, (job.batch,), generator=generator)
        rows = torch.stack([self._bytes[start : start + context + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:] if job.model == "gpt" else rows[:, -1]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))


# -- optimizer and schedule -------------------------------------------------------------------------------


def make_optimizer(job: Training, model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not: two groups where there is a decay, as people do it."""
    options = {key: value for key, value in job.optimizer.items() if key != "name"}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    kind: Any = OPTIMIZERS[job.optimizer["name"]]
    parameters = list(model.parameters())
    if job.optimizer["name"] != "adamw" and not options.get("weight_decay"):
        return kind(parameters, **options)
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return kind([group for group in groups if group["params"]], **options)


def make_schedule(job: Training, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    """None: constant. Lengths are short, so that a short run sees them."""
    if job.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    if job.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    if job.schedule == "warmup":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    return None
