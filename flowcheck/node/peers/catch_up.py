"""Catching up: where all of a job is stale, a version that a peer has is taken before trainers are asked.

    catching = CatchUp(nodes, shard, start)            nodes(): the APIs of peers, as they are asked now
    for event in catching.look(joining): ...           at every turn of the group's thread
    catching.busy                                      trainers are not asked for ranges meanwhile
    catching.close()

A node that was away, or that comes to a job that is under way, lacks all of it. A peer that mirrors the same group has
it as a version. A thread asks every peer what it has of this very start of the job, and takes the newest that is of
use:

    ask         a peer that is gone, or has nothing, is named; one that is a step behind is asked again for a moment
    hold        the iteration that this version waits for stays open, and those behind it; they wait in arenas and rings
    receive     straight into a slot of the replica that nobody reads, each tensor hashed and held against the manifest
    go on       the version is published, and says that a peer made it until a checksum of the trainer matches

What is in doubt ends it: another shape, a hash, a peer that is slow or breaks off, rings that fill. The slot is
dropped, the trainers are asked for everything by ranges, as where there are no peers, and an event says why. So it is
tried at most once whenever everything becomes stale, and not again soon. A peer that gave no good version is left out
for a while; one whose version was not the trainer's, for as long as the job lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from flowcheck.ask.client import NodeClient, order_of
from flowcheck.ask.offer import MEMORY, Offer
from flowcheck.ask.receiving import AskError
from flowcheck.ask.sources import offers_of
from flowcheck.control.tensors import TensorSpec, memory
from flowcheck.control.version import MODEL, OPTIMIZER, Version
from flowcheck.errors import FlowcheckError
from flowcheck.job.version_status import DIVERGED
from flowcheck.node.versions.held import files_of
from flowcheck.rebuild.version.events import CaughtUp, Event, NotCaughtUp
from flowcheck.rebuild.version.joining import Joining
from updater.errors import UpdaterError

__all__ = ["QUIET_SECONDS", "CatchUp"]

QUIET_SECONDS = 3.0  # without a byte of a peer
ASK_SECONDS = 5.0  # that a peer may be behind
AGAIN_SECONDS = 0.1  # between two questions
RATE = 50e6  # bytes per second that a version must have: trainers give as much
PAUSE, SHARE = 30.0, 20  # seconds between two attempts, or so many times what the last one took
DISTRUST = 300.0
Targets = Mapping[str, Mapping[str, torch.Tensor]]  # file -> name -> where it is received


class CatchUp:
    """shard: the group's name. start: of the trainers, as of ReplicaOptions. now: seconds. Of one job; one thread."""

    def __init__(
        self, nodes: Callable[[], Sequence[NodeClient]], shard: str, start: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._shard, self._start, self._now = nodes, shard, start, now
        self._search: _Search | None = None
        self._apart: Mapping[str, torch.Tensor] = {}
        self._seen = 0  # how often everything had become stale when that was last looked at
        self._began = self._earliest = self._until = 0.0
        self._left_out: dict[str, tuple[str, float]] = {}  # peer -> why, and until when
        self._source = ""  # whose version was taken last

    @property
    def busy(self) -> bool:
        return self._search is not None

    def close(self) -> None:
        """Nothing is written into the replica any more. May be called twice."""
        if self._search is not None:
            self._search.end()
        self._search = None

    def look(self, joining: Joining) -> Iterator[Event]:
        if joining.chain.status == DIVERGED and joining.hearsay.version and self._source:
            self._left_out[self._source] = "its version was not the trainer's", float("inf")
            self._source = ""
        search = self._search
        if joining.ranges.given_up:  # trainers give whole states from now on
            self.close()
        elif search is None:
            yield from self._begin(joining)
        elif search.placed:
            yield from self._await(joining, search)
        elif search.over:
            yield from self._give_up(joining, search)
        else:
            search.useful = least, most = joining.useful
            offer = search.wishes
            if offer is not None and not least <= offer.step <= most:  # iterations have gone by since it was asked
                search.refuse()
            elif offer is not None and not joining.chain.builds:
                yield from self._hold(joining, search, offer)
            elif offer is None and self._now() - self._began > ASK_SECONDS + 3 * QUIET_SECONDS:
                search.failed.setdefault("", "they did not say in time what they have")
                yield from self._give_up(joining, search)

    def _begin(self, joining: Joining) -> Iterator[Event]:
        if joining.ranges.emptied == self._seen or joining.chain.next is None:
            return
        self._seen = joining.ranges.emptied
        now = self._now()
        if now < self._earliest:
            return
        left_out = {name: why for name, (why, until) in self._left_out.items() if now < until}
        try:
            nodes = [node for node in self._nodes() if node.name not in left_out]
        except FlowcheckError as error:  # a token that cannot be read
            yield NotCaughtUp({"": error.message()})
            return
        self._began = now
        try:
            self._search = _Search(nodes, self._shard, self._start, joining.useful, left_out)
        except RuntimeError as error:  # there is no thread to be had
            yield NotCaughtUp({"": str(error)})

    def _hold(self, joining: Joining, search: _Search, offer: Offer) -> Iterator[Event]:
        """Keep what the version waits for, and say where it goes."""
        try:
            slot = joining.expect(offer.step)
        except (FlowcheckError, UpdaterError) as error:
            search.failed[search.source] = _words(error)
            yield from self._give_up(joining, search)
            return
        targets = files_of(slot)
        apart = {entry.name for entry in joining.follower.plan.job.model if entry.kind == "constant" or entry.tied}
        self._apart = {name: torch.empty_like(targets[MODEL][name]) for name in apart}
        replica = joining.chain.replica
        assert replica is not None
        self._until = self._now() + 3 * QUIET_SECONDS + offer.nbytes / RATE
        search.tell({**targets, MODEL: {**targets[MODEL], **self._apart}}, replica.rounding)

    def _await(self, joining: Joining, search: _Search) -> Iterator[Event]:
        why = ""
        if search.over:
            version = search.version  # only now: it is there before the search is over
            why = search.failed.get(search.source, "its version did not come")
            if version is not None:
                try:
                    iteration = joining.go_on_with(version.step, version.optimizer, self._apart, search.source)
                except (FlowcheckError, UpdaterError) as error:
                    why = _words(error)
                else:
                    seconds, self._source = self._ended(), search.source
                    yield CaughtUp(iteration, version.step, search.source, version.nbytes, seconds)
                    return
            self._left_out[search.source] = why, self._now() + DISTRUST
        elif not joining.expecting:
            why = "the job has ended meanwhile"
        elif joining.gives_up:
            why = "rings were full before it was here"
        elif self._now() > self._until:  # whatever its thread waits for
            why = "too slow"
        if why:
            search.failed[search.source] = why
            yield from self._give_up(joining, search)

    def _give_up(self, joining: Joining, search: _Search) -> Iterator[Event]:
        search.end()  # first of all: its slot is somebody else's now
        self._ended()
        yield NotCaughtUp(dict(search.failed))
        yield from joining.go_on_without()

    def _ended(self) -> float:
        """Seconds that it took."""
        now, self._search, self._apart = self._now(), None, {}
        self._earliest = now + max(PAUSE, SHARE * (now - self._began))
        return now - self._began


def _words(error: FlowcheckError | UpdaterError) -> str:
    return error.what if isinstance(error, FlowcheckError) else str(error)


class _Search:
    """One attempt: the thread, and what it shows. wishes: the version that it would take, from `source`; placed: where
    to. A wish that is refused becomes None, and another one is looked for. failed: why nothing came of peers. over: it
    has ended; then version is the one that is whole, None: no version is. useful: least and greatest step, as the
    group's thread knows them."""

    def __init__(
        self, nodes: Sequence[NodeClient], shard: str, start: str, useful: tuple[int, int], left_out: Mapping[str, str]
    ) -> None:
        self._nodes, self._shard, self._start, self.useful = nodes, shard, start, useful
        self.failed = {name: f"not asked: {why}" for name, why in left_out.items()}
        self.source, self.over, self.placed = "", False, False
        self.wishes: Offer | None = None
        self.version: Version | None = None
        self._targets: Targets = {}
        self._rounding = ""
        self._answered, self._ending = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # while something is written into the replica
        self._ended = False
        threading.Thread(target=self._main, name="flowcheck catch up", daemon=True).start()

    # -- the group's thread --

    def tell(self, targets: Targets, rounding: str) -> None:
        self._targets, self._rounding, self.placed = targets, rounding, True
        self._answered.set()

    def refuse(self) -> None:
        """Another one is to be found."""
        self.wishes = None
        self._answered.set()

    def end(self) -> None:
        """From here on nothing is written; the thread ends when what it waits for is over."""
        with self._lock:
            self._ended = True
        self._ending.set()
        self._answered.set()

    # -- its own --

    def _main(self) -> None:
        try:
            deadline = time.monotonic() + ASK_SECONDS
            while (found := self._newest(deadline)) is not None:
                node, offer = found
                self.failed.pop(node.name, None)
                self._answered.clear()
                self.source, self.wishes = node.name, offer
                if self._ended:  # that answer has just been cleared
                    break
                self._answered.wait()
                if self._targets:
                    self._take(node, offer)
                    break
        finally:
            self.over = True

    def _newest(self, deadline: float) -> tuple[NodeClient, Offer] | None:
        """Who has the newest version that is of use."""
        nodes = list(self._nodes)
        while nodes and not self._ended:
            found = {node: self._of_this_start(node, said)
                     for node, said in zip(nodes, offers_of(nodes), strict=True)}
            least, most = self.useful
            good = [(node, one) for node, offers in found.items() for one in offers if least <= one.step <= most]
            if good:
                return max(good, key=lambda one: one[1].step)
            nodes = [node for node, offers in found.items() if offers]
            for node in nodes:
                newest = max(offer.step for offer in found[node])
                self.failed[node.name] = f"has step {newest}, and steps {least} to {most} are of use"
            if time.monotonic() > deadline:
                break
            self._ending.wait(AGAIN_SECONDS)
        return None

    def _of_this_start(self, node: NodeClient, said: list[Offer] | str) -> list[Offer]:
        if isinstance(said, str):
            self.failed[node.name] = said.removeprefix(f"{node.name}: ")
            return []
        found = [one for one in said if (one.tier, one.shard, one.start) == (MEMORY, self._shard, self._start)]
        if not found:
            withheld = f": {node.withheld[0]}" if node.withheld else ""
            self.failed[node.name] = f"has no version of this start of the job{withheld}"
        return found

    def _take(self, node: NodeClient, offer: Offer) -> None:
        deadline = time.monotonic() + 2 * QUIET_SECONDS + offer.nbytes / RATE
        try:
            version = node.version(offer)
            self._check(version)
            for file in (MODEL, OPTIMIZER):
                self._receive(node, offer, version, file, deadline)
            self.version = version
        except AskError as error:
            self.failed[node.name] = error.what
        finally:
            node.close()

    def _check(self, version: Version) -> None:
        """It is of this replica's form. Raises AskError."""
        if version.rounding != self._rounding:
            raise AskError(f"is computed as {version.rounding!r}, and here it is {self._rounding!r}")
        for file, tensors in self._targets.items():
            here = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
            there = {name: digest.spec for name, digest in version.files[file].items()}
            if odd := sorted(name for name in {*here, *there} if here.get(name) != there.get(name)):
                raise AskError(f"its {odd[0]!r} is not what it is here, or is in one of the two alone")

    def _receive(self, node: NodeClient, offer: Offer, version: Version, file: str, deadline: float) -> None:
        """Raises AskError, also where the group's thread has ended it: then nothing is written any more."""
        views = [memory(self._targets[file][name]) for name in order_of(version, file)]
        views = [view for view in views if view]
        at = 0
        for piece in node.pieces(offer, version, file):
            with self._lock:
                if self._ended or time.monotonic() > deadline:
                    raise AskError("too slow")
                views[0][at : at + len(piece)] = piece
            at += len(piece)
            if at == len(views[0]):
                del views[0]
                at = 0
