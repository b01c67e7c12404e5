"""The replica: versions of parameters and optimizer state in V slots, of which one is being built.

Model:

    slot 0   COMPLETE  version t    <- current: what is served, never written to
    slot 1   BUILDING  version t+1     written from t and the gradients, bucket by bucket
    slot 2   PINNED    version t-1     a reader (persistence, recovery) has not finished with it

States of a slot and their legal changes: updater/slots.py.

A replica may begin without any version (`empty`): with a partial one, of which every element is anything. Its file has
no name before the first version is complete, so a kill before that leaves nothing.

Three calls are for recovery, which every process that holds versions takes part in: `Replica.attach` finds the versions
of a process that has ended, `keep(steps)` says which are to be reused last, because others have them too, and
`rollback(step)` goes on from an older one; tests are the only callers of the last.

Legal calls: `build(step, layout, values)`, then `slot.apply(bucket, data)` once per bucket in any order, as they come,
perhaps `finish(slot, buffers)` and `slot.patch(...)`, then `publish(slot)` or `hold(slot)`, or, at any time,
`discard(slot)`. Or `receive(step)` for a version that was made elsewhere, whose arrays whoever has it writes,
`slot.received(values)`, and `publish` or `discard`. Publishing is the caller's, after the verdict; the replica itself
only insists that every optimized tensor has been updated. One slot is built at a time.

Threads: all that builds belongs to one thread. With workers nothing of it waits for work that was queued, but for
`patch`, `hold`, `publish` and `compare`, which need it: `slot.written()` asks first. `discard` waits for the chunk
(65536 elements) that each worker is at. `pinned()` and `current` may be used from any thread; a version that is pinned
does not change. With a path the slots lie in a file of tmpfs or hugetlbfs that outlives the process: `Replica.attach`
goes on with the newest complete version, other processes read with updater/reader.py.

Step counts published versions: the initial one has step 0 (or what a checkpoint says), the version after iteration i
of a job that starts at step 0 has step i+1, also if the trainer skipped its optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from updater import kernels
from updater.arrays import check_alone, check_tensors
from updater.constants import check_buffers, fill
from updater.errors import OptimizerError, ReplicaError
from updater.found import check_found, describe
from updater.layout import Layout
from updater.optimizers import OptimizerSpec
from updater.reader import not_mine
from updater.remarks import read, remarks
from updater.rounding_modes import RoundingMode, cpu_root
from updater.slot import Slot, SlotState
from updater.slots import Slots
from updater.step import StepValues
from updater.store import Store
from updater.tuning import chosen
from updater.verify import Comparison, tensors_of

__all__ = ["Replica", "Slot", "SlotState"]

MOST_STEPS = 1 << 47  # that a word of the file has room for


class Replica:
    """V slots of a model and its optimizer.

    tensors: every model entry in state_dict order (copied). optimizer: names what is optimized: fp32, or bf16/fp16
    with fp32 masters (a "master" in optimizer_state, else the widened parameter), or, if `masters` is false, bf16/fp16
    alone, states included, in rounding mode torch-cpu. buffers: entries that a step may replace; all other entries are
    constants and kept once. tied: name -> the optimized tensor whose memory it shares.
    slots: 2 to 4. divisor: gradients are divided by it. step, optimizer_state: where a checkpoint was taken.
    path: a file to create (tmpfs, hugetlbfs); None: memory of this process. threads: workers, 0 for none.
    values: per group the options of the step that made these tensors, where they are not the optimizer's (a schedule).
    unproven: what readers see that nothing has shown. start: which start of the trainers it follows, for `attach`.
    empty: of the tensors only shapes and types count ("meta" will do). The first version is partial, as after `leap`.

    Memory: V * (bytes per parameter: 12 for Adam in fp32, 16 with amsgrad, 8 for SGD with momentum, 4 without, and
    2 more for a 16-bit copy; half of it in 16 bits alone) plus constants once; every array begins on a cache line.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        optimizer: OptimizerSpec,
        *,
        slots: int = 3,
        divisor: int = 1,
        step: int = 0,
        optimizer_state: Mapping[str, Mapping[str, Any]] | None = None,
        rounding: RoundingMode | None = None,
        path: str | os.PathLike[str] | None = None,
        run_id: str = "",
        epoch: int = 0,
        buffers: frozenset[str] = frozenset(),
        tied: Mapping[str, str] | None = None,
        threads: int = 0,
        values: Sequence[Mapping[str, Any]] = (),
        masters: bool = True,
        unproven: Sequence[str] = (),
        start: str = "",
        empty: bool = False,
    ) -> None:
        rounding, state = rounding or RoundingMode(), optimizer_state or {}
        if not 2 <= slots <= 4:
            raise ReplicaError(f"{slots} slots asked for; a replica has 2 to 4")
        if divisor < 1 or step < 0:
            raise ReplicaError(f"divisor {divisor} or step {step} is out of range")
        for options in (optimizer.with_values(()), optimizer.with_values(values)):
            rounding.check(optimizer.name, options=options)
        check_tensors(tensors, optimizer, state, tied or {}, masters)
        path = None if path is None else Path(path)
        layout = describe(
            tensors, optimizer, rounding, slots=slots, divisor=divisor, run_id=run_id, epoch=epoch, buffers=buffers,
            tied=tied or {}, masters=masters, unproven=unproven, start=start,
        )
        check_alone(layout["arrays"], optimizer, rounding)
        store = Store.create(layout, path)
        store.lock_writer(path)
        self._take_over(store, optimizer, rounding, divisor, threads)
        first = self._slots.take(step)
        if empty:
            first.clear(step, values)
            self._slots.hold(first)
            return
        for (name, _), constant in store.tensors(None).items():
            constant.copy_(tensors[name])
        first.load(tensors, state, step, values)
        self._slots.complete(first)

    @classmethod
    def attach(
        cls, path: str | os.PathLike[str], *, run_id: str | None = None, epoch: int | None = None,
        rounding: RoundingMode | None = None, threads: int = 0, like: Mapping[str, Any] | None = None,
    ) -> Replica:
        """Go on with the replica in a file, from its newest complete version; what was being built or partial is gone.

        run_id, epoch: refuse another job's. rounding mode: only to name a root again; it has to be the
        one of the file. like: refuse one that is not described so (`describe`). Raises ReplicaError if the file is
        torn, foreign, or being written to.
        """
        path = Path(path)
        store = Store.attach(path, not_mine)
        try:
            return cls._over(store, check_found(store, path, run_id, epoch, rounding, like), threads)
        except BaseException:
            store.close()  # whoever keeps the error must not keep the lock
            raise

    @classmethod
    def _over(cls, store: Store, found: tuple[OptimizerSpec, RoundingMode, int], threads: int) -> Replica:
        """The replica that lies in an attached file."""
        (spec, rounding, newest), replica = found, cls.__new__(cls)
        replica._take_over(store, spec, rounding, int(store.layout["divisor"]), threads)
        replica._slots.find(newest)
        return replica

    def _take_over(self, store: Store, spec: OptimizerSpec, rounding: RoundingMode, divisor: int, threads: int) -> None:
        if rounding.name == "torch-cpu" and not rounding.root:
            cpu_root()  # takes half a second once; not in the first iteration
        self.optimizer, self.rounding = spec, rounding
        self._store = store
        self._tuning = chosen()
        self._pool = kernels.Pool(threads, "", *self._tuning)
        self._comparers: kernels.Pool | None = None
        self.slots = [Slot(store, i, spec, rounding, self._pool, divisor) for i in range(store.slots)]
        self._slots = Slots(self.slots, store)
        self._shapes = {a.name: a.shape for a in store.arrays if a.role == "p"}
        self._alone = next((a.name for a in store.arrays if a.role == "p" and a.dtype != "float32"), "")

    def close(self) -> None:
        """End the workers and let another process write; a file stays. May be called twice."""
        if self._comparers is not None:
            self._comparers.close()
        self._pool.close()
        self._store.close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory, all slots and constants together."""
        return len(self._store.memory)

    @property
    def kernels(self) -> str:
        """What computes it, and what was chosen for this processor."""
        root = f", root {self.rounding.root or cpu_root()}" if self.rounding.name == "torch-cpu" else ""
        return f"{self._pool.kernel}, {self._tuning}{root}"

    @property
    def current(self) -> Slot:
        """The newest published version. Pin it to read it while updates go on. Raises ReplicaError without one."""
        return self._slots.current

    @property
    def empty(self) -> bool:
        """No version has been complete yet."""
        return self._slots.empty

    @property
    def refused(self) -> int:
        """How often a slot was wanted and none was free."""
        return self._slots.refused

    @property
    def building(self) -> Slot | None:
        return self._slots.building

    @property
    def partial(self) -> Slot | None:
        return self._slots.partial

    @property
    def base(self) -> Slot:
        """What the next version is built from: the partial one, if there is one, else the current one."""
        return self.partial or self.current

    def build(self, step: int, layout: Layout, values: StepValues | None = None) -> Slot:
        """Begin version `step` (= base + 1) in a free slot.

        Raises NoFreeSlot while readers pin every other slot, ReplicaError if a build is under way, the step is not
        the next one, or the layout's tensors are not the optimized ones; OptimizerError for values it cannot use.
        """
        values = values or StepValues()
        if self.building is not None:
            raise ReplicaError(f"step {self.building.step} is still being built; publish or discard it first")
        base = self.base
        if step != base.step + 1:
            raise ReplicaError(f"step {step} cannot be built from step {base.step}")
        if layout.shapes != self._shapes:
            names = sorted({*self._shapes, *layout.shapes})
            odd = [name for name in names if self._shapes.get(name) != layout.shapes.get(name)]
            raise ReplicaError(f"the bucket layout and the optimizer disagree on {', '.join(map(repr, odd))}")
        self.rounding.check(self.optimizer.name, options=self.optimizer.with_values(values.groups))
        if values.loss_scale is not None and self._alone:
            raise OptimizerError(
                f"{self._alone!r} is updated in 16 bits alone: there is no kernel for gradients with a loss scale"
            )
        check_buffers(self._store, values.buffers)
        slot = self._slots.take(step)
        slot.begin(base, step, layout, values)
        return slot

    def receive(self, step: int) -> Slot:
        """A slot for version `step`, made elsewhere, to be written by who has it; then publish or discard. It is built
        from nothing that is here, so a partial version goes when it is published.

        Raises NoFreeSlot as `build` does, ReplicaError while a build is under way, or for a step that is here or older.
        """
        if self.building is not None or step < self.base.step or (not self.empty and step <= self.current.step):
            raise ReplicaError(f"step {step} cannot be received after step {(self.building or self.base).step}")
        slot = self._slots.take(step)
        slot.receive(step)
        return slot

    def fill(self, ranges: Sequence[tuple[str, int, int]], values: Mapping[str, torch.Tensor]) -> None:
        """Write elements of constants while no version is complete: afterwards all versions share them.

        ranges, values: as of `Slot.patch`. Raises ReplicaError for what does not fit; nothing is written then.
        """
        if not self.empty:
            raise ReplicaError("a complete version has these constants; they cannot be written any more")
        fill(self._store, ranges, values)

    def finish(self, slot: Slot, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take buffers of the step that became known after `build`. Raises ReplicaError for what is not a buffer."""
        self._must_be_building(slot, "finished")
        check_buffers(self._store, buffers)
        slot.finish(buffers)

    def publish(self, slot: Slot, status: str = "", unproven: Sequence[str] = (), matches: int = 0) -> None:
        """Make a built version the current one; only after the verdict. Its predecessor stays readable.

        status, unproven: what readers see of this version alone; "": what they see of the replica. matches:
        checksums of the trainer that have matched.
        """
        self._must_be_building(slot, "published")
        self._store.set_remarks(slot.index, remarks(status, unproven, matches))
        self._end(slot, SlotState.COMPLETE, "published")

    def hold(self, slot: Slot) -> None:
        """Make a built version of which some elements are anything the base of the next one. The current one stays."""
        self._end(slot, SlotState.PARTIAL, "held")

    def _end(self, slot: Slot, state: SlotState, what: str) -> None:
        self._must_be_building(slot, what)
        if slot.missing:
            raise ReplicaError(f"step {slot.step} lacks the gradient of {slot.missing[0]!r}; it cannot be {what}")
        slot.end()
        before = self.partial
        if state is SlotState.COMPLETE:
            self._slots.complete(slot)
        else:
            self._slots.hold(slot)
        if before is not None:
            self._slots.free(before)

    def leap(self, step: int) -> None:
        """Go on at a later step than the next one, with a partial version of which every element is anything.

        Raises NoFreeSlot as `build` does, ReplicaError while a build is under way, or if the step is not a later one.
        """
        if self.building is not None or step <= self.base.step:
            raise ReplicaError(f"no leap to step {step} from step {(self.building or self.base).step}")
        slot = self.partial
        if slot is not None:
            slot.step = step
            return
        slot = self._slots.take(step)
        slot.follow(self.current)
        self._slots.hold(slot)

    def abandon(self) -> None:
        """Give the partial version up, if there is one. Not while a build is under way. An empty replica has nothing
        to go on from then."""
        if self.partial is not None:
            self._slots.free(self.partial)

    def heard(self, step: int) -> None:
        """Say in the file that the trainers have made this step: versions are as old as they are behind it."""
        if (self._store.heard or 0) < step < MOST_STEPS:
            self._store.mark_heard(step)

    @property
    def said(self) -> tuple[str, tuple[str, ...], int | None]:
        """What was said of the current version alone when it was published: status, what nothing has shown, and how
        many checksums of the trainer had matched; None: unsaid."""
        return read(self._store.remarks(self.current.index))

    def mark_verified(self) -> None:
        """Say in the file, for those who find it later, that the current version is equal to the trainer's."""
        self._store.mark_verified(self.current.step)

    def withdraw(self) -> list[int]:
        """Nobody can read versions any more that are newer than the last one that was marked verified, nor a partial
        one: something is wrong since then. Returns their steps. Who has pinned one finds that it is gone
        (updater/reader.py:PinnedVersion.is_there); its slot is used again when he lets go of it. Not while one is
        built."""
        if self.building is not None:
            raise ReplicaError(f"step {self.building.step} is being built; discard it first")
        self.abandon()
        return self._slots.withdraw(-1 if self._store.verified is None else self._store.verified)

    def discard(self, slot: Slot) -> None:
        """Throw a half-built version away. Work that no worker has begun is not done."""
        self._must_be_building(slot, "discarded")
        slot.end(cancel=True)
        self._slots.free(slot)

    def compare(self, slot: Slot, checksums: Mapping[str, int]) -> Comparison:
        """Compare what has been applied to a slot with a trainer's checksums; do not publish or discard it meanwhile.

        The workers of the replica do it; one without workers starts one per processor for this, and keeps them.
        """
        slot.flush()
        if self._comparers is None:
            cores = len(os.sched_getaffinity(0))
            self._comparers = self._pool if self._pool.threads else kernels.Pool(cores)
        return Comparison(self._comparers, tensors_of(slot.parameters, slot.optimizer_state), checksums,
                          {entry["name"]: entry["tied"] for entry in self._store.layout["entries"] if entry["tied"]})

    @contextmanager
    def pinned(self) -> Iterator[Slot]:
        """The current version, kept as it is until the block is left; may nest and run in any thread.

        It stays also where this object is closed meanwhile and the file is taken up by another one, here or in another
        process: what is pinned is locked in the file, too. Raises ReplicaError if that cannot be.
        """
        with self._slots.pinned() as slot:
            yield slot

    @property
    def steps(self) -> list[int]:
        """Steps of the complete versions, newest last."""
        return self._slots.steps

    def keep(self, steps: Sequence[int]) -> None:
        """Reuse the slots of these steps last, the first of them last of all, until other ones are said.

        For a job of several nodes: the step that all of them have should stay. It is not a pin: where no other slot can
        be taken, one of these is, and no update waits for a node.
        """
        self._slots.keep(steps)

    def rollback(self, step: int) -> Slot:
        """Go on from an older complete version; newer ones, a partial one too, are given up. Not while one is built.

        Raises ReplicaError if the version does not exist, NoFreeSlot if a reader pins one that is to be given up.
        """
        if self.building is not None:
            raise ReplicaError(f"step {self.building.step} is being built; publish or discard it first")
        self._slots.rollback(step)
        self.abandon()
        return self.current

    def _must_be_building(self, slot: Slot, what: str) -> None:
        if slot.state is not SlotState.BUILDING:
            raise ReplicaError(
                f"slot {slot.index} is {slot.state.value}; only a slot being built can be {what}"
            )
