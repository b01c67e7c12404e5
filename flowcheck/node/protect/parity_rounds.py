"""A holder's rounds of parity: every K-th step that all shards of its group have, encoded into one stream of it.

    rounds = Rounds(directory, Code(2, 2), number=3, every=20, say)      number: of the stream that is kept here
    rounds.turn(nodes)                                  the nodes that hold data: a round, if one is due
    rounds.turn(nodes, {("run", 0): 40})                parity of that step of that run stays
    Streams(directory).held()                           what is whole there, for a registry

    DIRECTORY/RUN/epoch-E/step-N.parity                 whole or not there (checkpoint/coding/parity.py)

Plain form of ECCheck: the holder pulls all shards and encodes. Which step is due follows from what the nodes have, so
holders of one group come to the same steps without a word between them. A member that is gone, stalls or sends wrong
bytes ends the round, and the parity before stays. Source and reasons: decision 0028. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import COPY, DISK, MEMORY, Offer
from flowcheck.ask.sources import Found, Key, choose
from flowcheck.checkpoint.coding.code import Code
from flowcheck.checkpoint.coding.parity import Protected, encode, source_of
from flowcheck.control.divergence import Divergence
from flowcheck.durable import came_last, remove_tree, reporting
from flowcheck.errors import FlowcheckError, UserError, size_text
from flowcheck.node.protect.placement import Run
from flowcheck.node.versions.runs import run_folder

__all__ = ["Rounds", "Streams", "kept_in"]

WHOLE = "*/epoch-*/step-*.parity"
NEAREST = (COPY, DISK, MEMORY)  # what lies in files is read first: in memory it takes a slot of the node's


class Rounds:
    """keep: whole ones that stay. most: bytes of all of them."""

    def __init__(
        self, directory: Path, code: Code, number: int, every: int, say: Callable[..., None], keep: int = 2,
        most: int = 64 << 30,
    ) -> None:
        self._directory, self._code, self._number, self._every = directory, code, number, every
        self._say, self._keep, self._most = say, keep, most
        for path in directory.glob("*/epoch-*/.step-*.partial-*"):  # what an earlier process left half
            remove_tree(path)

    def turn(self, nodes: Sequence[NodeClient], frozen: Mapping[Run, int] = MappingProxyType({})) -> Protected | None:
        """What it made; None: nothing is due. frozen: of each run the step of which parity stays besides. Raises
        FlowcheckError: the round has ended, and nothing has changed."""
        found = self._look(nodes)
        key = choose([one.versions for one in found]) if found else None
        if key is None:
            return None
        folder = self._directory / run_folder(found[0].run_id, found[0].of(key)[0][1].epoch)
        path = folder / f"step-{key[1]:06d}.parity"
        if any(one.path == path for one in kept_in(self._directory)):
            return None
        began = time.monotonic()
        kept = self._encode(found, key, path)
        with reporting(path):
            came_last(path, [one.stat().st_mtime_ns for one in self._directory.glob(WHOLE) if one != path])
        self._say("protected", name="", epoch=key[0], step=kept.step, shards=[one.shard for one in kept.versions],
                  stream=self._number, bytes=kept.length, padded=kept.padded,
                  seconds=round(time.monotonic() - began, 3), path=str(path))
        for old in kept_in(self._directory)[: -self._keep]:
            if frozen.get((old.versions[0].run_id, old.key[0])) != old.step:
                remove_tree(old.path)
        return kept

    def _look(self, nodes: Sequence[NodeClient]) -> list[Found]:
        """For each shard of the run that is followed now, who has which multiples of `every`."""
        with ThreadPoolExecutor(len(nodes), "flowcheck round") as pool:
            answers = list(pool.map(_offers, nodes))
        self._drop([one for node in nodes for one in node.diverged])
        places = [(node, offer) for node, offers in zip(nodes, answers, strict=True) for offer in offers
                  if offer.attached]
        runs = sorted({offer.run_id for _, offer in places if offer.tier == MEMORY})
        if not runs:
            return []
        if len(runs) > 1:
            raise UserError(f"the nodes follow several runs: {', '.join(map(repr, runs))}", where="protect.group",
                            remedy="nodes of one job in each group")
        followed = {(node.name, offer.shard) for node, offer in places if offer.tier == MEMORY}
        if len(followed) > len({name for name, _ in followed}):
            raise UserError("a node follows several shards, which would be lost together", where="protect.group",
                            remedy="a node for each shard, or copies of it elsewhere")
        shards = sorted({offer.shard for _, offer in places if offer.run_id == runs[0] and offer.tier in NEAREST})
        if len(shards) != self._code.data:
            raise UserError(
                f"{len(shards)} shards ({', '.join(map(repr, shards))}) for {self._code.data} streams of data",
                where="protect.parity", remedy="as many as the job has shards, each of a node of its own",
            )
        out = []
        for shard in shards:
            mine = [(node, offer) for node, offer in places
                    if (offer.run_id, offer.shard) == (runs[0], shard) and offer.tier in NEAREST
                    and offer.step % self._every == 0]
            mine.sort(key=lambda place: NEAREST.index(place[1].tier))
            out.append(Found(runs[0], shard, tuple(mine), ()))
        return out

    def _drop(self, diverged: Sequence[Divergence]) -> None:
        """Parity over a version of which its node has found that it may be wrong."""
        for kept in kept_in(self._directory) if diverged else ():
            odd = [one for one in kept.versions if Divergence.any_covers(
                diverged, one.run_id, one.epoch, one.shard, one.step, one.status)]
            if odd:
                remove_tree(kept.path)
                self._say("removed", name=odd[0].shard, run_id=odd[0].run_id, step=kept.step, path=str(kept.path),
                          why="it has diverged: its node found that a checksum of the trainer did not match")

    def _encode(self, found: Sequence[Found], key: Key, path: Path) -> Protected:
        taken = sum(one.length * len(one.sums) for one in kept_in(self._directory))
        with ExitStack() as stack:
            sources = [source_of(stack, one, key) for one in found]
            length = max(version.nbytes for _, _, version in sources)
            if taken + length > self._most:
                raise FlowcheckError(
                    f"step {key[1]} needs {size_text(length, binary=True)}, and {size_text(taken, binary=True)} of"
                    f" {size_text(self._most, binary=True)} are taken",
                    where="protect.memory_mb",
                    remedy=f"set it to {-(-(taken + length) >> 20)} or more (it is {self._most >> 20}), or keep less",
                )
            return encode(sources, self._code, path, [self._number])


def _offers(node: NodeClient) -> list[Offer]:
    """Raises AskError: a round needs all members."""
    try:
        return node.offers()
    finally:
        node.close()


class Streams:
    """What of parity is whole below a holder's directory. One thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[tuple[Path, int], list[dict[str, Any]]] = {}  # by what changes when it is written anew

    def held(self) -> list[dict[str, Any]]:
        """As JSON: decided.Have. A description has the manifests of all shards, so each is read once."""
        found: dict[tuple[Path, int], list[dict[str, Any]]] = {}
        for path in sorted(self._directory.glob(WHOLE)):
            try:
                key = path, path.stat().st_mtime_ns
                found[key] = self._read.get(key) or _said(Protected.read(path))
            except (OSError, UserError):
                continue  # removed meanwhile, or somebody else's
        self._read = found
        return [one for some in found.values() for one in some]


def _said(kept: Protected) -> list[dict[str, Any]]:
    about = {"run_id": kept.versions[0].run_id, "epoch": kept.key[0], "step": kept.step}
    return [{**about, "stream": number} for number in sorted(kept.sums)]


def kept_in(directory: Path) -> list[Protected]:
    """Whole parity below a holder's directory, what came first first."""
    found: list[tuple[int, Protected]] = []
    for path in directory.glob(WHOLE):
        try:
            found.append((path.stat().st_mtime_ns, Protected.read(path)))
        except (OSError, UserError):
            continue  # removed meanwhile, or somebody else's
    return [kept for _, kept in sorted(found, key=lambda one: one[0])]
