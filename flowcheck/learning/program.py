"""A sequence of calls that explains a capture, and what searching for one leaves behind.

Two kinds are looked for, and only these (docs/use/learn.md):

    announced.py    PyTorch DDP: shapes, parameters, iteration 0, bucket layout, steady iterations; sizes are read
    bare.py         AllReduce calls alone; sizes are those that the messages admit, or given by hints

A chain of unrelated broadcasts could imitate any of them; that is not considered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from flowcheck.job.model import Buckets, Collective, Collectives, ModelEntry
from flowcheck.learning.walk import Mismatch, Walk

__all__ = ["Failure", "Program", "Said", "Stage", "repeat", "replayed"]

Said = tuple[str, str]  # (what was learnt, where it was learnt)


class Stage(IntEnum):
    """How far DDP's announcements were followed: they rule out other readings before any count of messages does."""

    NOTHING = 0
    GATHERED = 1  # the first calls have the sizes of DDP's, their contents are not
    SHAPES = 2  # number and shapes of the parameters were read


@dataclass
class Failure:
    """The attempt that came furthest, for the message when none explains all. where, stage: of the attempt under
    way; reached: stage and messages explained of the best one."""

    where: str = ""
    stage: Stage = Stage.NOTHING
    reached: tuple[Stage, int] = (Stage.NOTHING, -1)
    text: str = ""

    def note(self, error: Mismatch | str, progress: int = 0) -> None:
        reached = self.stage, error.progress if isinstance(error, Mismatch) else progress
        if reached > self.reached:
            self.reached, self.text = reached, f"{self.where}: {error}" if self.where else str(error)


@dataclass
class Program:
    """A learnt sequence of calls. said: what each part is and where it was learnt. iterations: how many begin in the
    capture. cut: the capture ends inside the last call, so its size is a lower bound."""

    collectives: Collectives
    dtype: str
    buckets: Buckets = field(default_factory=Buckets)
    model: list[ModelEntry] = field(default_factory=list)
    iterations: int = 0
    said: list[Said] = field(default_factory=list)
    signature: tuple = ()
    cut: bool = False

    @property
    def calls(self) -> list[Collective]:
        return [c for part in vars(self.collectives).values() for c in part]

    @property
    def algorithms(self) -> set[str]:
        """Of the AllReduce calls of which messages were seen."""
        return {c.algorithm for c in self.calls if c.op == "AllReduce" and c.algorithm}

    def called(self) -> str:
        """In one line, for a refusal that names two."""
        calls = self.collectives
        parts = []
        for name in ("startup", "iteration_0", "rebuild", "steady"):
            listed = getattr(calls, name)
            if listed:
                inside = ", ".join(f"{_named(c)} {c.count} {c.dtype}" for c in listed[:6])
                parts.append(f"{name} [{inside}{', ...' if len(listed) > 6 else ''}]")
        shapes = ", ".join("x".join(map(str, e.shape)) for e in self.model[:6])
        model = f"; parameters {shapes}{', ...' if len(self.model) > 6 else ''}" if self.model else ""
        times = f"{self.iterations} iteration{'s' * (self.iterations != 1)}"
        cut = ", whose last call the capture's end cuts" if self.cut else ""
        return f"{times}: {'; '.join(parts)}{model}{cut}"


def _named(call: Collective) -> str:
    return "tree AllReduce" if call.algorithm == "tree" else call.op


def replayed(walk: Walk, program: Program) -> bool:
    """Does this program explain everything on other wires or rings too? Moves `walk`."""
    calls = program.collectives
    try:
        for call in [*calls.startup, *calls.iteration_0]:
            walk.take(call)
        if not walk.done:
            for call in calls.rebuild:
                walk.take(call)
            repeat(walk, calls.steady)
    except Mismatch:
        return False
    return True


def repeat(walk: Walk, calls: list[Collective]) -> int:
    """Take `calls` again and again until everything is explained; how often."""
    times = 0
    while not walk.done:
        if not calls:
            raise Mismatch("messages behind the last call", walk.explained)
        for call in calls:
            walk.take(call)
        times += 1
        if times > walk.total + 1:  # a gap may hide iterations, not more than there are messages
            raise Mismatch("messages that no call explains", walk.explained)
    return times
