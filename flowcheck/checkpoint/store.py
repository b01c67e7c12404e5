"""Versions in a store (objects.py): written so that a half one is never taken for one, and removed by rules.

    URL/NODE/GROUP/RUN/latest.json                         the pointer: which version was finished last
                       epoch-0/step-000020.3f9a12c4/       a version, in a folder that no other attempt writes to
                           model.safetensors               as in a checkpoint directory (directory.py)
                           optimizer.safetensors
                           user/rank-00003.safetensors
                           manifest.json                   when all of that was read back and found to be right
                       (GROUP is "-" for a group without a name)

    lane = Lane(objects, "NODE/GROUP/RUN")
    entry = lane.write(epoch, step, files, about, users)   tensors, users, manifest, pointer, in this order
    lane.tidy(Rules(keep=3), now)                          what may go, but never what the pointer names

A folder without a manifest is an attempt that was cut, not a version. One process at a time writes to a lane, the
node's own, and it removes nothing else. Any call may raise StoreError; what is there then stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flowcheck.checkpoint.directory import MANIFEST, Meta, step_manifest
from flowcheck.checkpoint.files import FileStream
from flowcheck.checkpoint.objects import Missing, Objects, StoreError
from flowcheck.control.divergence import Divergence
from flowcheck.control.start import line_of
from flowcheck.control.version import Version, seal, self_hash
from flowcheck.errors import UserError
from flowcheck.job.version_status import DIVERGED, VersionStatus

__all__ = ["LATEST", "UNNAMED", "Entry", "Lane", "Rules", "expired", "read_entry", "user_object"]

LATEST, LATEST_SCHEMA = "latest.json", "flowcheck/latest/1"
UNNAMED = "-"  # the folder of a group without a name; no group's name has a hyphen
MOST_TEXT = 256 << 20  # of a manifest
MOST_POINTER = 1 << 16
MOST_SECONDS = 1e12  # since 1970
CHUNK = 8 << 20
_FOLDER = re.compile(r"epoch-([0-9]{1,18})/step-([0-9]{1,18})\.[0-9a-f]{8}")


@dataclass(frozen=True)
class Entry:
    """A version that has its manifest. folder: its name in the store. stored: seconds since 1970, when it was."""

    folder: str
    version: Version
    document: Mapping[str, Any]
    text: bytes

    @property
    def order(self) -> tuple[int, str, int, float]:
        return self.version.epoch, line_of(self.version.start), self.version.step, self.stored

    @property
    def stored(self) -> float:
        said = self.document.get("stored", 0)
        return float(said) if isinstance(said, int | float) and 0 <= said < MOST_SECONDS else 0.0


@dataclass(frozen=True)
class Rules:
    """A version stays if any of them holds. keep: it is one of so many newest. seconds: it is not older. every: it is
    the first in its stretch of so many steps; such ones stay for ever. None set: all stay."""

    keep: int = 0
    seconds: float = 0.0
    every: int = 0


def expired(entries: Iterable[Entry], rules: Rules, now: float, latest: str) -> list[Entry]:
    """Which versions may go, oldest first. latest: the folder that the pointer names."""
    if not rules.keep and not rules.seconds:
        return []
    ordered = sorted(entries, key=lambda one: one.order)
    newest = ordered[-rules.keep :] if rules.keep else []
    stays = {latest} | {one.folder for one in newest}
    stretches: set[tuple[int, int]] = set()
    for one in ordered:
        stretch = one.version.epoch, one.version.step // rules.every if rules.every else -1
        if rules.every and stretch not in stretches:
            stays.add(one.folder)
        stretches.add(stretch)
        if rules.seconds and now - one.stored <= rules.seconds:
            stays.add(one.folder)
    return [one for one in ordered if one.folder not in stays]


def read_entry(objects: Objects, folder: str) -> Entry:
    """A version's manifest, if its objects have the sizes that it says. Raises Missing: it does not exist; StoreError;
    UserError: it is damaged."""
    name = f"{folder}/{MANIFEST}"
    text = _small(objects, name, MOST_TEXT)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("is not JSON", where=name) from None
    version = Version.of(document, name)
    for file, entry in document["files"].items():
        size = objects.size(f"{folder}/{file}")
        if size != entry.get("bytes"):
            raise UserError(f"{file} has {size} bytes, the manifest says {entry.get('bytes')}", where=folder)
    return Entry(folder, version, document, text)


def _small(objects: Objects, name: str, most: int) -> bytes:
    size = objects.size(name)
    if size > most:
        raise UserError(f"has {size} bytes", where=name)
    return objects.read(name, 0, size)


def user_object(folder: str, rank: int) -> str:
    return f"{folder}/user/rank-{rank:05d}.safetensors"


class Lane:
    """What one node writes of one group's run. name: its folder. moving: called whenever bytes have moved, and may
    raise, which ends what is under way."""

    def __init__(
        self, objects: Objects, name: str, moving: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects, self._name, self._moving, self._clock = objects, name, moving, clock
        self._entries: dict[str, Entry] = {}  # that were read: nobody else changes a version

    def write(
        self, step: int, files: Mapping[str, Mapping[str, torch.Tensor]], meta: Meta,
        users: Callable[[], Mapping[int, bytes]],
    ) -> Entry:
        """Write a version and let the pointer name it. users: called when the tensors are there."""
        folder = f"{self._name}/epoch-{meta.epoch}/step-{step:06d}.{secrets.token_hex(4)}"
        written: dict[str, Any] = {}
        for file, tensors in files.items():
            stream = FileStream(tensors)
            self._put(f"{folder}/{file}", stream.pieces())
            written[file] = stream.entry()
            self._verify(f"{folder}/{file}", written[file])
        given = {}
        for rank, data in sorted(users().items()):
            self._put(user_object(folder, rank), [data])
            given[str(rank)] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            self._verify(user_object(folder, rank), given[str(rank)])
        document = step_manifest(step, meta, written, given, stored=round(self._clock(), 3))
        text = json.dumps(document, indent=1).encode() + b"\n"
        self._objects.replace(f"{folder}/{MANIFEST}", text)
        self._same(f"{folder}/{MANIFEST}", text)
        pointer = seal({
            "schema": LATEST_SCHEMA, "folder": folder.removeprefix(f"{self._name}/"), "epoch": meta.epoch,
            "step": step, "version_sha256": document["manifest_sha256"],
        })
        text_of_pointer = json.dumps(pointer, indent=1).encode() + b"\n"
        self._objects.replace(f"{self._name}/{LATEST}", text_of_pointer)
        self._same(f"{self._name}/{LATEST}", text_of_pointer)
        entry = Entry(folder, Version.of(document, folder), document, text)
        self._entries[folder] = entry
        return entry

    def latest(self) -> str:
        """The folder that the pointer names, "": the pointer is missing, or cannot be read."""
        try:
            said = json.loads(_small(self._objects, f"{self._name}/{LATEST}", MOST_POINTER))
        except (Missing, ValueError, RecursionError):  # UserError is a ValueError
            return ""
        sound = isinstance(said, dict) and said.get("manifest_sha256") == self_hash(said)
        folder = said.get("folder") if sound else None
        return f"{self._name}/{folder}" if isinstance(folder, str) and _FOLDER.fullmatch(folder) else ""

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Versions that have a manifest, and folders that have none. One that is damaged is neither."""
        whole, cut, listed = [], [], list(self.folders())
        self._entries = {folder: entry for folder, entry in self._entries.items() if folder in listed}
        for folder in listed:
            self._moving()
            try:
                if folder not in self._entries:
                    self._entries[folder] = read_entry(self._objects, folder)
                whole.append(self._entries[folder])
            except Missing as error:
                if error.where.endswith(MANIFEST):
                    cut.append(folder)
            except UserError:
                continue
        return whole, cut

    def tidy(self, rules: Rules) -> list[str]:
        """Remove what the rules let go, and attempts that were cut; returns the folders of versions that went.

        Nothing goes where the pointer cannot be read, or names what is not there.
        """
        latest = self.latest()
        whole, cut = self.entries()
        if latest not in {entry.folder for entry in whole}:
            return []
        gone = [entry.folder for entry in expired(whole, rules, self._clock(), latest)]
        for folder in [*gone, *(folder for folder in cut if folder != latest)]:
            self._moving()
            self._objects.remove(f"{folder}/{MANIFEST}")  # first: without it nothing of the rest is a version
            self._objects.remove_all(folder)
            self._entries.pop(folder, None)
        return gone

    def mark_diverged(self, divergence: Divergence) -> list[str]:
        """Say in the manifests of these versions that they may be wrong; returns their folders. Raises StoreError."""
        marked = []
        for entry in self.entries()[0]:
            one = entry.version
            if VersionStatus.of(one.status).diverged or not divergence.covers(
                    one.run_id, one.epoch, one.shard, one.step, one.status):
                continue
            document = seal({**entry.document, "status": DIVERGED})
            text = json.dumps(document, indent=1).encode() + b"\n"
            self._objects.replace(f"{entry.folder}/{MANIFEST}", text)
            self._same(f"{entry.folder}/{MANIFEST}", text)
            self._entries[entry.folder] = Entry(entry.folder, Version.of(document, entry.folder), document, text)
            marked.append(entry.folder)
        return marked

    def folders(self) -> Iterator[str]:
        """Those of versions and of attempts, as the store lists them."""
        for epoch in self._objects.children(self._name):
            for step in self._objects.children(f"{self._name}/{epoch}") if epoch.startswith("epoch-") else ():
                if _FOLDER.fullmatch(f"{epoch}/{step}"):
                    yield f"{self._name}/{epoch}/{step}"

    def _put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        def watched() -> Iterator[bytes | memoryview]:
            for piece in pieces:
                yield piece
                self._moving()

        self._objects.put(name, watched())
        self._moving()

    def _verify(self, name: str, entry: Mapping[str, Any]) -> None:
        """Read back what was written. Raises StoreError: it is something else."""
        digest, at = hashlib.sha256(), 0
        while piece := self._objects.read(name, at, min(CHUNK, entry["bytes"] - at)):
            digest.update(piece)
            at += len(piece)
            self._moving()
        if at != entry["bytes"] or self._objects.size(name) != at or digest.hexdigest() != entry["sha256"]:
            raise StoreError("has other bytes than those written, when it was read back", where=self._at(name),
                             remedy="look after the store: the version was not finished, and nothing points to it")

    def _same(self, name: str, text: bytes) -> None:
        if self._objects.size(name) != len(text) or self._objects.read(name, 0, len(text)) != text:
            raise StoreError("has other bytes than those written, when it was read back", where=self._at(name),
                             remedy="look after the store")
        self._moving()

    def _at(self, name: str) -> str:
        return f"{self._objects.url.rstrip('/')}/{name}"
