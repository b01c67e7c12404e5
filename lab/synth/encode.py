"""Wire form of a message's data: LL lines, LL128's permuted lines, or the bytes themselves.

`encode` never reads beyond the message's elements: what NCCL leaves undefined is filled with `undefined`
(zeros for comparison with hashes, seeded garbage in captures). `positions` tells where each data byte
stands in the wire form, for the truth about lost packets.
Source: reference nccl-wire.md 4.1, 4.2. Pure functions; any thread.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

__all__ = ["encode", "positions"]

Bytes = npt.NDArray[np.uint8]


def encode(protocol: str, data: Bytes, step: int, length: int, undefined: Bytes | None = None) -> Bytes:
    """Wire bytes of a message.

    data: the elements' bytes. step: of the connection; the flag is step+1. length: schedule.message_bytes.
    undefined: at least `length` bytes to take undefined contents from; None means zeros.
    """
    if protocol == "simple":
        return data
    wire = np.zeros(length, np.uint8)
    flag = np.uint32((step + 1) & 0xFFFFFFFF)
    if protocol == "ll":
        lines = -(-len(data) // 8)
        words = _padded(data, lines * 8, undefined).view("<u4").reshape(-1, 2)
        table = wire[: lines * 16].view("<u4").reshape(-1, 4)
        table[:, 0::2] = words
        table[:, 1::2] = flag
        return wire
    slices = -(-len(data) // 1920)
    words8 = _padded(data, slices * 1920, undefined).view("<u8").reshape(-1, 240)
    table8 = wire.view("<u8").reshape(-1, 256)
    table8[:, _ll128_words()] = words8
    table8[:, 15::16] = step + 1
    return wire


def positions(protocol: str, count: int) -> npt.NDArray[np.int64]:
    """Wire offset of each of the first `count` data bytes of a message."""
    index = np.arange(count, dtype=np.int64)
    if protocol == "simple":
        return index
    if protocol == "ll":
        return index // 4 * 8 + index % 4
    return index // 1920 * 2048 + _ll128_words()[index % 1920 // 8] * 8 + index % 8


def _padded(data: Bytes, size: int, undefined: Bytes | None) -> Bytes:
    if len(data) == size:
        return np.ascontiguousarray(data)
    out = np.zeros(size, np.uint8) if undefined is None else undefined[:size].copy()
    out[: len(data)] = data
    return out


@functools.cache
def _ll128_words() -> npt.NDArray[np.int64]:
    """Index of each of a slice's 240 data words among its 256 wire words."""
    place = np.zeros(240, np.int64)
    for half in range(2):
        for line in range(8):
            for word in range(15):
                if line < 4:
                    offset = 128 * line + 8 * word
                elif word < 14:
                    offset = 512 + 112 * (line - 4) + 8 * word
                else:
                    offset = 128 * (line - 4) + 120
                place[half * 120 + offset // 8] = half * 128 + line * 16 + word
    return place
