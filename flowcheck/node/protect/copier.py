"""Copies of other nodes' versions: whose, of which step, and which of them go again.

    copier = Copier(directory, rules, say)
    copier.follow(nodes)                          copy from these, and from no others; each has a thread
    copier.freeze(steps)                          of these runs those steps stay
    copier.check_room(nbytes, what)               is there memory left?

Each source's thread looks at what that node has, and takes the newest step that is a multiple of `every`, of the run
that the node follows now. A step that is one gives all holders, and the nodes' own checkpoints, steps in common. A
source that hangs, lies or is gone holds up nobody else, and what was copied of it stays.

    DIRECTORY/SOURCE/RUN/epoch-E/step-N          a checkpoint directory each, whole or not there (checkpoint/copies.py)

Of each group of a source the `keep` copies that came last stay, whatever run they are of. An older one goes when a
newer one is whole, and not before; one of a step that is frozen after a loss (registry_member.py) when that is over.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import DISK, MEMORY, Offer
from flowcheck.checkpoint.copies import take_copy
from flowcheck.checkpoint.directory import MANIFEST, MANIFEST_BYTES
from flowcheck.checkpoint.paths import read_small
from flowcheck.control.divergence import Divergence
from flowcheck.control.start import line_of, order
from flowcheck.control.version import status_of
from flowcheck.durable import came_last, remove_tree
from flowcheck.errors import FlowcheckError, said_of, size_text
from flowcheck.node.protect.border import Rules
from flowcheck.node.protect.journal import FOLDER, Journal
from flowcheck.node.protect.journal_loop import lane_of, youngest
from flowcheck.node.protect.placement import Run
from flowcheck.node.versions.runs import run_folder

__all__ = ["Copier", "again"]

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds after an attempt that failed
END_SECONDS = 3.0
TIERS = (MEMORY, DISK)  # copies are made of what a node has itself
SLACK = 64 << 10  # bytes of a copy beside its tensors: heads and manifest


@dataclass(frozen=True)
class _Copy:
    path: Path
    key: tuple[str, int, int]  # run, epoch, step
    line: str  # of control/start.py
    nbytes: int
    came: int  # ns
    status: str


class Copier:
    """directory: for all copies. say(event, **fields). now: seconds."""

    def __init__(
        self, directory: Path, rules: Rules, say: Callable[..., None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory, self._rules, self._say, self._now = directory, rules, say, now
        self._room = threading.Lock()  # for whoever counts bytes and begins a copy
        self._coming = 0  # bytes of copies that are on their way
        self._frozen: Mapping[Run, int] = {}
        self._nodes: dict[str, NodeClient] = {}  # as they are asked now, by name
        self._sources: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._turns: dict[str, threading.Lock] = {}  # one that is followed again waits for its thread from before
        self._begin()

    def _begin(self) -> None:
        """What an earlier process left half goes."""
        for path in self._directory.glob("*/*/epoch-*/.step-*.partial-*"):
            remove_tree(path)
        for path in self._directory.glob(f"*/*/epoch-*/{FOLDER}/.*.partial-*"):
            path.unlink(missing_ok=True)

    def follow(self, nodes: Sequence[NodeClient]) -> None:
        """Copy from these, and from no others. What was copied of others stays."""
        self._nodes |= {node.name: node for node in nodes}
        wanted = {node.name for node in nodes}
        for name in self._sources.keys() - wanted:
            self._sources.pop(name)[1].set()
        for name in sorted(wanted):
            if name not in self._sources:
                ending, turn = threading.Event(), self._turns.setdefault(name, threading.Lock())
                thread = threading.Thread(target=self._follow, args=(name, turn, ending), daemon=True,
                                          name=f"flowcheck copy {name}")
                thread.start()  # where there is none to be had this is asked again
                self._sources[name] = thread, ending

    def freeze(self, steps: Mapping[Run, int]) -> None:
        """Of each run the step of which no copy may go, until others are said. Any thread."""
        self._frozen = dict(steps)

    @property
    def frozen(self) -> Mapping[Run, int]:
        return self._frozen

    def held(self) -> list[dict[str, Any]]:
        """What is whole here: of each source and run the steps, oldest first."""
        found: dict[tuple[str, str, int], list[int]] = {}
        for lane in self._directory.glob("*"):
            for copy in _copies(lane):
                found.setdefault((unquote(lane.name), *copy.key[:2]), []).append(copy.key[2])
        return [{"source": source, "run_id": run_id, "epoch": epoch, "steps": steps}
                for (source, run_id, epoch), steps in sorted(found.items())]

    def check_room(self, nbytes: int, what: str) -> None:
        """Raises FlowcheckError: there is not so much memory left."""
        taken = self._coming + sum(copy.nbytes for one in self._directory.glob("*") for copy in _copies(one))
        taken += sum(Journal(folder).nbytes for folder in self._directory.glob(f"*/*/epoch-*/{FOLDER}"))
        if taken + nbytes > (most := self._rules.most):
            raise FlowcheckError(
                f"{what} has {size_text(nbytes, binary=True)}, and {size_text(taken, binary=True)} of"
                f" {size_text(most, binary=True)} are taken", where="protect.memory_mb",
                remedy=f"set it to {-(-(taken + nbytes) >> 20)} or more (it is {most >> 20}), or keep less",
            )

    def close(self, seconds: float = END_SECONDS) -> None:
        """Begin nothing more, and wait for what is under way, so long at most."""
        end = self._now() + seconds
        sources = list(self._sources.values())  # whoever follows a placement may be adding one
        for _, ending in sources:
            ending.set()
        for thread, _ in sources:
            thread.join(max(0.0, end - self._now()))

    # -- a source's thread --

    def _follow(self, name: str, turn: threading.Lock, ending: threading.Event) -> None:
        def look() -> None:
            with turn:
                self.look(self._nodes[name].again(), ending.is_set)

        again(look, lambda error, why: self._say("uncopied", name="", source=name, why=why), self._rules.seconds,
               ending)

    def look(self, node: NodeClient, ending: Callable[[], bool] = lambda: False) -> None:
        """Take what is due of a node, one group after the other. Raises FlowcheckError: the first that failed; the
        others were taken."""
        failed: list[FlowcheckError] = []
        try:
            offers = node.offers()
        finally:
            node.close()
        for divergence in node.diverged:
            self._drop(node, divergence)
        for shard in sorted({offer.shard for offer in offers}):
            offer = self._due(node, [one for one in offers if one.shard == shard])
            if offer is None or ending():
                continue
            try:
                self._take(node, offer)
            except FlowcheckError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _due(self, node: NodeClient, offers: Sequence[Offer]) -> Offer | None:
        """The newest that is wanted, of what a follower of its run vouches for, from the nearest tier; None: it is
        here, or nobody has one. It is of the run that the node follows now, where that has one: an earlier run may have
        come further."""
        wanted = [one for one in offers if one.tier in TIERS and one.attached and one.step % self._rules.every == 0]
        wanted = _followed(offers, wanted) or wanted
        if not wanted:
            return None
        newest = max((one.key for one in wanted), key=order)
        offer = min((one for one in wanted if one.key == newest), key=lambda one: TIERS.index(one.tier))
        lane = self._lane(node, offer.shard)
        key, line = (offer.run_id, offer.epoch, offer.step), line_of(offer.start)
        return None if any((copy.key, copy.line) == (key, line) for copy in _copies(lane)) else offer

    def _drop(self, node: NodeClient, divergence: Divergence) -> None:
        """Copies of versions of which their node has found that they may be wrong."""
        for copy in _copies(self._lane(node, divergence.shard)):
            run_id, epoch, step = copy.key
            if divergence.covers(run_id, epoch, divergence.shard, step, copy.status):
                remove_tree(copy.path)
                self._say("removed", name=divergence.shard, run_id=run_id, step=step, path=str(copy.path),
                          why=f"it has diverged: {node.name} found that a checksum of the trainer did not match")

    def _lane(self, node: NodeClient, shard: str) -> Path:
        return lane_of(self._directory, node.name, shard)

    def _take(self, node: NodeClient, offer: Offer) -> None:
        lane = self._lane(node, offer.shard)
        with self._room:
            self.check_room(offer.nbytes + SLACK, f"step {offer.step} of {offer.shard!r}")
            self._coming += offer.nbytes
        began = self._now()
        try:
            path = take_copy(node, offer, lane / run_folder(offer.run_id, offer.epoch))
            came_last(path / MANIFEST, [copy.came for copy in _copies(lane) if copy.path != path])
        finally:
            with self._room:
                self._coming -= offer.nbytes
        self._say("copied", name=offer.shard, source=node.name, step=offer.step, bytes=offer.nbytes,
                  seconds=round(self._now() - began, 3), path=str(path))
        for old in _copies(lane)[: -self._rules.keep]:
            run_id, epoch, step = old.key
            if self._frozen.get((run_id, epoch)) != step:
                remove_tree(old.path)


def _followed(offers: Sequence[Offer], wanted: Sequence[Offer]) -> list[Offer]:
    """Of these, those of the run, and of its start, that the node follows now, as what it has in memory tells. What is
    on disk does not say of which start it is, but a start has nothing there that is newer than what it has in memory.
    """
    memory = [one for one in offers if one.tier == MEMORY]
    if not memory:
        return []
    now = youngest(memory)
    mine = [one for one in memory if (one.run_id, one.epoch, one.start) == (now.run_id, now.epoch, now.start)]
    newest = max(one.step for one in mine)
    return [one for one in wanted if one in mine or (
        one.tier != MEMORY and (one.run_id, one.epoch) == (now.run_id, now.epoch) and one.step <= newest)]


def again(
    work: Callable[[], object], failed: Callable[[Exception, str], None], seconds: float, ending: threading.Event,
    longest: float | None = None,
) -> None:
    """Again and again. Why it fails is said once until it changes, and it is tried less and less often then."""
    said, pause = "", FIRST_PAUSE
    while not ending.is_set():
        try:
            work()
            said, pause, wait = "", FIRST_PAUSE, seconds
        except Exception as error:  # also of a library: it must not end the thread without a word
            why = error.what if isinstance(error, FlowcheckError) else said_of(error)
            if why != said:
                failed(error, why)
            said, wait, pause = why, pause, min(2 * pause, LONGEST_PAUSE if longest is None else longest)
        ending.wait(wait)


def _copies(lane: Path) -> list[_Copy]:
    """Whole ones, those that came first first."""
    found = []
    for path in lane.glob("*/epoch-*/step-*"):
        try:
            manifest = json.loads(read_small(path / MANIFEST, MANIFEST_BYTES))
            nbytes = sum(int(entry["bytes"]) for entry in manifest["files"].values())
            found.append(_Copy(path, (manifest["run_id"], manifest["epoch"], manifest["step"]),
                               line_of(manifest.get("start", "")), nbytes, (path / MANIFEST).stat().st_mtime_ns,
                               status_of(manifest)))
        except (FlowcheckError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # removed meanwhile, or somebody else's
    return sorted(found, key=lambda copy: copy.came)
