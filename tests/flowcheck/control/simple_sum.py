"""The checksum of a tensor, as flowcheck/control/checksum.py describes it and in the simplest way. Every way of the
product is held against it."""

from __future__ import annotations

import numpy as np
import torch


def mix(numbers: np.ndarray) -> np.ndarray:
    """The documented mixing, in numpy's unsigned 64-bit arithmetic, which wraps."""
    h = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    return h ^ h >> np.uint64(32)


def simple_sum(tensor: torch.Tensor) -> int:
    """Every element times an odd weight of its place and an odd weight of its block of 65536."""
    flat = tensor.detach().contiguous().reshape(-1)
    values = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    with np.errstate(over="ignore"):
        words = np.frombuffer(values, f"<u{tensor.element_size()}").astype(np.uint64)
        place = np.arange(len(words), dtype=np.uint64)
        inner = mix(place & np.uint64(0xFFFF)) | np.uint64(1)
        outer = mix((place >> np.uint64(16)) + np.uint64(65536)) | np.uint64(1)
        return int((inner * outer * words).sum(dtype=np.uint64) + mix(np.array([len(words)]))[0])
