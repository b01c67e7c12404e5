"""The sample of a step record, made from docs/reference/events.md's rules alone: nothing of the product is used."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

KEYS = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"]
INTEGERS = {1: ("B", torch.uint8), 2: ("h", torch.int16), 4: ("i", torch.int32), 8: ("q", torch.int64)}


def salt(run_id: str = "", epoch: int = 0) -> bytes:
    return hashlib.blake2b(f"{epoch} {run_id}".encode(), digest_size=8).digest()


def positions(key: bytes, name: str, elements: int, number: int) -> list[int]:
    if elements <= 16:
        return list(range(elements))
    words = struct.unpack("<8Q", hashlib.blake2b(name.encode(), key=key, digest_size=64).digest())
    (word,) = struct.unpack("<Q", hashlib.blake2b(struct.pack("<Q", number), key=key, digest_size=8).digest())
    return [((one ^ word) & (2**63 - 1)) % elements for one in words]


def turn(names: Sequence[str], number: int) -> list[str]:
    """Whose turn it is, of all that are sampled."""
    turns = min(max(len(names) // 4, 1), 16)
    return [name for place, name in enumerate(names) if place % turns == number % turns]


def sample_of(
    tensors: Mapping[str, torch.Tensor], states: Mapping[str, Mapping[str, Any]], number: int, run_id: str = "",
    epoch: int = 0,
) -> str:
    """tensors: what is sampled of the model, in its order. states: by entry, of what is optimized."""
    key, masks = salt(run_id, epoch), bytearray()
    sections: dict[int, list[int]] = {8: [], 4: [], 2: [], 1: []}
    for name in turn(list(tensors), number):
        kept = {each: states.get(name, {})[each] for each in KEYS if each in states.get(name, {})}
        masks.append(sum(1 << KEYS.index(each) for each in kept))
        for called, tensor in [(name, tensors[name]), *((f"optimizer.{name}.{k}", v) for k, v in kept.items())]:
            bits = tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.element_size()][1]).tolist()
            sections[tensor.element_size()] += [bits[at] for at in positions(key, called, len(bits), number)]
    packed = [struct.pack(f"<{len(found)}{INTEGERS[width][0]}", *found) for width, found in sections.items()]
    return base64.b64encode(key + bytes(masks) + b"".join(packed)).decode()
