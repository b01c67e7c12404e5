"""One version of the replica: its tensors, and building it from the version before, bucket by bucket.

A slot that is built is written in one pass: each bucket's pieces go to the kernels, which read version t and write
version t+1. Nothing is accumulated in between, so a bucket needs no other, and whatever the order and the cuts of the
buckets, each element is rounded as it is when the whole tensor comes at once.
Memory and rules: updater/replica.py.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from updater import kernels
from updater.errors import ReplicaError
from updater.layout import Layout, SliceLike
from updater.optimizers import OptimizerSpec, pack, unpack
from updater.rounding_modes import RoundingMode, rule
from updater.step import StepValues
from updater.store import Store

__all__ = ["Slot", "SlotState", "Version"]

#: Roles of arrays (updater/store.py) in the order the kernels take them, and torch's names of the states.
ROLES = ("p", "m", "v", "x")
STATES = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "x", "momentum_buffer": "m"}


class SlotState(enum.Enum):
    """PARTIAL: a version of which some elements are anything, because their gradients were lost; who asks a trainer for
    them knows which (flowcheck). It is what the next version is built from, and nothing else: nobody pins it, no reader
    finds it, and after a kill its slot is free. The last complete version is served meanwhile, so three slots are
    needed. A version into which the last such element was patched is published as any other."""

    FREE = "free"
    BUILDING = "building"
    PARTIAL = "partial"
    COMPLETE = "complete"
    PINNED = "pinned"


class Version:
    """Tensors of one slot, over its memory. Reading is all that this class does.

    parameters: every model entry in state_dict order (tied names share memory). masters: fp32 values of the
    parameters that are kept in 16 bits, unless those are updated in 16 bits alone: then there are none.
    """

    def __init__(self, store: Store, index: int) -> None:
        self.index = index
        self._tensors = store.tensors(index)
        self._entries: list[dict[str, Any]] = store.layout["entries"]
        self._states: dict[str, list[str]] = store.layout["states"]
        fixed = store.tensors(None)
        self.parameters: dict[str, torch.Tensor] = {}
        for entry in self._entries:
            name, owner = entry["name"], entry["tied"] or entry["name"]
            role = entry["role"]
            self.parameters[name] = fixed[owner, role] if role == "fixed" else self._tensors[owner, role]
        self.masters = {n: self._tensors[n, "p"] for n in self._states if (n, "low") in self._tensors}
        self._steps, self._packed = self._tensors["", "steps"], self._tensors["", "options"]
        self._optimizer: dict[str, Any] = store.layout["optimizer"]
        # As who made the file counts: `states` comes back out of it sorted by name.
        named = itertools.chain.from_iterable(group["params"] for group in self._optimizer["groups"])
        self._order = {name: i for i, name in enumerate(named)}
        self._adam = self._optimizer["name"] != "sgd"

    @property
    def optimizer(self) -> dict[str, Any]:
        """Name and groups in the manifest's form, with the options of the step that made this version: a schedule's
        learning rate is here, not the one that the job began with."""
        name, rows = self._optimizer["name"], self._packed.tolist()
        groups = zip(self._optimizer["groups"], rows, strict=True)
        return {"name": name, "groups": [{"params": g["params"], "options": unpack(name, row)} for g, row in groups]}

    @property
    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """tensor name -> torch's state of it (exp_avg, momentum_buffer, step, ...) once it has one.

        A parameter kept in 16 bits has its fp32 values as well, as "master", from the first version on.
        """
        out: dict[str, dict[str, torch.Tensor]] = {}
        for name, keys in self._states.items():
            at, state = self._order[name], {}
            if self._steps[at] > 0:
                state = {"step": self._steps[at]} if self._adam else {}
                state |= {key: self._tensors[name, STATES[key]] for key in keys}
            if name in self.masters:
                state["master"] = self.masters[name]
            if state:
                out[name] = state
        return out


class Slot(Version):
    """A version that can be built. Read `step`, `parameters`, `optimizer_state`; write only through the methods."""

    def __init__(self, store: Store, index: int, spec: OptimizerSpec, rounding: RoundingMode, pool: kernels.Pool,
                 divisor: int) -> None:
        super().__init__(store, index)
        self.step = -1
        self.state = SlotState.FREE
        self.pins = 0
        self._spec, self._rounding, self._pool, self._divisor = spec, rounding, pool, divisor
        self._group = {name: g for g, group in enumerate(spec.groups) for name in group.params}
        self._sizes = {name: self._tensors[name, "p"].numel() for name in self._order}
        self._low = {name: _type(self._tensors[name, "low"]) for name in self.masters}
        self._held = {name: _type(self._tensors[name, "p"]) for name in self._order}
        self._parts = {name: rounding.parts(size, self._held[name]) for name, size in self._sizes.items()}
        self._where = {key: tensor.data_ptr() for key, tensor in self._tensors.items()}
        self._layout: Layout | None = None
        self._source: Slot | None = None
        self._values = StepValues()
        self._options: tuple[Mapping[str, Any], ...] = ()
        self._applied: set[int] = set()
        self._awaited: dict[str, int] = {}  # tensor -> buckets that still have elements of it
        self._ticket = 0

    @property
    def missing(self) -> list[str]:
        """Optimized tensors that have not been updated yet."""
        return [name for name, buckets in self._awaited.items() if buckets]

    def apply(self, bucket: int, data: np.ndarray | torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Update everything that this bucket carries. data: its elements, 1-D (see Layout.take).

        Returns as soon as the work is queued; `data` must stay as it is until publish, discard or `flush`. Raises
        ReplicaError out of order, LayoutError if the data does not fit; the slot is then as before.
        """
        if self.state is not SlotState.BUILDING or self._layout is None:
            raise ReplicaError(f"slot {self.index} is {self.state.value}; only a slot being built takes gradients")
        if bucket in self._applied:
            raise ReplicaError(f"bucket {bucket} was already applied to step {self.step}")
        taken = self._layout.take(bucket, data, dtype)
        if not self._values.skip:
            self._submit(self._layout.buckets[bucket], taken)
        self._applied.add(bucket)
        for name in self._layout.bucket_names(bucket):
            self._awaited[name] -= 1

    def finish(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take buffers that became known after the slot was begun; the replica has checked them."""
        for name, tensor in buffers.items():
            self._tensors[name, "raw"].copy_(tensor)

    def written(self, seconds: float = 0) -> bool:
        """Is everything applied so far in memory? Waits for that at most so long."""
        return self._pool.wait(self._ticket, seconds)

    def flush(self) -> None:
        """Return when everything applied so far is in memory; gradients may be changed from then on."""
        self._pool.wait(self._ticket)

    def patch(
        self, ranges: Sequence[tuple[str, int, int]], parameters: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Write a trainer's own state of some elements over what was built there, once all of that is written.

        ranges: (tensor, first element, elements), disjoint. parameters, state: as of `load`, of these elements alone:
        1-D, the ranges of a tensor one behind the other. An array that the state lacks becomes 0. Of a tensor without
        elements, which no range can have, the state may be given all the same. Raises ReplicaError for what does not
        fit; the slot is then as before.
        """
        runs: dict[str, list[tuple[int, int]]] = {}
        for name, start, length in ranges:
            if not 0 <= start < start + length <= self._sizes.get(name, 0):
                raise ReplicaError(f"elements [{start}, {start + length}) of {name!r} are not optimized")
            runs.setdefault(name, []).append((start, length))
        blocks: list[tuple[int, int, int]] = []
        keep: list[torch.Tensor] = []
        for name, spans in runs.items():
            count = sum(length for _, length in spans)
            for role, values in self._patched(name, parameters, state.get(name, {})).items():
                held = self._tensors[name, role]
                values = torch.zeros(count, dtype=held.dtype) if values is None else values.detach().contiguous()
                if values.shape != (count,) or values.dtype != held.dtype:
                    raise ReplicaError(
                        f"a patch of {count} elements of {name!r} has {values.dtype} {tuple(values.shape)} as {role!r},"
                        f" which is {held.dtype}"
                    )
                at, to, width = values.data_ptr(), self._where[name, role], held.element_size()
                for start, length in spans:
                    blocks.append((to + width * start, at, width * length))
                    at += width * length
                keep.append(values)
        self.flush()
        for name in (*runs, *(one for one in state if self._sizes.get(one) == 0)):
            given = state.get(name, {})
            held_states = any(key in given for key in self._states[name])
            self._steps[self._order[name]] = float(given.get("step", 1.0 if held_states else 0.0))
        self._ticket = self._pool.copies(blocks, keep)

    def _patched(
        self, name: str, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> dict[str, torch.Tensor | None]:
        """What a patch brings for each array of a tensor."""
        own = "master" if name in self.masters else ""
        if name not in parameters or (own and own not in state):
            raise ReplicaError(f"a patch of {name!r} without its {own or 'parameter'}")
        found: dict[str, torch.Tensor | None] = {STATES[key]: state.get(key) for key in self._states[name]}
        return found | ({"p": state[own], "low": parameters[name]} if own else {"p": parameters[name]})

    def _submit(self, bucket: Sequence[SliceLike], data: torch.Tensor) -> None:
        source, grad = self._source, _type(data)
        assert source is not None
        rules: list[kernels.Rule] = []
        index: dict[tuple[int, int, str, str], int] = {}
        pieces = []
        for piece in bucket:
            name = piece.name
            if not piece.length:
                continue
            held = self._held[name]
            if held not in ("float32", grad):
                raise ReplicaError(f"a {grad} gradient for {name!r}, which is updated in {held} alone")
            key = (self._group[name], int(source._steps[self._order[name]]) + 1, self._low.get(name, ""), held)
            if key not in index:
                index[key] = len(rules)
                rules.append(self._rule(*key, grad))
            width = 4 if held == "float32" else 2
            for first, after, odd in self._parts[name]:
                begin, end = max(first, piece.start), min(after, piece.start + piece.length)
                if begin >= end:
                    continue
                arrays = [
                    at + width * begin if at else 0
                    for where in (source._where, self._where) for at in (where.get((name, role), 0) for role in ROLES)
                ]
                low = self._where.get((name, "low"), 0)
                gradient = data.data_ptr() + (piece.offset + begin - piece.start) * data.element_size()
                pieces.append((index[key], end - begin, gradient, *arrays, low + 2 * begin if low else 0,
                               max(0, end - max(begin, after - odd))))
        self._ticket = self._pool.submit(rules, pieces, keep=data)

    def _rule(self, group: int, step: int, low: str, held: str, grad: str) -> kernels.Rule:
        return rule(
            self._rounding, self._spec.name, self._options[group], step, grad=grad, low=low, divisor=self._divisor,
            loss_scale=self._values.loss_scale, clip=self._values.clip, first=step == 1, held=held,
        )

    # -- for Replica --

    def begin(self, source: Slot, step: int, layout: Layout, values: StepValues) -> None:
        """Await the buckets of `layout`. For a step that is skipped a copy of all tensors of `source` is queued."""
        self._layout, self._source, self._values, self.step = layout, source, values, step
        self._set_options(values.groups)
        self._applied = set()
        self._awaited = dict.fromkeys(layout.shapes, 0)
        for name in itertools.chain.from_iterable(map(layout.bucket_names, range(len(layout.buckets)))):
            self._awaited[name] += 1
        self._steps.copy_(source._steps if values.skip else source._steps + 1)
        same = []
        for (name, role), tensor in self._tensors.items():
            if role == "raw":
                tensor.copy_(values.buffers.get(name, source._tensors[name, role]))
            elif values.skip and name in self._order:
                same.append((tensor.data_ptr(), source._where[name, role], tensor.numel() * tensor.element_size()))
        if same:
            self._ticket = self._pool.copies(same)

    def clear(self, step: int, values: Sequence[Mapping[str, Any]]) -> None:
        """Be a version of which every element is anything, and no update has been counted."""
        self.step = step
        self._set_options(values)
        self._steps.zero_()

    def receive(self, step: int) -> None:
        """Be a version that was made elsewhere: whoever has it writes every array of `parameters` and
        `optimizer_state`, which has all of them from here on."""
        self.step, self._layout, self._source = step, None, None
        self._applied, self._awaited = set(), {}
        self._steps.fill_(1.0)

    def received(self, values: Sequence[Mapping[str, Any]]) -> None:
        """values: per group the options of the step that made it. Raises OptimizerError."""
        self._set_options(values)

    def follow(self, source: Slot) -> None:
        """Take from `source` what a step has besides elements: counts of steps, options, buffers."""
        for (name, role), tensor in self._tensors.items():
            if role in ("raw", "steps", "options"):
                tensor.copy_(source._tensors[name, role])

    def _set_options(self, values: Sequence[Mapping[str, Any]]) -> None:
        self._options = self._spec.with_values(values)
        self._rounding.check(self._spec.name, options=self._options)
        rows = [pack(self._spec.name, options) for options in self._options]
        self._packed.copy_(torch.tensor(rows, dtype=torch.float64))

    def load(
        self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Mapping[str, Any]], step: int,
        values: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Become the first version. values: per group what differs from the optimizer's options."""
        self.step = step
        self._set_options(values)
        for (name, role), tensor in self._tensors.items():
            if role == "raw" or role == "low":
                tensor.copy_(parameters[name])
            elif role == "p":
                master = state.get(name, {}).get("master")
                tensor.copy_(parameters[name] if master is None else master)
        for name, at in self._order.items():
            given = state.get(name, {})
            for key in self._states[name]:
                if key in given:
                    self._tensors[name, STATES[key]].copy_(given[key])
                else:
                    self._tensors[name, STATES[key]].zero_()
            held = [key for key in self._states[name] if key in given]
            self._steps[at] = float(given.get("step", 1.0 if held else 0.0))

    def end(self, *, cancel: bool = False) -> None:
        """Wait for the workers; the gradients are let go. cancel: what they have not begun is not done."""
        if cancel:
            self._pool.cancel()
        self.flush()
        self._source = self._layout = None


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
