"""A journal on tmpfs: what made each step of another node's shard since a copy of it was taken, and that node's hashes.

    DIRECTORY/SOURCE/RUN/epoch-E/journal/job.json             the job: its manifest, run, and where its bytes lie
                                         entry-000000000012   the gradients of an iteration, with its step's values:
                                                              docs/understand/journal.md has its bytes
                                         hashes-000000000013  the source's own manifest of a step

    journal = Journal(folder)
    journal.begin(job);  journal.add(iteration, values, buckets, buffers);  journal.hashed(version)
    journal.entries, journal.steps, journal.nbytes;  journal.forget(step)

Every file appears whole or not at all, and outlives the process. What is made of them: redo.py. One thread, but that
`hashed` may be called on another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flowcheck.checkpoint.directory import MANIFEST_BYTES
from flowcheck.checkpoint.paths import read_small
from flowcheck.control.divergence import Divergence
from flowcheck.control.version import Version
from flowcheck.durable import make_directory, remove_tree, write_atomic
from flowcheck.errors import EnvironmentProblem, FlowcheckError, UserError
from flowcheck.job.clock import Clock
from flowcheck.journal.entry_file import read_entry, write_entry
from flowcheck.node.versions.journal.job_text import JobText
from flowcheck.rebuild.version.again import Made
from flowcheck.rebuild.version.records import StepRecord

__all__ = ["FOLDER", "Journal"]

FOLDER = "journal"  # beside the steps of a run
BUCKET, BUFFER = "bucket.", "buffer."


class Journal:
    """folder: of one run of one shard. Iterations are the trainer's numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._said: JobText | None = None

    @property
    def job(self) -> JobText | None:
        """None: nothing is known of it."""
        if self._said is None:
            self._said = JobText.read(self.folder / "job.json")
        return self._said

    def begin(self, job: JobText) -> None:
        """Of this job from now on. What there is of another one, or of another start of it, goes."""
        if self.job == job:
            return
        remove_tree(self.folder)
        make_directory(self.folder)
        write_atomic(self.folder / "job.json", job.text().encode())
        self._said = job

    @property
    def entries(self) -> list[int]:
        """Iterations, in order."""
        return self._numbers("entry-")

    @property
    def steps(self) -> list[int]:
        """Of which the source's hashes are here, in order."""
        return self._numbers("hashes-")

    @property
    def nbytes(self) -> int:
        return sum(self._size(path) for path in self.folder.glob("*-*"))

    def add(
        self, iteration: int, record: Mapping[str, Any], buckets: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> int:
        """record: groups, clip, scale, skipped. Returns bytes. Raises EnvironmentProblem."""
        tensors = {f"{BUCKET}{i}": bucket for i, bucket in enumerate(buckets)}
        tensors |= {f"{BUFFER}{name}": tensor for name, tensor in buffers.items()}
        head = {"iteration": iteration, "record": dict(record), "spans": [
            [name, str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in tensors.items()]}
        spans = [one.contiguous().reshape(-1).view(torch.uint8).numpy() for one in tensors.values()]
        return write_entry(self.folder / f"entry-{iteration:012d}", iteration, json.dumps(head).encode(), spans)

    def hashed(self, version: Version) -> None:
        write_atomic(self.folder / f"hashes-{version.step:012d}", json.dumps(version.document()).encode())

    def made(self, iteration: int) -> Made:
        """Raises FlowcheckError: it is not here, or damaged."""
        path = self.folder / f"entry-{iteration:012d}"
        try:
            number, head, spans = read_entry(path)
            said = json.loads(head)
            if number != iteration:
                raise ValueError(f"it is iteration {number}")
            tensors = {name: torch.from_numpy(span).view(getattr(torch, dtype)).reshape(shape)
                       for span, (name, dtype, shape) in zip(spans, said["spans"], strict=True)}
            said = said["record"]
            buckets = [tensors[f"{BUCKET}{i}"] for i in range(sum(name.startswith(BUCKET) for name in tensors))]
            buffers = {name.removeprefix(BUFFER): one for name, one in tensors.items() if name.startswith(BUFFER)}
            record = StepRecord(said["groups"], said["clip"], said["scale"], said["skipped"], buffers=buffers)
        except EnvironmentProblem as error:
            raise FlowcheckError(f"iteration {iteration} cannot be read: {error.what}", where=str(path)) from None
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise FlowcheckError(f"iteration {iteration} cannot be read: {error}", where=str(path)) from None
        return Made(record, buckets)

    def version(self, step: int) -> Version:
        """What the source says of a step. Raises UserError."""
        path = self.folder / f"hashes-{step:012d}"
        try:
            said = json.loads(read_small(path, MANIFEST_BYTES))
        except (ValueError, RecursionError) as error:
            raise UserError(f"cannot be read: {error}", where=str(path)) from None
        return Version.of(said, str(path))

    def forget(self, step: int) -> None:
        """What made this step and those before it is of no more use: there is a copy of it."""
        for prefix, last in (("entry-", Clock().made(step)), ("hashes-", step)):
            for number in self._numbers(prefix):
                if number <= last:
                    (self.folder / f"{prefix}{number:012d}").unlink(missing_ok=True)

    def withdraw(self, divergence: Divergence) -> None:
        """These steps are not made again: their source has found that they may be wrong."""
        for step in self.steps:
            try:
                one = self.version(step)
            except UserError:
                continue  # which cannot be made, either
            if divergence.covers(one.run_id, one.epoch, one.shard, step, one.status):
                (self.folder / f"hashes-{step:012d}").unlink(missing_ok=True)

    def _numbers(self, prefix: str) -> list[int]:
        found = (path.name.removeprefix(prefix) for path in self.folder.glob(f"{prefix}*"))
        return sorted(int(text) for text in found if text.isdecimal())

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:
            return 0  # gone meanwhile
