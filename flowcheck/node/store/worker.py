"""The process that writes a node's versions to its store: python -P -m flowcheck.node.store.worker (supervisor.py).

stdin: one line of JSON, its settings; it ends when stdin does. stdout: events, a line of JSON each. It looks into the
replica files many times a second, pins what is due and uploads it on a thread of the group's own, so whatever a store
does, the node sees a pinned slot and nothing else. With `deltas` it reads the node's journals, too (journals.py). A
store from which no byte moves for `seconds` ends this process: a thread that hangs cannot be ended in another way, and
with the process the pins go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowcheck.ask.offer import Offer
from flowcheck.checkpoint.directory import Meta
from flowcheck.checkpoint.objects import Objects, open_store
from flowcheck.checkpoint.store import Lane
from flowcheck.control.divergence import Divergence
from flowcheck.control.proof import node_key, voucher
from flowcheck.control.start import line_of
from flowcheck.durable import let_read
from flowcheck.errors import FlowcheckError, said_of
from flowcheck.node.config.tokens import read_token
from flowcheck.node.process.child import Lines, begun, guarded
from flowcheck.node.store.border import EVENTS, StoreSettings
from flowcheck.node.store.journals import JournalUploads
from flowcheck.node.store.turns import FIRST_PAUSE, LONGEST_PAUSE, Turns, Wants, lane_name
from flowcheck.node.versions.divergences import Notices
from flowcheck.node.versions.held import Gone, Holding, files_of, inode_of
from flowcheck.node.versions.holdings import MemoryShelf
from flowcheck.node.versions.user_states import GATHER_SECONDS, ranks_in, steps_of, user_folder, users_in
from updater.errors import UpdaterError
from updater.reader import PinnedVersion, Reader

__all__ = ["HUNG", "Persister", "Wants", "lane_name", "main"]

LOOK_SECONDS = 0.02
END_SECONDS = 4.0  # that an upload has to end, when the node does
HUNG = 75  # exit status: the store does not answer
MARGIN = 1.25  # an upload has to be done before the next is due by this factor
MOST_LEFT_OUT = 1 << 20


@dataclass
class _Upload:
    """Of one replica file: its thread, and when which version was due. Steps of what was seen and stored."""

    name: str  # of the group
    old: bool  # the file was there before this process
    thread: threading.Thread | None = None
    moved: float = 0.0  # when bytes did
    began: float = 0.0
    seconds: float = 0.0  # that the last upload took
    due: float | None = None  # when a multiple of `every` was, last
    seen: int = 0  # the newest such multiple; nobody needs the state before the first step
    tried: float = float("-inf")  # when the last upload began
    step: int = 0  # that it was of
    pause: float = 0.0  # seconds; grows with each attempt that fails
    again: float = float("-inf")  # not before
    reads: bool = True  # its replica; otherwise it is through with that


class Persister:
    """shelf: the node's replicas. say(event, **fields). now: seconds for what is due; wall: of the day.
    covered: are versions like this one in the store by other ways?"""

    def __init__(
        self, objects: Objects, shelf: MemoryShelf, node: str, wants: Wants, say: Callable[..., None],
        now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
        turns: Turns | None = None, covered: Callable[[Offer], bool] = lambda offer: False,
    ) -> None:
        self._turns, self._covered = turns or Turns(), covered
        self._objects, self._shelf, self._node, self._wants = objects, shelf, node, wants
        self._say, self._now, self._wall = say, now, wall
        self._uploads: dict[tuple[Path, int], _Upload] = {}
        self._marked: set[Divergence] = set()
        self._marking: threading.Thread | None = None
        self._mark_again = float("-inf")
        self._first = True

    def look(self) -> None:
        """Begin what is due. Never waits."""
        there: dict[tuple[Path, int], list[Holding]] = {}
        for holding in self._shelf.look():
            there.setdefault((holding.path, holding.inode), []).append(holding)
        for key, holdings in there.items():
            upload = self._uploads.setdefault(key, _Upload(holdings[0].offer.shard, self._first))
            if self._covered(max(holdings, key=lambda one: one.offer.step).offer):
                continue
            if (holding_due := self._due(upload, {one.offer.step: one for one in holdings})) is not None:
                self._begin(upload, holding_due)
        for key in [key for key, one in self._uploads.items() if key not in there and not _alive(one)]:
            del self._uploads[key]
        self._first = False
        self._mark()

    def _mark(self) -> None:
        """Versions that have diverged are marked in the store, too, on a thread: the store may be slow."""
        found = set(self._shelf.notices.all) if self._shelf.notices is not None else set()
        if found <= self._marked or self._now() < self._mark_again or (
                self._marking is not None and self._marking.is_alive()):
            return
        self._marking = threading.Thread(target=self._mark_all, args=(found - self._marked,), daemon=True,
                                         name="flowcheck store marks")
        self._marking.start()

    def _mark_all(self, found: Collection[Divergence]) -> None:
        for one in found:
            name = lane_name(self._node, one.shard, one.run_id)
            try:
                with self._turns.of(name):  # after what is on its way
                    if folders := Lane(self._objects, name).mark_diverged(one):
                        self._say("marked", name=one.shard, steps=len(folders), newest=one.last,
                                  path=f"{self._objects.url.rstrip('/')}/{name}")
                self._marked.add(one)
            except Exception as error:  # also of a library: it must not end the thread without a word
                self._mark_again = self._now() + FIRST_PAUSE
                self._say("problem", name=one.shard, why=f"versions that have diverged are not marked in the store:"
                                                         f" {said_of(error)}")

    def hung(self) -> bool:
        """Whether there is an upload of which no byte has moved for too long."""
        late = [one for one in self._uploads.values() if _alive(one) and self._now() - one.moved > self._wants.seconds]
        for one in late:
            self._say("unstored", name=one.name, step=one.step, again=None,
                      why=f"{self._objects.url}: no byte has moved for {self._wants.seconds:g} s; its process is ended")
        return bool(late)

    def join(self, seconds: float) -> None:
        """Wait for what is under way, so long at most."""
        end = time.monotonic() + seconds
        for upload in self._uploads.values():
            if upload.thread is not None:
                upload.thread.join(max(0.0, end - time.monotonic()))

    def _due(self, upload: _Upload, there: Mapping[int, Holding]) -> Holding | None:
        """The version that is uploaded next, None: none now. A new multiple of `every` comes before what is due by
        time. there: by step, what the replica has."""
        every, now = self._wants.every, self._now()
        multiple = max((step for step in there if every and step % every == 0 and step > upload.seen), default=None)
        if multiple is not None:
            upload.seen = multiple
            return there[multiple] if self._in_turn(upload, multiple, now) else None
        timed = self._wants.minutes and now - upload.tried >= self._wants.minutes * 60
        if timed and not _alive(upload) and now >= upload.again and max(there) > upload.step:
            return there[max(there)]
        return None

    def _in_turn(self, upload: _Upload, step: int, now: float) -> bool:
        """Whether a multiple of `every` is written. Groups in lockstep share steps in the store: one that is slower
        leaves out by the number of the step, so what it has are among the faster one's (as output.py's Writer)."""
        stride = 1
        if upload.due is not None:
            while stride < MOST_LEFT_OUT and stride * (now - upload.due) < MARGIN * upload.seconds:
                stride *= 2
        upload.due = now
        if _alive(upload):
            upload.seconds = max(upload.seconds, now - upload.began)
            self._say("skipped", name=upload.name, step=step, why="an older version is still on its way to the store")
        elif now < upload.again:
            self._say("skipped", name=upload.name, step=step, why="the store failed a moment ago")
        elif step // self._wants.every % stride:
            self._say("skipped", name=upload.name, step=step, why=f"the store takes {upload.seconds:.1f} s for a"
                      f" version, so each {stride * self._wants.every}th step is written; raise store.every")
        else:
            return True
        return False

    def _begin(self, upload: _Upload, holding: Holding) -> None:
        now = self._now()
        upload.tried = upload.began = upload.moved = now
        upload.step, upload.reads = holding.offer.step, True
        stack = ExitStack()
        try:
            reader = stack.enter_context(closing(Reader(holding.path, run_id=holding.offer.run_id,
                                                        epoch=holding.offer.epoch, mine=True)))
            version = stack.enter_context(reader.pinned(holding.offer.step))
        except (UpdaterError, OSError) as error:
            stack.close()
            self._say("skipped", name=upload.name, step=holding.offer.step, why=f"it is there no more: {error}")
            return
        old, upload.old = upload.old, False
        upload.thread = threading.Thread(
            target=self._work, args=(upload, holding, reader.rounding, version, stack, old), daemon=True,
            name=f"flowcheck store {upload.name}",
        )
        upload.thread.start()

    # -- an upload's thread --

    def _work(
        self, upload: _Upload, holding: Holding, rounding: str, version: PinnedVersion, stack: ExitStack, old: bool
    ) -> None:
        with stack:
            name = lane_name(self._node, holding.offer.shard, holding.offer.run_id)
            stack.enter_context(self._turns.of(name, lambda: setattr(upload, "moved", self._now())))
            try:
                self._write(upload, holding, rounding, version, name, old)
            except Exception as error:  # also of a library: it must not end the thread without a word
                upload.pause = min(max(FIRST_PAUSE, 2 * upload.pause), LONGEST_PAUSE)
                upload.again, upload.tried, upload.step = self._now() + upload.pause, float("-inf"), 0
                self._say("unstored", name=upload.name, step=holding.offer.step, why=said_of(error), again=upload.pause)

    def _write(
        self, upload: _Upload, holding: Holding, rounding: str, version: PinnedVersion, name: str, old: bool
    ) -> None:
        offer = holding.offer

        def moving() -> None:
            upload.moved = self._now()
            if upload.reads and (inode_of(holding.path) != holding.inode or not version.is_there()):
                raise Gone("the node has removed it", where=f"step {offer.step}")

        lane = Lane(self._objects, name, moving, self._wall)
        moving()
        if old and any((one.version.epoch, one.version.step, line_of(one.version.start)) == (
                offer.epoch, offer.step, line_of(offer.start)) for one in lane.entries()[0]):
            return  # written before this process began
        meta = Meta(offer.run_id, offer.epoch, version.status, version.unproven, version.optimizer, rounding,
                    offer.shard, version.matches, offer.start, self._shelf.vouch(offer.run_id, offer.epoch))
        began = self._now()
        entry = lane.write(offer.step, files_of(version), meta, lambda: self._users(holding))
        upload.seconds, upload.pause, upload.reads = self._now() - began, 0.0, False
        self._say("stored", name=upload.name, step=offer.step, bytes=entry.version.nbytes,
                  seconds=round(upload.seconds, 3), path=f"{self._objects.url.rstrip('/')}/{entry.folder}")
        try:
            if gone := lane.tidy(self._wants.rules):
                self._say("expired", name=upload.name, versions=len(gone), path=gone[-1])
        except Exception as error:
            self._say("problem", name=upload.name, why=f"older versions stay in the store: {said_of(error)}")

    def _users(self, holding: Holding) -> dict[int, bytes]:
        """What ranks gave of themselves with that version; those that gave some with others are waited for a little."""
        replica, step = holding.path, holding.offer.step
        folder, end = user_folder(replica, step), time.monotonic() + GATHER_SECONDS
        others = {rank for near in steps_of(replica) for rank in ranks_in(user_folder(replica, near))}
        while others - set(ranks_in(folder)) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return users_in(folder)


def _alive(upload: _Upload) -> bool:
    return upload.thread is not None and upload.thread.is_alive()


# -- the process -----------------------------------------------------------------------------------------------------


def probe(objects: Objects, node: str) -> None:
    """Write, read and remove an object. Raises FlowcheckError."""
    name, data = f"{lane_name(node, '', 'probe')}/{secrets.token_hex(4)}", b"flowcheck"
    objects.put(name, [data])
    found = objects.read(name, 0, len(data))
    objects.remove(name)
    if found != data:
        raise FlowcheckError("gives other bytes than were written", where=objects.url)


def main() -> int:
    """The process itself."""
    settings = begun(StoreSettings)
    if settings is None:
        return 0
    let_read(settings.readable_by)
    stopping, say = threading.Event(), Lines(EVENTS)
    if not settings.probe:
        say.live()
    threading.Thread(target=_read_to_the_end, args=(stopping,), daemon=True).start()
    opened: list[Objects] = []
    opening = threading.Thread(target=_open, args=(settings, opened, say), daemon=True)  # a mount may hang, too
    opening.start()
    opening.join(settings.store.seconds)
    if not opened or settings.probe:
        if opening.is_alive():
            say("unstored", name="", step=None, again=None,
                why=f"{settings.store.url}: no answer within {settings.store.seconds:g} s")
        os._exit(0 if opened and not opening.is_alive() else HUNG)
    shelf = MemoryShelf(settings.replicas, settings.node, vouch=partial(_vouch, settings.token_file))
    shelf.notices = Notices(settings.replicas, settings.node)
    wants, turns = Wants.of(settings.store), Turns()
    journals = JournalUploads(opened[0], settings.journals, settings.node, wants, say, turns) if (
        settings.journals is not None) else None
    persister = Persister(opened[0], shelf, settings.node, wants, say, turns=turns,
                          covered=journals.covers if journals is not None else lambda offer: False)
    while not stopping.wait(LOOK_SECONDS):
        persister.look()
        if journals is not None:
            journals.look()
        if persister.hung() or (journals is not None and journals.hung()):
            os._exit(HUNG)
    end = time.monotonic() + END_SECONDS
    persister.join(END_SECONDS)
    if journals is not None:
        journals.look(at_once=True)  # what has come since the last round
        journals.join(end - time.monotonic())
    os._exit(0)  # threads that hang are not waited for


def _vouch(token_file: Path | None, run_id: str, epoch: int) -> str:
    """With the nodes' token as its file is now; "": it has none, or it cannot be read just now."""
    with contextlib.suppress(FlowcheckError):
        if token_file is not None:
            return voucher(node_key(read_token(token_file).encode()), run_id, epoch)
    return ""


def _open(settings: StoreSettings, opened: list[Objects], say: Callable[..., None]) -> None:
    try:
        objects = open_store(settings.store.url, settings.store.options)
        if settings.probe:
            probe(objects, settings.node)
        opened.append(objects)
    except Exception as error:
        say("unstored", name="", step=None, again=None, why=said_of(error))


def _read_to_the_end(stopping: threading.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    stopping.set()


if __name__ == "__main__":
    sys.exit(guarded(main))
