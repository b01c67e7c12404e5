"""The bytes of tensors, and of a version: what has to be equal."""

from __future__ import annotations

from typing import Any

import torch


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_bits(version: Any) -> tuple[dict[str, bytes], dict[str, dict[str, bytes]]]:
    """Of a slot or a pinned version: parameters, and the optimizer's state of each."""
    return (
        {name: bits(tensor) for name, tensor in version.parameters.items()},
        {name: {key: bits(value) for key, value in state.items()} for name, state in version.optimizer_state.items()},
    )
