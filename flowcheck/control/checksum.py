"""Checksum of a tensor's bits that a trainer computes on its GPU and a checkpoint node on its CPU.

Needs torch and nothing else. For n elements, taken as unsigned integers b[i] of their own width, all modulo 2^64:

    mix(k) = f(f((k+1) * 0x9e3779b97f4a7c15) * 0xd6e8feb86659fd93)     f(h) = h ^ (h >> 32)
    sum    = mix(n) + sum over blocks c of 65536: (mix(c + 65536) | 1) * sum over i in block: (mix(i) | 1) * b[i]

Blocks and positions take their weights from different numbers, or two places would share a product. Weights are odd,
so a single wrong element always shows; they depend on the position without a pattern, so exchanged
or shifted values and errors that cancel in a plain sum show too (chance of a miss: 2^-64 for unrelated errors).
The block's weights are the same for every block: 512 KiB that stay on the device, and the pass reads the tensor once.

    checksum(tensor) -> int                 checksums(model.state_dict()) -> {name: int}
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["checksum", "checksums"]

BLOCK = 1 << 16
_PART = 256 * BLOCK  # elements at a time: bounds what the widened integers take (8 bytes each)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_weights: dict[torch.device, torch.Tensor] = {}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(index: torch.Tensor) -> torch.Tensor:
    """int64 arithmetic wraps in torch as unsigned does; its >> keeps the sign and has to be masked."""
    h = (index + 1) * _signed(0x9E3779B97F4A7C15)
    h = (h ^ (h >> 32 & 0xFFFFFFFF)) * _signed(0xD6E8FEB86659FD93)
    return h ^ (h >> 32 & 0xFFFFFFFF)


def _block_weights(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        _weights[device] = _mix(torch.arange(BLOCK, device=device)) | 1
    return _weights[device]


def checksum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum as an int64 scalar on the tensor's device: no synchronisation."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.element_size()
    if size not in _INTEGERS:
        raise ValueError(f"elements of {size} bytes ({tensor.dtype}) have no checksum")
    weights = _block_weights(flat.device)
    bits = flat.view(_INTEGERS[size])
    total = _mix(torch.tensor(flat.numel(), device=flat.device))
    for first in range(0, flat.numel(), _PART):
        part = bits[first : first + _PART].to(torch.int64)
        if size in _MASKS:
            part = part & _MASKS[size]
        whole = part.numel() // BLOCK * BLOCK
        sums = (part[:whole].view(-1, BLOCK) * weights).sum(1)
        rest = part[whole:]
        sums = torch.cat([sums, (rest * weights[: rest.numel()]).sum().view(1)])
        blocks = BLOCK + torch.arange(first // BLOCK, first // BLOCK + sums.numel(), device=flat.device)
        total = total + ((_mix(blocks) | 1) * sums).sum()
    return total


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of a tensor's elements in row-major order; shape and type are not part of it."""
    return int(checksum_on_device(tensor)) & ((1 << 64) - 1)


def checksums(state_dict: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """name -> checksum; waits once per device."""
    found = {name: checksum_on_device(tensor) for name, tensor in state_dict.items()}
    if not found:
        return {}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in found.items():
        by_device.setdefault(value.device, []).append(name)
    out = {}
    for names in by_device.values():
        for name, signed in zip(names, torch.stack([found[name] for name in names]).tolist(), strict=True):
            out[name] = signed & ((1 << 64) - 1)
    return {name: out[name] for name in found}
