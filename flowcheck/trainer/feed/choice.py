"""Where the gradients of a job come from: what a script says, or what there is.

    parts, source = choose_source(model, optimizer, kind, asked, topology, collectives, say)

AUTO: from a mirror, where it can be read of this model and its process groups; else they are sent. Each rank of a group
finds the same: it depends on model, optimizer, backend and settings alone. Whether a switch mirrors anything nobody
here can know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from flowcheck.errors import UserError
from flowcheck.job.model import FEED, LOG, MIRROR
from flowcheck.trainer.describe.megatron import Megatron
from flowcheck.trainer.describe.optimizers import optimizer_of
from flowcheck.trainer.describe.parts import Ddp, Part
from flowcheck.trainer.describe.wrapped import parts_of
from flowcheck.trainer.feed.part import Sent, sent_part
from flowcheck.trainer.nccl.sources import sources_of
from flowcheck.trainer.settings import given_for

__all__ = ["AUTO", "choose_source"]

AUTO = "auto"


def choose_source(
    model: Any, optimizer: Any, kind: str, asked: str, topology: Any, collectives: Any, say: Callable[[str], None]
) -> tuple[list[Part], str]:
    """asked: MIRROR, FEED or AUTO; the others: as given to `attach`. say: a line of the log. Raises UserError, naming
    what cannot be followed."""
    if asked != FEED:
        parts: list[Part] = []
        try:
            parts = parts_of(model, optimizer, kind)
            _check_optimizer(optimizer)
            if kind == LOG:
                _check_log(parts, Ddp | Megatron)
            if asked == AUTO:
                _check(parts, topology, collectives)
            return parts, MIRROR
        except UserError as error:
            for part in parts:
                part.close()
            if asked == MIRROR:
                raise
            if dist.get_rank() == 0:  # one line of a job
                say(f'gradients are sent (source="feed"), because no mirror can be read: {error.where}: {error.what}')
    parts = [Sent(part) for part in parts_of(model, optimizer, kind, sent_part)]
    _check_optimizer(optimizer)
    if kind == LOG:
        _check_log(parts, Part)
    return parts, FEED


def _check_optimizer(optimizer: Any) -> None:
    """Raises UserError: it is neither one nor several."""
    if not hasattr(optimizer_of(optimizer), "param_groups"):
        raise UserError(f"a {type(optimizer).__name__} is given, and an optimizer is wanted", where="optimizer",
                        remedy="an optimizer, or a list or dict of optimizers alone")


def _check_log(parts: Sequence[Part], kinds: Any) -> None:
    """kinds: of which a log is kept. Raises UserError."""
    remedy = 'kind="replica", with an optimizer that has a kernel'
    if len(parts) > 1:
        raise UserError(f"a log is kept of a job of one part, and this rank has {len(parts)}", where="attach: kind",
                        remedy=remedy)
    if not isinstance(parts[0], kinds):
        raise UserError("a log is kept of DistributedDataParallel, torch's or Megatron-Core's, and not of"
                        f" {parts[0].by}", where="attach: kind", remedy=remedy)


def _check(parts: Sequence[Part], topology: Any, collectives: Any) -> None:
    """Raises UserError: nobody says what is on the wire."""
    for part in parts:
        if dist.get_world_size(part.group) < 2:
            raise UserError("a job of one rank sends no gradients", where="attach", remedy='source="feed"')
        sources_of(part.group, given_for(part.name, topology, len(parts), "topology"),
                   given_for(part.name, collectives, len(parts), "collectives"))
