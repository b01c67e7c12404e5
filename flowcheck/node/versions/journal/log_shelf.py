"""Logs as a tier: steps that can be made of a base and the journal after it, by whoever has the job's optimizer.

    shelf = LogShelf(root)              root: of the node's journals
    held.size(FILE), held.views(FILE, first, count)       one file of all that it takes (flowcheck/ask/logs.py)

A log is offered once for each of its bases, the newest first, with the newest step and the oldest that can be made of
it: where one does not make what the trainer had, an older one may. Nothing of it is pinned: entries that the
journal has written over meanwhile are gone, and whoever reads them asks for a newer step. It reads what the node's own
process writes and nothing else. A shelf belongs to one thread.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from flowcheck.ask.logs import FILE, SCHEMA, makes
from flowcheck.ask.offer import LOG, Offer, Spans, rows, spans
from flowcheck.control.checksum import sum_text
from flowcheck.control.start import line_of as line_of_start
from flowcheck.control.version import seal
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.clock import Clock
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import Job, dtype_size
from flowcheck.job.version_status import UNVERIFIED
from flowcheck.journal.reader import Memory, RingReader
from flowcheck.node.versions.held import Gone, Held, Holding, inode_of
from flowcheck.node.versions.holdings import Shelf, id_of
from flowcheck.node.versions.journal.entries import line_of
from flowcheck.node.versions.journal.folders import Folder, folders_in
from flowcheck.node.versions.journal.log_bases import WholeBase, base_path, piece_path, whole_bases
from flowcheck.node.versions.journal.log_folder import About, log_folder, read_about, users_of
from flowcheck.node.versions.starts import Seen
from flowcheck.node.versions.user_states import ranks_in, steps_of, user_folder, user_in

__all__ = ["LogShelf", "logs_here", "makes_steps"]

NO_SUM = "0" * 16
COMING = 64  # steps whose own states may still be on their way


@dataclass(frozen=True)
class _Log:
    """entries: iterations that are there, without a hole, from the first that the base needs. heads, sizes: of these,
    as they are kept, and bytes of each as it is served. steps: that can be made. users: by step, whose own states lie
    there. ring: that the entries are read from; one that it fails at is not there at the next look."""

    folder: Path
    about: About
    base: WholeBase
    entries: range
    steps: range
    heads: tuple[bytes, ...]
    sizes: tuple[int, ...]
    users: Mapping[int, Spans]
    ring: RingReader

    @property
    def path(self) -> Path:
        return base_path(log_folder(self.folder), self.base.number)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(self.sizes)


class _Known:
    """What has been read of one folder, so that a look costs what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: RingReader | None = None
        self._job: tuple[About, Job] | None = None
        self._heads: dict[bytes, tuple[str, int]] = {}  # line, and bytes of the entry as it is served; of one plan
        self._users: dict[int, Spans] = {}  # by step
        self._plan = ""

    def job(self, about: About) -> Job:
        """Raises UserError."""
        if self._job is None or self._job[0] != about:
            self._job = about, job_from_dict(dict(about.job), where="job")
        return self._job[1]

    def ring(self) -> RingReader:
        """Raises FlowcheckError."""
        self._opened = self._opened or RingReader(self.folder / "ring")
        return self._opened

    def users(self) -> dict[int, Spans]:
        """By step, whose own states lie there. A step has all that it will have when newer ones have theirs."""
        place = users_of(self.folder)
        steps = sorted(steps_of(place))
        here = {step: self._users[step] for step in steps[:-COMING] if step in self._users}
        self._users = {step: here.get(step) or spans(ranks_in(user_folder(place, step))) for step in steps}
        return self._users

    def sound(self, about: About) -> dict[int, tuple[bytes, int]]:
        """Heads and sizes by iteration, up to where ranks have contradicted each other. Raises FlowcheckError, OSError.
        """
        before = self._heads if self._plan == about.plan else {}
        entries = self.ring().entries
        self._plan, self._heads = about.plan, {
            one.head: before.get(one.head) or _said_by(one.head, about.plan) for one in entries}
        ends: dict[str, int | None] = {}
        found: dict[int, tuple[bytes, int]] = {}
        for one in entries:
            line, nbytes = self._heads[one.head]
            if line and line not in ends:
                ends[line] = Folder(self.folder).ends(line)
            if line and ((last := ends[line]) is None or Clock().after(one.number) <= last):
                found[one.number] = one.head, nbytes
        return found


class LogShelf(Shelf):
    """root: where the node's journals lie."""

    def __init__(self, root: Path, **more: Any) -> None:
        super().__init__(**more)
        self._root = root
        self._known: dict[Path, _Known] = {}  # by folder
        self._logs: dict[Path, _Log] = {}  # by path, as of the last look

    def look(self) -> list[Holding]:
        paths = [folder.path for folder in folders_in(self._root)]
        self._known = {path: self._known.get(path) or _Known(path) for path in paths}
        self._logs = {log.path: log for known in self._known.values() for log in _logs_in(known)}
        return [self._holding(log) for log in self._logs.values()]

    def _holding(self, log: _Log) -> Holding:
        about, step, path = log.about, log.steps[-1], log.path
        users = {one: found for one in log.steps if (found := log.users.get(one))}
        return Holding(Offer(
            id_of(LOG, path, inode_of(path), step), LOG, about.run_id, about.epoch, step, about.shard, UNVERIFIED,
            log.nbytes, users.get(step, ()), start=about.start, oldest=log.steps[0], users=rows(users),
        ), path, inode_of(path))

    def _pin(self, holding: Holding) -> Held:
        return LogHeld(holding, self._logs[holding.path], self._now())


class LogHeld(Held):
    def __init__(self, holding: Holding, log: _Log, now: float) -> None:
        super().__init__(holding, now)
        self._log = log
        self._head = self._head_of(log)
        sizes = [len(self._head), *(piece.nbytes for piece in log.base.pieces), *log.sizes]
        self._begins = [0, *accumulate(sizes)]
        self._fronts: dict[int, tuple[bytes, list[int]]] = {}  # of entries that were found whole: front, sizes of spans
        self._memory = Memory()

    @staticmethod
    def _head_of(log: _Log) -> bytes:
        about = log.about
        text = json.dumps(seal({
            "schema": SCHEMA, "run_id": about.run_id, "epoch": about.epoch, "shard": about.shard, "first": about.first,
            "job": dict(about.job), "pieces": [[one.step, one.nbytes, one.sum] for one in log.base.pieces],
            "entries": [[number, size] for number, size in zip(log.entries, log.sizes, strict=True)],
        })).encode()
        return len(text).to_bytes(8, "little") + text

    def manifest(self) -> bytes:
        return self._head[8:]

    def size(self, file: str) -> int:
        if file != FILE:
            raise Gone("a log has no such file", where=file)
        return self._begins[-1]

    def read(self, file: str, first: int, count: int) -> bytes:
        return b"".join(self.views(file, first, count))

    def views(self, file: str, first: int, count: int) -> list[memoryview]:
        """Up to what cannot be had: that raises Gone where it comes first."""
        self.check()
        out: list[memoryview] = []
        at, end = first, min(first + count, self.size(file))
        while at < end:
            part = bisect_right(self._begins, at) - 1
            begin = at - self._begins[part]
            try:
                found = list(self._views(part, begin, min(end, self._begins[part + 1]) - at))
            except Gone:
                if out:
                    break
                raise
            out += found
            at += sum(map(len, found))
        return out

    def _views(self, part: int, begin: int, count: int) -> Iterator[memoryview]:
        if part == 0:
            yield memoryview(self._head)[begin : begin + count]
            return
        pieces = len(self._log.base.pieces)
        if part <= pieces:
            yield _some(piece_path(log_folder(self._log.folder), self._log.base.number, part - 1), begin, count)
            return
        index = part - pieces - 1
        front, sizes = self._front_of(index)
        if begin < len(front):
            yield memoryview(front)[begin : begin + count]
            count -= len(front[begin : begin + count])
        begin = max(0, begin - len(front))
        for span, size in enumerate(sizes):
            if begin < size and count > 0:
                yield self._span(index, span, begin, min(count, size - begin))
                count -= min(count, size - begin)
            begin = max(0, begin - size)

    def _front_of(self, index: int) -> tuple[bytes, list[int]]:
        """Of an entry, which is read whole for it, once for all who ask. Raises Gone: it is there no more, or damaged.
        """
        if index not in self._fronts:
            number = self._log.entries[index]
            try:
                head, found = self._log.ring.read(number, self._memory)
            except FlowcheckError as error:
                raise Gone(error.what, where=error.where) from None
            if head != self._log.heads[index]:
                raise Gone("was written anew", where=f"iteration {number}")
            sums = [(len(one), sum_text(one.data)) for one in found]
            self._fronts[index] = _front(head, sums), [size for size, _ in sums]
        return self._fronts[index]

    def _span(self, index: int, span: int, first: int, count: int) -> memoryview:
        """Raises Gone."""
        try:
            return memoryview(self._log.ring.part(self._log.entries[index], self._fronts[index][1], span, first, count))
        except FlowcheckError as error:
            raise Gone(error.what, where=error.where) from None

    def user_of(self, step: int, rank: int) -> bytes:
        return self._user(lambda: user_in(user_folder(users_of(self._log.folder), step), rank))

    def user(self, rank: int) -> bytes:
        return self.user_of(self.offer.step, rank)

    def close(self) -> None:
        self._memory = Memory()


def logs_here(root: Path, run_id: str) -> list[Seen]:
    """The newest step of each log of a run: another start that makes it again is numbered otherwise."""
    found = (log for folder in folders_in(root) for log in _logs_in(_Known(folder.path))[:1])
    return [Seen(log.about.epoch, log.steps[-1], line_of_start(log.about.start) or log.about.start)
            for log in found if log.about.run_id == run_id]


def makes_steps(folder: Path) -> bool:
    """Can any be made of the log in this folder of a run?"""
    return bool(_logs_in(_Known(folder)))


def _logs_in(known: _Known) -> list[_Log]:
    """Of each base in a folder of a run, of which steps can be made: the newest steps first, then the newest base.
    Entries belong to a base from its first iteration on, whatever line they are of, up to the first that is not
    there."""
    folder = known.folder
    about = read_about(folder)
    if about is None:
        return []
    try:
        job, found, ring = known.job(about), known.sound(about), known.ring()
    except (FlowcheckError, OSError):
        return []
    logs, users = [], known.users()
    for base in whole_bases(log_folder(folder)):
        first = last = base.first
        while last in found:
            last += 1
        entries = range(first, last)
        steps = makes(job, [piece.step for piece in base.pieces], entries)
        if steps:
            heads, sizes = zip(*(found[number] for number in entries), strict=True) if entries else ((), ())
            logs.append(_Log(folder, about, base, entries, steps, heads, sizes, users, ring))
    return sorted(logs, key=lambda log: (log.steps[-1], log.base.number), reverse=True)


def _some(path: Path, begin: int, count: int) -> memoryview:
    """Raises Gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, count, begin)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Gone(f"cannot be read: {error.strerror}", where=path.name) from None
    if not data:
        raise Gone(f"ends at byte {begin}", where=path.name)
    return memoryview(data)


def _front(head: bytes, sums: list[tuple[int, str]]) -> bytes:
    """What an entry begins with."""
    said = json.dumps([list(one) for one in sums]).encode()
    text = b'{"head": ' + head + b', "spans": ' + said + b"}"
    return len(text).to_bytes(8, "little") + text


def _said_by(head: bytes, plan: str) -> tuple[str, int]:
    """Line of an entry and its bytes as it is served; "": it is of another job, or nothing that can be read."""
    try:
        sizes = _sizes(head)
    except UserError:
        return "", 0
    return line_of(head, plan), len(_front(head, [(size, NO_SUM) for size in sizes])) + sum(sizes)


def _sizes(head: bytes) -> list[int]:
    """Of its spans. Raises UserError."""
    try:
        return [dtype_size(dtype) * elements for dtype, elements in json.loads(head)["spans"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError("a head of an entry cannot be read", where="journal") from None
