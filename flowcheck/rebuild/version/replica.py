"""The job's replica: where its weights come from, one update per published iteration.

    JobReplica(plan, init)  ->  learn(engine) once, before the first update (replay)
                            or  start(parameters, state, step): what the trainer uploaded (live)
                            or  start_empty(step): what trainers send element by element (live, partial.py)
                            ->  begin(iteration, values), apply(bucket, elements) for each bucket, in any order and as
                            they come, finish(buffers); written() says when workers are done with it
                        ->  publish() or discard(); or, of lost gradients, patch(...), hold() (partial.py)

In a replay weights come from --init, else from the parameter broadcast in the capture; where both are there they
must be equal, bit for bit: a replica that starts from other weights than the trainer's is wrong for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parser.machine import Engine

from flowcheck.checkpoint.directory import Loaded, Meta, load_init, write_step
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.rebuild.iteration.evidence import BucketCoverage, parameter_bytes
from flowcheck.rebuild.plan import JobPlan
from updater.arrays import needed
from updater.errors import NoRoom, ReplicaError, UpdaterError
from updater.found import describe
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.replica import Replica, Slot
from updater.rounding_modes import GRAIN, RoundingMode
from updater.sixteen import threads_matter
from updater.step import StepValues
from updater.verify import Comparison

__all__ = ["JobReplica", "NoRoomForReplica", "ReplicaOptions", "replica_bytes"]


class NoRoomForReplica(UserError):
    """A replica needs more memory than is left."""


@dataclass(frozen=True)
class ReplicaOptions:
    """slots, path, threads, start: as updater.replica.Replica takes them. buffers: whether each step brings new
    ones."""

    slots: int = 2
    path: str | os.PathLike[str] | None = None
    threads: int = 0
    buffers: bool = False
    start: str = ""


def replica_bytes(job: Job, slots: int) -> int:
    """Memory that a job's replica takes. Raises UserError: it can have none."""
    assert job.optimizer is not None
    try:
        spec = _spec(job, RoundingMode(job.optimizer.rounding, job.optimizer.torch_version))
    except UpdaterError as error:
        raise UserError(str(error), where="job manifest", remedy="correct the optimizer") from None
    return needed(
        {entry.name: (entry.shape, getattr(torch, entry.dtype)) for entry in job.model}, spec, slots, **_kinds(job)
    )


def _kinds(job: Job) -> dict[str, Any]:
    """What updater.replica.Replica is told of a job's entries besides shapes."""
    assert job.optimizer is not None
    return {
        "buffers": frozenset(entry.name for entry in job.model if entry.kind == "buffer"),
        "tied": {entry.name: entry.tied for entry in job.model if entry.tied},
        "masters": job.optimizer.masters != "none",
    }


def _spec(job: Job, rounding: RoundingMode) -> OptimizerSpec:
    assert job.optimizer is not None
    return OptimizerSpec.check(
        job.optimizer.name, [(group.params, group.options) for group in job.optimizer.groups], fused=rounding.fused,
    )


class JobReplica:
    """Versions of the job's model. `absent` says why there is none ("" if there is one)."""

    def __init__(
        self, plan: JobPlan, init: str | os.PathLike[str] | None, options: ReplicaOptions | None = None
    ) -> None:
        self._plan, self._init_path = plan, init
        self._options = options or ReplicaOptions()
        self._replica: Replica | None = None
        self._slot: Slot | None = None
        self._loaded: Loaded | None = load_init(init, plan.job.model) if init else None
        self._spec: OptimizerSpec | None = None
        self._rounding: RoundingMode | None = None
        self._layouts: dict[bool, Layout] = {}
        self.absent = ""
        self._unsent = "the model is in no complete broadcast"  # why the captures bring no weights
        if plan.job.optimizer is None:
            self.absent = "the manifest names no optimizer"
            if init:
                raise UserError(
                    "--init given, but the job manifest has no optimizer to apply", where=str(init),
                    remedy="add model, buckets and optimizer to the manifest, or drop --init",
                )
            return
        try:
            said = plan.job.optimizer
            self._rounding = RoundingMode(said.rounding, said.torch_version, threads=said.threads,
                                          corrections=said.corrections)
            self._spec = _spec(plan.job, self._rounding)
            for held in ("float32", *(self._alone.values())):
                self._rounding.check(said.name, held, self._spec.with_values(()))
            for first in (True, False):
                self._layouts[first] = self._layout(0 if first else 1)
        except UpdaterError as error:
            raise UserError(str(error), where="job manifest", remedy="correct optimizer, model or buckets") from None

    def _layout(self, iteration: int) -> Layout:
        """An absent bucket description is allowed where it is obvious: one bucket, one tensor."""
        assert self._spec is not None
        places = self._plan.iteration_buckets(iteration)
        shapes = {e.name: e.shape for e in self._plan.job.model if e.name in self._spec.params}
        described = [bucket.slices for bucket in self._plan.job.bucket_layout(iteration)]
        if iteration and not places:  # the job has no later iteration
            return self._layouts[True]
        return Layout(described, shapes, [place.elements for place in places])

    @property
    def _alone(self) -> dict[str, str]:
        """Entry -> its type, of those that are updated in 16 bits alone."""
        job = self._plan.job
        if job.optimizer is None or job.optimizer.masters != "none":
            return {}
        return {entry.name: entry.dtype for entry in job.model if entry.name in job.narrow}

    @property
    def step(self) -> int:
        return self._replica.current.step if self._replica and not self._replica.empty else 0

    @property
    def steps(self) -> list[int]:
        """Of all complete versions."""
        return self._replica.steps if self._replica is not None else []

    @property
    def refused(self) -> int:
        """How often a slot was wanted for a version, and all others were pinned. Any thread."""
        return self._replica.refused if self._replica is not None else 0

    @property
    def serves(self) -> bool:
        """Is there a version that may be read?"""
        return self._replica is not None and not self._replica.empty

    @property
    def first_step(self) -> int:
        """The step that the initial weights had."""
        return self._loaded.step if self._loaded else 0

    def learn(self, engine: Engine) -> None:
        """Take the initial weights; call when the first iteration closes, after the broadcasts."""
        if self._spec is None or self._replica is not None:
            return
        broadcast = self._broadcast(engine)
        if self._loaded is None and broadcast is None:
            self.absent = f"no initial weights: no --init, and {self._unsent}"
            return
        if self._loaded is not None and broadcast is not None:
            self._compare(self._loaded.parameters, broadcast)
        if self._loaded:
            self.start(self._loaded.parameters, self._loaded.optimizer_state, self._loaded.step)
        elif broadcast is not None:
            self.start(broadcast, {}, 0)

    def start(
        self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Mapping[str, Any]], step: int,
        values: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Make the first version, `step`. values: hyper-parameters that it was made with, per group, where they are not
        the manifest's. Raises UserError if it does not fit the manifest's model and optimizer."""
        assert self._replica is None
        job = self._plan.job
        assert job.optimizer is not None
        absent = [name for name in job.narrow if state.get(name, {}).get("master") is None]
        if job.optimizer.masters == "state" and absent:
            raise UserError(
                f"no fp32 master of {absent[0]!r} came with the first weights, and the manifest says that it began"
                " earlier", where=str(self._init_path or "job manifest: optimizer.masters"),
                remedy="--init with a step directory that has them as optimizer state `master`",
            )
        self._make(parameters, step, optimizer_state=state, values=values)

    def start_empty(self, step: int) -> None:
        """Make a partial version `step`, of which every element is anything. Raises UserError as `start` does."""
        assert self._replica is None
        self._make(self._shapes(), step, empty=True)

    def take_up(self, path: str | os.PathLike[str]) -> None:
        """Go on with the file that an earlier process left, from its newest version. Raises UpdaterError: it is of
        another job, of another start of it, of other settings, or still written to."""
        assert self._replica is None and self._spec is not None and self._rounding is not None
        job, options = self._plan.job, self._options
        kinds = _kinds(job)
        like = describe(
            self._shapes(), self._spec, self._rounding, slots=options.slots, divisor=job.gradients.divisor,
            run_id=job.run_id, epoch=job.epoch, unproven=self.unproven, start=options.start, **kinds,
        )
        self._replica = Replica.attach(path, rounding=self._rounding, threads=options.threads, like=like)

    def _shapes(self) -> dict[str, torch.Tensor]:
        return {
            entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for entry in self._plan.job.model
        }

    def keep(self, steps: Sequence[int]) -> None:
        """Reuse the slots of these versions last, as updater.replica.Replica does."""
        if self._replica is not None:
            self._replica.keep(steps)

    def heard(self, step: int) -> None:
        """The trainers have made this step."""
        if self._replica is not None:
            self._replica.heard(step)

    @property
    def said(self) -> tuple[str, ...]:
        """What nothing has shown of the newest version alone."""
        assert self._replica is not None
        return self._replica.said[1]

    @property
    def matches(self) -> int:
        """Checksums of the trainer that had matched when the newest version was published."""
        assert self._replica is not None
        return self._replica.said[2] or 0

    def _make(self, tensors: Mapping[str, torch.Tensor], step: int, **more: Any) -> None:
        assert self._spec is not None
        job, options = self._plan.job, self._options
        try:
            self._replica = Replica(
                tensors, self._spec, slots=options.slots, divisor=job.gradients.divisor, step=step,
                rounding=self._rounding, path=options.path, run_id=job.run_id, epoch=job.epoch,
                threads=options.threads, unproven=self.unproven, start=options.start, **_kinds(job), **more,
            )
        except UpdaterError as error:
            kind = NoRoomForReplica if isinstance(error, NoRoom) else UserError
            raise kind(str(error), where=str(self._init_path or "job manifest")) from None

    def _broadcast(self, engine: Engine) -> dict[str, torch.Tensor] | None:
        differ, offset, _ = engine.copies(None)
        if differ:
            self._unsent = f"copies of the broadcast parameters differ, first at byte {offset}"
            return None
        found = parameter_bytes(self._plan, engine)
        tensors = {}
        for entry in self._plan.job.model:
            data, complete = found.get(entry.tied or entry.name, (np.zeros(0, np.uint8), False))
            if not complete:
                self._unsent = f"{entry.name!r} is in no complete broadcast"
                return None
            dtype: torch.dtype = getattr(torch, entry.dtype)
            tensors[entry.name] = torch.frombuffer(bytearray(data.tobytes()), dtype=dtype).reshape(entry.shape)
        return tensors

    def _compare(self, given: dict[str, torch.Tensor], broadcast: dict[str, torch.Tensor]) -> None:
        for name, tensor in broadcast.items():
            mine = given[name].contiguous().reshape(-1).view(torch.uint8)
            if not torch.equal(mine, tensor.reshape(-1).view(torch.uint8)):
                raise UserError(
                    f"tensor {name!r} differs from the parameters that rank 0 broadcast in the capture",
                    where=str(self._init_path),
                    remedy="give the weights this run started from, or leave --init out: the broadcast has them",
                )

    def begin(self, iteration: int, values: StepValues) -> None:
        """Begin the version after the newest one, partial or not. Raises UpdaterError: no free slot, or values that the
        optimizer cannot use; then nothing is being built."""
        assert self._replica is not None and self._slot is None
        self._slot = self._replica.build(self._replica.base.step + 1, self._layouts[iteration == 0], values)

    def apply(self, bucket: int, elements: torch.Tensor) -> None:
        """Hand a complete bucket of gradients to the workers. It stays as it is until `written`, or the end."""
        assert self._slot is not None
        self._slot.apply(bucket, elements, elements.dtype)

    def finish(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take what only the step record brings. Raises UpdaterError."""
        assert self._replica is not None and self._slot is not None
        self._replica.finish(self._slot, buffers)

    def written(self, seconds: float = 0) -> bool:
        """Has all that was applied been written? Waits at most so long (negative: until it has)."""
        assert self._slot is not None
        return self._slot.written(seconds)

    def build(self, iteration: int, buckets: Sequence[BucketCoverage], values: StepValues | None = None) -> None:
        """Build from an iteration's buckets at once. Raises UpdaterError as `begin` does."""
        self.begin(iteration, values or StepValues())
        for bucket in buckets:
            self.apply(bucket.place.index, bucket.tensor())

    def publish(
        self, verified: bool = False, status: str = "", unproven: Sequence[str] = (), matches: int = 0
    ) -> int:
        """verified: it was compared with the trainer's checksums and is equal. status, unproven: of the verdict, for
        those who read this version in shared memory. matches: checksums that have matched by now."""
        assert self._replica is not None and self._slot is not None
        self._replica.publish(self._slot, status, unproven, matches)
        if verified:
            self._replica.mark_verified()
        self._slot = None
        return self._replica.current.step

    def withdraw(self) -> list[int]:
        """A checksum did not match: versions newer than the last one that was verified may be wrong, and nobody reads
        them any more. Their steps. Whether any is left: `serves`."""
        assert self._replica is not None
        return self._replica.withdraw()

    def patch(
        self, ranges: Sequence[tuple[str, int, int]], parameters: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Write the trainer's own state of some elements into the version being built, all of which is written;
        elements of constants while nothing is served. What the optimizer keeps of an entry without elements (its count
        of steps) comes with every patch. Raises UpdaterError: it does not fit, or lacks something that the optimizer
        keeps of an element, or of such an entry."""
        assert self._slot is not None and self._replica is not None and self._spec is not None
        owned = {name: group.options for group in self._spec.groups for name in group.params}
        empty = {entry.name for entry in self._plan.job.model if not entry.elements}
        for name in ({name for name, _, _ in ranges} | empty) & owned.keys():
            kept = [*self._spec.states(owned[name]), *(["step"] if self._spec.name != "sgd" else [])]
            absent = [key for key in kept if key not in state.get(name, {})]
            if absent:
                raise ReplicaError(f"a patch of {name!r} without its {absent[0]}")
        fixed = [one for one in ranges if one[0] not in owned]
        if fixed:
            self._replica.fill(fixed, {name: parameters[name] for name, _, _ in fixed if name in parameters})
        self._slot.patch([one for one in ranges if one[0] in owned], parameters, state)

    def receive(self, step: int) -> Slot:
        """A slot for version `step`, which somebody else made; `received` or `discard` ends it. Raises UpdaterError: no
        slot is free, or the step is none that could be gone on from."""
        assert self._replica is not None and self._slot is None
        self._slot = self._replica.receive(step)
        return self._slot

    def received(self, optimizer: Mapping[str, Any], apart: Mapping[str, torch.Tensor], mark: str) -> None:
        """Publish what was received, unverified and with a mark. optimizer: that it was made with, in the manifest's
        form, from a stranger. apart: constants, which all versions share, and tied entries, which have no memory of
        their own. Raises UpdaterError: it is not of this job; nothing is published then."""
        assert self._replica is not None and self._slot is not None and self._spec is not None
        said = optimizer.get("groups")
        groups = [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
        names = [one.get("params") for one in groups if isinstance(one.get("options"), dict)]
        if (optimizer.get("name"), names) != (self._spec.name, [list(group.params) for group in self._spec.groups]):
            raise ReplicaError("it was made with another optimizer, or by other groups of parameters")
        constants = {entry.name for entry in self._plan.job.model if entry.kind == "constant"}
        fixed = constants if self._replica.empty else set()
        held = self._slot.parameters
        for name, tensor in apart.items():
            mine, its = (one.reshape(-1).view(torch.uint8) for one in (held[name], tensor))
            if name not in fixed and not torch.equal(mine, its):
                raise ReplicaError(f"its {name!r} is not what it is here")
        self._slot.received([one["options"] for one in groups])
        whole = {name: apart[name].reshape(-1) for name in fixed if apart[name].numel()}
        if whole:
            self._replica.fill([(name, 0, len(flat)) for name, flat in whole.items()], whole)
        self.publish(status="unverified", unproven=[mark])

    def hold(self) -> None:
        """Keep the version that was built as a partial one, to build on."""
        assert self._replica is not None and self._slot is not None
        self._replica.hold(self._slot)
        self._slot = None

    def leap(self, step: int) -> None:
        """Go on at a later step, or at that of an empty replica, where every element is stale. Raises UpdaterError: no
        slot is free."""
        assert self._replica is not None and self._slot is None
        if not (self._replica.empty and self._replica.base.step == step):
            self._replica.leap(step)

    def abandon(self) -> None:
        """Give a partial version up."""
        if self._replica is not None:
            self._replica.abandon()

    def discard(self) -> None:
        assert self._replica is not None and self._slot is not None
        self._replica.discard(self._slot)
        self._slot = None

    @property
    def version(self) -> Slot:
        """The version being built."""
        assert self._slot is not None
        return self._slot

    def compare(self, checksums: Mapping[str, int]) -> Comparison:
        """Compare the version being built with a trainer's checksums, on other threads; do not end it meanwhile."""
        assert self._replica is not None and self._slot is not None
        return self._replica.compare(self._slot, checksums)

    @contextmanager
    def pinned(self) -> Iterator[Slot]:
        """The current version, kept as it is until the block is left."""
        assert self._replica is not None
        with self._replica.pinned() as slot:
            yield slot

    def close(self) -> None:
        """Let go of the replica; its file, if it has one, stays."""
        if self._replica is not None:
            self._replica.close()

    @property
    def unproven(self) -> list[str]:
        """Marks of what the replica rests on and nothing has shown: the manifest's own, old buffers, an order of
        roundings."""
        if self.absent or self._rounding is None:
            return list(self._plan.job.unproven)
        buffers = [entry.name for entry in self._plan.job.model if entry.kind == "buffer"]
        marks = list(self._plan.job.unproven)
        if self._plan.job.narrow and self._plan.job.optimizer is not None and not self._plan.job.optimizer.masters:
            marks.append(
                "masters: the manifest does not say what the optimizer holds of 16-bit parameters; fp32 masters that"
                " begin as the first parameters were taken"
            )
        if shared := self._shared():
            marks.append(
                f"threads: {shared!r} is updated in 16 bits alone and may have been shared by threads of the trainer,"
                " which round other elements; the manifest does not say how many (optimizer.threads), one was taken"
            )
        marks += [f"buffers are as at the start: {', '.join(buffers)}"] if buffers and not self._options.buffers else []
        return marks + ([self._rounding.unproven] if self._rounding.unproven else [])

    def _shared(self) -> str:
        """The first entry whose bits depend on a number of threads that nobody said, or ""."""
        job, alone = self._plan.job, self._alone
        if job.optimizer is None or job.optimizer.threads:
            return ""
        sizes = {entry.name: entry.elements for entry in job.model}
        for group in job.optimizer.groups:
            # A record may bring a decay where there was none.
            options = group.options | ({"weight_decay": 1.0} if job.step_values else {})
            shared = [name for name in group.params if name in alone and sizes[name] > GRAIN]
            if shared and threads_matter(job.optimizer.name, options):
                return shared[0]
        return ""

    @property
    def kernels(self) -> str:
        """What computes versions, and what was chosen for this processor."""
        assert self._replica is not None
        return self._replica.kernels

    @property
    def rounding(self) -> str:
        """The order of roundings, by name."""
        assert self._rounding is not None
        return self._rounding.name

    @property
    def building(self) -> bool:
        """Is a version being built, or received?"""
        return self._slot is not None

    @property
    def ready(self) -> bool:
        return self._replica is not None

    def write(
        self, out: str | os.PathLike[str], unproven: Sequence[str], version: Slot, status: str = "unverified",
        shard: str = "", users: Callable[[], Mapping[int, bytes]] | None = None, matches: int = 0,
        vouch: Callable[[str, int], str] = lambda run_id, epoch: "",
    ) -> Path:
        """Write a version that the caller has pinned as a checkpoint; returns its directory. users: of write_step.
        matches: of Meta. vouch: gives Meta.attached. Any thread."""
        assert self._rounding is not None
        job = self._plan.job
        meta = Meta(job.run_id, job.epoch, status, tuple(unproven), version.optimizer, self._rounding.name, shard,
                    matches, self._options.start, vouch(job.run_id, job.epoch))
        return write_step(out, version.step, version.parameters, version.optimizer_state, meta, users)
