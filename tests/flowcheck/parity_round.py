"""A directory of parity as a holder's round writes it, of all the shards that nodes by hand offer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from flowcheck.ask.client import NodeClient
from flowcheck.ask.sources import choose, look
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.parity import Protected, encode, source_of

from .hand_api import KEY, HandApi
from .hand_node import LONGEST

__all__ = ["parity_of"]


def parity_of(apis: Sequence[HandApi], directory: Path, step: int | None = None) -> Protected:
    """Two streams of parity, of the newest step that all have, or of this one."""
    nodes = [NodeClient(one.address, KEY, LONGEST) for one in apis]
    shards = sorted({one.document["shard"] for api in apis for one in api.versions})
    found = [look(nodes, None, shard) for shard in shards]
    key = choose([one.versions for one in found], step=step)
    assert key is not None
    with ExitStack() as stack:
        sources = [source_of(stack, one, key) for one in found]
        numbers = range(len(found), len(found) + 2)
        return encode(sources, Code(len(found), 2), directory / f"step-{key[1]:06d}.parity", numbers)
