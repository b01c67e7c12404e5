"""What a node has to recover from: versions in its replica files, and those that it wrote to disk.

    shelf = MemoryShelf(directory, node) or DiskShelf(directory)
    for holding in shelf.look(): holding.offer           what there is at this moment
    held = shelf.hold(id)                                pinned, to be read (held.py); the same again while it is
    shelf.expire()                                       again and again: lets go of what nobody reads any more
    shelf.withheld(offer)                                why it cannot be pinned although it is there: shadow.py

It reads the files that the node's process writes and nothing else, so it may live in another process and outlive that
one. A version in memory is pinned from the first question about it on, because its slot is needed again. A pin can hold
up updates (never the capture), so there are at most as many as leave a replica two slots, each ends HOLD_SECONDS after
the last byte that was read, and none lasts longer than its bytes take at RATE. A replica that its node has removed,
because it found it to be wrong, is served no more, not even its rest.

A shelf belongs to one thread.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowcheck.ask.offer import DISK, MEMORY, Offer, spans
from flowcheck.checkpoint.directory import MANIFEST, read_step_manifest
from flowcheck.checkpoint.users import users_of
from flowcheck.control.message_fields import GROUP
from flowcheck.control.version import Version
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.version_status import DIVERGED, VersionStatus
from flowcheck.node.versions.divergences import Notices
from flowcheck.node.versions.hashing import Hashers
from flowcheck.node.versions.held import Gone, Held, Holding, InMemory, OnDisk, Vouch, inode_of
from flowcheck.node.versions.shadow import withheld
from flowcheck.node.versions.user_states import ranks_in, user_folder
from updater.errors import UpdaterError
from updater.reader import Reader

__all__ = ["DiskShelf", "MemoryShelf", "Pressed", "Shelf", "Withheld", "id_of", "in_order", "offered"]


class Withheld(FlowcheckError):
    """There is such a version, and it is not offered yet."""

    exit_code = 3


class Pressed(FlowcheckError):
    """As many versions are being read as may be."""

    exit_code = 3


class Shelf:
    """Versions of one tier. now: a clock. needs: checksums that must have matched before one of them is offered. piece:
    bytes that are read at once, 0: as many as usual."""

    piece = 0
    notices: Notices | None = None  # of versions that have diverged

    def __init__(self, now: Callable[[], float] = time.monotonic, needs: int = 0) -> None:
        self._now, self._needs = now, needs
        self._held: dict[str, Held] = {}

    def look(self) -> list[Holding]:
        """Everything that there is, newest first."""
        raise NotImplementedError

    def known(self) -> list[Holding]:
        """Among which one that is asked for is looked for."""
        return self.look()

    def having(self, step: int | None) -> list[Holding]:
        """All that is there, and what can be made of this step, which `hold` takes, too; None: of none."""
        return self.look()

    def ranges(self) -> list[dict[str, Any]]:
        """Steps that can be had or made, for people: docs/use/rewind.md."""
        return []

    def hold(self, id: str) -> Held:
        """Pin a version, or touch one that is held. Raises Gone, Pressed, Withheld."""
        self.expire()
        if id in self._held and (why := self.withheld(self._held[id].offer)):  # it has been found meanwhile
            self._held.pop(id).close()
            raise Withheld(why)
        if id not in self._held:
            holding = next((one for one in self.known() if one.offer.id == id), None)
            if holding is None:
                raise Gone("there is no such version, or no longer", where=id[:64])
            if why := self.withheld(holding.offer):
                raise Withheld(why)
            self._held[id] = self._pin(holding)
        held = self._held[id]
        held.touch(self._now())
        held.asked += 1
        return held

    def release(self, held: Held) -> None:
        """Let go of what was held for one question, if nobody has asked anything else of it."""
        if held.asked == 1 and not held.busy and self._held.get(held.offer.id) is held:
            held.close()
            del self._held[held.offer.id]
        held.asked -= 1

    def withheld(self, offer: Offer) -> str:
        """Why it is not offered, "": it is."""
        return withheld(self.judged(offer), self._needs)

    def judged(self, offer: Offer) -> Offer:
        """With what has been found of it since it was made."""
        if self.notices is None or not self.notices.cover(
                offer.run_id, offer.epoch, offer.shard, offer.step, offer.status):
            return offer
        return replace(offer, status=DIVERGED)

    def _pin(self, holding: Holding) -> Held:
        raise NotImplementedError

    def expire(self) -> None:
        """Let go of what is due."""
        now = self._now()
        for id, held in list(self._held.items()):
            if held.is_due(now) or held.is_gone():
                held.close()
                del self._held[id]

    def close(self) -> None:
        for held in self._held.values():
            held.close()
        self._held = {}


class MemoryShelf(Shelf):
    """directory: `replica.directory` of the node of this name. reserved: slots that others may pin at the same time.
    vouch: gives Version.attached."""

    piece = 16 << 20  # which is no copy; each costs a turn of two threads

    def __init__(
        self, directory: Path, node: str, now: Callable[[], float] = time.monotonic, reserved: int = 0, needs: int = 0,
        vouch: Vouch = lambda run_id, epoch: "",
    ) -> None:
        super().__init__(now, needs)
        self.vouch = vouch
        self._directory, self._reserved = directory, reserved
        self._name = re.compile(rf"flowcheck-{re.escape(node)}-({GROUP.pattern})-[0-9]+\.replica")
        self._readers: dict[tuple[Path, int], Reader] = {}
        self._kept: dict[str, bytes] = {}
        self._hashers = Hashers()

    def look(self) -> list[Holding]:
        there: dict[tuple[Path, int], str] = {}
        for path in self._directory.glob("*.replica"):
            if (named := self._name.fullmatch(path.name)) and (inode := inode_of(path)):
                there[path, inode] = named[1]
        for key in self._readers.keys() - there.keys():
            self._readers.pop(key).close()
        found = in_order(one for key, shard in there.items() for one in self._slots(key, shard))
        for id in self._kept.keys() - self._held.keys() - {one.offer.id for one in found}:
            self._kept.pop(id, None)  # its slot has another version: nobody can ask for this one again
        return found

    def _slots(self, key: tuple[Path, int], shard: str) -> Iterator[Holding]:
        try:
            reader = self._readers[key] = self._readers.get(key) or Reader(key[0], mine=True)
        except (UpdaterError, OSError):
            return  # torn, of another format, or gone meanwhile
        heard, times, matches, now = reader.heard, reader.times, reader.matches, time.time()
        for step, status in reader.statuses.items():
            steps, at = None if heard is None else max(heard - step, 0), times.get(step)
            yield Holding(Offer(
                id_of(MEMORY, *key, step), MEMORY, reader.run_id, reader.epoch, step, shard,
                str(VersionStatus.of(status, step)), reader.nbytes,
                spans(ranks_in(user_folder(key[0], step))), steps, None if at is None else round(max(now - at, 0.0), 3),
                matches.get(step, 0), reader.start,
            ), *key)

    def _pin(self, holding: Holding) -> Held:
        reader = self._readers[holding.path, holding.inode]
        pinned = [held for held in self._held.values() if held.path == holding.path]
        if len(pinned) >= max(1, reader.slots - 2 - self._reserved):
            steps = ", ".join(str(held.offer.step) for held in pinned)
            raise Pressed(f"step {steps} is being read, and no slot is left for another", where=holding.path.name)
        return InMemory(holding, reader, self._kept, self._hashers, self._now(), self.vouch)

    def expire(self) -> None:
        """Also of replicas that were removed: their memory is free when nobody maps them any more."""
        super().expire()
        for key in [key for key in self._readers if inode_of(key[0]) != key[1]]:
            self._readers.pop(key).close()

    def close(self) -> None:
        super().close()
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._hashers.close()


class DiskShelf(Shelf):
    """directory: `output.directory` of the node: DIR/RUN/epoch-E/step-N, with the group's folder before the run's if
    it has a name. tier: or COPY: copies of other nodes' versions, with the folder of their source before the run's."""

    def __init__(
        self, directory: Path, now: Callable[[], float] = time.monotonic, tier: str = DISK, needs: int = 0
    ) -> None:
        super().__init__(now, needs)
        self._directory, self._tier = directory, tier
        # By what changes when its manifest does: its offer, and what it says of run and epoch.
        self._steps: dict[tuple[Path, int, int], tuple[Offer, str] | None] = {}

    def look(self) -> list[Holding]:
        seen: dict[tuple[Path, int, int], tuple[Offer, str] | None] = {}
        for depth in ("*/epoch-*/step-*", "*/*/epoch-*/step-*"):
            for path in self._directory.glob(depth):
                if inode := inode_of(path):
                    key = path, inode, inode_of(path / MANIFEST)
                    seen[key] = self._steps[key] if key in self._steps else offered(path, inode, self._tier)
        self._steps = seen
        return in_order(Holding(one[0], *key[:2], one[1]) for key, one in seen.items() if one is not None)

    def _pin(self, holding: Holding) -> Held:
        return OnDisk(holding, self._now())


def offered(path: Path, inode: int, tier: str) -> tuple[Offer, str] | None:
    """What a step's directory says of itself, and what is said in it of its run and epoch; None: it cannot be used."""
    try:
        document: dict[str, Any] = read_step_manifest(path)
        version = Version.of(document, str(path))
    except UserError:
        return None
    return Offer(id_of(tier, path, inode, version.step), tier, version.run_id, version.epoch, version.step,
                 version.shard, version.status, version.nbytes, spans(users_of(document)), matches=version.matches,
                 start=version.start), version.attached


def in_order(found: Iterable[Holding]) -> list[Holding]:
    """Newest first."""
    return sorted(found, key=lambda one: (-one.offer.epoch, -one.offer.step, one.path))


def id_of(tier: str, path: Path, inode: int, step: int) -> str:
    """A name from which no path can be made. Its first letter is the tier's."""
    return tier[0] + hashlib.sha256(f"{path} {inode} {step}".encode()).hexdigest()[:31]
