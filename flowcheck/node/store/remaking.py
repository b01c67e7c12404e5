"""A step made again of a store alone: a version, and the deltas after it (checkpoint/deltas.py).

    path = remake_stored(objects, folder, step, into, threads, say)      a checkpoint; raises FlowcheckError

The updates are those of a node's own journal (versions/journal/remaking.py), with the same proof: every byte of the
version is held against its hashes, every part and sum of a delta is checked, and where a record has checksums of the
trainer the version is compared with them. Of a store that lies no step is made.

The process: python -P -m flowcheck.node.store.remaking, started by made.py. stdin: one line of JSON, its settings. It
ends when the step is there, when it cannot be made, when stdin ends, or when no byte has moved for so many seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from flowcheck.checkpoint.deltas import Chain, Deltas, Span, way
from flowcheck.checkpoint.directory import MANIFEST, step_path
from flowcheck.checkpoint.objects import Objects, open_store
from flowcheck.checkpoint.read_back import CHUNK
from flowcheck.checkpoint.store import read_entry
from flowcheck.checkpoint.stored import Entry
from flowcheck.durable import make_directory, new_directory, remove_tree, write_synced
from flowcheck.errors import FlowcheckError
from flowcheck.job.version_status import VersionStatus
from flowcheck.journal.entry_file import entry_in
from flowcheck.journal.reader import Followed
from flowcheck.node.process.child import begun, guarded
from flowcheck.node.store.border import StoredRemakeSettings
from flowcheck.node.versions.journal.border import Said
from flowcheck.node.versions.journal.folders import Place
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.node.versions.journal.remaking import WORK, made_of

__all__ = ["main", "remake_stored"]

LOOK_SECONDS = 0.5


def remake_stored(
    objects: Objects, folder: str, step: int, into: Path, threads: int,
    say: Callable[[int], None] = lambda done: None, moving: Callable[[], None] = lambda: None,
) -> Path:
    """folder: of the version that is begun with, in the store. into: where the step is to lie, of this line alone. say:
    how many steps of the way are done, of twice as many: to read the base counts as one for each. moving: called as
    bytes come. Disk: two states and the largest delta; memory: two states."""
    entry = read_entry(objects, folder)
    begun, where = entry.version, f"{objects.url.rstrip('/')}/{folder}"
    if entry.line is None or VersionStatus.of(begun.status).diverged:
        raise FlowcheckError("no step can be made of this version", where=where)
    deltas, base = Deltas(objects, entry.deltas, moving), into / f"{WORK}-base"
    listed, steps = deltas.listed(), step - begun.step
    spans = way(begun.step, step, listed.spans) if listed.ends is None or step <= listed.ends else []
    if not spans:
        raise FlowcheckError(f"step {step} cannot be made of step {begun.step}: the gradients between them are not all"
                             " in the store", where=where, remedy="a step that `flowcheck rewind` lists")
    make_directory(into)
    remove_tree(base)
    try:
        path = _brought(objects, entry, base, lambda done: say(int(steps * done)), moving)
        with TemporaryFile(dir=into) as file:
            reader = _Reader(deltas, entry.chain, spans, file)
            job = _job(deltas, entry.chain.plan, where)
            return made_of(job, Place(entry.chain.line, begun.step, path), reader.following, into, into / WORK, step,
                           threads, lambda made: say(steps + made), where)
    finally:
        remove_tree(base)


def _job(deltas: Deltas, plan: str, where: str) -> JobText:
    """Raises FlowcheckError: it is another one's."""
    try:
        job = JobText.of_said(deltas.job())
    except (ValueError, KeyError, TypeError) as error:  # UserError is a ValueError
        raise FlowcheckError(f"the job of these deltas cannot be read: {error}", where=where) from None
    if job.plan != plan:
        raise FlowcheckError("the deltas are of another job than the version", where=where)
    return job


def _brought(
    objects: Objects, entry: Entry, into: Path, say: Callable[[float], None], moving: Callable[[], None]
) -> Path:
    """The version as a checkpoint directory, which `load_step` then holds against its hashes. say: which part of it is
    here."""
    new_directory(into)
    path = step_path(into, entry.version.step)
    new_directory(path)
    files = entry.document["files"]
    total, done = sum(one["bytes"] for one in files.values()) or 1, 0
    for name, one in files.items():
        def pieces(name: str = name, size: int = one["bytes"]) -> object:
            nonlocal done
            at = 0
            while at < size and (piece := objects.read(f"{entry.folder}/{name}", at, min(CHUNK, size - at))):
                yield piece
                at, done = at + len(piece), done + len(piece)
                moving()
                say(done / total)

        write_synced(path / name, pieces())  # type: ignore[arg-type]
    write_synced(path / MANIFEST, [entry.text])
    return path


class _Reader:
    """Entries one after the other, a delta at a time."""

    def __init__(self, deltas: Deltas, chain: Chain, spans: list[Span], file: BinaryIO) -> None:
        self._deltas, self._chain, self._spans, self._file = deltas, chain, spans, file
        self._begins: list[int] = []
        self._here: Span | None = None

    def following(self, numbers: Sequence[int]) -> Iterator[Followed]:
        """As of RingReader. Raises UserError, EnvironmentProblem."""
        return map(self._read, numbers)

    def _read(self, number: int) -> Followed:
        span = next(one for one in self._spans if one.first <= number <= one.last)
        if span is not self._here:
            sizes = self._deltas.read(span, self._chain, self._file)
            self._begins, self._here = [sum(sizes[:index]) for index in range(len(sizes))], span
        said, head, spans = entry_in(self._file.fileno(), self._begins[number - span.first], span.name)
        if said != number:
            raise FlowcheckError(f"iteration {said} lies where {number} should", where=span.name)
        return Followed(head, spans)


# -- the process -----------------------------------------------------------------------------------------------------


def main() -> int:
    """The process itself."""
    said = begun(StoredRemakeSettings)
    if said is None:
        return 0
    began, moved = time.monotonic(), [time.monotonic()]
    threading.Thread(target=_watch, daemon=True).start()
    threading.Thread(target=_look, args=(moved, said.seconds), daemon=True).start()

    def moving() -> None:
        moved[0] = time.monotonic()

    def tell(done: int) -> None:
        moving()
        _say(Said(steps=done))

    try:
        objects = open_store(said.url, said.options)
        path = remake_stored(objects, said.base, said.step, said.into, said.threads, tell, moving)
    except FlowcheckError as error:
        _say(Said(why=error.message()))
        return 0
    _say(Said(path=path, seconds=time.monotonic() - began))
    return 0


def _say(one: Said) -> None:
    sys.stdout.buffer.write(one.encoded())
    sys.stdout.buffer.flush()


def _look(moved: list[float], seconds: float) -> None:
    """A store that hangs is not waited for: nothing else can be made meanwhile."""
    while time.monotonic() - moved[0] < seconds:
        time.sleep(LOOK_SECONDS)
    _say(Said(why=f"no byte has come from the store for {seconds:g} s"))
    os._exit(1)


def _watch() -> None:
    """Whoever wanted it has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(guarded(main))
