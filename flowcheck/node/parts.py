"""Small pure parts of a group: the flows of all ranks together, what a state holds, which counts have grown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flowcheck.errors import UserError

__all__ = ["grown", "split", "union"]


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """By how much each count has, of those that have."""
    return {cause: count - before.get(cause, 0) for cause, count in now.items() if count > before.get(cause, 0)}


def union(sent: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Flows of all ranks: both ends of a connection name it, and must say the same."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for flow in (flow for flows in sent for flow in flows):
        key = tuple(str(flow.get(part)) for part in ("channel", "src", "dst"))
        held = found.setdefault(key, {})
        for name, value in flow.items():
            if held.setdefault(name, value) != value and value:
                if held[name]:
                    raise UserError(f"the ends of connection {', '.join(key)} say different {name}", where="flows")
                held[name] = value
    return [found[key] for key in sorted(found)]


def split(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """State payload -> parameters by name, optimizer state by name and key."""
    parameters: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "model":
            parameters[rest] = tensor
        else:
            owner, _, key = rest.rpartition(".")
            state.setdefault(owner, {})[key] = tensor
    return parameters, state

