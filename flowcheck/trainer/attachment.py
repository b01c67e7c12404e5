"""Trainer hook: what a checkpoint node has to know of a running DDP job, sent from a background thread.

    attachment = flowcheck.attach(ddp_model, optimizer, node="10.0.0.2:7070", token=..., checksum_every=100)
    (several nodes that mirror the same ranks: node=["10.0.0.2:7070", "10.0.0.3:7070"])
    with attachment.iteration():                      once per iteration, also when the optimizer was skipped
        ...  attachment.clip_grad_norm_(parameters, 1.0); optimizer.step()
    attachment.close()

What happens: three iterations are watched (DDP rebuilds its buckets in the second). At the boundary after them rank 0
sends the manifest and every rank its connections, the node joins the wire and asks for a state, and rank 0 uploads
model and optimizer; all ranks wait for that, at most `max_stall_s` seconds and this once. From then on a record per
iteration goes out, and versions come into being. If the node loses an iteration it asks again, and rank 0 uploads at
the next boundary, waiting as long. A node that asks for ranges of elements instead (ranges.py) gets them from any rank
at its next boundary, before the record, and nobody waits. Of several nodes each is served as if it were the only
one, but that none is waited for that is not connected.

Training comes first: `step` never raises and, but for those uploads, never blocks. A node that is gone, slow or speaks
nonsense makes the attachment say so (`state`, `why`, logger "flowcheck") and be tried again later. torch and the
standard library only. `attach`, `step` and `close` belong to the training thread.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flowcheck.control.checksum import checksums
from flowcheck.control.protocol import Bye, Flows, Manifest, Record, State, User
from flowcheck.errors import FlowcheckError, UserError
from flowcheck.job.clock import Clock
from flowcheck.job.model import Job
from flowcheck.trainer.description import Model, Watch, check_gradients, entries, group_options
from flowcheck.trainer.loop import AttachmentState, Given, Told
from flowcheck.trainer.ranges import Source
from flowcheck.trainer.sender import Identity, Sender
from flowcheck.trainer.settings import address_of, context_of, nodes_of, tokens_of
from flowcheck.trainer.sources import Collectives, Topology, sources_of
from flowcheck.trainer.user import Keeper

__all__ = ["Attachment", "attach"]

_log = logging.getLogger("flowcheck")
STATES = [*AttachmentState]


def attach(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, node: str | Sequence[str] | None = None,
    token: str | None = None, checksum_every: int = 0, group: str = "", run_id: str = "", epoch: int = 0,
    iteration: int = 0, max_stall_s: float = 10.0, topology: Topology | None = None,
    collectives: Collectives | None = None, scheduler: Any = None, scaler: Any = None,
    ca: str | None = None,
) -> Attachment:
    """Attach a training job to a checkpoint node; on every rank, best right after DDP was made.

    node: HOST:PORT of its control port; or a list of them, of nodes that mirror the same ranks. None: what the variable
        FLOWCHECK_NODE says, several with commas.
    token: the shared secret, 16 characters or more. None: the first line of the file that FLOWCHECK_TOKEN_FILE names.
    checksum_every: send parameter checksums each K-th iteration; 0: never, and the replica stays unverified.
    group: name of this group of ranks, where a node follows several.
    run_id, epoch: who this run is; a restarted job has another epoch.
    iteration: the trainer's number of the next iteration.
    max_stall_s: seconds that a boundary may take at which a state goes up; 0: none.
    topology, collectives: what the communicator is, and its calls since a number (docs/use/node.md). A process group
        that offers both as attributes, `flowcheck_topology` and `flowcheck_collectives`, needs neither. On NCCL after
        `flowcheck.prepare()` the calls are known without `collectives`.
    scheduler, scaler: objects whose `state_dict()` is kept with every version. The scaler also says the loss scale of
        an iteration, and whether its step was skipped, unless `step` is told.
    ca: speak TLS, and trust these certificates: a PEM file, or "system". None: what FLOWCHECK_CA says; "": no TLS.

    Raises UserError for arguments that cannot be; all else is said by the attachment.
    """
    nodes = nodes_of(node)
    addresses = [address_of(one) for one in nodes]
    if not addresses or len(set(addresses)) < len(addresses):
        raise UserError(f"{nodes!r} is empty, or names a node twice", where="node", remedy="each node once")
    secret, tls = tokens_of(token), context_of(ca)
    for what, number in (("checksum_every", checksum_every), ("epoch", epoch), ("iteration", iteration)):
        if not isinstance(number, int) or number < 0:
            raise UserError(f"{number!r} is not a count", where=what, remedy="a whole number, 0 or more")
    if not 0 <= max_stall_s <= threading.TIMEOUT_MAX:
        raise UserError(f"{max_stall_s!r} is not a time", where="max_stall_s", remedy="seconds, 0 or more")
    return Attachment(
        model, optimizer, addresses, secret, checksum_every, group, run_id, epoch, iteration, max_stall_s, topology,
        collectives, Keeper(optimizer, scheduler, scaler), tls,
    )


class Attachment(Told):
    """Made by `attach`. `state` and `why` say how it is; `step` or `iteration` says that an iteration is over."""

    def __init__(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, addresses: list[tuple[str, int]],
        token: Callable[[], bytes], checksum_every: int, name: str, run_id: str, epoch: int, iteration: int,
        max_stall_s: float, topology: Topology | None, collectives: Collectives | None, keeper: Keeper,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(optimizer, keeper.scaler)
        self.number, self._keeper = iteration, keeper
        self._checksum_every, self._max_stall = checksum_every, max_stall_s
        self._optimizer, self._model = optimizer, model
        self._refused = ""
        self._unsaid = ""  # why the newest iteration has no record
        self._closed = False
        self._stepped = -1  # of the optimizer since the last boundary; -1: its hook has not been heard of yet
        self._job: Job | None = None
        self._first = 0
        self._flows: list[dict[str, Any]] | None = None
        self._groups: list[dict[str, Any]] | None = None
        self._senders: list[Sender] = []
        self._answered = threading.Event()  # by any of the nodes
        self._watch: Watch | None = None
        self._hook: Any = None
        try:
            self._begin(model, optimizer, addresses, token, tls, name, run_id, epoch, topology, collectives)
        except Exception as error:  # whatever it is, training goes on without us
            self._refuse(error)

    def _begin(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, addresses: list[tuple[str, int]],
        token: Callable[[], bytes], tls: ssl.SSLContext | None, name: str, run_id: str, epoch: int,
        topology: Topology | None, collectives: Collectives | None,
    ) -> None:
        self._scale = self._scale_now()
        self._described: Model = entries(model, optimizer)
        group = model.process_group
        self._topology, listed = sources_of(group, topology, collectives)
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._world = dist.get_rank(), dist.get_world_size()
        if ranks < 2:
            raise UserError("a job of one rank sends no gradients", where="attach", remedy="leave attach out")
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._watch = Watch(
            model, optimizer, self._described, listed, lambda: self._topology()["communicator"], run_id, epoch
        )
        identity = Identity(run_id, epoch, self.rank, ranks, name)
        self._source = Source(model.module, optimizer, self._described)
        for address in addresses:
            self._senders.append(Sender(
                address, token, identity, self._opening, partial(self._said, address), self._source.prepare,
                self._answered, tls,
            ))
        for sender in self._senders:
            sender.start()

    # -- what it is --

    @property
    def state(self) -> AttachmentState:
        if self._closed:
            return AttachmentState.CLOSED
        if self._refused or not self._senders:
            return AttachmentState.REFUSED
        return min((self._state(sender) for sender in self._senders), key=STATES.index)

    def _state(self, sender: Sender) -> AttachmentState:
        if not sender.connected:  # the first attempt may still be under way
            return AttachmentState.LOST if sender.tried.is_set() else AttachmentState.WATCHING
        if self._job is None:
            return AttachmentState.WATCHING
        return AttachmentState.ATTACHED if sender.attached else AttachmentState.ATTACHING

    @property
    def why(self) -> str:
        """Why the state is not "attached", or why the last iteration had no record, or "". Of several nodes: of each
        that is not."""
        if reason := self._refused or self._unsaid or self._keeper.why:
            return reason
        connected = any(sender.connected for sender in self._senders)
        if self._watch is not None and self._job is None and (connected or not self._senders):
            return self._watch.why  # whatever a node says meanwhile: it is waiting for the job
        reasons = [(sender, self._why(sender)) for sender in self._senders]
        return "; ".join(f"{self._name(sender.address)}{why}" for sender, why in reasons if why)

    def _why(self, sender: Sender) -> str:
        return sender.why or ("" if self._closed or self._state(sender) is AttachmentState.ATTACHED else
                              "the node has not joined yet")

    def _name(self, address: tuple[str, int]) -> str:
        """Of a node, where there are several."""
        return f"{address[0]}:{address[1]}: " if len(self._senders) > 1 else ""

    @property
    def published(self) -> tuple[int, str]:
        """(iteration, status) of the nodes' newest version; (-1, "") if there is none."""
        return max(((sender.iteration, sender.status) for sender in self._senders), default=(-1, ""))

    # -- the training thread --

    def step(
        self, clip: float | None = None, scale: float | None = None, skipped: bool = False, user: Given = None
    ) -> None:
        """The iteration is over, its optimizer step done (or skipped), and the next one begins. Never raises.

        clip: the factor that gradients were multiplied with, as torch formed it in fp32, if not by `clip_grad_norm_`.
        scale: AMP's loss scale of this iteration. skipped: an overflow was found and the optimizer did nothing. Both
        are known where `attach` was given the scaler. user: what else the next iteration begins with, such as the
        loader's position, or a function that says it: see flowcheck/control/user_state.py for the types.
        """
        if self._refused or self._closed:
            return
        try:
            self._step(clip, scale, skipped, user)
        except Exception as error:  # whatever it is, training goes on without us
            self._refuse(error)
        self.number += 1

    def _step(self, clip: float | None, scale: float | None, skipped: bool, user: Given) -> None:
        watch = self._watch
        assert watch is not None
        clip, scale, skipped = self._said_of_it(clip, scale, skipped)
        if scale is not None and self._described.threads:
            raise UserError("a loss scale with 16-bit parameters, whose gradients are unscaled otherwise",
                            where=f"iteration {self.number}", remedy="parameters in float32 and autocast")
        groups, self._groups = self._groups, None
        stepped, self._stepped = self._stepped, min(self._stepped, 0)
        if self._job is not None and (stepped > 1 or (stepped == 0 and not skipped)):
            raise UserError(  # records and traffic would be counted differently from here on
                f"the optimizer stepped {stepped} times since the last call of step()",
                where=f"iteration {self.number}",
                remedy="step() once per iteration, after optimizer.step(); skipped=True if that did nothing",
            )
        if self._job is not None:
            if watch.again(self.number):
                self._part(watch, partial(self._send_record, groups=groups, clip=clip, scale=scale, skipped=skipped,
                                          user=user))
                return
        else:
            self._job, self._first = watch.look(), self.number
            if self._job is not None:
                self._flows = self._topology()["flows"]
                self._meet(groups)
                return
        if followers := [sender for sender in self._senders if sender.follows]:
            self._send_record(followers, groups, clip, scale, skipped, user)
        if self._job is not None and (wanting := [one for one in self._senders if self._wants(one)]):
            self._serve(wanting, time.monotonic() + self._max_stall, groups)

    def _wants(self, sender: Sender) -> bool:
        return self.rank == 0 and "state" in sender.wanted

    def _part(self, watch: Watch, send: Callable[[list[Sender]], None]) -> None:
        """The iteration called what no other does. If all of its gradients came before that it has a record still; the
        node can place nothing after it, until the job is known again."""
        self._say(watch.why)
        if watch.whole and (followers := [sender for sender in self._senders if sender.follows]):
            send(followers)
        self._job = None
        for sender in self._senders:
            sender.wanted, sender.joined, sender.pledged = frozenset(), None, None

    def _meet(self, groups: list[dict[str, Any]] | None) -> None:
        """The one time that all ranks wait, at most `max_stall_s` seconds: until the node has joined the wire, with
        nothing in flight, and has the state. All of them know the job at the same boundary; what they wait for at
        rank 0 would otherwise hold them up in the next call. A node that asks for ranges needs none of it, and one of
        several that is not connected by now is not waited for."""
        deadline = time.monotonic() + self._max_stall
        if len(self._senders) == 1:
            self._senders[0].tried.wait(self._max_stall)
        for sender in self._senders:
            sender.open_again()
        self._serve([sender for sender in self._senders if not sender.by_ranges], deadline, groups, meeting=True)

    def _serve(
        self, senders: list[Sender], deadline: float, groups: list[dict[str, Any]] | None, meeting: bool = False
    ) -> None:
        """Give the state to those that want it, once each, and wait until they have it. meeting: wait until the others
        have joined, too, or want it."""
        given: dict[Sender, str] = {}  # and what each had noticed by then
        number = Clock().after(self.number)  # of updates so far, which is the number of the next iteration
        self._answered.clear()
        while True:
            wanting = [sender for sender in senders if sender not in given and self._wants(sender)]
            given |= {sender: sender.notice for sender in wanting}
            if wanting:
                self._send_state(wanting, number, groups)
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

    def _send_record(
        self, senders: list[Sender], groups: list[dict[str, Any]] | None, clip: float | None, scale: float | None,
        skipped: bool, user: Given,
    ) -> None:
        module = self._model.module
        if skipped and clip is not None and not math.isfinite(clip):
            clip = 1.0  # no gradient was used, whatever it was multiplied with: the norm of an overflow is no number
        for what, value in (("clip", clip), ("scale", scale)):
            if value is not None and not math.isfinite(value):
                # What such a step leaves behind is NaN of no defined sign: no record, so the node asks for a state.
                why = f"no record of iteration {self.number}: {what} is {float(value)}"
                if not self._unsaid:
                    self._say(why)
                self._unsaid = why
                return
        self._unsaid = ""
        record = Record(
            self.number, groups or group_options(self._described, self._optimizer),
            None if clip is None else float(clip), None if scale is None else float(scale), bool(skipped),
        )
        held: Mapping[str, torch.Tensor] = {}
        buffers = self._described.buffers
        due = bool(self._checksum_every) and Clock().after(self.number) % self._checksum_every == 0
        if buffers or due:
            state = module.state_dict()
            if due:
                sums = checksums({entry.name: state[entry.name] for entry in self._described.entries})
                record.checksums = {name: f"{value:016x}" for name, value in sums.items()}
            if self.rank == 0:
                held = {f"buffer.{name}": state[name].detach().to("cpu", copy=True) for name in buffers}
        kept = None
        if any(sender.takes_user for sender in senders):
            kept = self._keeper.give(user, Clock().after(self.number), *self._world, self._say)
        for sender in senders:
            for link, wish in sender.asked():  # before the record: who has that has these, if there are any
                sender.put(*self._source.answer(wish, self.number), asked_on=link)
            if kept is not None and sender.takes_user:
                sender.put(User(self.number, self._world[0]), kept)
            sender.put(record, held)

    def _send_state(self, senders: list[Sender], number: int, groups: list[dict[str, Any]] | None) -> None:
        """Model and optimizer as they are now, before iteration `number`. groups: as the step used them that made this
        state; None: it made none."""
        for sender in senders:
            sender.wanted, sender.joined = sender.wanted - {"state"}, None
            sender.pledged = number
        tensors = {
            f"model.{name}": tensor.detach().to("cpu", copy=True)
            for name, tensor in self._model.module.state_dict().items()
        }
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._described.names.get(id(parameter))
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if name is not None and isinstance(value, torch.Tensor):
                        tensors[f"optimizer.{name}.{key}"] = value.detach().to("cpu", copy=True)
        state = State(number, groups or group_options(self._described, self._optimizer))
        for sender in senders:
            if not sender.put(state, tensors):
                sender.pledged = None

    def close(self, seconds: float = 5.0) -> None:
        """Say goodbye, if the node listens within `seconds`, which several nodes share; idempotent."""
        if self._closed:
            return
        try:
            for sender in self._senders:
                sender.close(Bye(), seconds / len(self._senders))
            if self._hook is not None:
                self._hook.remove()
        except Exception as error:
            self._refuse(error)
        self._closed = True

    # -- other threads --

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Hyper-parameters as this step uses them: a scheduler may change them before `step` is called."""
        self._stepped = max(self._stepped, 0) + 1
        try:
            self._keeper.look(self._say)
            self._groups = group_options(self._described, optimizer)
            check_gradients(self._described, optimizer)
        except Exception as error:
            self._refuse(error)

    def _opening(self) -> list[Any]:
        """What a new connection begins with, as far as it is known."""
        out: list[Any] = []
        if self._flows is not None:
            out.append(Flows(self._flows))
        if self._job is not None and self.rank == 0:
            out.append(Manifest(self._job.to_dict(), self._first))
        return out

    def _said(self, address: tuple[str, int], why: str) -> None:
        self._say(f"{self._name(address)}{why}")

    def _say(self, why: str) -> None:
        _log.warning("flowcheck: rank %d: %s", getattr(self, "rank", -1), why)

    def _refuse(self, error: Exception) -> None:
        """Nothing more is tried. The reason stays; a fault of ours is logged with its place."""
        if isinstance(error, FlowcheckError):
            self._refused = error.message()
            _log.warning("flowcheck: not attached: %s", self._refused)
        else:
            self._refused = f"{type(error).__name__}: {error}"
            _log.warning("flowcheck: not attached: %s", self._refused, exc_info=error)
        for sender in self._senders:
            sender.close(Bye(), 0.0)
