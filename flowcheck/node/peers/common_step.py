"""Which step all groups of a job have, and which versions a group keeps for it: groups here and at other nodes.

    common = Common(name, seconds, slots, say)
    order = common.order(group, run, steps)     a group's thread: what it has, and what it is to reuse last
    answer = common.hear(steps, where)          what another node's groups have; and what those of this one have
    common.look()                               now and then, on the node's main thread: who is apart

A job of several groups (stages, tensor parts) goes on from a step that each of them has. Groups train in lockstep, so
a few slots each suffice, as long as no node stands still: then the others go on, and the last step that all have is
built over. So a group reuses other slots first (`worth`). Nothing waits for that. Where no other slot is left, a kept
one is taken, and what the others say is only ever heard: a node that hears nothing does as it does alone.

A group that is more than slots - 1 steps behind is apart: it is named, and not of the common step any more. Its last
one is kept for `seconds` from then on, and is let go then, whatever anybody says.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowcheck.control.message_fields import MOST_SHARES
from flowcheck.control.protocol import Steps
from flowcheck.node.versions.starts import Coming, Seen, Starts

__all__ = ["Common", "is_behind", "newest_common", "worth"]

MOST_NODES = 256  # that are remembered; the one that was heard longest ago goes first
MOST_NAMED = 16  # groups that are said to be apart, of each that is followed here
APART_SECONDS = 1.0  # that a group is behind before it is named: what it says takes its time to be here
Run = tuple[str, int]  # id and epoch
_Turn = tuple[str, str, int | None]  # an event, the other group, its newest step


# -- the rule: pure ----------------------------------------------------------------------------------------


def newest_common(own: Iterable[int], others: Iterable[Collection[int]]) -> int | None:
    """The newest step that all of them have; None: they have none in common."""
    return max(set(own).intersection(*others), default=None)


def worth(own: Collection[int], others: Iterable[Collection[int]]) -> tuple[int, ...]:
    """Steps of ours to reuse last, the one that is worth most first: the newest that everybody has, then those that the
    ones who lack them may still come to, the soonest first. others: steps of each other group."""
    others = [one for one in others if one]
    if not others:
        return ()
    common = newest_common(own, others)
    least = -1 if common is None else common
    ahead = [step for step in sorted(own) if step > least and all(step in one or step > max(one) for one in others)]
    return (*([] if common is None else [common]), *ahead)


def is_behind(own: Collection[int], other: Collection[int], slots: int) -> bool:
    """Is our newest step more than slots - 1 after the newest that both have, or that the other has at all?"""
    if not own or not other:
        return False
    both = newest_common(own, [other])
    return max(own) - (max(other) if both is None else both) > slots - 1


# -- who has what ------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """Another node, as it was heard last: (run, group) -> steps. Its epochs are as it counts them (starts.py)."""

    name: str
    heard: float
    have: dict[tuple[Run, str], frozenset[int]]


@dataclass
class _Group:
    """One of this node's. behind: other groups that are, and since when. Of these, apart: for a while; named: those of
    which that was said; released: for which nothing is kept any more."""

    run: Run
    steps: tuple[int, ...]
    seen: int = -1  # what it knew of the others when it last asked
    behind: dict[str, float] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)


class Common:
    """name: the node's. seconds: for which a step is kept for a group that is apart. slots: of replicas. say: events.
    now: a clock that never goes back. Any thread, but for `look`."""

    def __init__(
        self, name: str, seconds: float, slots: int, say: Callable[..., None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._seconds, self._slots, self._say, self._now = name, seconds, slots, say, now
        self._id = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._groups: dict[str, _Group] = {}
        self._nodes: dict[str, _Node] = {}
        self._version = 0  # of all that is known
        self._told = 0  # of what groups of this node have
        self.starts = Starts()

    # -- a group's thread --

    def order(self, group: str, run: Run, steps: tuple[int, ...]) -> tuple[int, ...] | None:
        """A group has these complete versions. What it is to reuse last, as of `worth`; None: as it said before."""
        mine = self._groups.get(group)
        if mine is not None and mine.seen == self._version and (mine.run, mine.steps) == (run, steps):
            return None
        with self._changed:
            if mine is None or mine.run != run:
                mine = self._groups[group] = _Group(run, ())
            if mine.steps != steps:
                mine.steps = steps
                self._bump(own=True)
            mine.seen = self._version
            others = self._others(group, run)
            return worth(steps, [have for shard, have in others.items() if shard not in mine.released])

    def number(self, coming: Coming, here: Iterable[Seen]) -> int:
        """The epoch of a start that has come. here: versions of its run in files of this node."""
        with self._changed:
            theirs = [(of[1], max(steps), self.starts.line_at(id, of) or f"at {id}")
                      for id, node in self._nodes.items() for (of, _), steps in node.have.items()
                      if of[0] == coming.run_id and steps]
            there = [Seen(epoch, step, line) for epoch, step, line in theirs if line != coming.line]
            epoch = self.starts.decide(coming, [*here, *there])
            self._bump(own=True)
            return epoch

    def gone(self, group: str) -> None:
        """A group has no versions now."""
        with self._changed:
            if self._groups.pop(group, None) is not None:
                self._bump(own=True)

    # -- other nodes: any thread --

    def hear(self, said: Steps, where: str) -> Steps:
        """What another node has, by its own account. where: words for it. Returns what this one has."""
        have = {((run_id, epoch), group): frozenset(steps) for run_id, epoch, group, steps in said.have}
        with self._changed:
            if said.node != self._id:  # one that was told its own address talks to itself
                self.starts.hear(said.node, said.have)
                before = self._nodes.pop(said.node, None)
                self._nodes[said.node] = _Node(f"{said.name} ({where})", self._now(), have)
                while len(self._nodes) > MOST_NODES:
                    del self._nodes[next(iter(self._nodes))]
                if before is None or before.have != have:
                    self._bump()
        return self.steps_now()

    def steps_now(self) -> Steps:
        with self._changed:
            have = [[*one.run, name, list(one.steps)] for name, one in self._groups.items() if one.steps]
        numbered = [[*one] for one in self.starts.said()]
        return Steps(self._id, self._name, have + numbered[: max(0, MOST_SHARES - len(have))])

    def wait(self, seen: int, seconds: float) -> int:
        """Until a group of this node has other versions than when this was `seen`, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._told != seen, seconds)
            return self._told

    def wake(self) -> None:
        """End all waits."""
        with self._changed:
            self._told += 1
            self._changed.notify_all()

    def _bump(self, own: bool = False) -> None:
        self._version += 1
        if own:
            self._told += 1
            self._changed.notify_all()

    def _others(self, group: str, run: Run) -> dict[str, set[int]]:
        """What the other groups of its run have, wherever they are followed."""
        found: dict[str, set[int]] = {}
        for name, one in self._groups.items():
            if one.run == run and one.steps:
                found.setdefault(name, set()).update(one.steps)
        for id, node in self._nodes.items():
            there = self.starts.there(id, run)
            for (of, name), steps in node.have.items():
                if of == there and steps:
                    found.setdefault(name, set()).update(steps)
        found.pop(group, None)
        return found

    # -- the main thread --

    def look(self) -> None:
        """Say who is apart, who is not any more, and which group nothing is kept for any more."""
        with self._changed:
            found = [(name, mine, self._turned(mine, others)) for name, mine in self._groups.items()
                     if (others := self._others(name, mine.run)) or mine.named]
            said = [(name, turned, self._words(mine, turned)) for name, mine, turns in found for turned in turns]
        for name, (turn, shard, step), (newest, nodes, why) in said:  # without the lock: a line may have to wait
            if turn == "group_caught_up":
                self._say("group_caught_up", name=name, shard=shard, step=step)
            elif turn == "group_behind":
                self._say("group_behind", name=name, shard=shard, step=step, newest=newest, nodes=nodes, why=why)
            else:
                why = f"it has not come on for {self._seconds:g} s: no version is kept for it any more"
                self._say("group_abandoned", name=name, shard=shard, step=step, why=why)

    def _turned(self, mine: _Group, others: Mapping[str, Collection[int]]) -> list[_Turn]:
        """What is another way than when this was asked last."""
        now = self._now()
        behind = sorted(shard for shard, have in others.items() if is_behind(mine.steps, have, self._slots))
        mine.behind = {shard: mine.behind.get(shard, now) for shard in behind}
        released = {shard for shard, since in mine.behind.items() if now - since >= self._seconds}
        mine.apart = released | {shard for shard, since in mine.behind.items() if now - since >= APART_SECONDS}
        over = sorted(mine.named - mine.apart)
        new = sorted(mine.apart - mine.named)[: MOST_NAMED - len(mine.named) + len(over)]
        gone = sorted(released - mine.released)[:MOST_NAMED]
        if released != mine.released:
            self._bump()
        mine.named, mine.released = mine.named.difference(over).union(new), released
        turns: list[_Turn] = [("group_caught_up", shard, max(others.get(shard, ()), default=None)) for shard in over]
        named = (("group_behind", new), ("group_abandoned", gone))
        return turns + [(event, shard, max(others[shard])) for event, found in named for shard in found]

    def _words(self, mine: _Group, turn: _Turn) -> tuple[int, list[str], str]:
        """Our newest step, nodes that say they follow the other group (none: it is followed here alone), and why."""
        _, shard, step = turn
        newest = max(mine.steps, default=-1)
        nodes = sorted(node.name for node in self._nodes.values() if node.have.get((mine.run, shard)))
        why = (f"step {step} of group {shard!r} is more than {self._slots - 1} behind step {newest}: the newest that"
               f" both have is kept for {self._seconds:g} s at most, and the common step is that of the rest")
        return newest, nodes, why

    def document(self) -> dict[str, dict[str, Any]]:
        """Of each group whose run has others: the newest step that all have which are not apart, how many groups there
        are, and which are apart, MOST_NAMED at most."""
        with self._changed:
            out = {}
            for name, mine in self._groups.items():
                if others := self._others(name, mine.run):
                    near = [have for shard, have in others.items() if shard not in mine.apart]
                    step = newest_common(mine.steps, near)
                    out[name] = {"step": step, "groups": 1 + len(others), "apart": sorted(mine.apart)[:MOST_NAMED]}
            return out
