"""What goes out at each boundary, as protocol.frame would write it: only numbers are new in it, and only they written.

    frames = Frames()
    frames.record(groups, iteration, clip, scale, skipped, sample, size)    a Record without checksums
    user_head(iteration, rank, same, size), user(iteration, rank, size)     the same of these
    pieces(messages)                                    of any messages, with payloads; None: too much, or not here

size: bytes of the payload. `groups` are taken for what they were as long as they are the same object. Raises
ValueError: a number that JSON does not have. Torch and the standard library; the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowcheck.control.link import dumps, frame
from flowcheck.control.tensors import packed
from flowcheck.trainer.copies import Copies

__all__ = ["Frames", "Payload", "pieces", "user", "user_head"]

AT_ONCE = 64 << 10  # bytes of tensors that the training thread sends itself
Payload = Mapping[str, torch.Tensor] | Copies | bytes  # bytes: as they are


class Frames:
    def __init__(self) -> None:
        self._groups: Any = None
        self._text = ""

    def record(
        self, groups: list[dict[str, Any]], iteration: int, clip: float | None, scale: float | None, skipped: bool,
        sample: str, size: int,
    ) -> bytes:
        if groups is not self._groups:
            self._groups, self._text = groups, dumps(groups)
        return frame(
            f'{{"type":"record","iteration":{iteration},"groups":{self._text},'
            f'"clip":{"null" if clip is None else dumps(clip)},"scale":{"null" if scale is None else dumps(scale)},'
            f'"skipped":{"true" if skipped else "false"},"checksums":{{}},"sample":"{sample}"}}'.encode(), size)


def pieces(messages: Sequence[tuple[Any, Payload | None]]) -> list[bytes] | None:
    """What goes out; None: they cannot be sent at once."""
    out: list[bytes] = []
    for message, tensors in messages:
        if (payload := _small(tensors)) is None:
            return None
        try:
            out += [frame(message, len(payload)), payload]
        except ValueError:
            return None  # a number that JSON does not have, which the thread will say
    return out


def _small(tensors: Payload | None) -> bytes | None:
    """A payload that can be sent at once; None: it is not small, or not in this machine's memory."""
    if not tensors:
        return b""
    if isinstance(tensors, bytes):
        return tensors
    if isinstance(tensors, Copies) or not all(one.is_cpu for one in tensors.values()):
        return None
    return b"".join(packed(tensors)) if sum(one.nbytes for one in tensors.values()) <= AT_ONCE else None


def user(iteration: int, rank: int, size: int) -> bytes:
    return frame(f'{{"type":"user","iteration":{iteration},"rank":{rank}}}'.encode(), size)


def user_head(iteration: int, rank: int, same: int, size: int) -> bytes:
    return frame(f'{{"type":"userhead","iteration":{iteration},"rank":{rank},"same":{same}}}'.encode(), size)
