"""Copies in the idle spans of an iteration: which piece of a checkpoint is sent when. Gemini's Algorithm 2.

Source: Gemini (SOSP'23), Algorithm 2, with its three faults read as what they must mean: a span whose room is at most
the start-up time of a send is left (printed: a loop without end); room shrinks by the time of the piece that was sent
(printed: of what remains); copies are counted before they are compared (printed: m copies are planned, not m - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowcheck.plan.answer import need, need_positive

__all__ = ["Link", "Piece", "partition", "spilled"]


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes per second to a peer. start: seconds before the first byte of a piece. share: mu, of a span that
    may be used, because spans vary. buffer: bytes at the receiver, in `parts`: one is emptied while the next is filled.
    """

    bandwidth: float
    start: float
    share: float = 0.9
    buffer: int = 128_000_000
    parts: int = 4

    def __post_init__(self) -> None:
        need_positive(self.bandwidth, "bandwidth", "bytes per second")
        need(0 <= self.start < math.inf, f"{self.start} is below 0 or not finite", "start", "0 or more")
        need(0 < self.share <= 1, f"{self.share} is not a share", "share", "a number above 0, at most 1")
        need(1 <= self.parts <= self.buffer, f"{self.parts} parts of {self.buffer} bytes", "parts",
             "at least one part, and a byte in each")

    @property
    def most(self) -> int:
        """Bytes of the largest piece."""
        return self.buffer // self.parts

    def seconds(self, size: int) -> float:
        return self.start + size / self.bandwidth


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + size) of a checkpoint, sent in an idle span to the holder of a copy."""

    span: int
    copy: int
    offset: int
    size: int


def partition(spans: Sequence[float], size: int, copies: int, link: Link) -> list[Piece]:
    """The pieces of `copies` remote copies (m - 1) of a checkpoint of `size` bytes, in the order of sending.

    spans: idle seconds, one after the other, of an iteration. What does not fit is sent in the last one, which is then
    longer than it was (spilled()): it delays the update. Raises UserError.
    """
    need(len(spans) > 0 and all(0 <= span < math.inf for span in spans), "spans are not seconds", "spans",
         "at least one, each 0 or more")
    need(size >= 1 and copies >= 0, f"{copies} copies of {size} bytes", "size", "at least a byte")
    pieces: list[Piece] = []
    copy, offset = 0, 0
    for span, idle in enumerate(spans):
        room = math.inf if span == len(spans) - 1 else link.share * idle
        while copy < copies:
            fits = link.most if room >= link.seconds(link.most) else int((room - link.start) * link.bandwidth)
            now = min(fits, size - offset)
            if now <= 0:
                break
            pieces.append(Piece(span, copy, offset, now))
            offset += now
            room -= link.seconds(now)
            if offset == size:
                copy, offset = copy + 1, 0
    return pieces


def spilled(spans: Sequence[float], pieces: Sequence[Piece], link: Link) -> float:
    """Seconds by which the last span is too short for what is sent in it."""
    last = math.fsum(link.seconds(piece.size) for piece in pieces if piece.span == len(spans) - 1)
    return max(0.0, last - link.share * spans[-1])
