"""The slots of a replica: which state each is in, which may be written over, and who keeps one from that.

    FREE -> BUILDING -> COMPLETE <-> PINNED        take, complete, pin, last unpin
             | |           `-> FREE                the oldest complete version makes room, or one is withdrawn
             | `-> PARTIAL -> FREE                 held; its successor is held or complete, or it is abandoned
             `-> FREE                              an iteration that was lost

What each state means to who reads and builds: updater/replica.py, updater/slot.py. Changes of state belong to the
thread that builds, pins to any.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from updater.errors import NoFreeSlot, ReplicaError
from updater.slot import Slot, SlotState
from updater.store import BUILDING, COMPLETE, FREE, Store

__all__ = ["Slots"]

_EDGES = {
    SlotState.FREE: (SlotState.BUILDING,),
    SlotState.BUILDING: (SlotState.COMPLETE, SlotState.PARTIAL, SlotState.FREE),
    SlotState.PARTIAL: (SlotState.FREE,),
    SlotState.COMPLETE: (SlotState.PINNED, SlotState.FREE),
    SlotState.PINNED: (SlotState.COMPLETE,),
}
_WHOLE = (SlotState.COMPLETE, SlotState.PINNED)


class Slots:
    """slots: of a replica, by number, free. store: where they lie. refused: how often a slot was wanted and none was
    free."""

    def __init__(self, slots: list[Slot], store: Store) -> None:
        self.all, self._store = slots, store
        self.refused = 0
        self._newest: Slot | None = None
        self._kept: tuple[int, ...] = ()
        self._withdrawn: set[int] = set()  # slots that this process has pinned, and nobody else may any more
        self._lock = threading.Lock()

    def find(self, newest: int) -> None:
        """Read the states from an attached file; of the complete versions the one in slot `newest` is the current one.
        """
        for slot in self.all:
            state, slot.step = self._store.slot_header(slot.index) or (FREE, 0)
            slot.state = SlotState.COMPLETE if state == COMPLETE else SlotState.FREE
            if state == BUILDING:
                self._store.set_slot_header(slot.index, FREE, 0)
        self._newest = self.all[newest]

    # -- what there is --

    @property
    def current(self) -> Slot:
        """The newest complete version. Raises ReplicaError if no version is complete."""
        if self._newest is None:
            raise ReplicaError("no version of this replica is complete yet")
        return self._newest

    @property
    def empty(self) -> bool:
        return self._newest is None

    @property
    def building(self) -> Slot | None:
        return next((slot for slot in self.all if slot.state is SlotState.BUILDING), None)

    @property
    def partial(self) -> Slot | None:
        return next((slot for slot in self.all if slot.state is SlotState.PARTIAL), None)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete versions, newest last."""
        return sorted(slot.step for slot in self.all if self._is_readable(slot))

    def _is_readable(self, slot: Slot) -> bool:
        return slot.state in _WHOLE and slot.index not in self._withdrawn

    # -- building --

    def take(self, step: int) -> Slot:
        """A slot in which version `step` is built: a free one, else a complete one that nobody, here or in another
        process, has pinned: the oldest that is not kept, then the least of those that are. Raises NoFreeSlot."""
        with self._lock:
            idle = [s for s in self.all if s.state in (SlotState.FREE, SlotState.COMPLETE) and s is not self._newest]
            last = {step: -i for i, step in enumerate(self._kept)}

            def worth(slot: Slot) -> tuple[int, int]:
                if slot.state is SlotState.FREE:
                    return 0, slot.step
                return (2, last[slot.step]) if slot.step in last else (1, slot.step)

            for slot in sorted(idle, key=worth):
                if self._store.lock_slot(slot.index):
                    if slot.state is SlotState.COMPLETE:
                        self.set_state(slot, SlotState.FREE)
                    slot.step = step
                    self.set_state(slot, SlotState.BUILDING)
                    return slot
            self.refused += 1
            raise NoFreeSlot(f"all {len(self.all)} slots are current or pinned; the update waits")

    def complete(self, slot: Slot) -> None:
        """A version is there to be read. The first one of a replica gives its file a name."""
        self._store.set_time(slot.index, time.time_ns())
        with self._lock:
            self.set_state(slot, SlotState.COMPLETE)
            first, self._newest = self._newest is None, slot
        if first:
            self._store.publish_file()

    def hold(self, slot: Slot) -> None:
        """What was built is the partial version."""
        with self._lock:
            self.set_state(slot, SlotState.PARTIAL)

    def free(self, slot: Slot) -> None:
        """What was being built, or was partial, is given up."""
        with self._lock:
            self.set_state(slot, SlotState.FREE)

    def keep(self, steps: Sequence[int]) -> None:
        """Take the slots of these steps last, the first of them last of all, until other ones are said."""
        self._kept = tuple(steps)

    # -- reading, and going back --

    @contextmanager
    def pinned(self) -> Iterator[Slot]:
        """The current version, kept as it is until the block is left. Raises ReplicaError if that cannot be."""
        with self._lock:
            slot = self.current
            try:
                lock = self._store.pin(slot.index) if self._store.fd >= 0 else None
            except OSError as error:
                raise ReplicaError(f"version {slot.step} cannot be pinned: {error.strerror}") from None
            if slot.state is SlotState.COMPLETE:
                self.set_state(slot, SlotState.PINNED)
            slot.pins += 1
        try:
            yield slot
        finally:
            with self._lock:
                slot.pins -= 1
                if not slot.pins:
                    self.set_state(slot, SlotState.COMPLETE)
                    if slot.index in self._withdrawn:
                        self._withdrawn.discard(slot.index)
                        self.set_state(slot, SlotState.FREE)
                if lock is not None:
                    os.close(lock)

    def withdraw(self, after: int) -> list[int]:
        """Nobody can read complete versions of later steps than `after` any more. A pinned one's slot is used again
        when it is let go of. Returns their steps."""
        with self._lock:
            gone = [slot for slot in self.all if slot.step > after and self._is_readable(slot)]
            for slot in sorted(gone, key=lambda slot: -slot.step):  # the newest first: whatever a kill leaves, is whole
                if slot.state is SlotState.PINNED:
                    self._withdrawn.add(slot.index)
                    self._store.set_slot_header(slot.index, FREE, 0)
                else:
                    self.set_state(slot, SlotState.FREE)
            left = [slot for slot in self.all if self._is_readable(slot)]
            self._newest = max(left, key=lambda slot: slot.step, default=None)
        return sorted(slot.step for slot in gone)

    def rollback(self, step: int) -> None:
        """The complete version `step` is the current one; newer ones are given up. Raises ReplicaError, NoFreeSlot."""
        with self._lock:
            found = next((s for s in self.all if s.step == step and s.state in _WHOLE), None)
            if found is None:
                raise ReplicaError(f"no complete version {step}; there is {', '.join(map(str, self.steps))}")
            whole = sorted((s for s in self.all if s.state in _WHOLE), key=lambda s: -s.step)
            for slot, older in itertools.pairwise(whole):  # the newest first: whatever a kill leaves, is whole
                if slot is found:
                    break
                if slot.state is SlotState.PINNED or not self._store.lock_slot(slot.index):
                    raise NoFreeSlot(f"version {slot.step} is pinned; it cannot be given up yet")
                self._newest = older
                self.set_state(slot, SlotState.FREE)
                self._store.unlock_slot(slot.index)

    def set_state(self, slot: Slot, state: SlotState) -> None:
        """The only place where a slot changes state, but for what an earlier process left (find)."""
        if state not in _EDGES[slot.state]:
            raise ReplicaError(f"slot {slot.index} cannot go from {slot.state.value} to {state.value}")
        before, slot.state = slot.state, state
        if state is SlotState.PINNED or before is SlotState.PINNED:
            return  # of this process alone
        if before in (SlotState.BUILDING, SlotState.PARTIAL) and state is not SlotState.PARTIAL:
            self._store.unlock_slot(slot.index)  # first: whoever sees a version can pin it, however slow this process
        word = {SlotState.FREE: FREE, SlotState.COMPLETE: COMPLETE}.get(state, BUILDING)
        self._store.set_slot_header(slot.index, word, slot.step if state is not SlotState.FREE else 0)
