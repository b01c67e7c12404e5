"""A rank's gradients, as its optimizer reads them, to nodes that keep a log: in place of a mirror.

    feed = Feed(group, optimizer, described, run_id, epoch, leads)
    feed.before_step(0, last, followed) right before the update of that optimizer: what it reads is copied
    feed.look()                         at a boundary: the manifest, once a step has shown what gradients are
    feed.after_step()                   right after it: the copy is done
    feed.over(senders, it)              at a boundary: the copy goes out, or why it does not

At the hook of the optimizer's step gradients are final, whatever has made them: reduced, divided, unscaled, clipped. So
the manifest says no factor, and neither does a record. Where a fused optimizer unscales them itself they are not, and
the job is refused by name. Ranks that hold the same send each a share of it (flowcheck/job/givers.py).

It has the face of a Watch (describe/description.py) for whoever follows a part. The training thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.control.protocol import Unfed
from flowcheck.errors import UserError
from flowcheck.job.model import Job
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.described import Model
from flowcheck.trainer.describe.optimizers import members
from flowcheck.trainer.feed.layout import FeedLayout, Read, feed_layout, read_by
from flowcheck.trainer.feed.slots import Slot, Slots
from flowcheck.trainer.loop import Over

__all__ = ["Feed"]

BUSY = "the copies of two earlier steps are still on their way to a node"
NOT_FOLLOWED = "no node was ready for gradients when the step was made"
NOT_LAST = "another hook came between the copy of gradients and the optimizer's update"
EARLY = "gradients were formed since the optimizer's last step: is attachment.step() called before optimizer.step()?"
MEASURED = 10
_log = logging.getLogger("flowcheck")
UNTAKEN = "no gradients were taken: the optimizer's step was not heard"


class _Cost:
    """What copies take of the thread that trains, said once, of the first MEASURED steps that are sent."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seconds: list[float] = []
        self._this = 0.0

    @contextmanager
    def part(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._this += time.perf_counter() - begun

    def over(self, nbytes: int) -> None:
        """nbytes: that this step sends; 0: it sends nothing."""
        this, self._this = self._this, 0.0
        if nbytes and len(self._seconds) < MEASURED:
            self._seconds.append(this)
            if len(self._seconds) == MEASURED:
                self._say(f"sends {nbytes:,} bytes a step, whose copy takes {1e3 * median(self._seconds):.3g} ms of it"
                          f" here (median of {MEASURED} steps)")


class Feed:
    """group: of ranks that hold the same. say: a line of the log."""

    passes = 1
    whole = False

    def __init__(
        self, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer, described: Model, run_id: str, epoch: int,
        say: Callable[[str], None],
    ) -> None:
        self._group, self._optimizer, self._described = group, optimizer, described
        self._identity, self._say = (run_id, epoch), say
        self._read: dict[int, list[Read]] = {}  # by member, until all have stepped
        self._stepped: set[int] = set()  # members, in this iteration
        self._layout: FeedLayout | None = None
        self._slots: Slots | None = None  # None: it is not known yet, or this rank has no share
        self._taken: Slot | None = None
        self._empty = False  # all that this rank has to send has no elements
        self._cost = _Cost(say if dist.get_rank() == 0 else _log.info)  # one line of a job
        self._formed = False  # gradients, since the last step
        self._listener: Any = None  # hears that
        self._why = UNTAKEN
        self.skipped = 0  # steps that were not copied, because both slots were on their way
        self.why = "the optimizer's first step is waited for"

    # -- around the step --

    def before_step(self, which: int, last: bool, followed: bool) -> None:
        """which: of the optimizer's members. last: no hook comes between this and the update. followed: somebody takes
        gradients. Raises UserError: what the step reads cannot be sent."""
        optimizer = members(self._optimizer)[which]
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UserError("the optimizer unscales gradients itself (fused, with a GradScaler)", where="optimizer",
                            remedy="scaler.unscale_(optimizer) before its step; or no fused=True")
        self._formed = False
        self._stepped.add(which)
        if self._layout is None:
            self._lay_out(which, optimizer)
        elif self._slots is not None:
            self._copy(which, optimizer, last, followed)

    def _lay_out(self, which: int, optimizer: torch.optim.Optimizer) -> None:
        """Once each member has stepped: of no other is it known what it reads."""
        self._read[which] = read_by(self._described, optimizer)
        each = range(len(members(self._optimizer)))
        if len(self._read) == len(each):
            self._layout = feed_layout([self._read[one] for one in each], dist.get_world_size(self._group))
            self._read = {}

    def _copy(self, which: int, optimizer: torch.optim.Optimizer, last: bool, followed: bool) -> None:
        assert self._slots is not None
        if not followed or not last:
            self._taken, self._why = None, NOT_LAST if followed else NOT_FOLLOWED
            return
        if self._why == UNTAKEN and self._taken is None:  # the first to step
            self._taken = self._slots.take()
            self._why = "" if self._taken is not None else BUSY
            if self._taken is None:
                self._skip()
        if self._taken is not None:
            with self._cost.part():
                self._taken.begin(which)
                if not _leaves_gradients(optimizer):
                    self._taken.settle()

    def _skip(self) -> None:
        self.skipped += 1
        if self.skipped in (1, 10) or self.skipped % 100 == 0:
            self._say(f"{self.skipped} steps were not sent: a node takes less than training makes; {BUSY}")

    def after_step(self) -> None:
        if self._taken is not None:
            with self._cost.part():
                self._taken.end()

    def over(self, senders: Sequence[Sender], it: Over) -> None:
        """Raises UserError: this is not where an iteration ends."""
        slot, self._taken = self._taken, None
        why, self._why = self._why, UNTAKEN
        stepped, self._stepped = self._stepped, set()
        if slot is not None and len(stepped) < len(members(self._optimizer)):
            slot, why = None, UNTAKEN
        self._cost.over(slot.nbytes if slot is not None and not it.skipped else 0)
        if self._formed and not it.skipped:
            raise UserError(EARLY, where=f"iteration {it.number}", remedy="attachment.step() after optimizer.step()")
        if self._slots is None and not self._empty:
            return
        for sender in senders:  # one way for all: what is not sent comes after what was
            if it.skipped or slot is None:
                nothing = Unfed(it.number, "" if it.skipped or self._empty else why)
                sender.put_bulk(sender.feed, iter([(nothing, memoryview(b""))]), 0)
            else:
                sender.put_bulk(sender.feed, slot.pieces(it.number), slot.nbytes)

    # -- as a Watch --

    def look(self, passes: int = 1) -> Job | None:
        """passes: nothing of it is heard."""
        if self._layout is None:
            return None
        ranks = dist.get_world_size(self._group)
        share = self._layout.share(dist.get_rank(self._group), ranks)
        self._empty = bool(share.buckets) and not sum(share.elements)
        if share.buckets and not self._empty and self._slots is None:
            self._slots = Slots(share)
        self._listen()
        return self._layout.job(self._described, self._identity, ranks, self._optimizer)

    def _listen(self) -> None:
        """To the backward passes. What Megatron-Core steps has none."""
        held = (one for bucket in self._layout.buckets for _, one in bucket) if self._layout is not None else ()
        one = next((one for one in held if one.requires_grad and one.is_leaf and one.numel()), None)
        if one is not None and self._listener is None:
            self._listener = one.register_post_accumulate_grad_hook(self._heard)

    def _heard(self, _: torch.Tensor) -> None:
        """Called by torch."""
        self._formed = True

    def again(self, iteration: int) -> str:
        return ""

    def renew(self, described: Model, why: str) -> None:
        self.redescribe(described)
        self.why = f"{why}; joined anew by the next iteration"

    def redescribe(self, described: Model) -> None:
        self.close()
        self._described, self._layout, self._slots, self._taken = described, None, None, None
        self._read, self._why = {}, UNTAKEN

    def close(self) -> None:
        """No step is copied any more. May be called twice."""
        if self._slots is not None:
            self._slots.close()
        if self._listener is not None:
            self._listener.remove()
            self._listener = None


def _leaves_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Does its step only read them? Of torch's own all do, but for foreach with nesterov. Others may write to them
    where nothing counts it."""
    return type(optimizer).__module__.startswith("torch.optim.") and not any(
        group.get("nesterov") for group in optimizer.param_groups)
