"""What this start of the job says of itself to nodes: the same text on all ranks, for all of its groups.

    text = started(group, iteration)        a control.start.Start; `iteration` is the first that is to come
    after(lines)                            a start that is said later began later than these

The first rank that asks leaves when that was, and a token, in the store that torch.distributed was started with; the
others take it from there. No collective is called, and nothing is waited for but that store. Clocks of hosts differ:
what `recover` has seen of other starts is always taken for earlier. Torch and the standard library. The training
thread.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from flowcheck.control.start import Start

__all__ = ["Identity", "after", "started"]

_NAME = "flowcheck/started"  # in torch.distributed's store, whose names are of one start of it


@dataclass(frozen=True)
class Identity:
    """Who comes to a node. places: of the group's ranks in the whole job."""

    run_id: str
    epoch: int
    rank: int
    ranks: int
    group: str
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    places: tuple[int, ...] = ()

    @property
    def hello(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "places"}


@dataclass
class _Process:
    """What was said since torch.distributed was started. group: its default group, as long as that lives. asked: how
    often ranks have agreed."""

    group: Any = None
    asked: int = 0
    began: int = 0
    token: str = ""
    attached: Counter[str] = field(default_factory=Counter)


_now = _Process()
_newest = 0  # nanoseconds: the latest start that `recover` has seen


def after(lines: Iterable[str]) -> None:
    global _newest
    _newest = max([_newest, *(int(line[:16], 16) for line in lines if line)])


def started(group: str, iteration: int) -> str:
    """Never raises: without a store this rank speaks for itself."""
    global _now
    world = dist.group.WORLD
    same = _now.group is not None and _now.group() is world
    if not same or _now.began <= _newest:  # it has recovered since then, in the same processes
        asked = _now.asked + 1 if same else 1
        began, token = _agreed(asked, f"{max(time.time_ns(), _newest + 1):016x}-{secrets.token_hex(8)}")
        _now = _Process(weakref.ref(world) if world is not None else None, asked, began, token)
    number = _now.attached[group]
    _now.attached[group] += 1
    return str(Start(_now.began, _now.token, number, iteration))


def _agreed(asked: int, mine: str) -> tuple[int, str]:
    """When the start began, and its token."""
    name = f"{_NAME}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{asked}"
    try:
        said = dist.distributed_c10d._get_default_store().compare_set(name, "", mine).decode()
    except (RuntimeError, ValueError, AttributeError):  # of torch's: no store, or it is gone
        said = mine
    found = Start.of(f"{said}-0000-0") or Start.of(f"{mine}-0000-0")
    assert found is not None
    return found.began, found.token
