"""The job manifest from live objects: a part of a model (parts.py), its optimizer, its communicator.

    entries(model, optimizer)       what is optimized, constant, a buffer or tied, in state_dict order
    Watch(...).look()               at each boundary of iterations: the manifest, once the calls repeat
    Watch(...).again(iteration)     at each boundary after that: they still do, or else what is odd

A model is a Part, or a DDP model, which is one. DDP announces its final buckets in the second forward, so the first
iterations are only watched. What one iteration calls is the difference between two looks at the communicator's list of
calls; the iteration is the steady one when the bucket layout is the one of the iteration before and the calls reduce
just these buckets, in this order. Everything before is the manifest's `startup`: a connection's place is counted from
its birth. An iteration that calls something else (a metric now and then) ends that manifest, and the next one that
calls what it should begins another, with all calls until then in its `startup`.

torch and the standard library. Raises UserError for what no replica could follow; see attachment.py for who catches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from flowcheck.control.tensors import DTYPES
from flowcheck.errors import UserError
from flowcheck.job.manifest import job_from_dict
from flowcheck.job.model import (
    LOG,
    MIRROR,
    REPLICA,
    Bucket,
    Buckets,
    Collective,
    Collectives,
    Communicator,
    Gradients,
    Job,
    ModelEntry,
    Optimizer,
    ParameterGroup,
    carries,
    unwritable,
)
from flowcheck.trainer.describe.described import Model, group_options, stepping
from flowcheck.trainer.describe.extra import unproven
from flowcheck.trainer.describe.parts import Ddp, Layout, Part, local, stepped
from flowcheck.trainer.describe.wrapped import refuse_model

__all__ = ["Watch", "entries", "live_job", "stepped_by"]

KINDS_SHOWN = 8  # calls of an iteration that are looked at for a message
CALLS = 65536  # a longer history is not kept: attach earlier


def _refuse(what: str, where: str, remedy: str) -> UserError:
    return UserError(what, where=where, remedy=remedy)


def entries(model: DistributedDataParallel | Part, optimizer: torch.optim.Optimizer, kind: str = REPLICA) -> Model:
    """Class every entry. kind: of versions (Job.kind). Raises UserError naming the entry that cannot be followed bit
    for bit."""
    part = _part(model)
    steps = {id(p) for group in optimizer.param_groups for p in group["params"] if stepped(p)}
    out: list[ModelEntry] = []
    names: dict[int, str] = {}
    reduced = part.reduced()
    seen = {id(value) for _, value in reduced}
    for name, value in part.state_dict(keep_vars=True).items():
        if why := unwritable(name):
            raise _refuse(why, f"state_dict: {name!a}", "another name")
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES:
            raise _refuse(f"is {getattr(value, 'dtype', type(value).__name__)}", f"state_dict: {name}", "leave it out")
        dtype, shape = DTYPES[value.dtype][0], list(local(value).shape)
        if id(value) not in steps:
            kind_of = "constant" if isinstance(value, torch.nn.Parameter) else "buffer"
            if kind_of == "constant" and optimizer.state.get(value):
                raise _refuse("is frozen, and the optimizer has a state of it that no version would have",
                              f"state_dict: {name}", "take it out of the optimizer, and its state with it")
            out.append(ModelEntry(name, shape, dtype, kind_of))
        elif id(value) in names:
            out.append(ModelEntry(name, shape, dtype, "optimized", names[id(value)]))
        elif id(value) not in seen:
            raise _refuse(f"is optimized, and {part.by} does not reduce it", f"state_dict: {name}",
                          "a wrapper that reduces it, or requires_grad_(False)")
        else:
            _check_parameter(name, value)
            names[id(value)] = name
            out.append(ModelEntry(name, shape, dtype))
    lost = [p for group in optimizer.param_groups for p in group["params"]
            if id(p) in steps and id(p) not in names and id(p) not in part.others]
    if lost:
        raise _refuse(f"has a parameter of shape {tuple(lost[0].shape)} that is not in the model's state_dict",
                      "optimizer", "make it of the parameters that the model has after it was wrapped or sharded")
    for name, value in reduced:
        if id(value) not in steps:  # who steps it would not be seen
            raise _refuse(f"has no {name}, whose gradient {part.by} reduces", "optimizer",
                          f"one optimizer for all; requires_grad_(False) before {part.by} for what stays as it is")
    groups = [[names[id(p)] for p in group["params"] if id(p) in names] or None for group in optimizer.param_groups]
    return Model(out, names, groups, stepping(optimizer, out, names, kind), tuple(part.extra()))


def _part(model: DistributedDataParallel | Part) -> Part:
    if isinstance(model, Part):
        return model
    if not isinstance(model, DistributedDataParallel):
        raise refuse_model(model)
    return Ddp(model)


def _check_parameter(name: str, value: torch.Tensor) -> None:
    where = f"state_dict: {name}"
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _refuse(f"is optimized in {value.dtype}", where, "keep parameters in float32 and use autocast")
    if not local(value).is_contiguous():
        raise _refuse("is not in row-major order, and so is its gradient", where, "do not use channels_last")


def _named(call: dict[str, Any]) -> str:
    return f"{call['op']} of {call['count']} {call['dtype']}"


def _kinds(calls: list[dict[str, Any]]) -> str:
    return f"{len(calls)} calls ({', '.join(dict.fromkeys(map(_named, calls[:KINDS_SHOWN])))})" if calls else "no call"


def _reduces_as(call: dict[str, Any], steady: list[dict[str, Any]]) -> bool:
    """Could it be taken for a reduction of a usual iteration's?"""
    return call["op"] == "AllReduce" and any(
        all(call[key] == one[key] for key in ("op", "count", "dtype")) for one in steady
    )


class Watch:
    """A rank's look at what its iterations call. calls(n): what the communicator has been asked for since its birth,
    without the first n."""

    def __init__(
        self, model: DistributedDataParallel | Part, optimizer: torch.optim.Optimizer, described: Model,
        calls: Callable[[int], list[dict[str, Any]]], communicator: Callable[[], dict[str, Any]], run_id: str,
        epoch: int,
    ) -> None:
        self._part, self._optimizer, self._described = _part(model), optimizer, described
        self._calls, self._communicator = calls, communicator
        self._identity = (run_id, epoch)
        self._seen = calls(0)  # until the job is known; it begins with them
        self._count = len(self._seen)
        self._steady: list[dict[str, Any]] = []  # an iteration's; empty: the job has not been known yet
        self._startup: list[dict[str, Any]] = []  # what was called before those
        self._steadies = 0  # iterations that called them, one after the other
        self._odd: list[dict[str, Any]] = []  # what the last iteration called that was none
        self.passes = 1  # backward passes of an iteration, each of which reduces all buckets
        self.whole = False  # the odd iteration called all of a usual one first, and no bucket can be another call; nor
        # can one of these have reduced a gradient once more
        self._bucket_layout: Layout | None = None
        self.looks = 0
        self.why = "the job's iterations are being watched"

    def look(self, passes: int = 1) -> Job | None:
        """Call when an iteration is over. passes: backward passes in it that reduced gradients, as far as they were
        heard. The manifest, whose iteration 0 is the one that has just ended."""
        startup, mine = self._seen, self._new()
        if self._count > CALLS:
            raise _refuse(f"{self._count} calls have passed on the communicator", "attach", "attach at the start")
        self._seen = [*startup, *mine]
        before, self._bucket_layout = self._bucket_layout, self._part.layout(self._described.names)
        before_that, self._odd = self._odd, mine
        self.looks += 1
        by = self._part.by
        if self._bucket_layout is None:
            self.why = (f"an iteration reduced no buckets of {by}, or one of them twice; waiting for one that reduces"
                        f" each once: is the model called as attach was given it, with optimizer.zero_grad()?")
        if before is None or self._bucket_layout is None or self.looks < 3:
            return None
        if before != self._bucket_layout:
            self.why = (f"{by} dealt its buckets otherwise than in the iteration before; waiting for two iterations"
                        " alike: one model, wrapped once, whose layers all iterations use")
            return None
        counts, dtype = self._bucket_layout[1:]
        steady = [Collective(**call) for call in mine]
        reduced = [call for call in steady if carries(call) == "gradient"]
        buckets = [call for call in reduced if call.dtype == dtype and call.count in counts]
        found = [call.count for call in buckets]
        if found != counts and not (self._part.adds_up and found == counts * max(passes, 1)):
            self.why = (
                f"an iteration reduced {found} elements where {by} has buckets of {counts}; waiting for one that"
                f" agrees: call the model as attach was given it, and give {by} a process group of its own"
            )
            return None
        self.passes = len(found) // len(counts)
        for call in reduced:
            call.carries = "other"
        for bucket, call in enumerate(buckets[-len(counts):]):
            call.carries, call.bucket = "gradient", bucket
        if self._steady and mine not in (self._steady, before_that):  # a new way of iterating shows twice
            self.why = (
                f"an iteration made {_kinds(mine)} on {by}'s communicator, and the one before {_kinds(before_that)};"
                f" waiting for two alike: as many micro-batches in each, and for all other calls a process group of"
                f" their own"
            )
            return None
        self._steady, self._startup, self._steadies, self._seen = mine, startup, 1, []
        return self._job(startup, steady, self._bucket_layout[0], dtype)

    def again(self, iteration: int) -> str:
        """Call when an iteration after those is over. "": it called what they did. Otherwise what is odd about it: the
        wire has no names, so from the odd call on nothing can be distinguished, and `look` has to find the job again.
        Raises UserError where it could not: the history has grown too long."""
        mine, steady = self._new(), self._steady
        if mine == steady:
            self._steadies += 1
            return ""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, steady, strict=False)))
        odd = _named(mine[same]) if same < len(mine) else f"{_named(steady[same])}, which is missing"
        self.why = (
            f"iteration {iteration} made {len(mine)} calls on {self._part.by}'s communicator, and {len(steady)} are an"
            f" iteration's: number {same} is {odd}; joined anew by the next iteration without such a call"
        )
        extra = mine[len(steady):]
        sizes = {math.prod(entry.shape) for entry in self._described.entries if entry.kind == "optimized"}
        self.whole = same == len(steady) and not any(
            _reduces_as(call, steady) or (call["op"] == "AllReduce" and call["count"] in sizes) for call in extra
        )
        self._check_history()
        self._seen, self._odd = [*self._startup, *steady * self._steadies, *mine], mine
        return self.why

    def renew(self, described: Model, why: str) -> None:
        """Call after `again` has said "": the state is another than an iteration would have made it, or the job is
        described otherwise. It is found again by `look`, from the next iteration on. Raises UserError as `again`."""
        self._described, self.why = described, f"{why}; joined anew by the next iteration"
        self._check_history()
        self._seen = [*self._startup, *self._steady * self._steadies]

    def redescribe(self, described: Model) -> None:
        """While the job is not known."""
        self._described = described

    def _check_history(self) -> None:
        if self._count > CALLS:
            raise _refuse(
                f"{self.why.partition(';')[0]}; it cannot be joined anew after {self._count} calls", "attach",
                f"give {self._part.by} a process group of its own, and attach anew after a restart",
            )

    def _new(self) -> list[dict[str, Any]]:
        new = self._calls(self._count)
        self._count += len(new)
        return new

    def _job(
        self, startup: list[dict[str, Any]], steady: list[Collective], buckets: list[Bucket], dtype: str
    ) -> Job:
        described = self._described
        before = [Collective(**call) for call in startup]
        for call in before:
            call.carries = "other"
        once = [Collective(**vars(call)) for call in steady]
        return live_job(
            described, self._identity, Communicator(**self._communicator()), Collectives(before, once, [], steady),
            buckets, Gradients(dtype, self._part.divisor), stepped_by(described, self._optimizer),
        )


def live_job(
    described: Model, identity: tuple[str, int], communicator: Communicator, collectives: Collectives,
    buckets: list[Bucket], gradients: Gradients, optimizer: Optimizer | None = None, source: str = MIRROR,
) -> Job:
    """The manifest, without flows. identity: run and epoch. Raises UserError: such a job cannot be."""
    job = Job(
        run_id=identity[0], epoch=identity[1], communicator=communicator, flows=[], collectives=collectives,
        buckets=Buckets([], buckets), model=described.entries, gradients=gradients, optimizer=optimizer,
        kind=described.stepping.kind, source=source,
        step_values=["lr", *(["buffers"] if described.buffers else [])], unproven=unproven(described.extra),
    )
    return job_from_dict(job.to_dict(), where="the live job")


def stepped_by(described: Model, optimizer: torch.optim.Optimizer) -> Optimizer | None:
    """None: nobody but the trainer can say how."""
    how = described.stepping
    if how.kind == LOG:
        return None
    named = [names for names in described.groups if names is not None]
    groups = [ParameterGroup(*one) for one in zip(named, group_options(described, optimizer), strict=True)]
    return Optimizer(how.name, groups, *how.rounding, "none" if how.threads else "", how.threads,
                     {beta: dict(steps) for beta, steps in how.corrections.items()})
