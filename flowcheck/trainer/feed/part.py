"""What one rank holds of a model that nobody else holds: its shards (FSDP2, and tensor parallelism with it).

    part = Shard(module, name)

Its optimizer reads whole gradients of these, whatever has reduced them, so each rank of the job is a part of its own,
of a group of one. It is called "rank" and the rank's number in the job, with `name` before it: the same ranks hold the
same shards after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from flowcheck.trainer.describe.parts import Layout, Part

__all__ = ["Shard"]


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
