"""Parts of a rank whose gradients are sent: nothing of them is looked for on a wire.

    part = sent_part(model, name, optimizer, log)       a Shard or a Stepped; None: a part of any other kind serves
    part = Sent(part)               of what several ranks hold: it is let go of
    part = Shard(module, name)      what one rank holds of a model that nobody else holds: its shards (FSDP2)
                                    (a list of modules: the chunks of a pipeline, by the names 0, 1, ...)
    part = Stepped(model, ...)      what one rank steps of a model of Megatron-Core's: pieces of parameters, or all

The optimizer reads whole gradients of these, whatever has reduced them. What nobody else holds is a group of one. It is
called "rank" and its number in the job, with `name` before it: the same ranks hold the same shards after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.trainer.describe.hsdp import has_replicas, is_sharded
from flowcheck.trainer.describe.megatron import place_of
from flowcheck.trainer.describe.megatron_pieces import is_megatron, pieces_of
from flowcheck.trainer.describe.parts import Layout, Part, chunks_of

__all__ = ["Sent", "Shard", "Stepped", "sent_part"]


class _OffWire(Part):
    def layout(self, names: Mapping[int, str]) -> Layout | None:
        """Nothing of it is looked for there."""
        return None


class Sent(_OffWire):
    """Entries and group are those of another part."""

    def __init__(self, part: Part) -> None:
        part.close()
        super().__init__(part.module, part.group, part.name)
        self._part, self.by, self.others = part, part.by, part.others

    def _entries(self) -> dict[str, torch.Tensor]:
        return self._part._entries()

    def extra(self) -> dict[str, Any]:
        return self._part.extra()

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return self._part.reduced()


class Shard(_OffWire):
    by = "fully_shard"

    def __init__(self, module: torch.nn.Module, name: str = "") -> None:
        super().__init__(module, *_alone(name))

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in self.module.named_parameters() if value.requires_grad]


class Stepped(_OffWire):
    """Of one instance of its distributed optimizer each rank has its own, and with experts or several chunks; else a
    group is as on a wire. model: one chunk, or a list of them."""

    by = "Megatron-Core's DistributedDataParallel"

    def __init__(self, model: Any, optimizer: Any, name: str = "", log: bool = False) -> None:
        self._pieces = pieces = pieces_of(model, optimizer, log)
        group, name = _alone(name) if pieces.alone else (
            pieces.group, name or place_of(pieces.models[0], pieces.ranks))
        super().__init__(pieces.module, group, name)

    def _entries(self) -> dict[str, torch.Tensor]:
        return self._pieces.entries()

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._pieces.named().items())


def sent_part(model: object, name: str, optimizer: Any, log: bool) -> Part | None:
    """log: what steps inside Megatron-Core's optimizer need not be torch's. Raises UserError, naming what cannot be
    followed."""
    if is_megatron(model):
        return Stepped(model, optimizer, name, log)
    chunks = model if isinstance(model, list) else [model]
    if chunks and all(isinstance(one, torch.nn.Module) and is_sharded(one) and not has_replicas(one) for one in chunks):
        return Shard(chunks_of(model), name)
    return None


def _alone(name: str) -> tuple[Any, str]:
    """A group of this rank, of which no other has to know, and what it is called."""
    rank = dist.get_rank()
    return dist.new_group([rank], use_local_synchronization=True), ".".join(filter(None, (name, f"rank{rank}")))
