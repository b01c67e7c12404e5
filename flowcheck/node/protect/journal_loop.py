"""Keeping journals of other nodes' shards, and making of them what was lost: next to the copies, in the same process.

    journaling = Journaling(directory, name, node, control, token, tls, room, say, seconds)
    journaling.start();  journaling.close()

A thread looks at what the source has, every `seconds`: it fetches the source's hashes of its newest step, and begins
a thread for each of its groups. That one asks the control port for each iteration that has closed: what its step was
made with, then its gradients, 4 or 2 bytes a parameter. Nothing waits for it: an iteration that it was too late for is
a gap, which is named, and steps after it need a newer copy.

When the source has not answered for GONE_SECONDS, the newest step that can be made and proved is made (redo.py), and
offered as any copy. One that cannot be proved is not. It begins with the newest copy, or, of a member of a group with
parity, with the shard as it is made of that (parity_base.py).
"""

from __future__ import annotations

import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

from flowcheck.ask.client import NodeClient
from flowcheck.ask.offer import MEMORY, Offer
from flowcheck.ask.receiving import AskError
from flowcheck.control.divergence import Divergence
from flowcheck.control.protocol import (
    PEER_BYTES,
    PEER_SECONDS,
    Bytes,
    Entry,
    Holes,
    Limits,
    Link,
    RecordsError,
    Refused,
    Span,
    greet,
)
from flowcheck.control.protocol import (
    Journal as Question,
)
from flowcheck.control.tensors import TensorSpec, unpack
from flowcheck.durable import remove_tree
from flowcheck.errors import FlowcheckError, said_of
from flowcheck.node.peers.client import checked, dial
from flowcheck.node.protect.journal import FOLDER, Journal
from flowcheck.node.protect.parity_base import ParityBase
from flowcheck.node.protect.redo import reach, redo
from flowcheck.node.versions.journal.job_text import JobText, planned
from flowcheck.node.versions.runs import run_folder
from flowcheck.rebuild.plan import BucketPlace, JobPlan

__all__ = ["Journaling", "Lacking", "Reading", "bases_of", "lane_of", "youngest"]

GONE_SECONDS = 3.0
PAUSE_SECONDS = 1.0  # after one that failed
AGAIN_SECONDS = 60.0  # until a step that could not be made is tried again
TEXT = 16 << 20  # of a manifest, as a node reads it from a trainer
HEADERS = 1 << 20


def lane_of(directory: Path, source: str, shard: str) -> Path:
    """Where everything of a source's shard lies."""
    return directory / quote(f"{source}/{shard}", safe="+@=,:[]")


def youngest(offers: Sequence[Offer]) -> Offer:
    """The one in memory that was published last: it is of the run that the node follows now, whatever its step."""
    return max(offers, key=lambda one: -(one.age_seconds or 0.0))


class Journaling:
    """Of one source. name: of its API. node(): asks that. control: its control port. token(): of peers. room(bytes):
    raises FlowcheckError where it lacks. say: events. seconds: between two looks at it, each of which has it hash
    its newest version. parity: what a step is made of where no copies of this source are kept."""

    def __init__(
        self, directory: Path, name: str, node: Callable[[], NodeClient], control: tuple[str, int],
        token: Callable[[], bytes], tls: ssl.SSLContext | None, room: Callable[[int], None], say: Callable[..., None],
        seconds: float, parity: ParityBase | None = None,
    ) -> None:
        self._seconds, self._parity = seconds, parity
        self._directory, self._name, self._node = directory, name, node
        self._control, self._token, self._tls = control, token, tls
        self._room, self._say_all = room, say
        self._ending = threading.Event()
        self._groups: dict[str, _Group] = {}
        self._said, self._seen = "", time.monotonic()
        self._withdrawn: set[Divergence] = set()  # what its source has said of steps that diverged
        self._made: dict[Path, tuple[int, float]] = {}  # by run: the step that was tried last, and when again
        self._thread = threading.Thread(target=self._main, daemon=True, name=f"flowcheck journal {name}")

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Begin nothing more, and wait for what is under way, so long at most."""
        end = time.monotonic() + seconds
        self._ending.set()
        groups = list(self._groups.values())  # its thread may be adding one
        for group in groups:
            group.end()
        for thread in (self._thread, *(group.thread for group in groups)):
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))

    def _say(self, event: str, **fields: Any) -> None:
        self._say_all(event, source=self._name, **fields)

    def _main(self) -> None:
        while not self._ending.is_set():
            wait = PAUSE_SECONDS
            try:
                try:
                    self._look()
                    self._said, wait = "", self._seconds
                except AskError:  # gone; or as many of its versions are being read as may be
                    if time.monotonic() - self._seen > GONE_SECONDS:
                        self.make()
            except Exception as error:  # also of a library: it must not end the thread without a word
                self._unjournaled("", said_of(error))
            self._ending.wait(wait)

    def _look(self) -> None:
        """The hashes of the newest step of each group. Raises FlowcheckError: it does not answer."""
        node = self._node()
        try:
            offers = [one for one in node.offers() if one.tier == MEMORY]
            self._seen = time.monotonic()
            for divergence in set(node.diverged) - self._withdrawn:
                lane = lane_of(self._directory, self._name, divergence.shard)
                Journal(lane / run_folder(divergence.run_id, divergence.epoch) / FOLDER).withdraw(divergence)
            self._withdrawn = set(node.diverged)
            for shard in sorted({one.shard for one in offers}):
                newest = youngest([one for one in offers if one.shard == shard])
                folder = lane_of(self._directory, self._name, shard) / run_folder(newest.run_id, newest.epoch) / FOLDER
                group = self._groups.get(shard)
                if group is None:
                    group = _Group(self, shard)
                    group.thread.start()  # where there is no thread to be had the next look tries again
                    self._groups[shard] = group
                if group.journal is None or group.journal.folder != folder:
                    group.journal = Journal(folder)
                if group.journal.job is not None and newest.step not in group.journal.steps:
                    group.journal.hashed(node.version(newest, release=True))
        finally:
            node.close()

    def make(self) -> None:
        """Of each run the newest step that its base and its journal make."""
        lanes = escape(str(lane_of(Path(), self._name, "")))
        for folder in sorted(self._directory.glob(f"{lanes}*/*/epoch-*/{FOLDER}")):
            shard = unquote(folder.parents[2].name).partition("/")[2]
            try:
                self._redo(folder, shard)
            except Exception as error:  # also of a library: other runs, and the next attempt, go on
                self._unjournaled(shard, said_of(error))

    def _redo(self, folder: Path, shard: str) -> None:
        journal, bases = Journal(folder), bases_of(folder.parent)
        newest = max(journal.steps, default=-1)
        tried, again = self._made.get(folder, (-1, 0.0))
        if newest <= max(bases, default=-1) or (tried == newest and time.monotonic() < again):
            return
        if self._parity is not None and journal.job is not None:
            self._parity.take(shard, *journal.job.run[:2], folder.parent, max(bases, default=-1))
            bases = bases_of(folder.parent)
        if not bases:
            return
        self._made[folder] = newest, time.monotonic() + AGAIN_SECONDS  # where memory was full it may have room then
        to = reach(bases[-1], journal)
        gap = f"iteration {to.gap} is not in the journal" if to.gap < newest else ""
        if to.step == to.base:
            self._made[folder] = newest, math.inf
            self._unjournaled(shard, f"step {to.base} is the newest that is left of {newest}: {gap}")
            return
        began = time.monotonic()
        path, to = redo(folder.parent / f"step-{bases[-1]:06d}", journal, len(os.sched_getaffinity(0)))
        self._made[folder] = newest, math.inf
        for old in folder.parents[1].glob("*/step-*") if self._parity is not None else ():
            if old != path:  # parity has it
                remove_tree(old)
        self._say("redone", name=shard, step=to.step, base=to.base, seconds=round(time.monotonic() - began, 3),
                  why=gap, path=str(path))

    def _unjournaled(self, shard: str, why: str) -> None:
        if why != self._said:
            self._said = why
            self._say("unjournaled", name=shard, why=why)

    # -- for its groups --

    def read(self, shard: str, journal: Journal) -> Reading:
        """Raises FlowcheckError, OSError."""
        return Reading(dial(self._control, self._tls, PEER_SECONDS), self._token(), shard, journal, self._room,
                       self._parity)

    @property
    def ending(self) -> threading.Event:
        return self._ending

    def lost(self, shard: str, error: Exception, said: str) -> str:
        """A group's connection has ended. said: why it did so last. Returns why."""
        what = getattr(error, "what", "") or getattr(error, "strerror", "") or str(error)
        if what != said:
            self._say("unjournaled", name=shard, why=what if isinstance(error, FlowcheckError | OSError) else
                      f"{type(error).__name__}: {what}")
        return what

    def gap(self, shard: str, iteration: int, why: str) -> None:
        self._say("unjournaled", name=shard, why=f"iteration {iteration}: {why}; steps after it need a newer copy")


def bases_of(folder: Path) -> list[int]:
    """Steps of the copies of a run, in order."""
    found = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(text) for text in found if text.isdecimal())


class Reading:
    """A source's control port, of which a journal is kept. The link is its own, and closed if its opening fails."""

    def __init__(
        self, link: Link, token: bytes, shard: str, journal: Journal,
        room: Callable[[int], None] = lambda nbytes: None, parity: ParityBase | None = None,
    ) -> None:
        self._link, self._journal, self._room, self._requests, self._parity = link, journal, room, 0, parity
        self._plan: JobPlan | None = None
        self._buffers: Mapping[str, torch.Tensor] = {}
        try:
            link.limits = lambda: Limits(seconds=PEER_SECONDS)
            greet(link, token, run_id="", epoch=0, rank=0, ranks=1, group=shard, role="peer")
            if journal.job is not None:
                self._plan = planned(journal.job)
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        self._link.close()

    def entry(self, iteration: int) -> Entry:
        """What the source says of an iteration. With another job than is known the journal begins again. Raises
        FlowcheckError, OSError."""
        self._requests += 1
        job = self._journal.job
        plan = job.plan if job is not None else ""
        specs = self._specs()
        most = sum(spec.nbytes for spec in specs.values()) + HEADERS + 200 * len(specs) if specs else 0
        question = Question(self._requests, iteration, plan, 1.0)
        message, payload = self._ask(question, Limits(TEXT, {"entry": most}, PEER_SECONDS))
        if not isinstance(message, Entry) or (message.request, message.iteration) != (self._requests, iteration):
            raise RecordsError(f"a {type(message).__name__} where an entry was due", where=self._link.peer)
        found = unpack(payload, specs, self._link.peer) if payload else {}
        self._buffers = {name.removeprefix("buffer."): tensor for name, tensor in found.items()}
        if message.job:
            run_id, epoch, ranks = message.run
            job = JobText(message.job, (run_id, epoch, ranks), message.first, message.plan)
            self._plan = planned(job)
            self._journal.begin(job)
        return message

    def keep(self, entry: Entry) -> int:
        """An iteration of which this was said last, into the journal; what a newer copy has goes. Returns bytes. Raises
        Lacking: some of it is not there; FlowcheckError, OSError."""
        job = self._journal.job
        assert self._plan is not None and job is not None
        places = self._plan.iteration_buckets(entry.iteration - job.first)
        self._room(sum(place.nbytes for place in places))  # before a byte of it is asked for
        buckets = self._buckets(entry.iteration, job.plan, places)
        record = {"groups": entry.groups, "clip": entry.clip, "scale": entry.scale, "skipped": entry.skipped}
        nbytes = self._journal.add(entry.iteration, record, buckets, self._buffers)
        if self._parity is not None:
            if (oldest := self._parity.oldest(*job.run[:2])) is not None:
                self._journal.forget(oldest)
                self._parity.tidy(self._journal.folder.parents[2], *job.run[:2])
        elif bases := bases_of(self._journal.folder.parent):
            self._journal.forget(bases[-1])
        return nbytes

    def _buckets(self, iteration: int, plan: str, places: tuple[BucketPlace, ...]) -> list[torch.Tensor]:
        buckets = [bytearray(place.nbytes) for place in places]
        for part in _parts(places):
            spans = [(places[index].offset + at, length) for index, at, length in part]
            for (index, at, length), piece in zip(part, self._bytes(iteration, plan, spans), strict=True):
                buckets[index][at : at + length] = piece
        kinds: list[torch.dtype] = [getattr(torch, place.dtype) for place in places]
        return [torch.frombuffer(bucket, dtype=kind) if bucket else torch.zeros(0, dtype=kind)
                for kind, bucket in zip(kinds, buckets, strict=True)]

    def _bytes(self, iteration: int, plan: str, spans: list[Span]) -> list[memoryview]:
        self._requests += 1
        holes = Holes(self._requests, iteration, plan, [list(span) for span in spans], PEER_SECONDS)
        most = sum(length for _, length in spans)
        message, payload = self._ask(holes, Limits(TEXT, {"bytes": most}, PEER_SECONDS))
        if not isinstance(message, Bytes):
            raise RecordsError(f"a {type(message).__name__} where bytes were due", where=self._link.peer)
        found = checked(self._requests, iteration, spans, message, payload)
        if [(at, len(piece)) for at, piece in found] != spans:
            lacking = most - sum(len(piece) for _, piece in found)
            raise Lacking(message.why or f"{lacking} bytes came over no mirror of its source")
        return [piece for _, piece in found]

    def _ask(self, question: Any, limits: Limits) -> tuple[Any, bytearray]:
        self._link.send(question, seconds=PEER_SECONDS)
        self._link.limits = lambda: limits
        message, size = self._link.receive(wait=2 * PEER_SECONDS)
        if isinstance(message, Refused):
            raise RecordsError(f"refused: {message.why}", where=self._link.peer)
        return message, self._link.payload(size)

    def _specs(self) -> dict[str, TensorSpec]:
        model = self._plan.job.model if self._plan is not None else ()
        return {f"buffer.{one.name}": TensorSpec(one.dtype, tuple(one.shape)) for one in model if one.kind == "buffer"}


class Lacking(FlowcheckError):
    """An iteration is not there, or not all of it."""


def _parts(places: tuple[BucketPlace, ...]) -> list[list[tuple[int, int, int]]]:
    """What is asked for at once: (bucket, first byte in it, bytes), PEER_BYTES at most together."""
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = PEER_BYTES
    for index, place in enumerate(places):
        at = 0
        while at < place.nbytes:
            if room < 8 or len(parts[-1]) >= 1024:
                parts.append([])
                room = PEER_BYTES
            length = min(place.nbytes - at, room // 8 * 8)
            parts[-1].append((index, at, length))
            at, room = at + length, room - length
    return [part for part in parts if part]


class _Group:
    """One of a source's groups: a thread, and the connection that it keeps. journal: of the run that it follows now."""

    def __init__(self, owner: Journaling, shard: str) -> None:
        self._owner, self._shard = owner, shard
        self.journal: Journal | None = None
        self._said = ""
        self._reading: Reading | None = None
        self.thread = threading.Thread(target=self._main, daemon=True, name=f"flowcheck journal of {shard}")

    def end(self) -> None:
        if self._reading is not None:
            self._reading.close()

    def _main(self) -> None:
        ending = self._owner.ending
        while not ending.is_set():
            journal = self.journal
            try:
                if journal is not None:
                    self._reading = self._owner.read(self._shard, journal)
                    self._follow(self._reading, journal)
            except Exception as error:  # also of a library: it must not end the thread without a word
                self._said = self._owner.lost(self._shard, error, self._said)
            finally:
                self.end()
            ending.wait(PAUSE_SECONDS)

    def _follow(self, reading: Reading, journal: Journal) -> None:
        """Iteration after iteration, until another run is followed. Raises FlowcheckError, OSError."""
        wanted = max(journal.entries, default=-1) + 1
        while not self._owner.ending.is_set() and self.journal is journal:
            entry = reading.entry(wanted)
            if entry.job:
                wanted = max(entry.newest, entry.first)
            elif not entry.plan:
                return
            elif not entry.why:
                try:
                    reading.keep(entry)
                    self._said = ""
                except Lacking as error:
                    self._owner.gap(self._shard, wanted, error.what)
                wanted += 1
            elif entry.newest >= wanted:
                self._owner.gap(self._shard, wanted, entry.why)
                wanted = max(entry.newest, wanted + 1)
