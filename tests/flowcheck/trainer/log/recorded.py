"""A training of small tensors, what a trainer would have recorded of it, and the states that it had at each step."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from flowcheck.control.checksum import checksums
from flowcheck.trainer.log.base import Base, BaseHead, BasePiece, Taker
from flowcheck.trainer.log.codec import packed, record_of, record_tree, unpacked
from flowcheck.trainer.log.copies import copy_of
from flowcheck.trainer.log.record import Entry, StepRecord
from flowcheck.trainer.log.summed import summed

from .optimizers import MAKE

SHAPES = ((7, 5), (13,), (), (0,), (4, 3, 2), (33, 17))
STEPS = 50


@dataclass
class Job:
    """Parameters by name in two groups, of a seed."""

    kind: str
    dtype: torch.dtype = torch.float32
    make: Callable[[Any], torch.optim.Optimizer] | None = None
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        for at, shape in enumerate(self.shapes):
            value = torch.randn(shape, generator=generator).to(self.dtype)
            self.parameters[f"p{at}"] = torch.nn.Parameter(value)
        held = list(self.parameters.values())
        groups = [{"params": held[::2]}, {"params": held[1::2], "lr": 0.003}]
        self.optimizer = (self.make or MAKE[self.kind])(groups)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        if self.kind.startswith("muon"):
            return [shape for shape in SHAPES if len(shape) == 2]
        if self.kind.startswith("adafactor"):  # which divides by zero where there are no elements
            return [shape for shape in SHAPES if shape != (0,)]
        return [shape for shape in SHAPES if shape] if self.kind.startswith("sparse") else [*SHAPES]

    def state(self) -> dict[str, Any]:
        """All of parameters, state and options."""
        out: dict[str, Any] = dict(self.parameters)
        out |= {f"state of {name}": self.optimizer.state.get(value) for name, value in self.parameters.items()}
        return out | {"groups": [{key: value for key, value in group.items() if key != "params"}
                                 for group in self.optimizer.param_groups]}


def plain(value: Any) -> Any:
    """What is equal for equal bits of equal types alone."""
    if isinstance(value, torch.Tensor):
        held = value.detach().contiguous()
        return str(held.dtype), tuple(held.shape), held.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(one) for one in value]
    return type(value).__name__, value.hex() if isinstance(value, float) else value


class Recorded:
    """Trains `job` for STEPS iterations. entries: of all iterations from `begins` on, as are `states` and `options` by
    step."""

    def __init__(self, job: Job, seed: int, *, budget: int, base_at: int, at_once: bool = False) -> None:
        """The base begins `base_at` iterations before the end, and has `budget` bytes an iteration."""
        self.job, self._random = job, random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.entries: dict[int, Entry] = {}
        self.base: list[bytes] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.options: dict[int, str] = {}
        self._calls: list[StepRecord] = []
        optimizer = job.optimizer
        optimizer.register_step_pre_hook(self._before)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        taker = Taker(optimizer, job.parameters, budget, at_once)
        self.begins = begins = STEPS - base_at
        self.whole_at = 0
        for iteration in range(STEPS + 1):
            if iteration >= begins and (taken := taker.take(iteration)) is not None:
                self.base += [packed(part) for part in taken.parts()]
                self.whole_at = iteration
            if iteration >= begins:
                self.states[iteration] = copy.deepcopy(job.state())
                self.options[iteration] = json.dumps(record_tree(StepRecord.of(optimizer)))
            if iteration < STEPS:
                self._iterate(iteration)
                schedule.step()
        while (taken := taker.take(STEPS)) is not None:  # a small budget: the rest at the end
            self.base += [packed(part) for part in taken.parts()]
            self.whole_at = STEPS

    def _before(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        if self._iteration < self.begins:
            return
        self._calls = [carried(optimizer)]
        self._gradients = {name: copy_of(value.grad, value, name) for name, value in self.job.parameters.items()}

    def _iterate(self, iteration: int) -> None:
        """Two micro-batches, every fifth gradient of some parameter None, clipping, one step in seven left out."""
        self._iteration = iteration
        lacks = self._random.randrange(len(self.job.parameters)) if iteration % 5 == 4 else -1
        for at, one in enumerate(self.job.parameters.values()):
            one.grad = None
            for _ in range(2):
                grad = torch.randn(one.shape, generator=self._generator).to(one.dtype)
                if self.job.kind.startswith("sparse"):
                    grad = (grad * (grad.abs() > 0.7)).to_sparse(1)
                one.grad = grad if one.grad is None else one.grad + grad
            if at == lacks and iteration > 4:
                one.grad = None
        if not self.job.kind.startswith("sparse"):
            torch.nn.utils.clip_grad_norm_(self.job.parameters.values(), 3.0)
        skipped = self._random.randrange(7) == 0 and iteration > 0  # a schedule wants a step first
        self._calls, self._gradients = [], {}
        if not skipped:
            self.job.optimizer.step()
        if iteration >= self.begins:
            sums = self.sums() if iteration % 10 == 9 else {}
            self.entries[iteration] = Entry(iteration, self._calls, self._gradients, skipped, sums)

    def sums(self) -> dict[str, str]:
        """As records of a trainer have them."""
        out = checksums(summed(self.job.parameters, self.job.optimizer))
        return {name: f"{value:016x}" for name, value in out.items()}


def carried(optimizer: torch.optim.Optimizer) -> StepRecord:
    """As it is before the step, through the text of a record."""
    return record_of(json.loads(json.dumps(record_tree(StepRecord.of(optimizer)))), "record")


def options_at(said: Recorded, step: int) -> list[dict[str, Any]]:
    """Of the groups at the boundary, as a record's text has them."""
    return record_of(json.loads(said.options[step]), "options").options


def base_of(parts: list[bytes]) -> Base:
    head, *pieces = (unpacked(one, "base") for one in parts)
    assert isinstance(head, BaseHead)
    base = Base(head)
    for piece in pieces:
        assert isinstance(piece, BasePiece)
        base.add(piece)
    return base


def entries_of(said: Recorded, first: int) -> Iterator[Entry]:
    for iteration in range(first, STEPS):
        yield said.entries[iteration]


def spread(job: Job, seed: int) -> int:
    """A budget that takes between one and eight boundaries for a base."""
    total = sum(max(value.nbytes, 4) for value in job.parameters.values()) * 3
    return math.ceil(total / (1 + seed % 8))
