"""Versions in a store (objects.py): written so that a half one is never taken for one, and removed by rules.

    URL/NODE/GROUP/RUN/latest.json                         the pointer: which version was finished last
                       epoch-0/step-000020.3f9a12c4/       a version, in a folder that no other attempt writes to
                           model.safetensors               as in a checkpoint directory (directory.py)
                           optimizer.safetensors
                           user/rank-00003.safetensors
                           manifest.json                   when all of that was read back and found to be right
                       (GROUP is "-" for a group without a name)
                       epoch-0/deltas/...                      gradients between versions (deltas.py)

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowcheck.checkpoint.deltas import DELTAS, LINE, Deltas
from flowcheck.checkpoint.directory import MANIFEST, Meta, read_step_manifest, step_manifest
from flowcheck.checkpoint.files import FileStream
from flowcheck.checkpoint.objects import Missing, Objects
from flowcheck.checkpoint.paths import opened, read_small
from flowcheck.checkpoint.read_back import CHUNK, ReadBack, small
from flowcheck.checkpoint.stored import Entry, Line, Rules, expired, unneeded
from flowcheck.checkpoint.users import file_of, users_of
from flowcheck.control.divergence import Divergence
from flowcheck.control.user_state import USER_BYTES
from flowcheck.control.version import Version, seal, self_hash
from flowcheck.errors import UserError
from flowcheck.job.version_status import DIVERGED, VersionStatus

__all__ = ["LATEST", "UNNAMED", "Entry", "Lane", "Rules", "expired", "read_entry", "user_object"]

LATEST, LATEST_SCHEMA = "latest.json", "flowcheck/latest/1"
UNNAMED = "-"  # the folder of a group without a name; no group's name has a hyphen
MOST_TEXT = 256 << 20  # of a manifest
MOST_POINTER = 1 << 16
_EPOCH = re.compile("epoch-[0-9]{1,18}")
_FOLDER = re.compile(r"epoch-([0-9]{1,18})/step-([0-9]{1,18})\.[0-9a-f]{8}")


def read_entry(objects: Objects, folder: str) -> Entry:
    """A version's manifest, if its objects have the sizes that it says. Raises Missing: it does not exist; StoreError;
    UserError: it is damaged."""
    name = f"{folder}/{MANIFEST}"
    text = small(objects, name, MOST_TEXT)
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
        self._sure = ReadBack(objects, moving)
        self._entries: dict[str, Entry] = {}  # that were read: nobody else changes a version

    def write(
        self, step: int, files: Mapping[str, Mapping[str, torch.Tensor]], meta: Meta,
        users: Callable[[], Mapping[int, bytes]],
    ) -> Entry:
        """Write a version and let the pointer name it. users: called when the tensors are there."""
        folder = self._new_folder(meta.epoch, step)
        written: dict[str, Any] = {}
        for file, tensors in files.items():
            stream = FileStream(tensors)
            self._sure.put(f"{folder}/{file}", stream.pieces())
            written[file] = stream.entry()
            self._sure.verify(f"{folder}/{file}", written[file])
        given = {}
        for rank, data in sorted(users().items()):
            given[str(rank)] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            self._give(folder, rank, data, given[str(rank)])
        return self._finish(folder, step_manifest(step, meta, written, given, stored=round(self._clock(), 3)))

    def copy(self, path: Path, **more: str) -> Entry:
        """Write a checkpoint directory as it is, and let the pointer name it. It may be removed meanwhile. more: what
        else its manifest is to say. Raises UserError: it is damaged, or gone."""
        said = read_step_manifest(path)
        folder = self._new_folder(said["epoch"], said["step"])
        with ExitStack() as stack:
            files = {name: stack.enter_context(opened(path / name))[0] for name in said["files"]}
            users = {rank: (read_small(file_of(path, rank), USER_BYTES), entry)
                     for rank, entry in users_of(said).items()}
            for name, file in files.items():
                self._sure.put(f"{folder}/{name}", iter(partial(file.read, CHUNK), b""))
                self._sure.verify(f"{folder}/{name}", said["files"][name])
        for rank, (data, entry) in users.items():
            self._give(folder, rank, data, entry)
        return self._finish(folder, seal({**said, **more, "stored": round(self._clock(), 3)}))

    def _new_folder(self, epoch: int, step: int) -> str:
        return f"{self._name}/epoch-{epoch}/step-{step:06d}.{secrets.token_hex(4)}"

    def _give(self, folder: str, rank: int, data: bytes, entry: Mapping[str, Any]) -> None:
        self._sure.put(user_object(folder, rank), [data])
        self._sure.verify(user_object(folder, rank), entry)

    def _finish(self, folder: str, document: dict[str, Any]) -> Entry:
        text = json.dumps(document, indent=1).encode() + b"\n"
        self._sure.replace(f"{folder}/{MANIFEST}", text)
        pointer = seal({
            "schema": LATEST_SCHEMA, "folder": folder.removeprefix(f"{self._name}/"), "epoch": document["epoch"],
            "step": document["step"], "version_sha256": document["manifest_sha256"],
        })
        self._sure.replace(f"{self._name}/{LATEST}", json.dumps(pointer, indent=1).encode() + b"\n")
        entry = Entry(folder, Version.of(document, folder), document, text)
        self._entries[folder] = entry
        return entry

    def latest(self) -> str:
        """The folder that the pointer names, "": the pointer is missing, or cannot be read."""
        try:
            said = json.loads(small(self._objects, f"{self._name}/{LATEST}", MOST_POINTER))
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

        Nothing goes where the pointer cannot be read, or names what is not there. Deltas go before the version that
        they are applied to.
        """
        latest, now = self.latest(), self._clock()
        whole, cut = self.entries()
        if latest not in {entry.folder for entry in whole}:
            return []
        listed = {line: self.deltas(line).listed() for line in self._lines()}
        spans = {line: one.spans for line, one in listed.items()}
        gone = [entry.folder for entry in expired(whole, rules, now, latest, spans)]
        for line, some in unneeded(whole, rules, now, latest, spans).items():
            for span in some:
                self.deltas(line).remove(span)
        for line, one in listed.items():
            for name in one.cut:
                self.deltas(line).remove_cut(name)
        for folder in [*gone, *(folder for folder in cut if folder != latest)]:
            self._moving()
            self._objects.remove(f"{folder}/{MANIFEST}")  # first: without it nothing of the rest is a version
            self._objects.remove_all(folder)
            self._entries.pop(folder, None)
        stay = {entry.line for entry in whole if entry.folder not in gone}
        for line in listed.keys() - stay if rules.keep or rules.seconds else ():
            self._objects.remove_all(self._folder_of(line))  # what is left of a line without a version
        return gone

    def deltas(self, line: Line) -> Deltas:
        return Deltas(self._objects, self._folder_of(line), self._moving)

    def _folder_of(self, line: Line) -> str:
        return f"{self._name}/epoch-{line[0]}/{DELTAS}/{line[1]}"

    def _lines(self) -> Iterator[Line]:
        """That have deltas, or the text of their job."""
        for epoch in self._objects.children(self._name):
            if _EPOCH.fullmatch(epoch):
                for line in self._objects.children(f"{self._name}/{epoch}/{DELTAS}"):
                    if LINE.fullmatch(line):
                        yield int(epoch.removeprefix("epoch-")), line

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
            self._sure.replace(f"{entry.folder}/{MANIFEST}", text)
            self._entries[entry.folder] = Entry(entry.folder, Version.of(document, entry.folder), document, text)
            marked.append(entry.folder)
        return marked

    def folders(self) -> Iterator[str]:
        """Those of versions and of attempts, as the store lists them."""
        for epoch in self._objects.children(self._name):
            for step in self._objects.children(f"{self._name}/{epoch}") if epoch.startswith("epoch-") else ():
                if _FOLDER.fullmatch(f"{epoch}/{step}"):
                    yield f"{self._name}/{epoch}/{step}"
