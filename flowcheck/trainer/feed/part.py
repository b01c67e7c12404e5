"""Parts of a rank whose gradients are sent: nothing of them is looked for on a wire.

    part = Sent(part)               of what several ranks hold: it is let go of
    part = Shard(module, name)      what one rank holds of a model that nobody else holds: its shards (FSDP2)

The optimizer reads whole gradients of these, whatever has reduced them. A Shard is a group of one. It is called "rank"
and its number in the job, with `name` before it: the same ranks hold the same shards after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.trainer.describe.parts import Layout, Part

__all__ = ["Sent", "Shard"]


class Sent(Part):
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

    def layout(self, names: Mapping[int, str]) -> Layout | None:
        return None


class Shard(Part):
    by = "fully_shard"

    def __init__(self, module: torch.nn.Module, name: str = "") -> None:
        rank = dist.get_rank()
        group = dist.new_group([rank], use_local_synchronization=True)  # of which no other rank has to know
        super().__init__(module, group, ".".join(filter(None, (name, f"rank{rank}"))))

    def reduced(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in self.module.named_parameters() if value.requires_grad]

    def layout(self, names: Mapping[int, str]) -> Layout | None:
        """Nothing of it is looked for on a wire."""
        return None
