"""How one part of a rank is followed: its job, what of it is sent at a boundary, and to which nodes.

    one = Following(part, optimizer, topology, collectives, ...)
    one.connect(addresses, token, tls)          senders begin
    one.before_step(0)                          what no step may be; of which of its optimizers
    one.over(iteration)                         at a boundary: the job is known, or again, or a record goes out
    serve(parts, seconds, n)                    after that, of all parts: the state, to nodes that ask for all of it

An attachment has one of these for each part, and gives each iteration to all of them. The nodes are in nodes.py,
records in records.py, and the whole state goes up by state_upload.py. Everything belongs to the training thread but
what senders call: `_opening`, and the records' `prepare`.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flowcheck.control.protocol import Flows, Manifest, Notice
from flowcheck.errors import UserError
from flowcheck.job.model import FEED, MIRROR, REPLICA
from flowcheck.trainer.describe.described import Model
from flowcheck.trainer.describe.description import Watch, entries
from flowcheck.trainer.describe.parts import Part
from flowcheck.trainer.feed.feed import Feed
from flowcheck.trainer.loop import AttachmentState, Over
from flowcheck.trainer.nccl.sources import Collectives, Topology, sources_of
from flowcheck.trainer.nodes import Nodes
from flowcheck.trainer.outgoing_records import OutgoingRecords
from flowcheck.trainer.starts import Identity, started
from flowcheck.trainer.state_upload import StateUpload

__all__ = ["Following", "serve"]

BLANKS = 3
PATIENCE = 10  # iterations of a job that is not known, until that is said


def serve(parts: Sequence[Following], seconds: float, number: int) -> None:
    """After iteration `number`: nodes get to know a job that has become known, and those that ask for all of the state
    get it. That takes `seconds` at most, of all parts together."""
    deadline = time.monotonic() + seconds
    for place, one in enumerate(parts):
        one.open(max(0.0, deadline - time.monotonic()) if place else seconds)
    for one in parts:
        one.serve(deadline, number)


class Following:
    """name: under which a node knows it. say: a line of the log. manifest: of the job; None: it is not known.
    reduced: called when a backward pass is over, as of Part.listen. kind: of its versions (Job.kind). source: of its
    gradients (Job.source)."""

    def __init__(
        self, part: Part, optimizer: torch.optim.Optimizer, topology: Topology | None,
        collectives: Collectives | None, name: str, run_id: str, epoch: int, say: Callable[[str], None],
        reduced: Callable[[bool], None], kind: str = REPLICA, source: str = MIRROR,
    ) -> None:
        self._reduced = reduced
        self._passes = 0  # backward passes of the iteration that is under way that reduced gradients
        self._watched = 0  # iterations since the job was known
        self._blank = 0  # iterations, with no usual one between, that called otherwise and made no step
        self.part, self.name, self._optimizer, self._say = part, name, optimizer, say
        self.described: Model = entries(part, optimizer, kind)
        self._leads = dist.get_rank(part.group) == 0
        if source == FEED:
            self.watch: Watch | Feed = Feed(part.group, optimizer, self.described, run_id, epoch, say)
            self._topology: Topology = dict
        else:
            self.watch = self._watch(topology, collectives, run_id, epoch)
        self._entries = _named(part)
        self._run = run_id, epoch
        self.manifest: Manifest | None = None
        self._flows: list[dict[str, Any]] | None = None
        self._meeting = False  # the job has just become known
        self.nodes = Nodes(epoch, say)
        self.records = OutgoingRecords(part, optimizer, self.described, run_id, epoch, self._leads, say)
        self._upload = StateUpload(part, optimizer, self._leads, lambda: self.described.names, self.records.options,
                                   self.nodes.answered)
        part.listen(self._heard)

    def _watch(self, topology: Topology | None, collectives: Collectives | None, run_id: str, epoch: int) -> Watch:
        """Raises UserError: a mirror would see nothing."""
        self._topology, listed = sources_of(self.part.group, topology, collectives)
        if dist.get_world_size(self.part.group) < 2:
            raise UserError("a job of one rank sends no gradients", where="attach", remedy="leave attach out")
        return Watch(self.part, self._optimizer, self.described, listed, lambda: self._topology()["communicator"],
                     run_id, epoch)

    def _heard(self, whole: bool) -> None:
        self._passes += whole
        self._reduced(whole)

    @property
    def feed(self) -> Feed | None:
        """None: gradients come from a mirror."""
        return self.watch if isinstance(self.watch, Feed) else None

    def connect(
        self, addresses: Sequence[tuple[str, int]], token: Callable[[], bytes], tls: ssl.SSLContext | None,
        iteration: int = 0,
    ) -> None:
        """iteration: the first that is to come."""
        group = self.part.group
        identity = Identity(
            *self._run, dist.get_rank(group), dist.get_world_size(group), self.name, started(self.name, iteration),
            tuple(dist.get_process_group_ranks(group)),
        )
        self.nodes.connect(addresses, token, tls, identity, self._opening, self.records.prepare)

    # -- what it is --

    @property
    def state(self) -> AttachmentState:
        """That of the best of the nodes."""
        return self.nodes.state(self.manifest is not None)

    def why(self, closed: bool) -> str:
        """Why it is not attached to a node, each of those; or ""."""
        if self.manifest is None and self.nodes.connected:
            return self.watch.why  # whatever a node says meanwhile: it is waiting for the job
        return self.nodes.why(self.manifest is not None, closed)

    # -- the training thread --

    def before_step(self, which: int, last: bool = True) -> None:
        """which: of the optimizer's members. last: no hook comes between this and the update. Raises UserError for a
        step that nobody could follow."""
        self.part.check()
        self.records.before_step(which)
        if self.feed is not None:
            self.feed.before_step(which, last, any(sender.follows for sender in self.nodes.senders))

    def after_step(self, which: int) -> None:
        """Raises UserError as `before_step`."""
        self.records.after_step(which)
        if self.feed is not None:
            self.feed.after_step()

    def close(self) -> None:
        """Let go of the model."""
        self.part.close()
        if self.feed is not None:
            self.feed.close()

    def describe(self) -> None:
        """The optimizer has other groups, options or objects. Raises UserError where they cannot be followed."""
        self.described = entries(self.part, self._optimizer, self.described.stepping.kind)
        self.records.describe(self.described)
        self._entries = _named(self.part)
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
        self.records.turn()
        passes, self._passes = self._passes, 0
        self.part.over()
        if self.manifest is not None:
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
            job = self.watch.look(passes)
            self.manifest = Manifest(job.to_dict(), it.number) if job is not None else None
            self._watched = 0 if job is not None else self._watched + 1
            self._say_watching()
            if job is not None:
                self._meeting = True
                if self.feed is None:
                    self._flows = self._topology()["flows"]
                self.part.known(True)
                self.part.listen(self._heard)
                return
        if followers := [sender for sender in self.nodes.senders if sender.follows]:
            self.records.send(followers, it)
            if self.feed is not None:
                self.feed.over(followers, it)

    def open(self, seconds: float) -> None:
        """Once the job is known, nodes get it; of several, one that is not connected by now is not waited for."""
        if self._meeting:
            if len(self.nodes.senders) == 1 and self.feed is None:
                self.nodes.senders[0].tried.wait(seconds)
            for sender in self.nodes.senders:
                sender.open_again()

    def serve(self, deadline: float, number: int) -> None:
        """What ranks wait for, until `deadline` by the monotonic clock at most. All of them do so once, when
        the job has become known: until the node has joined the wire, with nothing in flight, and has the state. All
        know it at the same boundary; what they wait for at rank 0 would otherwise hold them up in the next call. A
        node that asks for ranges needs none of it, and one that has to look for channels first asks later."""
        meeting, self._meeting = self._meeting, False
        if meeting and all(flow.get("channel") is not None for flow in self._flows or ()):
            patient = [sender for sender in self.nodes.senders if not sender.node.by_ranges]
            self._upload.serve(patient, deadline, number, meeting=True)
        elif self.manifest is not None and (due := [one for one in self.nodes.senders if self._upload.is_due(one)]):
            self._upload.serve(due, deadline, number)

    def _say_watching(self) -> None:
        """Where a job stays unknown the log says why, and the node, which hears nothing else of it."""
        if self._watched % PATIENCE or not self._watched:
            return
        if self._watched == PATIENCE:
            self._say(f"{PATIENCE} iterations were watched, and the job is not known yet: {self.watch.why}")
        for sender in self.nodes.senders:
            if sender.node.takes_notice:
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
            followers := [sender for sender in self.nodes.senders if sender.follows]
        ):
            self.records.send(followers, it)
        self._forget()

    def _forget(self) -> None:
        """The job is not known any more."""
        self.manifest = None
        self.part.known(False)
        for sender in self.nodes.senders:
            sender.node.give_up()

    # -- other threads --

    def _opening(self) -> list[Any]:
        """What a new connection begins with, as far as it is known."""
        out: list[Any] = []
        if self._flows is not None:
            out.append(Flows(self._flows))
        if (manifest := self.manifest) is not None and self._leads:
            out.append(manifest)
        return out


def _named(part: Part) -> dict[str, int]:
    """Entries of the state_dict: of a parameter which object it is; a buffer may be another one each time."""
    return {name: id(value) if isinstance(value, torch.nn.Parameter) else 0
            for name, value in part.state_dict(keep_vars=True).items()} | dict.fromkeys(part.extra(), 0)
