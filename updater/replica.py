"""The replica: versions of parameters and optimizer state in V slots, of which one is being built.

Model:

    slot 0   COMPLETE  version t    <- current: what is served, never written to
    slot 1   BUILDING  version t+1     a copy of t to which complete buckets are applied, one by one
    slot 2   PINNED    version t-1     a reader (persistence, recovery) has not finished with it

    FREE -> BUILDING -> COMPLETE <-> PINNED        build, publish, pin, last unpin
             |             `-> FREE                the oldest complete version makes room
             `-> FREE                              discard: an iteration that was lost

Legal calls: `build(step, layout)`, then `slot.apply(bucket, data)` once per bucket in any order, then
`publish(slot)` or `discard(slot)`. Publishing is the caller's, after the verdict; the replica itself only
insists that every optimized tensor has been updated. One slot is built at a time.

Threads: build, apply, publish and discard belong to one thread. `pinned()` and `current` may be used
from any thread; a version that is pinned does not change.

Step counts applied updates: the initial version has step 0 (or what a checkpoint says), the version
after iteration i of a job that starts at step 0 has step i+1.

Tensors here are torch CPU tensors in this process; shared-memory slots and own kernels keep this interface.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from updater.errors import NoFreeSlot, ReplicaError
from updater.layout import Layout
from updater.optimizers import OptimizerSpec

__all__ = ["Replica", "Slot", "SlotState"]


class SlotState(enum.Enum):
    FREE = "free"
    BUILDING = "building"
    COMPLETE = "complete"
    PINNED = "pinned"


_EDGES = {
    SlotState.FREE: (SlotState.BUILDING,),
    SlotState.BUILDING: (SlotState.COMPLETE, SlotState.FREE),
    SlotState.COMPLETE: (SlotState.PINNED, SlotState.FREE),
    SlotState.PINNED: (SlotState.COMPLETE,),
}


class Slot:
    """One version. Read `step`, `parameters` and `optimizer_state`; write only through `apply`."""

    def __init__(self, index: int, tensors: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer,
                 gradients: dict[str, torch.Tensor], divisor: int) -> None:
        self.index = index
        self.step = -1
        self.state = SlotState.FREE
        self.pins = 0
        self.parameters = tensors  # every model entry, in state_dict order
        self._optimizer = optimizer
        self._gradients = gradients  # shared by all slots: only one is built at a time
        self._divisor = divisor
        self._layout: Layout | None = None
        self._applied: set[int] = set()
        self._awaited: dict[str, int] = {}  # tensor -> buckets that still have elements of it

    @property
    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """tensor name -> torch's state of it (exp_avg, momentum_buffer, step, ...); empty before step 1."""
        state = self._optimizer.state
        return {
            name: {key: value for key, value in state[tensor].items() if value is not None}
            for name, tensor in self.parameters.items() if state.get(tensor)
        }

    @property
    def missing(self) -> list[str]:
        """Optimized tensors that have not been updated yet."""
        return [name for name, buckets in self._awaited.items() if buckets]

    def apply(self, bucket: int, data: np.ndarray | torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Update every tensor that this bucket completes. data: its elements, 1-D (see Layout.scatter).

        Single-tensor optimizers treat each tensor alone, so bucket by bucket gives the bits of one step.
        Raises ReplicaError out of order, LayoutError if the data does not fit; the slot can then only be
        discarded.
        """
        if self.state is not SlotState.BUILDING or self._layout is None:
            raise ReplicaError(
                f"slot {self.index} is {self.state.value}; only a slot being built takes gradients"
            )
        if bucket in self._applied:
            raise ReplicaError(f"bucket {bucket} was already applied to step {self.step}")
        self._layout.scatter(bucket, data, self._gradients, self._divisor, dtype)
        self._applied.add(bucket)
        names = self._layout.bucket_names(bucket)
        ready = [name for name in names if self._awaited[name] == 1]
        for name in ready:
            self.parameters[name].grad = self._gradients[name]
        try:
            self._optimizer.step()  # torch skips tensors without a gradient
        finally:
            for name in ready:
                self.parameters[name].grad = None
        for name in names:  # only now: a step that failed must not look done
            self._awaited[name] -= 1

    def _begin(self, source: Slot, step: int, layout: Layout) -> None:
        """Become a copy of `source` that awaits the buckets of `layout`."""
        self._layout = layout
        self._applied = set()
        self._awaited = dict.fromkeys(layout.shapes, 0)
        for index in range(len(layout.buckets)):
            for name in layout.bucket_names(index):
                self._awaited[name] += 1
        self._copy(source.parameters, source.optimizer_state)
        self.step = step

    def _copy(self, parameters: Mapping[str, torch.Tensor],
              optimizer_state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, tensor in self.parameters.items():
            tensor.copy_(parameters[name])
            mine = self._optimizer.state.get(tensor, {})
            theirs = optimizer_state.get(name, {})
            if not theirs:
                # torch takes "no state yet" from absence: what a discarded build left behind must go.
                self._optimizer.state.pop(tensor, None)
                continue
            fresh = {}
            for key, value in theirs.items():
                held = mine.get(key)
                reuse = held is not None and held.shape == value.shape and held.dtype == value.dtype
                fresh[key] = held.copy_(value) if reuse else value.detach().clone()
            self._optimizer.state[tensor] = fresh


class Replica:
    """V slots of a model and its optimizer.

    tensors: every model entry in state_dict order (copied). optimizer: names what is optimized; the rest
    (constants, buffers) is carried along unchanged. slots: 2 to 4. divisor: gradients are divided by it.
    step, optimizer_state: where a checkpoint was taken; both must fit the optimizer. Memory: V times
    (parameters + optimizer state) plus one gradient per optimized tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        optimizer: OptimizerSpec,
        *,
        slots: int = 3,
        divisor: int = 1,
        step: int = 0,
        optimizer_state: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        if not 2 <= slots <= 4:
            raise ReplicaError(f"{slots} slots asked for; a replica has 2 to 4")
        if divisor < 1 or step < 0:
            raise ReplicaError(f"divisor {divisor} or step {step} is out of range")
        for name in optimizer.params:
            if name not in tensors:
                raise ReplicaError(f"{name!r} is to be optimized and is not in the model")
            if not tensors[name].is_floating_point():
                raise ReplicaError(f"{name!r} is to be optimized and is {tensors[name].dtype}")
        state = optimizer_state or {}
        for name in state:
            if name not in optimizer.params:
                raise ReplicaError(f"optimizer state of {name!r}, which is not optimized")
            for key, value in state[name].items():
                if value.dim() and value.shape != tensors[name].shape:
                    raise ReplicaError(f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}")
        self.optimizer = optimizer
        self._lock = threading.Lock()
        gradients = {
            name: torch.zeros(tensors[name].shape, dtype=tensors[name].dtype) for name in optimizer.params
        }
        self._gradients = gradients
        self.slots: list[Slot] = []
        for index in range(slots):
            copy = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format)
                for name, tensor in tensors.items()
            }
            self.slots.append(Slot(index, copy, optimizer.build(copy), gradients, divisor))
        first = self.slots[0]
        self._set_state(first, SlotState.BUILDING)
        first._copy(tensors, state)
        first.step = step
        self._set_state(first, SlotState.COMPLETE)
        self._current = first

    @property
    def current(self) -> Slot:
        """The newest published version. Pin it to read it while updates go on."""
        return self._current

    @property
    def building(self) -> Slot | None:
        return next((slot for slot in self.slots if slot.state is SlotState.BUILDING), None)

    def build(self, step: int, layout: Layout) -> Slot:
        """Copy the current version into a free slot as the start of version `step` (= current + 1).

        Raises NoFreeSlot while readers pin every other slot, ReplicaError if a build is under way, the
        step is not the next one, or the layout's tensors are not the optimized ones.
        """
        if self.building is not None:
            raise ReplicaError(f"step {self.building.step} is still being built; publish or discard it first")
        if step != self._current.step + 1:
            raise ReplicaError(f"step {step} cannot be built from step {self._current.step}")
        shapes = {name: tuple(gradient.shape) for name, gradient in self._gradients.items()}
        if layout.shapes != shapes:
            names = sorted({*shapes, *layout.shapes})
            odd = [name for name in names if shapes.get(name) != layout.shapes.get(name)]
            raise ReplicaError(f"the bucket layout and the optimizer disagree on {', '.join(map(repr, odd))}")
        with self._lock:
            slot = self._take_slot()
        slot._begin(self._current, step, layout)
        return slot

    def publish(self, slot: Slot) -> None:
        """Make a built version the current one; only after the verdict. Its predecessor stays readable."""
        self._must_be_building(slot, "published")
        if slot.missing:
            raise ReplicaError(
                f"step {slot.step} lacks the gradient of {slot.missing[0]!r}; it cannot be published"
            )
        with self._lock:
            self._set_state(slot, SlotState.COMPLETE)
            self._current = slot

    def discard(self, slot: Slot) -> None:
        """Throw a half-built version away. The current version was never touched."""
        self._must_be_building(slot, "discarded")
        with self._lock:
            self._set_state(slot, SlotState.FREE)

    @contextmanager
    def pinned(self) -> Iterator[Slot]:
        """The current version, kept as it is until the block is left; may nest and run in any thread."""
        with self._lock:
            slot = self._current
            if slot.state is SlotState.COMPLETE:
                self._set_state(slot, SlotState.PINNED)
            slot.pins += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.pins -= 1
                if not slot.pins:
                    self._set_state(slot, SlotState.COMPLETE)

    def _must_be_building(self, slot: Slot, what: str) -> None:
        if slot.state is not SlotState.BUILDING:
            raise ReplicaError(
                f"slot {slot.index} is {slot.state.value}; only a slot being built can be {what}"
            )

    def _take_slot(self) -> Slot:
        free = [slot for slot in self.slots if slot.state is SlotState.FREE]
        if not free:
            complete = [slot for slot in self.slots if slot.state is SlotState.COMPLETE]
            old = [slot for slot in complete if slot is not self._current]
            if not old:
                raise NoFreeSlot(f"all {len(self.slots)} slots are current or pinned; the update waits")
            free = [min(old, key=lambda slot: slot.step)]
            self._set_state(free[0], SlotState.FREE)
        self._set_state(free[0], SlotState.BUILDING)
        return free[0]

    def _set_state(self, slot: Slot, state: SlotState) -> None:
        """The only place where a slot changes state."""
        if state not in _EDGES[slot.state]:
            raise ReplicaError(f"slot {slot.index} cannot go from {slot.state.value} to {state.value}")
        slot.state = state
