"""Copies of gradients that are on their way: two, so that a step is copied while the one before is sent.

    slots = Slots(layout)
    slot = slots.take()                 for a step that is about to be made; None: both are not free
    slot.begin(0)                       begins a copy of what that optimizer is about to read
    slot.settle()                       right before the step, of an optimizer that may write to gradients itself
    slot.end()                          right after it: waits until that memory may be written
    slot.pieces(iteration)              for each node that it is sent to (connection/bulk_queue.py)

A copy is made while the optimizer steps: by a thread, or on a GPU by a stream of its own, into memory that is pinned
for it. `optimizer.step()` returns when it is done, on a GPU only its stream waits: what a script writes to gradients
after that, counted or not, is nothing to it. What torch has counted as written to before is not sent (`spoilt`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch

from flowcheck.control.checksum import sum_text
from flowcheck.control.protocol import Fed, Unfed
from flowcheck.errors import UserError
from flowcheck.trainer.describe.parts import local
from flowcheck.trainer.feed.layout import FeedLayout, gradient_of

__all__ = ["Slot", "Slots"]

SLOTS = 2
SPOILT = "gradients were written to before they were copied"
_Held = list[tuple[torch.Tensor, torch.Tensor, int]]  # gradients, where they go, and their counts of writes


class _Pieces(Iterator[tuple[Fed | Unfed, memoryview]]):
    """Of one slot, to one node: bucket by bucket. The thread that sends."""

    def __init__(self, slot: Slot, iteration: int) -> None:
        self._slot, self._iteration, self._next = slot, iteration, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Fed | Unfed, memoryview]:
        number = self._next
        if not number and not self._slot.copied():
            self._next = len(self._slot.buckets)
            return Unfed(self._iteration, SPOILT), memoryview(b"")
        if number == len(self._slot.buckets):
            raise StopIteration
        self._next += 1
        data = self._slot.bytes_of(number)
        bucket = self._slot.numbers[number]
        return Fed(self._iteration, bucket, len(data), self._slot.sum(number), 0), data


class Slot:
    """stream: of the device that has the gradients; None: this machine's memory has them, and `thread` copies.

    buckets: 1-D, as the layout says. numbers: of these, in the manifest. nbytes: of all of them. spoilt: gradients were
    written to before they were copied."""

    def __init__(self, layout: FeedLayout, thread: ThreadPoolExecutor, stream: Any) -> None:
        self._layout, self._thread, self._stream, self.numbers = layout, thread, stream, layout.numbers
        pinned = stream is not None
        self.buckets = [torch.empty(count, dtype=layout.dtype, pin_memory=pinned) for count in layout.elements]
        self.nbytes = sum(one.nbytes for one in self.buckets)
        self._sums: list[str] = [""] * len(self.buckets)
        self._reading: weakref.WeakSet[_Pieces] = weakref.WeakSet()
        self._held: _Held = []
        self._copy: Future[None] | None = None  # the newest; they are made one after the other
        self._event: Any = None
        self.spoilt = False

    @property
    def free(self) -> bool:
        return not self._reading and (self._copy is None or self._copy.done())

    def empty(self) -> None:
        """For another step."""
        self._sums, self.spoilt = [""] * len(self.buckets), False

    def begin(self, which: int = 0) -> None:
        """which: of the optimizers. Raises UserError: a gradient is not what it was when the job became known."""
        held: _Held = []
        for into, bucket, reads in zip(self.buckets, self._layout.buckets, self._layout.of, strict=True):
            at = 0
            if reads != which:
                continue
            for name, parameter in bucket:
                if not local(parameter).numel():
                    continue  # it may be another optimizer's
                grad = gradient_of(name, parameter).detach()
                if grad.dtype != into.dtype:
                    raise UserError(f"parameter {name} has a gradient of {grad.dtype}, and had one of {into.dtype}",
                                    where="optimizer", remedy="gradients of one kind in every iteration")
                held.append((grad, into[at : at + grad.numel()].view(grad.shape), grad._version))
                at += grad.numel()
        self._held = held
        if not held:
            return
        if self._stream is None:
            self._copy = self._thread.submit(_copy_all, held)
        else:
            self._copy_on_stream()

    def _copy_on_stream(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._layout.device))
        with torch.cuda.stream(self._stream):
            for grad, into, _ in self._held:
                into.copy_(grad, non_blocking=True)
                grad.record_stream(self._stream)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def settle(self) -> None:
        """Whatever the step writes to gradients comes after the copy."""
        self._wait()
        self._held = []

    def end(self) -> None:
        """Whatever comes after the step does, too. Was a gradient written to since its copy was begun?"""
        self._wait()
        self.spoilt |= any(grad._version != before for grad, _, before in self._held)
        self._held = []

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._layout.device).wait_event(self._event)
        elif self._copy is not None:
            self._copy.result()

    def copied(self) -> bool:
        """Waits for the copy. False: it is of no use. A thread that sends."""
        if self._event is not None:
            self._event.synchronize()
        elif self._copy is not None:
            self._copy.result()
        return not self.spoilt

    def pieces(self, iteration: int) -> Iterator[tuple[Fed | Unfed, memoryview]]:
        """Of a copy that is of no use one, which says so."""
        found = _Pieces(self, iteration)
        self._reading.add(found)
        return found

    def bytes_of(self, number: int) -> memoryview:
        return self.buckets[number].view(torch.uint8).numpy().data

    def sum(self, number: int) -> str:
        """Of several nodes the first one's thread forms it."""
        if not self._sums[number]:
            self._sums[number] = sum_text(self.bytes_of(number))
        return self._sums[number]


def _copy_all(held: _Held) -> None:
    """A thread of its own."""
    for grad, into, _ in held:
        into.copy_(grad)


class Slots:
    """Memory: twice the gradients, from the first use on."""

    def __init__(self, layout: FeedLayout) -> None:
        self._layout = layout
        self._thread = ThreadPoolExecutor(1, "flowcheck feed")
        self._stream = torch.cuda.Stream(layout.device) if layout.device.type == "cuda" else None
        self._slots: list[Slot] = []

    def take(self) -> Slot | None:
        slot = next((one for one in self._slots if one.free), None)
        if slot is None and len(self._slots) < SLOTS:
            slot = Slot(self._layout, self._thread, self._stream)
            self._slots.append(slot)
        if slot is not None:
            slot.empty()
        return slot

    def close(self) -> None:
        """No step is copied any more."""
        self._thread.shutdown(wait=False)
