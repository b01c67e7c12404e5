"""Trainer hook: what a checkpoint node has to know of a running job, sent from a background thread.

    attachment = flowcheck.attach(ddp_model, optimizer, node="10.0.0.2:7070", token=..., checksum_every=100)
    (several nodes that mirror the same ranks: node=["10.0.0.2:7070", "10.0.0.3:7070"])
    with attachment.iteration():                      once per iteration, also when the optimizer was skipped
        ...  attachment.clip_grad_norm_(parameters, 1.0); optimizer.step()
    attachment.close()

What happens: three iterations are watched (DDP rebuilds its buckets in the second). At the boundary after them rank 0
sends the manifest and every rank its connections, the node joins the wire and asks for a state, and rank 0 uploads
model and optimizer; all ranks wait for that, at most ten seconds and this once. From then on a record per
iteration goes out, and versions come into being. If the node loses an iteration it asks again, and rank 0 uploads at
the next boundary, waiting as long. A node that asks for ranges of elements instead (ranges.py) gets them from any rank
at its next boundary, before the record, and nobody waits. Of several nodes each is served as if it were the only
one, but that none is waited for that is not connected. Of several parts (describe/parts.py) each is followed as a group
of the node's own (following.py); all of them have the same iterations.

Training comes first: `step` never raises and, but for those uploads, never blocks. A node that is gone, slow or speaks
nonsense makes the attachment say so (`state`, `why`, logger "flowcheck") and be tried again later. torch and the
standard library only. `attach`, `step` and `close` belong to the training thread.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from flowcheck.control.checksum import library
from flowcheck.control.protocol import Bye
from flowcheck.errors import FlowcheckError, UserError, of_the_machine
from flowcheck.job.clock import Clock
from flowcheck.job.model import FEED, MIRROR, REPLICA, SOURCES, VERSIONS
from flowcheck.trainer.cadence import Cadence
from flowcheck.trainer.changes import Changes, Rule
from flowcheck.trainer.connection.sender import Sender
from flowcheck.trainer.describe.described import Model, check_gradients
from flowcheck.trainer.describe.optimizers import members, optimizer_of, parameters_of, refresh
from flowcheck.trainer.describe.parts import Part
from flowcheck.trainer.feed.choice import AUTO, choose_source
from flowcheck.trainer.following import Following, serve
from flowcheck.trainer.loop import AttachmentState, Given, IterationInputs, Over
from flowcheck.trainer.nccl.sources import Collectives, Topology
from flowcheck.trainer.nodes import STATES
from flowcheck.trainer.settings import address_of, context_of, given_for, nodes_of, stall_of, tokens_of
from flowcheck.trainer.step_hooks import StepHooks
from flowcheck.trainer.user import Keeper

__all__ = ["Attachment", "attach"]

_log = logging.getLogger("flowcheck")
RENEWALS = 3  # of an attachment, because a script changed what no iteration changes
RENEWED_WITHIN = 100  # iterations
LOOK_EVERY = 16  # iterations: between two looks at the names of the model's entries, if nothing else calls for one


def attach(
    model: Any, optimizer: Any, *, node: str | Sequence[str] | None = None,
    token: str | None = None, checksum_every: int | None = None, group: str = "", run_id: str = "", epoch: int = 0,
    iteration: int = 0, max_stall_s: float | None = None, topology: Topology | Mapping[str, Topology] | None = None,
    collectives: Collectives | Mapping[str, Collectives] | None = None, scheduler: Any = None, scaler: Any = None,
    ca: str | None = None, kind: str = REPLICA, source: str = MIRROR,
) -> Attachment:
    """Attach a training job to a checkpoint node; on every rank, best right after the model was wrapped.

    model: a DistributedDataParallel object; a model that fully_shard has sharded over a mesh of replicas and shards; or
        several of these, which the one optimizer steps: a dict by name, or a list of objects with a mesh each. Or
        Megatron-Core's DistributedDataParallel, of several instances of its distributed optimizer. By a feed also one
        that fully_shard has sharded without replicas, and Megatron-Core's of one instance, or its chunks.
    optimizer: torch's, or what get_megatron_optimizer gave; by a feed a list or dict of several, or torchtitan's.
    node: HOST:PORT of its control port; or a list of them, of nodes that mirror the same ranks. None: what the variable
        FLOWCHECK_NODE says, several with commas.
    token: the shared secret, 16 characters or more. None: the first line of the file that FLOWCHECK_TOKEN_FILE names.
    checksum_every: send checksums of all parameters and optimizer state each K-th iteration; 0: never, and versions
        stay unverified. None: each 100th, or more rarely where these cost more than cadence.SHARE of the time.
    group: name of this group of ranks, where a node follows several. Of a rank with several parts it is put before
        the name of each ("GROUP.PART").
    run_id, epoch: who this run is; a restarted job has another epoch. One that says an epoch in which another start
        has made steps from `iteration` on gets a newer one from the node: `attachment.epoch`.
    iteration: the trainer's number of the next iteration.
    max_stall_s: seconds that a boundary may take at which a state goes up; this release reads it, the next does not.
    topology, collectives: what the communicator is, and its calls since a number (docs/use/hook.md). A process group
        that offers both as attributes, `flowcheck_topology` and `flowcheck_collectives`, needs neither. On NCCL after
        `flowcheck.prepare()` the calls are known without `collectives`. Of several parts: a dict, by the part's name.
    scheduler, scaler: objects whose `state_dict()` is kept with every version. The scaler also says the loss scale of
        an iteration, and whether its step was skipped, unless `step` is given.
    ca: speak TLS, and trust these certificates: a PEM file, or "system". None: what FLOWCHECK_CA says; "": no TLS.
    kind: "replica": the node steps with the trainer. "log": it keeps gradients, records and bases, from which
        `recovered.load` redoes the steps by this optimizer itself, whatever it is (docs/use/log.md).
    source: of gradients. "mirror": a switch copies the traffic of the ranks that reduce them to the node. "feed": ranks
        copy what their optimizers read, and send it over any fabric (docs/use/feed.md). "auto": "mirror" where that
        can be read, else "feed"; the log says which.

    Raises UserError for arguments that cannot be; all else is said by the attachment.
    """
    nodes = nodes_of(node)
    addresses = [address_of(one) for one in nodes]
    if not addresses or len(set(addresses)) < len(addresses):
        raise UserError(f"{nodes!r} is empty, or names a node twice", where="node", remedy="each node once")
    secret, tls = tokens_of(token), context_of(ca)
    for what, one, known in (("kind", kind, VERSIONS), ("source", source, (*SOURCES, AUTO))):
        if one not in known:
            raise UserError(f"{one!r} is not one of {', '.join(known)}", where=what, remedy="one of these")
    for what, number in (("checksum_every", checksum_every or 0), ("epoch", epoch), ("iteration", iteration)):
        if not isinstance(number, int) or number < 0:
            raise UserError(f"{number!r} is not a count", where=what, remedy="a whole number, 0 or more")
    return Attachment(
        model, optimizer, addresses, secret, checksum_every, group, run_id, epoch, iteration,
        stall_of(max_stall_s), topology, collectives, Keeper(optimizer_of(optimizer), scheduler, scaler), tls, kind,
        source,
    )


class Attachment(IterationInputs):
    """Made by `attach`. `state` and `why` say how it is; `step` or `iteration` says that an iteration is over.
    source: of its gradients, "mirror" or "feed"."""

    def __init__(
        self, model: Any, optimizer: Any, addresses: list[tuple[str, int]],
        token: Callable[[], bytes], checksum_every: int | None, name: str, run_id: str, epoch: int, iteration: int,
        max_stall_s: float, topology: Any, collectives: Any, keeper: Keeper, tls: ssl.SSLContext | None,
        kind: str, source: str = MIRROR,
    ) -> None:
        super().__init__(keeper.optimizer, keeper.scaler)
        self.source = source
        self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (-1, 0)
        self.number, self._keeper, self._said_epoch = iteration, keeper, epoch
        self._cadence, self._max_stall = Cadence(checksum_every, self._say), max_stall_s
        self._refused = ""
        self._closed = False
        self._hooks = StepHooks(self._optimizer, self._ready, self._after_step)
        self._parts: list[Following] = []
        self._renewals: list[int] = []  # iterations after which the job was joined anew
        try:
            parts, self.source = choose_source(model, optimizer, kind, source, topology, collectives, self._say)
            self._begin(parts, name, run_id, epoch, topology, collectives, kind)
            for one in self._parts:
                one.connect(addresses, token, tls, iteration)
        except Exception as error:  # whatever it is, training goes on without us
            self._refuse(error)

    def _begin(
        self, parts: Sequence[Part], name: str, run_id: str, epoch: int, topology: Any, collectives: Any, kind: str
    ) -> None:
        self._scale = self._scale_now()
        self.rank = dist.get_rank(parts[0].group)
        for part in parts:
            said = given_for(part.name, topology, len(parts), "topology")
            calls = given_for(part.name, collectives, len(parts), "collectives")
            full = ".".join(filter(None, (name, part.name))) if len(parts) > 1 else name or part.name
            self._parts.append(Following(part, self._optimizer, said, calls, full, run_id, epoch, self._say,
                                         partial(self._reduced, len(self._parts)), kind, self.source))
        self._describe()
        self._hooks.begin()

    def _describe(self) -> None:
        """All parts together; and what is so now is right."""
        described = [one.described for one in self._parts]
        self._described: Model = replace(
            described[0], names={key: name for one in described for key, name in one.names.items()},
            stepping=replace(described[0].stepping, threads=max(one.stepping.threads for one in described)),
        )
        gradients = ([one for one in each.part.gradients() if id(one) in self._described.names] for each in self._parts)
        constants = [value for one in self._parts for value in one.constants()]
        self._keeper.extra = self._extra if any(one.extra for one in described) else None
        self._deafen()
        modules = (module for one in self._parts for module in one.part.module.modules())
        changes = Changes(self._optimizer, gradients, constants, self._described.names)
        if self.source == FEED:  # by which factors gradients were multiplied is no matter of ours
            self._changes = changes
        else:
            self._listen(changes, modules)
        if self._cadence.every and any(one.is_cpu for one in parameters_of(self._optimizer)):
            library()  # where it has to be compiled, not within an iteration

    def _extra(self) -> dict[str, dict[str, Any]]:
        """What modules give of themselves besides tensors: by part, by entry."""
        return {one.name: one.part.extra() for one in self._parts if one.described.extra}

    # -- what it is --

    @property
    def _senders(self) -> list[Sender]:
        return [sender for one in self._parts for sender in one.nodes.senders]

    @property
    def parts(self) -> list[str]:
        """Under which names nodes know what this rank has; [""] where there is one and it has no name."""
        return [one.name for one in self._parts]

    @property
    def state(self) -> AttachmentState:
        """Of several parts that of the worst."""
        if self._closed:
            return AttachmentState.CLOSED
        if self._refused or not self._senders:
            return AttachmentState.REFUSED
        return max((one.state for one in self._parts), key=STATES.index)

    @property
    def why(self) -> str:
        """Why the state is not "attached", or why the last iteration had no record, or "". Of several nodes: of each
        that is not."""
        unsaid = next(filter(None, (one.records.unsaid for one in self._parts)), "")
        if reason := self._refused or unsaid or self._keeper.why:
            return reason
        reasons = [(one, one.why(self._closed)) for one in self._parts]
        several = len(self._parts) > 1
        return "; ".join(f"{one.name}: {why}" if several else why for one, why in reasons if why)

    @property
    def epoch(self) -> int:
        """Under which nodes have versions of this start: as `attach` was given, or a newer one that a node has given it
        because another start of the run has made these steps already."""
        return max((one.nodes.epoch for one in self._parts), default=self._said_epoch)

    @property
    def checksum_every(self) -> int:
        """Iterations from one that has checksums to the next, as it is now; 0: none has any."""
        return self._cadence.every

    @property
    def published(self) -> tuple[int, str]:
        """(iteration, status) of the nodes' newest version; (-1, "") if they have none. Of several parts the oldest."""
        return min((one.nodes.published for one in self._parts), default=(-1, ""))

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
        heard = next((said for one in self._parts if (said := one.part.said()) is not None), None)
        refresh(self._optimizer)
        stepped = max(steps := self._hooks.taken())
        if stepped > 1 and any(one.manifest is not None for one in self._parts):
            # Records and traffic would be counted differently from here on.
            raise UserError(
                f"the optimizer stepped {stepped} times since the last call of step()",
                where=f"iteration {self.number}",
                remedy="step() once per iteration, after optimizer.step(); skipped=True if that did nothing",
            )
        renewed = self._changed(steps, scale_given=clip is not None or scale is not None)
        stood = skipped or scale is not None or stepped > 0
        if self.source == FEED:  # what the optimizer has read is what is sent
            clip, scale, skipped = None, None, not stepped
        else:
            clip, scale, skipped = self._said_of_it(clip, scale, skipped, heard, stepped)
        stood = stood or scale is not None  # which the scaler has said
        if scale is not None and self._described.stepping.threads:
            raise UserError("a loss scale with 16-bit parameters, whose gradients are unscaled otherwise",
                            where=f"iteration {self.number}", remedy="parameters in float32 and autocast")
        after = Clock().after(self.number)
        checked = self._cadence.due(after)
        kept = partial(self._keeper.give, user, after, *self._world, self._say)
        looks, self._registered = checked or self._registered or self.number % LOOK_EVERY == 0, False
        if not renewed and looks and (odd := next(filter(None, (one.odd_entries() for one in self._parts)), "")):
            renewed = self._renewed(odd)
        it = Over(self.number, clip, scale, bool(skipped), checked, kept if len(self._parts) < 2 else cache(kept),
                  self._world[0], stood, renewed)
        begin = time.monotonic()
        for number, one in enumerate(self._parts):
            one.over(it)
            if self._changes is not None:
                self._changes.expect(number, one.manifest is not None)
        self._hooks.keep_places()
        summed = sum(one.records.summing for one in self._parts) if checked else None
        self._cadence.over(begin, summed or None)
        self._keeper.over()
        serve(self._parts, self._max_stall, self.number)

    def _changed(self, steps: list[int], scale_given: bool) -> str:
        """What was changed besides what an iteration does and does not end it, "": nothing. scale_given: the script
        says what its gradients were multiplied with. Raises UserError for what ends the attachment."""
        assert self._changes is not None
        change, self._keeper.trained = self._changes.over(steps), self._changes.trained
        if change is None or (scale_given and change.gradients):
            return ""
        where, known = f"iteration {self.number}", any(one.manifest is not None for one in self._parts)
        if change.rule is Rule.REFUSED and known:
            raise UserError(change.what, where=where, remedy="nothing between backward() and optimizer.step() but"
                            " clip_grad_norm_ and a GradScaler; or its factor, in step()")
        return self._renewed(change.what) if change.rule is Rule.RENEWED else ""

    def _renewed(self, what: str) -> str:
        """The job is described as it is now, and joined again. Raises UserError where that comes too often, or where
        it cannot be followed any more."""
        where = f"iteration {self.number}"
        for one in self._parts:
            one.describe()
        self._describe()
        if not any(one.manifest is not None for one in self._parts):
            for one in self._parts:
                one.watch.why = f"{where}: {what}; waiting for an iteration without that"
            return ""  # whatever it was, no version was built on it
        self._renewals = [one for one in self._renewals if one > self.number - RENEWED_WITHIN] + [self.number]
        if len(self._renewals) > RENEWALS:
            raise UserError(f"{what}, for the {len(self._renewals)}th time in {RENEWED_WITHIN} iterations",
                            where=where, remedy="change the model and the optimizer's state by optimizer.step() alone,"
                            " or attach where such changes are over")
        return f"{where}: {what}"

    def close(self, seconds: float = 5.0) -> None:
        """Send the records of the last iterations and say goodbye. Returns when the nodes have read that, which is
        milliseconds as a rule, or after `seconds`; idempotent. A process that ends without it sends the records all the
        same, within sender.LEAVE_SECONDS, and the nodes take the job for one that was broken off."""
        if self._closed:
            return
        try:
            deadline = time.monotonic() + seconds
            with ExitStack() as ends:  # each of these, whatever comes of those before it
                ends.callback(self._deafen)
                for one in self._parts:
                    ends.callback(one.close)
                ends.callback(self._hooks.end)
                for sender in self._senders:
                    sender.part(Bye())
                for sender in self._senders:
                    sender.finish(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            self._refuse(error)
        self._closed = True

    # -- what torch calls, in the training thread --

    def _reduced(self, part: int, whole: bool) -> None:
        if self._changes is not None and self._parts[part].manifest is not None:
            self._changes.reduced(part, whole)
        if whole and len(self._parts) == 1:  # of several, another's gradients are still multiplied
            self._reduced_again()

    def _ready(self, which: int) -> None:
        """which: of the optimizer's members, as all of these."""
        if self._refused or self._closed or self._changes is None:
            return
        try:
            refresh(self._optimizer)
            self._keeper.look(self._say)
            self._changes.ready(self._hooks.are_near(which), which)
            if not self._changes.regrouped:
                for one in self._parts:
                    one.before_step(which, self._hooks.is_last(which))
                check_gradients(self._described, members(self._optimizer)[which], all_there=self._changes.complete)
            self._stepping()
        except Exception as error:
            self._refuse(error)

    def _after_step(self, which: int) -> None:
        if self._refused or self._closed or self._changes is None:
            return
        try:
            refresh(self._optimizer)
            for one in self._parts if not self._changes.regrouped else ():
                one.after_step(which)
            self._changes.stepped(which)
        except Exception as error:
            self._refuse(error)

    # -- the log --

    def _say(self, why: str) -> None:
        _log.warning("flowcheck: rank %d: %s", self._world[0], why)

    def _refuse(self, error: Exception) -> None:
        """Nothing more is tried. The reason stays; a fault of ours is logged with its place."""
        error = of_the_machine(error) or error
        if isinstance(error, FlowcheckError):
            self._refused = error.message()
            _log.warning("flowcheck: not attached: %s", self._refused)
        else:
            self._refused = f"{type(error).__name__}: {error}"
            _log.warning("flowcheck: not attached: %s", self._refused, exc_info=error)
        for sender in self._senders:
            sender.close(Bye(), 0.0)
        for one in self._parts:  # the optimizer's hooks stay: it may be calling them right now
            one.close()
