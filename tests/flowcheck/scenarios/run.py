"""What a script of a scenario has: a model, batches, an attachment, and the number of the iteration.

    def script(run: Run) -> None:
        ddp, optimizer, attachment = run.usual(lr=1e-3)
        for i in run.iterations():
            with attachment.iteration():
                run.backward(ddp, optimizer, i)
                if run.now(i):
                    ...                            the change
                optimizer.step()

At each boundary the rank's own state is hashed before FlowCheck hears of the boundary, by nothing of FlowCheck's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import flowcheck

__all__ = ["Conv", "Mlp", "Run", "hashes", "sha256"]

INPUTS, CLASSES, BATCH = 32, 10, 8
PACE = 0.15  # seconds that the node gets for an iteration, where it needs them
JOINING = 5.0  # that it gets to join a job that it has the manifest of
WATCHED = 2  # iterations before there can be one
ENDED = ("refused", "closed")


class Mlp(nn.Module):
    """18,506 parameters; the tensor in the middle has more than a sample of it may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(INPUTS, 64), nn.Linear(64, 240), nn.Linear(240, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(x)))


class Conv(nn.Module):
    """A batch norm: buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.head = nn.Linear(8 * INPUTS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1))


def hashes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, str], dict[str, str]]:
    """SHA-256 of each tensor of state_dict, and of each of the optimizer's state but its counter of steps. What modules
    give besides (`..._extra_state`) is each rank's own."""
    state = {f"{name}.{key}": sha256(value) for name, parameter in model.named_parameters()
             for key, value in optimizer.state.get(parameter, {}).items()
             if isinstance(value, torch.Tensor) and key != "step"}
    held = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    return {name: sha256(value) for name, value in held.items()}, state


def sha256(tensor: torch.Tensor) -> str:
    """Of its elements, row-major."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(flat.numpy())).hexdigest()


@dataclass
class Run:
    """
    start: how often the script was called before, with this run id.
    settings: of `flowcheck.attach`.
    at: the iteration of the change.
    folder: kept from one start to the next; of all ranks.
    """

    rank: int
    start: int
    count: int
    at: int
    settings: dict[str, Any]
    folder: Path
    out: TextIO
    number: int = -1
    attachments: list[Any] = field(default_factory=list)

    def model(self, kind: Callable[[], nn.Module] = Mlp) -> nn.Module:
        """The same in all ranks, and whenever it is made."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return kind()

    def ddp(self, model: nn.Module | None = None, **settings: Any) -> DistributedDataParallel:
        return DistributedDataParallel(self.model() if model is None else model, **settings)

    def usual(
        self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *, model: nn.Module | None = None,
        attach: Mapping[str, Any] | None = None, **options: Any,
    ) -> tuple[DistributedDataParallel, Any, Any]:
        """(model, optimizer, attachment) as most scripts make them. options: of the optimizer."""
        ddp = self.ddp(model)
        made = optimizer(ddp.parameters(), **{"lr": 1e-3, **options})
        return ddp, made, self.attach(ddp, made, **(attach or {}))

    def backward(self, ddp: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        """What most loops begin with. Returns the loss."""
        optimizer.zero_grad()
        loss = self.loss(ddp, i)
        loss.backward()
        return loss.detach()

    def plain(self, ddp: nn.Module, optimizer: torch.optim.Optimizer, attachment: Any, i: int) -> None:
        """A whole iteration."""
        with attachment.iteration():
            self.backward(ddp, optimizer, i)
            optimizer.step()

    def batch(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(1000 * i + self.rank)
        return torch.randn(BATCH, INPUTS, generator=made), torch.randint(CLASSES, (BATCH,), generator=made)

    def loss(self, model: nn.Module, i: int) -> torch.Tensor:
        x, y = self.batch(i)
        return functional.cross_entropy(model(x), y)

    def iterations(self, first: int = 0) -> Iterator[int]:
        """At a pace at which the node can say what it has found before the next one begins: a real model's."""
        for number in range(first, first + self.count):
            self.number = number
            yield number
            if self.attachments:
                one = self.attachments[-1]
                self._wait(PACE, lambda one=one: str(one.state) in ENDED or one.published[0] >= one.number - 1)
                if number - first == WATCHED + 1:
                    self._wait(JOINING, lambda one=one: str(one.state) in (*ENDED, "attached"))

    @staticmethod
    def _wait(seconds: float, until: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not until() and time.monotonic() < end:
            time.sleep(0.001)

    def now(self, i: int) -> bool:
        """Is it the iteration of the change?"""
        return i == self.at

    def since(self, i: int) -> bool:
        """It is, or a later one."""
        return i >= self.at

    def attach(self, ddp: Any, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
        attachment: Any = flowcheck.attach(ddp, optimizer, **{**self.settings, **settings})
        step, place = attachment.step, len(self.attachments)

        def seen(*given: Any, **named: Any) -> None:
            model, ended = ddp.module, str(attachment.state) in ENDED
            number = self.number if ended else attachment.number
            tensors, state = hashes(model, optimizer)
            step(*given, **named)
            self.out.write(json.dumps({
                "start": self.start, "iteration": number, "rank": self.rank, "tensors": tensors, "optimizer": state,
                "buffers": [name for name, _ in model.named_buffers()], "attachment": place,
                "state": str(attachment.state), "why": attachment.why, "published": attachment.published,
            }) + "\n")
            self.out.flush()

        attachment.step = seen
        self.attachments.append(attachment)
        return attachment
