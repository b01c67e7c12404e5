"""A source of versions without a wire: a real replica on tmpfs, fed with gradients that are made up, and the shelf on
which they lie for a journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowcheck.checkpoint.directory import MANIFEST, read_step_manifest
from flowcheck.control.version import Version
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job, ModelEntry
from flowcheck.node.peers.shelf import Followed, Shelf
from flowcheck.node.protect.journal import Journal
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.rebuild.iteration.evidence import elements_of
from flowcheck.rebuild.iteration.intervals import intervals
from flowcheck.rebuild.plan import digest_of, plan_job
from flowcheck.rebuild.version.records import StepRecord
from flowcheck.rebuild.version.replica import JobReplica, ReplicaOptions
from lab.synth import example_job


def journal_job(count: Sequence[int] = (704, 320), **options: Any) -> Job:
    """With a schedule, a clip factor, a loss scale and a buffer. One bucket begins where another one ends."""
    job = example_job(**{"count": list(count), "startup": False, "rebuild": False, "optimizer": "adamw",
                         "options": {"lr": 0.01}, **options})
    job.step_values = ["lr"]
    job.model.append(ModelEntry("mean", [3], kind="buffer"))
    assert job.optimizer is not None
    job.optimizer.rounding = "torch-cuda-foreach"  # needs no look at this machine's processor
    return job


class Source:
    """first: the trainer's number of iteration 0. shown: iterations that its shelf keeps."""

    def __init__(self, folder: Path, job: Job | None = None, *, first: int = 5, shown: int = 4,
                 path: Path | None = None, seed: int = 0) -> None:
        self.job = job or journal_job()
        self.body = self.job.to_dict()
        self.plan, self.clock, self.folder = plan_job(self.job), Clock(first), folder
        run = ("run", 0, 2)
        self.said = JobText(self.body, run, first, digest_of(self.body, self.plan, run, self.clock))
        self.job.run_id = "run"
        self._random = np.random.default_rng(seed)
        self.replica = JobReplica(self.plan, None, ReplicaOptions(4, path, 0, True))  # a base is read
        made = torch.Generator().manual_seed(seed)
        self.replica.start({one.name: torch.randn(one.shape, generator=made).to(getattr(torch, one.dtype))
                            for one in self.job.model}, {}, first)
        self.shelf = Shelf(shown)
        self.shelf.follow(self.said.plan, Followed(self.body, run, first))
        self.regions: dict[int, np.ndarray] = {}

    def step(self, show: bool = True, holes: Sequence[tuple[int, int]] = ()) -> int:
        """One iteration more; its number. holes: runs of cells of it that came over no mirror."""
        number = self.replica.step
        iteration = self.clock.iteration(number)
        region = np.zeros(self.plan.engine.gradient_bytes, np.uint8)
        for place in self.plan.iteration_buckets(iteration):
            values = torch.from_numpy(self._random.standard_normal(place.elements).astype(np.float32))
            elements_of(region, place).copy_(values)
        record = StepRecord([{"lr": 0.01 / (1 + number)}], clip=0.5 + 0.1 * (number % 3), scale=2.0 ** (number % 2),
                            skipped=number % 7 == 6, buffers={"mean": torch.full([3], float(number))})
        self.replica.begin(iteration, record.values())
        for place in self.plan.iteration_buckets(iteration):
            self.replica.apply(place.index, elements_of(region, place))
        self.replica.finish(record.buffers)
        self.replica.publish(status="verified", unproven=["a mark"], matches=number)
        self.regions[number] = region
        if show:
            there = [(0, len(region) // 8)] if not holes else _without(len(region) // 8, holes)
            self.shelf.show(number, region, intervals(there), lambda: True, record)
        self.record = record
        return number

    def write(self, out: Path) -> Path:
        """The current version, as a checkpoint."""
        with self.replica.pinned() as version:
            return self.replica.write(out, ["a mark"], version, "verified", "", matches=self.replica.step)

    def version(self) -> Version:
        path = self.write(self.folder / "truth")
        return Version.of(read_step_manifest(path), str(path / MANIFEST))

    def into(self, journal: Journal) -> int:
        """One step more, and what made it into a journal, with its hashes."""
        number = self.step()
        places = self.plan.iteration_buckets(self.clock.iteration(number))
        record = self.record
        journal.add(number, {"groups": list(record.groups), "clip": record.clip, "scale": record.scale,
                             "skipped": record.skipped},
                    [elements_of(self.regions[number], place).clone() for place in places], record.buffers)
        journal.hashed(self.version())
        return number

    def close(self) -> None:
        self.replica.close()


def _without(cells: int, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out, at = [], 0
    for first, end in holes:
        out.append((at, first))
        at = end
    return [*out, (at, cells)]
