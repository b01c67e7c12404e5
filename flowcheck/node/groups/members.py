"""Who is connected to a group, and what they send: what passes between its connections and its thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowcheck.control.protocol import Manifest

__all__ = ["Inbound", "RankSession"]


@dataclass
class RankSession:
    """One rank that is connected. send: gives a message to its connection, never waits. end: closes it. refuse: closes
    it, and its run is not to be tried again; None: it cannot hear of that.
    start: which start of a job it belongs to, counted by the group. manifest, flows: the last that it has sent.
    numbered: it says when it began, and hears under which epoch that is."""

    rank: int
    send: Callable[[Any], None]
    end: Callable[[str], None]
    flows: list[dict[str, Any]] | None = None
    manifest: Manifest | None = None
    start: int = 0
    numbered: bool = False
    refuse: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Inbound:
    """A message of a member; tensors: its payload, data: the payload of one that has no tensors. size: bytes of room
    that it has in the inbox."""

    member: RankSession
    message: Any
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    data: bytes = b""
    size: int = 0
