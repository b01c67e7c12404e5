"""The job's replica: where its weights come from, one update per published iteration.

    JobReplica(plan, init)  ->  learn(first_weights) once, before the first update (replay)
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

import torch

from flowcheck.checkpoint.directory import Loaded, Meta, load_init, write_step
from flowcheck.errors import UserError
from flowcheck.rebuild.iteration.evidence import BucketCoverage
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.last_step import LastStep
from flowcheck.rebuild.version.recipe import kinds_of, recipe_of, shapes_of
from updater.errors import NoRoom, ReplicaError, UpdaterError
from updater.found import describe
from updater.replica import Replica, Slot
from updater.step import StepValues
from updater.verify import Comparison

__all__ = ["JobReplica", "NoRoomForReplica", "ReplicaOptions"]


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


class JobReplica:
    """Versions of the job's model. `absent` says why none can be had, "": one can."""

    def __init__(
        self, plan: JobPlan, init: str | os.PathLike[str] | None, options: ReplicaOptions | None = None
    ) -> None:
        self._plan, self._init_path = plan, init
        self._options = options or ReplicaOptions()
        self._replica: Replica | None = None
        self._slot: Slot | None = None
        self._loaded: Loaded | None = load_init(init, plan.job.model) if init else None
        self._recipe = recipe_of(plan)
        self.absent = ""
        if self._recipe is None:
            self.absent = "the manifest names no optimizer"
            if init:
                raise UserError(
                    "--init given, but the job manifest has no optimizer to apply", where=str(init),
                    remedy="add model, buckets and optimizer to the manifest, or drop --init",
                )

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

    def learn(self, first_weights: Callable[[], Mapping[str, torch.Tensor] | str]) -> None:
        """Take the initial weights; call when the first iteration closes, after the broadcasts. first_weights(): those
        that came with the traffic, or why none did."""
        if self._recipe is None or self._replica is not None:
            return
        came = first_weights()
        if isinstance(came, str):
            if self._loaded is None:
                self.absent = f"no initial weights: no --init, and {came}"
                return
        elif self._loaded is None:
            self.start(came, {}, 0)
            return
        else:
            self._compare(self._loaded.parameters, came)
        self.start(self._loaded.parameters, self._loaded.optimizer_state, self._loaded.step)

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
        self._make(shapes_of(self._plan.job), step, empty=True)

    def take_up(self, path: str | os.PathLike[str]) -> None:
        """Go on with the file that an earlier process left, from its newest version. Raises UpdaterError: it is of
        another job, of another start of it, of other settings, or still written to."""
        assert self._replica is None and self._recipe is not None
        job, options, recipe = self._plan.job, self._options, self._recipe
        like = describe(
            shapes_of(job), recipe.spec, recipe.rounding, slots=options.slots, divisor=job.gradients.divisor,
            run_id=job.run_id, epoch=job.epoch, unproven=self.unproven, start=options.start, **kinds_of(job),
        )
        self._replica = Replica.attach(path, rounding=recipe.rounding, threads=options.threads, like=like)

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
        assert self._recipe is not None
        job, options = self._plan.job, self._options
        try:
            self._replica = Replica(
                tensors, self._recipe.spec, slots=options.slots, divisor=job.gradients.divisor, step=step,
                rounding=self._recipe.rounding, path=options.path, run_id=job.run_id, epoch=job.epoch,
                threads=options.threads, unproven=self.unproven, start=options.start, **kinds_of(job), **more,
            )
        except UpdaterError as error:
            kind = NoRoomForReplica if isinstance(error, NoRoom) else UserError
            raise kind(str(error), where=str(self._init_path or "job manifest")) from None

    def _compare(self, given: Mapping[str, torch.Tensor], broadcast: Mapping[str, torch.Tensor]) -> None:
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
        assert self._replica is not None and self._recipe is not None and self._slot is None
        self._slot = self._replica.build(self._replica.base.step + 1, self._recipe.layouts[iteration == 0], values)

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
        assert self._slot is not None and self._replica is not None and self._recipe is not None
        spec = self._recipe.spec
        owned = {name: group.options for group in spec.groups for name in group.params}
        empty = {entry.name for entry in self._plan.job.model if not entry.elements}
        for name in ({name for name, _, _ in ranges} | empty) & owned.keys():
            kept = [*spec.states(owned[name]), *(["step"] if spec.name != "sgd" else [])]
            absent = [key for key in kept if key not in state.get(name, {})]
            if absent:
                raise ReplicaError(f"a patch of {name!r} without its {absent[0]}")
        fixed = [one for one in ranges if one[0] not in owned]
        if fixed:
            self._replica.fill(fixed, {name: parameters[name] for name, _, _ in fixed if name in parameters})
        self._slot.patch([one for one in ranges if one[0] in owned], parameters, state)

    def receive(self, step: int) -> Slot:
        """A slot for version `step`, which somebody else made; `received` or `discard` ends it. Raises UpdaterError: no
        slot is free, or nothing could go on from that step."""
        assert self._replica is not None and self._slot is None
        self._slot = self._replica.receive(step)
        return self._slot

    def received(self, optimizer: Mapping[str, Any], apart: Mapping[str, torch.Tensor], mark: str) -> None:
        """Publish what was received, unverified and with a mark. optimizer: that it was made with, in the manifest's
        form, from a stranger. apart: constants, which all versions share, and tied entries, which have no memory of
        their own. Raises UpdaterError: it is not of this job; nothing is published then."""
        assert self._replica is not None and self._slot is not None and self._recipe is not None
        spec, said = self._recipe.spec, optimizer.get("groups")
        groups = [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
        names = [one.get("params") for one in groups if isinstance(one.get("options"), dict)]
        if (optimizer.get("name"), names) != (spec.name, [list(group.params) for group in spec.groups]):
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
        if self.absent or self._recipe is None:
            return list(self._plan.job.unproven)
        return self._recipe.unproven(buffers=self._options.buffers)

    @property
    def kernels(self) -> str:
        """What computes versions, and what was chosen for this processor."""
        assert self._replica is not None
        return self._replica.kernels

    @property
    def rounding(self) -> str:
        """The order of roundings, by name."""
        assert self._recipe is not None
        return self._recipe.rounding.name

    def last_step(self) -> LastStep | None:
        """The version before the current one, and that; None: the version before is not here."""
        replica = self._replica
        return LastStep.of(replica.slots, replica.current.step) if replica is not None and self.serves else None

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
        job = self._plan.job
        meta = Meta(job.run_id, job.epoch, status, tuple(unproven), version.optimizer, self.rounding, shard, matches,
                    self._options.start, vouch(job.run_id, job.epoch))
        return write_step(out, version.step, version.parameters, version.optimizer_state, meta, users)
