"""A node's group that keeps a journal: a live session (live_scene.py) whose events are published. Gradients are random.

    with kept(patch, folder) as at: at.run(50)           at.truth[step]: SHA-256 of every tensor of that version
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowcheck.checkpoint.directory import read_step_manifest, tensor_sha256
from flowcheck.control.checksum import checksums
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import LOG
from flowcheck.job.sampling import state_name
from flowcheck.node.config.capture import Capture
from flowcheck.node.config.control import Control
from flowcheck.node.config.journal import JournalSettings
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.config.store import Output
from flowcheck.node.groups.publisher import Publisher
from flowcheck.node.peers.common_step import Common
from flowcheck.node.versions.group_versions import GroupVersions
from flowcheck.node.versions.held import files_of
from flowcheck.node.versions.journal.folders import Folder, folder_of
from flowcheck.node.versions.output import Writer
from flowcheck.rebuild.iteration.evidence import elements_of
from flowcheck.rebuild.version.events import Closed, Event

from ..fake_engine import whole
from ..hand_node import until
from .journal_scene import journal_job
from .live_scene import Live

Hashes = dict[str, str]


def config_of(folder: Path, megabytes: int = 4, keep: int = 0, **more: Any) -> NodeConfig:
    return NodeConfig(
        control=Control(listen="127.0.0.1:0", token_file=folder / "token"), capture=Capture(device="none"),  # type: ignore[arg-type]
        replica=ReplicaSettings(directory=folder, slots=4), output=Output(directory=folder / "out"),
        journal=JournalSettings(directory=folder / "log", megabytes=megabytes, keep=keep), **more,
    )


class Kept(Live):
    """said: events of the group. truth: hashes of each version that was published."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, *, seed: int = 0, run: str = "run", epoch: int = 0,
                 start: str = "", log: bool = False, first: int = 5, **settings: Any) -> None:
        job = journal_job(optimizer="sgd", options={"lr": 0.1, "momentum": 0.9})
        job.run_id, job.epoch = run, epoch
        if log:
            job.optimizer, job.kind = None, LOG
            job = job_from_dict(job.to_dict())
        super().__init__(patch, job, folder=folder, slots=4, threads=1, first=first)
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.config = config_of(folder, **settings)
        self._random = np.random.default_rng(seed)
        say = partial(self._say, name="")
        self.writer = Writer(self._say)
        self.versions = GroupVersions(self.config, "", say)
        common = Common("node", 60.0, 4, self._say)
        self.publisher = Publisher("", self.config.output, self.port, say, lambda message: None, self.versions,
                                   self.writer, None, common)
        self.publisher.begin()
        ranks = self.job.communicator.ranks
        self.versions.divergences.begins((run, epoch, ranks), self.job, first, "")
        keeping = self.versions.journal.begin(self.job.to_dict(), self.session.plan, (run, epoch, ranks),
                                              self.session.clock, start)
        if keeping is not None:
            self.follower.keeping = keeping
        self.truth: dict[int, Hashes] = {}

    def _say(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def events(self, event: str) -> list[dict[str, Any]]:
        return [fields for what, fields in self.lines if what == event]

    @property
    def folder_of_run(self) -> Folder:
        assert self.config.journals is not None
        return folder_of(self.config.journals, "", self.job.run_id, self.job.epoch)

    def take(self, events: Any) -> None:
        for event in events:
            super().take([event])
            self.publisher.publish(self.session, event)
            self._note(event)

    def _note(self, event: Event) -> None:
        if isinstance(event, Closed) and event.published:
            assert self.session.replica is not None
            with self.session.replica.pinned() as version:
                self.truth[version.step] = hashes(files_of(version))

    def look(self) -> bool:
        moved = super().look()
        self.publisher.look(self.session)
        return moved

    def begins(self) -> None:
        """A trainer's state, and files of the journal that are there."""
        made = torch.Generator().manual_seed(0)
        tensors = {one.name: torch.randn(one.shape, generator=made) for one in self.job.model}
        path = self.folder / f"flowcheck-node--{self.next_number}.replica" if self.folder else None
        self.take(self.session.state(self.session.clock.iteration(self.next_number), tensors, {}, path=path))
        self.until(lambda: bool(self.events("journal")) or bool(self.events("problem")))

    next_number = 5

    def until(self, done: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.look()
            return done()

        until(looked)

    def iteration(self, cells: tuple[int, int | None] | None = None, **fields: Any) -> int:
        """One more of the trainer's; its number."""
        number = self.next_number
        self.next_number += 1
        iteration = self.session.clock.iteration(number)
        region = self.engine.region(iteration)
        for place in self.session.plan.iteration_buckets(iteration):
            values = torch.from_numpy(self._random.standard_normal(place.elements).astype(np.float32))
            elements_of(region, place).copy_(values)
        self.sources[0].packets += whole(iteration)
        record = {"groups": [{"lr": 0.1 / (1 + number % 5)}], "clip": 0.5 + 0.1 * (number % 3),
                  "skipped": number % 7 == 6, **fields}
        assert self.record(iteration, buffers={"mean": torch.full([3], float(number))}, **record) == ""
        self.until(lambda: any(one.iteration == iteration for one in self.closed))
        return number

    def run(self, iterations: int) -> None:
        """So many, each of which is in the journal, or a hole, before the next one begins."""
        for _ in range(iterations):
            number = self.iteration()
            self.until(lambda number=number: any(  # type: ignore[misc]
                one["iteration"] == number for one in (*self.events("journaled"), *self.events("hole"))))

    def sums_of(self, number: int) -> dict[str, str]:
        """What a trainer with the version that this iteration made says of it."""
        assert self.session.replica is not None and self.session.replica.step == number + 1
        with self.session.replica.pinned() as version:
            state = {state_name(name, key): tensor for name, kept in version.optimizer_state.items()
                     for key, tensor in kept.items()}
            return {name: f"{found:016x}" for name, found in checksums({**version.parameters, **state}).items()}

    def close(self) -> None:
        self.publisher.drop(self.session, "")
        self.session.close()
        self.writer.close()
        self.versions.close(True)


@contextlib.contextmanager
def kept(patch: pytest.MonkeyPatch, folder: Path, begins: int = 5, **settings: Any) -> Iterator[Kept]:
    """begins: the trainer's number of the first iteration."""
    with contextlib.closing(Kept(patch, folder, **settings)) as at:
        at.next_number = begins
        at.begins()
        yield at


def hashes(files: Any) -> Hashes:
    return {f"{file}/{name}": tensor_sha256(tensor) for file, tensors in files.items()
            for name, tensor in tensors.items()}


def hashes_in(path: Path) -> Hashes:
    """Of a checkpoint, as its manifest has them."""
    return {f"{file}/{name}": one["sha256"] for file, entry in read_step_manifest(path)["files"].items()
            for name, one in entry["tensors"].items()}


def bases(at: Kept) -> list[int]:
    return [one.step for one in at.folder_of_run.bases]

