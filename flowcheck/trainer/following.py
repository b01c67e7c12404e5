"""How one part of a rank is followed: its job, what of it is sent at a boundary, and to which nodes.

    one = Following(part, optimizer, topology, collectives, ...)
    one.connect(addresses, token, tls)          senders begin
    one.before_step(); one.after_step()         what it may not be; hyper-parameters as the step has used them
    one.over(iteration)                         at a boundary: the job is known, or again, or a record goes out
    serve(parts, seconds, n)                    after that, of all parts: the state, to nodes that ask for all of it

An attachment has one of these for each part, and tells all of them what an iteration was. Everything belongs to the
training thread but what senders call: `_opening`, `_said` and the source's `prepare`.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.control.checksum import Sums, begin_checksums
from flowcheck.control.protocol import Flows, Manifest, Notice, Ranges, Record, State, User
from flowcheck.errors import UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.trainer.describe.description import Model, Watch, entries, group_options
from flowcheck.trainer.describe.parts import Part, local
from flowcheck.trainer.framed import Frames
from flowcheck.trainer.loop import AttachmentState, Over
from flowcheck.trainer.nccl.sources import Collectives, Topology, sources_of
from flowcheck.trainer.ranges import Source, Wish
from flowcheck.trainer.sample import Sampler, Taken, states
from flowcheck.trainer.sender import Sender
from flowcheck.trainer.starts import Identity, started

__all__ = ["Following", "serve"]

STATES = [*AttachmentState]
BLANKS = 3
PATIENCE = 10  # iterations of a job that is not known, until that is said


def serve(parts: Sequence[Following], seconds: float, number: int) -> None:
    """After iteration `number`: nodes are told of a job that has become known, and those that ask for all of the state
    get it. That takes `seconds` at most, of all parts together."""
    deadline = time.monotonic() + seconds
    for place, one in enumerate(parts):
        one.open(max(0.0, deadline - time.monotonic()) if place else seconds)
    for one in parts:
        one.serve(deadline, number)


class Following:
    """name: under which a node knows it. unsaid: why the newest iteration has no record. say: a line of the log.
    reduced: called when a backward pass is over, as of Part.listen."""

    def __init__(
        self, part: Part, optimizer: torch.optim.Optimizer, topology: Topology | None,
        collectives: Collectives | None, name: str, run_id: str, epoch: int, say: Callable[[str], None],
        reduced: Callable[[bool], None],
    ) -> None:
        self._reduced = reduced
        self._passes = 0  # backward passes of the iteration that is under way that reduced gradients
        self._watched = 0  # iterations since the job was known
        self._blank = 0  # iterations, with no usual one between, that called otherwise and made no step
        self.part, self.name, self._optimizer, self._say = part, name, optimizer, say
        self.described: Model = entries(part, optimizer)
        self._topology, listed = sources_of(part.group, topology, collectives)
        self.rank, self._ranks = dist.get_rank(part.group), dist.get_world_size(part.group)
        if self._ranks < 2:
            raise UserError("a job of one rank sends no gradients", where="attach", remedy="leave attach out")
        self.watch = Watch(
            part, optimizer, self.described, listed, lambda: self._topology()["communicator"], run_id, epoch
        )
        self.source = Source(part, optimizer, self.described)
        self._sampler = Sampler(part, optimizer, self.described, run_id, epoch)
        self._entries = _named(part)
        self._run = run_id, epoch
        self.job: Job | None = None
        self._first = 0
        self._flows: list[dict[str, Any]] | None = None
        self._groups: list[dict[str, Any]] | None = None  # of the last step
        self._frames = Frames()
        self._stepped_with: list[dict[str, Any]] | None = None  # of the step before the boundary
        self._meeting = False  # the job has just become known
        self.unsaid = ""
        self.summing = 0.0  # seconds that the checksums of the last boundary that had some have taken
        self.senders: list[Sender] = []
        self._answered = threading.Event()  # by any of the nodes
        part.listen(self._heard)

    def _heard(self, whole: bool) -> None:
        self._passes += whole
        self._reduced(whole)

    def connect(
        self, addresses: Sequence[tuple[str, int]], token: Callable[[], bytes], tls: ssl.SSLContext | None,
        iteration: int = 0,
    ) -> None:
        """iteration: the first that is to come."""
        identity = Identity(*self._run, self.rank, self._ranks, self.name, started(self.name, iteration),
                            tuple(dist.get_process_group_ranks(self.part.group)))
        for address in addresses:
            self.senders.append(Sender(
                address, token, identity, self._opening, partial(self._said, address), self._prepare,
                self._answered, tls,
            ))
        for sender in self.senders:
            sender.start()

    # -- what it is --

    @property
    def state(self) -> AttachmentState:
        """That of the best of the nodes."""
        return min((self._state(sender) for sender in self.senders), key=STATES.index)

    def _state(self, sender: Sender) -> AttachmentState:
        if sender.final:
            return AttachmentState.REFUSED
        if not sender.connected:  # the first attempt may still be under way
            return AttachmentState.LOST if sender.tried.is_set() else AttachmentState.WATCHING
        if self.job is None:
            return AttachmentState.WATCHING
        return AttachmentState.ATTACHED if sender.attached else AttachmentState.ATTACHING

    def why(self, closed: bool) -> str:
        """Why it is not attached to a node, each of those; or ""."""
        connected = any(sender.connected for sender in self.senders)
        if self.job is None and (connected or not self.senders):
            return self.watch.why  # whatever a node says meanwhile: it is waiting for the job
        reasons = [(sender, self._why(sender, closed)) for sender in self.senders]
        return "; ".join(f"{self._called(sender.address)}{why}" for sender, why in reasons if why)

    def _why(self, sender: Sender, closed: bool) -> str:
        return sender.why or ("" if closed or self._state(sender) is AttachmentState.ATTACHED else
                              "the node has not joined yet")

    def _called(self, address: tuple[str, int]) -> str:
        """A node, where there are several."""
        return f"{address[0]}:{address[1]}: " if len(self.senders) > 1 else ""

    @property
    def epoch(self) -> int:
        """Under which nodes have versions of this start: the newest, where they number it themselves."""
        return max([self._run[1], *(sender.epoch for sender in self.senders if sender.epoch is not None)])

    @property
    def published(self) -> tuple[int, str]:
        """(iteration, status) of the nodes' newest version; (-1, "") if there is none."""
        return max(((sender.iteration, sender.status) for sender in self.senders), default=(-1, ""))

    # -- the training thread --

    def before_step(self) -> None:
        """Raises UserError for a step that no replica could follow."""
        self.part.check()

    def after_step(self) -> None:
        """The options that it used: a hook of the script may have set them right before it."""
        read = partial(group_options, self.described, self._optimizer)
        self._groups = self._frames.options.of(self._optimizer.param_groups, read)

    def describe(self) -> None:
        """The optimizer has other groups, options or objects. Raises UserError where they cannot be followed."""
        self.described = entries(self.part, self._optimizer)
        self.source = Source(self.part, self._optimizer, self.described)
        self._sampler = Sampler(self.part, self._optimizer, self.described, *self._run)
        self._entries = _named(self.part)
        self._frames = Frames()
        self.watch.redescribe(self.described)

    def odd_entries(self) -> str:
        """What of the state_dict is not as it was described, "": nothing."""
        now = _named(self.part)
        names = sorted(now.keys() ^ self._entries.keys()) or [one for one in now if now[one] != self._entries[one]]
        return f"the model's state_dict is another one ({names[0]} first)" if names else ""

    def constants(self) -> list[torch.Tensor]:
        held = self.part.state_dict(keep_vars=True)
        return [held[entry.name] for entry in self.described.entries if entry.kind == "constant"]

    def over(self, it: Over) -> None:
        """Raises UserError where the job can no longer be followed."""
        self._stepped_with, self._groups = self._groups, None
        passes, self._passes = self._passes, 0
        self.part.over()
        if self.job is not None:
            if self.watch.again(it.number):
                self._check_blank(it)
                self._odd(it)
                return
            self._blank = 0
            if self.watch.passes > 1 and passes != self.watch.passes:
                raise UserError(
                    f"{passes} backward passes reduced gradients, and {self.watch.passes} are an iteration's, with the"
                    " same calls: which of them carries the gradients is not known", where=f"iteration {it.number}",
                    remedy=f"give {self.part.by} a process group of its own",
                )
            if it.renewed:
                self._say(it.renewed)
                self.watch.renew(self.described, it.renewed)
                self._forget()
                return
            if self.part.changed:
                raise UserError(
                    f"iteration {it.number} reduced parameter groups in another order, or otherwise, than those before",
                    where=self.part.by, remedy="layers that run in one order, settings before the first iteration; and"
                    " attach anew",
                )
        else:
            self.job, self._first = self.watch.look(passes), it.number
            self._watched = 0 if self.job is not None else self._watched + 1
            self._say_watching()
            if self.job is not None:
                self._flows = self._topology()["flows"]
                self.part.known(True)
                self.part.listen(self._heard)
                self._meeting = True
                return
        if followers := [sender for sender in self.senders if sender.follows]:
            self._send_record(followers, it)

    def open(self, seconds: float) -> None:
        """Once the job is known, nodes are told; of several, one that is not connected by now is not waited for."""
        if self._meeting:
            if len(self.senders) == 1:
                self.senders[0].tried.wait(seconds)
            for sender in self.senders:
                sender.open_again()

    def serve(self, deadline: float, number: int) -> None:
        """What ranks wait for, until `deadline` by the monotonic clock at most. All of them do so once, when
        the job has become known: until the node has joined the wire, with nothing in flight, and has the state. All
        know it at the same boundary; what they wait for at rank 0 would otherwise hold them up in the next call. A
        node that asks for ranges needs none of it, and one that has to look for channels first asks later."""
        meeting, self._meeting = self._meeting, False
        if meeting and all(flow.get("channel") is not None for flow in self._flows or ()):
            self._serve([sender for sender in self.senders if not sender.by_ranges], deadline, number, meeting=True)
        elif self.job is not None and (wanting := [one for one in self.senders if self._wants(one)]):
            self._serve(wanting, deadline, number)

    def _wants(self, sender: Sender) -> bool:
        return self.rank == 0 and "state" in sender.wanted

    def _say_watching(self) -> None:
        """Where a job stays unknown the log says why, and the node, which hears nothing else of it."""
        if self._watched % PATIENCE or not self._watched:
            return
        if self._watched == PATIENCE:
            self._say(f"{PATIENCE} iterations were watched, and the job is not known yet: {self.watch.why}")
        for sender in self.senders:
            if sender.takes_notice:
                sender.put(Notice(self.watch.why))

    def _check_blank(self, it: Over) -> None:
        """An iteration that a script gives up is one that it does not step in. Raises UserError where that comes again
        and again: boundaries are then not where iterations end."""
        self._blank = 0 if it.stepped else self._blank + 1
        if self._blank >= BLANKS:
            raise UserError(
                f"the optimizer stepped 0 times since the last call of step(), and the iteration reduced otherwise than"
                f" usual: {BLANKS} times, with no whole iteration between", where=f"iteration {it.number}",
                remedy="step() once per iteration, after optimizer.step(); skipped=True if that did nothing",
            )

    def _odd(self, it: Over) -> None:
        """The iteration called what no other does. If all of its gradients came before that it has a record still; the
        node can place nothing after it, until the job is known again."""
        self._say(self.watch.why)
        if self.watch.whole and not it.renewed and not self.part.changed and (
            followers := [sender for sender in self.senders if sender.follows]
        ):
            self._send_record(followers, it)
        self._forget()

    def _forget(self) -> None:
        """The job is not known any more."""
        self.job = None
        self.part.known(False)
        for sender in self.senders:
            sender.wanted, sender.joined, sender.pledged = frozenset(), None, None

    def _serve(self, senders: list[Sender], deadline: float, over: int, meeting: bool = False) -> None:
        """Give the state to those that want it, once each, and wait until they have it. meeting: wait until the others
        have joined, too, or want it."""
        given: dict[Sender, str] = {}  # and what each had noticed by then
        number = Clock().after(over)  # of updates so far, which is the number of the next iteration
        self._answered.clear()
        while True:
            wanting = [sender for sender in senders if sender not in given and self._wants(sender)]
            given |= {sender: sender.notice for sender in wanting}
            if wanting:
                self._send_state(wanting, number)
            waiting = [
                sender for sender in senders if sender.connected and (
                    # Wanted again, or something noticed: it came too late. Again at the next boundary, or when asked.
                    sender.joined != number and "state" not in sender.wanted and sender.notice in ("", given[sender])
                    if sender in given else meeting and sender.joined is None
                )
            ]
            left = deadline - time.monotonic()
            if not waiting or left <= 0:
                return
            self._answered.wait(left)
            self._answered.clear()

    def _options(self) -> list[dict[str, Any]]:
        """As the step used them; where it made none, as they are."""
        return self._stepped_with or group_options(self.described, self._optimizer)

    def _send_record(self, senders: list[Sender], it: Over) -> None:
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
        kept = it.kept() if any(sender.takes_user for sender in senders) else None
        clip, scale = None if clip is None else float(clip), None if it.scale is None else float(it.scale)
        options = self._options()
        if not it.checked and not self.described.buffers and (sample := self._sampler.text(it.number)):
            # Numbers alone, of what is here and as it was.
            text = self._frames.record(options, it.number, clip, scale, bool(it.skipped), sample, 0)
            senders = [one for one in senders if self._put_now(one, it, kept, text) is None]
            if not senders:
                return
        self._send_made(senders, it, Record(it.number, options, clip, scale, bool(it.skipped)), kept)

    def _put_now(self, sender: Sender, it: Over, kept: bytes | None, text: bytes) -> bool | None:
        self._answer(sender, it.number)
        return sender.put_now(it.number, it.rank, kept if sender.takes_user else None, text)

    def _answer(self, sender: Sender, number: int) -> None:
        """Before the record: who has that has what it asked for."""
        for link, wish in sender.asked():
            sender.put(*self.source.answer(wish, number), asked_on=link)

    def _send_made(self, senders: list[Sender], it: Over, record: Record, kept: bytes | None) -> None:
        held: Mapping[str, torch.Tensor] = {}
        sums: Sums | None = None
        buffers = self.described.buffers
        if buffers or it.checked:
            state = self.part.state_dict()
            if it.checked:
                begin = time.monotonic()
                tensors = {entry.name: state[entry.name] for entry in self.described.entries}
                sums = begin_checksums(states(self.described, self._optimizer) | tensors)
                self.summing = time.monotonic() - begin
            if self.rank == 0:
                held = {f"buffer.{name}": state[name].detach().to("cpu", copy=True) for name in buffers}
        payload = self._sampler.take(it.number, held)
        fill: Callable[[Record], None] | None = partial(_filled, sums, payload)
        if sums is None and payload.here:  # nothing has to be waited for
            record.sample, fill = payload.text(), None
        for sender in senders:
            self._answer(sender, it.number)
            own: list[tuple[Any, Any]] = []
            if kept is not None and sender.takes_user:
                own.append((User(it.number, it.rank), kept))
            sender.put_all([*own, (record, payload)], fill)

    def _send_state(self, senders: list[Sender], number: int) -> None:
        """Model and optimizer as they are now, before iteration `number`."""
        for sender in senders:
            sender.wanted, sender.joined = sender.wanted - {"state"}, None
            sender.pledged = number
        tensors = {f"model.{name}": tensor.detach().to("cpu", copy=True)
                   for name, tensor in self.part.state_dict().items()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self.described.names.get(id(parameter))
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if name is not None and isinstance(value, torch.Tensor):
                        tensors[f"optimizer.{name}.{key}"] = local(value).detach().to("cpu", copy=True)
        state = State(number, self._options())
        for sender in senders:
            if not sender.put(state, tensors):
                sender.pledged = None

    # -- other threads --

    def _prepare(self, message: Ranges, room: int) -> Wish:
        return self.source.prepare(message, room)

    def _opening(self) -> list[Any]:
        """What a new connection begins with, as far as it is known."""
        out: list[Any] = []
        if self._flows is not None:
            out.append(Flows(self._flows))
        if self.job is not None and self.rank == 0:
            out.append(Manifest(self.job.to_dict(), self._first))
        return out

    def _said(self, address: tuple[str, int], why: str) -> None:
        self._say(f"{self._called(address)}{why}")


def _filled(sums: Sums | None, taken: Taken, record: Record) -> None:
    """On a thread that sends; the first one waits for the device."""
    if sums is not None:
        record.checksums = {name: f"{value:016x}" for name, value in sums.get().items()}
    record.sample = taken.text()


def _named(part: Part) -> dict[str, int]:
    """Entries of the state_dict: of a parameter which object it is; a buffer may be another one each time."""
    return {name: id(value) if isinstance(value, torch.nn.Parameter) else 0
            for name, value in part.state_dict(keep_vars=True).items()} | dict.fromkeys(part.extra(), 0)
