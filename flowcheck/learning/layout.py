"""A hypothesis of who talks to whom, as topology.py and treeshape.py propose it and all others take it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowcheck.learning.walk import Wire

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """A hypothesis without version: ranks, rings (one per channel, rank 0 first), wires, and why.

    source: "job", "bootstrap" or "traffic". channels: connected channels if known, else 0. handshake: versions by QP
    info, or "". said: (what, value, confidence, reason). about: what distinguishes it from its siblings, for refusals.
    ranks_by: who names the ranks. split: the tags are taken for numbers of a parent communicator. several: nothing
    says how many ranks there are. tree: AllReduce goes through a tree of more than two ranks."""

    ranks: int
    rings: tuple[tuple[int, ...], ...]
    wires: tuple[Wire, ...]
    source: str
    channels: int = 0
    handshake: str = ""
    said: tuple[tuple[str, str, str, str], ...] = ()
    about: str = ""
    qps: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    ranks_by: str = ""
    split: bool = False
    several: bool = False
    tree: bool = False
