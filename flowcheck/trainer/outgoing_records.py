"""What goes out of a part at each boundary: a record, and before it the elements that nodes have asked for.

    records.before_step(0), after_step(0)       hyper-parameters as the step of that member uses them, or has used them
    records.turn()                              at a boundary: the step before it is the last one
    records.send(senders, iteration)            its record, to those that follow
    records.prepare(message, room)              the listening threads: as of Source

A record that needs nothing of a device goes out at once. Another one is completed on a thread that sends. The training
thread, but for `prepare`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from flowcheck.control.checksum import Sums, begin_checksums
from flowcheck.control.protocol import Ranges, Record, User
from flowcheck.job.clock import Clock
from flowcheck.job.model import LOG
from flowcheck.trainer.connection.framed import Frames
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.described import Model, group_options, named
from flowcheck.trainer.describe.optimizers import members
from flowcheck.trainer.describe.parts import Part
from flowcheck.trainer.log.hidden import Hidden
from flowcheck.trainer.log.summed import summed
from flowcheck.trainer.log.upload import BaseUpload
from flowcheck.trainer.loop import Over
from flowcheck.trainer.ranges import Source, Wish
from flowcheck.trainer.sample import Sampler, Taken, states
from flowcheck.trainer.unchanged import Unchanged

__all__ = ["OutgoingRecords"]


class OutgoingRecords:
    """described: of this part and optimizer. leads: this is the rank that sends what all ranks have alike. say: a line
    of the log.

    source: the state, by elements. unsaid: why the newest iteration has no record, "": it has. summing: seconds that
    the checksums of the last boundary that had some have taken."""

    def __init__(
        self, part: Part, optimizer: torch.optim.Optimizer, described: Model, run_id: str, epoch: int, leads: bool,
        say: Callable[[str], None],
    ) -> None:
        self._part, self._optimizer, self._run, self._leads, self._say = part, optimizer, (run_id, epoch), leads, say
        self._groups: dict[int, list[dict[str, Any]]] = {}  # of the last step of each member
        self._stepped_with: list[dict[str, Any]] | None = None  # of the step before the boundary
        self.unsaid = ""
        self.summing = 0.0
        self.describe(described)

    def describe(self, described: Model) -> None:
        """As the job is now."""
        self._described = described
        self.source = Source(self._part, self._optimizer, described)
        self._sampler = Sampler(self._part, self._optimizer, described, *self._run)
        self._frames = Frames()
        self._members = [(one, described.of(self._optimizer, which), Unchanged())
                         for which, one in enumerate(members(self._optimizer))]
        self._logged = described.stepping.kind == LOG
        self._base, self._hidden = None, [Hidden(one) for one, _, _ in self._members] if self._logged else []
        if self._logged and self._leads:
            self._base = BaseUpload(self._optimizer, self._parameters, self._constants)

    def _parameters(self) -> dict[str, torch.Tensor]:
        return named(self._optimizer, self._described.names)

    def _constants(self) -> dict[str, torch.Tensor]:
        held = self._part.state_dict(keep_vars=True)
        return {entry.name: held[entry.name] for entry in self._described.entries if entry.kind == "constant"}

    def prepare(self, message: Ranges, room: int) -> Wish:
        return self.source.prepare(message, room)

    def before_step(self, which: int) -> None:
        """The options that it will use: of a log all of them, in which an optimizer may count its steps. Raises
        UserError for some that a record cannot have."""
        if self._hidden:
            optimizer, described, _ = self._members[which]
            self._groups[which] = group_options(described, optimizer)
            self._hidden[which].before()

    def after_step(self, which: int) -> None:
        """The options that it used: a hook of the script may have set them right before it. Raises UserError where the
        step has changed what a redo would not find."""
        if self._hidden:
            self._hidden[which].after()
            if (found := self._hidden[which].found) is not None:
                raise found
            return
        optimizer, described, last = self._members[which]
        self._groups[which] = last.of(optimizer.param_groups, partial(group_options, described, optimizer))

    def turn(self) -> None:
        """Several make a step together."""
        taken, self._groups = self._groups, {}
        if len(taken) < len(self._members):
            self._stepped_with = None
        elif len(self._members) == 1:
            self._stepped_with = taken[0]
        else:
            self._stepped_with = [one for which in range(len(self._members)) for one in taken[which]]

    def options(self) -> list[dict[str, Any]]:
        """As the step used them; where it made none, as they are."""
        return self._stepped_with or group_options(self._described, self._optimizer)

    def send(self, senders: list[Sender], it: Over) -> None:
        """To those that follow."""
        self._send(senders, it)
        if self._base is not None:
            self._base.over(senders, Clock().after(it.number))

    def _send(self, senders: list[Sender], it: Over) -> None:
        clip = it.clip
        if it.skipped and clip is not None and not math.isfinite(clip):
            clip = 1.0  # no gradient was used, whatever it was multiplied with: the norm of an overflow is no number
        for what, value in (("clip", clip), ("scale", it.scale)):
            if value is not None and not math.isfinite(value):
                # What such a step leaves behind is NaN of no defined sign: no record, so the node asks for a state.
                why = f"no record of iteration {it.number}: {what} is {float(value)}"
                if not self.unsaid:
                    self._say(why)
                self.unsaid = why
                return
        self.unsaid = ""
        kept = it.kept() if any(sender.node.takes_user for sender in senders) else None
        clip, scale = None if clip is None else float(clip), None if it.scale is None else float(it.scale)
        options = self.options()
        if not it.checked and not self._described.buffers and (sample := self._sampler.text(it.number)):
            # Numbers alone, of what is here and as it was.
            text = self._frames.record(options, it.number, clip, scale, bool(it.skipped), sample, 0)
            for sender in senders:
                self._answer(sender, it.number)
            senders = [one for one in senders if one.put_now(
                it.number, it.rank, kept if one.node.takes_user else None, text) is None]
            if not senders:
                return
        self._send_made(senders, it, Record(it.number, options, clip, scale, bool(it.skipped)), kept)

    def _answer(self, sender: Sender, number: int) -> None:
        """Before the record: who has that has what it asked for."""
        for link, wish in sender.requests.asked():
            sender.put(*self.source.answer(wish, number), asked_on=link)

    def _send_made(self, senders: list[Sender], it: Over, record: Record, kept: bytes | None) -> None:
        held: Mapping[str, torch.Tensor] = {}
        sums: Sums | None = None
        buffers = self._described.buffers
        if buffers or it.checked:
            state = self._part.state_dict()
            if it.checked:
                begin = time.monotonic()
                tensors = {entry.name: state[entry.name] for entry in self._described.entries}
                held_states = summed(self._parameters(), self._optimizer) if self._logged else states(
                    self._described, self._optimizer)
                sums = begin_checksums(held_states | tensors)
                self.summing = time.monotonic() - begin
            if self._leads:
                held = {f"buffer.{name}": state[name].detach().to("cpu", copy=True) for name in buffers}
        payload = self._sampler.take(it.number, held)
        fill: Callable[[Record], None] | None = partial(_filled, sums, payload)
        if sums is None and payload.here:  # nothing has to be waited for
            record.sample, fill = payload.text(), None
        for sender in senders:
            self._answer(sender, it.number)
            own: list[tuple[Any, Any]] = []
            if kept is not None and sender.node.takes_user:
                own.append((User(it.number, it.rank), kept))
            sender.put_all([*own, (record, payload)], fill)


def _filled(sums: Sums | None, taken: Taken, record: Record) -> None:
    """On a thread that sends; the first one waits for the device."""
    if sums is not None:
        record.checksums = {name: f"{value:016x}" for name, value in sums.get().items()}
    record.sample = taken.text()
