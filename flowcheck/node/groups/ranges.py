"""Asking trainers for the state of elements whose gradients were lost, and falling back where they cannot give it.

    resync = Resync(settings, plan, members)
    resync.how                                 what a job is healed by: "ranges", or "state" and why; "log": by nothing
    resync.by_ranges                           the first of these, and no trainer has refused
    for event in resync.look(repair): ...      at every turn: ask for what is stale
    resync.take(repair, rank, message, ...)    a rank has answered

A question goes out when an iteration has closed, to the ranks that are attached, in turn; what is being answered counts
against `resync_mb`. No boundary of a trainer waits for it. Where one refuses, a whole state is asked for, as without
ranges, and so it stays for this job. The group's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from flowcheck.control.protocol import Patch as Answer
from flowcheck.control.protocol import Ranges
from flowcheck.job.model import LOG
from flowcheck.node.config.replica import ReplicaSettings
from flowcheck.node.groups.checks import split
from flowcheck.node.groups.members import RankSession
from flowcheck.rebuild.plan import JobPlan
from flowcheck.rebuild.version.events import Asked, Event
from flowcheck.rebuild.version.partial import Patch
from flowcheck.rebuild.version.range_repair import RangeRepair

__all__ = ["Resync", "wished"]

SLOTS = 3  # the version that is served, the partial one, and the one that is built from it


class Resync:
    """members(): the ranks that are attached. leaving(): those whose last answers may still come. Of one job."""

    def __init__(
        self, settings: ReplicaSettings, plan: JobPlan, members: Callable[[], Mapping[int, RankSession]],
        leaving: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._members, self._leaving, self._budget = members, leaving, settings.resync_mb << 20
        self.how = _how(settings, plan)
        self._asked: int | None = None  # the iteration that was next when a question went out last

    @property
    def by_ranges(self) -> bool:
        return self.how == "ranges"

    def look(self, repair: RangeRepair) -> Iterator[Event]:
        partial, awaited = repair.partial, repair.follower.chain.next
        if repair.given_up or awaited is None:
            return
        if partial.refused:
            self.how = f"state: {partial.refused}"
            yield from repair.give_up(f"the state of single elements cannot be had: {partial.refused}")
            return
        members = dict(self._members())
        leaving = set(self._leaving())  # after them: who leaves meanwhile is in both
        if partial.left(members.keys() | leaving):
            self._asked = None
        if not partial.stale or awaited == self._asked or leaving:
            return
        self._asked, before = awaited, partial.asked
        questions = partial.ask(self._budget, members.keys())
        for rank, request, ranges in questions:
            members[rank].send(Ranges(request, list(ranges)))
        if questions:
            elements = sum(length for _, _, ranges in questions for _, _, length in ranges)
            yield Asked(awaited, elements, partial.asked - before, tuple(rank for rank, _, _ in questions))

    def take(
        self, repair: RangeRepair, rank: int, message: Answer, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises UserError if it is not what was asked for."""
        partial, follower = repair.partial, repair.follower
        if repair.given_up:
            return
        if message.refused:
            partial.refuse(message.request, message.refused)
            return
        parameters, state = split(tensors)
        iteration = follower.clock.iteration(message.iteration)
        patch = Patch(rank, message.request, iteration, tuple(message.ranges), parameters, state)
        partial.take(patch, follower.chain.next or 0)


def wished(settings: ReplicaSettings) -> str:
    """What a node says that it will ask for, before it knows the job: "ranges" or "state"."""
    return settings.resync if settings.slots >= SLOTS else "state"


def _how(settings: ReplicaSettings, plan: JobPlan) -> str:
    if plan.job.kind == LOG:
        return LOG
    if settings.resync != "ranges":
        return settings.resync
    if settings.slots < SLOTS:
        return f"state: replica.slots is {settings.slots}, and a version with stale elements takes a third one"
    if not plan.job.step_values:
        return "state: the manifest declares no values of a step, so no records say whether a patch has come"
    if any(place.carries == "parameters" for place in (*plan.iteration_places(0), *plan.iteration_places(1))):
        return "state: parameters are gathered, and no rank holds all of its state"
    return "ranges"
